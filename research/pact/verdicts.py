"""What could warn of harm: `python -m research.pact tables verdicts`.

A task is harmful where PACT's pooled ECE is more than 1 point above the best (in hindsight) of no calibration, TS and
T-CIL. A signal warns above a threshold. Here every signal has the threshold that lets it warn in 10 % of the harmless
tasks: with any other set of tasks it is no better than this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from research.pact.measuring import stored

FOLDERS = ("round-six", "round-seven", "round-eight")
HARM, FALSE_ALARMS = 1.0, 0.10


class Case(NamedTuple):
    """A task with old classes: how much harm is done, what PACT believed, what the pieces said, and the truth."""

    harm: float
    belief: list[float]  # log T, its error, b, its error, the largest surprise
    state: dict[str, Any]
    ece: float


SIGNALS: dict[str, Callable[[Case], float]] = {
    "largest surprise of a piece (`out_of_depth` warns above 3)": lambda case: case.belief[4],
    "claimed error of log T": lambda case: case.belief[1],
    "claimed error of b": lambda case: case.belief[3],
    "surrogate and new classes differ in log T": lambda case: _differ(case.state, case.belief),
    "log T is near 0": lambda case: -abs(case.belief[0]),
    "the true error of log T (test labels)": lambda case: abs(case.belief[0] - case.state["oracle"][0]),
    "the true ECE of PACT (test labels)": lambda case: case.ece,
}


def _differ(state: dict[str, Any], belief: Sequence[float]) -> float:
    said = [piece[0] for name in ("surrogate", "new_classes") if (piece := state[name]) is not None]
    return max(abs(value - belief[0]) for value in said) if said else 0.0


def cases(form: str) -> list[Case]:
    """Every task with old classes of the final runs since round six."""
    found = list[Case]()
    for record in (own for folder in FOLDERS for own in stored(folder)):
        if form not in record["scores"]:
            continue
        states = [state for state in record["states"] if "harm" in state]
        for state, row in zip(states, record["scores"][form], strict=True):
            if form in state["harm"]:
                found.append(Case(state["harm"][form][0], state["belief"][form], state, row["pooled"]))
    return found


def separation(values: Sequence[float], harmful: Sequence[bool]) -> tuple[float, float]:
    """The area under the ROC curve, and the share of harmful cases above the threshold of 10 % false alarms.

    >>> separation([0.1, 0.2, 0.3, 0.9], [False, False, False, True])
    (1.0, 1.0)
    """
    signal, bad = np.asarray(values, dtype=float), np.asarray(harmful, dtype=bool)
    low, high = signal[~bad], signal[bad]
    area = float(np.mean([(high > value).mean() + 0.5 * (high == value).mean() for value in low]))
    return area, float((high > np.quantile(low, 1 - FALSE_ALARMS)).mean())


def table(form: str = "PACT, spread") -> list[str]:
    """How well each signal tells harmful tasks from harmless ones."""
    known = cases(form)
    harmful = [case.harm > HARM for case in known]
    lines = [
        f"**Signals of harm: {sum(harmful)} harmful and {len(known) - sum(harmful)} harmless tasks**", "",
        "| signal | area under the ROC curve | warns in harmful tasks, at 10 % of the harmless |", "|---|---|---|",
    ]  # fmt: skip
    for name, signal in SIGNALS.items():
        area, share = separation([signal(case) for case in known], harmful)
        lines.append(f"| {name} | {area:.2f} | {100 * share:.0f} % |")
    return lines
