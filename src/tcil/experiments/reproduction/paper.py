"""The paper's printed numbers (Hwang, Kim and Whang, CVPR 2025), to set beside ours; all in percent."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from tcil.foundation.errors import invalid, unknown_name

METRICS = ("accuracy", "ece", "aece")
DATASETS = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "tiny-imagenet": "Tiny-ImageNet"}
BASELINES = ("ts", "ets", "irm", "perturb-ts")  # besides vanilla
CALIBRATORS = (
    "vanilla",
    *BASELINES,
    "t-cil",
    "exemplar-ts",
    "optimal-ts",
)  # all that it tells of
MEMORY_SIZES = {"cifar100": (500, 1000, 1500, 2000), "tiny-imagenet": (1000, 2000, 3000, 4000)}
VALIDATION_SIZES = (100, 300, 500, 700, 1000)

Printed = tuple[float, float]  # mean and standard deviation over the paper's seeds
Value = TypeVar("Value")
Fixed = Annotated[Mapping[str, Value], AfterValidator(MappingProxyType)]  # nobody changes what the paper says
Numbers = Fixed[int | float | tuple[int | float, ...]]


class _Part(BaseModel):
    """A part of paper.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PaperRow(_Part):
    """One line of a table on one dataset: mean and standard deviation of each metric printed, None where it is n/a.

    `validation` counts the new task's validation images; vanilla rows are trained on all the data and have None.
    """

    table: str
    dataset: str
    learner: str
    calibrator: str
    tasks: int
    validation: int | None
    metrics: Fixed[Printed | None]

    @model_validator(mode="before")
    @classmethod
    def _gathered(cls, entry: dict[str, object]) -> dict[str, object]:
        printed = {name: entry[name] for name in METRICS if name in entry}
        return {**{name: value for name, value in entry.items() if name not in METRICS}, "metrics": printed}


class RowKey(_Part):
    """Where a number stands: what `find` takes."""

    table: str
    dataset: str
    learner: str
    calibrator: str

    def find(self) -> PaperRow | None:
        """The row."""
        return find(self.table, dataset=self.dataset, learner=self.learner, calibrator=self.calibrator)


class Comparison(_Part):
    """Two rows whose difference a claim is about."""

    metric: str
    start: RowKey = Field(alias="from")
    end: RowKey = Field(alias="to")

    @property
    def reduction(self) -> float:
        """By how many percent the metric is lower in the second, worked out from the printed rows."""
        before, after = (row.metrics[self.metric] for key in (self.start, self.end) if (row := key.find()) is not None)
        assert before is not None
        assert after is not None
        return 100 * (1 - after[0] / before[0])


class Claim(_Part):
    """What the text says, where, and the numbers that it prints (`printed`, as words); `derived` is what we computed.

    `compared` are the rows that a reduction is about; `reproduced_by` others that give the number printed.
    """

    text: str
    where: str
    values: Numbers
    printed: str | None = None
    derived: Numbers | None = None
    compared: Comparison | None = None
    reproduced_by: Comparison | None = None

    @property
    def reduction(self) -> float:
        """The percentage that a claim on a reduction prints."""
        value = self.values["reduction"]
        assert not isinstance(value, tuple)
        return float(value)


class Contradiction(_Part):
    """Where the paper disagrees with itself or its code, and the tables and claims that it is about."""

    about: tuple[str, ...]
    text: str


class _Document(_Part):
    tables: tuple[PaperRow, ...]
    claims: Fixed[Claim]
    contradictions: tuple[Contradiction, ...]


def rows(table: str | None = None) -> list[PaperRow]:
    """The rows of a table in the paper's order, or of all.

    >>> len(rows("baselines")), len(rows())
    (18, 139)
    """
    names = dict.fromkeys(row.table for row in _document().tables)
    if table is not None and table not in names:
        raise unknown_name("table", table, names)
    return [row for row in _document().tables if table in (None, row.table)]


def find(
    table: str,
    *,
    dataset: str,
    learner: str,
    calibrator: str,
    tasks: int | None = None,
    validation: int | None = None,
) -> PaperRow | None:
    """The one row that answers; None where the paper has none. Tasks and validation matter only where given.

    >>> find("grid", dataset="cifar100", learner="er", calibrator="t-cil").metrics["ece"]
    (5.74, 0.53)
    """
    matching = [
        row
        for row in rows(table)
        if (row.dataset, row.learner, row.calibrator) == (dataset, learner, calibrator)
        and tasks in (None, row.tasks)
        and validation in (None, row.validation)
    ]
    if len(matching) > 1:
        sizes = ", ".join(str(row.validation) for row in matching)
        raise invalid("validation", repr(validation), f"one of {sizes}", f"{table!r} has a row for each.")
    return matching[0] if matching else None


def claims() -> Mapping[str, Claim]:
    """What the text says, by the name that we give it.

    >>> claims()["reduction_cifar100"].reduction
    65.2
    """
    return _document().claims


def contradictions() -> list[str]:
    """Where the paper disagrees with its own tables, or with its public code. Lines are those of its LaTeX source."""
    return [one.text for one in _document().contradictions]


def footnotes(about: str) -> dict[int, str]:
    """The contradictions in a table on one dataset (`table:dataset`), or in a claim, by their number in the list.

    >>> footnotes("compatibility:cifar100")[4][:43]
    "DER 'exhibits the highest calibration error"
    """
    numbered = enumerate(_document().contradictions, start=1)
    return {number: one.text for number, one in numbered if about in one.about}


@cache
def _document() -> _Document:
    return _Document.model_validate_json(files(__package__).joinpath("paper.json").read_text(encoding="utf-8"))
