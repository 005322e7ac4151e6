"""A run folder: everything written by atomic rename, with a checksum, by one process at a time; read without pickle.

RUN/settings.json        what defines the run
RUN/environment.json     versions, threads, seconds by task: what does not belong to the results
RUN/results.json         all tasks together, once the last is done
RUN/analysis.json        what the paper's figures need beyond the tables; a task's part in its folder until all are done
RUN/task-03/
    indices.safetensors  rows of the training set: train, valid, pool, reserve, memory
    model.safetensors    the network at the end of the task
    logits.safetensors   test, pool, memory and reserve logits with their columns
    results.json         every calibrator's figures, and the history for the next task
    stage.safetensors    while training: the network and generator at the start of the stage
    epoch.safetensors    while training: after the last finished epoch, or the step at which a signal stopped it
RUN/packed.json          only in a copy of `tcil pack`: of which tasks it has the results alone
RUN/status.json          where a sweep's run stands, for whoever watches
RUN/.lock                who works in the folder; empty when nobody does

Links inside the folder are refused (see boundary.py); the folder itself may be one.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tcil import __version__
from tcil.experiments.config.settings import FORMAT
from tcil.experiments.runs.analysed import AnalysedTask, Analysis
from tcil.experiments.runs.catalogue import Heading, in_order, learner_title
from tcil.experiments.runs.locks import FolderLock
from tcil.experiments.runs.records import JsonObject, Kind, parse
from tcil.experiments.runs.results import (
    RANKED,
    VERSION,
    WITH_OPTIONS,
    CalibratorRow,
    DataNote,
    Draws,
    Environment,
    FormatNote,
    Packed,
    RunResult,
    StoredSettings,
    TaskResult,
)
from tcil.foundation import ranks
from tcil.foundation.boundary import check_entries, inside, make_task_folder, plain_file
from tcil.foundation.checksums import Damaged, open_json, open_tensors, seal_json, seal_tensors
from tcil.foundation.errors import invalid
from tcil.foundation.files import make_folder, replace_file

if TYPE_CHECKING:  # results are read without torch
    from torch import Tensor

SETTINGS, DATA, ENVIRONMENT = "settings.json", "data.json", "environment.json"
RESULTS, ANALYSIS, REDRAW, PACKED = "results.json", "analysis.json", "redraw.json", "packed.json"


class RunFolderWarning(UserWarning):
    """Something about a run folder that its user should know."""


class OtherVersionWarning(RunFolderWarning):
    """A run is continued with another version of tcil than it was begun with."""


class DamagedFileWarning(RunFolderWarning):
    """A file of a run folder is not what was written; it is not used."""


class RunFolder:
    """The files of one run. Of several ranks, the first writes; the others wait until it has."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FolderLock(path)
        self._told: set[str] = set()  # of damaged files, each once

    @contextmanager
    def held(self, waiting: Callable[[], None] | None = None) -> Iterator[None]:
        """Exclusive access to the folder. If another process works in it: refuse, or call `waiting` until it ends."""
        if not ranks.current().first:
            yield
            return
        check_entries(self.path)
        with self._lock.held(waiting):
            yield

    def create(self) -> None:
        """Make the folder, and remove incomplete files of a killed process."""
        with ranks.current().first_alone() as first:
            if not first:
                return
            make_folder(self.path)
            for place in (self.path, *self.path.glob("task-*")):
                for leftover in place.glob(".*.part"):
                    leftover.unlink(missing_ok=True)

    def task(self, index: int) -> Path:
        """The folder of a task."""
        folder = self.path / task_name(index)
        make_task_folder(folder)
        return folder

    # records: each is read by its own type, or is None where there is none, or none that is whole and of that type ---

    def read_settings(self) -> StoredSettings | None:
        """What defines the run."""
        return self.read(SETTINGS, StoredSettings)

    def write_settings(self, settings: StoredSettings) -> None:
        """Store what defines the run."""
        self.write(SETTINGS, settings)

    def read_data(self) -> DataNote | None:
        """What tells the run's images from others."""
        return self.read(DATA, DataNote)

    def write_data(self, note: DataNote) -> None:
        """Store what tells the run's images from others."""
        self.write(DATA, note)

    def read_environment(self) -> Environment | None:
        """With what the run is computed."""
        return self.read(ENVIRONMENT, Environment)

    def write_environment(self, environment: Environment) -> None:
        """Store with what the run is computed."""
        self.write(ENVIRONMENT, environment)

    def read_results(self) -> RunResult | None:
        """All tasks together."""
        return self.read(RESULTS, RunResult)

    def write_results(self, results: RunResult) -> None:
        """Store all tasks together."""
        self.write(RESULTS, results)

    @property
    def has_results(self) -> bool:
        """Whether there is a file of all tasks together, whole or not."""
        return (self.path / RESULTS).exists()

    def has_task_result(self, task: int) -> bool:
        """Whether there is a file of a task's rows, whole or not."""
        return (self.path / task_name(task) / RESULTS).exists()

    def read_task_result(self, task: int) -> TaskResult | None:
        """The rows after a task."""
        return self.read(f"{task_name(task)}/{RESULTS}", TaskResult)

    def write_task_result(self, result: TaskResult) -> None:
        """Store the rows after a task."""
        self.write(f"{self.task(result.task).name}/{RESULTS}", result)

    def read_analysis(self) -> Analysis | None:
        """What the paper's figures need beyond the tables."""
        return self.read(ANALYSIS, Analysis)

    def write_analysis(self, analysis: Analysis) -> None:
        """Store what the paper's figures need beyond the tables."""
        self.write(ANALYSIS, analysis)

    def read_analysed_task(self, task: int) -> AnalysedTask | None:
        """A task's part of the analysis, until all are done."""
        return self.read(f"{task_name(task)}/{ANALYSIS}", AnalysedTask)

    def write_analysed_task(self, part: AnalysedTask) -> None:
        """Store a task's part of the analysis."""
        self.write(f"{self.task(part.task).name}/{ANALYSIS}", part)

    def remove_analysed_task(self, task: int) -> None:
        """Delete a task's part of the analysis."""
        self.remove(f"{task_name(task)}/{ANALYSIS}")

    def read_draws(self) -> Draws | None:
        """Errors over other draws of the validation set."""
        return self.read(REDRAW, Draws)

    def write_draws(self, draws: Draws) -> None:
        """Store errors over other draws of the validation set."""
        self.write(REDRAW, draws)

    def read_packed(self) -> Packed | None:
        """Of which tasks only the results are here, where the folder is a copy of `tcil pack`."""
        return self.read(PACKED, Packed)

    def write_packed(self, packed: Packed) -> None:
        """Store of which tasks only the results are here."""
        self.write(PACKED, packed)

    @property
    def n_results(self) -> int:
        """How many tasks the results of all tasks together have; 0 where there are none that can be read."""
        record = self.peek_json(RESULTS)
        tasks = record.get("tasks") if record is not None else None
        return len(tasks) if isinstance(tasks, list) else 0

    @property
    def n_done(self) -> int:
        """How many tasks have results: in the whole, or, of an unfinished run, from the first on without a gap."""
        return max(self.n_results, next(task for task in itertools.count() if not self.has_task_result(task)))

    def copy(self, name: str, other: RunFolder) -> bool:
        """Copy a file to another folder, whole or not; False where there is none."""
        content = self._read(name)
        if content is not None and other._read(name) != content:
            replace_file(inside(other.path, name), content)
        return content is not None

    def read_format(self) -> FormatNote | None:
        """What the folder says of its format, if it can be read at all; nothing is said where it cannot."""
        record = self.peek_json(ENVIRONMENT)
        return None if record is None else FormatNote.model_validate(record)

    def with_parts(self, results: RunResult) -> RunResult:
        """Results with what lies beside them in other files."""
        beside = {"environment": self.read_environment, "analysis": self.read_analysis, "data": self.read_data}
        found = {name: read() for name, read in beside.items() if not results.has(name)}
        analysis = found.get("analysis")
        if isinstance(analysis, Analysis) and len(analysis.tasks) != len(results.tasks):  # the run has gone on since
            del found["analysis"]
        return results.model_copy(update={name: part for name, part in found.items() if part is not None})

    def read(self, name: str, kind: type[Kind]) -> Kind | None:
        """A file of this type, or None where there is none, or none that is whole and of that type."""
        content = self._read(name)
        try:
            if content is None:
                return None
            record = open_json(content, name)
            check_version(record, self.path / name)
            return parse(kind, record)
        except Damaged as reason:
            self._refuse(name, reason)
            return None

    def write(self, name: str, record: _Writable) -> None:
        """Store a record; the same record gives the same bytes, and a file that has them stays untouched."""
        self.write_json(name, record.record())

    def write_json(self, name: str, record: Mapping[str, object]) -> None:
        """The same for a record that is not one of a run's."""
        content = seal_json(record, name)
        with ranks.current().first_alone() as first:
            if first and self._read(name) != content:
                replace_file(inside(self.path, name), content)

    def peek_json(self, name: str) -> JsonObject | None:
        """A record that can be computed again: a damaged one is ignored without a warning."""
        content = self._read(name)
        try:
            return None if content is None else open_json(content, name)
        except Damaged:
            return None

    # tensors ---------------------------------------------------------------------------------------------------------

    def write_tensors(self, name: str, tensors: dict[str, Tensor], note: dict[str, str] | None = None) -> None:
        """Store named tensors, with a note in the header."""
        with ranks.current().first_alone() as first:
            if first:
                tensors = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
                replace_file(inside(self.path, name), seal_tensors(tensors, note, name))

    def read_tensors(self, name: str) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        """Stored tensors and their note, or None where there are none, or none that are whole."""
        content = self._read(name)
        try:
            return None if content is None else open_tensors(content, name)
        except Damaged as reason:
            self._refuse(name, reason)
            return None

    def remove(self, name: str) -> None:
        """Delete a file if it is there."""
        with ranks.current().first_alone() as first:
            if first:
                inside(self.path, name).unlink(missing_ok=True)

    def _read(self, name: str) -> bytes | None:
        path = self.path / name
        try:
            return path.read_bytes() if plain_file(path) else None
        except FileNotFoundError:  # gone meanwhile
            return None

    def _refuse(self, name: str, reason: Damaged) -> None:
        """Warn about a damaged file. It stays where it is until its content has been computed again."""
        text = f"{self.path / name} is damaged ({reason}): it is ignored, and computed again when a run needs it"
        if ranks.current().first and text not in self._told:
            self._told.add(text)
            warnings.warn(text, DamagedFileWarning, stacklevel=3)


