"""What is compared: methods that turn what is known after a task into probabilities of the test images."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

import tcil
from research.beyond import Known, adjusted, fit_on, full_imbalance, optimal_groups, oracle, scaled
from research.pact.worlds import RESERVED
from tcil.calibration.calibrators.pact import PACTConstants, PACTEvidence, PACTFilter
from tcil.calibration.calibrators.pact import evidence as pieces
from tcil.calibration.calibrators.pact.filter import BiasBelief
from tcil.calibration.calibrators.tcil import TCILEvidence
from tcil.calibration.exemplars import centred_squares, log_root_mean

Labelled = tuple[Tensor, Tensor]
Method = Callable[[Known], Tensor]


class Filter02(PACTFilter):
    """PACT as version 0.2 had it: no offset, and label shift left out where it is three errors away."""

    def label_shift(self, evidence: TCILEvidence) -> PACTEvidence | None:
        if self.bias is None or not self.informed:
            return None
        before = self.bias.mean, self.bias.variance
        piece = super().label_shift(evidence)
        if piece is None or piece.bias is None or piece.bias_error is None:
            return piece
        if abs(piece.bias - before[0]) >= 2.999 * math.hypot(math.sqrt(before[1]), piece.bias_error):
            self.bias = BiasBelief(*before, 0.0, self.constants.surrogate_offset**2)
            return None
        return piece


SIXTH = PACTConstants.one_temperature()  # of round six
EIGHTH = PACTConstants()  # of round eight, with a temperature of their own for new classes: as `tcil.PACT` is
CONSTANTS_02 = replace(
    SIXTH, surrogate_temperature_error=0.12, surrogate_bias_error=0.58, surrogate_offset=1e-3, offset_drift=1e-4,
    new_class_error=0.07, label_shift_error=0.30, temperature_drift=0.10, bias_drift=0.28, first_drift=0.40,
    bias_spread=0.38,
)  # fmt: skip
# Of rounds one to four, which did not use the level of the spread.
EARLIER = replace(SIXTH, surrogate_temperature_error=0.30, new_class_error=0.06)
NO_OFFSET = replace(EARLIER, surrogate_offset=1e-3, offset_drift=1e-4, surrogate_bias_error=0.7)


def balanced(known: Known) -> Labelled:
    """Reserve and validation set, with every class repeated until all are (nearly) equally frequent."""
    (z_old, y_old), (z_new, y_new) = reserve_of(known), known.valid
    old, new = len(y_old) / known.old, len(y_new) / len(known.task.new_columns)
    times = max(1, round(new / old))
    return torch.cat([z_new, *[z_old] * times]), torch.cat([y_new, *[y_old] * times])


def reserve_of(known: Known, per_class: int = RESERVED) -> Labelled:
    """At most so many images of each old class."""
    logits, columns = known.task.reserve_logits, known.task.reserve_columns
    rows = [(columns == column).nonzero().squeeze(1)[:per_class] for column in range(known.old)]
    chosen = torch.cat(rows)
    return logits[chosen], columns[chosen]


def tracked(
    kind: type[PACTFilter] = PACTFilter,
    constants: PACTConstants = EARLIER,
    *,
    reserve: bool = False,
    kept: Callable[[Known], Labelled] = reserve_of,
    history: bool = True,
    without: str = "",
    keep: bool = True,
    average: bool = False,
    spread: str = "",
    told: Callable[[float], float] | None = None,
) -> Method:
    """PACT or PACT-R, or one without some part; the belief is left in `known.memory`.

    A `reserve` is what was `kept`. With `spread` log T goes with the log spread of the exemplars' logits: its "level"
    is known as well (round five, as `tcil.PACT` has it), or only its change from task to task, the "whole" of it (round
    two) or something "between" 0 and the change (round three). What it is `told` of log(imbalance) may be something
    else than the truth.
    """

    def method(known: Known) -> Tensor:
        memo = known.memory.get("pact") if history else None
        log_imbalance = known.log_imbalance if known.old else None
        if told is not None and log_imbalance is not None:
            log_imbalance = told(log_imbalance)
        level = known.evidence.spread if spread == "level" else None
        state = kind.of(memo, log_imbalance, known.evidence.result.target, constants, level)
        if spread in ("whole", "between"):
            before, now_spread = known.memory.get("spread"), log_spread(known.task.memory_logits)
            if memo is not None and before is not None and now_spread is not None:
                if spread == "whole":
                    state.log_t.move(now_spread - before, 0.0)
                else:
                    between(state, now_spread - before)
            known.memory["spread"] = now_spread
        for take in state.in_order():
            if take.__name__ != without or not known.old:
                take(known.evidence)
        known.memory["pact"] = state.memo() if state.informed else None
        now = state.as_evidence("all")
        if reserve and known.old and (found := state.with_reserve(known.evidence, kept(known))):
            now = found[1]
        known.memory["belief"], known.memory["surprises"] = now, list(state.surprises)
        known.memory["contrast"] = state.contrast.mean
        assert now.log_temperature is not None
        if average:
            return averaged(known, now, state.contrast.mean)
        return adjusted(known, now.log_temperature, now.bias or 0.0, keep, state.contrast.mean)

    return method


def log_spread(logits: Tensor) -> float | None:
    """The logarithm of the root mean square of logits about the mean of their row; None where they do not differ."""
    return log_root_mean(centred_squares(logits))


def begun(known: Known) -> PACTFilter:
    """What is believed before the evidence of a task."""
    log_imbalance = known.log_imbalance if known.old else None
    return PACTFilter.of(known.memory.get("pact"), log_imbalance, known.evidence.result.target, EARLIER)


def believed(known: Known, now: PACTEvidence, surprises: Sequence[float]) -> Tensor:
    """The answer of a belief, which is left in `known.memory`."""
    known.memory["belief"], known.memory["surprises"] = now, list(surprises)
    assert now.log_temperature is not None
    return adjusted(known, now.log_temperature, now.bias or 0.0)


def between(state: PACTFilter, step: float) -> None:
    """Log T moves by something between 0 and this step, anything equally likely; as b does with the imbalance."""
    state.log_t.move(step / 2, abs(step) / math.sqrt(12))


def bennett(known: Known) -> Tensor:
    """PACT-R in which both sides tell b, and nothing is counted twice.

    The odds of old against new classes, on all validation images and all reserved ones: the likelihood of an image's
    group where groups are as frequent as in this sample, which is Bennett's equation for b (Shirts et al. 2003). It
    takes the place of label shift, its one-sided form. Of T the reserve tells within old classes.
    """
    state = begun(known)
    for name in ("surrogate", "new_classes"):
        getattr(state, name)(known.evidence)
    before = state.as_evidence("all")
    surprises = list(state.surprises)
    state.label_shift(known.evidence)
    known.memory["pact"] = state.memo() if state.informed else None
    if not known.old:
        return believed(known, state.as_evidence("all"), surprises)
    return believed(known, PACTEvidence("all", *both_sides(known, before)), surprises)


def both_sides(known: Known, before: PACTEvidence) -> tuple[float, float, float, float]:
    """The mode of log T and b, and their errors, by what is believed and the likelihood of both sides."""
    assert before.log_temperature is not None
    assert before.bias is not None
    mean = torch.tensor([before.log_temperature, before.bias], dtype=torch.float64)
    error = torch.tensor([before.log_temperature_error, before.bias_error], dtype=torch.float64)
    point, covariance = sides(reserve_of(known), known.valid, known.evidence.is_new, mean, error.square())
    errors = covariance.diagonal().clamp(min=1e-8).sqrt()
    return float(point[0]), float(errors[0]), float(point[1]), float(errors[1])


def sides(kept: Labelled, valid: Labelled, is_new: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """The mode of (log T, b) and its covariance, by what is believed and the likelihood of both sides."""
    (z_old, y_old), (z_new, y_new) = kept, valid
    is_old = (~is_new).double()
    z, side = torch.cat([z_old, z_new]).double(), torch.cat([torch.ones(len(y_old)), torch.zeros(len(y_new))]).double()
    n_old, n_new = int(is_old.sum()), int((1 - is_old).sum())
    offset = math.log(len(y_old) / n_old) - math.log(len(y_new) / n_new)  # of images per class in this sample
    masked = torch.where(is_old.bool(), 0.0, -torch.inf), torch.where(is_old.bool(), -torch.inf, 0.0)

    def loss(point: Tensor) -> Tensor:
        scaled = z * torch.exp(-point[0])
        odds = torch.logsumexp(scaled + masked[0], 1) - torch.logsumexp(scaled + masked[1], 1) + point[1] + offset
        group = torch.nn.functional.binary_cross_entropy_with_logits(odds, side, reduction="sum")
        rows = z_old.double() * torch.exp(-point[0])
        inside = torch.nn.functional.cross_entropy(rows + masked[0], y_old, reduction="sum")
        return group + inside + 0.5 * ((point - mean).square() / variance).sum()

    point = mean.clone()
    for _ in range(50):
        gradient = torch.autograd.functional.jacobian(loss, point)
        curvature = torch.autograd.functional.hessian(loss, point)
        values, vectors = torch.linalg.eigh(curvature)
        step = vectors @ ((vectors.T @ gradient) / values.abs().clamp(min=1e-3))
        size = min(1.0, 1.0 / float(step.norm().clamp(min=1e-9)))
        while size > 1e-6 and float(loss(point - size * step)) > float(loss(point)):
            size /= 2
        point = point - size * step
        if float(step.norm()) < 1e-6 or size <= 1e-6:
            break
    return point, torch.linalg.inv(torch.autograd.functional.hessian(loss, point))


def averaged(known: Known, belief: PACTEvidence, contrast: float = 0.0) -> Tensor:
    """The mean of q over what is believed of T and b, by nine points of Gauss and Hermite."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(3)
    weights = weights / weights.sum()
    total = torch.zeros_like(known.task.test_logits, dtype=torch.float64)
    assert belief.log_temperature is not None
    for x, wx in zip(nodes, weights, strict=True):
        for y, wy in zip(nodes, weights, strict=True):
            log_t = belief.log_temperature + x * (belief.log_temperature_error or 0.0)
            bias = (belief.bias or 0.0) + y * (belief.bias_error or 0.0)
            total += wx * wy * adjusted(known, log_t, bias, contrast=contrast).exp()
    return total.log()


