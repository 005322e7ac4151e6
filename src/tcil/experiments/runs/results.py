"""What a run leaves, as types: frozen records, checked where they are read, and versioned.

Fields that are not described here are kept, and written again. Records of older versions are converted in one place,
`_upgraded`. Nothing here needs torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, RootModel, model_validator

from tcil.experiments.config.settings import DATA_OPTIONS, FORMAT, RunSettings, stored_key
from tcil.experiments.runs.analysed import AnalysedTask, Analysis
from tcil.experiments.runs.reasons import NoAnswer
from tcil.experiments.runs.records import (
    Amount,
    Count,
    Difference,
    JsonObject,
    Limit,
    Number,
    Pair,
    Share,
    Shares,
    StoredRecord,
)
from tcil.foundation.options import Verdict
from tcil.incremental.data.layout import Layout

VERSION = 2  # of results; in version 1 a sentence told why a calibrator has no answer
RANKED, WITH_OPTIONS = "ranked", "with other options"  # blocks of a table; others stand below them
ALL, OLD, NEW = "all", "old", "new"  # images by their predicted or true class
COVERAGES = tuple(tenth / 10 for tenth in range(1, 11))
Differences = Annotated[tuple[Difference | None, ...], Field(strict=False)]
TenShares = Annotated[tuple[Share | None, ...], Field(strict=False, min_length=10, max_length=10)]
TenCounts = Annotated[tuple[Count, ...], Field(strict=False, min_length=10, max_length=10)]
KnownVerdict = Annotated[Verdict, BeforeValidator(lambda value: Verdict.parse(value, "verdict"))]
KnownLayout = Annotated[Layout, BeforeValidator(lambda value: Layout.parse(value, "layout"))]

# One calibrator after one task -------------------------------------------------------------------------------


class Bins(StoredRecord):
    """A reliability diagram: samples, mean confidence and accuracy of ten bins of equal width."""

    count: TenCounts
    confidence: TenShares
    accuracy: TenShares


class ByTask(StoredRecord):
    """Figures by the task that a sample comes from."""

    accuracy: Shares
    ece: Shares
    gap: Differences


class ByClass(StoredRecord):
    """Figures by class, in the order of the logit columns."""

    accuracy: Shares
    gap: Differences


class TraceStep(StoredRecord):
    """A magnitude that a search tried, and the temperature that it found there."""

    magnitude: Amount
    temperature: Limit


class NoiseLevel(StoredRecord):
    """A level of accuracy that PerturbTS tries to reach by noise, and whether it did."""

    reachable: bool


class FitSummary(StoredRecord):
    """What a calibrator says of its fit, as far as tables and pictures read it; the rest is kept."""

    verdict: KnownVerdict = Verdict.OK
    verdicts: Annotated[tuple[KnownVerdict, ...], Field(strict=False)] = ()
    magnitude: Amount | None = None
    reachable: bool = False
    target_temperature: Amount | None = None
    trace: Annotated[tuple[TraceStep, ...], Field(strict=False)] = ()
    levels: Annotated[tuple[NoiseLevel, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.has("verdicts") and not self.verdicts and not self.has("verdict"):
            raise ValueError("verdicts is empty")
        return self

    @property
    def all_verdicts(self) -> tuple[Verdict, ...]:
        """One or several, as the calibrator has them."""
        return self.verdicts or ((self.verdict,) if self.has("verdict") else ())

    @property
    def drawable(self) -> bool:
        """Whether a search that met its target can be shown."""
        found = self.magnitude is not None and self.target_temperature is not None
        return found and any(math.isfinite(step.temperature) for step in self.trace)


class RiskFigure(StoredRecord):
    """A threshold: the risk that it promises, and what it achieves on the test images.

    `group` is the predicted one. `threshold` is None where nothing can be accepted; `begins_at` then says from how many
    images of each group on a promise can exist.
    """

    kind: str
    group: str
    promised: Share
    threshold: Amount | None
    achieved: Share | None
    coverage: Share | None
    coverage_old: Share | None = None
    coverage_new: Share | None = None
    begins_at: Count | None = None


class SetFigure(StoredRecord):
    """Prediction sets: the coverage that they promise, what they achieve for a true group, and their mean size."""

    kind: str
    group: str
    promised: Share
    achieved: Share | None
    size: Amount


class DecisionFigures(StoredRecord):
    """What a calibrator is worth for decisions, on the test images.

    `risk_by_coverage` has the error among the most confident 10, 20, ... 100 % of all images, and of those predicted as
    old and as new.
    """

    risk_by_coverage: Mapping[str, TenShares]
    risks: Annotated[tuple[RiskFigure, ...], Field(strict=False)]
    sets: Annotated[tuple[SetFigure, ...], Field(strict=False)]

    def figure(self, name: str) -> float | None:
        """A figure by its path, such as "risks/model_based/old/0.1/achieved" or "sets/finite_sample/new/size"."""
        part, kind, group, *rest = name.split("/")
        if part == "sets":
            sets = [found for found in self.sets if (found.kind, found.group) == (kind, group)]
            return getattr(sets[0], rest[0]) if sets else None
        promised = float(rest[0])
        risks = [r for r in self.risks if (r.kind, r.group, r.promised) == (kind, group, promised)]
        return getattr(risks[0], rest[1]) if risks else None


class CalibratorRow(StoredRecord):
    """A calibrator after a task: its figures, or why there are none.

    Figures are of the test images of all classes seen. Those that a row lacks are None: rows of older versions lack
    what was added later, such as the bins.

    Attributes
    ----------
    title, block : str
        What tables call it, and the block that it stands in.
    not_applicable : NoAnswer or None
        Why there are no figures; None where there are.
    accuracy, ece, aece, gap, classwise_ece, nll, brier, aurc : float or None
        The metrics of `tcil.metrics`; `gap` is confidence minus accuracy. `nll` is None where it is infinite.
    noise_floor, noise_ceiling : float or None
        The ECE that these probabilities would have by chance if they were calibrated: its mean, and what it
        stays below 95 times in 100.
    ece_interval : pair of float or None
        The 95 % bootstrap interval of the ECE.
    ece_predicted_old, ece_predicted_new : float or None
        The ECE of images predicted as old and as new classes; None where there is no such image.
    by_task : ByTask or None
        Figures by the task that an image comes from.
    by_class : ByClass or None
        Figures by class.
    bins, bins_predicted_old, bins_predicted_new : Bins or None
        Reliability diagrams.
    decisions : DecisionFigures or None
        Thresholds and prediction sets.
    temperature : float or None
        Of calibrators that have one.
    temperature_interval : pair of float or None
        The interval of the temperature, if the calibrator has one.
    result : FitSummary or None
        What the fit returned; None for the network as trained.
    """

    title: str
    block: str
    not_applicable: NoAnswer | None = None
    accuracy: Share | None = None
    ece: Share | None = None
    aece: Share | None = None
    gap: Difference | None = None
    classwise_ece: Amount | None = None
    nll: float | None = None
    brier: Amount | None = None
    aurc: Share | None = None
    noise_floor: Share | None = None
    noise_ceiling: Share | None = None
    ece_interval: Pair | None = None
    ece_predicted_old: Share | None = None
    ece_predicted_new: Share | None = None
    by_task: ByTask | None = None
    by_class: ByClass | None = None
    bins: Bins | None = None
    bins_predicted_old: Bins | None = None
    bins_predicted_new: Bins | None = None
    decisions: DecisionFigures | None = None
    temperature: Amount | None = None
    temperature_interval: Pair | None = None
    result: FitSummary | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.has("not_applicable"):
            if self.not_applicable is None:
                raise ValueError("not_applicable is null, and no reason")
            return self
        for name in ("accuracy", "ece", "aece", "noise_floor"):
            if getattr(self, name) is None:
                raise ValueError(f"{name} is missing")
        for name in ("ece_predicted_old", "ece_predicted_new"):
            if not self.has(name):
                raise ValueError(f"{name} is missing")
        if self.has("bins") and (self.bins is None or self.by_task is None or self.by_class is None):
            raise ValueError("bins, by_task and by_class belong together, and one is missing")
        if self.has("temperature") and self.result is None:
            raise ValueError("result is missing beside the temperature")
        return self

    @property
    def answered(self) -> bool:
        """Whether it has figures."""
        return self.not_applicable is None

    @property
    def up_to_date(self) -> bool:
        """Whether it has everything that this version computes."""
        return not self.answered or self.bins is not None

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The verdicts of the fit."""
        return self.result.all_verdicts if self.result is not None else ()

    def metric(self, name: str) -> float | None:
        """A metric by its name, such as "ece"; those of decisions by their path."""
        if "/" in name:
            return None if self.decisions is None else self.decisions.figure(name)
        value: float | None = getattr(self, name)
        return value

    def interval(self, name: str) -> tuple[float, float] | None:
        """The bootstrap interval of a metric, if it has one."""
        return {"ece": self.ece_interval, "temperature": self.temperature_interval}.get(name)

    def diagram(self, group: str) -> Bins | None:
        """The reliability diagram of "all" images, or of those predicted as "old" or "new" classes, if it has one."""
        return {"all": self.bins, "old": self.bins_predicted_old, "new": self.bins_predicted_new}[group]

    def titled(self, title: str) -> CalibratorRow:
        """The same figures under another title."""
        return self.model_copy(update={"title": title})


