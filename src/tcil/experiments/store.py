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
RUN/status.json          where a sweep's run stands, for whoever watches
RUN/.lock                who works in the folder; empty when nobody does

Links inside the folder are refused (see boundary.py); the folder itself may be one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tcil import __version__
from tcil.calibration import ranks
from tcil.calibration.checksums import Damaged, open_json, open_tensors, seal_json, seal_tensors
from tcil.calibration.errors import invalid
from tcil.calibration.storage import make_folder, replace_file
from tcil.experiments import records
from tcil.experiments.boundary import check_entries, inside, make_task_folder, plain_file
from tcil.experiments.locks import FolderLock
from tcil.experiments.settings import FORMAT


class RunFolderWarning(UserWarning):
    """Something about a run folder that its user should know."""


class OtherVersionWarning(RunFolderWarning):
    """A run goes on with another version of tcil than it was begun with."""


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
        """Alone in the folder. Where another process works in it: refused, or calling `waiting` until it ends."""
        if not ranks.current().first:
            yield
            return
        check_entries(self.path)
        with self._lock.held(waiting):
            yield

    def create(self) -> None:
        """Make the folder, and clear what a killed process left half-written."""
        with ranks.current().first_alone() as first:
            if not first:
                return
            make_folder(self.path)
            for place in (self.path, *self.path.glob("task-*")):
                for leftover in place.glob(".*.part"):
                    leftover.unlink(missing_ok=True)

    def task(self, index: int) -> Path:
        """The folder of a task."""
        folder = self.path / f"task-{index:02d}"
        make_task_folder(folder)
        return folder

    def write_json(self, name: str, record: dict[str, Any]) -> None:
        """Store a record; the same record gives the same bytes, and a file that has them stays untouched."""
        content = seal_json(record, name)
        with ranks.current().first_alone() as first:
            if first and self._read(name) != content:
                replace_file(inside(self.path, name), content)

    def read_json(self, name: str) -> Any | None:
        """A stored record, or None where there is none, or none that is whole and of its shape."""
        content = self._read(name)
        try:
            if content is None:
                return None
            record = open_json(content, name)
            records.check(self.path / name, record)
            return record
        except Damaged as reason:
            self._refuse(name, reason)
            return None

    def peek_json(self, name: str) -> Any | None:
        """The same for a record that is nobody's loss: nothing is said of a damaged one."""
        content = self._read(name)
        try:
            return None if content is None else open_json(content, name)
        except Damaged:
            return None

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
        """Say which file is damaged. It stays where it is until what it held has been computed anew."""
        text = f"{self.path / name} is damaged ({reason}): it is not used, and computed anew where a run needs it"
        if ranks.current().first and text not in self._told:
            self._told.add(text)
            warnings.warn(text, DamagedFileWarning, stacklevel=3)


def check_format(found: object, where: Path) -> None:
    """Refuse a run of another format, by what its environment says; one that says nothing is of this format."""
    noted = found if isinstance(found, dict) else {}
    if noted.get("format", FORMAT) != FORMAT:
        raise invalid(
            "run",
            f"{where} in format {noted['format']!r} of run folders, written by tcil {noted.get('tcil')}",
            f"format {FORMAT}, which this tcil {__version__} reads and writes",
            "Use the version that wrote it, or another --out.",
        )


def environment(device: torch.device) -> dict[str, Any]:
    """What the numbers were computed with."""
    import platform

    import numpy
    import scipy

    return {
        "format": FORMAT,
        "tcil": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        **({"ranks": ranks.current().size} if ranks.current().size > 1 else {}),
        "cores": os.cpu_count(),
        "device": str(device),
        "cuda": torch.version.cuda,
    }
