"""A finished task's logits: one forward pass over everything that calibrators and metrics read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import tcil
from tcil.experiments.runs.entries import Labelled
from tcil.experiments.runs.store import RunFolder, task_name
from tcil.foundation.errors import invalid
from tcil.incremental.data.images import Dataset, ImageSet, Pixels
from tcil.incremental.data.memory import Memory
from tcil.incremental.data.stream import Task, TaskStream

BATCH = 500
FINISHED = ("indices", "logits", "model")  # files of a task that was trained and evaluated
_PARTS = ("test", "pool", "memory", "reserve")


@dataclass(frozen=True, eq=False)
class TaskLogits:
    """Logits with the column of each label: of test images of the classes seen, the held-out pool, the exemplars and
    the reserve."""

    test: Labelled
    pool: Labelled
    memory: Labelled
    reserve: Labelled

    @classmethod
    def read(cls, store: RunFolder, task: int) -> TaskLogits:
        """What a finished task has stored."""
        tensors = read_finished(store, task, "logits")
        return cls(*((tensors[f"{name}_logits"], tensors[f"{name}_columns"]) for name in _PARTS))

    def tensors(self) -> dict[str, Tensor]:
        """As they are stored, by name."""
        kinds = ("logits", "columns")
        return {f"{name}_{kind}": getattr(self, name)[i] for name in _PARTS for i, kind in enumerate(kinds)}

    def write(self, store: RunFolder, task: int) -> None:
        """Store them."""
        store.write_tensors(f"{task_name(task)}/logits.safetensors", self.tensors())

    def valid(self, task: Task, rows: Tensor) -> Labelled:
        """Those of these rows of the pool."""
        place = {int(row): number for number, row in enumerate(task.pool)}
        places = torch.tensor([place[int(row)] for row in rows], dtype=torch.long)
        return self.pool[0][places], self.pool[1][places]


def evaluate(model: nn.Module, dataset: Dataset, stream: TaskStream, task: Task, memory: Memory) -> TaskLogits:
    """One forward pass over everything that calibrators and metrics read."""
    pixels, seen = Pixels(dataset), range(task.columns.stop)
    columns = stream.column_of(dataset.test.labels)
    rows = ((columns >= 0) & (columns < seen.stop)).nonzero().squeeze(1)

    def logits(part: ImageSet, rows: Tensor, columns: Tensor) -> Labelled:
        if not len(rows):
            return torch.zeros(0, len(seen)), torch.zeros(0, dtype=torch.long)
        return tcil.predict_logits(model, _Batches(pixels, part, rows, columns), classes=seen)

    test = logits(dataset.test, rows, columns)
    held = (logits(dataset.train, some, stream.columns) for some in (task.pool, memory.rows, memory.reserve_rows))
    return TaskLogits(test, *held)


def write_rows(store: RunFolder, task: Task, memory: Memory) -> None:
    """Store which rows of the training set a task and its memory are made of."""
    rows = {"train": task.train, "valid": task.valid, "pool": task.pool, "memory": memory.rows}
    store.write_tensors(f"{task_name(task.index)}/indices.safetensors", rows | {"reserve": memory.reserve_rows})


def is_evaluated(store: RunFolder, task: int) -> bool:
    """Whether the rows and logits of a task are there, and whole."""
    names = ("indices", "logits")
    return all(store.read_tensors(f"{task_name(task)}/{name}.safetensors") is not None for name in names)


def read_finished(store: RunFolder, task: int, name: str) -> dict[str, Tensor]:
    """What a finished task has stored under this name."""
    stored = store.read_tensors(f"{task_name(task)}/{name}.safetensors")
    if stored is None:
        raise not_there(store, task, name)
    return stored[0]


def not_there(store: RunFolder, task: int, name: str) -> ValueError:
    """The error for a task that lacks one of its files."""
    packed = store.read_packed()
    if packed is not None and task in packed.without:
        given = f"{store.path}, a copy of 'tcil pack' that has the results of task {task}, but not its {name}"
        return invalid("run", given, "the whole run folder")
    return invalid("run", f"{store.path} without {name} of task {task}", "a finished run")


def check_finished(store: RunFolder, stream: TaskStream) -> None:
    """Refuse a run with a task that is not finished, or that was made of other rows than its settings say."""
    for task in stream:
        found = {name: read_finished(store, task.index, name) for name in FINISHED}
        for name, own in {"train": task.train, "valid": task.valid, "pool": task.pool}.items():
            rows = found["indices"].get(name)
            if rows is None or not torch.equal(rows, own):
                given = f"{store.path}, whose task {task.index} has other images than its settings say"
                raise invalid("run", given, "the settings and images that it was trained with")


class _Batches:
    """Normalised images with their columns, made batch by batch, so that memory holds one batch only."""

    def __init__(self, pixels: Pixels, part: ImageSet, rows: Tensor, columns: Tensor) -> None:
        self._pixels, self._part, self._columns = pixels, part, columns
        self._rows = rows.split(BATCH)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Labelled]:
        return ((self._pixels.plain(self._part, some), self._columns[some]) for some in self._rows)
