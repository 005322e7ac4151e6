"""What all records of a run folder have in common: frozen, typed, checked where they are read. Nothing needs torch."""

from __future__ import annotations

import math
from typing import Annotated, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    ValidationError,
)

from tcil.foundation.checksums import Damaged

Kind = TypeVar("Kind", bound=BaseModel)
_SLACK, _MOST = 1e-6, 1e100  # of figures that are sums of rounded ones; of any figure


def _unbounded(value: object) -> object:
    """JSON has no infinity, so that one is written as text."""
    return math.inf if value == "inf" else value


def _at_most(value: float) -> float:
    if _MOST < value < math.inf:
        raise ValueError(f"{value} is larger than {_MOST:g}")
    return value


def _as_text(value: float) -> float | str:
    return "inf" if value == math.inf else value


JsonObject = dict[str, JsonValue]
Share = Annotated[float, Field(ge=-_SLACK, le=1 + _SLACK)]
Difference = Annotated[float, Field(ge=-1 - _SLACK, le=1 + _SLACK)]
Amount = Annotated[float, Field(ge=0, le=_MOST)]
Positive = Annotated[float, Field(gt=0, le=_MOST)]
Limit = Annotated[  # an amount, or infinity
    float,
    Field(ge=0, allow_inf_nan=True),
    BeforeValidator(_unbounded),
    AfterValidator(_at_most),
    PlainSerializer(_as_text, when_used="json"),
]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Pair = Annotated[tuple[float, float], Field(strict=False)]
Shares = Annotated[tuple[Share | None, ...], Field(strict=False)]


class StoredRecord(BaseModel):
    """A JSON object; strings are no numbers, and there are no infinities."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())
    __pydantic_extra__: JsonObject = Field(init=False)

    def record(self) -> JsonObject:
        """As it is written: what was given, and nothing else."""
        return self.model_dump(mode="json", exclude_unset=True)

    def has(self, field: str) -> bool:
        """Whether the field was given, if only as null."""
        return field in self.model_fields_set

    def given(self) -> dict[str, object]:
        """What was given, by field; not the defaults."""
        return {name: getattr(self, name) for name in self.model_fields_set}


def parse(kind: type[Kind], record: object) -> Kind:
    """A record of this kind; `Damaged` names the first invalid field.

    >>> from tcil.experiments.runs.results import TaskResult
    >>> parse(TaskResult, {"task": "0", "seen": 2, "calibrators": {}})
    Traceback (most recent call last):
    tcil.foundation.checksums.Damaged: task: got '0'; input should be a valid integer (and 1 more)
    """
    try:
        return kind.model_validate(record)
    except ValidationError as error:
        first, *more = error.errors()
        said = first["msg"].removeprefix("Value error, ")
        where = _field(first["loc"])
        got = f"got {first['input']!r:.60}; " if first["type"] != "value_error" else ""
        count = f" (and {len(more)} more)" if more else ""
        raise Damaged(f"{where}: {got}{said[0].lower()}{said[1:]}{count}") from None


def _field(path: tuple[int | str, ...]) -> str:
    """Where in the file: tasks[0].calibrators.ts.ece."""
    said = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return said.removeprefix(".") or "the whole file"


def rounded(value: float | None) -> float | None:
    """A number as results keep it: five digits after the point, None where there is none."""
    return None if value is None or math.isnan(value) else round(float(value), 5)
