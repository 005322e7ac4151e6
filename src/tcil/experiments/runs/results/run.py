"""The results of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from tcil.experiments.runs.analysed import Analysis
from tcil.experiments.runs.records import Count, Number, StoredRecord
from tcil.experiments.runs.results.about import DataNote, Environment, StoredSettings
from tcil.experiments.runs.results.task import VERSION, TaskResult, upgraded


def first_task(metric: str) -> int:
    """The first task after which a metric can have a value: in task 0 no class is old.

    >>> first_task("ece"), first_task("ece_predicted_old")
    (0, 1)
    """
    return 1 if metric == "ece_predicted_old" else 0


class RunResult(StoredRecord):
    """The results of a run.

    Attributes
    ----------
    version : int
        Of the record; older ones are converted when they are read.
    settings : StoredSettings
        What defines the run.
    key : str or None
        The hash of the settings.
    learner_title : str or None
        What tables call the learner; None in older results.
    until : int or None
        The number of tasks, where the run has not been taken to its last one.
    tasks : tuple of TaskResult
        The results after each task.
    environment : Environment or None
        What it was computed with; in kept copies only, since a run folder has a file of its own for it.
    analysis : Analysis or None
        What the paper's figures need beyond the tables; in kept copies only.
    data : DataNote or None
        What tells its images (or imported logits) from others; None in the copies of early versions.
    """

    version: Number
    settings: StoredSettings
    key: str | None = None
    learner_title: str | None = None
    until: Count | None = None
    tasks: Annotated[tuple[TaskResult, ...], Field(strict=False, min_length=1)]
    environment: Environment | None = None
    analysis: Analysis | None = None
    data: DataNote | None = None

    @model_validator(mode="before")
    @classmethod
    def _present(cls, given: Any) -> Any:
        return upgraded(given)

    @model_validator(mode="after")
    def _as_many(self) -> Self:
        asked = self.settings.n_tasks
        if self.until is not None and (asked is None or self.until >= asked):
            raise ValueError(f"until is {self.until}; its settings ask for {asked} tasks")
        if (self.until or asked) not in (None, len(self.tasks)):
            said = f"its settings ask for {asked}" if self.until is None else f"until says {self.until}"
            raise ValueError(f"tasks has {len(self.tasks)} entries; {said}")
        if [task.task for task in self.tasks] != list(range(len(self.tasks))):
            raise ValueError("tasks are not numbered from 0")
        if self.analysis is not None and len(self.analysis.tasks) != len(self.tasks):
            raise ValueError("analysis has another number of tasks")
        return self

    @classmethod
    def of_tasks(
        cls,
        settings: StoredSettings,
        tasks: Sequence[TaskResult],
        partial: bool,
        key: str | None = None,
        learner_title: str | None = None,
    ) -> Self:
        """The results of these tasks; `partial` where the run has more."""
        more = {"key": key, "learner_title": learner_title, "until": len(tasks) if partial else None}
        given = {name: value for name, value in more.items() if value is not None}
        return cls.model_validate({"version": VERSION, "settings": settings, "tasks": tuple(tasks), **given})

    def values(self, calibrator: str, metric: str) -> list[float | None]:
        """A metric by task."""
        rows = [task.answer(calibrator) for task in self.tasks]
        return [None if row is None else row.metric(metric) for row in rows]

    def tasks_with(self, calibrator: str, metric: str) -> tuple[int, int]:
        """After how many tasks a metric has a value, and after how many it could have one."""
        values = self.values(calibrator, metric)[first_task(metric) :]
        return sum(value is not None for value in values), len(values)

    def mean(self, calibrator: str, metric: str) -> float | None:
        """The mean over the tasks that have a value; None where the calibrator has no answer after some task.

        Where tasks lack a value, such as after a task in which no image was predicted as an old class, `tasks_with`
        says how many, and tables mark the mean.
        """
        rows = [task.answer(calibrator) for task in self.tasks]
        if any(row is None for row in rows):
            return None
        values = [value for row in rows if row is not None and (value := row.metric(metric)) is not None]
        return sum(values) / len(values) if values else None

    @property
    def tasks_told(self) -> str:
        """How many tasks there are, or which of them the run has been taken to."""
        there = len(self.tasks)
        return f"{there} tasks" if self.until is None else f"tasks 0 to {there - 1} of {self.settings.n_tasks}"

    def with_tasks(self, tasks: Sequence[TaskResult]) -> RunResult:
        """The same run with these results of its tasks."""
        return self.model_copy(update={"tasks": tuple(tasks)})