class _Writable(Protocol):
    def record(self) -> JsonObject: ...


@dataclass(frozen=True, eq=False)
class StoredRun:
    """A finished run, and where it was found.

    Attributes
    ----------
    path : pathlib.Path
        A run folder, or the file of a kept copy.
    result : RunResult
        Its results.
    """

    path: Path
    result: RunResult

    @property
    def settings(self) -> StoredSettings:
        """What defines the run."""
        return self.result.settings

    @property
    def tasks(self) -> tuple[TaskResult, ...]:
        """What each task gave."""
        return self.result.tasks

    @property
    def environment(self) -> Environment:
        """With what it was computed, as far as that is known."""
        return self.result.environment or Environment()

    @property
    def analysis(self) -> Analysis | None:
        """What the paper's figures need beyond the tables."""
        return self.result.analysis

    @property
    def data(self) -> DataNote | None:
        """What tells its images from others."""
        return self.result.data

    @property
    def seed(self) -> int:
        """The training seed."""
        return self.settings.seed

    @property
    def learner(self) -> str:
        """What tables call its learner."""
        return self.result.learner_title or learner_title(self.settings.learner)

    @property
    def origin(self) -> str:
        """Where an imported run lies: such runs are not the same because their settings are."""
        return str(self.path) if self.settings.imported else ""

    def is_complete(self, calibrators: Iterable[str]) -> bool:
        """Whether every task has a row of each of these calibrators, in its present form, and its exemplars'."""
        rows = [task.calibrators.get(name) for name in calibrators for task in self.tasks]
        return all(row is not None and row.up_to_date for row in rows) and all(task.tells_memory for task in self.tasks)

    def row(self, task: int, calibrator: str) -> CalibratorRow | None:
        """A calibrator's row after a task (counted from the end where negative); None where it has no figures."""
        return self.tasks[task].answer(calibrator)

    def values(self, calibrator: str, metric: str) -> list[float | None]:
        """A metric by task."""
        return self.result.values(calibrator, metric)

    def mean(self, calibrator: str, metric: str) -> float | None:
        """The mean over tasks; None where some task has no answer."""
        return self.result.mean(calibrator, metric)

    def titles(self) -> dict[str, Heading]:
        """Calibrators of the run, without those apart that never have an answer."""
        found: dict[str, Heading] = {}
        for task in self.tasks:
            for name, row in task.calibrators.items():
                block = WITH_OPTIONS if "[" in name else row.block
                if row.answered or block == RANKED:
                    found.setdefault(name, Heading(row.title, block))
        return in_order(found)


def task_name(index: int) -> str:
    """The name of a task's folder."""
    return f"task-{index:02d}"


def check_version(record: JsonObject, file: Path) -> None:
    """Refuse results of a later version: they are not damaged, and must not be replaced."""
    version = record.get("version")
    if type(version) is int and version > VERSION:
        advice = "Use the version that wrote it, or another --out."
        raise invalid("run", f"{file} of version {version}", f"results of version 1 to {VERSION}", advice)


def check_format(noted: FormatNote | None, where: Path) -> None:
    """Refuse a run of another format, by what its environment says; one that says nothing is of this format."""
    if noted is not None and noted.format != FORMAT:
        raise invalid(
            "run",
            f"{where} in format {noted.format!r} of run folders, written by tcil {noted.tcil}",
            f"format {FORMAT}, which this tcil {__version__} reads and writes",
            "Use the version that wrote it, or another --out.",
        )
