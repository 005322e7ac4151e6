"""Rules that accept a prediction where its score is high enough, and ask a person otherwise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import nn

from tcil.decisions.costs import AcceptHead, Action, Costs, checked_costs
from tcil.decisions.promises import ALL, NEW, OLD, ThresholdGroups
from tcil.decisions.rules import Bools, DecisionRule, answer, check_open_share
from tcil.foundation.arrays import ArrayLike, whole_number
from tcil.foundation.errors import invalid


class _OfGroup(Protocol):
    @property
    def group(self) -> str: ...
    @property
    def threshold(self) -> float: ...


class _Thresholds(Protocol):
    @property
    def thresholds(self) -> Sequence[_OfGroup]: ...


Result = TypeVar("Result", bound=_Thresholds)


class AcceptRule(DecisionRule[Result]):
    """A rule with one threshold, or one for each predicted group; subclasses say how `fit` finds it."""

    risk: float
    groups: ThresholdGroups | str
    top_k: int
    costs: Any

    def __post_init__(self) -> None:
        super().__post_init__()
        self.groups = ThresholdGroups.parse(self.groups, "groups")
        self.top_k = whole_number(self.top_k, "top_k", 1)
        if self.costs is None:
            self.risk = check_open_share(self.risk, "risk")
        else:
            self.costs = checked_costs(self.costs)
            most = max(map(max, self.costs))
            if self.top_k > 1:
                raise invalid("top_k", f"{self.top_k} with costs", "1: a cost is that of one decision")
            if isinstance(self.risk, bool) or not isinstance(self.risk, int | float) or not 0 < self.risk < most:
                raise invalid("risk", repr(self.risk), f"a mean cost above 0 and below {most:g}, the largest")

    def _regions(self, new: Bools) -> tuple[str, ...]:
        """What has a threshold of its own: all images, or each predicted group; a first task has no old ones."""
        if self.groups is ThresholdGroups.POOLED:
            return (ALL,)
        return (NEW,) if new.all() else (OLD, NEW)

    def accept(self, probs: ArrayLike) -> Any:
        """Which predictions are accepted; for the others, ask a person.

        Parameters
        ----------
        probs : tensor or array (N, K)
            Probabilities from the same network and calibrator as in `fit`.

        Returns
        -------
        tensor or array of bool (N,)
            True where the prediction is accepted.
        """
        _, accepted = self._head()(torch.from_numpy(self._rows(probs)))
        return answer(accepted, probs)

    def predict(self, probs: ArrayLike) -> Any:
        """What is decided for each image, accepted or not.

        Parameters
        ----------
        probs : tensor or array (N, K)
            Probabilities from the same network and calibrator as in `fit`.

        Returns
        -------
        tensor or array of int (N,) or (N, top_k)
            Labels; with `top_k` above 1, the likeliest first.
        """
        decided, _ = self._head()(torch.from_numpy(self._rows(probs)))
        return answer(decided, probs)

    def _head(self) -> nn.Module:
        by_group = {found.group: found.threshold for found in self.result_.thresholds}
        pair = (by_group.get(OLD, by_group.get(ALL, math.inf)), by_group.get(NEW, by_group.get(ALL, math.inf)))
        action = Action(self.top_k, cast(Costs | None, self.costs))
        return AcceptHead(action, self.classes_, self._fit_state[1], pair)

    def _check_restored(self) -> None:
        groups = [found.group for found in self.result_.thresholds]
        if groups not in ([ALL], [NEW], [OLD, NEW]) or any(
            math.isnan(found.threshold) for found in self.result_.thresholds
        ):
            raise ValueError(f"thresholds of the groups {groups}")
