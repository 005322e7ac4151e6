"""Class frequencies where probabilities are used: given by the user, or estimated from unlabelled images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor

from tcil.foundation.arrays import ArrayLike, Floats, as_classes, as_tensor, logits_and_columns
from tcil.foundation.errors import invalid, shortened
from tcil.foundation.options import Option
from tcil.foundation.records import Table

_STEPS, _TOLERANCE = 10_000, 1e-12  # EM: maximum number of steps, and the gain in mean log-likelihood that ends it
_WORST_CONDITION = 1e6  # condition number of a confusion matrix above which its inverse is not used


class PriorMethod(Option):
    """How class frequencies are estimated from unlabelled images.

    Attributes
    ----------
    meaning : str
        What the member stands for, in one line.

    Examples
    --------
    >>> from tcil.options import PriorMethod
    >>> PriorMethod("em").meaning
    'the frequencies that make the calibrated probabilities of these images the most likely'
    """

    EM = "em", "the frequencies that make the calibrated probabilities of these images the most likely"
    BBSE = "bbse", "the counts of predictions, corrected by the confusion matrix of labelled images"


@dataclass(frozen=True)
class PriorEstimate(Table):
    """Class frequencies estimated from unlabelled images, for use as `prior=`.

    Attributes
    ----------
    prior : tuple of float
        The frequency of each class; they sum to 1.
    errors : tuple of float
        Their standard errors. These account for the finite number of images, not for errors of the calibration or the
        confusion matrix on these images.
    classes : tuple of int
        The label of each frequency.
    method : PriorMethod
        The method of estimation.
    n_samples : int
        Number of unlabelled images.

    Examples
    --------
    >>> import torch, tcil
    >>> logits = 4 * torch.eye(2)[torch.tensor([0, 0, 0, 1])]
    >>> scaling = tcil.TemperatureScaling().fit(logits, torch.tensor([0, 0, 1, 1]))
    >>> estimate = scaling.estimate_prior(logits.repeat(100, 1))
    >>> estimate.prior[0] > 0.9, estimate.n_samples
    (True, 400)
    """

    columns: ClassVar[tuple[str, ...]] = ("classes", "prior", "errors")
    prior: tuple[float, ...]
    errors: tuple[float, ...]
    classes: tuple[int, ...]
    method: PriorMethod
    n_samples: int


# An estimate, a mapping by label, or numbers in the order of the classes.
Prior: TypeAlias = PriorEstimate | Mapping[Any, float] | Sequence[float] | np.ndarray[Any, Any] | Tensor


def log_prior_of(prior: Any, classes: tuple[int, ...]) -> Tensor:
    """The log of the relative frequency of each class, (K,), in float64; -inf for a class that does not occur.

    >>> log_prior_of({3: 30, 7: 10}, (7, 3)).exp()
    tensor([0.2500, 0.7500], dtype=torch.float64)
    """
    if isinstance(prior, PriorEstimate):
        prior = dict(zip(prior.classes, prior.prior, strict=True))
    if isinstance(prior, Mapping):
        labels = as_classes(list(prior), "prior")
        missing, unknown = (sorted(a - b) for a, b in ((set(classes), set(labels)), (set(labels), set(classes))))
        if missing or unknown:
            given = (
                f"no frequency of the classes {shortened(missing)}"
                if missing
                else f"frequencies of the classes {shortened(unknown)}"
            )
            raise invalid("prior", given, f"one for each of the {len(classes)} classes in classes_")
        by_label = dict(zip(labels, prior.values(), strict=True))
        prior = [by_label[label] for label in classes]
    values = as_tensor(prior, "prior").cpu().double()
    if values.shape != (len(classes),):
        raise invalid("prior", f"shape {tuple(values.shape)}", f"({len(classes)},), one frequency for each class")
    if not bool(torch.isfinite(values).all()) or bool((values < 0).any()) or not bool((values > 0).any()):
        raise invalid("prior", shortened(values.tolist()), "frequencies of 0 or more, not all of them 0")
    values = values / values.max()
    return (values / values.sum()).log()


def check_possible(logits: Tensor, log_prior: Tensor) -> None:
    """Raise if every class of a row is masked or has frequency 0."""
    nothing = ((logits == -torch.inf) | (log_prior.to(logits.device) == -torch.inf)).all(dim=1)
    if bool(nothing.any()):
        row = int(nothing.nonzero()[0])
        raise invalid("prior", f"frequency 0 for every class that is not masked in row {row}", "a class that can occur")


def estimate_prior(
    scores: Tensor,
    classes: tuple[int, ...],
    method: PriorMethod,
    labelled: tuple[ArrayLike, ArrayLike] | None = None,
) -> PriorEstimate:
    """The frequencies of the classes among unlabelled images.

    `scores` are their calibrated log-probabilities for EM, their logits for BBSE.
    """
    if method is PriorMethod.EM:
        probs: Floats = scores.double().exp().cpu().numpy()
        prior = _most_likely(probs)
        errors = _likelihood_errors(probs, prior)
    else:
        if not isinstance(labelled, (tuple, list)) or len(labelled) != 2:
            raise invalid("labelled", type(labelled).__name__, "(logits, labels) of held-out images of all classes")
        z, columns, _ = logits_and_columns(labelled[0], labelled[1], classes)
        confusion, counts = _confusion(z, columns, classes)
        predicted = np.bincount(scores.argmax(dim=1).cpu().numpy(), minlength=len(classes)) / len(scores)
        prior, errors = _corrected(predicted, len(scores), confusion, counts)
    return PriorEstimate(tuple(prior.tolist()), tuple(errors.tolist()), classes, method, len(scores))


def _most_likely(probs: Floats) -> Floats:
    """argmax over the simplex of mean log(sum_c prior_c probs_ic), which is concave, by EM."""
    prior = np.full(probs.shape[1], 1 / probs.shape[1])
    before = -np.inf
    for _ in range(_STEPS):
        joint = probs * prior
        evidence = joint.sum(axis=1, keepdims=True)
        now = float(np.log(np.maximum(evidence, 1e-300)).mean())
        if now - before < _TOLERANCE:
            break
        before = now
        prior = (joint / np.maximum(evidence, 1e-300)).mean(axis=0)
        prior = prior / prior.sum()
    return prior


def _likelihood_errors(probs: Floats, prior: Floats) -> Floats:
    """Standard errors from the observed information, restricted to directions that keep the sum at 1."""
    score = probs / np.maximum((probs * prior).sum(axis=1, keepdims=True), 1e-300)
    basis = _directions(len(prior))
    information = basis.T @ (score.T @ score) @ basis
    return _roots(basis @ np.linalg.pinv(information, hermitian=True) @ basis.T)


def _directions(n: int) -> Floats:
    """An orthonormal basis of the vectors whose entries sum to 0, (n, n - 1)."""
    basis: Floats = np.linalg.svd(np.ones((1, n)))[2][1:].T
    return basis


def _roots(covariance: Floats) -> Floats:
    errors: Floats = np.sqrt(np.clip(np.diag(covariance), 0, None))
    return errors


def _confusion(logits: Tensor, columns: Tensor, classes: tuple[int, ...]) -> tuple[Floats, Floats]:
    """The share of each class (column) predicted as each class (row), and the number of samples of each class."""
    n = len(classes)
    places = (logits.argmax(dim=1) * n + columns).numpy()
    table = np.bincount(places, minlength=n * n).reshape(n, n).astype(float)
    counts: Floats = table.sum(axis=0)
    if not counts.all():
        absent = [classes[place] for place in np.flatnonzero(counts == 0)]
        raise invalid("labelled", f"no rows of the classes {shortened(absent)}", "held-out images of every class")
    return table / counts, counts


def _corrected(predicted: Floats, n_samples: int, confusion: Floats, counts: Floats) -> tuple[Floats, Floats]:
    """Frequencies that explain these predictions, projected onto the simplex, and their errors (delta method)."""
    condition = float(np.linalg.cond(confusion))
    if not condition < _WORST_CONDITION:
        given = "predictions that hardly depend on the class (their confusion matrix cannot be inverted)"
        raise invalid("labelled", given, "a network that distinguishes the classes", "Use method='em'.")
    inverse = np.linalg.inv(confusion)
    prior = _onto_simplex(inverse @ predicted)
    noise = _multinomial(confusion @ prior, n_samples)
    for place, share in enumerate(prior):
        noise = noise + share**2 * _multinomial(confusion[:, place], counts[place])
    return prior, _roots(inverse @ noise @ inverse.T)


def _multinomial(shares: Floats, n: float) -> Floats:
    """The covariance of the observed shares in n draws."""
    covariance: Floats = (np.diag(shares) - np.outer(shares, shares)) / n
    return covariance


def _onto_simplex(values: Floats) -> Floats:
    """The nearest point with non-negative entries that sum to 1."""
    falling = np.sort(values)[::-1]
    excess = (np.cumsum(falling) - 1) / np.arange(1, len(values) + 1)
    last = np.flatnonzero(falling > excess)[-1]
    nearest: Floats = np.maximum(values - excess[last], 0.0)
    return nearest
