"""What is measured of a run, task by task, and kept under docs/results/pact."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch import Tensor

import tcil
from research import ROOT
from research.beyond import Known, fit_on, oracle
from research.pact.methods import BASES, METHODS, OURS, Method, log_spread, reserve_of
from research.pact.worlds import LEARNERS, RESERVED, datasets_folder, trained
from tcil.calibration.calibrators.pact import PACTEvidence
from tcil.calibration.calibrators.pact import evidence as pieces
from tcil.calibration.calibrators.tcil import TCILEvidence
from tcil.experiments.runs.entries import FinishedTask
from tcil.experiments.runs.opening import open_run
from tcil.experiments.runs.store import RunFolder
from tcil.foundation.files import replace_file

STORED = ROOT / "docs/results/pact"
FROM_THE_FIRST = ("First-task TS",)  # like PACT, methods that learn from a task without old classes


def scores(log_probs: Tensor, known: Known) -> dict[str, float]:
    """All metrics of a task; ECE, accuracy and AURC in percent."""
    probs, labels, metrics = log_probs.exp(), known.task.test_columns, tcil.metrics
    groups = metrics.predicted_groups(probs, known.task.new_columns)
    ece = metrics.expected_calibration_error(probs, labels, groups=groups)
    by_group = [value for name in ("old", "new") if (value := ece.by_group.get(name)) is not None]
    values = {
        "pooled": 100 * float(ece),
        "group": 100 * float(np.mean(by_group)),
        "smooth": 100 * float(metrics.smooth_calibration_error(probs, labels)),
        "debiased": 100 * float(metrics.debiased_calibration_error(probs, labels)),
        "nll": float(-log_probs.gather(1, labels[:, None]).mean()),
        "brier": float(metrics.brier_score(probs, labels)),
        "calibration": float(metrics.brier_parts(probs, labels).calibration),  # a part of the Brier score
        "aurc": 100 * float(metrics.area_under_risk_coverage(probs, labels)),
        "accuracy": 100 * float(metrics.accuracy(probs, labels)),
    }
    return {name: round(value, 5) for name, value in values.items()}


def harm_interval(ours: Tensor, other: Tensor, labels: Tensor) -> tuple[float, float]:
    """The 95 % bootstrap interval, over test images, of the difference in pooled ECE, in percent."""
    found = tcil.metrics.compare_calibration(other.exp(), ours.exp(), labels, n_resamples=200)
    return 100 * found.low, 100 * found.high


def with_reserve(task: FinishedTask, drawn: dict[int, Tensor], seed: int) -> FinishedTask:
    """The task, with images of old classes out of its test set for a reserve, the same ones after every task."""
    columns = task.test_columns
    for column in range(task.new_columns.stop):
        if column not in drawn:
            own, generator = int((columns == column).sum()), torch.Generator().manual_seed(1000 * seed + column)
            drawn[column] = torch.randperm(own, generator=generator)[:RESERVED]
    taken = torch.cat([(columns == c).nonzero().squeeze(1)[drawn[c]] for c in range(task.new_columns.stop)])
    rest = torch.ones(len(columns), dtype=torch.bool)
    rest[taken] = False
    return replace(
        task, test_logits=task.test_logits[rest], test_columns=columns[rest],
        reserve_logits=task.test_logits[taken], reserve_columns=columns[taken],
    )  # fmt: skip


Walked = tuple[FinishedTask, TCILEvidence]
_ABOUT = ("dataset", "learner", "seed", "memory", "validation", "reserve", "network")


def walk(folder: Path) -> tuple[dict[str, Any], Iterable[Walked]]:
    """What a run is, and each task of it with T-CIL's evidence; of a run that went no further, its first tasks."""
    results = RunFolder(folder).read_results()
    n_tasks = None if results is None else len(results.tasks)
    run = open_run(folder, data=datasets_folder(), tell=print)
    about = {key: getattr(run.settings, key) for key in _ABOUT}

    def tasks() -> Iterable[Walked]:
        drawn = dict[int, Tensor]()
        with run.threads():
            for task, memory, learner in islice(run.walk(), n_tasks):
                finished = run.finished(task, memory, learner, {})
                assert finished.model is not None
                evidence = tcil.TCIL().evidence(
                    finished.model, finished.memory, finished.valid, finished.new_columns, classes=finished.seen
                )
                if not len(finished.reserve_columns):
                    finished = with_reserve(finished, drawn, run.settings.seed)
                yield finished, evidence

    return {**about, "tasks": len(run.stream), "classes": run.n_classes, "run": folder.name}, tasks()