# One task ----------------------------------------------------------------------------------------------------


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
        return _upgraded(given)

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


def _upgraded(given: Any) -> Any:
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


# A run -------------------------------------------------------------------------------------------------------


def first_task(metric: str) -> int:
    """The first task after which a metric can have a value: in task 0 no class is old.

    >>> first_task("ece"), first_task("ece_predicted_old")
    (0, 1)
    """
    return 1 if metric == "ece_predicted_old" else 0


class StoredSettings(StoredRecord):
    """Settings as tables name them; whether they are those of a training is for RunSettings to tell."""

    dataset: str
    learner: str
    network: str | None = None
    seed: Number = 0
    classes: Count | None = None
    memory: Count | None = None
    validation: Count | None = None
    validation_pool: Count | None = None
    epochs: Count | None = None
    reserve: Amount | None = None
    tasks: JsonValue = None
    image_side: Count | None = None
    train_per_class: Count | None = None
    test_per_class: Count | None = None
    data_seed: Count | None = None
    precision: str = "fp32"
    imported: bool = False

    @classmethod
    def of(cls, settings: RunSettings) -> Self:
        """The settings of a training, as they are stored."""
        return cls.model_validate(settings.model_dump(mode="json"))

    @property
    def data_options(self) -> dict[str, int]:
        """Options of the dataset that are given, as `load_dataset` takes them."""
        return {name: value for name in DATA_OPTIONS if (value := getattr(self, name)) is not None}

    @property
    def n_tasks(self) -> int | None:
        """How many tasks they ask for."""
        if isinstance(self.tasks, list):
            return len(self.tasks)
        return self.tasks if isinstance(self.tasks, int) else None

    @property
    def key(self) -> str | None:
        """The hash of the settings; None for runs of other tools, which were imported."""
        return stored_key(self.record())

    def but_for_seeds(self) -> JsonObject:
        """The settings but for the training seed, and but for the seeds of class order and split where these follow it.

        >>> StoredSettings(dataset="d", learner="er", seed=3, class_order_seed=3, validation_seed=3).but_for_seeds()
        {'dataset': 'd', 'learner': 'er', 'class_order_seed': 'that of training', 'validation_seed': 'that of training'}
        """
        record = self.record()
        seed = record.pop("seed", 0)
        if record.get("validation_seed") == seed:
            followers = [name for name in ("class_order_seed", "validation_seed") if record.get(name) == seed]
            record |= dict.fromkeys(followers, "that of training")
        return record

    def without(self, *names: str) -> str:
        """The settings but for these, as text."""
        return json.dumps({k: v for k, v in self.record().items() if k not in names}, sort_keys=True)