def averaged_by_innovations(known: Known) -> Tensor:
    """The same with the present form, and errors as large as this run's surprises say: theirs is 1 if claims are right.

    The claim itself counts as four surprises.
    """
    tracked(constants=EIGHTH, spread="level")(known)
    now: PACTEvidence = known.memory["belief"]
    seen = known.memory.setdefault("innovations", [])
    seen += known.memory["surprises"]
    factor = math.sqrt((4 + sum(value**2 for value in seen)) / (4 + len(seen)))
    wide = replace(
        now,
        log_temperature_error=factor * (now.log_temperature_error or 0.0),
        bias_error=factor * (now.bias_error or 0.0),
    )
    known.memory["belief"] = wide
    return averaged(known, wide, known.memory["contrast"])


def reserve_bias(known: Known) -> Tensor:
    """The same map as PACT-R, by reserve and validation set alone."""
    found = pieces.joint_fit(known.valid, reserve_of(known), known.evidence.is_new)
    return adjusted(known, found[0], found[1]) if found else scaled(known, 1.0)


def fitted_map(build_map: Callable[[Tensor, Tensor, Tensor], Tensor], size: Callable[[Known], int]) -> Method:
    """A parametric map of the logits, fitted on the balanced set by cross-entropy (L-BFGS, from the identity)."""

    def method(known: Known) -> Tensor:
        z, y = balanced(known)
        z, is_old = z.double(), (~known.evidence.is_new).double()

        def loss(x: np.ndarray[Any, Any]) -> tuple[float, np.ndarray[Any, Any]]:
            point = torch.tensor(x, requires_grad=True)
            value = torch.nn.functional.cross_entropy(build_map(point, z, is_old), y)
            (gradient,) = torch.autograd.grad(value, point)
            return float(value.detach()), gradient.numpy()

        found = minimize(loss, np.zeros(size(known)), jac=True, method="L-BFGS-B", options={"maxiter": 200}).x
        return torch.log_softmax(build_map(torch.tensor(found), known.task.test_logits.double(), is_old), dim=1)

    return method


