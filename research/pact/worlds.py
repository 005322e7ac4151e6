"""Worlds (a dataset, a class order, a draw of images, sizes of memory and validation set) and the runs on them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tcil.experiments.config.settings import RunSettings, build
from tcil.experiments.runs.run import Run
from tcil.experiments.runs.store import RunFolder

LEARNERS = ("er", "eeil", "wa", "der", "bic", "la")
WORLDS: dict[str, dict[str, Any]] = {
    "F1": {"preset": "letters", "seed": 101, "memory": 400, "validation": 80},
    "F2": {"preset": "letters", "seed": 102, "memory": 200, "validation": 160},
    "F3": {"preset": "letters", "seed": 103, "memory": 800, "validation": 80},
    "F5": {"preset": "letters", "seed": 105, "memory": 300, "validation": 200, "tasks": 4},
    "F4": {"preset": "letters-large", "seed": 104, "memory": 560, "validation": 80, "classes": 28, "tasks": 7},
    "D1": {"preset": "letters", "seed": 121, "memory": 400, "validation": 80},
    "F6": {"preset": "letters", "seed": 106, "memory": 400, "validation": 80},
    "F7": {"preset": "letters", "seed": 107, "memory": 300, "validation": 200, "tasks": 4},
    "F8": {"preset": "letters-large", "seed": 108, "memory": 560, "validation": 80, "classes": 28, "tasks": 7},
    "F9": {"preset": "letters", "seed": 131, "memory": 400, "validation": 80},
    "F10": {"preset": "letters", "seed": 132, "memory": 300, "validation": 200, "tasks": 4},
    "F11": {"preset": "letters", "seed": 141, "memory": 400, "validation": 80},
    "F12": {"preset": "letters", "seed": 142, "memory": 300, "validation": 200, "tasks": 4},
    "F13": {"preset": "letters-large", "seed": 143, "memory": 560, "validation": 80, "classes": 28, "tasks": 7},
    "F14": {"preset": "letters", "seed": 151, "memory": 400, "validation": 80},
    "F15": {"preset": "letters", "seed": 152, "memory": 300, "validation": 200, "tasks": 4},
    "F16": {"preset": "letters-large", "seed": 153, "memory": 560, "validation": 80, "classes": 28, "tasks": 7},
    "F17": {"preset": "letters", "seed": 161, "memory": 400, "validation": 80},
    "F18": {"preset": "letters", "seed": 162, "memory": 300, "validation": 200, "tasks": 4},
    "F19": {"preset": "letters-large", "seed": 163, "memory": 560, "validation": 80, "classes": 28, "tasks": 7},
    "C1": {"preset": "cifar100-mini", "seed": 201, "memory": 400, "validation": 100},
    "C2": {"preset": "cifar100-mini", "seed": 202, "memory": 300, "validation": 200, "tasks": 4},
    "C3": {"preset": "cifar100-mini", "seed": 203, "memory": 560, "validation": 100, "classes": 28, "tasks": 7},
}
FINAL = ("F5", "F3", "F4")  # of round two, in the order of training; F1 and F2, of round one, are development now
FIFTH = ("F6", "F7")  # of round five
SIXTH = ("F8", "F9", "F10")  # of round six
SEVENTH = ("F11", "F12", "F13")  # of round seven
EIGHTH = ("F14", "F15", "F16")  # of round eight
NINTH = ("F17", "F18", "F19")  # of round nine
TENTH = ("C1", "C2", "C3")  # of round ten
RESERVED = 2


def final_settings(world: str, learner: str, reserve: int = RESERVED) -> RunSettings:
    """The settings of a final run, by the protocol's rule."""
    own = WORLDS[world]
    letters = str(own["preset"]).startswith("letters")  # drawn by the seed; CIFAR-100 has other classes by its order
    more = {"data_seed": own["seed"], "test_per_class": 320} if letters else {}
    return build(
        {
            "learner": learner, **own, **more, "validation_pool": own["validation"],
            "class_order_seed": own["seed"], "reserve": reserve,
        }
    )  # fmt: skip


def datasets_folder() -> Path | None:
    """Where datasets are that letters are not: the folder that TCIL_DATA names."""
    named = os.environ.get("TCIL_DATA")
    return Path(named) if named else None


def trained(out: Path, world: str) -> list[Path]:
    """The folders of a world's final runs that are trained."""
    own = [out / final_settings(world, learner).name for learner in LEARNERS]
    return [folder for folder in own if RunFolder(folder).read_results() is not None]


def train(
    out: Path, worlds: Sequence[str] = FINAL, reserve: int = RESERVED, learners: Sequence[str] = LEARNERS
) -> None:
    """Train worlds, one run after another; nothing but the vanilla row is computed."""
    for world in worlds:
        for learner in learners:
            settings = final_settings(world, learner, reserve)
            Run(settings, out / settings.name, data=datasets_folder()).execute(["vanilla"])
            print(f"{world} {learner} reserve {reserve}: trained", flush=True)
