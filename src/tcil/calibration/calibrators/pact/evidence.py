"""What the data of a task say of log T and of the bias: the pieces that PACT weighs, each with its sampling error."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy.optimize import brentq
from torch import Tensor

from tcil.calibration.calibrators.maps import centred
from tcil.calibration.calibrators.pact.constants import MEASURED
from tcil.calibration.calibrators.tcil import TCILEvidence
from tcil.calibration.temperature import FEWEST, solve_temperature, temperature_error
from tcil.foundation.arrays import mask_out, without_masked
from tcil.foundation.options import Verdict
from tcil.foundation.records import Record

Labelled = tuple[Tensor, Tensor]  # logits and columns


@dataclass(frozen=True)
class PACTEvidence(Record):
    """One piece of evidence: what it says of log T and of the bias, with standard errors (None: nothing).

    Attributes
    ----------
    source : str
        "history", "spread", "surrogate", "new classes", "label shift" or "reserve".
    log_temperature, log_temperature_error : float or None
        What it says of log T; "new classes" of that of the new classes.
    bias, bias_error : float or None
        What it says of the bias.

    Examples
    --------
    >>> from tcil.results import PACTEvidence
    >>> piece = PACTEvidence("surrogate", 0.7, 0.17, 1.9, 0.61)
    >>> print(f"{piece.source}: log T = {piece.log_temperature} +- {piece.log_temperature_error}")
    surrogate: log T = 0.7 +- 0.17
    """

    source: str
    log_temperature: float | None
    log_temperature_error: float | None
    bias: float | None
    bias_error: float | None


def evened(rows: Labelled, is_new: Tensor, contrast: float, temperature: float) -> Labelled:
    """The rows with the logits of new classes divided by exp(contrast): they then have the temperature of the old ones.

    Logits are taken about the mean of their row, by the function that `PriorAdjustedMap` uses.

    >>> rows = torch.tensor([[3.0, 7.0]]), torch.tensor([1])
    >>> evened(rows, torch.tensor([False, True]), math.log(2), temperature=1.0)[0]
    tensor([[-2.,  1.]], dtype=torch.float64)
    """
    if contrast == 0.0:
        return rows
    scale = torch.where(is_new, math.exp(-contrast), 1.0).double()
    return centred(mask_out(rows[0].double()), temperature) * scale, rows[1]


def surrogate(evidence: TCILEvidence) -> tuple[float, float, float, float] | None:
    """log T, its sampling error, b and its own, by the validation set and the perturbed exemplars of old classes."""
    if evidence.pushed is None or not evidence.result.reachable:
        return None
    target = temperature_with_error(*evidence.valid)  # it set the magnitude
    old = ~evidence.is_new[evidence.pushed[1]]
    found = joint_fit(evidence.valid, (evidence.pushed[0][old], evidence.pushed[1][old]), evidence.is_new)
    if found is None or target is None:
        return None
    log_t, bias, variances = found
    return log_t, math.sqrt(variances[0] + target[1] ** 2), bias, math.sqrt(variances[1])


def laplace(
    logits: Tensor, columns: Tensor, mean: float, variance: float, prior_error: float = MEASURED.prior_error
) -> tuple[float, float] | None:
    """The likelihood of log T as that of one normal observation: what it saw, and its error.

    Where `mean` and `variance` are what is known of log T, it gives the same mode and curvature as the likelihood. None
    where it says less than `prior_error`, which is known without any evidence.
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
    if curvature < 1 / prior_error**2:
        return None
    return mode + (mode - mean) / variance / curvature, 1 / math.sqrt(curvature)


