"""The statistics of thresholds: an upper bound on the risk of what a candidate accepts, by groups and mixtures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from tcil.decisions.bounds import (
    binomial_lower,
    binomial_upper,
    mean_lower,
    mean_upper,
    smallest,
    stratified_lower,
    stratified_upper,
)
from tcil.decisions.promises import ALL, NEW, OLD, Design
from tcil.foundation.arrays import Floats, Ints
from tcil.foundation.errors import invalid

AS_SAMPLED = "as_sampled"
Mixture = Mapping[str, float] | Sequence[Mapping[str, float]] | str | None
Ends = tuple[tuple[float, float], ...]  # shares of old and new images at the ends of what is allowed
_MOST = 1 << 40  # images: beyond this no promise is looked for


@dataclass(frozen=True)
class Rates:
    """What the images of one true group say at each candidate: sums of losses and of successes among the accepted."""

    n: float
    lost: Floats
    kept: Floats

    @property
    def accepted(self) -> Floats:
        """How many are accepted."""
        return self.lost + self.kept

    def expected(self, n: float) -> Rates:
        """What `n` images are expected to give if these are typical, with half an error added.

        Without it, a candidate that accepts three images and no error would count as perfect.
        """
        by = n / (self.n + 0.5)
        return Rates(n, (self.lost + 0.5) * by, self.kept * by)

    def __add__(self, other: Rates) -> Rates:
        """Both groups as one sample."""
        return Rates(self.n + other.n, self.lost + other.lost, self.kept + other.kept)

    def at(self, places: Ints) -> Rates:
        """Some of the candidates."""
        return Rates(self.n, self.lost[places], self.kept[places])


ByGroup = Mapping[str, Rates]  # "old" and "new"


@dataclass(frozen=True)
class RiskTest:
    """Bounds the risk of what is accepted, for one way of drawing images and one range of mixtures.

    `ends` are those of the mixtures, None for one sample of all that is met. `zero_one`: losses are 0 or 1.
    `no_crossing`: an image of the other group is never a success, as with plain errors of one prediction.
    """

    risk: float
    ends: Ends | None
    design: Design
    zero_one: bool
    no_crossing: bool

    def bound(self, rates: ByGroup, region: str, error: float) -> Floats:
        """The upper bound on the risk at each candidate; for a range of mixtures, at its worse end.

        The risk of a mixture is a ratio of two linear functions of its shares, so that it is largest at an end. The
        promise is refused if one end refuses it, so that each end may use the whole error.
        """
        if self.ends is None:
            return self._own(rates[OLD] + rates[NEW], error)
        bounds = [self._at(end, rates, region, error) for end in self.ends]
        return np.asarray(np.max(bounds, axis=0))

    def _own(self, own: Rates, error: float) -> Floats:
        """The risk within one group."""
        upper, lower = _bounds_of(self.design, self.zero_one)
        if self.design is Design.INDEPENDENT:  # given how many are accepted, their losses are independent draws
            return upper(own.lost, own.accepted, error)
        return _share(upper(own.lost, own.n, error / 2), lower(own.kept, own.n, error / 2))

    def _at(self, end: tuple[float, float], rates: ByGroup, region: str, error: float) -> Floats:
        """The risk in one mixture: it rises with every rate of loss, and falls with every rate of success."""
        if 0.0 in end:
            return self._own(rates[OLD if end[1] == 0.0 else NEW], error)
        upper, lower = _bounds_of(self.design, self.zero_one)
        kept_of = [group for group in (OLD, NEW) if region in (ALL, group) or not self.no_crossing]
        each = error / (2 + len(kept_of))
        lost, kept = np.zeros(1), np.zeros(1)
        for share, group in zip(end, (OLD, NEW), strict=True):
            own = rates[group]
            lost = lost + share * upper(own.lost, own.n, each)
            if group in kept_of:
                kept = kept + share * lower(own.kept, own.n, each)
        return _share(lost, kept)

    def met(self, group: str) -> bool:
        """Whether images of this group will be met."""
        return self.ends is None or any(end[group == NEW] for end in self.ends)

    def estimate(self, rates: ByGroup) -> float:
        """The risk as estimated, at the worse end."""
        return max(float(_share(lost, kept)[0]) for lost, kept in self._mixed(rates))

    def coverage(self, chosen: ByGroup, whole: ByGroup) -> float:
        """The share that is accepted, at the end where it is least."""
        parts = zip(self._mixed(chosen), self._mixed(whole), strict=True)
        return min(float((sum(some) / np.maximum(sum(every), 1e-300))[0]) for some, every in parts)

    def _mixed(self, rates: ByGroup) -> list[tuple[Floats, Floats]]:
        """Rates of loss and success in the mixture at each end."""
        weights = self.ends
        if weights is None:
            n = max(sum(r.n for r in rates.values()), 1)
            weights = ((rates[OLD].n / n, rates[NEW].n / n),)
        found = []
        for pair in weights:
            parts = [(w / r.n * r.lost, w / r.n * r.kept) for w, r in zip(pair, rates.values(), strict=True) if r.n]
            found.append((np.asarray(sum(p[0] for p in parts)), np.asarray(sum(p[1] for p in parts))))
        return found

    def likely_begins_at(self, rates: ByGroup, region: str, error: float) -> int | None:
        """An estimate: images of each group that would do if more are lost as often as these; None if none would.

        It is the smallest number at which the best candidate passes with the counts that `Rates.expected` gives.
        """
        groups: dict[str, Rates] = {group: rate for group, rate in rates.items() if self.met(group)}
        if self.ends is None:
            groups = {OLD: rates[OLD] + rates[NEW]}
        none = Rates(0, np.zeros_like(rates[OLD].lost), np.zeros_like(rates[OLD].lost))

        one = {group: groups[group].expected(1) if group in groups else none for group in (OLD, NEW)}
        in_the_end = np.max([_share(lost, kept) for lost, kept in self._mixed(one)], axis=0)  # what bounds tend to
        hopeful = np.flatnonzero(in_the_end < self.risk)
        if not len(hopeful):
            return None
        one = {group: rate.at(hopeful) for group, rate in one.items()}

        def enough(n: int) -> bool:
            more = {group: Rates(n * rate.n, n * rate.lost, n * rate.kept) for group, rate in one.items()}
            return bool((self.bound(more, region, error) <= self.risk).any())

        found = smallest(enough, _MOST, begins_at(self, region, error))
        return None if found == _MOST else found


@lru_cache(maxsize=4096)
def begins_at(test: RiskTest, region: str, error: float) -> int:
    """The smallest number of images of each group, all accepted and correct, with which a promise exists."""

    def enough(n: int) -> bool:
        none, all_of_them = np.zeros(1), np.full(1, float(n))
        inside = [group for group in (OLD, NEW) if region in (ALL, group) or not test.no_crossing]
        best = {group: Rates(n, none, all_of_them if group in inside else none) for group in (OLD, NEW)}
        if test.ends is None:
            best = {OLD: Rates(n, none, all_of_them), NEW: Rates(0, none, none)}
        return bool(test.bound(best, region, error)[0] <= test.risk)

    return smallest(enough)


def _bounds_of(design: Design, zero_one: bool) -> tuple[Callable[..., Floats], Callable[..., Floats]]:
    same = design is Design.INDEPENDENT
    if not zero_one:
        return partial(mean_upper, identical=same), partial(mean_lower, identical=same)
    return (binomial_upper, binomial_lower) if same else (stratified_upper, stratified_lower)


def _share(lost: Floats, kept: Floats) -> Floats:
    """The share of losses; 1 where nothing is certain to be kept."""
    return np.asarray(np.where(kept > 0, lost / np.where(kept > 0, lost + kept, 1.0), 1.0))


def mixture_ends(mixture: Mixture) -> tuple[Ends | None, str]:
    """The ends of the allowed mixtures as shares of old and new, None for "as_sampled"; and the same in words.

    >>> mixture_ends({"old": 0.9, "new": 0.1})
    (((0.9, 0.1),), '90 % old and 10 % new images')
    """
    if mixture is None:
        return ((1.0, 0.0), (0.0, 1.0)), "any mixture of old and new images"
    if isinstance(mixture, str):
        if mixture != AS_SAMPLED:
            raise invalid("mixture", repr(mixture), f"{AS_SAMPLED!r}, shares of old and new images, or None for any")
        return None, "the calibration images are one independent draw of what the rule will meet"
    if isinstance(mixture, Mapping):
        ends: Ends = (_shares(mixture),)
    elif isinstance(mixture, Sequence) and len(mixture) == 2 and all(isinstance(end, Mapping) for end in mixture):
        ends = tuple(_shares(end) for end in mixture if isinstance(end, Mapping))
    else:
        raise invalid("mixture", f"{mixture!r:.60}", "shares such as {'old': 0.9, 'new': 0.1}, or a pair of such")
    words = " to ".join(f"{100 * old:g} % old and {100 * new:g} % new images" for old, new in ends)
    return ends, words


def _shares(given: Mapping[str, float]) -> tuple[float, float]:
    known = {OLD, NEW}
    if set(given) != known:
        raise invalid("mixture", f"the groups {sorted(map(str, given))}", "the groups 'old' and 'new'")
    old, new = given[OLD], given[NEW]
    for share in (old, new):
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise invalid("mixture", f"the share {share!r}", "shares from 0 to 1")
    if abs(old + new - 1) > 1e-9:
        raise invalid("mixture", f"shares that sum to {old + new:g}", "shares that sum to 1")
    return float(old), float(new)
