"""Why a small push can lower the temperature of the exemplars, on the authors' checkpoints.

    TCIL_DATA=DIR python -m research.push        (two minutes)

The paper says that a larger magnitude makes more predictions wrong and so raises the temperature. Here the temperature
of the new exemplars is followed from no push to four times T-CIL's magnitude: of all of them, and of those alone that
the network classifies correctly before the push. Of these T starts at 0 by definition, and can only rise at first. So
if it falls at first with all, the exemplars that were wrong before the push are the cause. Writes
docs/results/push.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import tcil
from research import ROOT
from research.official import CHECKPOINTS, data_folder, load
from tcil.calibration.exemplars import open_exemplars
from tcil.calibration.perturbed_exemplars import PerturbedExemplars
from tcil.calibration.temperature import solve_temperature
from tcil.foundation.files import replace_file

POINTS, TIMES = 25, 4.0
OUT = ROOT / "docs/results/push.json"


def curves(model: torch.nn.Module, memory: Any, new: range, seen: range, magnitude: float) -> dict[str, Any]:
    """Temperatures of the new exemplars by magnitude: of all, and of those that are right before the push."""
    with open_exemplars(model, memory, new, classes=seen) as exemplars:
        pushed = PerturbedExemplars(exemplars)
        columns = pushed.columns[: pushed.n_new]
        right = pushed.logits(0.0, new_only=True).argmax(1) == columns
        found: dict[str, list[float]] = {"all": [], "right before": [], "share wrong": []}
        for step in range(POINTS):
            logits = pushed.logits(TIMES * magnitude * step / (POINTS - 1), new_only=True)
            found["all"].append(solve_temperature(logits, columns).limit)
            found["right before"].append(solve_temperature(logits[right], columns[right]).limit)
            found["share wrong"].append(float((logits.argmax(1) != columns).double().mean()))
    return {"wrong before": int((~right).sum()), "new exemplars": len(right), **found}


def falls(curve: Sequence[float | None]) -> int:
    """In how many steps it falls, of those between finite values."""
    return int((np.diff([value for value in curve if value is not None and np.isfinite(value)]) < -1e-9).sum())


def main() -> None:
    folder = data_folder()
    if folder is None:
        raise SystemExit("TCIL_DATA names no folder with the authors' checkpoints")
    found: dict[str, Any] = {}
    print("| task | new exemplars wrong before | T at no push, all | lowest T | steps that fall, all | right before |")
    for index in CHECKPOINTS:
        task = load(folder, index)
        seen = range(task.seen)
        fit = tcil.TCIL().fit(task.model, task.memory, task.valid, task.new_classes, classes=seen)
        found[str(index)] = own = curves(task.model, task.memory, task.new_classes, seen, fit.result_.magnitude)
        numbers = f"{own['all'][0]:.3f} | {min(own['all']):.3f} | {falls(own['all'])} | {falls(own['right before'])}"
        print(f"| {index} | {own['wrong before']} of {own['new exemplars']} | {numbers} |", flush=True)
    record = {"command": "python -m research.push", "points": POINTS, "times": TIMES, "tasks": found}
    replace_file(OUT, (json.dumps(record) + "\n").encode())


if __name__ == "__main__":
    main()
