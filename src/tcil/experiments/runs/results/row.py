"""A calibrator after a task: its figures, or why there are none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from tcil.experiments.runs.reasons import NoAnswer
from tcil.experiments.runs.records import Amount, Count, Difference, Limit, Pair, Share, Shares, StoredRecord
from tcil.foundation.options import Verdict

RANKED, WITH_OPTIONS = "ranked", "with other options"  # blocks of a table; others stand below them
ALL, OLD, NEW = "all", "old", "new"  # images by their predicted or true class
COVERAGES = tuple(tenth / 10 for tenth in range(1, 11))
RISKS = (0.05, 0.1, 0.2)  # that thresholds are set for
ALPHA = 0.1  # of prediction sets
Differences = Annotated[tuple[Difference | None, ...], Field(strict=False)]
TenShares = Annotated[tuple[Share | None, ...], Field(strict=False, min_length=10, max_length=10)]
TenCounts = Annotated[tuple[Count, ...], Field(strict=False, min_length=10, max_length=10)]
KnownVerdict = Annotated[Verdict, BeforeValidator(lambda value: Verdict.parse(value, "verdict"))]


class Bins(StoredRecord):
    """A reliability diagram: samples, mean confidence and accuracy of ten bins of equal width."""

    count: TenCounts
    confidence: TenShares
    accuracy: TenShares


class ByTask(StoredRecord):
    """Figures by the task that a sample comes from."""

    accuracy: Shares
    ece: Shares
    gap: Differences


class ByClass(StoredRecord):
    """Figures by class, in the order of the logit columns."""

    accuracy: Shares
    gap: Differences


class TraceStep(StoredRecord):
    """A magnitude that a search tried, and the temperature that it found there."""

    magnitude: Amount
    temperature: Limit


class NoiseLevel(StoredRecord):
    """A level of accuracy that PerturbTS tries to reach by noise, and whether it did."""

    reachable: bool


class FitSummary(StoredRecord):
    """What a calibrator says of its fit, as far as tables and pictures read it; the rest is kept."""

    verdict: KnownVerdict = Verdict.OK
    verdicts: Annotated[tuple[KnownVerdict, ...], Field(strict=False)] = ()
    magnitude: Amount | None = None
    reachable: bool = False
    target_temperature: Amount | None = None
    trace: Annotated[tuple[TraceStep, ...], Field(strict=False)] = ()
    levels: Annotated[tuple[NoiseLevel, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.has("verdicts") and not self.verdicts and not self.has("verdict"):
            raise ValueError("verdicts is empty")
        return self

    @property
    def all_verdicts(self) -> tuple[Verdict, ...]:
        """One or several, as the calibrator has them."""
        return self.verdicts or ((self.verdict,) if self.has("verdict") else ())

    @property
    def drawable(self) -> bool:
        """Whether a search that met its target can be shown."""
        found = self.magnitude is not None and self.target_temperature is not None
        return found and any(math.isfinite(step.temperature) for step in self.trace)


class RiskFigure(StoredRecord):
    """A threshold: the risk that it promises, and what it achieves on the test images.

    `group` is the predicted one. `threshold` is None where nothing can be accepted; `begins_at` then says from how many
    images of each group on a promise can exist.
    """

    kind: str
    group: str
    promised: Share
    threshold: Amount | None
    achieved: Share | None
    coverage: Share | None
    coverage_old: Share | None = None
    coverage_new: Share | None = None
    begins_at: Count | None = None


class SetFigure(StoredRecord):
    """Prediction sets: the coverage that they promise, what they achieve for a true group, and their mean size."""

    kind: str
    group: str
    promised: Share
    achieved: Share | None
    size: Amount


class DecisionFigures(StoredRecord):
    """What a calibrator is worth for decisions, on the test images.

    `risk_by_coverage` has the error among the most confident 10, 20, ... 100 % of all images, and of those predicted as
    old and as new.
    """

    risk_by_coverage: Mapping[str, TenShares]
    risks: Annotated[tuple[RiskFigure, ...], Field(strict=False)]
    sets: Annotated[tuple[SetFigure, ...], Field(strict=False)]

    def figure(self, name: str) -> float | None:
        """A figure by its path, such as "risks/model_based/old/0.1/achieved" or "sets/finite_sample/new/size"."""
        part, kind, group, *rest = name.split("/")
        if part == "sets":
            sets = [found for found in self.sets if (found.kind, found.group) == (kind, group)]
            return getattr(sets[0], rest[0]) if sets else None
        promised = float(rest[0])
        risks = [r for r in self.risks if (r.kind, r.group, r.promised) == (kind, group, promised)]
        return getattr(risks[0], rest[1]) if risks else None


class CalibratorRow(StoredRecord):
    """A calibrator after a task: its figures, or why there are none.

    Figures are of the test images of all classes seen. Those that a row lacks are None: rows of older versions lack
    what was added later, such as the bins.

    Attributes
    ----------
    title, block : str
        What tables call it, and the block that it stands in.
    not_applicable : NoAnswer or None
        Why there are no figures; None where there are.
    accuracy, ece, aece, gap, classwise_ece, nll, brier, aurc : float or None
        The metrics of `tcil.metrics`; `gap` is confidence minus accuracy. `nll` is None where it is infinite.
    noise_floor, noise_ceiling : float or None
        The ECE that these probabilities would have by chance if they were calibrated: its mean, and what it
        stays below 95 times in 100.
    ece_interval : pair of float or None
        The 95 % bootstrap interval of the ECE.
    ece_predicted_old, ece_predicted_new : float or None
        The ECE of images predicted as old and as new classes; None where there is no such image.
    by_task : ByTask or None
        Figures by the task that an image comes from.
    by_class : ByClass or None
        Figures by class.
    bins, bins_predicted_old, bins_predicted_new : Bins or None
        Reliability diagrams.
    decisions : DecisionFigures or None
        Thresholds and prediction sets.
    temperature : float or None
        Of calibrators that have one.
    temperature_interval : pair of float or None
        The interval of the temperature, if the calibrator has one.
    result : FitSummary or None
        What the fit returned; None for the network as trained.
    """

    title: str
    block: str
    not_applicable: NoAnswer | None = None
    accuracy: Share | None = None
    ece: Share | None = None
    aece: Share | None = None
    gap: Difference | None = None
    classwise_ece: Amount | None = None
    nll: float | None = None
    brier: Amount | None = None
    aurc: Share | None = None
    noise_floor: Share | None = None
    noise_ceiling: Share | None = None
    ece_interval: Pair | None = None
    ece_predicted_old: Share | None = None
    ece_predicted_new: Share | None = None
    by_task: ByTask | None = None
    by_class: ByClass | None = None
    bins: Bins | None = None
    bins_predicted_old: Bins | None = None
    bins_predicted_new: Bins | None = None
    decisions: DecisionFigures | None = None
    temperature: Amount | None = None
    temperature_interval: Pair | None = None
    result: FitSummary | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.has("not_applicable"):
            if self.not_applicable is None:
                raise ValueError("not_applicable is null, and no reason")
            return self
        for name in ("accuracy", "ece", "aece", "noise_floor"):
            if getattr(self, name) is None:
                raise ValueError(f"{name} is missing")
        for name in ("ece_predicted_old", "ece_predicted_new"):
            if not self.has(name):
                raise ValueError(f"{name} is missing")
        if self.has("bins") and (self.bins is None or self.by_task is None or self.by_class is None):
            raise ValueError("bins, by_task and by_class belong together, and one is missing")
        if self.has("temperature") and self.result is None:
            raise ValueError("result is missing beside the temperature")
        return self

    @property
    def answered(self) -> bool:
        """Whether it has figures."""
        return self.not_applicable is None

    @property
    def up_to_date(self) -> bool:
        """Whether it has everything that this version computes."""
        return not self.answered or self.bins is not None

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The verdicts of the fit."""
        return self.result.all_verdicts if self.result is not None else ()

    def metric(self, name: str) -> float | None:
        """A metric by its name, such as "ece"; those of decisions by their path."""
        if "/" in name:
            return None if self.decisions is None else self.decisions.figure(name)
        value: float | None = getattr(self, name)
        return value

    def interval(self, name: str) -> tuple[float, float] | None:
        """The bootstrap interval of a metric, if it has one."""
        return {"ece": self.ece_interval, "temperature": self.temperature_interval}.get(name)

    def diagram(self, group: str) -> Bins | None:
        """The reliability diagram of "all" images, or of those predicted as "old" or "new" classes, if it has one."""
        return {"all": self.bins, "old": self.bins_predicted_old, "new": self.bins_predicted_new}[group]

    def titled(self, title: str) -> CalibratorRow:
        """The same figures under another title."""
        return self.model_copy(update={"title": title})