def _bisect(rising: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising function crosses 0, or the nearer end."""
    if rising(low) >= 0:
        return low
    if rising(high) <= 0:
        return high
    return float(brentq(rising, low, high, xtol=1e-10))


def temperature_with_error(logits: Tensor, columns: Tensor) -> tuple[float, float] | None:
    """log T by cross-entropy, and its standard error (sandwich); None where it has none."""
    if logits.shape[1] < 2 or (fit := solve_temperature(logits, columns)).verdict is not Verdict.OK:
        return None
    error = temperature_error(logits, columns, fit.temperature)
    return None if error is None else (math.log(fit.temperature), error)


def label_shift(
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
    if len(columns) < FEWEST or len(columns.unique()) < new.shape[1] or not math.isfinite(mean):
        return None
    slopes = _mean_logit(old) - _mean_logit(new)
    variance = float((weight - share).square().sum())
    bias = math.log(old.shape[1] / new.shape[1]) - float(mean)
    return bias, float((weight * slopes).sum()), math.sqrt(variance)


def _mean_logit(z: Tensor) -> Tensor:
    """The mean logit of each row under its own softmax; 0 where every class of it is masked."""
    means: Tensor = (torch.softmax(z, dim=1).nan_to_num(0.0) * without_masked(z)).sum(dim=1)
    return means


def balanced_likelihood(
    valid: Labelled, reserve: Labelled, is_new: Tensor, mean: tuple[float, float], variance: tuple[float, float]
) -> tuple[tuple[float, float, float, float] | None, tuple[float, float, float, float], float]:
    """What a reserve of old classes and the validation set say of (log T, b) where every class counts equally.

    `mean` and `variance` are what is known of log T and b. The log-likelihood of q counts an image of the scarcer group
    once, and the others so much less that classes weigh the same. Its mode together with what is known is found by
    Newton's method, and so is its curvature there. Returns what the likelihood said, as one observation (log T, its
    error, b, its error; None where it is flat in some direction), both together, in the same form, and how many errors
    the two are apart, by the gain in log-likelihood.
    """
    old, new = len(reserve[1]) / int((~is_new).sum()), len(valid[1]) / int(is_new.sum())  # images per class
    weight = torch.cat(
        [
            min(1.0, new / old) * len(reserve[1]) * _equal_classes(reserve[1]),
            min(1.0, old / new) * len(valid[1]) * _equal_classes(valid[1]),
        ]
    )
    z, columns = torch.cat([reserve[0], valid[0]]).double(), torch.cat([reserve[1], valid[1]])
    is_old, finite = (~is_new).double(), without_masked(z)
    start = torch.tensor(mean, dtype=torch.float64)
    precision = 1 / torch.tensor(variance, dtype=torch.float64)
    own_z, own_old = finite.gather(1, columns[:, None]).squeeze(1), is_old[columns]

    def at(point: Tensor) -> tuple[float, Tensor, Tensor]:
        """Value, gradient and expected curvature of the negative log-likelihood and prior; curvature of the first."""
        scale = math.exp(-float(point[0]))
        log_p = torch.log_softmax(z * scale + point[1] * is_old, dim=1)
        p, scaled = log_p.exp(), finite * scale
        mean_z, mean_old = (p * scaled).sum(dim=1), (p * is_old).sum(dim=1)
        gradient = torch.stack([(weight * (own_z * scale - mean_z)).sum(), (weight * (mean_old - own_old)).sum()])
        tt = (weight * ((p * scaled.square()).sum(dim=1) - mean_z.square())).sum()
        tb = -(weight * ((p * scaled * is_old).sum(dim=1) - mean_z * mean_old)).sum()
        bb = (weight * (mean_old - mean_old.square())).sum()
        value = -float((weight * log_p.gather(1, columns[:, None]).squeeze(1)).sum())
        value += 0.5 * float((precision * (point - start).square()).sum())
        return (
            value,
            gradient + precision * (point - start),
            torch.stack([torch.stack([tt, tb]), torch.stack([tb, bb])]),
        )

    point = start.clone()
    value, gradient, curvature = at(point)
    before = value
    for _ in range(100):
        step = torch.linalg.solve(curvature + precision.diag(), gradient)
        size = 1.0
        while size > 1e-6 and (found := at(point - size * step))[0] > value:
            size /= 2
        if size <= 1e-6 or float((size * step).abs().max()) < 1e-9:
            break
        point = point - size * step
        value, gradient, curvature = found
    errors = torch.linalg.inv(curvature + precision.diag()).diagonal().sqrt()
    surprise = math.sqrt(2 * max(before - value, 0.0))
    both = (float(point[0]), float(errors[0]), float(point[1]), float(errors[1]))
    if float(torch.linalg.eigvalsh(curvature)[0]) < 1e-6:
        return None, both, surprise
    alone = point + torch.linalg.solve(curvature, precision * (point - start))
    own = torch.linalg.inv(curvature).diagonal().sqrt()
    return (float(alone[0]), float(own[0]), float(alone[1]), float(own[1])), both, surprise


def _equal_classes(columns: Tensor) -> Tensor:
    """Weights of rows, summing to 1, by which every class that has any counts equally."""
    _, place, counts = columns.unique(return_inverse=True, return_counts=True)
    weights: Tensor = 1.0 / (counts.double()[place] * len(counts))
    return weights


def joint_fit(
    new: tuple[Tensor, Tensor], old: tuple[Tensor, Tensor], is_new: Tensor
) -> tuple[float, float, tuple[float, float]] | None:
    """log T and b that minimise the cross-entropy of softmax(z / T + b [old]), each class counting equally, and old
    and new ones as many as they are, also where some have no image; and their sampling variances (sandwich).

    None where there is no finite minimum.
    """
    loss = _JointLoss(new, old, is_new)
    point, scores, curvature = _newton(loss, torch.tensor([1.0, 0.0], dtype=torch.float64))
    sharpness, bias = float(point[0]) / loss.spread, float(point[1])
    flat = float(torch.linalg.eigvalsh(curvature)[0]) < 1e-6  # the minimum is at infinity: all is right, or separable
    if flat or float(scores.sum(dim=0).norm()) > 1e-6 or sharpness <= 0:
        return None
    bread = torch.linalg.inv(curvature)
    variances = (bread @ (scores.T @ scores) @ bread).diagonal()
    # d log T = - d sharpness / sharpness
    return -math.log(sharpness), bias, (float(variances[0]) / float(point[0]) ** 2, float(variances[1]))


class _JointLoss:
    """The cross-entropy as a function of (spread / T, b), in which it is convex; logits are divided by their spread."""

    def __init__(self, new: tuple[Tensor, Tensor], old: tuple[Tensor, Tensor], is_new: Tensor) -> None:
        z, self._columns = torch.cat([new[0], old[0]]).double(), torch.cat([new[1], old[1]])
        share = float(is_new.double().mean())
        self._weight = torch.cat([share * _equal_classes(new[1]), (1 - share) * _equal_classes(old[1])])
        self._alive = alive = z != -torch.inf
        if bool(alive.all()):
            z = z - z.mean(dim=1, keepdim=True)
            self.spread = float(z.std()) or 1.0
        else:
            z = without_masked(z)
            z = (z - z.sum(dim=1, keepdim=True) / alive.sum(dim=1, keepdim=True)) * alive
            self.spread = float(z[alive].std()) or 1.0
        self._z, self._is_old = z / self.spread, (~is_new).double()
        own = self._z.gather(1, self._columns[:, None]).squeeze(1)
        self._own = torch.stack([own, self._is_old[self._columns]], dim=1)

    def __call__(self, point: Tensor) -> tuple[float, Tensor, Tensor]:
        """The value, the gradient's part of each row, and the curvature."""
        z, is_old, weight = self._z, self._is_old, self._weight
        log_p = torch.log_softmax((point[0] * z + point[1] * is_old).masked_fill(~self._alive, -torch.inf), dim=1)
        p = log_p.exp()
        mean_z, mean_old = (p * z).sum(dim=1), (p * is_old).sum(dim=1)
        scores = weight[:, None] * (torch.stack([mean_z, mean_old], dim=1) - self._own)
        second = torch.stack([(p * z * z).sum(1) - mean_z**2, (p * z * is_old).sum(1) - mean_z * mean_old,
                              mean_old - mean_old**2], dim=1)  # fmt: skip
        a, b, c = (weight[:, None] * second).sum(dim=0)
        value = -float((weight * log_p.gather(1, self._columns[:, None]).squeeze(1)).sum())
        return value, scores, torch.stack([torch.stack([a, b]), torch.stack([b, c])])


def _newton(loss: _JointLoss, point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Newton's method with halved steps: where it ends, and the scores and the curvature there."""
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
    return point, scores, curvature
