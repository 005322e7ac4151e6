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

from tcil.calibration.arrays import as_classes, as_labels, as_logits, check_own_unmasked, label_columns
from tcil.calibration.checksums import Damaged
from tcil.calibration.errors import invalid
from tcil.experiments import records
from tcil.experiments.boundary import check_entries
from tcil.experiments.calibration import FinishedTask, calibrate, entry_of, merged
from tcil.experiments.collect import read_runs
from tcil.experiments.report import write_report
from tcil.experiments.store import RunFolder, environment
from tcil.incremental.datasets import load_dataset
from tcil.incremental.extensions import consent
from tcil.incremental.images import Dataset, Pixels
from tcil.incremental.networks import network_factory


def import_run(
    source: Path,
    folder: Path,
    *,
    data: Path | None,
    calibrators: Sequence[str] | None,
    trust: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Calibrate imported tasks, and leave a run folder with logits, results and a report.

    Code that tasks.json names is imported only with `trust`. Into a folder of the same import, rows are added; one of
    another import or run is refused.
    """
    for name in calibrators or ():
        entry_of(name)
    record = _read_tasks(source, trust, tell)
    settings = {"dataset": "imported", "learner": "imported", "seed": 0, **record, "imported": True}
    try:
        records.check("settings.json", settings)  # they are stored, and read again by every report
    except Damaged as reason:
        raise invalid(
            "source", f"{source / 'tasks.json'} ({reason})", "fields as 'tcil run' has them in its settings"
        ) from None
    if network := record.get("network"):
        network_factory(network)
    given = _Source(source, record["tasks"], network, load_dataset(record["dataset"], data) if network else None)
    # All files are checked before the first is worked on; one after another, since together they may not fit in memory.
    content: dict[str, Any] = {"logits": _digest(_stored(given.task(index)) for index in range(len(given.tasks)))}
    if given.dataset is not None:
        content["images"] = given.dataset.fingerprint()
    check_entries(folder)
    store = RunFolder(folder)
    _check_folder(store, settings, content)
    with store.held():
        store.create()
        store.write_json("settings.json", settings)
        store.write_json("data.json", content)
        return _imported(given, settings, store, calibrators)


def _check_folder(store: RunFolder, settings: dict[str, Any], content: dict[str, Any]) -> None:
    """Refuse a folder that holds another run, before anything is written."""
    same = store.read_json("settings.json") in (None, settings)
    known = store.read_json("data.json")
    names = [f"task-{index:02d}/logits.safetensors" for index in range(len(settings["tasks"]))]
    if known is None and same and all((store.path / name).is_file() for name in names):  # made before there was such
        stored = _digest((store.read_tensors(name) or ({}, {}))[0] for name in names)
        known = {**content, "logits": stored}
    if not same or known not in (None, content):
        raise invalid(
            "out",
            f"{store.path}, which holds another run",
            "a folder that is free, or one of the same import",
            "Take another --out, or rename the folder that is imported.",
        )


def _stored(task: FinishedTask) -> dict[str, Tensor]:
    """What is stored of a task, by name."""
    names = {"test": "test", "pool": "valid", "memory": "memory", "reserve": "reserve"}
    kinds = ("logits", "columns")
    return {f"{to}_{kind}": getattr(task, f"{name}_{kind}") for to, name in names.items() for kind in kinds}


def _digest(tasks: Iterable[dict[str, Tensor]]) -> str:
    """What tells these logits and labels from others."""
    digest = hashlib.sha256()
    for tensors in tasks:
        for name, tensor in sorted(tensors.items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _imported(
    given: _Source, settings: dict[str, Any], store: RunFolder, calibrators: Sequence[str] | None
) -> dict[str, Any]:
    results: list[dict[str, Any]] = []
    for index in range(len(given.tasks)):
        finished = replace(given.task(index), history=results[-1]["history"] if results else {})
        at = store.task(index).name
        store.write_tensors(f"{at}/logits.safetensors", _stored(finished))
        results.append(merged(store.read_json(f"{at}/results.json"), calibrate(finished, calibrators)))
        store.write_json(f"{at}/results.json", results[-1])
    whole = {"settings": settings, "tasks": results}
    store.write_json("environment.json", environment(torch.device("cpu")))
    store.write_json("results.json", whole)
    write_report(read_runs([store.path]), store.path / "report.html")
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
        return FinishedTask(
            index=index,
            new_columns=spans[index],
            task_columns=spans,
            test_logits=parts["test"][0],
            test_columns=parts["test"][1],
            valid_logits=parts["valid"][0],
            valid_columns=parts["valid"][1],
            memory_logits=parts["memory"][0],
            memory_columns=parts["memory"][1],
            reserve_logits=parts["reserve"][0],
            reserve_columns=parts["reserve"][1],
            model=_network(path, self.network, len(seen), len(order)) if self.network else None,
            memory=_images(path, arrays, "memory_rows", self.dataset, seen),
            valid=_images(path, arrays, "valid_rows", self.dataset, seen),
        )


def _read_tasks(source: Path, trust: bool, tell: Callable[[str], None]) -> dict[str, Any]:
    """The record in tasks.json, checked, with the user's consent to what it imports; null is the same as nothing."""
    path = source / "tasks.json"
    expected = 'a JSON file such as {"tasks": [[0, 1], [2, 3]]}'
    try:
        record = json.loads(path.read_text())
        json.dumps(record, allow_nan=False, ensure_ascii=False).encode()  # stored with the results, shown in pages
    except (OSError, ValueError, RecursionError) as error:
        raise invalid("source", f"{path} ({error})", expected) from None
    if not isinstance(record, dict) or not isinstance(record.get("tasks"), list) or not record["tasks"]:
        raise invalid("source", f"{path} without a list of tasks", expected)
    record = {key: value for key, value in record.items() if value is not None}
    for key, kind in {"dataset": str, "network": str, "learner": str, "seed": int}.items():
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
    return record


def _read_arrays(path: Path) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except Exception as error:  # a damaged file fails in many ways
        raise invalid(
            "source",
            f"{path}, which cannot be read ({type(error).__name__}: {error})",
            "an .npz file of plain arrays",
        ) from None


def _part(path: Path, arrays: dict[str, Any], name: str, seen: list[int]) -> tuple[Tensor, Tensor]:
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


def _network(arrays: Path, name: str, n_seen: int, n_all: int) -> nn.Module:
    """The network of a task; its head may be as wide as the file says."""
    safe, torchs = arrays.with_suffix(".safetensors"), arrays.with_suffix(".pt")
    path = safe if safe.exists() else torchs
    if not path.exists():
        raise invalid("source", f"no {safe} or .pt", "the weights of every task, since a network is named")
    expected = f"the state dict of a {name}: tensors by name, readable without code"
    try:
        weights = load_file(path) if path is safe else torch.load(path, weights_only=True, map_location="cpu")
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


def _images(
    path: Path, arrays: dict[str, Any], name: str, dataset: Dataset | None, seen: list[int]
) -> tuple[Tensor, Tensor] | None:
    """Images and their columns, by rows of the dataset's training set; None where there are none."""
    if dataset is None or name not in arrays:
        return None
    where = f"{name} in {path}"
    rows = as_labels(arrays[name], where)
    if len(rows) == 0 or int(rows.min()) < 0 or int(rows.max()) >= len(dataset.train):
        raise invalid(where, f"{len(rows)} rows", f"rows of the {len(dataset.train)} training images")
    columns = label_columns(dataset.train.labels[rows], seen, where, len(seen))
    return Pixels(dataset).plain(dataset.train, rows), columns