def bcts(x: Tensor, z: Tensor, is_old: Tensor) -> Tensor:
    """Alexandari et al. 2020: a temperature, and a bias for each class."""
    return z * torch.exp(-x[0]) + x[1:]


def vector_scaling(x: Tensor, z: Tensor, is_old: Tensor) -> Tensor:
    """Guo et al. 2017: a factor and a bias for each class."""
    k = z.shape[1]
    return z * torch.exp(-x[:k]) + x[k:]


def bic_layer(x: Tensor, z: Tensor, is_old: Tensor) -> Tensor:
    """Wu et al. 2019: alpha and beta on the new columns; with a temperature for all."""
    return (z * torch.exp(x[1] * (1 - is_old)) + x[2] * (1 - is_old)) * torch.exp(-x[0])


def balanced_groups(known: Known) -> Tensor:
    scaling = tcil.GroupTemperatureScaling().fit(*balanced(known), new_classes=known.task.new_columns)
    found: Tensor = scaling.transform(known.task.test_logits)
    return found


def classes_of(known: Known) -> int:
    return len(known.task.seen)


METHODS: dict[str, tuple[str, Method]] = {
    "Vanilla": ("no old data", lambda known: scaled(known, 1.0)),
    "TS": ("no old data", lambda known: scaled(known, fit_on(known.valid))),
    "T-CIL": ("no old data", lambda known: scaled(known, known.evidence.result.temperature)),
    "whole imbalance": ("no old data", full_imbalance),
    "PACT 0.2": ("no old data", tracked(Filter02, CONSTANTS_02)),
    "PACT": ("no old data", tracked()),
    "PACT, T by the spread": ("no old data", tracked(spread="whole")),
    "PACT, T partly by the spread": ("no old data", tracked(spread="between")),
    "balanced TS": ("reserve", lambda known: scaled(known, fit_on(balanced(known)))),
    "balanced group TS": ("reserve", balanced_groups),
    "BiC layer and T": ("reserve", fitted_map(bic_layer, lambda known: 3)),
    "BCTS": ("reserve", fitted_map(bcts, lambda known: classes_of(known) + 1)),
    "vector scaling": ("reserve", fitted_map(vector_scaling, lambda known: 2 * classes_of(known))),
    "T and bias by the reserve alone": ("reserve", reserve_bias),
    "PACT-R": ("reserve", tracked(reserve=True)),
    "PACT-R, T by the spread": ("reserve", tracked(reserve=True, spread="whole")),
    "PACT-R, T partly by the spread": ("reserve", tracked(reserve=True, spread="between")),
    "PACT-R, Bennett": ("reserve", bennett),
    "Optimal TS": ("oracle", lambda known: scaled(known, fit_on((known.task.test_logits, known.task.test_columns)))),
    "Optimal group TS": ("oracle", optimal_groups),
    "Optimal T and bias": ("oracle", lambda known: adjusted(known, *oracle(known))),
}
# Parts left out, with log T as it is shipped and by the spread.
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "PACT without history": ("ablation", {"history": False}),
    "PACT without surrogate": ("ablation", {"without": "surrogate"}),
    "PACT without new classes": ("ablation", {"without": "new_classes"}),
    "PACT without label shift": ("ablation", {"without": "label_shift"}),
    "PACT without the offset": ("ablation", {"constants": NO_OFFSET}),
    "PACT, posterior average": ("ablation", {"average": True}),
    "PACT-R without history": ("ablation", {"reserve": True, "history": False}),
    "PACT, predictions too": ("predictions too", {"keep": False}),
    "PACT-R, predictions too": ("predictions too", {"reserve": True, "keep": False}),
}
for _name, (_family, _own) in PARTS.items():
    METHODS[_name] = _family, tracked(**_own)
    METHODS[f"{_name} (T by the spread)"] = f"{_family} of round two", tracked(**_own, spread="whole")
