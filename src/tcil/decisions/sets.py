"""Prediction sets with stated coverage, by split-conformal prediction (Vovk et al. 2005; Papadopoulos et al. 2002)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from tcil.decisions.bounds import conformal_begins_at, conformal_rank
from tcil.decisions.costs import ROUNDING
from tcil.decisions.promises import ALL, NEW, OLD, DecisionVerdict, Design, PromiseKind, SetGroups, SetScore
from tcil.decisions.rules import (
    Bools,
    DecisionRule,
    LabelledImages,
    answer,
    check_open_share,
    check_stratified,
    labelled_images,
)
from tcil.foundation.arrays import ArrayLike, Floats, whole_number
from tcil.foundation.errors import invalid
from tcil.foundation.records import Record


@dataclass(frozen=True)
class SetThreshold(Record):
    """The threshold on the scores of one group, and what it promises.

    Attributes
    ----------
    group : str
        "all", "old", "new", or a label.
    threshold : float
        A label of the group is in the set if its score is at most this; infinity with too few images.
    n : int
        Calibration images of the group.
    coverage : float
        The least coverage that is promised for images of this group; 1 where every label is always in the set.
    coverage_most : float or None
        The largest expected coverage if no two scores are equal and sets may be empty; None for stratified images.
    begins_at : int
        The smallest number of images of the group with which there is a threshold.
    verdict : DecisionVerdict
        Whether there were enough.

    Examples
    --------
    >>> from tcil import decisions
    >>> probs = [[0.9, 0.1], [0.4, 0.6], [0.3, 0.7]]
    >>> decisions.ConformalSets(alpha=0.5, by="marginal").fit(probs, [0, 1, 0]).result_.thresholds[0].threshold
    0.4
    """

    group: str
    threshold: float
    n: int
    coverage: float
    coverage_most: float | None
    begins_at: int
    verdict: DecisionVerdict


@dataclass(frozen=True)
class ConformalResult(Record):
    """What prediction sets promise.

    Attributes
    ----------
    alpha : float
        The true class may be missing from this share of the sets.
    kind : PromiseKind
        Always a finite-sample promise.
    verdicts : tuple of DecisionVerdict
        What `fit` found in the images.
    thresholds : tuple of SetThreshold
        One for each group that coverage is promised for.
    assumptions : tuple of str
        The assumptions of the promise.

    Examples
    --------
    >>> from tcil import decisions
    >>> sets = decisions.ConformalSets(alpha=0.1, by="marginal").fit([[0.9, 0.1]] * 5, [0] * 5)
    >>> print(sets.result_.message)
    No threshold at 90 % coverage for all images with 5 images: every set contains all their classes.
    Smallest number: 9 images.
    """

    alpha: float
    kind: PromiseKind
    verdicts: tuple[DecisionVerdict, ...]
    thresholds: tuple[SetThreshold, ...]
    assumptions: tuple[str, ...]

    @property
    def message(self) -> str:
        """The answer in words."""
        told = []
        for found in self.thresholds:
            images = "all images" if found.group == ALL else f"images of {found.group} classes"
            images = images if found.group in (ALL, OLD, NEW) else f"images of class {found.group}"
            if found.verdict is DecisionVerdict.TOO_FEW_IMAGES:
                told.append(
                    f"No threshold at {100 - 100 * self.alpha:g} % coverage for {images} with {found.n} images:"
                    f" every set contains all their classes. Smallest number: {found.begins_at:,} images."
                )
            else:
                told.append(f"Coverage of at least {100 - 100 * self.alpha:g} % for {images}, from {found.n} images.")
        return " ".join(told)


@dataclass(eq=False, kw_only=True)
class ConformalSets(DecisionRule[ConformalResult]):
    """Sets of classes that contain the true one with a stated probability, with any network and calibrator.

    A better network or calibrator gives smaller sets. With `by="group"`, coverage holds for images of old classes and
    for images of new classes, and so under any mixture of the two.

    Parameters
    ----------
    alpha : float
        The true class may be missing from this share of the sets.
    score : {"lac", "aps", "raps"}
        The score of a label: the larger, the worse it fits the image.
    by : {"group", "marginal", "class", "new"}
        For which images coverage is promised.
    design : {"independent", "stratified"}
        How the images of a group were drawn; "stratified" for the same number of every class.
    penalty, free_ranks : float, int
        Of RAPS: what is added for each rank after the first `free_ranks`. Choose them without the images of `fit`.
    allow_empty : bool
        Whether a set may be empty. Otherwise every set contains the likeliest class, which only adds coverage.

    Attributes
    ----------
    result_ : ConformalResult
        Thresholds, what they promise, and the assumptions.
    classes_, new_classes_ : tuple of int
        The label of each column, and of the new ones.

    Examples
    --------
    >>> import numpy as np
    >>> from tcil import decisions
    >>> rng = np.random.default_rng(0)
    >>> labels = rng.integers(0, 4, 400)
    >>> logits = rng.normal(size=(400, 4)) + 2 * np.eye(4)[labels]
    >>> probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    >>> sets = decisions.ConformalSets(alpha=0.1).fit(probs[:200], labels[:200], new_classes=[3])
    >>> print(sets.result_.message)
    Coverage of at least 90 % for images of old classes, from 141 images.
    Coverage of at least 90 % for images of new classes, from 59 images.
    >>> inside = sets.predict(probs[200:])
    >>> inside.shape, round(float(inside[np.arange(200), labels[200:]].mean()), 2), float(inside.sum(axis=1).mean())
    ((200, 4), 0.91, 1.36)
    """

    result_type: ClassVar[type[Any]] = ConformalResult

    alpha: float = 0.1
    score: SetScore | str = SetScore.LAC
    by: SetGroups | str = SetGroups.GROUP
    design: Design | str = Design.INDEPENDENT
    penalty: float = 0.01
    free_ranks: int = 5
    allow_empty: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.alpha = check_open_share(self.alpha, "alpha")
        self.score, self.by = SetScore.parse(self.score, "score"), SetGroups.parse(self.by, "by")
        self.design = Design.parse(self.design, "design")
        self.free_ranks = whole_number(self.free_ranks, "free_ranks", 0)
        self.penalty = checked_penalty(self.penalty)
        if not isinstance(self.allow_empty, bool):
            raise invalid("allow_empty", repr(self.allow_empty), "True or False")

    def fit(
        self,
        probs: ArrayLike,
        labels: ArrayLike,
        new_classes: Iterable[Any] | None = None,
        *,
        classes: Iterable[Any] | None = None,
        ids: ArrayLike | None = None,
        used_ids: ArrayLike | None = None,
    ) -> Self:
        """Find the thresholds on images that neither the network nor the calibrator has seen.

        Parameters
        ----------
        probs : tensor or array (N, K)
            Probabilities of these images.
        labels : tensor or array (N,)
            Their true classes.
        new_classes : iterable of int, optional
            The labels of the newest task; needed with by "group" and "new".
        classes : iterable of int, optional
            The label of each column. Default: 0 to K - 1.
        ids, used_ids : array of int, optional
            Which images these are, and which were used before (to train, or to fit the calibrator). An image that is
            in both is refused.

        Returns
        -------
        Self
            This rule, fitted.
        """
        self._check_options()
        images = labelled_images(probs, labels, new_classes, classes, ids, used_ids)
        if new_classes is None and self.by in (SetGroups.GROUP, SetGroups.NEW):
            raise invalid("new_classes", f"None with by={str(self.by)!r}", "the labels of the newest task")
        groups = self._groups(images)
        for group, (rows, _) in groups.items():
            if not rows.any():
                raise invalid(
                    "labels",
                    f"no image of {'class' if group.lstrip('-').isdigit() else 'the group'} {group}",
                    "images of every group that coverage is promised for",
                    "Without unseen images of old classes, by='new' still has an answer." if group == OLD else "",
                )
        if self.design is Design.STRATIFIED:
            check_stratified(images, [rows for rows, _ in groups.values()], [own for _, own in groups.values()])
        strangeness = scores_of(torch.from_numpy(images.probs), SetScore(self.score), self.penalty, self.free_ranks)
        own = strangeness.numpy()[np.arange(len(images.columns)), images.columns]
        found = tuple(self._threshold(group, own[rows], int(mine.sum())) for group, (rows, mine) in groups.items())
        verdicts = tuple(dict.fromkeys(f.verdict for f in found if f.verdict is not DecisionVerdict.OK))
        result = ConformalResult(
            alpha=self.alpha,
            kind=PromiseKind.FINITE_SAMPLE,
            verdicts=verdicts or (DecisionVerdict.OK,),
            thresholds=found,
            assumptions=self._assumptions(),
        )
        return self._fitted(images.classes, images.new, result)

    def _groups(self, images: LabelledImages) -> dict[str, tuple[Bools, Bools]]:
        """By group: which images are its own, and which columns."""
        if self.by is SetGroups.MARGINAL:
            return {ALL: (np.ones(len(images.columns), bool), np.ones(len(images.classes), bool))}
        if self.by is SetGroups.NEW:
            return {NEW: (images.is_new, images.new)}
        if self.by is SetGroups.CLASS:
            columns = np.arange(len(images.classes))
            return {str(images.classes[c]): (images.columns == c, columns == c) for c in columns}
        both = {OLD: (~images.is_new, ~images.new), NEW: (images.is_new, images.new)}
        return {group: own for group, own in both.items() if own[1].any()}  # in a first task all classes are new

    def _threshold(self, group: str, scores: Floats, n_classes: int) -> SetThreshold:
        of_classes = n_classes if self.design is Design.STRATIFIED else None
        n, begins_at = len(scores), conformal_begins_at(self.alpha, of_classes)
        rank = conformal_rank(n, self.alpha, of_classes)
        few = rank > n
        return SetThreshold(
            group=group,
            threshold=math.inf if few else float(np.partition(scores, rank - 1)[rank - 1]),
            n=n,
            coverage=1.0 if few else 1.0 - self.alpha,
            coverage_most=None if self.design is Design.STRATIFIED else (1.0 if few else rank / (n + 1)),
            begins_at=begins_at,
            verdict=DecisionVerdict.TOO_FEW_IMAGES if few else DecisionVerdict.OK,
        )

    def _assumptions(self) -> tuple[str, ...]:
        return (
            "the images were neither used to train the network nor to fit the calibrator",
            f"images of a group: {Design(self.design).meaning}",
            f"coverage is promised for: {SetGroups(self.by).meaning}",
            "coverage is an average over the draw of these images and of a test image",
            "network and calibrator stay as they are",
        )

    def predict(self, probs: ArrayLike) -> Any:
        """The prediction set of each image.

        Parameters
        ----------
        probs : tensor or array (N, K)
            Probabilities from the same network and calibrator as in `fit`.

        Returns
        -------
        tensor or array of bool (N, K)
            True where the class of the column is in the set.
        """
        rows = self._rows(probs)
        return answer(self._head()(torch.from_numpy(rows)), probs)

    def _head(self) -> nn.Module:
        return _SetHead(self._limits(), SetScore(self.score), self.penalty, self.free_ranks, self.allow_empty)

    def _limits(self) -> Tensor:
        """The threshold of each column."""
        by_group = {found.group: found.threshold for found in self.result_.thresholds}
        _, new, _ = self._fit_state
        if self.by is SetGroups.CLASS:
            limits = [by_group[str(label)] for label in self.classes_]
        elif self.by is SetGroups.GROUP:
            limits = [by_group[NEW if is_new else OLD] for is_new in new]
        else:
            limits = [next(iter(by_group.values()))] * len(self.classes_)
        return torch.tensor(limits, dtype=torch.float64)

    def _check_restored(self) -> None:
        if torch.isnan(self._limits()).any():
            raise ValueError("a threshold that is no number")


def checked_penalty(penalty: Any) -> float:
    """The penalty of RAPS: a number of 0 or more."""
    number = isinstance(penalty, int | float) and not isinstance(penalty, bool)
    if not number or not 0 <= penalty < math.inf:
        raise invalid("penalty", repr(penalty), "a number of 0 or more")
    return float(penalty)


class _SetHead(nn.Module):
    """From probabilities to sets, for export."""

    def __init__(self, limits: Tensor, score: SetScore, penalty: float, free_ranks: int, allow_empty: bool) -> None:
        super().__init__()
        self.register_buffer("limits", limits)
        self.limits: Tensor
        self.score, self.penalty, self.free_ranks, self.allow_empty = score, penalty, free_ranks, allow_empty

    def forward(self, probs: Tensor) -> Tensor:
        """Which classes are in the set of each image, (N, K)."""
        inside = scores_of(probs, self.score, self.penalty, self.free_ranks) <= self.limits + ROUNDING
        inside = inside | probs.isnan().any(dim=1, keepdim=True)  # nothing is known of such an image
        if self.allow_empty:
            return inside
        columns = torch.arange(probs.shape[1], device=probs.device)
        return inside | (columns == probs.argmax(dim=1, keepdim=True))


def scores_of(probs: Tensor, score: SetScore, penalty: float, free_ranks: int) -> Tensor:
    """The score of each label for each image, (N, K); the larger, the worse it fits."""
    if score is SetScore.LAC:
        return 1.0 - probs
    ordered, order = torch.sort(probs, dim=1, descending=True, stable=True)
    total = ordered.cumsum(dim=1)
    if score is SetScore.RAPS:
        ranks = torch.arange(1, probs.shape[1] + 1, device=probs.device, dtype=probs.dtype)
        total = total + penalty * (ranks - free_ranks).clamp(min=0)
    return torch.zeros_like(total).scatter(1, order, total)
