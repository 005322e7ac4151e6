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
DRIFT = (0.10, 0.10)  # of log T and of the share, from one task to the next
# Before any evidence: nothing is known of log T, and the share is uniform in [0, 1].
_UNKNOWN = ((0.0, 0.5), (1e-6, 12.0))
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

    `bias = share * log(imbalance)`. `evidence` lists what it was weighed from, and `t_cil` is the run of T-CIL inside.

    >>> import tcil
    >>> "share" in tcil.PACTResult.__dataclass_fields__
    True
    """

    temperature: float
    share: float
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

    1. The temperature of the validation set among the new classes alone. Their own frequencies are equal, so it needs
       no b. Its error is the sandwich estimate.
    2. Label shift: if q is honest, the odds of old against new classes, averaged over images of new classes, equal the
       ratio of the numbers of classes, K_old / K_new. Given T, that is one equation for b. Its error is that of a mean.
    3. The surrogate: log T and b that minimise the cross-entropy of q on the validation set (new classes) together with
       T-CIL's perturbed exemplars of old classes, each class counting equally.

    They are combined with what earlier tasks left (`history`), each weighed by its precision: a Kalman filter on
    (log T, share), whose two constants, the error of the surrogate and the drift from task to task, were measured on
    runs of our own. A piece that its data do not identify is left out.

    The prediction stays: its confidence is q of the predicted class, and the other classes share the rest as in q, or
    more evenly where one of them would overtake it. With `keep_predictions=False` q itself is given: predictions may
    then move to old classes, which usually makes them better.

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
    batch_size: int = 128
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
        pieces = state.weigh(evidence, math.log(ratio) if has_old else 0.0)
        share = min(max(state.mean[1], 0.0), 1.0)
        state.mean = (state.mean[0], share)
        found = any(piece.log_temperature is not None for piece in pieces) or history is not None
        temperature, bias = math.exp(state.mean[0]) if found else 1.0, share * math.log(ratio) if has_old else 0.0
        verdicts = evidence.result.verdicts
        if found:  # then it does not matter how T-CIL's own search ended
            verdicts = tuple(v for v in verdicts if v not in _OF_THE_SEARCH) or (Verdict.OK,)
        result = PACTResult(temperature, share, bias, ratio, verdicts, tuple(pieces), evidence.result)
        mapping = PriorAdjustedMap(
            torch.tensor(temperature, dtype=torch.float64),
            torch.tensor(bias, dtype=torch.float64),
            evidence.is_new,
            torch.tensor(self.keep_predictions),
        )
        self._fitted(mapping, evidence.classes, result, **evidence.model, history=state.memo() if found else history)
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
            if history["calibrator"] != "PACT":
                raise ValueError
            mean = torch.tensor(history["mean"], dtype=torch.float64)
            covariance = torch.tensor(history["covariance"], dtype=torch.float64)
            covariance = covariance + torch.tensor(DRIFT, dtype=torch.float64).square().diag()
            sound = bool(torch.isfinite(mean).all()) and bool((torch.linalg.eigvalsh(covariance) > 0).all())
            if mean.shape != (2,) or covariance.shape != (2, 2) or not sound:
                raise ValueError
        except (KeyError, TypeError, ValueError, RuntimeError):
            raise invalid("history", repr(history)[:80], "history_ of the PACT of the task before") from None
        return cls((float(mean[0]), float(mean[1])), torch.linalg.inv(covariance))

    def memo(self) -> dict[str, Any]:
        """What the next task gets as `history`."""
        covariance = torch.linalg.inv(self.precision).tolist()
        return {"calibrator": "PACT", "mean": list(self.mean), "covariance": covariance}

    def weigh(self, evidence: TCILEvidence, log_imbalance: float) -> list[PACTEvidence]:
        """Take in every piece that the data identify, and list them."""
        is_new, (logits, columns) = evidence.is_new, evidence.valid
        pieces = []
        if within := _within_new(logits[:, is_new], _renumbered(columns, is_new)):
            pieces.append(PACTEvidence("new classes", *within, None, None))
            self._see((1.0, 0.0), *within)
        if bool(is_new.all()):
            return pieces
        old = None if evidence.pushed is None else ~is_new[evidence.pushed[1]]
        if evidence.pushed is not None and old is not None and evidence.result.reachable:
            pushed = evidence.pushed[0][old], evidence.pushed[1][old]
            if found := _joint_fit(evidence.valid, pushed, is_new):
                pieces.append(PACTEvidence("surrogate", found[0], SURROGATE_ERROR[0], found[1], SURROGATE_ERROR[1]))
                self._see((1.0, 0.0), found[0], SURROGATE_ERROR[0])
                self._see((0.0, log_imbalance), found[1], SURROGATE_ERROR[1])
        if pieces or float(self.precision[0, 0]) > 1.0:  # it needs some idea of T
            bias, slope, error = _label_shift(logits, is_new, self.mean[0])
            pieces.append(PACTEvidence("label shift", None, None, bias, error))
            # b moves with log T: b = bias + slope (log T - log T now), so this weighs on both.
            self._see((-slope, log_imbalance), bias - slope * self.mean[0], error)
        return pieces

    def _see(self, along: tuple[float, float], value: float, error: float) -> None:
        """Add the observation `along . (log T, share) = value`, with its standard error."""
        direction = torch.tensor(along, dtype=torch.float64)
        mean = torch.tensor(self.mean, dtype=torch.float64)
        precision = self.precision + torch.outer(direction, direction) / error**2
        mean = torch.linalg.solve(precision, self.precision @ mean + direction * value / error**2)
        self.mean, self.precision = (float(mean[0]), float(mean[1])), precision


def _renumbered(columns: Tensor, keep: Tensor) -> Tensor:
    """Columns as they are counted when only those in `keep` are left."""
    return (keep.cumsum(0) - 1)[columns]


def _within_new(logits: Tensor, columns: Tensor) -> tuple[float, float] | None:
    """log T of the new classes among themselves, and its standard error (sandwich); None where it has none."""
    if logits.shape[1] < 2 or (fit := solve_temperature(logits, columns)).verdict is not Verdict.OK:
        return None
    z = logits.double() / fit.temperature
    p = torch.softmax(z, dim=1)
    mean = (p * z).sum(dim=1)
    score = z.gather(1, columns[:, None]).squeeze(1) - mean  # d NLL / d log T, a row each
    curvature = float(((p * z.square()).sum(dim=1) - mean.square() - score).mean())
    if curvature <= 0:
        return None
    return math.log(fit.temperature), float(score.square().mean().sqrt()) / curvature / math.sqrt(len(z))


def _label_shift(logits: Tensor, is_new: Tensor, log_temperature: float) -> tuple[float, float, float]:
    """The bias at which images of new classes have K_old / K_new odds on average; its slope in log T; its error."""
    z = logits.double() / math.exp(log_temperature)
    old, new = z[:, ~is_new], z[:, is_new]
    odds = torch.logsumexp(old, dim=1) - torch.logsumexp(new, dim=1)
    mean = torch.logsumexp(odds, dim=0) - math.log(len(odds))
    weight = torch.exp(odds - mean)  # 1 on average
    slopes = (torch.softmax(new, dim=1) * new).sum(dim=1) - (torch.softmax(old, dim=1) * old).sum(dim=1)
    error = float(weight.var().clamp(min=1e-4)) if len(weight) > 1 else 1.0
    bias = math.log(old.shape[1] / new.shape[1]) - float(mean)
    return bias, -float((weight * slopes).mean()), math.sqrt(error / len(weight))


def _joint_fit(new: tuple[Tensor, Tensor], old: tuple[Tensor, Tensor], is_new: Tensor) -> tuple[float, float] | None:
    """log T and b that minimise the cross-entropy of softmax(z / T + b [old]), each class counting equally.

    Convex in (1 / T, b): Newton's method with halved steps. None where there is no finite minimum.
    """
    z, y = torch.cat([new[0], old[0]]).double(), torch.cat([new[1], old[1]])
    shares = (~is_new).double().mean(), is_new.double().mean()
    weight = torch.cat([torch.full((len(new[1]),), float(shares[1]) / len(new[1]), dtype=torch.float64),
                        torch.full((len(old[1]),), float(shares[0]) / len(old[1]), dtype=torch.float64)])  # fmt: skip
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
