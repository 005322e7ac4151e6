"""Models trained elsewhere: per-task logits, labels and class lists, and their checkpoints where there are any.

    SOURCE/tasks.json      {"tasks": [[0, 1], [2, 3]], "dataset": "mine", "learner": "mine", "seed": 1}
    SOURCE/task-00.npz     test_logits, test_labels, valid_logits, valid_labels; also memory_logits, memory_labels

Column i of the logits is class i of the task lists one after another; wider logits are cut. With checkpoints, so that
T-CIL and PerturbTS apply as well, tasks.json also names "network" and a known "dataset", each .npz holds memory_rows
and valid_rows (rows of that dataset's training set), and the weights are in

    SOURCE/task-00.safetensors (or task-00.pt, read with weights_only)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tcil.experiments.runs.calibrate import calibrate
from tcil.experiments.runs.entries import FinishedTask, Labelled, check_calibrators
from tcil.experiments.runs.evaluate import TaskLogits
from tcil.experiments.runs.machine import environment
from tcil.experiments.runs.records import JsonObject, parse
from tcil.experiments.runs.results import VERSION, DataNote, RunResult, StoredSettings, TaskResult
from tcil.experiments.runs.store import RunFolder, task_name
from tcil.foundation.arrays import as_classes, as_labels, as_logits, check_own_unmasked, label_columns
from tcil.foundation.boundary import check_entries
from tcil.foundation.checksums import Damaged, distinct
from tcil.foundation.errors import invalid, shortened
from tcil.foundation.extensions import consent
from tcil.foundation.files import open_regular, read_regular
from tcil.incremental.data.datasets import OPTIONS, load_dataset
from tcil.incremental.data.images import Dataset, Pixels
from tcil.incremental.networks import network_factory

Arrays = dict[str, np.ndarray[Any, Any]]


def import_run(
    source: Path,
    folder: Path,
    *,
    data: Path | None,
    calibrators: Sequence[str] | None,
    trust: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> RunResult:
    """Calibrate imported tasks, and leave a run folder with logits and results.

    Code that tasks.json names is imported only with `trust`. Into a folder of the same import, rows are added; one of
    another import or run is refused.
    """
    check_calibrators(calibrators)
    record, tasks = _read_tasks(source, trust, tell)
    try:  # they are stored, and read again by every report
        settings = parse(
            StoredSettings, {"dataset": "imported", "learner": "imported", "seed": 0, **record, "imported": True}
        )
    except Damaged as reason:
        raise invalid(
            "source", f"{source / 'tasks.json'} ({reason})", "fields as 'tcil run' has them in its settings"
        ) from None
    network = str(record["network"]) if record.get("network") else None
    if network:
        network_factory(network)
    dataset = load_dataset(settings.dataset, data, **settings.data_options) if network else None
    given = _Source(source, tasks, network, dataset)
    # All files are checked before the first is worked on; one after another, since together they may not fit in memory.
    logits = _digest(_logits(given.task(index)).tensors() for index in range(len(given.tasks)))
    images = {} if given.dataset is None else {"images": given.dataset.fingerprint()}
    content = DataNote.model_validate({"logits": logits, **images})
    check_entries(folder)
    store = RunFolder(folder)
    _check_folder(store, settings, content)
    with store.held():
        _check_folder(store, settings, content)  # again: another import may have written meanwhile
        store.create()
        store.write_settings(settings)
        store.write_data(content)
        return _imported(given, settings, store, calibrators)


def _check_folder(store: RunFolder, settings: StoredSettings, content: DataNote) -> None:
    """Refuse a folder that holds another run, before anything is written."""
    own, known = store.read_settings(), store.read_data()
    same = own is None or own.record() == settings.record()
    names = [f"{task_name(index)}/logits.safetensors" for index in range(settings.n_tasks or 0)]
    if known is None and same and all((store.path / name).is_file() for name in names):  # made before there was such
        stored = _digest((store.read_tensors(name) or ({}, {}))[0] for name in names)
        known = content.model_copy(update={"logits": stored})
    if not same or known not in (None, content):
        raise invalid(
            "out",
            f"{store.path}, which holds another run",
            "a folder that is free, or one of the same import",
            "Take another --out, or rename the folder that is imported.",
        )


def _logits(task: FinishedTask) -> TaskLogits:
    """What is stored of a task."""
    return TaskLogits(
        (task.test_logits, task.test_columns),
        (task.valid_logits, task.valid_columns),
        (task.memory_logits, task.memory_columns),
        (task.reserve_logits, task.reserve_columns),
    )


def _digest(tasks: Iterable[dict[str, Tensor]]) -> str:
    """What tells these logits and labels from others."""
    digest = hashlib.sha256()
    for tensors in tasks:
        for name, tensor in sorted(tensors.items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _imported(
    given: _Source, settings: StoredSettings, store: RunFolder, calibrators: Sequence[str] | None
) -> RunResult:
    done: list[TaskResult] = []
    for index in range(len(given.tasks)):
        finished = replace(given.task(index), history=done[-1].history if done else {})
        store.task(index)
        _logits(finished).write(store, index)
        before, fresh = store.read_task_result(index), calibrate(finished, calibrators)
        done.append(fresh if before is None else before.renewed(fresh))
        store.write_task_result(done[-1])
    whole = RunResult(version=VERSION, settings=settings, tasks=tuple(done))
    store.write_environment(environment(torch.device("cpu")))
    store.write_results(whole)
    return whole


@dataclass(frozen=True, eq=False)
class _Source:
    """A source folder whose tasks.json was read."""

    folder: Path
    tasks: list[list[int]]
    network: str | None
    dataset: Dataset | None

    def task(self, index: int) -> FinishedTask:
        """A task's files, read and checked."""
        path = self.folder / f"task-{index:02d}.npz"
        arrays = _read_arrays(path)
        starts = np.cumsum([0, *map(len, self.tasks)]).tolist()
        spans = tuple(range(*starts[i : i + 2]) for i in range(index + 1))
        order = [label for labels in self.tasks for label in labels]
        seen = order[: spans[index].stop]
        parts = {name: _part(path, arrays, name, seen) for name in ("test", "valid", "memory", "reserve")}
        for name in ("test", "valid"):
            if not len(parts[name][0]):
                raise invalid("source", f"{path} without {name}_logits", "test and validation logits with labels")
        valid = _images(path, arrays, "valid_rows", self.dataset, seen)
        for name, part in (("valid_labels", parts["valid"]), ("valid_rows", valid)):
            _check_new(f"{name} in {path}", part, spans[index], seen)
        return FinishedTask(
            index,
            spans[index],
            spans,
            *parts["test"],
            *parts["valid"],
            *parts["memory"],
            *parts["reserve"],
            model=_network(path, self.network, len(seen), len(order)) if self.network else None,
            memory=_images(path, arrays, "memory_rows", self.dataset, seen),
            valid=valid,
        )


