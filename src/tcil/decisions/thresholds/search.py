"""The lowest of several candidate thresholds that passes the test of a risk, for one predicted group."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from tcil.decisions.costs import ROUNDING, Action
from tcil.decisions.promises import ALL, NEW, OLD, DecisionVerdict, Search
from tcil.decisions.risk_tests import Rates, RiskTest, begins_at
from tcil.decisions.rules import Bools, LabelledImages
from tcil.decisions.thresholds.result import GroupThreshold
from tcil.foundation.arrays import Floats


class ThresholdSearch:
    """The calibration images at hand, and the thresholds that they allow."""

    def __init__(self, test: RiskTest, search: Search, action: Action, images: LabelledImages, error: float) -> None:
        self.test, self.search, self.error = test, search, error
        self.unit = action.unit
        self.score = action.score(images.probs)
        self.loss = action.loss(images.probs, images.columns)
        self.is_new = images.is_new
        self.said_new = action.decided_new(images.probs, images.new)

    def threshold(self, region: str, tried: Floats) -> GroupThreshold:
        """The best candidate for images that are predicted into this group."""
        test, inside = self.test, np.ones(len(self.score), bool)
        if region != ALL:
            inside = self.said_new == (region == NEW)
        rates, whole = self._rates(inside, tried), self._rates(inside, np.array([-np.inf]))
        level = self.error if self.search is Search.SEQUENCE else self.error / len(tried)
        passed, last_level = self._passed(rates, region, level)
        first = begins_at(test, region, level)
        if not passed.any():
            met = [rate.n for group, rate in rates.items() if test.met(group) and rate.n]
            few = (sum(met) if test.ends is None else min(met)) < first  # one sample of all, or one of each group
            return GroupThreshold(
                group=region,
                threshold=math.inf,
                verdict=DecisionVerdict.TOO_FEW_IMAGES if few else DecisionVerdict.NONE_FOUND,
                coverage=0.0,
                coverage_old=0.0 if rates[OLD].n else None,
                coverage_new=0.0 if rates[NEW].n else None,
                accepted=0,
                errors=0.0,
                risk_estimate=None,
                risk_bound=self.unit,
                begins_at=first,
                likely_begins_at=test.likely_begins_at(rates, region, level),
            )
        best = int(np.where(passed, tried, np.inf).argmin())
        chosen = {group: rate.at(np.array([best])) for group, rate in rates.items()}
        shares = {
            group: float(rate.accepted[0] / max(whole[group].accepted[0], 1e-300)) if rate.n else None
            for group, rate in chosen.items()
        }
        return GroupThreshold(
            group=region,
            threshold=float(tried[best]),
            verdict=DecisionVerdict.OK,
            coverage=test.coverage(chosen, whole),
            coverage_old=shares[OLD],
            coverage_new=shares[NEW],
            accepted=round(sum(float(rate.accepted[0]) for rate in chosen.values())),
            errors=self.unit * sum(float(rate.lost[0]) for rate in chosen.values()),
            risk_estimate=self.unit * test.estimate(chosen),
            risk_bound=self.unit * float(test.bound(chosen, region, last_level)[0]),
            begins_at=first,
            likely_begins_at=None,
        )

    def _rates(self, inside: Bools, tried: Floats) -> dict[str, Rates]:
        found = {}
        for group, own in ((OLD, ~self.is_new), (NEW, self.is_new)):
            rows = own & inside
            accepted = self.score[rows][None, :] >= tried[:, None] - ROUNDING
            loss = self.loss[rows]
            found[group] = Rates(int(own.sum()), accepted @ loss, accepted @ (1 - loss))
        return found

    def _passed(self, rates: Mapping[str, Rates], region: str, level: float) -> tuple[Bools, float]:
        """Which candidates pass, and the share of the error that the last of them was tested at."""
        passed: Bools = self.test.bound(rates, region, level) <= self.test.risk
        if self.search is Search.SEQUENCE:
            return np.logical_and.accumulate(passed), level
        while passed.any() and not passed.all():  # Holm: what has passed leaves its share of the error to the rest
            next_level = self.error / (~passed).sum()
            fresh = (self.test.bound(rates, region, next_level) <= self.test.risk) & ~passed
            if not fresh.any():
                break
            passed, level = passed | fresh, next_level
        return passed, level
