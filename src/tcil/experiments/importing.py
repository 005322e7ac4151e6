"""Models trained elsewhere: per-task logits, labels and class lists, and their checkpoints where there are any.

    SOURCE/tasks.json      {"tasks": [[0, 1], [2, 3]], "dataset": "mine", "learner": "mine", "seed": 1}
    SOURCE/task-00.npz     test_logits, test_labels, valid_logits, valid_labels; also memory_logits, memory_labels

Column i of the logits is class i of the task lists one after another; wider logits are cut. With checkpoints, so that
T-CIL and PerturbTS apply as well, tasks.json also names "network" and a known "dataset", each .npz holds memory_rows
and valid_rows (rows of that dataset's training set), and the weights are in

    SOURCE/task-00.safetensors (or task-00.pt, read with weights_only)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tcil.calibration.arrays import as_classes, as_labels, as_logits, label_columns
from tcil.calibration.errors import invalid
from tcil.experiments.calibration import FinishedTask, calibrate
from tcil.experiments.collect import read_runs
from tcil.experiments.report import write_report
from tcil.experiments.run import network_factory
from tcil.experiments.store import RunFolder, environment
from tcil.incremental.datasets import load_dataset
from tcil.incremental.images import Dataset, Pixels


def import_run(source: Path, folder: Path, *, data: Path | None, calibrators: Sequence[str] | None) -> dict[str, Any]:
    """Calibrate imported tasks, and leave a run folder with results and a report."""
    record = _read_tasks(source)
    order: list[int] = []
    spans: list[range] = []
    for number, labels in enumerate(record["tasks"]):
        classes = as_classes(labels, f"tasks[{number}]")
        spans.append(range(len(order), len(order) + len(classes)))
        order += classes
    as_classes(order, "tasks")
    network = record.get("network")
    dataset = load_dataset(record["dataset"], data) if network else None
    results: list[dict[str, Any]] = []
    for index, span in enumerate(spans):
        arrays = _read_arrays(source / f"task-{index:02d}.npz")
        seen = order[: span.stop]
        parts = {name: _part(arrays, name, seen) for name in ("test", "valid", "memory", "reserve")}
        for name in ("test", "valid"):
            if not len(parts[name][0]):
                raise invalid(f"task-{index:02d}.npz", f"no {name}_logits", "test and validation logits with labels")
        model = _network(source, index, network, order) if network else None
        images = _images(arrays, dataset, seen) if dataset is not None else (None, None)
        finished = FinishedTask(
            index=index,
            new_columns=span,
            task_columns=tuple(spans[: index + 1]),
            test_logits=parts["test"][0],
            test_columns=parts["test"][1],
            valid_logits=parts["valid"][0],
            valid_columns=parts["valid"][1],
            memory_logits=parts["memory"][0],
            memory_columns=parts["memory"][1],
            reserve_logits=parts["reserve"][0],
            reserve_columns=parts["reserve"][1],
            model=model,
            memory=images[0],
            valid=images[1],
            history=results[-1]["history"] if results else {},
        )
        results.append(calibrate(finished, calibrators))
    settings = {"dataset": "imported", "learner": "imported", "seed": 0, **record, "imported": True}
    store = RunFolder(folder)
    store.create()
    whole = {"settings": settings, "tasks": results}
    store.write_json("settings.json", settings)
    store.write_json("environment.json", environment(torch.device("cpu")))
    store.write_json("results.json", whole)
    write_report(read_runs([folder]), folder / "report.html")
    return whole


def _read_tasks(source: Path) -> dict[str, Any]:
    path = source / "tasks.json"
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise invalid("source", f"{path} ({error})", 'a JSON file such as {"tasks": [[0, 1], [2, 3]]}') from None
    if not isinstance(record, dict) or not isinstance(record.get("tasks"), list) or not record["tasks"]:
        raise invalid("source", f"{path} without a list of tasks", 'a JSON file such as {"tasks": [[0, 1], [2, 3]]}')
    return record


def _read_arrays(path: Path) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError) as error:
        raise invalid("source", f"{path} ({error})", "an .npz file of plain arrays") from None


def _part(arrays: dict[str, Any], name: str, seen: list[int]) -> tuple[Tensor, Tensor]:
    """Logits over the classes seen, and the column of each label; empty where there are none."""
    if f"{name}_logits" not in arrays:
        return torch.zeros(0, len(seen)), torch.zeros(0, dtype=torch.long)
    logits = as_logits(arrays[f"{name}_logits"], f"{name}_logits")
    if logits.shape[1] < len(seen):
        raise invalid(f"{name}_logits", f"{logits.shape[1]} columns", f"at least {len(seen)}, the classes seen")
    labels = as_labels(arrays.get(f"{name}_labels"), f"{name}_labels", len(logits))
    return logits[:, : len(seen)], label_columns(labels, seen, f"{name}_labels", len(seen))


def _network(source: Path, index: int, name: str, order: list[int]) -> nn.Module:
    """The network of a task; its head may be as wide as the file says."""
    stem = source / f"task-{index:02d}"
    if stem.with_suffix(".safetensors").exists():
        weights = load_file(stem.with_suffix(".safetensors"))
    elif stem.with_suffix(".pt").exists():
        weights = torch.load(stem.with_suffix(".pt"), weights_only=True, map_location="cpu")
    else:
        raise invalid("source", f"no {stem}.safetensors or .pt", "the weights of every task, since a network is named")
    width = len(weights["fc.bias"]) if "fc.bias" in weights else len(order)
    model = network_factory(name)(width)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise invalid(
            "source", f"weights that do not fit {name} ({str(error).splitlines()[0]})", "its state dict"
        ) from None
    return model.eval()


def _images(
    arrays: dict[str, Any], dataset: Dataset, seen: list[int]
) -> tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]:
    """Memory and validation images, by rows of the dataset's training set."""
    found: list[tuple[Tensor, Tensor] | None] = []
    for name in ("memory_rows", "valid_rows"):
        if name not in arrays:
            found.append(None)
            continue
        rows = as_labels(arrays[name], name)
        if len(rows) == 0 or int(rows.min()) < 0 or int(rows.max()) >= len(dataset.train):
            raise invalid(name, f"{len(rows)} rows", f"rows of the {len(dataset.train)} training images")
        columns = label_columns(dataset.train.labels[rows], seen, name, len(seen))
        found.append((Pixels(dataset).plain(dataset.train, rows), columns))
    return found[0], found[1]