def _read_tasks(source: Path, trust: bool, tell: Callable[[str], None]) -> tuple[JsonObject, list[list[int]]]:
    """The record in tasks.json and its lists of classes, checked, with the user's consent to what it imports; null is
    the same as nothing."""
    path = source / "tasks.json"
    expected = 'a JSON file such as {"tasks": [[0, 1], [2, 3]]}'
    try:
        record = json.loads(read_regular(path), object_pairs_hook=distinct)
        json.dumps(record, allow_nan=False, ensure_ascii=False).encode()  # stored with the results, shown in pages
    except (OSError, ValueError, RecursionError) as error:
        raise invalid("source", f"{path} ({error})", expected) from None
    if not isinstance(record, dict) or not isinstance(record.get("tasks"), list) or not record["tasks"]:
        raise invalid("source", f"{path} without a list of tasks", expected)
    record = {key: value for key, value in record.items() if value is not None}
    kinds = dict.fromkeys(("dataset", "network", "learner"), str) | dict.fromkeys(("seed", *OPTIONS), int)
    for key, kind in kinds.items():
        if key in record and type(record[key]) is not kind:
            wanted = "a whole number" if kind is int else "text"
            raise invalid(f"{key} in {path}", f"{record[key]!r:.80}", wanted)
    for number, labels in enumerate(record["tasks"]):
        where = f"tasks[{number}] in {path}"
        if not isinstance(labels, list) or not all(type(label) is int and abs(label) < 2**63 for label in labels):
            raise invalid(where, f"{labels!r:.80}", "a list of integer class labels")
        as_classes(labels, where)
    as_classes([label for labels in record["tasks"] for label in labels], f"tasks in {path}")
    if len(record["tasks"][0]) < 2:
        raise invalid(f"tasks[0] in {path}", "one class", "at least two in the first task")
    if record.get("network") and not record.get("dataset"):
        raise invalid(
            "source", f"{path} with a network but no dataset", "the name of the dataset that it was trained on"
        )
    if "network" in record:  # without one, all names are but titles
        consent({key: record[key] for key in ("dataset", "network")}, path, trust=trust, tell=tell)
    return record, record["tasks"]


