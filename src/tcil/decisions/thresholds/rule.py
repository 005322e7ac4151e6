"""Thresholds with a stated risk: accept predictions with a high score, so that few accepted ones are errors.

The proofs are in docs/decisions-theory.md. In short: at a threshold that was fixed beforehand, the errors among the
accepted images of a true group are binomial, which gives exact (Clopper-Pearson) bounds. Bounds for a mixture follow,
because its risk rises with every rate of errors and falls with every rate of correct predictions. Several candidate
thresholds are tested as in Learn then Test (Angelopoulos et al. 2022).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import numpy as np

from tcil.decisions.accepting import AcceptRule
from tcil.decisions.costs import Action, Costs, checked_costs
from tcil.decisions.promises import ALL, NEW, OLD, DecisionVerdict, Design, PromiseKind, Search, ThresholdGroups
from tcil.decisions.risk_tests import Ends, Mixture, RiskTest, begins_at, mixture_ends
from tcil.decisions.rules import (
    LabelledImages,
    check_open_share,
    check_stratified,
    labelled_images,
)
from tcil.decisions.thresholds.result import RiskThresholdResult
from tcil.decisions.thresholds.search import ThresholdSearch
from tcil.foundation.arrays import ArrayLike, Floats, as_probabilities, as_tensor, whole_number
from tcil.foundation.errors import invalid

# Fixed before any image is seen: confidences at even steps of the log-odds, for networks of any temperature.
DEFAULT_CANDIDATES = tuple(1 / (1 + math.exp(-x)) for x in (14, 10, 8, 6, 5, 4, 3, 2, 1, 0, -1))
_N_REFERENCE = 12  # candidates that are taken from reference images
_MANY = 30  # correct images without an error that are suspicious


@dataclass(eq=False, kw_only=True)
class RiskThreshold(AcceptRule[RiskThresholdResult]):
    """Accept a prediction, or ask a person, so that the risk of what is accepted stays below a stated one.

    The promise is a finite-sample one: with probability `confidence` over the draw of the calibration images, the risk
    among accepted images is at most `risk`. It needs images of every group that it speaks of which neither the network
    nor the calibrator has seen. Without such images of old classes there is no promise of this kind; see
    `ModelBasedThreshold`.

    Parameters
    ----------
    risk : float
        The largest share of errors among accepted images; with `costs`, their largest mean cost.
    confidence : float
        The probability with which the promise holds, over the draw of the calibration images.
    groups : {"pooled", "predicted"}
        One threshold, or one each for images predicted as old and as new. The promises of both then hold together.
    mixture : mapping, pair of mappings, "as_sampled" or None
        Shares of old and new images that the rule will meet, such as {"old": 0.9, "new": 0.1}; two of them for all
        mixtures in between. None: any mixture, which `groups="predicted"` cannot have. "as_sampled": the images are
        one independent draw of what the rule will meet, and groups do not matter.
    top_k : int
        A prediction is correct if the true class is among the k likeliest.
    costs : array (K, K), optional
        `costs[true, decided]`. The decision is then the one of least expected cost.
    design : {"independent", "stratified"}
        How the images of a group were drawn; "stratified" for the same number of every class.
    candidates : sequence of float, optional
        Thresholds to try, chosen without the calibration images. Default: eleven from 0.27 to 1 - 1e-6.
    search : {"holm", "sequence"}
        How several candidates are tested. "sequence" takes them in order, the strictest first, and stops at the first
        failure: put the first one where enough images are accepted.

    Attributes
    ----------
    result_ : RiskThresholdResult
        Thresholds, coverage, the kind of promise and its assumptions.
    classes_, new_classes_ : tuple of int
        The label of each column, and of the new ones.

    Examples
    --------
    >>> import numpy as np
    >>> from tcil import decisions
    >>> rng = np.random.default_rng(0)
    >>> sure = rng.uniform(0.5, 1, 800)
    >>> labels = np.where(rng.uniform(size=800) < sure, 0, 1)
    >>> probs = np.stack([sure, 1 - sure], axis=1)
    >>> rule = decisions.RiskThreshold(risk=0.2, confidence=0.9, mixture="as_sampled").fit(probs, labels)
    >>> print(rule.result_.message)
    Accept from 0.7311 on: a risk of 20 % at confidence 90 %, expected coverage 56.2 %.
    >>> rule.accept([[0.9, 0.1], [0.6, 0.4]]).tolist(), rule.predict([[0.9, 0.1], [0.6, 0.4]]).tolist()
    ([True, False], [0, 0])
    """

    result_type: ClassVar[type[Any]] = RiskThresholdResult

    risk: float = 0.05
    confidence: float = 0.9
    groups: ThresholdGroups | str = ThresholdGroups.POOLED
    mixture: Mixture = None
    top_k: int = 1
    costs: Any = None
    design: Design | str = Design.INDEPENDENT
    candidates: Sequence[float] | None = None
    search: Search | str = Search.HOLM

    def __post_init__(self) -> None:
        super().__post_init__()
        self.confidence = check_open_share(self.confidence, "confidence")
        self.design, self.search = Design.parse(self.design, "design"), Search.parse(self.search, "search")
        if self.candidates is not None:
            self.candidates = _checked_candidates(self.candidates)
        ends, words = mixture_ends(self.mixture)
        if self.groups is ThresholdGroups.PREDICTED:
            if ends is None:
                return
            if any(0.0 in end for end in ends):
                raise invalid(
                    "mixture",
                    f"{words} with groups='predicted'",
                    "shares above 0 of old and of new images, such as {'old': 0.9, 'new': 0.1}, or two of them",
                    "Where one group may be absent, every image predicted into it is an error: no bound exists.",
                )

    def fit(
        self,
        probs: ArrayLike,
        labels: ArrayLike,
        new_classes: Iterable[Any] | None = None,
        *,
        classes: Iterable[Any] | None = None,
        reference: ArrayLike | None = None,
        ids: ArrayLike | None = None,
        used_ids: ArrayLike | None = None,
    ) -> Self:
        """Find the lowest threshold that keeps the promise.

        Parameters
        ----------
        probs : tensor or array (N, K)
            Probabilities of images that neither the network nor the calibrator has seen.
        labels : tensor or array (N,)
            Their true classes.
        new_classes : iterable of int, optional
            The labels of the newest task. Needed unless the mixture is "as_sampled".
        classes : iterable of int, optional
            The label of each column. Default: 0 to K - 1.
        reference : tensor or array (M, K), optional
            Probabilities of other images, which may be unlabelled: candidate thresholds are taken from them. With
            `search="sequence"` they also say where enough images are accepted to begin.
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
        n_classes = len(images.classes)
        if self.top_k >= n_classes:
            raise invalid("top_k", f"{self.top_k}", f"fewer than the {n_classes} classes")
        if self.costs is not None:
            checked_costs(self.costs, n_classes)
        if reference is not None and self.candidates is not None:
            raise invalid("reference", "reference images beside candidates", "one of the two")
        if self.search is Search.SEQUENCE and reference is None and self.candidates is None:
            advice = "The strictest default accepts next to nothing, and the sequence would end there."
            raise invalid("search", "'sequence' alone", "candidates, or reference images to take them from", advice)
        action = Action(self.top_k, cast(Costs | None, self.costs))
        ends, words = mixture_ends(self.mixture)
        if ends is not None and images.new.all():  # a first task: images of old classes cannot come
            if all(new == 0 for _, new in ends):
                raise invalid("mixture", words, "a share of new images, since all classes are new")
            ends, words = ((0.0, 1.0),), "all classes are new"
        if new_classes is None and (ends is not None or self.groups is ThresholdGroups.PREDICTED):
            advice = "Or say mixture='as_sampled' if the images are one draw of what the rule will meet."
            raise invalid("new_classes", "None", "the labels of the newest task", advice)
        counts = {OLD: int((~images.is_new).sum()), NEW: int(images.is_new.sum())}
        for place, group in enumerate((OLD, NEW)):
            if ends is not None and not counts[group] and any(end[place] for end in ends):
                raise invalid(
                    "labels",
                    f"no image of {'an' if group == OLD else 'a'} {group} class",
                    f"images of {group} classes that were not trained on, since the rule will meet such",
                    "Without them ModelBasedThreshold has an answer, and with mixture='as_sampled' this rule."
                    if group == OLD
                    else "Validation images that did not fit the calibrator will do.",
                )
        if self.design is Design.STRATIFIED:
            halves = (images.is_new, ~images.is_new), (images.new, ~images.new)
            everything = ([np.ones(len(images.columns), bool)], [np.ones(n_classes, bool)])
            check_stratified(images, *(everything if ends is None else halves))
        other = None if reference is None else as_probabilities(reference, "reference")
        if other is not None and other.shape[1] != n_classes:
            raise invalid("reference", f"{other.shape[1]} columns", f"{n_classes}, as probs has")
        regions = self._regions(images.new)
        error = (1.0 - self.confidence) / len(regions)
        search = ThresholdSearch(_test_of(self, action, ends), Search(self.search), action, images, error)
        groups, steps = self._sample(ends, images)
        smallest_group = len(images.columns) if ends is None else min(n for n in counts.values() if n)
        tried = {region: self._tried(action, images, other, region, smallest_group) for region in regions}
        found = tuple(search.threshold(region, tried[region]) for region in regions)
        verdicts = [f.verdict for f in found if f.verdict is not DecisionVerdict.OK]
        lossless = action.loss(images.probs, images.columns) == 0
        for own in (images.is_new, ~images.is_new):
            if own.sum() >= _MANY and lossless[own].all():
                verdicts.append(DecisionVerdict.ALL_CORRECT)
        result = RiskThresholdResult(
            risk=float(self.risk),
            confidence=self.confidence,
            kind=PromiseKind.FINITE_SAMPLE if any(f.exists for f in found) else PromiseKind.NONE,
            verdicts=tuple(dict.fromkeys(verdicts)) or (DecisionVerdict.OK,),
            thresholds=found,
            n_old=counts[OLD],
            n_new=counts[NEW],
            n_candidates=max(map(len, tried.values())),
            groups=groups,
            steps=steps,
            assumptions=self._assumptions(words),
        )
        return self._fitted(images.classes, images.new, result)

    def _sample(self, ends: Ends | None, images: LabelledImages) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """The true groups that images are needed of, and what their sizes are multiples of."""
        groups: tuple[str, ...] = (ALL,)
        columns = [len(images.classes)]
        if ends is not None:
            groups = tuple(group for place, group in enumerate((OLD, NEW)) if any(end[place] for end in ends))
            columns = [int((images.new == (group == NEW)).sum()) for group in groups]
        return groups, tuple(columns) if self.design is Design.STRATIFIED else (1,) * len(groups)

    def _tried(self, action: Action, images: LabelledImages, reference: Floats | None, region: str, n: int) -> Floats:
        """Candidates in the order of the search. Of the calibration images, only their number `n` is known."""
        if reference is None:
            return np.array(DEFAULT_CANDIDATES if self.candidates is None else self.candidates)
        scores = action.score(reference)
        if region != ALL:
            scores = scores[action.decided_new(reference, images.new) == (region == NEW)]
        if not len(scores):
            given = f"no reference image that is predicted as {region}"
            raise invalid("reference", given, "some of either group")
        shares = np.arange(1, _N_REFERENCE + 1) / _N_REFERENCE
        tried = np.unique(np.quantile(scores, 1 - shares, method="lower"))[::-1]
        if self.search is not Search.SEQUENCE:
            return tried
        # The first one accepts twice what a promise needs at the least, as far as the reference can tell.
        needed = math.log(1 - self.confidence) / math.log1p(-min(self.risk / action.unit, 1 - 1e-9))
        enough = [(scores >= t).mean() * n * len(scores) / len(reference) >= 2 * needed for t in tried]
        return tried[enough.index(True) :] if any(enough) else tried[-1:]

    def _assumptions(self, mixture: str) -> tuple[str, ...]:
        return (
            "the images were neither used to train the network nor to fit the calibrator",
            f"images of a group: {Design(self.design).meaning}",
            f"mixture: {mixture}",
            "candidate thresholds were chosen without these images",
            "network and calibrator stay as they are",
        )


