"""What the JSON files of a run folder hold, as types: a file of another shape is refused where it is read.

Only what some command reads is described; files may hold more. What is described is checked and handed on as it is.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError, model_validator

from tcil.calibration.checksums import Damaged
from tcil.calibration.options import Verdict
from tcil.calibration.perturbation import DirectionPolicy
from tcil.incremental.placement import Layout

_SLACK = 1e-6  # of figures that are sums of rounded ones
Share = Annotated[float, Field(ge=-_SLACK, le=1 + _SLACK)]
Difference = Annotated[float, Field(ge=-1 - _SLACK, le=1 + _SLACK)]
Amount = Annotated[float, Field(ge=0, le=1e100)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Pair = Annotated[list[float], Field(min_length=2, max_length=2)]


class _Record(BaseModel):
    """A JSON object; strings are no numbers, and there are no infinities."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())


class _Bins(_Record):
    count: Annotated[list[Count], Field(min_length=10, max_length=10)]
    confidence: Annotated[list[Share | None], Field(min_length=10, max_length=10)]
    accuracy: Annotated[list[Share | None], Field(min_length=10, max_length=10)]


class _ByTask(_Record):
    accuracy: list[Share | None]
    ece: list[Share | None]
    gap: list[Difference | None]


class _ByClass(_Record):
    accuracy: list[Share | None]
    gap: list[Difference | None]


class _Step(_Record):
    magnitude: Amount
    temperature: Amount | str  # "inf"

    @model_validator(mode="after")
    def _number(self) -> Self:
        if isinstance(self.temperature, str):
            float(self.temperature)
        return self


class _Fit(_Record):
    """What a calibrator says of its fit, as far as tables and pictures read it."""

    verdict: str = "ok"
    verdicts: list[str] = []
    magnitude: Amount | None = None
    reachable: bool = False
    target_temperature: Amount | None = None
    trace: list[_Step] = []

    @model_validator(mode="after")
    def _known(self) -> Self:
        for name in (self.verdict, *self.verdicts):
            Verdict.parse(name, "verdict")
        if "verdicts" in self.model_fields_set and not self.verdicts and "verdict" not in self.model_fields_set:
            raise ValueError("verdicts is empty")
        return self

    @property
    def drawable(self) -> bool:
        """Whether a search that met its target can be shown."""
        found = self.magnitude is not None and self.target_temperature is not None
        return found and any(isinstance(step.temperature, float) for step in self.trace)


class _Row(_Record):
    """A calibrator after a task: its figures, or why there are none. Older rows have no bins, and no more than that."""

    title: str
    block: str
    not_applicable: str | None = None
    accuracy: Share | None = None
    ece: Share | None = None
    aece: Share | None = None
    noise_floor: Share | None = None
    ece_predicted_old: Share | None = None
    ece_predicted_new: Share | None = None
    ece_interval: Pair | None = None
    temperature: Amount | None = None
    temperature_interval: Pair | None = None
    result: _Fit | None = None
    by_task: _ByTask | None = None
    by_class: _ByClass | None = None
    bins: _Bins | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        given = self.model_fields_set
        if "not_applicable" in given:
            if self.not_applicable is None:
                raise ValueError("not_applicable is null, and no reason")
            return self
        for name in ("accuracy", "ece", "aece", "noise_floor"):
            if getattr(self, name) is None:
                raise ValueError(f"{name} is missing")
        for name in ("ece_predicted_old", "ece_predicted_new"):
            if name not in given:
                raise ValueError(f"{name} is missing")
        if "bins" in given and (self.bins is None or self.by_task is None or self.by_class is None):
            raise ValueError("bins, by_task and by_class belong together, and one is missing")
        if "temperature" in given and self.result is None:
            raise ValueError("result is missing beside the temperature")
        return self


class _Memory(_Record):
    count: Count
    accuracy: Share | None
    accuracy_by_task: list[Share | None] | None

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.count and (self.accuracy is None or self.accuracy_by_task is None):
            raise ValueError("accuracy of the exemplars is missing")
        return self


class _TaskResults(_Record):
    task: Count
    seen: Count
    memory: _Memory | None = None
    calibrators: Annotated[dict[str, _Row], Field(min_length=1)]
    history: dict[str, dict[str, Any]] = {}

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        for name, row in self.calibrators.items():
            if row.by_task is not None and len({len(v) for v in (row.by_task.accuracy, row.by_task.ece)}) > 1:
                raise ValueError(f"by_task of {name} has lists of different lengths")
            if row.by_task is not None and len(row.by_task.accuracy) != self.task + 1:
                raise ValueError(f"by_task of {name} has not {self.task + 1} tasks")
            if row.by_class is not None and len(row.by_class.gap) != self.seen:
                raise ValueError(f"by_class of {name} has not {self.seen} classes")
            fit = row.result
            searched = name != "t-cil" or (fit is not None and (fit.drawable or not fit.reachable))
            if row.not_applicable is None and not searched:
                raise ValueError("result of t-cil is missing, or the magnitude, target or trace of its search")
        if "memory" in self.model_fields_set and self.memory is None:
            raise ValueError("memory is null")
        memory = self.memory.accuracy_by_task if self.memory is not None else None
        if memory is not None and len(memory) != self.task + 1:
            raise ValueError(f"memory.accuracy_by_task has not {self.task + 1} tasks")
        return self


