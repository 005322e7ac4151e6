"""The paper's printed figures (Hwang, Kim and Whang, CVPR 2025), to set beside ours; all in percent."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from tcil.calibration.errors import invalid, unknown_name

FIGURES = ("accuracy", "ece", "aece")
DATASETS = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "tiny-imagenet": "Tiny-ImageNet"}
POLICIES = {
    "paper": "T-CIL", "random": "random class", "closest": "closest class only", "farthest": "farthest class only"
}  # fmt: skip
MEMORY_SIZES = {"cifar100": (500, 1000, 1500, 2000), "tiny-imagenet": (1000, 2000, 3000, 4000)}
VALIDATION_SIZES = (100, 300, 500, 700, 1000)


@dataclass(frozen=True)
class PaperRow:
    """One line of a table on one dataset: mean and standard deviation of each figure printed, None where it is n/a.

    `validation` counts the new task's validation images; vanilla rows are trained on all the data and have None.
    """

    table: str
    dataset: str
    learner: str
    calibrator: str
    tasks: int
    validation: int | None
    figures: dict[str, tuple[float, float] | None]


def rows(table: str | None = None) -> list[PaperRow]:
    """The rows of a table in the paper's order, or of all.

    >>> len(rows("baselines")), len(rows())
    (18, 139)
    """
    known = dict.fromkeys(row.table for row in _rows())
    if table is not None and table not in known:
        raise unknown_name("table", table, known)
    return [row for row in _rows() if table in (None, row.table)]


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

    >>> find("grid", dataset="cifar100", learner="er", calibrator="t-cil").figures["ece"]
    (5.74, 0.53)
    """
    found = [
        row
        for row in rows(table)
        if (row.dataset, row.learner, row.calibrator) == (dataset, learner, calibrator)
        and tasks in (None, row.tasks)
        and validation in (None, row.validation)
    ]
    if len(found) > 1:
        sizes = ", ".join(str(row.validation) for row in found)
        raise invalid("validation", repr(validation), f"one of {sizes}", f"{table!r} has a row for each.")
    return found[0] if found else None


def claims() -> dict[str, dict[str, Any]]:
    """What the text says: `text`, `where`, the `values` it prints (`printed`, as words); `derived` is what we computed.

    >>> claims()["reduction_cifar100"]["values"]
    {'reduction': 65.2}
    """
    return copy.deepcopy(_document()["claims"])


def contradictions() -> list[str]:
    """Where the paper disagrees with its own tables, or with its public code. Lines are those of its LaTeX source."""
    return [one["text"] for one in _document()["contradictions"]]


def footnotes(about: str) -> dict[int, str]:
    """The contradictions in a table on one dataset (`table:dataset`), or in a claim, by their number in the list.

    >>> footnotes("compatibility:cifar100")[4][:43]
    "DER 'exhibits the highest calibration error"
    """
    numbered = enumerate(_document()["contradictions"], start=1)
    return {number: one["text"] for number, one in numbered if about in one["about"]}


@cache
def _document() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(files(__package__).joinpath("paper.json").read_text(encoding="utf-8"))
    return document


@cache
def _rows() -> tuple[PaperRow, ...]:
    return tuple(
        PaperRow(
            **{key: value for key, value in entry.items() if key not in FIGURES},
            figures={key: None if entry[key] is None else tuple(entry[key]) for key in FIGURES if key in entry},
        )
        for entry in _document()["tables"]
    )
