"""Do promises hold? Calibration images are drawn again and again from a world in which the truth is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import binom

from research.decisions.worlds import World
from tcil.decisions import ConformalSets, RiskThreshold, SetScore
from tcil.decisions.costs import ROUNDING
from tcil.decisions.risk_tests import mixture_ends
from tcil.decisions.sets import scores_of

Rows = npt.NDArray[np.int64]
UNSEEN, MEMORY = "unseen", "memory"
SIGNIFICANCE = 1e-4  # of a single check: a rule that keeps its promise fails one so often


@dataclass(frozen=True)
class Draw:
    """How calibration images are drawn: so many of old and of new classes, or so many of every class."""

    n_old: int = 0
    n_new: int = 0
    per_class: int = 0  # stratified, in place of the two
    n: int = 0  # one draw of a mixture, in place of the others
    share_new: float = 0.0  # of that mixture
    source: str = UNSEEN  # "memory" is the deliberately broken version: images that the network was trained on

    def rows(self, columns: Rows, new: npt.NDArray[np.bool_], rng: np.random.Generator) -> Rows:
        """Rows of one draw, with replacement."""
        if self.per_class:
            by_class = [np.flatnonzero(columns == column) for column in range(len(new))]
            return np.concatenate([rng.choice(rows, self.per_class) for rows in by_class])
        is_new = new[columns]
        if self.n:
            n_new = int(rng.binomial(self.n, self.share_new))
            counts = (self.n - n_new, n_new)
        else:
            counts = (self.n_old, self.n_new)
        groups = ((np.flatnonzero(~is_new), counts[0]), (np.flatnonzero(is_new), counts[1]))
        return np.concatenate([rng.choice(rows, n) for rows, n in groups if n])


@dataclass(frozen=True)
class RiskStudy:
    """How often a threshold broke its promise, over many draws."""

    world: str
    calibrator: str
    draw: Mapping[str, Any]
    options: Mapping[str, Any]
    redraws: int
    exists: float  # share of draws with a threshold
    failures: int  # draws whose true risk is above the promised one
    allowed: int  # more of them would be a breach, at the significance above
    mean_risk: float | None  # true risk, worst of mixtures and groups, where a threshold exists
    mean_coverage_old: float
    mean_coverage_new: float

    @property
    def kept(self) -> bool:
        """Whether the promise was broken no more often than it says."""
        return self.failures <= self.allowed


@dataclass(frozen=True)
class CoverageStudy:
    """Coverage of prediction sets by true group, averaged over many draws."""

    world: str
    calibrator: str
    draw: Mapping[str, Any]
    options: Mapping[str, Any]
    redraws: int
    promised: float
    coverage: Mapping[str, float] = field(default_factory=dict)
    error: Mapping[str, float] = field(default_factory=dict)  # standard error of the mean
    most: Mapping[str, float | None] = field(default_factory=dict)
    size: Mapping[str, float] = field(default_factory=dict)

    @property
    def kept(self) -> bool:
        """Whether the mean lies within its bounds, but for four standard errors."""
        return all(
            value >= self.promised - 4 * self.error[group]
            and (self.most[group] is None or value <= self.most[group] + 4 * self.error[group])  # type: ignore[operator]
            for group, value in self.coverage.items()
            if group in self.most
        )


def risk_study(
    world: World, calibrator: str, draw: Draw, redraws: int, *, seed: int = 0, reference: int = 0, **options: Any
) -> RiskStudy:
    """Fit a `RiskThreshold` on every draw and compare its promise with the truth."""
    probs, columns, is_new = world.probs[calibrator], world.columns, world.new[world.columns]
    said_new, score = world.new[probs.argmax(1)], probs.max(1)
    wrong = probs.argmax(1) != columns
    rng = np.random.default_rng(seed)
    others = probs[rng.choice(len(probs), reference)] if reference else None
    own_probs, own_columns = _source(world, calibrator, draw)
    failures, risks, covered = 0, [], {False: 0.0, True: 0.0}
    truth: dict[tuple[float, float], tuple[float | None, dict[bool, float]]] = {}  # by thresholds: few are ever found
    for _ in range(redraws):
        rows = draw.rows(own_columns, world.new, rng)
        rule = RiskThreshold(**options)
        rule.fit(own_probs[rows], own_columns[rows], world.new_classes, reference=others)
        found = {threshold.group: threshold.threshold for threshold in rule.result_.thresholds}
        limits = (found.get("old", found.get("all", np.inf)), found.get("new", found.get("all", np.inf)))
        if limits not in truth:
            accepted = score >= np.array(limits)[said_new.astype(int)]
            shares = {group: float(accepted[is_new == group].mean()) for group in (False, True)}
            risk = _true_risk(accepted, wrong, is_new, said_new, rule, draw) if accepted.any() else None
            truth[limits] = risk, shares
        risk, shares = truth[limits]
        if risk is None:
            continue
        risks.append(risk)
        failures += risk > rule.risk + 1e-12
        for group in (False, True):
            covered[group] += shares[group]
    return RiskStudy(
        world=world.name,
        calibrator=calibrator,
        draw=asdict(draw),
        options={"confidence": 0.9, **options},
        redraws=redraws,
        exists=round(len(risks) / redraws, 4),
        failures=failures,
        allowed=int(binom.isf(SIGNIFICANCE, redraws, 1 - RiskThreshold(**options).confidence)),
        mean_risk=round(float(np.mean(risks)), 5) if risks else None,
        mean_coverage_old=round(covered[False] / redraws, 4),
        mean_coverage_new=round(covered[True] / redraws, 4),
    )


def _source(world: World, calibrator: str, draw: Draw) -> tuple[Any, Rows]:
    if draw.source == MEMORY:
        return world.memory_probs[calibrator], world.memory_columns
    return world.probs[calibrator], world.columns


def _true_risk(accepted: Any, wrong: Any, is_new: Any, said_new: Any, rule: RiskThreshold, draw: Draw) -> float:
    """The risk in the whole world: at the worst of the mixtures that the rule allows, and of its groups."""
    ends, _ = mixture_ends(rule.mixture)
    if ends is None:
        ends = ((1 - draw.share_new, draw.share_new),)
    regions = [np.ones(len(wrong), bool)] if rule.groups == "pooled" else [~said_new, said_new]
    worst = 0.0
    for region in regions:
        inside = accepted & region
        for end in ends:
            lost = sum(end[group] * (inside & wrong)[is_new == group].mean() for group in (False, True))
            taken = sum(end[group] * inside[is_new == group].mean() for group in (False, True))
            worst = max(worst, float(lost / taken) if taken > 0 else 0.0)
    return worst


_GROUPS = (("old", False), ("new", True))


def coverage_study(
    world: World, calibrator: str, draw: Draw, redraws: int, *, seed: int = 0, **options: Any
) -> CoverageStudy:
    """Fit `ConformalSets` on every draw; coverage and sizes are those of the whole world."""
    probs, columns, is_new = world.probs[calibrator], world.columns, world.new[world.columns]
    own_probs, own_columns = _source(world, calibrator, draw)
    rng = np.random.default_rng(seed)
    hits: dict[str, list[float]] = {"old": [], "new": []}
    sizes: dict[str, list[float]] = {"old": [], "new": []}
    most: dict[str, float | None] = {}
    sets = ConformalSets(**options)
    strange = scores_of(torch.from_numpy(probs), SetScore(sets.score), sets.penalty, sets.free_ranks).numpy()
    groups = {name: is_new == group for name, group in _GROUPS}
    own = {name: strange[np.arange(len(columns)), columns][rows] for name, rows in groups.items()}
    ordered = {name: np.sort(strange[rows], axis=0) for name, rows in groups.items()}
    for number in range(redraws):
        rows = draw.rows(own_columns, world.new, rng)
        sets.fit(own_probs[rows], own_columns[rows], world.new_classes)
        by_group = {found.group: found.threshold for found in sets.result_.thresholds}
        first = next(iter(by_group.values()))
        limits = np.where(world.new, by_group.get("new", first), by_group.get("old", first)) + ROUNDING
        for name, mine in groups.items():
            hits[name].append(float((own[name] <= limits[columns[mine]]).mean()))
            below = [
                np.searchsorted(some, limit, side="right") for some, limit in zip(ordered[name].T, limits, strict=True)
            ]
            sizes[name].append(float(np.sum(below)) / int(mine.sum()))
        if number == 0 and sets.allow_empty:  # what is counted here is what `predict` gives
            inside = sets.predict(probs[:200])
            assert (inside == (strange[:200] <= limits)).mean() > 0.9999
    for found in sets.result_.thresholds:
        if found.group in hits:
            most[found.group] = found.coverage_most
    if "all" in {found.group for found in sets.result_.thresholds}:
        share = 1 - draw.share_new
        hits["all"] = [share * o + (1 - share) * n for o, n in zip(hits["old"], hits["new"], strict=True)]
        sizes["all"] = [share * o + (1 - share) * n for o, n in zip(sizes["old"], sizes["new"], strict=True)]
        most["all"] = sets.result_.thresholds[0].coverage_most
    return CoverageStudy(
        world=world.name,
        calibrator=calibrator,
        draw=asdict(draw),
        options=options,
        redraws=redraws,
        promised=1 - sets.alpha,
        coverage={name: round(float(np.mean(values)), 5) for name, values in hits.items()},
        error={name: round(float(np.std(values) / np.sqrt(redraws)), 6) for name, values in hits.items()},
        most=most,
        size={name: round(float(np.mean(values)), 3) for name, values in sizes.items()},
    )
