"""PACT: prior-adjusted confidence, tracked from task to task. One temperature, and one correction for rehearsal."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from tcil.calibration.arrays import as_classes
from tcil.calibration.calibrators.base import Calibrator
from tcil.calibration.calibrators.inputs import positive
from tcil.calibration.calibrators.maps import CalibrationMap, PriorAdjustedMap
from tcil.calibration.calibrators.tcil import TCIL, TCILEvidence, TCILResult, warn_of
from tcil.calibration.errors import invalid
from tcil.calibration.examples import Examples, ExampleStream, Unpack
from tcil.calibration.features import FeatureSpec
from tcil.calibration.options import Verdict
from tcil.calibration.temperature import solve_temperature

# Standard deviations, measured once on the development runs (docs/beyond.md says which, and how).
SURROGATE_ERROR = (0.17, 0.61)  # of log T and of the bias, when fitted on perturbed exemplars of old classes
LABEL_SHIFT_ERROR = 0.30  # of the bias by label shift, beside the sampling error
DRIFT = (0.10, 0.10)  # of log T and of the share, from one task to the next
# Before any evidence nothing is known of log T, and the share has the mean and variance of a uniform one in [0, 1].
_UNKNOWN = ((0.0, 0.5), (1e-6, 12.0))
_FEWEST = 5  # validation images below which a mean or an error means nothing
_OF_THE_SEARCH = frozenset(
    (Verdict.TARGET_ABOVE_RANGE, Verdict.TARGET_BELOW_RANGE, Verdict.TARGET_JUMPED, Verdict.BELOW_TOLERANCE,
     Verdict.BRACKET_WIDENED, Verdict.DEGENERATE_VALID, Verdict.DEGENERATE_MEMORY)
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

    `bias = share * log(imbalance)`; the errors are standard errors by the filter. `evidence` lists what it was weighed
    from (nothing: the network is left as it is), and `t_cil` is the run of T-CIL inside.

    >>> import tcil
    >>> "share" in tcil.PACTResult.__dataclass_fields__
    True
    """

    temperature: float
    log_temperature_error: float | None
    share: float
    share_error: float | None
    bias: float
    imbalance: float
    verdicts: tuple[Verdict, ...]
    evidence: tuple[PACTEvidence, ...]
    t_cil: TCILResult


