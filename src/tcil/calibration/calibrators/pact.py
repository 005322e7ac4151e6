"""PACT: prior-adjusted confidence, tracked from task to task. One temperature, and one correction for rehearsal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, cast

import torch
from scipy.optimize import brentq
from torch import Tensor, nn

from tcil.calibration import random_state
from tcil.calibration.arrays import as_classes, without_masked
from tcil.calibration.calibrators.base import Calibrator
from tcil.calibration.calibrators.inputs import positive
from tcil.calibration.calibrators.maps import CalibrationMap, PriorAdjustedMap
from tcil.calibration.calibrators.tcil import TCIL, TCILEvidence, TCILResult, warn_of
from tcil.calibration.classifier import weights_hash
from tcil.calibration.errors import invalid
from tcil.calibration.examples import MAX_BATCHES, Examples, ExampleStream, Unpack
from tcil.calibration.features import FeatureSpec
from tcil.calibration.options import Verdict
from tcil.calibration.temperature import TemperatureFit, solve_temperature

# Standard deviations, measured once on the development runs (docs/beyond.md says which, and how). The errors are those
# beyond sampling, which is computed.
SURROGATE_ERROR = (0.12, 0.58)  # of log T and of the bias, when fitted on perturbed exemplars of old classes
NEW_CLASS_ERROR = 0.07  # of log T, when fitted on the new classes among themselves
LABEL_SHIFT_ERROR = 0.30  # of the bias by label shift
DRIFT = (0.10, 0.28)  # of log T and of the bias, from one task to the next
FIRST_DRIFT = 0.40  # of log T, from a task without old classes to the next
BIAS_SPREAD = 0.38  # of the bias, beside that of a uniform one between 0 and log(imbalance)
PRIOR_ERROR = 1.0  # of log T before any evidence
_REACH = 2.0  # so far from 0 may log T be by that prior: farther off, logits have another scale, and it moves along
_LARGEST = 20.0  # log(imbalance)
_INVERTED = 0.5  # an imbalance below which it was perhaps meant the other way round
_FEWEST = 5  # validation images below which a mean or an error means nothing
_OF_THE_SEARCH = frozenset(
    (Verdict.TARGET_ABOVE_RANGE, Verdict.TARGET_JUMPED, Verdict.BELOW_TOLERANCE, Verdict.BRACKET_WIDENED,
     Verdict.DEGENERATE_VALID, Verdict.DEGENERATE_MEMORY)
)  # fmt: skip


@dataclass(frozen=True)
class PACTEvidence:
    """One piece of evidence: what it says of log T and of the bias, with standard errors (None: nothing).

    >>> import tcil
    >>> tcil.PACTEvidence("surrogate", 0.7, 0.17, 1.9, 0.61).source
    'surrogate'
    """

    source: str
    log_temperature: float | None
    log_temperature_error: float | None
    bias: float | None
    bias_error: float | None


@dataclass(frozen=True)
class PACTResult:
    """What PACT found: softmax(z / temperature + bias for old classes) is honest where classes are equally frequent.

    The errors are standard errors by the filter, as good as its constants: on networks like those that these were
    measured on they are right, on noisy digits half of what they should be (docs/beyond.md). `evidence` lists what it
    was weighed from, "history" first (nothing: the network is left as it is); `t_cil` is the run of T-CIL inside.

    >>> import tcil
    >>> "bias_error" in tcil.PACTResult.__dataclass_fields__
    True
    """

    temperature: float
    log_temperature_error: float | None
    bias: float
    bias_error: float | None
    imbalance: float
    verdicts: tuple[Verdict, ...]
    evidence: tuple[PACTEvidence, ...]
    t_cil: TCILResult


@dataclass(eq=False, kw_only=True)
class PACT(Calibrator):
    """PACT: a confidence that knows how unbalanced training was (ours, beyond the paper).

    A network trained on many images of each new class and few of each old one behaves, on unseen images, as if old
    classes were rare. So `q = softmax(z / T + b [class is old])` is honest for a test set in which classes are equally
    frequent, with b mostly between 0 (the learner balances by itself) and log(imbalance). Each task gives three pieces
    of evidence on log T and b, none of which needs data of old classes beyond the memory:

    1. Surrogate: log T and b that minimise the cross-entropy of q on the validation set (new classes) together with
       T-CIL's perturbed exemplars of old classes, every class counting equally.
    2. New classes: the likelihood of log T on the validation set with the logits of the new classes alone. Their own
       frequencies are equal, so it needs no b. It is taken in by Laplace's approximation at the combined mode, so that
       a few images, all of them right, cannot say that T is 0.
    3. Label shift: if q is honest, the odds of old against new classes, averaged over images of new classes (each
       class counting equally), are the ratio of the numbers of classes: E[q(old) / q(new)] = K_old / K_new. At the T
       known by then, that is one equation for b; what is not known of T adds to its error.

    The error of each is its sampling error (the sandwich estimate; for the surrogate also that of the validation
    temperature which sets T-CIL's magnitude) and a measured constant. They are combined, in this order, with what
    earlier tasks left (`history`), each weighed by its precision: a Kalman filter for log T and one for b. Before any
    evidence log T is 0 +- 1 (where the validation temperature is beyond e^2 or e^-2: that much farther), and b, at the
    first task with old classes, has the mean and variance of a uniform one between 0 and log(imbalance), and a measured
    variance beside. From task to task b moves by half the change of log(imbalance), and both drift by measured
    constants. A piece that its data do not identify is left out (the new classes where their error is above 1), and so
    is label shift where it is more than three errors from what is believed by then: old and new classes then hardly
    overlap in the images at hand, and their mean odds miss the tail that would matter. Pieces share their validation
    set, which the filter does not know.

    The prediction stays: its confidence is q of the predicted class (or 1 / K if q is below), and the other classes
    share the rest as in q, or more evenly where one of them would overtake it. With `keep_predictions=False` q itself
    is given: predictions may then move to old classes.

    The other options are those of T-CIL.

    >>> import torch, tcil
    >>> _ = torch.manual_seed(0)
    >>> centres = 2 * torch.randn(4, 8)
    >>> def draw(labels):
    ...     return 0.4 * centres[labels] + torch.randn(len(labels), 8), labels
    >>> network = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    >>> memory, new = draw(torch.arange(40) % 4), draw(2 + torch.arange(200) % 2)         # 10 old images, 110 new ones
    >>> x, y = torch.cat([memory[0], new[0]]), torch.cat([memory[1], new[1]])
    >>> optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
    >>> for _ in range(60):
    ...     optimizer.zero_grad()
    ...     torch.nn.functional.cross_entropy(network(x), y).backward()
    ...     optimizer.step()
    >>> valid = draw(2 + torch.arange(200) % 2)
    >>> pact = tcil.PACT().fit(network, memory, valid, new_classes=[2, 3], imbalance=110 / 10)
    >>> pact.temperature_ > 1, pact.bias_ > 0, [piece.source for piece in pact.result_.evidence]
    (True, True, ['surrogate', 'new classes', 'label shift'])
    >>> test = draw(torch.arange(400) % 4)
    >>> before = tcil.metrics.expected_calibration_error(network(test[0]).softmax(dim=1).detach(), test[1])
    >>> tcil.metrics.expected_calibration_error(pact.predict_proba(network(test[0]).detach()), test[1]) < before
    True
    """

    keep_predictions: bool = True
    tolerance: float = 1e-3
    batch_size: int = TCIL.batch_size
    device: str | torch.device | None = None
    map_type: ClassVar[type[CalibrationMap]] = PriorAdjustedMap
    result_type: ClassVar[type[Any]] = PACTResult

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.keep_predictions, bool):
            raise invalid("keep_predictions", repr(self.keep_predictions), "True or False")
        inner = self._t_cil()
        self.tolerance, self.batch_size = inner.tolerance, inner.batch_size

    def _t_cil(self) -> TCIL:
        return TCIL(tolerance=self.tolerance, batch_size=self.batch_size, device=self.device)

    @property
    def temperature_(self) -> float:
        """The fitted temperature, greater than 0."""
        return float(cast(PriorAdjustedMap, self._mapping()).temperature)

    @property
    def bias_(self) -> float:
        """What is added to the scaled logits of old classes."""
        return float(cast(PriorAdjustedMap, self._mapping()).bias)

    def fit(
        self,
        model: nn.Module,
        memory: Examples,
        valid: Examples | None = None,
        new_classes: Iterable[Any] | None = None,
        *,
        imbalance: float | None = None,
        history: dict[str, Any] | None = None,
        classes: Iterable[Any] | None = None,
        columns: Iterable[Any] | None = None,
        features: FeatureSpec | None = None,
        unpack: Unpack | None = None,
        max_batches: int = MAX_BATCHES,
    ) -> Self:
        """Fit after a task. `imbalance` and `history` are PACT's own; the other arguments are those of `TCIL.fit`.

        `imbalance`: in the training of this task, images of a new class for each image of an old one (490 new images a
        class beside 25 exemplars: 490 / 25). Not needed after the first task, where there are no old classes.
        `history`: `history_` of the PACT of the task before; without it nothing is remembered.
        """
        ratio = 1.0 if imbalance is None else positive(imbalance, "imbalance")
        if abs(math.log(ratio)) > _LARGEST:
            raise invalid("imbalance", repr(imbalance), f"between e^-{_LARGEST:g} and e^{_LARGEST:g}")
        _check_history(history)
        if history is not None and history["model"] == weights_hash(model):
            given = "that of a fit of this very network"
            raise invalid("history", given, "history_ of the PACT of the task before", "It would count its data twice.")
        with random_state.preserved(memory, valid):
            if imbalance is None and new_classes is not None:
                new_classes = as_classes(new_classes, "new_classes", ordered=False)
                known = ExampleStream(memory, "memory", batch_size=self.batch_size, unpack=unpack).labels
                if known is not None and set(known.tolist()) - set(new_classes):  # told before any work
                    raise _no_imbalance()
            evidence = self._t_cil().evidence(
                model, memory, valid, new_classes, classes=classes, columns=columns, features=features, unpack=unpack,
                max_batches=max_batches,
            )  # fmt: skip
        has_old = not bool(evidence.is_new.all())
        if imbalance is None and has_old:
            raise _no_imbalance()
        state = _State.of(history, math.log(ratio) if has_old else None, evidence.result.target)
        remembered, pieces = state.as_evidence("history"), state.weigh(evidence)
        verdicts = evidence.result.verdicts
        if any(piece.log_temperature is not None for piece in pieces):
            # Then it does not matter how T-CIL's own search ended (unless it hints at validation data in training).
            verdicts = tuple(v for v in verdicts if v not in _OF_THE_SEARCH) or (Verdict.OK,)
        elif state.informed:
            verdicts = tuple(v for v in verdicts if v not in (*_OF_THE_SEARCH, Verdict.OK))
            verdicts = (*verdicts, Verdict.REMEMBERED)
        elif not set(verdicts) & {Verdict.DEGENERATE_VALID, Verdict.DEGENERATE_MEMORY}:
            verdicts = (*(v for v in verdicts if v is not Verdict.OK), Verdict.NOT_IDENTIFIED)
        if ratio < _INVERTED and has_old:
            verdicts = (*(v for v in verdicts if v is not Verdict.OK), Verdict.IMBALANCE_BELOW_ONE)
        if history is not None:
            pieces.insert(0, remembered)
        result = state.result(ratio, verdicts, tuple(pieces), evidence.result)
        mapping = PriorAdjustedMap(
            torch.tensor(result.temperature, dtype=torch.float64),
            torch.tensor(result.bias, dtype=torch.float64),
            evidence.is_new,
            torch.tensor(self.keep_predictions),
        )
        memo = {**state.memo(), "model": weights_hash(model)} if state.informed else history
        self._fitted(mapping, evidence.classes, result, **evidence.model, history=memo)
        warn_of(replace(evidence.result, verdicts=verdicts), "PACT", evidence.scales)
        return self


def _no_imbalance() -> ValueError:
    return invalid(
        "imbalance",
        "None",
        "training images of a new class for each one of an old class, such as 490 / 25",
        "Only after the first task, where all classes are new, it is not needed.",
    )


def _check_history(history: dict[str, Any] | None) -> None:
    """Refuse what is not the memo of a PACT."""
    if history is None:
        return

    def numbers(values: Any, largest: float = 100.0) -> bool:
        return all(isinstance(v, (int, float)) and not isinstance(v, bool) and abs(v) <= largest for v in values)

    try:
        beliefs = [history["log_temperature"], *([] if history["bias"] is None else [history["bias"]])]
        sound = (
            history["calibrator"] == "PACT"
            and isinstance(history["model"], str)
            and (history["bias"] is None) == (history["log_imbalance"] is None)
            and (history["log_imbalance"] is None or numbers([history["log_imbalance"]], _LARGEST))
            and all(len(belief) == 2 and numbers(belief) and belief[1] > 0 for belief in beliefs)
        )
    except (KeyError, TypeError):
        sound = False
    if not sound:
        raise invalid("history", repr(history)[:80], "history_ of the PACT of the task before")


@dataclass
class _Belief:
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


class _State:
    """What is believed of log T, and of b once there are old classes."""

    def __init__(
        self, log_t: _Belief, bias: _Belief | None = None, log_imbalance: float | None = None, informed: bool = True
    ) -> None:
        self.log_t, self.bias, self.log_imbalance = log_t, bias, log_imbalance
        self.informed = informed  # by evidence on T, on this task or before

    @classmethod
    def of(cls, history: dict[str, Any] | None, log_imbalance: float | None, target: TemperatureFit) -> _State:
        """What the task before left, less certain by the drift; or next to nothing. None: no old classes."""
        bias = None
        if history is None:
            far = math.log(target.temperature)
            log_t = _Belief(far - min(max(far, -_REACH), _REACH), PRIOR_ERROR**2)
        else:
            log_t = _Belief(*history["log_temperature"])
            rehearsal_begins = history["bias"] is None and log_imbalance is not None
            log_t.move(0.0, FIRST_DRIFT if rehearsal_begins else DRIFT[0])
            if history["bias"] is not None and log_imbalance is not None:
                bias = _Belief(*history["bias"])
                bias.move((log_imbalance - history["log_imbalance"]) / 2, DRIFT[1])
        if log_imbalance is not None and bias is None:
            bias = _Belief(log_imbalance / 2, log_imbalance**2 / 12 + BIAS_SPREAD**2)
        return cls(log_t, bias, log_imbalance, informed=history is not None)

    def memo(self) -> dict[str, Any]:
        """What the next task gets as `history`."""
        return {
            "calibrator": "PACT",
            "log_temperature": [self.log_t.mean, self.log_t.variance],
            "bias": None if self.bias is None else [self.bias.mean, self.bias.variance],
            "log_imbalance": self.log_imbalance,
        }

    def as_evidence(self, source: str) -> PACTEvidence:
        """What is believed now, as a piece of evidence."""
        bias = (None, None) if self.bias is None else (self.bias.mean, math.sqrt(self.bias.variance))
        return PACTEvidence(source, self.log_t.mean, math.sqrt(self.log_t.variance), *bias)

    def result(self, ratio: float, *rest: Any) -> PACTResult:
        """The answer; without any evidence the network is left as it is."""
        if not self.informed:
            return PACTResult(1.0, None, 0.0, None, ratio, *rest)
        bias, error = (0.0, None) if self.bias is None else (self.bias.mean, math.sqrt(self.bias.variance))
        return PACTResult(math.exp(self.log_t.mean), math.sqrt(self.log_t.variance), bias, error, ratio, *rest)

    def weigh(self, evidence: TCILEvidence, without: frozenset[str] = frozenset()) -> list[PACTEvidence]:
        """Take in every piece that the data identify (and that is not `without`), and list them."""
        is_new, (logits, columns) = evidence.is_new, evidence.valid
        pieces = list[PACTEvidence]()
        if self.bias is not None and "surrogate" not in without and (found := _surrogate(evidence)):
            log_t = found[0], math.hypot(found[1], SURROGATE_ERROR[0])
            bias = found[2], math.hypot(found[3], SURROGATE_ERROR[1])
            pieces.append(PACTEvidence("surrogate", *log_t, *bias))
            self.log_t.see(*log_t)
            self.bias.see(*bias)
            self.informed = True
        if self.bias is None or "new classes" not in without:
            within = logits[:, is_new], (is_new.cumsum(0) - 1)[columns]
            if seen := _laplace(*within, self.log_t.mean, self.log_t.variance + NEW_CLASS_ERROR**2):
                log_t = seen[0], math.hypot(seen[1], NEW_CLASS_ERROR)
                pieces.append(PACTEvidence("new classes", *log_t, None, None))
                self.log_t.see(*log_t)
                self.informed = True
        if self.bias is not None and self.informed and "label shift" not in without:
            shift = _label_shift(logits, columns, is_new, self.log_t.mean)
            if shift is not None:
                value, slope, error = shift
                bias = value, math.hypot(error, LABEL_SHIFT_ERROR, slope * math.sqrt(self.log_t.variance))
                if self.bias.surprise(*bias) <= 3:
                    pieces.append(PACTEvidence("label shift", None, None, *bias))
                    self.bias.see(*bias)
        return pieces


def _surrogate(evidence: TCILEvidence) -> tuple[float, float, float, float] | None:
    """log T, its sampling error, b and its own, by the validation set and the perturbed exemplars of old classes."""
    if evidence.pushed is None or not evidence.result.reachable:
        return None
    target = _temperature(*evidence.valid)  # it set the magnitude
    old = ~evidence.is_new[evidence.pushed[1]]
    found = _joint_fit(evidence.valid, (evidence.pushed[0][old], evidence.pushed[1][old]), evidence.is_new)
    if found is None or target is None:
        return None
    log_t, bias, variances = found
    return log_t, math.sqrt(variances[0] + target[1] ** 2), bias, math.sqrt(variances[1])


def _laplace(logits: Tensor, columns: Tensor, mean: float, variance: float) -> tuple[float, float] | None:
    """The likelihood of log T as that of one normal observation: what it saw, and its error.

    Where `mean` and `variance` are what is known of log T, it gives the same mode and curvature as the likelihood.
    """
    z = logits.double()
    if z.shape[1] < 2:
        return None
    alive = without_masked(z)
    own = alive.gather(1, columns[:, None]).squeeze(1)

    def at(log_t: float) -> tuple[float, float]:
        """Slope of the cross-entropy in log T, and its curvature as expected under the softmax."""
        p = torch.softmax(z * math.exp(-log_t), dim=1)
        average = (p * alive).sum(dim=1)
        slope = float((own - average).sum()) * math.exp(-log_t)
        return slope, float(((p * alive.square()).sum(dim=1) - average.square()).sum()) * math.exp(-2 * log_t)

    # Likelihood and prior fall away from their modes, so that the sum has its highest point between.
    alone = solve_temperature(logits, columns)
    reach = 10 * math.sqrt(variance)
    low, high = mean - reach, mean + reach
    if alone.verdict is Verdict.OK:
        low, high = sorted((mean, min(max(math.log(alone.temperature), low), high)))
    mode = _bisect(lambda x: at(x)[0] + (x - mean) / variance, low, high)
    curvature = at(mode)[1]
    if curvature < 1 / PRIOR_ERROR**2:  # it says less than is known without any evidence
        return None
    return mode + (mode - mean) / variance / curvature, 1 / math.sqrt(curvature)


def _bisect(rising: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising function crosses 0, or the nearer end."""
    if rising(low) >= 0:
        return low
    if rising(high) <= 0:
        return high
    return float(brentq(rising, low, high, xtol=1e-10))


def _temperature(logits: Tensor, columns: Tensor) -> tuple[float, float] | None:
    """log T by cross-entropy, and its standard error (sandwich); None where it has none."""
    n = len(logits)
    if logits.shape[1] < 2 or n < _FEWEST or (fit := solve_temperature(logits, columns)).verdict is not Verdict.OK:
        return None
    z = logits.double() / fit.temperature
    p, z = torch.softmax(z, dim=1), without_masked(z)
    mean = (p * z).sum(dim=1)
    score = z.gather(1, columns[:, None]).squeeze(1) - mean  # d NLL / d log T, a row each
    curvature = float(((p * z.square()).sum(dim=1) - mean.square() - score).mean())
    spread = float(score.square().sum() / (n - 1)) ** 0.5
    if curvature <= 0 or spread <= 1e-6:
        return None
    return math.log(fit.temperature), spread / curvature / math.sqrt(n)


def _label_shift(
    logits: Tensor, columns: Tensor, is_new: Tensor, log_temperature: float
) -> tuple[float, float, float] | None:
    """The bias at which images of new classes have mean odds K_old / K_new, its slope in log T and sampling error.

    None where there are too few images, or none of some new class. The odds have a heavy tail: where few images make
    up most of the mean, the error is near 1.
    """
    z = logits.double() / math.exp(log_temperature)
    old, new = z[:, ~is_new], z[:, is_new]
    share = _equal_classes(columns)
    odds = torch.logsumexp(old, dim=1) - torch.logsumexp(new, dim=1) + share.log()
    mean = torch.logsumexp(odds, dim=0)
    weight = torch.exp(odds - mean)  # sums to 1
    if len(columns) < _FEWEST or len(columns.unique()) < new.shape[1] or not math.isfinite(mean):
        return None
    slopes = _mean_logit(old) - _mean_logit(new)
    variance = float((weight - share).square().sum())
    bias = math.log(old.shape[1] / new.shape[1]) - float(mean)
    return bias, float((weight * slopes).sum()), math.sqrt(variance)


def _mean_logit(z: Tensor) -> Tensor:
    """The mean logit of each row under its own softmax; 0 where every class of it is masked."""
    means: Tensor = (torch.softmax(z, dim=1).nan_to_num(0.0) * without_masked(z)).sum(dim=1)
    return means


def _equal_classes(columns: Tensor) -> Tensor:
    """Weights of rows, summing to 1, by which every class that has any counts equally."""
    _, place, counts = columns.unique(return_inverse=True, return_counts=True)
    weights: Tensor = 1.0 / (counts.double()[place] * len(counts))
    return weights


def _joint_fit(
    new: tuple[Tensor, Tensor], old: tuple[Tensor, Tensor], is_new: Tensor
) -> tuple[float, float, tuple[float, float]] | None:
    """log T and b that minimise the cross-entropy of softmax(z / T + b [old]), each class counting equally, and old
    and new ones as many as they are, also where some have no image; and their sampling variances (sandwich).

    Convex in (1 / T, b): Newton's method with halved steps. None where there is no finite minimum.
    """
    z, y = torch.cat([new[0], old[0]]).double(), torch.cat([new[1], old[1]])
    share = float(is_new.double().mean())
    weight = torch.cat([share * _equal_classes(new[1]), (1 - share) * _equal_classes(old[1])])
    alive = z != -torch.inf
    if bool(alive.all()):
        z = z - z.mean(dim=1, keepdim=True)
        spread = float(z.std()) or 1.0
    else:
        z = without_masked(z)
        z = (z - z.sum(dim=1, keepdim=True) / alive.sum(dim=1, keepdim=True)) * alive
        spread = float(z[alive].std()) or 1.0
    z = z / spread
    is_old = (~is_new).double()
    own = torch.stack([z.gather(1, y[:, None]).squeeze(1), is_old[y]], dim=1)

    def loss(point: Tensor) -> tuple[float, Tensor, Tensor]:
        """The value, the gradient's part of each row, and the curvature."""
        log_p = torch.log_softmax((point[0] * z + point[1] * is_old).masked_fill(~alive, -torch.inf), dim=1)
        p = log_p.exp()
        mean_z, mean_old = (p * z).sum(dim=1), (p * is_old).sum(dim=1)
        scores = weight[:, None] * (torch.stack([mean_z, mean_old], dim=1) - own)
        second = torch.stack([(p * z * z).sum(1) - mean_z**2, (p * z * is_old).sum(1) - mean_z * mean_old,
                              mean_old - mean_old**2], dim=1)  # fmt: skip
        a, b, c = (weight[:, None] * second).sum(dim=0)
        value = -float((weight * log_p.gather(1, y[:, None]).squeeze(1)).sum())
        return value, scores, torch.stack([torch.stack([a, b]), torch.stack([b, c])])

    point = torch.tensor([1.0, 0.0], dtype=torch.float64)
    value, scores, curvature = loss(point)
    for _ in range(100):
        gradient = scores.sum(dim=0)
        if float(gradient.norm()) < 1e-9:
            break
        step = torch.linalg.solve(curvature + 1e-12 * torch.eye(2, dtype=torch.float64), gradient)
        size = min(1.0, 4.0 / float(step.norm()))
        while size > 1e-8 and (found := loss(point - size * step))[0] > value:
            size /= 2
        if size <= 1e-8:
            break
        point = point - size * step
        value, scores, curvature = found
    sharpness, bias = float(point[0]) / spread, float(point[1])
    flat = float(torch.linalg.eigvalsh(curvature)[0]) < 1e-6  # the minimum is at infinity: all is right, or separable
    if flat or float(scores.sum(dim=0).norm()) > 1e-6 or sharpness <= 0:
        return None
    bread = torch.linalg.inv(curvature)
    variances = (bread @ (scores.T @ scores) @ bread).diagonal()
    # d log T = - d sharpness / sharpness
    return -math.log(sharpness), bias, (float(variances[0]) / float(point[0]) ** 2, float(variances[1]))