def _read_arrays(path: Path) -> Arrays:
    try:
        with open_regular(path) as opened, np.load(opened, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except Exception as error:  # a damaged file fails in many ways
        raise invalid(
            "source",
            f"{path}, which cannot be read ({type(error).__name__}: {error})",
            "an .npz file of plain arrays",
        ) from None


def _part(path: Path, arrays: Arrays, name: str, seen: list[int]) -> Labelled:
    """Logits over the classes seen, and the column of each label; empty where there are none."""
    if f"{name}_logits" not in arrays:
        return torch.zeros(0, len(seen)), torch.zeros(0, dtype=torch.long)
    where = f"{name}_logits in {path}"
    logits = as_logits(arrays[f"{name}_logits"], where)
    if logits.shape[1] < len(seen):
        raise invalid(where, f"{logits.shape[1]} columns", f"at least {len(seen)}, the classes seen")
    where = f"{name}_labels in {path}"
    labels = as_labels(arrays.get(f"{name}_labels"), where, len(logits))
    columns = label_columns(labels, seen, where, len(seen))
    check_own_unmasked(logits[:, : len(seen)], columns, seen, where)
    return logits[:, : len(seen)], columns


def _check_new(where: str, part: Labelled | None, span: range, seen: list[int]) -> None:
    """Refuse validation images of earlier tasks: every method but oracles has those of the newest classes alone."""
    columns = torch.zeros(0, dtype=torch.long) if part is None else part[1]
    if count := int((columns < span.start).sum()):
        raise invalid(
            where,
            f"{count} of {len(columns)} of classes of earlier tasks",
            f"images of the task's own classes {shortened(seen[span.start :])} alone",
            "Leave the others out, or pass images that were never trained on as reserve_logits and reserve_labels.",
        )


def _network(arrays: Path, name: str, n_seen: int, n_all: int) -> nn.Module:
    """The network of a task; its head may be as wide as the file says."""
    safe, torchs = arrays.with_suffix(".safetensors"), arrays.with_suffix(".pt")
    path = safe if safe.exists() else torchs
    if not path.exists():
        raise invalid("source", f"no {safe} or .pt", "the weights of every task, since a network is named")
    expected = f"the state dict of a {name}: tensors by name, readable without code"
    try:
        with open_regular(path) as file:  # and not a pipe, which may never end
            weights = load_file(path) if path is safe else torch.load(file, weights_only=True, map_location="cpu")
    except Exception as error:  # torch's own text would advise to run the file's code
        raise invalid("source", f"{path}, which cannot be read ({type(error).__name__})", expected) from None
    if not isinstance(weights, dict) or not all(
        isinstance(k, str) and isinstance(v, Tensor) for k, v in weights.items()
    ):
        raise invalid("source", f"{path}, which holds something else", expected)
    width = weights["fc.bias"].numel() if "fc.bias" in weights else n_all
    if width < n_seen:
        raise invalid("source", f"{path} with a head of {width} columns", f"at least {n_seen}, the classes seen")
    model = network_factory(name)(width)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise invalid("source", f"{path}, which does not fit {name} ({str(error).splitlines()[0]})", expected) from None
    return model.eval()


def _images(path: Path, arrays: Arrays, name: str, dataset: Dataset | None, seen: list[int]) -> Labelled | None:
    """Images and their columns, by rows of the dataset's training set; None where there are none."""
    if dataset is None or name not in arrays:
        return None
    where = f"{name} in {path}"
    rows = as_labels(arrays[name], where)
    if len(rows) == 0 or int(rows.min()) < 0 or int(rows.max()) >= len(dataset.train):
        raise invalid(where, f"{len(rows)} rows", f"rows of the {len(dataset.train)} training images")
    columns = label_columns(dataset.train.labels[rows], seen, where, len(seen))
    return Pixels(dataset).plain(dataset.train, rows), columns