@dataclass(eq=False, kw_only=True)
class PACT(Calibrator):
    """PACT: a confidence that knows how unbalanced training was (ours, beyond the paper).

    A network trained on many images of each new class and few of each old one behaves, on unseen images, as if old
    classes were rare. So `q = softmax(z / T + b [class is old])` is honest for a test set in which classes are equally
    frequent, with b near log(imbalance), or a part of it where the learner balances by itself: b = share *
    log(imbalance), 0 <= share <= 1. Each task gives three pieces of evidence on log T and b, none of which needs data
    of old classes beyond the memory:

    1. New classes: log T of the validation set with the logits of the new classes alone. Their own frequencies are
       equal, so it needs no b. Its error is the sandwich estimate.
    2. Surrogate: log T and b that minimise the cross-entropy of q on the validation set (new classes) together with
       T-CIL's perturbed exemplars of old classes, every class counting equally. Its error is a constant, measured.
    3. Label shift: if q is honest, the odds of old against new classes, averaged over images of new classes (each
       class counting equally), are the ratio of the numbers of classes: E[q(old) / q(new)] = K_old / K_new. Given T,
       that is one equation for b, linearised at the T known by then. Its error is that of the mean, and a measured
       constant.

    They are combined, in this order, with what earlier tasks left (`history`), each weighed by its precision: a Kalman
    filter on (log T, share), which drifts from task to task by a measured constant. A share outside [0, 1] is set to
    the bound, log T to its mean given that; both are remembered with their covariance. A piece that its data do not
    identify is left out (label shift also where its b is beyond 0 to log(imbalance) by three errors). Pieces share
    their validation set, which the filter does not know.

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
    >>> pact.temperature_ > 1, 0 < pact.result_.share <= 1, [piece.source for piece in pact.result_.evidence]
    (True, True, ['new classes', 'surrogate', 'label shift'])
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
    ) -> Self:
        """Fit after a task. `imbalance` and `history` are PACT's own; the other arguments are those of `TCIL.fit`.

        `imbalance`: in the training of this task, images of a new class for each image of an old one (490 new images a
        class beside 25 exemplars: 490 / 25). Not needed after the first task, where there are no old classes.
        `history`: `history_` of the PACT of the task before; without it nothing is remembered.
        """
        ratio = 1.0 if imbalance is None else positive(imbalance, "imbalance")
        state = _State.of(history)
        if imbalance is None and new_classes is not None:
            new_classes = as_classes(new_classes, "new_classes")
            known = ExampleStream(memory, "memory", batch_size=self.batch_size, unpack=unpack).labels
            if known is not None and set(known.tolist()) - set(new_classes):  # told before any work
                raise _no_imbalance()
        evidence = self._t_cil().evidence(
            model, memory, valid, new_classes, classes=classes, columns=columns, features=features, unpack=unpack
        )
        has_old = not bool(evidence.is_new.all())
        if imbalance is None and has_old:
            raise _no_imbalance()
        log_ratio = math.log(ratio) if has_old else 0.0
        pieces = state.weigh(evidence, log_ratio)
        verdicts = evidence.result.verdicts
        if any(piece.log_temperature is not None for piece in pieces):
            # Then it does not matter how T-CIL's own search ended.
            verdicts = tuple(v for v in verdicts if v not in _OF_THE_SEARCH) or (Verdict.OK,)
        elif state.knows_temperature:
            verdicts = tuple(v for v in verdicts if v not in (*_OF_THE_SEARCH, Verdict.OK))
            verdicts = (*verdicts, Verdict.REMEMBERED)
        result = state.result(ratio, log_ratio, verdicts, tuple(pieces), evidence.result)
        mapping = PriorAdjustedMap(
            torch.tensor(result.temperature, dtype=torch.float64),
            torch.tensor(result.bias, dtype=torch.float64),
            evidence.is_new,
            torch.tensor(self.keep_predictions),
        )
        memo = state.memo() if state.knows_temperature else history
        self._fitted(mapping, evidence.classes, result, **evidence.model, history=memo)
        warn_of(replace(evidence.result, verdicts=verdicts), "PACT")
        return self


def _no_imbalance() -> ValueError:
    return invalid(
        "imbalance",
        "None",
        "training images of a new class for each one of an old class, such as 490 / 25",
        "Only after the first task, where all classes are new, it is not needed.",
    )


class _State:
    """What is believed of (log T, share): a mean and a precision matrix, to which evidence is added."""

    def __init__(self, mean: tuple[float, float], precision: Tensor) -> None:
        self.mean, self.precision = mean, precision

    @classmethod
    def of(cls, history: dict[str, Any] | None) -> _State:
        """What the task before left, less certain by the drift; or nothing."""
        if history is None:
            return cls(_UNKNOWN[0], torch.tensor(_UNKNOWN[1], dtype=torch.float64).diag())
        try:
            log_t, share = (float(value) for value in history["mean"])
            covariance = torch.tensor(history["covariance"], dtype=torch.float64)
            sound = (
                history["calibrator"] == "PACT"
                and abs(log_t) < 20
                and 0 <= share <= 1
                and covariance.shape == (2, 2)
                and bool(torch.isfinite(covariance).all())
                and torch.allclose(covariance, covariance.T)
                and bool((torch.linalg.eigvalsh(covariance) > 0).all())
            )
        except (KeyError, TypeError, ValueError, RuntimeError):
            sound = False
        if not sound:
            raise invalid("history", repr(history)[:80], "history_ of the PACT of the task before")
        drift = torch.tensor(DRIFT, dtype=torch.float64).square().diag()
        return cls((log_t, share), torch.linalg.inv(covariance + drift))

    @property
    def knows_temperature(self) -> bool:
        """Whether any evidence has said something of T, on this task or before."""
        return float(self.precision[0, 0]) > 1e-3

    def memo(self) -> dict[str, Any]:
        """What the next task gets as `history`."""
        covariance = torch.linalg.inv(self.precision)
        return {"calibrator": "PACT", "mean": list(self.mean), "covariance": ((covariance + covariance.T) / 2).tolist()}

    def result(self, ratio: float, log_ratio: float, *rest: Any) -> PACTResult:
        """The answer; without any evidence the network is left as it is."""
        if not self.knows_temperature:
            return PACTResult(1.0, None, 0.0, None, 0.0, ratio, *rest)
        log_t_error, share_error = torch.linalg.inv(self.precision).diagonal().sqrt().tolist()
        share = self.mean[1]
        return PACTResult(math.exp(self.mean[0]), log_t_error, share, share_error, share * log_ratio, ratio, *rest)

    def weigh(
        self, evidence: TCILEvidence, log_imbalance: float, without: frozenset[str] = frozenset()
    ) -> list[PACTEvidence]:
        """Take in every piece that the data identify (and that is not `without`), and list them."""
        is_new, (logits, columns) = evidence.is_new, evidence.valid
        has_old, pieces = not bool(is_new.all()), list[PACTEvidence]()
        within = _within_new(logits[:, is_new], (is_new.cumsum(0) - 1)[columns])
        if within and ("new classes" not in without or not has_old):
            pieces.append(PACTEvidence("new classes", *within, None, None))
            self._see((1.0, 0.0), *within)
        if has_old and evidence.pushed is not None and evidence.result.reachable and "surrogate" not in without:
            old = ~is_new[evidence.pushed[1]]
            if found := _joint_fit(evidence.valid, (evidence.pushed[0][old], evidence.pushed[1][old]), is_new):
                pieces.append(PACTEvidence("surrogate", found[0], SURROGATE_ERROR[0], found[1], SURROGATE_ERROR[1]))
                self._see((1.0, 0.0), found[0], SURROGATE_ERROR[0])
                self._see((0.0, log_imbalance), found[1], SURROGATE_ERROR[1])
        shift = None
        if has_old and self.knows_temperature and "label shift" not in without:
            shift = _label_shift(logits, columns, is_new, self.mean[0])
        if shift is not None and _outside(shift[0], log_imbalance) <= 3 * shift[2]:
            bias, slope, error = shift
            pieces.append(PACTEvidence("label shift", None, None, bias, error))
            # b moves with log T: b = bias + slope (log T - log T now), so this weighs on both.
            self._see((-slope, log_imbalance), bias - slope * self.mean[0], error)
        self._keep_share_inside()
        return pieces

    def _see(self, along: tuple[float, float], value: float, error: float) -> None:
        """Add the observation `along . (log T, share) = value`, with its standard error."""
        direction = torch.tensor(along, dtype=torch.float64)
        mean = torch.tensor(self.mean, dtype=torch.float64)
        precision = self.precision + torch.outer(direction, direction) / error**2
        mean = torch.linalg.solve(precision, self.precision @ mean + direction * value / error**2)
        self.mean, self.precision = (float(mean[0]), float(mean[1])), precision

    def _keep_share_inside(self) -> None:
        """A share outside [0, 1] is set to the bound, and log T to its mean given that."""
        log_t, share = self.mean
        bound = min(max(share, 0.0), 1.0)
        # Given the share, log T moves by - P_ts / P_tt for each unit of it (P the precision).
        self.mean = log_t - float(self.precision[0, 1] / self.precision[0, 0]) * (bound - share), bound


def _outside(bias: float, log_imbalance: float) -> float:
    """How far a bias lies outside of 0 to log(imbalance). Far outside, old and new classes hardly overlap in the images
    at hand, and their mean odds miss the tail that would matter."""
    low, high = min(0.0, log_imbalance), max(0.0, log_imbalance)
    return max(low - bias, bias - high, 0.0)


def _within_new(logits: Tensor, columns: Tensor) -> tuple[float, float] | None:
    """log T of the new classes among themselves, and its standard error (sandwich); None where it has none."""
    n = len(logits)
    if logits.shape[1] < 2 or n < _FEWEST or (fit := solve_temperature(logits, columns)).verdict is not Verdict.OK:
        return None
    z = logits.double() / fit.temperature
    p = torch.softmax(z, dim=1)
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
    """The bias at which images of new classes have odds K_old / K_new on average; its slope in log T; its error.

    None where there are too few images, or none of some new class. The odds have a heavy tail: where few images make
    up most of the mean, the error is near 1.
    """
    z = logits.double() / math.exp(log_temperature)
    old, new = z[:, ~is_new], z[:, is_new]
    share = _equal_classes(columns)
    odds = torch.logsumexp(old, dim=1) - torch.logsumexp(new, dim=1) + share.log()
    mean = torch.logsumexp(odds, dim=0)
    weight = torch.exp(odds - mean)  # sums to 1
    if len(columns) < _FEWEST or len(columns.unique()) < new.shape[1]:
        return None
    slopes = (torch.softmax(old, dim=1) * old).sum(dim=1) - (torch.softmax(new, dim=1) * new).sum(dim=1)
    variance = float((weight - share).square().sum())
    bias = math.log(old.shape[1] / new.shape[1]) - float(mean)
    return bias, float((weight * slopes).sum()), math.hypot(LABEL_SHIFT_ERROR, math.sqrt(variance))


def _equal_classes(columns: Tensor) -> Tensor:
    """Weights of rows, summing to 1, by which every class counts equally."""
    _, place, counts = columns.unique(return_inverse=True, return_counts=True)
    weights: Tensor = 1.0 / (counts.double()[place] * len(counts))
    return weights


def _joint_fit(new: tuple[Tensor, Tensor], old: tuple[Tensor, Tensor], is_new: Tensor) -> tuple[float, float] | None:
    """log T and b that minimise the cross-entropy of softmax(z / T + b [old]), each class counting equally.

    Convex in (1 / T, b): Newton's method with halved steps. None where there is no finite minimum.
    """
    z, y = torch.cat([new[0], old[0]]).double(), torch.cat([new[1], old[1]])
    weight = _equal_classes(y)
    z = z - z.mean(dim=1, keepdim=True)
    spread = float(z.std()) or 1.0
    z = z / spread
    is_old = (~is_new).double()
    own = torch.stack([z.gather(1, y[:, None]).squeeze(1), is_old[y]], dim=1)

    def loss(point: Tensor) -> tuple[float, Tensor, Tensor]:
        log_p = torch.log_softmax(point[0] * z + point[1] * is_old, dim=1)
        p = log_p.exp()
        mean_z, mean_old = (p * z).sum(dim=1), (p * is_old).sum(dim=1)
        gradient = (weight[:, None] * (torch.stack([mean_z, mean_old], dim=1) - own)).sum(dim=0)
        second = torch.stack([(p * z * z).sum(1) - mean_z**2, (p * z * is_old).sum(1) - mean_z * mean_old,
                              mean_old - mean_old**2], dim=1)  # fmt: skip
        a, b, c = (weight[:, None] * second).sum(dim=0)
        value = -float((weight * log_p.gather(1, y[:, None]).squeeze(1)).sum())
        return value, gradient, torch.stack([torch.stack([a, b]), torch.stack([b, c])])

    point = torch.tensor([1.0, 0.0], dtype=torch.float64)
    value, gradient, curvature = loss(point)
    for _ in range(100):
        if float(gradient.norm()) < 1e-9:
            break
        step = torch.linalg.solve(curvature + 1e-12 * torch.eye(2, dtype=torch.float64), gradient)
        size = min(1.0, 4.0 / float(step.norm()))
        while size > 1e-8 and (found := loss(point - size * step))[0] > value:
            size /= 2
        if size <= 1e-8:
            break
        point = point - size * step
        value, gradient, curvature = found
    sharpness, bias = float(point[0]) / spread, float(point[1])
    flat = float(torch.linalg.eigvalsh(curvature)[0]) < 1e-6  # the minimum is at infinity: all is right, or separable
    if flat or float(gradient.norm()) > 1e-6 or sharpness <= 0:
        return None
    return -math.log(sharpness), bias