# The candidate of round four.
WIDER = replace(EARLIER, new_class_error=0.10)
METHODS["PACT, wider"] = "round four", tracked(constants=WIDER)
METHODS["PACT-R, wider"] = "round four", tracked(constants=WIDER, reserve=True)
# The form of round six, with one temperature. Records of round five have these names too, with what is `FIFTH` here.
FIFTH = replace(SIXTH, new_class_error=0.11, spread_error=0.06, first_spread_drift=0.07)
for _name, _family, _constants in (("spread", "round five", SIXTH), ("centred", "round eight", EIGHTH)):
    _parts: dict[str, dict[str, Any]] = {
        "PACT, {}": {},
        "PACT-R, {}": {"reserve": True},
        "PACT, {}, predictions too": {"keep": False},
        "PACT-R, {}, predictions too": {"reserve": True, "keep": False},
        "PACT, {}, without new classes": {"without": "new_classes"},
        "PACT, {}, without surrogate": {"without": "surrogate"},
        "PACT, {}, without label shift": {"without": "label_shift"},
        "PACT, {}, without history": {
            "history": False, "constants": replace(_constants, late_spread_error=_constants.first_spread_drift)
        },
    }  # fmt: skip
    for _title, _own in _parts.items():
        METHODS[_title.format(_name)] = _family, tracked(**{"constants": _constants, "spread": "level", **_own})
# The imbalance that PACT is told, where it is not the truth.
TOLD: dict[str, Callable[[float], float]] = {
    "1": lambda log: 0.0,
    "half of it": lambda log: log - math.log(2),
    "twice of it": lambda log: log + math.log(2),
}
# The present form under its own name, as the studies after round eight have it.
PRESENT: dict[str, Method] = {kind: METHODS[f"{kind}, centred"][1] for kind in ("PACT", "PACT-R")}
for _name, _told in TOLD.items():
    for _kind in ("PACT", "PACT-R"):
        PRESENT[f"{_kind}, told {_name}"] = tracked(
            constants=EIGHTH, spread="level", reserve=_kind == "PACT-R", told=_told
        )
FAMILIES = ("no old data", "reserve", "oracle", "ablation", "predictions too")  # others are measured by one study alone
BASES = ("Vanilla", "TS", "T-CIL")
OURS = (
    "PACT 0.2", "PACT", "PACT, T by the spread", "PACT, T partly by the spread",
    "PACT-R", "PACT-R, T by the spread", "PACT-R, T partly by the spread", "PACT-R, Bennett",
)  # fmt: skip
