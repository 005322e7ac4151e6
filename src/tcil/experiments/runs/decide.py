"""What a calibrator is worth for decisions: risk by coverage, and what rules promise beside what they achieve."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tcil
from tcil.decisions import ConformalSets, Design, ModelBasedThreshold, PromiseKind, RiskThreshold
from tcil.experiments.runs.entries import FinishedTask
from tcil.experiments.runs.records import rounded
from tcil.experiments.runs.results import ALL, ALPHA, COVERAGES, NEW, OLD, RISKS, DecisionFigures, RiskFigure, SetFigure

Probabilities = Callable[[Tensor], Tensor]


class WatchedTask(FinishedTask):
    """A finished task that notes whether its reserve was read: what fits a calibrator cannot back its promises."""

    @classmethod
    def of(cls, task: FinishedTask) -> WatchedTask:
        """The same task, watched."""
        return cls(**{field.name: getattr(task, field.name) for field in fields(FinishedTask)})

    def __getattribute__(self, name: str) -> Any:
        if name == "reserve" or name.startswith("reserve_"):  # images or logits
            object.__setattr__(self, "_read", True)
        return super().__getattribute__(name)

    @property
    def used_reserve(self) -> bool:
        """Whether the reserve was read."""
        return getattr(self, "_read", False)


def decision_figures(task: FinishedTask, probabilities: Probabilities, *, backed: bool) -> DecisionFigures:
    """All figures of a row, on the test images. Finite-sample promises come from the reserve, if it is `backed`."""
    probs, columns = probabilities(task.test_logits), task.test_columns
    groups = tcil.metrics.predicted_groups(probs, task.current)
    curve = [tcil.metrics.risk_at_coverage(probs, columns, coverage, groups=groups) for coverage in COVERAGES]
    truth = _Truth(probs.numpy(), columns.numpy(), task.current)
    risks = [figure for risk in RISKS for figure in truth.claimed(risk)]
    sets = truth.claimed_sets()
    rows = _backing_rows(task) if backed else None
    if rows is not None:
        reserve = probabilities(task.reserve_logits[rows]), task.reserve_columns[rows]
        risks += [truth.promised(risk, *reserve) for risk in RISKS]
        sets += truth.promised_sets(*reserve)
    return DecisionFigures(
        risk_by_coverage={
            ALL: tuple(rounded(score) for score in curve),
            OLD: tuple(rounded(score.by_group.get(OLD)) for score in curve),
            NEW: tuple(rounded(score.by_group.get(NEW)) for score in curve),
        },
        risks=tuple(risks),
        sets=tuple(sets),
    )


def _backing_rows(task: FinishedTask) -> Tensor | None:
    """Rows of the reserve that can back a promise: the same number of every class of a group; None without any.

    An imported reserve may have more images of some classes than of others, or none. The theorems for stratified draws
    need equal numbers, so that as many rows of each class are drawn at random as the smallest class has.
    """
    counts = torch.bincount(task.reserve_columns, minlength=len(task.seen))
    if not bool(counts.all()):
        return None
    is_new = task.is_new(torch.arange(len(counts)))
    order = torch.randperm(len(task.reserve_columns), generator=torch.Generator().manual_seed(0))
    kept = []
    for column in task.seen:
        most = int(counts[is_new == is_new[column]].min())
        kept.append(order[task.reserve_columns[order] == column][:most])
    return torch.cat(kept)


class _Truth:
    """The test images, on which promises are compared with what they achieve."""

    def __init__(self, probs: Any, columns: Any, new_columns: Sequence[int]) -> None:
        self.probs, self.columns, self.new_columns = probs, columns, new_columns
        self.wrong = probs.argmax(1) != columns
        self.is_new, self.said_new = (np.isin(some, new_columns) for some in (columns, probs.argmax(1)))

    def claimed(self, risk: float) -> Iterable[RiskFigure]:
        """Thresholds by what the probabilities claim, for all images and for either predicted group."""
        for groups in ("pooled", "predicted"):
            rule = ModelBasedThreshold(risk=risk, groups=groups, gammas=()).fit(self.probs, self.new_columns)
            accepted = rule.accept(self.probs)
            for found in rule.result_.thresholds:
                yield self._figure(rule.result_.kind, found.group, risk, found.threshold, accepted, None)

    def promised(self, risk: float, probs: Tensor, columns: Tensor) -> RiskFigure:
        """One threshold for any mixture of old and new images, from the reserve."""
        rule = RiskThreshold(risk=risk, design=Design.STRATIFIED).fit(probs, columns, self.new_columns)
        found = rule.result_.thresholds[0]
        accepted = rule.accept(self.probs)
        return self._figure(PromiseKind.FINITE_SAMPLE, ALL, risk, found.threshold, accepted, found.begins_at)

    def _figure(
        self, kind: PromiseKind, group: str, risk: float, threshold: float, accepted: Any, begins_at: int | None
    ) -> RiskFigure:
        inside = np.ones(len(self.wrong), bool) if group == ALL else self.said_new == (group == NEW)
        taken = accepted & inside
        return RiskFigure(
            kind=str(kind),
            group=group,
            promised=risk,
            threshold=None if np.isinf(threshold) else float(threshold),
            achieved=_mean(self.wrong[taken]),
            coverage=_mean(taken[inside]),
            coverage_old=_mean(taken[~self.is_new]),
            coverage_new=_mean(taken[self.is_new]),
            begins_at=begins_at,
        )

    def claimed_sets(self) -> list[SetFigure]:
        """The smallest sets that claim to hold the true class often enough."""
        order = np.argsort(-self.probs, axis=1, kind="stable")
        before = np.take_along_axis(self.probs, order, axis=1).cumsum(axis=1)
        taken = np.concatenate([np.zeros((len(order), 1)), before[:, :-1]], axis=1) < 1 - ALPHA
        sets = np.zeros(order.shape, bool)
        np.put_along_axis(sets, order, taken, axis=1)
        return self._sizes(PromiseKind.MODEL_BASED, sets)

    def promised_sets(self, probs: Tensor, columns: Tensor) -> list[SetFigure]:
        """Sets for old and new classes separately, from the reserve."""
        rule = ConformalSets(alpha=ALPHA, design=Design.STRATIFIED).fit(probs, columns, self.new_columns)
        return self._sizes(PromiseKind.FINITE_SAMPLE, rule.predict(self.probs))

    def _sizes(self, kind: PromiseKind, sets: Any) -> list[SetFigure]:
        hit = sets[np.arange(len(self.columns)), self.columns]
        return [
            SetFigure(
                kind=str(kind), group=group, promised=1 - ALPHA, achieved=_mean(hit[rows]), size=_size(sets[rows])
            )
            for group, rows in ((OLD, ~self.is_new), (NEW, self.is_new))
            if rows.any()
        ]


def _mean(values: Any) -> float | None:
    return round(float(values.mean()), 5) if len(values) else None


def _size(sets: Any) -> float:
    return round(float(sets.sum(1).mean()), 4)
