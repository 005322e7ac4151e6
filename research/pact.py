"""PACT and PACT-R on development and final worlds: docs/pact-protocol.md, docs/pact.md.

python -m research.pact train RUNS            # the final worlds, in order; resumable
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tcil.experiments.config.settings import RunSettings, build
from tcil.experiments.runs.run import Run

LEARNERS = ("er", "eeil", "wa", "der", "bic", "la")
WORLDS: dict[str, dict[str, Any]] = {
    "F1": {"seed": 101, "memory": 400, "validation": 80},
    "F2": {"seed": 102, "memory": 200, "validation": 160},
    "F3": {"seed": 103, "memory": 800, "validation": 80},
}


def final_settings(world: str, learner: str, reserve: int = 2) -> RunSettings:
    """The settings of a final run, by the protocol's rule."""
    own = WORLDS[world]
    return build(
        {
            "preset": "letters", "learner": learner, **own, "validation_pool": own["validation"],
            "class_order_seed": own["seed"], "data_seed": own["seed"], "test_per_class": 320, "reserve": reserve,
        }
    )  # fmt: skip


def train(out: Path) -> None:
    """Train the final worlds in the protocol's order; nothing but the vanilla row is computed."""
    plan = [(world, learner, 2) for world in WORLDS for learner in LEARNERS]
    for world, learner, reserve in [*plan, *(("F1", learner, 0) for learner in LEARNERS)]:
        settings = final_settings(world, learner, reserve)
        Run(settings, out / settings.name).execute(["vanilla"])
        print(f"{world} {learner} reserve {reserve}: trained", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("train").add_argument("out", type=Path)
    given = parser.parse_args()
    train(given.out)


if __name__ == "__main__":
    main()
