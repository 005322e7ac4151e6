"""Attempts to break each promise: exact tails of sums of unequal chances, and redraws of worlds made for the purpose.

`python -m research.decisions attacks` runs all of them and writes docs/results/decisions/attacks.json. An attack that
`held` found no case beyond its limit. Exact attacks enumerate; the others draw thousands of calibration sets in a world
in which every bound is as close to being broken as it can be made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import binom

from research import ROOT
from tcil.decisions import RiskThreshold, cross_conformal_sets
from tcil.decisions.bounds import conformal_begins_at, conformal_rank, stratified_lower, stratified_upper
from tcil.foundation.files import replace_file

OUT = ROOT / "docs/results/decisions"
Floats = npt.NDArray[np.float64]
SIGNIFICANCE = 1e-4  # of a single redraw check


@dataclass(frozen=True)
class Attack:
    """One attempt: how many cases were tried, the worst of them, and the limit that it must not pass."""

    name: str
    tried: int
    worst: float
    limit: float
    held: bool
    note: str = ""
    expected: bool = True  # whether it should hold: two attacks show that a condition is needed


# Exact ---------------------------------------------------------------------------------------------------------


def poisson_binomial(chances: Floats) -> Floats:
    """The distribution of a sum of independent indicators."""
    found = np.ones(1)
    for chance in chances:
        found = np.convolve(found, [1 - chance, chance])
    return found


def _chances(rng: np.random.Generator, n: int) -> Floats:
    """Chances of very different kinds: even, extreme, two clusters, or classes with the same chance."""
    kind = rng.integers(4)
    if kind == 0:
        return rng.uniform(size=n)
    if kind == 1:
        return rng.choice([0.0, 1.0, float(rng.uniform())], n)
    if kind == 2:
        return rng.choice(rng.uniform(size=2), n)
    return np.repeat(rng.uniform(size=n) ** 3, rng.integers(1, n + 1))[:n]


def hoeffding(right_side: bool, tries: int = 4000) -> Attack:
    """P(S <= c) >= P(Bin <= c) where c is at least the mean (Hoeffding 1956, theorem 4); without that, it is false."""
    rng, worst, compared = np.random.default_rng(0), 0.0, 0
    for _ in range(tries):
        n = int(rng.integers(2, 25))
        chances = _chances(rng, n)
        mean = chances.sum()
        below, plain = poisson_binomial(chances).cumsum(), binom.cdf(np.arange(n + 1), n, mean / n)
        c = np.arange(n + 1)
        used = c >= mean - 1e-12 if right_side else c < mean - 1
        compared += int(used.sum())
        excess = plain - below if right_side else below - plain
        worst = max([worst, *excess[used].tolist()])
    name = "Hoeffding's comparison, c >= mean" if right_side else "the reverse comparison, c < mean - 1"
    return Attack(name, compared, worst, 1e-9, worst <= 1e-9, "largest excess of a tail over the binomial one")


def hoeffding_near_the_mean(tries: int = 4000) -> Attack:
    """Between mean - 1 and the mean neither comparison holds: the condition of the theorem is needed."""
    rng, worst, compared = np.random.default_rng(1), 0.0, 0
    for _ in range(tries):
        n = int(rng.integers(2, 25))
        chances = _chances(rng, n)
        mean = chances.sum()
        c = int(np.ceil(mean - 1e-12)) - 1  # the largest number below the mean
        if c >= 0:
            compared += 1
            worst = max(worst, float(binom.cdf(c, n, mean / n) - poisson_binomial(chances)[: c + 1].sum()))
    note = "outside the theorem's condition, P(S <= c) falls short of the binomial by this much"
    return Attack("Hoeffding's comparison just below the mean", compared, worst, 1e-9, worst <= 1e-9, note, False)


def extremes(n: int, steps: int) -> Iterator[tuple[int, int, float]]:
    """Zeros, ones and one common chance: where tails with a given mean are extreme (Hoeffding 1956, corollary 2.1)."""
    for ones in range(n + 1):
        for zeros in range(n + 1 - ones):
            for chance in np.linspace(0, 1, steps) if zeros + ones < n else [0.0]:
                yield ones, n - zeros - ones, float(chance)


def stratified_bounds(n: int, error: float) -> Attack:
    """How often Clopper-Pearson bounds miss the mean of unequal chances, at the extremes."""
    counts, worst, tried = np.arange(n + 1), 0.0, 0
    upper, lower = stratified_upper(counts, n, error), stratified_lower(counts, n, error)
    for ones, free, chance in extremes(n, 21):
        pmf = np.zeros(n + 1)
        pmf[ones : ones + free + 1] = binom.pmf(np.arange(free + 1), free, chance)
        mean = (ones + free * chance) / n
        worst = max(worst, pmf[upper < mean - 1e-12].sum(), pmf[lower > mean + 1e-12].sum())
        tried += 2
    return Attack(f"stratified Clopper-Pearson, n = {n}, error {error:g}", tried, worst, error, worst <= error + 1e-9)


def least_coverage(n: int, rank: int, steps: int = 400) -> float:
    """A lower bound on E F(q) over all distributions of n independent scores with mean distribution F.

    For each level u, the least P(fewer than `rank` scores below the u-quantile) over all chances with mean u, which is
    taken at zeros, ones and one common chance. It falls with u, so that a sum over right ends is below the integral.
    """
    u = np.arange(1, steps + 1) / steps
    least = np.ones(steps)
    for ones in range(n + 1):
        for zeros in range(n - ones):
            chance = (n * u - ones) / (n - zeros - ones)
            fits = (chance >= 0) & (chance <= 1)
            least[fits] = np.minimum(least[fits], binom.cdf(rank - 1 - ones, n - zeros - ones, chance[fits]))
    least[-1] = 0.0
    return float(least.sum() / steps)


def stratified_rank(n_classes: int, each: int, alpha: float, *, naive: bool = False) -> Attack:
    """The rank for stratified scores against the worst of all score distributions; or the usual rank instead."""
    n = n_classes * each
    rank = conformal_rank(n, alpha) if naive else conformal_rank(n, alpha, n_classes)
    said = f"{'usual' if naive else 'stratified'} rank, {n_classes} classes of {each}, alpha {alpha:g}"
    if rank > n:
        return Attack(said, 0, 1.0, 1 - alpha, True, "no threshold: all classes in every set")
    apart = _coverage_apart(n_classes, each, rank)
    if naive or rank == int(np.ceil((n + n_classes) * (1 - alpha) - 1e-9)):
        # theorem 1: exact by exchangeability, so that only the separated classes are tried
        note = f"rank {rank}; classes that lie apart"
        return Attack(said, 1, apart, 1 - alpha, apart >= 1 - alpha - 1e-12, note, not naive)
    worst = min(apart, least_coverage(n, rank))
    return Attack(said, 400, worst, 1 - alpha, worst >= 1 - alpha - 1e-12, f"rank {rank}; every distribution of scores")


def _coverage_apart(n_classes: int, each: int, rank: int) -> float:
    """Exact coverage where the scores of each class lie above all those of the class before."""
    whole, rest = divmod(rank - 1, each)
    return (whole + (rest + 1) / (each + 1)) / n_classes


def edges() -> Attack:
    """alpha = 1 / (n + 1): n images have a threshold, n - 1 have none, for every n up to 20,000."""
    wrong = 0
    for n in range(1, 20_001):
        alpha = 1 / (n + 1)
        wrong += conformal_rank(n, alpha) != n or conformal_rank(n - 1, alpha) != n
        wrong += n <= 2000 and conformal_begins_at(alpha) != n
    return Attack("alpha at the edge 1 / (n + 1)", 42_000, wrong, 0, wrong == 0, "wrong ranks")


# Redraws -------------------------------------------------------------------------------------------------------


def sets_redrawn(n_classes: int, each: int, alpha: float, kind: str, redraws: int = 20_000) -> Attack:
    """Mean coverage of stratified scores over redraws; the truth is known, ties included."""
    rng, n = np.random.default_rng(2), n_classes * each
    rank = conformal_rank(n, alpha, n_classes)
    scores = rng.uniform(size=(redraws, n))
    own = np.repeat(np.arange(n_classes), each)
    if kind == "apart":
        scores = (scores + own) / n_classes
    elif kind == "one hard class":
        scores = np.where(own == 0, 1 + scores, scores)
    elif kind == "tied":
        scores = np.round((scores + own % 2) * 2) / 2
    limit = np.sort(scores, axis=1)[:, min(rank, n) - 1]
    if rank > n:
        limit = np.full(redraws, np.inf)
    test_class = rng.integers(n_classes, size=redraws)
    fresh = rng.uniform(size=redraws)
    if kind == "apart":
        fresh = (fresh + test_class) / n_classes
    elif kind == "one hard class":
        fresh = np.where(test_class == 0, 1 + fresh, fresh)
    elif kind == "tied":
        fresh = np.round((fresh + test_class % 2) * 2) / 2
    covered = int((fresh <= limit).sum())
    allowed = 1 - (binom.isf(SIGNIFICANCE, redraws, alpha)) / redraws
    name = f"sets, {n_classes} classes of {each}, alpha {alpha:g}, scores {kind}"
    return Attack(name, redraws, covered / redraws, 1 - alpha, covered / redraws >= allowed, f"rank {rank} of {n}")


@dataclass(frozen=True)
class Bins:
    """A world of images in bins of confidence: for each true group, how many are in each bin and how often wrong.

    Two columns: 0 is the old class, 1 the new one. Cumulative risks are set to just above the promise.
    """

    confidence: Floats
    mass: Floats  # (2, bins), by true group
    wrong: Floats  # (2, bins)

    def draw(self, rng: np.random.Generator, counts: tuple[int, int]) -> tuple[Floats, npt.NDArray[np.int64]]:
        """Probabilities and labels of so many images of either group."""
        probs, labels = [], []
        for group, n in enumerate(counts):
            bins = rng.choice(len(self.confidence), n, p=self.mass[group])
            said = np.where(rng.uniform(size=n) < self.wrong[group][bins], 1 - group, group)
            row = np.tile(1 - self.confidence[bins][:, None], (1, 2))
            row[np.arange(n), said] = self.confidence[bins]
            probs.append(row)
            labels.append(np.full(n, group))
        return np.concatenate(probs), np.concatenate(labels)

    def risk(self, limits: tuple[float, float], mixture: tuple[float, float], region: int | None) -> float | None:
        """The true risk of what is accepted, of all images or of those predicted into a group."""
        lost = kept = 0.0
        for group in (0, 1):
            for said in (0, 1):
                if region is not None and said != region:
                    continue
                accepted = self.confidence >= limits[said] - 1e-12
                share = self.wrong[group] if said != group else 1 - self.wrong[group]
                rate = mixture[group] * float((self.mass[group] * share)[accepted].sum())
                lost, kept = (lost + rate, kept) if said != group else (lost, kept + rate)
        return lost / (lost + kept) if lost + kept > 0 else None


GRID = tuple(np.round(np.linspace(0.95, 0.55, 9), 2).tolist())


def thresholds_redrawn(
    name: str, options: dict[str, Any], bins: Bins, counts: Callable[[np.random.Generator], tuple[int, int]],
    mixtures: list[tuple[float, float]], redraws: int = 3000,
) -> Attack:  # fmt: skip
    """How often a threshold is given whose true risk is above the promise."""
    rng, failures = np.random.default_rng(3), 0
    for _ in range(redraws):
        rule = RiskThreshold(candidates=GRID, **options).fit(*bins.draw(rng, counts(rng)), [1])
        limits = {found.group: found.threshold for found in rule.result_.thresholds}
        pair = (limits.get("old", limits.get("all", np.inf)), limits.get("new", limits.get("all", np.inf)))
        regions: list[int | None] = [None] if rule.groups == "pooled" else [0, 1]
        risks = [bins.risk(pair, mixture, region) for mixture in mixtures for region in regions]
        failures += any(risk is not None and risk > rule.risk for risk in risks)
    most = int(binom.isf(SIGNIFICANCE, redraws, 0.1))
    return Attack(name, redraws, failures / redraws, 0.1, failures <= most, f"{failures} failures, {most} allowed")


def _thresholds() -> Iterator[Attack]:
    flat = np.full(9, 1 / 9)
    confidence = np.array(GRID)
    bad = np.full(9, 0.2001)
    both = Bins(confidence, np.stack([flat, flat]), np.stack([bad, bad]))
    good_new = Bins(confidence, np.stack([flat, flat]), np.stack([bad, np.zeros(9)]))
    alone = Bins(confidence, np.stack([flat, flat]), np.stack([np.full(9, 0.5001), np.full(9, 0.5001)]))
    rising = np.linspace(0.12, 0.33, 9)
    crossing = Bins(confidence, np.stack([flat, flat]), np.stack([rising, rising]))

    def fixed(old: int, new: int) -> Callable[[np.random.Generator], tuple[int, int]]:
        return lambda rng: (old, new)

    def sampled(n: int, share: float) -> Callable[[np.random.Generator], tuple[int, int]]:
        def counts(rng: np.random.Generator) -> tuple[int, int]:
            new = int(rng.binomial(n, share))
            return n - new, new

        return counts

    ends = [(1.0, 0.0), (0.0, 1.0)]
    for search in ("holm", "sequence"):
        plain = {"risk": 0.2, "search": search}
        yield thresholds_redrawn(f"every candidate just too bold, {search}", {**plain, "mixture": "as_sampled"}, both,
                                 sampled(120, 0.3), [(0.7, 0.3)])  # fmt: skip
        yield thresholds_redrawn(f"risk that crosses the promise among candidates, {search}",
                                 {**plain, "mixture": "as_sampled"}, crossing,
                                 sampled(150, 0.3), [(0.7, 0.3)])  # fmt: skip
        yield thresholds_redrawn(f"any mixture, old just too bold and new without errors, {search}", plain, good_new,
                                 fixed(90, 60), ends)  # fmt: skip
        known = {"old": 0.999, "new": 0.001}
        yield thresholds_redrawn(f"known mixture of almost only old images, {search}", {**plain, "mixture": known},
                                 good_new, fixed(120, 30), [(0.999, 0.001)])  # fmt: skip
    yield thresholds_redrawn("eight images of a group", {"risk": 0.5}, alone, fixed(8, 8), ends)
    yield thresholds_redrawn("predicted groups, 60 % old", {"risk": 0.2, "groups": "predicted",
                             "mixture": {"old": 0.6, "new": 0.4}}, both, fixed(150, 150), [(0.6, 0.4)])  # fmt: skip
    costs = {"risk": 0.4, "costs": [[0.0, 2.0], [2.0, 0.0]], "mixture": "as_sampled"}
    yield thresholds_redrawn("costs of two, just too dear", costs, _Doubled(both), sampled(120, 0.3), [(0.7, 0.3)])


class _Doubled(Bins):
    """The same world where an error costs 2."""

    def __init__(self, bins: Bins) -> None:
        super().__init__(bins.confidence, bins.mass, bins.wrong)

    def risk(self, limits: tuple[float, float], mixture: tuple[float, float], region: int | None) -> float | None:
        found = super().risk(limits, mixture, region)
        return None if found is None else 2 * found


def cross_fitted(name: str, n_classes: int, each: int, n_folds: int, alpha: float, redraws: int = 3000) -> Attack:
    """Cross-fitting where every fold has the same calibrator.

    `n_classes` old classes, their scores apart from each other; folds have the same number of each.
    """
    rng, hits, n = np.random.default_rng(4), 0, n_classes * each
    labels, folds = np.repeat(np.arange(n_classes), each), np.tile(np.arange(each) % n_folds, n_classes)
    design = "stratified" if n_classes > 1 else "independent"

    def rows(columns: npt.NDArray[np.int64], noise: Floats) -> Floats:
        own = 1 - (columns + noise) / n_classes * 0.9  # probability of the true class, by class
        probs = np.tile(((1 - own) / n_classes)[:, None], (1, n_classes + 1))
        probs[np.arange(len(columns)), columns] = own
        return probs

    promised = 0.0
    for _ in range(redraws):
        test = rng.integers(n_classes, size=1)
        fresh = rows(test, rng.uniform(size=1))
        result = cross_conformal_sets(rows(labels, rng.uniform(size=n)), labels, folds, [fresh] * n_folds,
                                      new_classes=[n_classes], alpha=alpha, design=design)  # fmt: skip
        promised = float(result.coverage_old or 0.0)
        hits += bool(result.sets[0, test[0]])
    least = 1 - binom.isf(SIGNIFICANCE, redraws, 1 - promised) / redraws
    return Attack(name, redraws, hits / redraws, promised, hits / redraws >= least, "mean coverage against the promise")


def run() -> None:
    """Every attack, one line each; then the file."""
    found: list[Attack] = []

    def note(attack: Attack) -> None:
        found.append(attack)
        said = "held" if attack.held else ("BROKEN" if attack.expected else "broken, as it should be")
        print(said, attack.name, f"{attack.worst:.5g} (limit {attack.limit:g})", flush=True)

    note(hoeffding(True))
    note(hoeffding(False))
    note(hoeffding_near_the_mean())
    for n in (2, 5, 12, 30):
        for error in (0.01, 0.1, 0.25):
            note(stratified_bounds(n, error))
    shapes = ((2, 1), (2, 5), (3, 4), (4, 5), (8, 5), (16, 2), (10, 8))
    for alpha in (0.05, 0.1, 0.2, 0.5):
        for n_classes, each in shapes:
            note(stratified_rank(n_classes, each, alpha))
    note(stratified_rank(2, 1, 2 / 3, naive=True))
    note(edges())
    for kind in ("apart", "alike", "one hard class", "tied"):
        for n_classes, each, alpha in ((2, 1, 0.5), (4, 5, 0.1), (8, 5, 0.2), (16, 2, 0.1)):
            note(sets_redrawn(n_classes, each, alpha, kind))
    for attack in _thresholds():
        note(attack)
    note(cross_fitted("cross-fitting, one class, 2 folds of 10", 1, 20, 2, 0.1))
    note(cross_fitted("cross-fitting, one class, 10 folds of 2", 1, 20, 10, 0.2))
    note(cross_fitted("cross-fitting, 4 classes apart, 2 folds", 4, 40, 2, 0.1))
    record = {
        "command": "python -m research.decisions attacks",
        "what": "tried: cases or redraws; worst: the largest failure rate or excess, or the least coverage; limit: what"
        " is promised. Redraw checks allow for their own noise at a significance of 1e-4.",
        "attacks": [asdict(attack) for attack in found],
    }
    replace_file(OUT / "attacks.json", (json.dumps(record, indent=1, default=float) + "\n").encode())
    wanted, needed = [a for a in found if a.expected], [a for a in found if not a.expected]
    print(f"{sum(a.held for a in wanted)} of {len(wanted)} promises held, {sum(a.tried for a in found):,} cases")
    print(f"{sum(not a.held for a in needed)} of {len(needed)} conditions are needed: without them the promise breaks")