def measure(
    folder: Path, methods: Mapping[str, Method], ours: Sequence[str] = OURS, walked: Callable[..., Any] = walk
) -> dict[str, Any]:
    """These methods on every task with old classes of a run; of `ours` also what they believe, and their harm."""
    about, tasks = walked(folder)
    memories: dict[str, dict[str, Any]] = {name: {} for name in methods}
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in methods}
    states = list[dict[str, Any]]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tcil.CalibrationWarning)
        for finished, evidence in tasks:
            found = dict[str, Tensor]()
            for name, method in methods.items():
                known = Known(finished, evidence, {}, {}, memories[name])
                if known.old or "PACT" in name or name in FROM_THE_FIRST:
                    found[name] = method(known)
                if known.old:
                    rows[name].append(scores(found[name], known))
            known = Known(finished, evidence, {}, {})
            states.append(state_of(known, memories, rows, found, ours) if known.old else first_state(known))
    return {"about": about, "scores": rows, "states": states}


def first_state(known: Known) -> dict[str, Any]:
    """The first task's: only T."""
    logits, columns = known.valid
    truth = math.log(fit_on((known.task.test_logits, known.task.test_columns)))
    return {
        "oracle": [truth, None],
        "new_classes": pieces.temperature_with_error(logits, columns),
        "log_spread": log_spread(known.task.memory_logits),
    }


def state_of(
    known: Known,
    memories: dict[str, dict[str, Any]],
    rows: dict[str, list[dict[str, float]]],
    found: dict[str, Tensor],
    ours: Sequence[str],
) -> dict[str, Any]:
    """What the pieces say, what is believed, what is true, and the harm."""
    truth = oracle(known)
    logits, columns = known.valid
    state: dict[str, Any] = {
        "oracle": truth,
        "log_imbalance": known.log_imbalance,
        "log_spread": log_spread(known.task.memory_logits),
        "surrogate": pieces.surrogate(known.evidence),
        "new_classes": pieces.temperature_with_error(logits[:, known.old :], columns - known.old),
        "label_shift": pieces.label_shift(logits, columns, known.evidence.is_new, truth[0]),
        "n_test": len(known.task.test_columns),
        "n_reserve": len(reserve_of(known)[1]),
        "belief": {},
        "contrast": {},  # of forms that have one, and the oracle where it is as they believe
        "harm": {},
    }
    best = min(BASES, key=lambda name: rows[name][-1]["pooled"])
    for name in ours:
        belief: PACTEvidence = memories[name]["belief"]
        state["belief"][name] = [
            belief.log_temperature, belief.log_temperature_error, belief.bias, belief.bias_error,
            max(memories[name]["surprises"]),
        ]  # fmt: skip
        contrast = memories[name].get("contrast", 0.0)
        if abs(contrast) > 1e-6:
            state["contrast"][name] = [contrast, *oracle(known, contrast)]
        interval = harm_interval(found[name], found[best], known.task.test_columns)
        state["harm"][name] = [rows[name][-1]["pooled"] - rows[best][-1]["pooled"], *interval]
    return state


def of_families(families: Sequence[str]) -> dict[str, Method]:
    """The methods of these families, by name."""
    return {name: method for name, (family, method) in METHODS.items() if family in families}


def store(name: str, folders: Iterable[Path], methods: Mapping[str, Method], ours: Sequence[str] = OURS) -> None:
    """Measure these runs once and keep what was found."""
    (STORED / name).mkdir(parents=True, exist_ok=True)
    for folder in track(list(folders), description=name):
        path = STORED / name / f"{folder.name}.json"
        if not path.exists():
            replace_file(path, (json.dumps(measure(folder, methods, ours)) + "\n").encode())


def store_worlds(
    name: str, worlds: Sequence[str], out: Path, methods: Mapping[str, Method], ours: Sequence[str]
) -> None:
    """Measure the worlds that every learner is trained on, as far as they have no record, and keep what was found."""
    folders = list[Path]()
    for world in worlds:
        done = trained(out, world)
        print(f"{world}: {len(done)} of {len(LEARNERS)} runs are trained")
        if len(done) == len(LEARNERS):
            folders += done
    store(name, folders, methods, ours)


def stored(name: str, complete: bool = False) -> list[dict[str, Any]]:
    """What was found; if only what is `complete` counts, of worlds that every learner was measured on."""
    records = [json.loads(path.read_text()) for path in sorted((STORED / name).glob("*.json"))]
    seeds = [record["about"]["seed"] for record in records]
    return [r for r in records if not complete or seeds.count(r["about"]["seed"]) == len(LEARNERS)]
