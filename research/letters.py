"""How the datasets `letters` and `letters-large` were settled.

    python -m research.letters look-alikes      # the classes of letters-large, by a measure of similarity
    python -m research.letters difficulty       # the noise of both, by a rule that sees no calibrator

Both write docs/results/letters-NAME.json. `difficulty` trains ER on one seed for each noise of a fixed grid until one
fits, a minute or two each on two shared cores. docs/appendix/choices.md lists the trials that came before this rule
and grid.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from research import ROOT
from tcil.experiments.config.settings import build
from tcil.experiments.runs.run import Run
from tcil.foundation.files import replace_file
from tcil.incremental.data.datasets import letters

OUT = ROOT / "docs/results"

# Look-alikes -------------------------------------------------------------------------------------------------

CANDIDATES = (
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ" "abcdefghijklmnopqrstuvwxyz" "0123456789" "ΓΔΘΛΞΠΣΦΨΩ" "БГДЖЗИЛПЦЧШЩЪЫЬЭЮЯ"
)  # fmt: skip
ALIKE = 0.77  # of the similarity: two characters of at least this look alike
CLASSES = 40
BOX = 12.0  # pixels
LOOK_ALIKES = f"""Glyphs are drawn {BOX:g} pixels high and, unless narrower than a third of their height, as wide: size
and width do not tell characters apart. The similarity of two characters is the cosine of their coverages, as a
median over the 16 faces. Candidates are taken in order, each unless its similarity to one taken before is {ALIKE}
or more; the first {CLASSES} are the classes."""


def similarity(characters: str) -> NDArray[np.float64]:
    """How alike characters look, (characters, characters), from 0 to 1."""
    faces = []
    for face in letters.FACES:
        drawn = np.stack([_boxed(character, face).ravel() for character in characters]).astype(np.float64)
        drawn /= np.sqrt((drawn * drawn).sum(axis=1, keepdims=True))
        faces.append(drawn @ drawn.T)
    alike: NDArray[np.float64] = np.median(np.stack(faces), axis=0)
    return alike


def _boxed(character: str, face: str) -> NDArray[np.uint16]:
    ends = letters.outline(character, face)
    width, height = np.ptp(ends.reshape(-1, 2), axis=0)
    stretched = BOX / width if width > height / 3 else BOX / height
    return letters.coverage(ends * np.array([stretched, BOX / height]))[::2, ::2]


def look_alikes() -> dict[str, Any]:
    """The classes that the rule takes, and the pairs among them that are most alike."""
    alike = similarity(CANDIDATES)
    taken: list[int] = []
    for one in range(len(CANDIDATES)):
        if all(alike[one, other] < ALIKE for other in taken):
            taken.append(one)
    kept = taken[:CLASSES]
    nearest = sorted(combinations(kept, 2), key=lambda pair: -alike[pair])[:5]
    left = {
        CANDIDATES[one]: "".join(CANDIDATES[other] for other in kept if other < one and alike[one, other] >= ALIKE)
        for one in range(kept[-1])
        if one not in kept
    }
    return {
        "rule": " ".join(LOOK_ALIKES.split()),
        "candidates": CANDIDATES,
        "classes": "".join(CANDIDATES[one] for one in kept),
        "most_alike": {CANDIDATES[a] + CANDIDATES[b]: round(float(alike[a, b]), 3) for a, b in nearest},
        "left_out_for": left,
    }


# Difficulty --------------------------------------------------------------------------------------------------

GRID = (56, 64, 72, 80)  # standard deviations of the noise, in grey levels
SEED = 1
LEAST_ECE, LEAST_MEMORISED, ACCURACY = 0.20, 0.97, (0.35, 0.70)
DIFFICULTY = f"""The smallest noise of the grid at which ER (preset letters, seed {SEED}), not calibrated, has an ECE of
at least {LEAST_ECE:.0%} as a mean over tasks, has memorised at least {LEAST_MEMORISED:.0%} of its exemplars after every
task, and is correct on {ACCURACY[0]:.0%} to {ACCURACY[1]:.0%} of the test images after the last one. No
other calibrator is run."""


def difficulty() -> dict[str, Any]:
    """What each noise of the grid leads to, up to the first that fits."""
    found: list[dict[str, Any]] = []
    for noise in GRID:
        found.append(_measured(noise))
        print(json.dumps(found[-1]), flush=True)
        if found[-1]["fits"]:
            break
    chosen = next((row["noise"] for row in found if row["fits"]), None)
    return {"rule": " ".join(DIFFICULTY.split()), "grid": GRID, "trained": found, "chosen": chosen}


def _measured(noise: float) -> dict[str, Any]:
    settings = build({"preset": "letters", "seed": SEED})
    with tempfile.TemporaryDirectory() as folder:
        tasks = Run(settings, Path(folder) / "run", dataset=letters.load(noise=noise)).execute(["vanilla"]).tasks
    rows = [task.calibrators["vanilla"] for task in tasks]
    eces, accuracies = [_number(row.ece) for row in rows], [_number(row.accuracy) for row in rows]
    memorised = [_number(task.memory.accuracy if task.memory else None) for task in tasks]
    ece = float(np.mean(eces))
    fits = ece >= LEAST_ECE and min(memorised) >= LEAST_MEMORISED and ACCURACY[0] <= accuracies[-1] <= ACCURACY[1]
    return {
        "noise": noise,
        "ece": round(ece, 4),
        "ece_by_task": [round(value, 4) for value in eces],
        "memorised_by_task": [round(value, 4) for value in memorised],
        "accuracy_by_task": [round(value, 4) for value in accuracies],
        "fits": fits,
    }


def _number(value: float | None) -> float:
    assert value is not None
    return value


PARTS = {"look-alikes": look_alikes, "difficulty": difficulty}


def main() -> None:
    """Apply one of the rules and write what it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    part = parser.parse_args().part
    record = PARTS[part]()
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    print(text)
    replace_file(OUT / f"letters-{part}.json", text.encode())


if __name__ == "__main__":
    main()