def _test_of(rule: RiskThreshold, action: Action, ends: Ends | None) -> RiskTest:
    plain = rule.top_k == 1 and rule.costs is None
    return RiskTest(rule.risk / action.unit, ends, Design(rule.design), action.zero_one, plain)


def _checked_candidates(given: Sequence[float]) -> tuple[float, ...]:
    values = as_tensor(given, "candidates").double().tolist()
    if not isinstance(values, list) or not values or not all(isinstance(v, float) for v in values):
        raise invalid("candidates", f"{given!r:.60}", "a list of thresholds")
    if not all(0 <= v <= 1 for v in values):
        raise invalid("candidates", f"{given!r:.60}", "thresholds from 0 to 1")
    if any(b >= a for a, b in itertools.pairwise(values)):
        raise invalid("candidates", f"{given!r:.60}", "thresholds in falling order, the strictest first")
    return tuple(values)


def smallest_reserve(
    risk: float,
    confidence: float = 0.9,
    *,
    groups: ThresholdGroups | str = ThresholdGroups.POOLED,
    mixture: Mixture = None,
    design: Design | str = Design.INDEPENDENT,
    n_candidates: int = len(DEFAULT_CANDIDATES),
    search: Search | str = Search.HOLM,
) -> int:
    """The smallest number of images of each group with which a promise can exist: all are accepted and correct.

    Parameters
    ----------
    risk, confidence : float
        What `RiskThreshold` will be asked for.
    groups : {"pooled", "predicted"}
        One threshold, or one for each predicted group.
    mixture : mapping, pair of mappings, "as_sampled" or None
        Shares of old and new images.
    design : {"independent", "stratified"}
        How the images of a group are drawn.
    n_candidates : int
        How many thresholds it will try.
    search : {"holm", "sequence"}
        How they are tested.

    Returns
    -------
    int
        Images of old classes, and as many of new ones; with mixture "as_sampled", of both together. For a stratified
        draw, round it up to a multiple of the classes of each group. After a first task, ask with groups "pooled" and
        the mixture {"old": 0, "new": 1}.

    Examples
    --------
    >>> from tcil import decisions
    >>> [decisions.smallest_reserve(risk, n_candidates=1) for risk in (0.05, 0.1, 0.2)]
    [45, 22, 11]
    >>> [decisions.smallest_reserve(risk) for risk in (0.05, 0.1, 0.2)]
    [92, 45, 22]
    """
    rule = RiskThreshold(risk=risk, confidence=confidence, groups=groups, mixture=mixture, design=design, search=search)
    n = whole_number(n_candidates, "n_candidates", 1)
    regions = (ALL,) if rule.groups is ThresholdGroups.POOLED else (OLD, NEW)
    test = _test_of(rule, Action(1, None), mixture_ends(rule.mixture)[0])
    error = (1.0 - rule.confidence) / len(regions)
    level = error if rule.search is Search.SEQUENCE else error / n
    return max(begins_at(test, region, level) for region in regions)
