"""T and the spread of the exemplars' logits, over every stored run: `python -m research.pact tables spread`."""

from __future__ import annotations

from typing import Any

import numpy as np

from research.pact import measuring, small
from research.pact.worlds import LEARNERS, WORLDS

# Those of the usual sizes.
FOLDERS = (
    "final",
    "imbalance",
    "cifar100",
    "small",
    "round-five",
    "round-six",
    "round-seven",
    "round-eight",
    "round-nine",
    "round-ten",
)


def runs() -> list[dict[str, Any]]:
    """Every run of these, once; of a run that was measured twice, the longer record."""
    found: dict[str, dict[str, Any]] = {}
    for folder in FOLDERS:
        for record in measuring.stored(folder):
            before = found.get(record["about"]["run"])
            if before is None or len(before["states"]) < len(record["states"]):
                found[record["about"]["run"]] = record
    return list(found.values())


def ratios(record: dict[str, Any], first: bool = False) -> list[float]:
    """log(T / spread) of the tasks with old classes, or of the first one, which has none."""
    return [s["oracle"][0] - s["log_spread"] for s in record["states"] if ("harm" not in s) == first]


def world_of(record: dict[str, Any]) -> str:
    about = record["about"]
    names = {own["seed"]: name for name, own in WORLDS.items()}
    if about["dataset"] in small.TITLES:
        return small.world(record)
    return f"letters, {names[about['seed']]}"


def table() -> list[str]:
    """A row for each world, a column for each learner."""
    records = runs()
    worlds = sorted({world_of(record) for record in records}, key=_place)
    heads = " | ".join(name.upper() for name in LEARNERS)
    lines = [f"| data | {heads} | first task, all learners |", "|" + "---|" * (len(LEARNERS) + 2)]
    for world in worlds:
        cells = []
        for learner in LEARNERS:
            own = [r for r in records if world_of(r) == world and r["about"]["learner"] == learner]
            values = [ratio for record in own for ratio in ratios(record)]
            cells.append(f"{np.mean(values):.2f} ± {np.std(values):.2f}" if values else "")
        begun = [ratio for r in records if world_of(r) == world for ratio in ratios(r, first=True)]
        lines.append(f"| {world} | {' | '.join(cells)} | {np.mean(begun):.2f} |")
    every, begun = ([v for r in records for v in ratios(r, first=first)] for first in (False, True))
    low, high = np.exp(np.quantile(every, [0.05, 0.95]))
    return [
        *lines, "",
        f"T / spread over {len(every)} tasks: median {np.exp(np.median(every)):.2f}, 5 to 95 % {low:.2f} to {high:.2f};"
        f" log {np.mean(every):.2f} ± {np.std(every):.2f}; of first tasks {np.mean(begun):.2f} ± {np.std(begun):.2f}.",
    ]  # fmt: skip


def _place(world: str) -> tuple[bool, int, str]:
    number = world.rsplit("F", 1)[1] if ", F" in world else "0"
    return world.startswith("letters"), int(number), world
