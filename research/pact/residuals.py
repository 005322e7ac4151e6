"""Can PACT's error be told from what PACT knows? `python -m research.pact tables residuals`.

Errors of log T and b (the oracle's minus PACT's) are predicted by ridge regression from all that is known after a task.
The data on which a prediction is judged are left out of its fit: a world, or all worlds of a dataset. If nothing
predicts the errors, no other weights or constants would have been better on the mean.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from research.pact.measuring import stored
from research.pact.tables import oracle_of

FOLDERS = ("round-eight", "round-nine", "sizes-eight")
FORM = "PACT, centred"  # that of round eight
STRENGTH = 10.0  # of the ridge, in tasks; inputs have a variance of 1

Array = npt.NDArray[np.float64]


class Case(NamedTuple):
    """A task with old classes: PACT's belief, what the pieces said, and the errors."""

    about: dict[str, Any]
    state: dict[str, Any]
    number: int  # of the task, from 1
    belief: list[float]  # log T, its error, b, its error, the largest surprise
    errors: tuple[float, float]  # of log T and b

    @property
    def world(self) -> str:
        return f"{self.about['dataset']} {self.about['seed']} {self.about['tasks']} {self.about['memory']}"

    @property
    def dataset(self) -> str:
        return str(self.about["dataset"]).removesuffix("-large")  # letters and letters-large are drawn alike

    @property
    def per_class(self) -> float:
        return float(self.about["memory"] / self.classes)

    @property
    def classes(self) -> float:
        return float(self.about["classes"] / self.about["tasks"] * self.number)


def _said(case: Case, piece: str, part: int, believed: int) -> float:
    """By how much a piece differs from the belief; 0 where it says nothing."""
    found = case.state[piece]
    return 0.0 if found is None else float(found[part]) - case.belief[believed]


KNOWN: dict[str, Callable[[Case], float]] = {
    "new classes minus belief, log T": lambda case: _said(case, "new_classes", 0, 0),
    "surrogate minus belief, log T": lambda case: _said(case, "surrogate", 0, 0),
    "surrogate minus belief, b": lambda case: _said(case, "surrogate", 2, 2),
    "label shift minus belief, b": lambda case: _said(case, "label_shift", 0, 2),
    "log T": lambda case: case.belief[0],
    "b": lambda case: case.belief[2],
    "contrast": lambda case: case.state.get("contrast", {}).get(FORM, [0.0])[0],
    "log(imbalance)": lambda case: case.state["log_imbalance"],
    "log(number of classes)": lambda case: math.log(case.classes),
    "log(exemplars per class)": lambda case: math.log(case.per_class),
}
LEARNERS = ("er", "eeil", "wa", "der", "bic", "la")


def cases() -> list[Case]:
    """Every task with old classes of the runs that were fresh for the present form, four new classes or more."""
    found = list[Case]()
    for record in (own for folder in FOLDERS for own in stored(folder)):
        if record["about"]["classes"] / record["about"]["tasks"] < 4:
            continue
        for number, state in enumerate(record["states"], start=1):
            belief = state.get("belief", {}).get(FORM)
            if belief is not None:
                truth = oracle_of(state, FORM)
                errors = truth[0] - belief[0], truth[1] - belief[2]
                found.append(Case(record["about"], state, number, belief, errors))
    return found


def left_out(inputs: Array, target: Array, groups: Sequence[str], weights: Array) -> Array:
    """The prediction for each row by a ridge regression on the rows of other groups.

    >>> x = np.arange(8.0)[:, None]
    >>> found = left_out(x, 2 * x[:, 0] - 7, ["a", "b"] * 4, np.ones(8))
    >>> bool(np.corrcoef(found, x[:, 0])[0, 1] > 0.99)
    True
    """
    scaled = (inputs - inputs.mean(0)) / np.maximum(inputs.std(0), 1e-12)
    design = np.column_stack([np.ones(len(target)), scaled])
    penalty = STRENGTH * np.eye(design.shape[1])
    penalty[0, 0] = 0.0  # not of the mean
    found = np.zeros(len(target))
    names = np.asarray(groups)
    for group in sorted(set(groups)):
        own = names == group
        rows, share = design[~own], weights[~own]
        solved = np.linalg.solve(rows.T @ (rows * share[:, None]) + penalty, rows.T @ (share * target[~own]))
        found[own] = design[own] @ solved
    return found


def table() -> list[str]:
    """The root mean square of the errors, as they are and less what can be told of them."""
    known = cases()
    kinds = [(case.dataset, case.about["learner"]) for case in known]
    counts = Counter(kinds)
    weights = np.array([len(known) / len(counts) / counts[kind] for kind in kinds])
    columns = {name: np.array([[value(case)] for case in known]) for name, value in KNOWN.items()}
    everything = np.column_stack(list(columns.values()))
    of_learner = np.array([[float(case.about["learner"] == name) for name in LEARNERS] for case in known])
    rows = {"nothing but the mean error": np.zeros((len(known), 1)), **columns, "all of these": everything,
            "which learner it is": of_learner, "both": np.column_stack([everything, of_learner])}  # fmt: skip
    by = {"world": [case.world for case in known], "dataset": [case.dataset for case in known]}
    targets = {name: np.array([case.errors[i] for case in known]) for i, name in enumerate(("log T", "b"))}

    def size(values: Array) -> str:
        return f"{math.sqrt(float(np.average(values**2, weights=weights))):.3f}"

    title = f"{len(known)} tasks, {len(set(by['world']))} worlds, {len(set(by['dataset']))} datasets"
    lines = [
        f"**Root mean square of PACT's error, less what is predicted of it ({title})**", "",
        "| predicted from | " + " | ".join(f"{name}, {kind} left out" for name in targets for kind in by) + " |",
        "|---|" + "---:|" * (len(targets) * len(by)),
        "| (no prediction) | " + " | ".join(size(target) for target in targets.values() for _ in by) + " |",
    ]  # fmt: skip
    for name, inputs in rows.items():
        cells = [
            size(target - left_out(inputs, target, groups, weights))
            for target in targets.values()
            for groups in by.values()
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines
