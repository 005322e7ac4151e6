"""Trained networks with more test images than any study can use up: what promises are tried on.

A world is sampled with replacement, so that it is the whole truth: risks and coverages in it are known exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import tcil
from research import official
from tcil.experiments.config.settings import build
from tcil.experiments.runs.entries import FinishedTask, entry_of
from tcil.experiments.runs.evaluate import evaluate
from tcil.experiments.runs.opening import open_run
from tcil.experiments.runs.run import Run
from tcil.incremental.data.datasets import letters

PER_CLASS = 1000  # test images of a class of letters
TASKS = (1, 2, 4)  # of five: 8, 12 and 20 classes
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class World:
    """Test images after a task: probabilities by calibrator, true columns, and the same of the memory."""

    name: str
    probs: dict[str, Floats]
    columns: npt.NDArray[np.int64]
    new: npt.NDArray[np.bool_]  # of each column
    memory_probs: dict[str, Floats]
    memory_columns: npt.NDArray[np.int64]

    @property
    def new_classes(self) -> list[int]:
        """Columns of the new classes."""
        return [int(column) for column in np.flatnonzero(self.new)]

    def save(self, path: Path) -> None:
        """Write all of it as one file."""
        parts: dict[str, Any] = {"columns": self.columns, "new": self.new, "memory_columns": self.memory_columns}
        parts |= {f"probs/{name}": value.astype(np.float32) for name, value in self.probs.items()}
        parts |= {f"memory/{name}": value.astype(np.float32) for name, value in self.memory_probs.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, **parts)

    @classmethod
    def load(cls, path: Path) -> World:
        """Read what `save` wrote."""
        with np.load(path, allow_pickle=False) as parts:

            def by_calibrator(kind: str) -> dict[str, Floats]:
                names = [name.partition("/")[2] for name in parts.files if name.startswith(f"{kind}/")]
                return {name: _normalised(parts[f"{kind}/{name}"]) for name in names}

            return cls(
                path.stem,
                by_calibrator("probs"),
                parts["columns"],
                parts["new"],
                by_calibrator("memory"),
                parts["memory_columns"],
            )


def _normalised(probs: npt.NDArray[np.float32]) -> Floats:
    wide = probs.astype(np.float64)
    own: Floats = wide / wide.sum(axis=1, keepdims=True)
    return own


def letters_worlds(cache: Path, noise: int, seed: int = 1) -> list[World]:
    """ER on letters, trained once; then thousands of test images of every class. A few minutes, then from `cache`."""
    stem = f"letters-noise{noise}-seed{seed}"
    paths = [cache / f"{stem}-task{task}.npz" for task in TASKS]
    if not all(path.exists() for path in paths):
        settings = build({"preset": "letters", "learner": "er", "seed": seed})
        run = Run(settings, cache / stem, dataset=letters.load(noise=noise))
        run.execute(["vanilla"])
        many = letters.load(test_per_class=PER_CLASS, noise=noise)
        with run.threads():
            for task, memory, finished, fitted in _fitted_tasks(run, ("vanilla", "pact")):
                if task.index in TASKS:
                    assert finished.model is not None
                    logits = evaluate(finished.model, many, run.stream, task, memory)
                    path = paths[TASKS.index(task.index)]
                    world_of(path.stem, fitted, logits.test, logits.memory, finished.new_columns).save(path)
    return [World.load(path) for path in paths]


def run_worlds(folder: Path) -> list[World]:
    """The tasks after the first of a finished run with a reserve, with its test images; calibrators are fitted anew."""
    run = open_run(folder, tell=print)
    if not run.settings.reserve:
        raise SystemExit(f"{folder} was trained without --reserve, which PACT-R needs")
    worlds: list[World] = []
    with run.threads():
        for task, _, finished, fitted in _fitted_tasks(run, ("vanilla", "ts", "t-cil", "pact", "pact-r")):
            test, memory = (
                (finished.test_logits, finished.test_columns),
                (finished.memory_logits, finished.memory_columns),
            )
            name = f"{folder.name} task {task.index}"
            if task.index:
                worlds.append(world_of(name, fitted, test, memory, finished.new_columns))
    return worlds


def _fitted_tasks(run: Run, names: Sequence[str]) -> Iterator[tuple[Any, Any, FinishedTask, dict[str, Any]]]:
    """Every task of a trained run, with these calibrators fitted and their history handed on."""
    history: dict[str, Any] = {}
    for task, memory, learner in run.walk():
        finished = run.finished(task, memory, learner, history)
        fitted: dict[str, Any] = {}
        for name in names:
            fitted[name] = entry_of(name).fit(replace(finished, remembered=history.get(name)))
            if fitted[name] is not None and fitted[name].history_ is not None:
                history[name] = fitted[name].history_
        yield task, memory, finished, fitted


def official_worlds(cache: Path, data: Path, checkpoints: Sequence[int]) -> list[World]:
    """The authors' checkpoints after these tasks, with the CIFAR-100 test images of the classes seen.

    PACT-R's reserve are the validation images of the earlier checkpoints: 10 images of each of their classes, which are
    half of the old classes. No stored training set or memory has one of them.
    """
    paths = {index: cache / f"official-task{index}.npz" for index in checkpoints}
    if not all(path.exists() for path in paths.values()):
        history: Any = None
        earlier: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index in [index for index in official.CHECKPOINTS if index <= max(checkpoints)]:
            task = official.load(data, index)
            seen = range(task.seen)
            examples = (task.model, task.memory, task.valid, task.new_classes)
            options: dict[str, Any] = {"imbalance": task.imbalance, "history": history}
            pact = tcil.PACT().fit(*examples, **options)
            history = pact.history_
            reserve: Any = tuple(torch.cat(parts) for parts in zip(*earlier, strict=True))
            earlier.append(task.valid)
            if index not in paths:
                continue
            fitted = {
                "vanilla": None,
                "ts": tcil.TemperatureScaling().fit(*tcil.predict_logits(task.model, task.valid, classes=seen)),
                "t-cil": tcil.TCIL().fit(*examples),
                "pact": pact,
                "pact-r": tcil.PACT().fit(*examples, **options, reserve=reserve),
            }
            test = tcil.predict_logits(task.model, task.test, classes=seen)
            memory = tcil.predict_logits(task.model, task.memory, classes=seen)
            world_of(paths[index].stem, fitted, test, memory, task.new_classes).save(paths[index])
    return [World.load(path) for path in paths.values()]


def world_of(name: str, fitted: dict[str, Any], test: Any, memory: Any, new_columns: range) -> World:
    """A world from fitted calibrators (None for the network as it is) and logits with their columns."""

    def probs(calibrator: Any, logits: torch.Tensor) -> Floats:
        own = torch.softmax(logits.double(), 1) if calibrator is None else calibrator.predict_proba(logits)
        return np.asarray(own.numpy())

    columns = np.arange(test[0].shape[1])
    return World(
        name,
        {key: probs(calibrator, test[0]) for key, calibrator in fitted.items()},
        test[1].numpy(),
        np.isin(columns, np.asarray(new_columns)),
        {key: probs(calibrator, memory[0]) for key, calibrator in fitted.items()},
        memory[1].numpy(),
    )
