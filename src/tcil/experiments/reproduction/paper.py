"""The paper's printed numbers (Hwang, Kim and Whang, CVPR 2025), for comparison with ours; all in percent."""

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
)  # all calibrators of the paper
MEMORY_SIZES = {"cifar100": (500, 1000, 1500, 2000), "tiny-imagenet": (1000, 2000, 3000, 4000)}
VALIDATION_SIZES = (100, 300, 500, 700, 1000)

Printed = tuple[float, float]  # mean and standard deviation over the paper's seeds
Value = TypeVar("Value")
Fixed = Annotated[Mapping[str, Value], AfterValidator(MappingProxyType)]  # read-only
Numbers = Fixed[int | float | tuple[int | float, ...]]


class _Part(BaseModel):
    """A part of paper.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PaperRow(_Part):
    """One row of a table for one dataset: mean and standard deviation of each printed metric, None for n/a.

    `validation` is the number of validation images of the new task; None for vanilla, which is trained on all the data.
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
    """The position of a number: the arguments of `find`."""

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
        """The reduction of the metric from the first row to the second, in percent, from the printed rows."""
        before, after = (row.metrics[self.metric] for key in (self.start, self.end) if (row := key.find()) is not None)
        assert before is not None
        assert after is not None
        return 100 * (1 - after[0] / before[0])


class Claim(_Part):
    """A statement of the text, its location, and its numbers (`printed`: as text); `derived` are numbers we computed.

    `compared` are the rows that a reduction is about; `reproduced_by` are other rows that give the printed number.
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
    """A contradiction in the paper or with its code, and the tables and claims that it concerns."""

    about: tuple[str, ...]
    text: str


class _Document(_Part):
    tables: tuple[PaperRow, ...]
    claims: Fixed[Claim]
    contradictions: tuple[Contradiction, ...]


def rows(table: str | None = None) -> list[PaperRow]:
    """The rows of a table, or of all tables, in the paper's order.

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
    """The row with these properties; None if the paper has none. `tasks` and `validation` are optional.

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
    """The claims of the text, by a name of ours.

    >>> claims()["reduction_cifar100"].reduction
    65.2
    """
    return _document().claims


def contradictions() -> list[str]:
    """Contradictions between the paper's text, its tables and its public code. Lines are those of its LaTeX source."""
    return [one.text for one in _document().contradictions]


def footnotes(about: str) -> dict[int, str]:
    """The contradictions in a table for one dataset (`table:dataset`), or in a claim, by their number in the list.

    >>> footnotes("compatibility:cifar100")[4][:43]
    "DER 'exhibits the highest calibration error"
    """
    numbered = enumerate(_document().contradictions, start=1)
    return {number: one.text for number, one in numbered if about in one.about}


@cache
def _document() -> _Document:
    return _Document.model_validate_json(files(__package__).joinpath("paper.json").read_text(encoding="utf-8"))