class FormatNote(StoredRecord):
    """What an environment says of the folder it is in, whatever else it holds."""

    format: JsonValue = FORMAT
    tcil: JsonValue = None


class Environment(FormatNote):
    """With what a run was computed, and how long it took: not part of the results."""

    torch: JsonValue = None
    numpy: JsonValue = None
    scipy: JsonValue = None
    python: JsonValue = None
    machine: JsonValue = None
    threads: Annotated[int, Field(ge=1, le=2**20)] | None = None
    ranks: JsonValue = None
    cores: JsonValue = None
    device: JsonValue = None
    cuda: JsonValue = None
    compiled: JsonValue = None
    layout: KnownLayout = Layout.CHANNELS_LAST
    images_per_second: Mapping[str, float] = {}
    seconds: Mapping[str, Mapping[str, Amount]] = {}

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if self.has("threads") and self.threads is None:
            raise ValueError("threads is null")
        return self

    def placed_as(self, other: Environment) -> Environment:
        """The same with the layout and threads that another was computed with."""
        names = [name for name in ("layout", "threads", "images_per_second") if other.has(name)]
        return self.model_copy(update={name: getattr(other, name) for name in names})

    def timed(self, task: str, what: str, seconds: float) -> Environment:
        """The same with these seconds added to those of a task."""
        known = self.seconds.get(task, {})
        mine = {**known, what: round(known.get(what, 0.0) + seconds, 3)}
        return self.model_copy(update={"seconds": {**self.seconds, task: mine}})


class DataNote(StoredRecord):
    """What tells images (or imported logits) from others; compared as a whole."""


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
        return _upgraded(given)

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


class Draws(RootModel[dict[str, tuple[Share, ...]]]):
    """What `tcil calibrate --redraw` leaves: errors by calibrator."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    def record(self) -> JsonObject:
        """As it is written."""
        written: JsonObject = self.model_dump(mode="json")
        return written


class Packed(StoredRecord):
    """That a run folder is a copy with results only of these tasks: it resumes from the network of the next one."""

    without: Annotated[tuple[Count, ...], Field(strict=False)]


_IN_RUN: dict[str, type[BaseModel]] = {
    "settings.json": StoredSettings,
    "environment.json": Environment,
    "results.json": RunResult,
    "analysis.json": Analysis,
    "redraw.json": Draws,
    "packed.json": Packed,
}
_IN_TASK: dict[str, type[BaseModel]] = {"results.json": TaskResult, "analysis.json": AnalysedTask}


def kind_of(file: str | PurePath) -> type[BaseModel]:
    """The type of that file of a run folder, or of a task in it."""
    path = PurePath(file)
    kinds = _IN_TASK if re.fullmatch(r"task-\d+", path.parent.name) else _IN_RUN
    return kinds.get(path.name, DataNote)
