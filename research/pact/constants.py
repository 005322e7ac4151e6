"""PACT's constants: those under which the oracles of development runs are most likely."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from scipy.optimize import minimize

import tcil
from research import ROOT
from research.pact.measuring import stored
from research.pact.methods import CONSTANTS_02, EIGHTH
from tcil.calibration.calibrators.pact import PACTConstants, PACTFilter
from tcil.calibration.calibrators.pact.filter import Sum
from tcil.calibration.exemplars import LogitSpread

FITTED = (
    "spread_ratio", "spread_step", "spread_error", "spread_drift", "first_spread_drift", "few_exemplars",
    "contrast_error", "contrast_drift",
    "surrogate_temperature_error", "new_class_error", "surrogate_bias_error", "surrogate_offset", "offset_drift",
    "label_shift_error", "temperature_drift", "bias_drift", "first_drift", "bias_spread",
)  # fmt: skip
_FEW_NEW = 0.3  # weight of runs with fewer than four new classes per task


def unlikelihood(records: Sequence[dict[str, Any]], constants: PACTConstants) -> float:
    """The mean negative log-density of the oracle under PACT's belief, learners and datasets counting equally."""
    groups: dict[tuple[str, str, bool], list[float]] = {}
    for record in records:
        about = record["about"]
        few = about["classes"] / about["tasks"] < 4
        own = groups.setdefault((about["learner"], about["dataset"], few), [])
        own += list(_densities(record, constants))
    weights = {key: (_FEW_NEW if key[2] else 1.0) * (2.0 if key[1] == "letters" else 1.0) for key in groups}
    return sum(weights[k] * float(np.mean(v)) for k, v in groups.items()) / sum(weights.values())


def _densities(record: dict[str, Any], c: PACTConstants) -> Iterable[float]:
    """Of a run's stored pieces. The new classes enter by their fit, label shift as it is at the oracle's T; surrogate
    and label shift are those of one temperature for all classes, so that b is left as in round six.

    The spread counts where a record has it; exemplars per class are the whole memory's.
    """
    memo: dict[str, Any] | None = None
    none = tcil.fit_temperature([[1.0, 0.0], [0.0, 1.0], [0.4, 0.0]], [0, 1, 1])
    about = record["about"]
    for number, state in enumerate(record["states"], start=1):
        spread = None
        if state.get("log_spread") is not None:
            spread = LogitSpread(state["log_spread"], about["memory"] * about["tasks"] / about["classes"] / number)
        beliefs = PACTFilter.of(memo, state.get("log_imbalance"), none, c, spread)
        if state["new_classes"] and state["new_classes"][1] < 1:
            own = 0.0 if spread is not None and beliefs.bias is None else c.new_class_error
            value, error = state["new_classes"][0], math.hypot(state["new_classes"][1], own)
            of_new = Sum(beliefs.log_t, beliefs.contrast)
            if spread is not None:
                of_new.widen(value, error, c.most_surprise)
            of_new.see(value, error)
        if beliefs.bias is not None and state["surrogate"]:
            t, t_error, b, b_error = state["surrogate"]
            beliefs.log_t.see(t, math.hypot(t_error, c.surrogate_temperature_error))
            beliefs.bias.see(b, math.hypot(b_error, c.surrogate_bias_error), with_offset=True)
        if beliefs.bias is not None and state["label_shift"]:
            value, slope, error = state["label_shift"]
            wide = math.hypot(error, c.label_shift_error, slope * math.sqrt(beliefs.log_t.variance))
            beliefs.bias.see(value - c.label_shift_offset, wide)
        memo = beliefs.memo()
        if beliefs.bias is not None:
            believed = (beliefs.log_t.mean, beliefs.log_t.variance), (beliefs.bias.mean, beliefs.bias.variance)
            for (value, variance), truth in zip(believed, state["oracle"], strict=True):
                wide = variance + 1e-4  # the oracle's own
                yield 0.5 * (truth - value) ** 2 / wide + 0.5 * math.log(wide)


def fit(names: Sequence[str]) -> None:
    """The most likely constants on the runs stored for docs/beyond.md and on these of this study."""
    records = [json.loads(path.read_text()) for path in sorted((ROOT / "docs/results/beyond").glob("*.json"))]
    records += [record for name in names for record in stored(name)]

    def at(x: np.ndarray[Any, Any]) -> PACTConstants:
        return PACTConstants(**dict(zip(FITTED, np.exp(np.clip(x, -6, 1)).tolist(), strict=True)))

    start = np.log([getattr(EIGHTH, name) for name in FITTED])
    print(f"as they are: {unlikelihood(records, EIGHTH):.3f}; as in 0.2: {unlikelihood(records, CONSTANTS_02):.3f}")
    found = minimize(
        lambda x: unlikelihood(records, at(x)),
        start,
        method="Powell",
        options={"maxfev": 250, "xtol": 0.05, "ftol": 1e-3},
    )
    print(f"the most likely, over {len(records)} runs: {found.fun:.3f}")
    for name in FITTED:
        print(f"{name} = {getattr(at(found.x), name):.3f}    (now {getattr(EIGHTH, name)})")
