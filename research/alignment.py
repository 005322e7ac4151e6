"""By how much WA's alignment scales the new classes' weight rows on cifar100-mini-0.2: why it does little there.

    TCIL_DATA=DIR python -m research.alignment        (one training of WA, seed 1: about eight minutes)

writes docs/results/alignment.json: after each task but the first, the mean norm of old rows over that of new ones.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

from torch import nn

from research import ROOT
from tcil.experiments.config.settings import build
from tcil.experiments.runs.run import Run
from tcil.incremental.learners import wa


def main() -> None:
    """Train, with every alignment written down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    align, ratios = wa.align_weights, []

    def recorded(model: nn.Module, old: int, seen: int) -> float:
        ratios.append(round(align(model, old, seen), 4))
        return ratios[-1]

    wa.align_weights = recorded
    settings = build({"preset": "cifar100-mini-0.2", "learner": "wa", "seed": 1})
    with tempfile.TemporaryDirectory() as folder:
        Run(settings, Path(folder) / "run", data=Path(os.environ["TCIL_DATA"])).execute(["vanilla"])
    record = {"command": "TCIL_DATA=DIR python -m research.alignment", "old_over_new": ratios}
    (ROOT / "docs/results/alignment.json").write_text(json.dumps(record, indent=1) + "\n")
    print(record)


if __name__ == "__main__":
    main()
