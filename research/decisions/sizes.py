"""Where promises begin, and what a reserve costs: images that are kept out of training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from research import ROOT
from tcil.decisions import smallest_reserve
from tcil.decisions.bounds import conformal_begins_at
from tcil.experiments.reporting.collect import read_runs
from tcil.experiments.runs.results import RISKS
from tcil.foundation.files import replace_file

OUT = ROOT / "docs/results/decisions"
MIXTURE = {"old": 0.8, "new": 0.2}
RULES: dict[str, dict[str, Any]] = {
    "one threshold, chosen beforehand": {"n_candidates": 1},
    "several in sequence, the first well chosen": {"search": "sequence"},
    "the default: eleven candidates": {},
    "the default, the same number of every class": {"design": "stratified"},
    "80 % old and 20 % new": {"mixture": MIXTURE},
    "predicted groups apart, 80 % old and 20 % new": {"mixture": MIXTURE, "groups": "predicted"},
}


def run(runs: Sequence[Path]) -> None:
    """Print both tables and write them."""
    thresholds = {
        name: {f"{risk:g}": smallest_reserve(risk, 0.9, **options) for risk in RISKS} for name, options in RULES.items()
    }
    sets = {
        name: {f"{alpha:g}": conformal_begins_at(alpha, n_classes) for alpha in RISKS}
        for name, n_classes in (("independent", None), ("4 classes", 4), ("16 classes", 16), ("90 classes", 90))
    }
    record: dict[str, Any] = {
        "command": "python -m research.decisions sizes RUNS",
        "thresholds": {"what": "images of each group, all accepted and correct; confidence 90 %", **thresholds},
        "sets": {"what": "images of a group, by alpha", **sets},
        "cost": _costs(runs),
    }
    text = json.dumps(record, indent=1)
    print(text)
    OUT.mkdir(parents=True, exist_ok=True)
    replace_file(OUT / "sizes.json", (text + "\n").encode())


def _costs(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """Accuracy by the share of the memory that is held out of training."""
    by_share: dict[float, list[Any]] = {}
    for run in read_runs(runs) if runs else []:
        by_share.setdefault(float(run.settings.reserve or 0.0), []).append(run)
    found = []
    for share, some in sorted(by_share.items()):
        means = [run.mean("vanilla", "accuracy") for run in some]
        last = [run.tasks[-1].calibrators["vanilla"].accuracy for run in some]
        seen, memory = some[0].tasks[-1].seen, some[0].settings.memory
        found.append(
            {
                "reserve": share,
                "seeds": sorted(run.seed for run in some),
                "reserved_images_at_the_end": int(max(1, round(share * (memory // seen))) * seen) if share else 0,
                "accuracy_mean_over_tasks": [round(float(value), 4) for value in means],
                "accuracy_after_last_task": [round(float(value), 4) for value in last],
                "mean": round(float(np.mean(means)), 4),
            }
        )
    return found
