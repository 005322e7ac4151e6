"""What calibration is worth for decisions: coverage at 5, 10 and 20 % risk, promised beside achieved."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from research import ROOT
from research.decisions.worlds import World, official_worlds, run_worlds
from tcil.decisions import ConformalSets, RiskThreshold
from tcil.experiments.reporting.collect import read_runs, studies
from tcil.experiments.runs.decide import decision_figures
from tcil.experiments.runs.entries import FinishedTask
from tcil.experiments.runs.results import RISKS
from tcil.foundation.files import replace_file

OUT = ROOT / "docs/results/decisions"
RESERVE, SPLITS = 20, 20  # images of each class that play the reserve, and how often they are drawn anew


def run_on_checkpoints(cache: Path, data: Path, checkpoints: Sequence[int]) -> None:
    """The authors' checkpoints: claims on all test images, promises with part of them for a reserve."""
    worlds = official_worlds(cache, data, checkpoints)
    record = {
        "command": "TCIL_DATA=DIR python -m research.decisions value --checkpoints " + " ".join(map(str, checkpoints)),
        "what": "authors' ER checkpoints, CIFAR-100, after each task; test images of the classes seen. Promises: "
        f"{RESERVE} test images of each class are the reserve, the other {100 - RESERVE} the test, {SPLITS} draws."
        " PACT-R is fitted with the validation images of the earlier checkpoints",
        "claims": _by_calibrator(worlds, _claims),
        "promises": _by_calibrator(worlds, _promises),
    }
    _show(record)
    OUT.mkdir(parents=True, exist_ok=True)
    replace_file(OUT / "value-checkpoints.json", (json.dumps(record, indent=1) + "\n").encode())


def run_on_runs(runs: Sequence[Path]) -> None:
    """Finished runs of `tcil run --reserve`: the same, by learner. The reserve fits PACT-R and backs no promise."""
    found: dict[str, Any] = {}
    names: list[str] = []
    for study in studies(read_runs(runs)):
        worlds = [world for run in study.runs for world in run_worlds(run.path)]
        names += [run.path.name for run in study.runs]
        found[study.title] = {"claims": _by_calibrator(worlds, _claims), "promises": _by_calibrator(worlds, _promises)}
        print(study.title)
        _show(found[study.title])
    record = {
        "command": "python -m research.decisions value RUNS",
        "what": f"by learner; means over tasks after the first and over seeds. Promises: {RESERVE} test images of each"
        f" class are drawn {SPLITS} times, and the other test images are the test. PACT-R is fitted on the"
        " runs' reserve, which backs no promise",
        "runs": sorted(names),
        "studies": found,
    }
    OUT.mkdir(parents=True, exist_ok=True)
    replace_file(OUT / "value-letters.json", (json.dumps(record, indent=1) + "\n").encode())


_KEYS = ("achieved", "coverage")


def _by_calibrator(worlds: Iterable[World], of: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for world in worlds:
        for name in world.probs:
            found.setdefault(name, {})[world.name] = of(world, name)
    return {name: {**by_world, "mean": _means(list(by_world.values()))} for name, by_world in found.items()}


def _means(rows: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    """The mean of each figure over the rows that have it."""
    values = {key: [row[key] for row in rows if row.get(key) is not None] for key in (rows[0] if rows else {})}
    return {key: round(float(np.mean(some)), 4) if some else None for key, some in values.items()}  # type: ignore[arg-type]


def _claims(world: World, name: str) -> dict[str, float | None]:
    """What the probabilities claim, as `tcil run` reports it."""
    none = (torch.zeros(0, len(world.new)), torch.zeros(0, dtype=torch.long))
    first = int(np.flatnonzero(world.new)[0])
    columns = range(first, len(world.new))
    log_probs = torch.from_numpy(np.log(world.probs[name].clip(1e-300)))
    test = (log_probs, torch.from_numpy(world.columns))
    task = FinishedTask(1, columns, (range(first), columns), *test, *none, *none, *none)
    figures = decision_figures(task, lambda logits: torch.softmax(logits, 1), backed=False)
    keys = [f"risks/model_based/{g}/{r}/{k}" for r in RISKS for g in ("all", "old", "new") for k in _KEYS]
    keys += [f"sets/model_based/{g}/{k}" for g in ("old", "new") for k in ("achieved", "size")]
    return {key: figures.figure(key) for key in keys}


def _promises(world: World, name: str) -> dict[str, float | None]:
    """Thresholds and sets from a reserve of each class, over several draws of it."""
    probs, columns, is_new = world.probs[name], world.columns, world.new[world.columns]
    wrong, rng = probs.argmax(1) != columns, np.random.default_rng(0)
    share = float(world.new.mean())
    rows: list[dict[str, float | None]] = []
    for _ in range(SPLITS):
        kept = np.concatenate(
            [rng.choice(np.flatnonzero(columns == c), RESERVE, replace=False) for c in range(len(world.new))]
        )
        test = np.setdiff1d(np.arange(len(columns)), kept)
        row: dict[str, float | None] = {}
        for risk in RISKS:
            for said, mixture in (("any", None), ("known", {"old": 1 - share, "new": share})):
                rule = RiskThreshold(risk=risk, design="stratified", mixture=mixture)
                rule.fit(probs[kept], columns[kept], world.new_classes)
                accepted = rule.accept(probs[test])
                key = f"risks/{said}/{risk}"
                row[f"{key}/exists"] = float(rule.result_.thresholds[0].exists)
                row[f"{key}/coverage"] = float(accepted.mean())
                row[f"{key}/coverage_old"] = float(accepted[~is_new[test]].mean())
                row[f"{key}/coverage_new"] = float(accepted[is_new[test]].mean())
                row[f"{key}/achieved"] = float(wrong[test][accepted].mean()) if accepted.any() else None
        sets = ConformalSets(design="stratified").fit(probs[kept], columns[kept], world.new_classes)
        inside = sets.predict(probs[test])
        hit = inside[np.arange(len(test)), columns[test]]
        for group, mine in (("old", ~is_new[test]), ("new", is_new[test])):
            row[f"sets/{group}/achieved"] = float(hit[mine].mean())
            row[f"sets/{group}/size"] = float(inside[mine].sum(1).mean())
        rows.append(row)
    return _means(rows)


def _show(record: dict[str, Any]) -> None:
    for part in ("claims", "promises"):
        for name, by_world in record[part].items():
            shown = {key: value for key, value in by_world["mean"].items() if value is not None}
            print(part, name, json.dumps(shown))
