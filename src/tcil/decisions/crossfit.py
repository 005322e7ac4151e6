"""Prediction sets where the same images fit the calibrator and back the promise: cross-fitting, with a weaker bound."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tcil.decisions.costs import ROUNDING
from tcil.decisions.promises import Design, SetScore
from tcil.decisions.rules import Bools, check_open_share, class_names, new_columns
from tcil.decisions.sets import checked_penalty, scores_of
from tcil.foundation.arrays import ArrayLike, Ints, as_labels, as_probabilities, label_columns, whole_number
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
    design: Design | str = Design.INDEPENDENT,
) -> CrossConformalResult:
    """CV+ sets (Romano, Sesia and Candès 2020) by true group, for calibrators that are fitted on the reserve.

    Fit the calibrator once without each fold of the images. For independent images, coverage in a group with n images
    in K folds is at least 1 - 2 alpha - min(2 (1 - 1/K) / (n/K + 1), (1 - K/n) / (K + 1)) (Barber et al. 2021, theorem
    4): about twice the misses that other images would promise. For the same number of images of each of C classes it is
    at least 1 - 2 (alpha (n + 1) - 1 + K C) / (n + K C), which needs many images of a class to be of use.

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
        The labels of the newest task. None: one group, reported as old.
    classes : iterable of int, optional
        The label of each column. Default: 0 to K - 1.
    alpha : float
        The true class may be missing from about this share of the sets, and from twice as many at the worst.
    score : {"lac", "aps", "raps"}
        The score of a label: the larger, the worse it fits the image.
    penalty, free_ranks : float, int
        Of RAPS, as in `ConformalSets`.
    design : {"independent", "stratified"}
        How the images of a group were drawn; "stratified" for the same number of every class in every fold.

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
    penalty, draw = checked_penalty(penalty), Design.parse(design, "design")
    rows = as_probabilities(probs)
    names = class_names(rows.shape[1], classes)
    columns = label_columns(
        as_labels(labels, length=len(rows)), None if classes is None else names, "labels", rows.shape[1]
    ).numpy()
    new = new_columns(names, new_classes)
    fold = as_labels(folds, "folds", length=len(rows)).numpy()
    if not isinstance(test_probs, Sequence | np.ndarray | torch.Tensor):
        raise invalid("test_probs", type(test_probs).__name__, "a list of matrices, one for each fold")
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
    if draw is Design.STRATIFIED:
        _check_classes(columns, fold, new, n_folds)
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
        n_classes = int((new == group).sum()) if draw is Design.STRATIFIED else None
        promised[group] = _promise(alpha, n, n_folds, n_classes) if n else None
    return CrossConformalResult(sets, promised[False], promised[True])


def _check_classes(columns: Ints, fold: Ints, new: Bools, n_folds: int) -> None:
    """Every fold has the same number of images of every class of a group, as the bound for stratified draws needs."""
    counts = np.zeros((n_folds, len(new)), np.int64)
    np.add.at(counts, (fold, columns), 1)
    for group in (True, False):
        own = counts[:, new == group]
        if own.size and own.min() != own.max():
            given = f"folds with {own.min()} to {own.max()} images of a class"
            raise invalid("folds", given, "the same number of every class of a group in every fold")


def _promise(alpha: float, n: int, n_folds: int, n_classes: int | None) -> float:
    if n_classes is not None:  # twice the mean of the p-values of the folds (docs/decisions-theory.md)
        missed = 2 * (alpha * (n + 1) - 1 + n_folds * n_classes) / (n + n_folds * n_classes)
        return max(0.0, 1 - missed)
    slack = min(2 * (1 - 1 / n_folds) / (n / n_folds + 1), (1 - n_folds / n) / (n_folds + 1))
    return max(0.0, 1 - 2 * alpha - slack)
