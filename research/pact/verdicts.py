"""What could warn of harm: `python -m research.pact tables verdicts`.

A task is harmful where PACT's pooled ECE is more than 1 point above the best (in hindsight) of no calibration, TS and
T-CIL, with an interval above 0. A signal warns above a threshold: here the one with which it warns in 10 % of the
harmless tasks, chosen on the same tasks, so that signals look a little better than they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import beta

from research.pact.measuring import stored
from research.pact.tables import oracle_of

FOLDERS = ("round-six", "round-seven", "round-eight", "round-nine", "round-ten", "sizes-eight")
FORMS = ("PACT, spread", "PACT, centred")  # of rounds six and eight
HARM, FALSE_ALARMS = 1.0, 0.10


class Case(NamedTuple):
    """A task with old classes: whether harm is done, what PACT believed, what the pieces said, and the truth."""

    harmful: bool
    belief: list[float]  # log T, its error, b, its error, the largest surprise
    state: dict[str, Any]
    oracle: float  # log T
    ece: float


SIGNALS: dict[str, Callable[[Case], float]] = {
    "largest surprise of a piece (`out_of_depth` warns above 3)": lambda case: case.belief[4],
    "claimed error of log T": lambda case: case.belief[1],
    "claimed error of b": lambda case: case.belief[3],
    "surrogate and new classes differ in log T": lambda case: _differ(case.state),
    "a small log T": lambda case: -case.belief[0],
    "the true error of log T (test labels)": lambda case: abs(case.belief[0] - case.oracle),
    "the true ECE of PACT (test labels)": lambda case: case.ece,
}


def _differ(state: dict[str, Any]) -> float:
    said = [piece[0] for name in ("surrogate", "new_classes") if (piece := state[name]) is not None]
    return abs(said[0] - said[1]) if len(said) == 2 else 0.0


def cases(form: str) -> list[Case]:
    """Every task with old classes of the final runs since round six."""
    found = list[Case]()
    for record in (own for folder in FOLDERS for own in stored(folder)):
        states = [state for state in record["states"] if form in state.get("harm", {})]
        for state, row in zip(states, record["scores"][form] if states else (), strict=True):
            value, low, _ = state["harm"][form]
            truth = oracle_of(state, form)[0]
            found.append(Case(value > HARM and low > 0, state["belief"][form], state, truth, row["pooled"]))
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


def interval(hits: int, n: int) -> tuple[float, float]:
    """The 95 % interval of a share, by Clopper and Pearson.

    >>> [round(end, 2) for end in interval(0, 10)]
    [0.0, 0.31]
    """
    low = float(beta.ppf(0.025, hits, n - hits + 1)) if hits else 0.0
    high = float(beta.ppf(0.975, hits + 1, n - hits)) if hits < n else 1.0
    return low, high


def table() -> list[str]:
    """How well each signal tells harmful tasks from harmless ones, with one temperature and with a contrast."""
    titles = dict(zip(FORMS, ("one temperature", "as it is"), strict=True))
    known = {form: cases(form) for form in FORMS}
    counts = [f"{titles[form]}: {sum(c.harmful for c in own)} of {len(own)}" for form, own in known.items()]
    lines = [
        f"**Signals of harm. Harmful tasks, {'; '.join(counts)}**", "",
        "| signal | " + " | ".join(f"{title}: area under the ROC curve | warns in harmful tasks" for title in
                                   titles.values()) + " |",
        "|---|" + "---|---|" * len(FORMS),
    ]  # fmt: skip
    for name, signal in SIGNALS.items():
        cells = list[str]()
        for own in known.values():
            harmful = [case.harmful for case in own]
            area, share = separation([signal(case) for case in own], harmful)
            low, high = interval(round(share * sum(harmful)), sum(harmful))
            cells.append(f"{area:.2f} | {100 * share:.0f} % ({100 * low:.0f} to {100 * high:.0f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines
