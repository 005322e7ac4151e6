"""The results after a task. Records of older versions are converted here, in `upgraded`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from tcil.experiments.runs.reasons import NoAnswer
from tcil.experiments.runs.records import Count, JsonObject, Number, Share, Shares, StoredRecord
from tcil.experiments.runs.results.row import CalibratorRow

VERSION = 2  # of results; in version 1 a sentence told why a calibrator has no answer


class MemorySummary(StoredRecord):
    """How much of its memory the network has memorised, by the task that an exemplar comes from."""

    count: Count
    accuracy: Share | None
    accuracy_by_task: Shares | None

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.count and (self.accuracy is None or self.accuracy_by_task is None):
            raise ValueError("accuracy of the exemplars is missing")
        return self


class TaskResult(StoredRecord):
    """Every calibrator's row after a task, and the history that the next task takes.

    Attributes
    ----------
    version : int
        Of the record; older ones are converted when they are read.
    task : int
        The number of the task, from 0.
    seen : int
        Classes seen so far.
    memory : MemorySummary or None
        How well the network knows its exemplars.
    calibrators : mapping of str to CalibratorRow
        The rows by the name of the calibrator.
    history : mapping of str to dict
        What calibrators that learn from earlier tasks pass on to the next one.
    """

    version: Number
    task: Count
    seen: Count
    memory: MemorySummary | None = None
    calibrators: Annotated[Mapping[str, CalibratorRow], Field(min_length=1)]
    history: Mapping[str, JsonObject] = {}

    @model_validator(mode="before")
    @classmethod
    def _present(cls, given: Any) -> Any:
        return upgraded(given)

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        for name, row in self.calibrators.items():
            if row.by_task is not None and len(row.by_task.accuracy) != len(row.by_task.ece):
                raise ValueError(f"by_task of {name} has lists of different lengths")
            if row.by_task is not None and len(row.by_task.accuracy) != self.task + 1:
                raise ValueError(f"by_task of {name} has not {self.task + 1} tasks")
            if row.by_class is not None and len(row.by_class.gap) != self.seen:
                raise ValueError(f"by_class of {name} has not {self.seen} classes")
            fit = row.result
            searched = name != "t-cil" or (fit is not None and (fit.drawable or not fit.reachable))
            if row.answered and not searched:
                raise ValueError("result of t-cil is missing, or the magnitude, target or trace of its search")
        if self.has("memory") and self.memory is None:
            raise ValueError("memory is null")
        known = self.memory.accuracy_by_task if self.memory is not None else None
        if known is not None and len(known) != self.task + 1:
            raise ValueError(f"memory.accuracy_by_task has not {self.task + 1} tasks")
        return self

    @property
    def tells_memory(self) -> bool:
        """Whether it says how well the network knows its exemplars."""
        return self.memory is not None and self.memory.count > 0

    def answer(self, calibrator: str) -> CalibratorRow | None:
        """A calibrator's row, if it has figures."""
        row = self.calibrators.get(calibrator)
        return row if row is not None and row.answered else None

    def with_row(self, name: str, row: CalibratorRow) -> TaskResult:
        """The same with one more row, or another in its place."""
        return self.model_copy(update={"calibrators": {**self.calibrators, name: row}})

    def renewed(self, fresh: TaskResult) -> TaskResult:
        """The same with these rows replaced or added, and their history.

        What `fresh` remembers of other calibrators is of an earlier task, and older than what this result has.
        """
        rows = {**self.calibrators, **fresh.calibrators}
        own = {name: record for name, record in fresh.history.items() if name in fresh.calibrators}
        history = {**fresh.history, **self.history, **own}
        return self.model_copy(update={**fresh.given(), "calibrators": rows, "history": history})

    def filled_from(self, other: TaskResult) -> TaskResult:
        """The same with what another copy of it has besides."""
        rows = {**other.calibrators, **self.calibrators}
        return other.model_copy(update={**self.given(), "calibrators": rows})


def upgraded(given: Any) -> Any:
    """A task's results as this version has them, whatever version wrote them. The one place that knows older forms."""
    if not isinstance(given, Mapping):
        return given
    version = given.get("version", 1)
    if type(version) is not int or not 1 <= version <= VERSION:
        raise ValueError(f"version is {version!r}, and not 1 to {VERSION}")
    rows = given.get("calibrators")
    if version == 1 and isinstance(rows, Mapping):
        return {**given, "version": VERSION, "calibrators": {name: _with_reason(row) for name, row in rows.items()}}
    return {**given, "version": VERSION}


def _with_reason(row: Any) -> Any:
    if isinstance(row, Mapping) and isinstance(sentence := row.get("not_applicable"), str):
        return {**row, "not_applicable": NoAnswer.of_sentence(sentence)}
    return row
