"""Prediction sets where the same images fit the calibrator and back the promise: cross-fitting, with a weaker bound."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tcil.decisions.promises import SetScore
from tcil.decisions.rules import Bools, check_open_share, class_names, new_columns
from tcil.decisions.sets import ROUNDING, scores_of
from tcil.foundation.arrays import ArrayLike, as_labels, as_probabilities, label_columns, whole_number
from tcil.foundation.errors import invalid
from tcil.foundation.records import Record


@dataclass(frozen=True, eq=False)
class CrossConformalResult(Record):
    """Prediction sets from cross-fitting.

    Attributes
    ----------
    sets : array of bool (M, K)
        Which classes are in the set of each test image.
    coverage_old, coverage_new : float or None
        The least coverage that is promised for images of either group; None for a group without images, all of whose
        classes are in every set.

    Examples
    --------
    >>> import numpy as np
    >>> from tcil import decisions
    >>> probs = np.tile([[0.8, 0.2]], (40, 1))
    >>> crossed = decisions.cross_conformal_sets(
    ...     probs, [0] * 36 + [1] * 4, np.arange(40) % 4, [probs[:3]] * 4, new_classes=[1], alpha=0.1)
    >>> crossed.sets.shape, round(crossed.coverage_old, 3)
    ((3, 2), 0.65)
    """

    sets: Bools
    coverage_old: float | None
    coverage_new: float | None


def cross_conformal_sets(
    probs: ArrayLike,
    labels: ArrayLike,
    folds: ArrayLike,
    test_probs: Sequence[ArrayLike],
    *,
    new_classes: Iterable[Any] | None,
    classes: Iterable[Any] | None = None,
    alpha: float = 0.1,
    score: SetScore | str = SetScore.LAC,
    penalty: float = 0.01,
    free_ranks: int = 5,
) -> CrossConformalResult:
    """CV+ sets (Romano, Sesia and Candès 2020) by true group, for calibrators that are fitted on the reserve.

    Fit the calibrator once without each fold of the images. Coverage in a group with n images in K folds is at least
    1 - 2 alpha - min(2 (1 - 1/K) / (n/K + 1), (1 - K/n) / (K + 1)) (Barber et al. 2021, theorem 4): about twice the
    misses that other images would promise.

    Parameters
    ----------
    probs : tensor or array (N, K)
        Probabilities of the calibration images, each from the calibrator that was fitted without its fold.
    labels : tensor or array (N,)
        Their true classes.
    folds : array of int (N,)
        The fold of each image, from 0. Folds of a group must be equally large.
    test_probs : sequence of arrays (M, K)
        Probabilities of the test images by the calibrator of each fold.
    new_classes : iterable of int or None
        The labels of the newest task. None: one group, told as old.
    classes : iterable of int, optional
        The label of each column. Default: 0 to K - 1.
    alpha : float
        The true class may be missing from about this share of the sets, and from twice as many at the worst.
    score : {"lac", "aps", "raps"}
        How strange a label is for an image.
    penalty, free_ranks : float, int
        Of RAPS, as in `ConformalSets`.

    Returns
    -------
    CrossConformalResult
        The sets, and the coverage that is promised for either group.

    Examples
    --------
    >>> import numpy as np
    >>> from tcil import decisions
    >>> probs = np.tile([[0.8, 0.2]], (40, 1))
    >>> decisions.cross_conformal_sets(
    ...     probs, [0] * 40, np.arange(40) % 4, [probs[:1]] * 4, new_classes=None).sets.tolist()
    [[True, False]]
    """
    alpha, kind = check_open_share(alpha, "alpha"), SetScore.parse(score, "score")
    rows = as_probabilities(probs)
    names = class_names(rows.shape[1], classes)
    columns = label_columns(
        as_labels(labels, length=len(rows)), None if classes is None else names, "labels", rows.shape[1]
    ).numpy()
    new = new_columns(names, new_classes)
    fold = as_labels(folds, "folds", length=len(rows)).numpy()
    n_folds = whole_number(len(test_probs), "test_probs", 2)
    if fold.min() < 0 or fold.max() >= n_folds:
        raise invalid("folds", f"folds from {fold.min()} to {fold.max()}", f"0 to {n_folds - 1}, as test_probs has")
    others = [as_probabilities(part, "test_probs") for part in test_probs]
    if any(part.shape != others[0].shape or part.shape[1] != rows.shape[1] for part in others):
        raise invalid("test_probs", "matrices of different shapes", f"one (M, {rows.shape[1]}) for each fold")
    is_new, ranks = new[columns], whole_number(free_ranks, "free_ranks", 0)
    for group in (True, False):
        sizes = np.bincount(fold[is_new == group], minlength=n_folds)
        if sizes.max() != sizes.min():
            given = f"folds of {sizes.min()} to {sizes.max()} images of {'new' if group else 'old'} classes"
            raise invalid("folds", given, "folds of one size within a group")
    own = scores_of(torch.from_numpy(rows), kind, penalty, ranks).numpy()[np.arange(len(rows)), columns]
    strange = [scores_of(torch.from_numpy(part), kind, penalty, ranks).numpy() for part in others]
    sets = np.zeros(others[0].shape, bool)
    promised: dict[bool, float | None] = {}
    for group in (False, True):
        mine, n = is_new == group, int((is_new == group).sum())
        larger = np.zeros(others[0].shape)
        for number, part in enumerate(strange):
            scores = np.sort(own[mine & (fold == number)])
            larger += np.searchsorted(scores, part - ROUNDING, side="left")  # images less strange than this label
        wanted = larger < (1 - alpha) * (n + 1)
        sets |= wanted & (new == group)[None, :]
        promised[group] = _promise(alpha, n, n_folds) if n else None
    return CrossConformalResult(sets, promised[False], promised[True])


def _promise(alpha: float, n: int, n_folds: int) -> float:
    slack = min(2 * (1 - 1 / n_folds) / (n / n_folds + 1), (1 - n_folds / n) / (n_folds + 1))
    return max(0.0, 1 - 2 * alpha - slack)