class _Settings(_Record):
    """Settings as tables name them; whether they are those of a training is for RunSettings to tell."""

    dataset: str
    learner: str
    seed: Number = 0
    classes: Count | None = None
    memory: Count | None = None
    validation: Count | None = None
    validation_pool: Count | None = None
    epochs: Count | None = None
    reserve: Share | None = None
    tasks: Any = None
    imported: bool = False

    @property
    def n_tasks(self) -> int | None:
        """How many tasks they ask for."""
        if isinstance(self.tasks, list):
            return len(self.tasks)
        return self.tasks if isinstance(self.tasks, int) else None


class _Environment(_Record):
    threads: Annotated[int, Field(ge=1, le=2**20)] | None = None
    layout: str = str(Layout.CHANNELS_LAST)
    seconds: dict[str, dict[str, Amount]] = {}

    @model_validator(mode="after")
    def _usable(self) -> Self:
        Layout.parse(self.layout, "layout")
        if "threads" in self.model_fields_set and self.threads is None:
            raise ValueError("threads is null")
        return self


class _OldAndNew(_Record):
    old: Share | None
    new: Share


class _Curve(_Record):
    magnitudes: list[Amount]
    temperatures: list[Amount | None]


class _Gap(_Record):
    gap: Amount | None


class _AnalysedTask(_Record):
    task: Count
    magnitude: Amount | None
    accuracy: _OldAndNew
    epsilon: dict[str, _Gap]
    misprediction: _OldAndNew | None = None
    curve: _Curve | None = None

    @model_validator(mode="after")
    def _usable(self) -> Self:
        for name in ("misprediction", "curve"):
            if name in self.model_fields_set and getattr(self, name) is None:
                raise ValueError(f"{name} is null")
        if missing := [str(policy) for policy in DirectionPolicy if str(policy) not in self.epsilon]:
            raise ValueError(f"epsilon of {', '.join(missing)} is missing")
        return self


class _Cost(_Record):
    memory: Annotated[list[Annotated[float, Field(gt=0, le=1e100)]], Field(min_length=2)]
    seconds: Annotated[list[Annotated[float, Field(gt=0, le=1e100)]], Field(min_length=2)]


class _Projection(_Record):
    columns: Annotated[list[Count], Field(min_length=1)]
    new_from: Count
    before: list[Pair]
    after: list[Pair]

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        if not len(self.columns) == len(self.before) == len(self.after):
            raise ValueError("columns, before and after have different lengths")
        return self


class _Analysis(_Record):
    format: Number
    tasks: Annotated[list[_AnalysedTask], Field(min_length=1)]
    cost: _Cost
    projection: _Projection | None


class _Results(_Record):
    settings: _Settings
    tasks: Annotated[list[_TaskResults], Field(min_length=1)]
    environment: _Environment | None = None
    analysis: _Analysis | None = None
    data: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _as_many(self) -> Self:
        if self.settings.n_tasks not in (None, len(self.tasks)):
            raise ValueError(f"tasks has {len(self.tasks)} entries; its settings ask for {self.settings.n_tasks}")
        if [task.task for task in self.tasks] != list(range(len(self.tasks))):
            raise ValueError("tasks are not numbered from 0")
        if self.analysis is not None and len(self.analysis.tasks) != len(self.tasks):
            raise ValueError("analysis has another number of tasks")
        return self


class _Draws(RootModel[dict[str, list[Share]]]):
    """What `tcil calibrate --redraw` leaves: errors by calibrator."""


class _Object(_Record):
    """Any JSON object."""


_IN_RUN: dict[str, type[BaseModel]] = {
    "settings.json": _Settings,
    "environment.json": _Environment,
    "results.json": _Results,
    "analysis.json": _Analysis,
    "redraw.json": _Draws,
}
_IN_TASK: dict[str, type[BaseModel]] = {"results.json": _TaskResults, "analysis.json": _AnalysedTask}


def check(file: str | PurePath, record: object) -> None:
    """Whether a record has the shape of that file of a run folder, or of a task in it; `Damaged` names the field.

    >>> check("task-00/results.json", {"task": "0", "seen": 2, "calibrators": {}})
    Traceback (most recent call last):
    tcil.calibration.checksums.Damaged: task: got '0'; input should be a valid integer (and 1 more)
    """
    place = PurePath(file)
    kinds = _IN_TASK if re.fullmatch(r"task-\d+", place.parent.name) else _IN_RUN
    try:
        kinds.get(place.name, _Object).model_validate(record)
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
