"""What PACT believes from task to task: a Kalman filter for log T, and one for the bias and the surrogate's offset."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tcil.calibration.calibrators.fitted import History
from tcil.calibration.calibrators.pact.constants import MEASURED, PACTConstants
from tcil.calibration.calibrators.pact.evidence import (
    Labelled,
    PACTEvidence,
    balanced_likelihood,
    evened,
    label_shift,
    laplace,
    surrogate,
)
from tcil.calibration.calibrators.tcil import TCILEvidence
from tcil.calibration.exemplars import LogitSpread
from tcil.calibration.temperature import TemperatureFit
from tcil.foundation.errors import invalid

LARGEST = 20.0  # log(imbalance)
LARGEST_LOG = 1000.0  # of a spread


@dataclass
class Belief:
    """A mean and a variance: a Kalman filter of one number."""

    mean: float
    variance: float

    def see(self, value: float, error: float) -> None:
        """Take in an observation with its standard error."""
        weight = self.variance / (self.variance + error**2)
        self.mean += weight * (value - self.mean)
        self.variance *= 1 - weight

    def move(self, step: float, drift: float) -> None:
        """To the next task."""
        self.mean += step
        self.variance += drift**2

    def surprise(self, value: float, error: float) -> float:
        """How many errors an observation is away."""
        return abs(value - self.mean) / math.sqrt(self.variance + error**2)

    def widen(self, value: float, error: float, most: float) -> None:
        """Believe so much less that an observation is at most so many errors away."""
        if self.surprise(value, error) > most:
            self.variance = ((value - self.mean) / most) ** 2 - error**2


class Sum:
    """The sum of independent beliefs, which an observation of it tells something about.

    An approximation: the observation makes the parts depend on each other, which is left out. The constants of PACT
    were measured with it.
    """

    def __init__(self, *parts: Belief) -> None:
        self._parts = parts

    @property
    def mean(self) -> float:
        """That of the sum."""
        return sum(part.mean for part in self._parts)

    @property
    def variance(self) -> float:
        """That of the sum."""
        return sum(part.variance for part in self._parts)

    def see(self, value: float, error: float) -> None:
        """Take in an observation with its standard error: each part by its share of the variance."""
        news, total = value - self.mean, self.variance + error**2
        for part in self._parts:
            weight = part.variance / total
            part.mean += weight * news
            part.variance *= 1 - weight

    def surprise(self, value: float, error: float) -> float:
        """How many errors an observation is away."""
        return Belief(self.mean, self.variance).surprise(value, error)

    def widen(self, value: float, error: float, most: float) -> None:
        """Believe so much less of each that an observation is at most so many errors away."""
        whole = Belief(self.mean, before := self.variance)
        whole.widen(value, error, most)
        for part in self._parts:
            part.variance *= whole.variance / before


@dataclass
class BiasBelief:
    """The bias, and by how much the surrogate is off in it: a Kalman filter of two numbers.

    The offset belongs to the learner and hardly changes from task to task. Label shift, which does not have it, teaches
    it, so that the surrogate is worth more with every task.
    """

    mean: float
    variance: float
    offset: float
    offset_variance: float
    covariance: float = 0.0

    def see(self, value: float, error: float, *, with_offset: bool = False) -> None:
        """Take in an observation of the bias, or of the bias and the offset together."""
        s = 1.0 if with_offset else 0.0
        of_bias, of_offset = self.variance + s * self.covariance, self.covariance + s * self.offset_variance
        total = of_bias + s * of_offset + error**2
        news = value - self.mean - s * self.offset
        self.mean += of_bias / total * news
        self.offset += of_offset / total * news
        self.variance -= of_bias**2 / total
        self.offset_variance -= of_offset**2 / total
        self.covariance -= of_bias * of_offset / total

    def move(self, step: float, drift: float, offset_drift: float) -> None:
        """To the next task."""
        self.mean += step
        self.variance += drift**2
        self.offset_variance += offset_drift**2

    def surprise(self, value: float, error: float, *, with_offset: bool = False) -> float:
        """How many errors an observation is away."""
        s = 1.0 if with_offset else 0.0
        variance = self.variance + s * (2 * self.covariance + self.offset_variance)
        return abs(value - self.mean - s * self.offset) / math.sqrt(variance + error**2)


class PACTFilter:
    """What is believed of log T, and of b and the contrast once there are old classes.

    The contrast is log(T of new classes / T of old ones); with `PACTConstants.one_temperature()` it is 0.
    `weigh` takes in all that a task tells; `surrogate`, `new_classes` and `label_shift` one piece each, in this order,
    the new classes first where they tell the contrast.
    `surprises` are the errors by which this task's pieces were away from what was believed before each.
    `with_reserve` tells what is believed with a reserve in addition; it leaves the filter as it is, because the same
    images come back after the next task.
    """

    def __init__(
        self,
        log_t: Belief,
        bias: BiasBelief | None,
        log_imbalance: float | None,
        *,
        informed: bool,
        constants: PACTConstants = MEASURED,
        spread: LogitSpread | None = None,
        contrast: Belief | None = None,
    ) -> None:
        self.log_t, self.bias, self.log_imbalance, self.spread = log_t, bias, log_imbalance, spread
        self.contrast = Belief(0.0, 0.0) if contrast is None else contrast
        self.informed = informed  # by evidence on T, on this task or before
        self.constants = constants
        self.surprises: list[float] = []

    @classmethod
    def of(
        cls,
        history: History | None,
        log_imbalance: float | None,
        target: TemperatureFit,
        constants: PACTConstants = MEASURED,
        spread: LogitSpread | None = None,
    ) -> PACTFilter:
        """What the task before left, moved with the spread of the logits and less certain by the drift; or a prior.

        `log_imbalance` is None where there are no old classes; `target` is the temperature of the validation set, and
        `spread` that of the exemplars' logits, if it is known.
        """
        bias = contrast = None
        if history is None:
            log_t = _prior(target, constants, spread, late=log_imbalance is not None)
        else:
            rehearsal_begins = history["bias"] is None and log_imbalance is not None
            log_t = _moved(history, constants, spread, rehearsal_begins=rehearsal_begins)
            if history["bias"] is not None and log_imbalance is not None:
                # A memo of version 0.2 has no offset.
                offset = history.get("offset") or (0.0, constants.surrogate_offset**2, 0.0)
                bias = BiasBelief(*history["bias"], *offset)
                step = (log_imbalance - history["log_imbalance"]) / 2
                bias.move(step, constants.bias_drift, constants.offset_drift)
        if log_imbalance is not None and bias is None:
            variance = log_imbalance**2 / 12 + constants.bias_spread**2
            bias = BiasBelief(log_imbalance / 2, variance, 0.0, constants.surrogate_offset**2)
        if log_imbalance is not None:
            contrast = Belief(0.0, constants.contrast_error**2)
            if contrast.variance and history is not None and (before := history.get("contrast")) is not None:
                contrast = Belief(*before)
                contrast.move(0.0, constants.contrast_drift)
        known = history is not None
        return cls(log_t, bias, log_imbalance, informed=known, constants=constants, spread=spread, contrast=contrast)

    def memo(self) -> History:
        """What the next task gets as `history`."""
        return {
            "calibrator": "PACT",
            "log_temperature": [self.log_t.mean, self.log_t.variance],
            "bias": None if self.bias is None else [self.bias.mean, self.bias.variance],
            "offset": None
            if self.bias is None
            else [self.bias.offset, self.bias.offset_variance, self.bias.covariance],
            "log_imbalance": self.log_imbalance,
            "log_spread": None if self.spread is None else self.spread.log,
            "contrast": [self.contrast.mean, self.contrast.variance] if self.contrast.variance else None,
        }

    def as_evidence(self, source: str) -> PACTEvidence:
        """What is believed now, as a piece of evidence."""
        bias = (None, None) if self.bias is None else (self.bias.mean, math.sqrt(self.bias.variance))
        return PACTEvidence(source, self.log_t.mean, math.sqrt(self.log_t.variance), *bias)

    def first_answer(self, evidence: TCILEvidence) -> PACTEvidence:
        """What is believed of a task without old classes, before its evidence was taken in.

        Its few classes have a ratio of T and spread that varies more than that of later tasks, for which the memo is.
        """
        own = PACTFilter(
            Belief(self.log_t.mean, self.log_t.variance), None, None,
            informed=self.informed, constants=self.constants, spread=self.spread,
        )  # fmt: skip
        if self.spread is not None:
            own.log_t.move(0.0, self.constants.first_spread_error)
        own.weigh(evidence)
        return own.as_evidence("all")

    def weigh(self, evidence: TCILEvidence) -> list[PACTEvidence]:
        """Take in every piece that the data identify, and list them."""
        pieces = [take(evidence) for take in self.in_order()]
        return [piece for piece in pieces if piece is not None]

    def in_order(self) -> tuple[Callable[[TCILEvidence], PACTEvidence | None], ...]:
        """The pieces in the order in which they are taken in."""
        if self.contrast.variance:  # which the new classes tell, and the others take as it is then
            return self.new_classes, self.surrogate, self.label_shift
        return self.surrogate, self.new_classes, self.label_shift

    def surrogate(self, evidence: TCILEvidence) -> PACTEvidence | None:
        """Take in the validation set together with the perturbed exemplars of old classes."""
        if self.bias is None:
            return None
        pushed = None if evidence.pushed is None else self._evened(evidence, evidence.pushed)
        found = surrogate(replace(evidence, valid=self._evened(evidence, evidence.valid), pushed=pushed))
        if found is None:
            return None
        log_t = found[0], math.hypot(found[1], self.constants.surrogate_temperature_error)
        bias = found[2], math.hypot(found[3], self.constants.surrogate_bias_error)
        self.surprises += [self.log_t.surprise(*log_t), self.bias.surprise(*bias, with_offset=True)]
        self.log_t.see(*log_t)
        self.bias.see(*bias, with_offset=True)
        self.informed = True
        return PACTEvidence("surrogate", *log_t, *bias)

    def new_classes(self, evidence: TCILEvidence) -> PACTEvidence | None:
        """Take in the validation set with the logits of the new classes alone."""
        is_new, (logits, columns) = evidence.is_new, evidence.valid
        # Without old classes, the new ones are all there are.
        error = 0.0 if self.bias is None and self.spread is not None else self.constants.new_class_error
        prior, of_new = self.constants.prior_error, Sum(self.log_t, self.contrast)
        within = logits[:, is_new], (is_new.cumsum(0) - 1)[columns]

        def found(variance: float) -> tuple[float, float] | None:
            seen = laplace(*within, of_new.mean, variance + error**2, prior)
            return None if seen is None else (seen[0], math.hypot(seen[1], error))

        if self.spread is not None and (alone := found(prior**2)) is not None:
            # A network may be of another kind than those on which the ratio was measured: what it says alone decides.
            # Without old classes that is no contradiction: T itself was measured, and only the ratio is another.
            if self.bias is not None:
                self.surprises.append(of_new.surprise(*alone))
            of_new.widen(*alone, self.constants.most_surprise)
        log_t = found(of_new.variance)
        if log_t is None:
            return None
        if self.spread is None:
            self.surprises.append(of_new.surprise(*log_t))
        of_new.see(*log_t)
        self.informed = True
        return PACTEvidence("new classes", *log_t, None, None)

    def label_shift(self, evidence: TCILEvidence) -> PACTEvidence | None:
        """Take in the mean odds of old against new classes, at the T known by now; the less, the farther off."""
        if self.bias is None or not self.informed:
            return None
        found = label_shift(*self._evened(evidence, evidence.valid), evidence.is_new, self.log_t.mean)
        if found is None:
            return None
        value, slope, error = found
        value -= self.constants.label_shift_offset
        error = math.hypot(error, self.constants.label_shift_error, slope * math.sqrt(self.log_t.variance))
        # Where old and new classes do not overlap in the images at hand, the mean odds are far too small, and b too
        # large; what the images do not hold, their spread does not tell.
        far = self.bias.surprise(value, error) / self.constants.most_surprise
        if far > 1:
            error = math.sqrt(far**2 * (self.bias.variance + error**2) - self.bias.variance)
        bias = value, error
        self.bias.see(*bias)
        return PACTEvidence("label shift", None, None, *bias)

    def with_reserve(self, evidence: TCILEvidence, reserve: Labelled) -> tuple[PACTEvidence, PACTEvidence] | None:
        """What a reserve of old classes says, and what is believed with it; None where it says nothing.

        The reserve enters with its sampling error, which is overstated since the numbers of images per class are fixed;
        its images are what the test set is made of.
        """
        if self.bias is None or not len(reserve[1]):
            return None
        mean, variance = (self.log_t.mean, self.bias.mean), (self.log_t.variance, self.bias.variance)
        valid, kept = (self._evened(evidence, rows) for rows in (evidence.valid, reserve))
        said, found, surprise = balanced_likelihood(valid, kept, evidence.is_new, mean, variance)
        if self.informed:
            self.surprises.append(surprise)
        piece = PACTEvidence("reserve", *(said or (None, None, None, None)))
        self.informed = True
        return piece, PACTEvidence("all", *found)

    def _evened(self, evidence: TCILEvidence, rows: Labelled) -> Labelled:
        """Logits of which all classes have one temperature, by the contrast as it is believed now."""
        return evened(rows, evidence.is_new, self.contrast.mean, math.exp(self.log_t.mean))


def _prior(target: TemperatureFit, constants: PACTConstants, spread: LogitSpread | None, *, late: bool) -> Belief:
    """What is believed of log T before any evidence: that it goes with the spread, or next to nothing.

    It is `late` where there are old classes by then: no first task has shown how well the spread tells T.
    """
    if spread is not None:
        log_t = Belief(*_by_spread(constants, spread))
        if late:
            log_t.move(constants.spread_step, constants.late_spread_error)
        return log_t
    far, reach = math.log(target.temperature), constants.prior_reach
    return Belief(far - min(max(far, -reach), reach), constants.prior_error**2)


def _by_spread(constants: PACTConstants, spread: LogitSpread) -> tuple[float, float]:
    """Log T by the spread alone, and its variance."""
    variance = constants.spread_error**2 + (constants.few_exemplars / spread.per_class) ** 2
    return math.log(constants.spread_ratio) + spread.log, variance


def _moved(history: History, constants: PACTConstants, spread: LogitSpread | None, *, rehearsal_begins: bool) -> Belief:
    """What the task before left of log T, moved to this one."""
    log_t, before = Belief(*history["log_temperature"]), history.get("log_spread")
    if spread is not None and before is not None:
        drift = constants.spread_drift
        if rehearsal_begins:
            # With old classes the ratio is another, of which the first one tells a part; beyond three errors it belongs
            # to a network of another kind, and is kept.
            away, most = log_t.mean - math.log(constants.spread_ratio) - before, constants.most_surprise
            usual = min(max(away, -most * constants.spread_error), most * constants.spread_error)
            kept = constants.first_spread_kept
            log_t = Belief(log_t.mean - (1 - kept) * usual, kept**2 * log_t.variance)
            log_t.move(constants.spread_step, 0.0)
            drift = constants.first_spread_drift
        log_t.move(spread.log - before, math.hypot(drift, constants.few_exemplars / spread.per_class))
        return log_t
    log_t.move(0.0, constants.first_drift if rehearsal_begins else constants.temperature_drift)
    if spread is not None:  # the first that is known: of an earlier version, or of logits that did not differ
        value, variance = _by_spread(constants, spread)
        old = rehearsal_begins or history["bias"] is not None
        value += constants.spread_step if old else 0.0
        log_t.see(value, math.hypot(math.sqrt(variance), constants.late_spread_error))
    return log_t


def check_history(history: History | None) -> None:
    """Refuse what is not the memo of a PACT."""
    if history is None:
        return

    def numbers(values: Any, largest: float = 100.0) -> bool:
        return all(isinstance(v, (int, float)) and not isinstance(v, bool) and abs(v) <= largest for v in values)

    try:
        beliefs = [history["log_temperature"], *([] if history["bias"] is None else [history["bias"]])]
        offset = history.get("offset")
        sound = (
            history["calibrator"] == "PACT"
            and isinstance(history["model"], str)
            and (history["bias"] is None) == (history["log_imbalance"] is None)
            and (history["log_imbalance"] is None or numbers([history["log_imbalance"]], LARGEST))
            and all(len(belief) == 2 and numbers(belief) and belief[1] > 0 for belief in beliefs)
            and (offset is None or _is_offset(offset, history["bias"], numbers))
            and (history.get("log_spread") is None or numbers([history["log_spread"]], LARGEST_LOG))
            and (history.get("contrast") is None or _is_contrast(history["contrast"], history["bias"], numbers))
            and (history.get("before") is None or "before" not in history["before"])
        )
        check_history(history.get("before") if sound else None)
    except (KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise invalid("history", repr(history)[:80], "history_ of the PACT of the task before")


def _is_offset(offset: Any, bias: Any, numbers: Callable[[Any], bool]) -> bool:
    """Whether it goes with the belief of the bias: three numbers, and a covariance that can be one."""
    sound = bias is not None and len(offset) == 3 and numbers(offset) and offset[1] > 0
    return bool(sound and offset[2] ** 2 <= bias[1] * offset[1])


def _is_contrast(contrast: Any, bias: Any, numbers: Callable[[Any], bool]) -> bool:
    """Whether it goes with a belief of the bias: a mean and a variance."""
    return bool(bias is not None and len(contrast) == 2 and numbers(contrast) and contrast[1] > 0)
