"""PACT told a wrong imbalance, on one world: the command `python -m research.pact imbalance`.

The records in `imbalance` are of round three, on world D1; those of the present form are in `imbalance-eight`, on F14.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from research.pact import measuring
from research.pact.methods import METHODS, PRESENT, TOLD
from research.pact.tables import each_learner, learners, mean, ratio_errors, rms
from research.pact.worlds import LEARNERS, final_settings, train
from tcil.foundation.files import replace_file

WORLD = "F14"
FOLDER = "imbalance-eight"
OURS = [f"{name}{told}" for name in ("PACT", "PACT-R") for told in ("", *(f", told {other}" for other in TOLD))]
COMPARED = ("Vanilla", "TS", "T-CIL", "whole imbalance", *OURS, "Optimal TS", "Optimal group TS", "Optimal T and bias")


def run(out: Path) -> None:
    """Train and measure what is missing, run by run; then print the table."""
    kept = measuring.STORED / FOLDER
    kept.mkdir(parents=True, exist_ok=True)
    methods = {name: PRESENT[name] if name in OURS else METHODS[name][1] for name in COMPARED}
    for learner in LEARNERS:
        folder = out / final_settings(WORLD, learner).name
        path = kept / f"{folder.name}.json"
        if not path.exists():
            train(out, [WORLD], learners=[learner])
            record = measuring.measure(folder, methods, OURS)
            replace_file(path, (json.dumps(record) + "\n").encode())
    print("\n".join(table(measuring.stored(FOLDER))))


def table(records: Sequence[dict[str, Any]]) -> list[str]:
    """Pooled ECE / ECE by predicted group, by what PACT is told; and what it says of its own error."""
    if not records:
        return ["(none yet)"]
    names = " | ".join(name.upper() for name in learners(records))
    lines = [
        f"| method | all | {names} | RMS of error / claimed, log T, b |",
        "|" + "---|" * (len(learners(records)) + 3),
    ]
    for method in (*OURS, "whole imbalance", "T-CIL", "Optimal TS"):
        both = [each_learner(records, lambda r, k=key: mean(r, method, k)) for key in ("pooled", "group")]  # type: ignore[misc]  # noqa: B023
        cells = " | ".join(f"{pooled:.2f} / {group:.2f}" for pooled, group in zip(*both, strict=True))
        errors = ", ".join(f"{rms(ratio_errors(records, method, k)):.2f}" for k in (0, 1)) if method in OURS else ""
        lines.append(f"| {method} | {cells} | {errors} |")
    return lines
