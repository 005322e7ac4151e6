"""Thresholds without labelled images: the risk that calibrated probabilities claim, and its sensitivity to bias."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import numpy as np

from tcil.decisions.accepting import AcceptRule
from tcil.decisions.costs import Action, Costs, checked_costs
from tcil.decisions.promises import ALL, NEW, PromiseKind, ThresholdGroups
from tcil.decisions.rules import class_names, new_columns
from tcil.foundation.arrays import ArrayLike, Floats, as_probabilities, as_tensor
from tcil.foundation.errors import invalid
from tcil.foundation.records import Record

DEFAULT_GAMMAS = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.15)


@dataclass(frozen=True)
class GammaStep(Record):
    """One point of a sensitivity curve.

    Attributes
    ----------
    gamma : float
        By how much the accepted images' claimed risk may be too small.
    threshold : float
        The threshold that keeps the wanted risk even then; infinity for none.
    coverage : float
        The share of images that are accepted.

    Examples
    --------
    >>> from tcil import decisions
    >>> rule = decisions.ModelBasedThreshold(risk=0.2).fit([[0.9, 0.1], [0.7, 0.3]])
    >>> print(rule.result_.thresholds[0].curve[0])
    GammaStep
      gamma      0
      threshold  0.7
      coverage   1
    """

    gamma: float
    threshold: float
    coverage: float


@dataclass(frozen=True)
class ClaimedThreshold(Record):
    """A threshold for one predicted group, valid if the probabilities are calibrated.

    Attributes
    ----------
    group : str
        "all", or the predicted group "old" or "new".
    threshold : float
        Accept where the score is at least this; infinity for none.
    coverage : float
        The share of the group's images that are accepted.
    claimed_risk : float or None
        The risk among them by their own probabilities.
    gamma : float or None
        By how much that may be too small before the wanted risk is exceeded.
    n : int
        Images of the group.
    curve : tuple of GammaStep
        Thresholds that allow for more bias.

    Examples
    --------
    >>> from tcil import decisions
    >>> found, = decisions.ModelBasedThreshold(risk=0.25).fit([[0.9, 0.1], [0.7, 0.3]]).result_.thresholds
    >>> round(found.claimed_risk, 3), round(found.gamma, 3)
    (0.2, 0.05)
    """

    group: str
    threshold: float
    coverage: float
    claimed_risk: float | None
    gamma: float | None
    n: int
    curve: tuple[GammaStep, ...]

    @property
    def exists(self) -> bool:
        """Whether anything is accepted at all."""
        return self.threshold < math.inf


@dataclass(frozen=True)
class ModelBasedResult(Record):
    """What thresholds promise if the probabilities are calibrated.

    Attributes
    ----------
    risk : float
        As asked.
    kind : PromiseKind
        Always model-based.
    thresholds : tuple of ClaimedThreshold
        One, or one for each predicted group.
    assumptions : tuple of str
        The assumptions of the statement.

    Examples
    --------
    >>> from tcil import decisions
    >>> rule = decisions.ModelBasedThreshold(risk=0.2).fit([[0.9, 0.1], [0.7, 0.3]])
    >>> print(rule.result_.message)
    Accept from 0.7 on: claimed risk 20 %, coverage 100 %. It holds if accepted images are no more than 0 points
    over-confident on average.
    """

    risk: float
    kind: PromiseKind
    thresholds: tuple[ClaimedThreshold, ...]
    assumptions: tuple[str, ...]

    @property
    def message(self) -> str:
        """The answer in words."""
        told = []
        for found in self.thresholds:
            of = "" if found.group == ALL else f" (predicted as {found.group})"
            if found.claimed_risk is None or found.gamma is None:
                told.append(f"No threshold claims a risk of {100 * self.risk:g} %{of}.")
                continue
            told.append(
                f"Accept from {found.threshold:.4g} on{of}: claimed risk {100 * found.claimed_risk:.3g} %, coverage"
                f" {100 * found.coverage:.3g} %. It holds if accepted images are no more than"
                f" {100 * max(found.gamma, 0.0):.2g} points over-confident on average."
            )
        return " ".join(told)


@dataclass(eq=False, kw_only=True)
class ModelBasedThreshold(AcceptRule[ModelBasedResult]):
    """Accept a prediction, or ask a person, by the risk that the probabilities claim. No theorem backs it.

    Use it where there are no unseen images of old classes. It takes unlabelled images of the kind that the rule will
    meet, and says how over-confident the probabilities may be (`gamma`) before the risk is exceeded. Pass probabilities
    of a calibrator: uncalibrated networks claim far too little risk.

    Parameters
    ----------
    risk : float
        The largest share of errors among accepted images that the probabilities may claim; with `costs`, the largest
        mean cost.
    groups : {"pooled", "predicted"}
        One threshold, or one each for images predicted as old and as new.
    top_k : int
        A prediction is correct if the true class is among the k likeliest.
    costs : array (K, K), optional
        `costs[true, decided]`. The decision is then the one of least expected cost.
    gammas : sequence of float
        Points of the sensitivity curve, as risks.

    Attributes
    ----------
    result_ : ModelBasedResult
        Thresholds, the risk they claim, and how it depends on the bias of the probabilities.
    classes_, new_classes_ : tuple of int
        The label of each column, and of the new ones.

    Examples
    --------
    >>> from tcil import decisions
    >>> probs = [[0.98, 0.02], [0.9, 0.1], [0.6, 0.4]]
    >>> rule = decisions.ModelBasedThreshold(risk=0.1, gammas=(0, 0.05)).fit(probs)
    >>> rule.accept(probs).tolist()
    [True, True, False]
    >>> [(step.gamma, round(step.coverage, 2)) for step in rule.result_.thresholds[0].curve]
    [(0.0, 0.67), (0.05, 0.33)]
    """

    result_type: ClassVar[type[Any]] = ModelBasedResult

    risk: float = 0.05
    groups: ThresholdGroups | str = ThresholdGroups.POOLED
    top_k: int = 1
    costs: Any = None
    gammas: Sequence[float] = DEFAULT_GAMMAS

    def __post_init__(self) -> None:
        super().__post_init__()
        gammas = as_tensor(self.gammas, "gammas").double().flatten().tolist()
        if any(not 0 <= gamma < math.inf for gamma in gammas):
            raise invalid("gammas", f"{self.gammas!r:.60}", "numbers of 0 or more")
        self.gammas = tuple(gammas)

    def fit(
        self, probs: ArrayLike, new_classes: Iterable[Any] | None = None, *, classes: Iterable[Any] | None = None
    ) -> Self:
        """Find the lowest threshold whose accepted images claim the wanted risk.

        Parameters
        ----------
        probs : tensor or array (N, K)
            Calibrated probabilities of images that the rule will meet. No labels are needed.
        new_classes : iterable of int, optional
            The labels of the newest task; needed with groups "predicted".
        classes : iterable of int, optional
            The label of each column. Default: 0 to K - 1.

        Returns
        -------
        Self
            This rule, fitted.
        """
        self._check_options()
        rows = as_probabilities(probs)
        names = class_names(rows.shape[1], classes)
        new = new_columns(names, new_classes)
        if self.top_k >= len(names):
            raise invalid("top_k", f"{self.top_k}", f"fewer than the {len(names)} classes")
        if self.costs is not None:
            checked_costs(self.costs, len(names))
        action = Action(self.top_k, cast(Costs | None, self.costs))
        scores = action.score(rows)
        if self.groups is ThresholdGroups.PREDICTED and new_classes is None:
            raise invalid("new_classes", "None with groups='predicted'", "the labels of the newest task")
        said_new = action.decided_new(rows, new)
        found = tuple(
            self._claimed(group, scores if group == ALL else scores[said_new == (group == NEW)], action.unit)
            for group in self._regions(new)
        )
        assumptions = (
            "the images are such as the rule will meet",
            "on average over accepted images, the claimed risk is too small by at most gamma",
            "network and calibrator stay as they are",
        )
        result = ModelBasedResult(float(self.risk), PromiseKind.MODEL_BASED, found, assumptions)
        return self._fitted(names, new, result)

    def _claimed(self, group: str, scores: Floats, unit: float) -> ClaimedThreshold:
        ordered = -np.sort(-scores)
        running = unit * np.cumsum(1 - ordered) / np.arange(1, len(ordered) + 1)  # risk that the first ones claim
        ends = np.append(ordered[1:] < ordered[:-1], True) if len(ordered) else np.zeros(0, bool)  # of ties
        steps = tuple(self._step(gamma, ordered, running, ends) for gamma in (0.0, *self.gammas))
        first, curve = steps[0], steps[1:]
        claimed = float(running[ordered >= first.threshold][-1]) if first.threshold < math.inf else None
        return ClaimedThreshold(
            group=group,
            threshold=first.threshold,
            coverage=first.coverage,
            claimed_risk=claimed,
            gamma=None if claimed is None else max(float(self.risk) - claimed, 0.0),
            n=len(scores),
            curve=curve,
        )

    def _step(self, gamma: float, ordered: Floats, running: Floats, ends: np.ndarray[Any, Any]) -> GammaStep:
        fine = np.flatnonzero(ends & (running <= self.risk - gamma + 1e-12))
        if not len(fine):
            return GammaStep(gamma, math.inf, 0.0)
        last = int(fine[-1])
        return GammaStep(gamma, float(ordered[last]), (last + 1) / len(ordered))
