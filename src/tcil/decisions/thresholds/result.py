"""What a threshold promises: one record for a predicted group, and one for the whole rule."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tcil.decisions.promises import ALL, DecisionVerdict, PromiseKind
from tcil.foundation.records import Record


@dataclass(frozen=True)
class GroupThreshold(Record):
    """A threshold for one predicted group, and what it promises.

    Attributes
    ----------
    group : str
        "all", or the predicted group "old" or "new".
    threshold : float
        Accept where the score is at least this; infinity where no threshold keeps the promise.
    verdict : DecisionVerdict
        Whether there is one, and if not, why.
    coverage : float
        Expected share of the group's images that are accepted; of a range of mixtures, the least.
    coverage_old, coverage_new : float or None
        The same among images whose true class is old, or new.
    accepted, errors : int or float
        Calibration images that are accepted, and the sum of their losses.
    risk_estimate : float or None
        The risk as estimated; of a range of mixtures, the largest.
    risk_bound : float
        The upper bound that passed the test, at most the wanted risk; 1 where none did. The promise is the wanted risk:
        this bound alone does not allow for the search among candidates.
    begins_at : int
        The smallest number of images of each group with which a threshold can exist: all accepted, and no error. With
        mixture "as_sampled", of all images together.
    likely_begins_at : int or None
        An estimate of the same at the error rates of these images, with half an error added for each group; None if no
        number of images is enough, and where there is a threshold.

    Examples
    --------
    >>> from tcil import decisions
    >>> rule = decisions.RiskThreshold(risk=0.2, mixture="as_sampled").fit([[0.9, 0.1]] * 100, [0] * 97 + [1] * 3)
    >>> threshold, = rule.result_.thresholds
    >>> threshold.group, round(threshold.threshold, 2), threshold.accepted, threshold.errors
    ('all', 0.27, 100, 3.0)
    """

    group: str
    threshold: float
    verdict: DecisionVerdict
    coverage: float
    coverage_old: float | None
    coverage_new: float | None
    accepted: int
    errors: float
    risk_estimate: float | None
    risk_bound: float
    begins_at: int
    likely_begins_at: int | None

    @property
    def exists(self) -> bool:
        """Whether anything is accepted at all."""
        return self.threshold < math.inf


@dataclass(frozen=True)
class RiskThresholdResult(Record):
    """What a threshold promises, and on what grounds.

    Attributes
    ----------
    risk, confidence : float
        As asked: with this probability over the draw of the images, the risk is at most this.
    kind : PromiseKind
        The grounds; "none" where no threshold exists.
    verdicts : tuple of DecisionVerdict
        What `fit` found in the images.
    thresholds : tuple of GroupThreshold
        One, or one for each predicted group.
    n_old, n_new : int
        Calibration images of each true group.
    n_candidates : int
        Thresholds that were tested for each group.
    groups : tuple of str
        The true groups that images are needed of: "old" and "new", one of them, or "all" for a single sample.
    steps : tuple of int
        Their sizes are multiples of this: the classes of each group for a stratified draw, otherwise 1.
    assumptions : tuple of str
        The assumptions of the promise.

    Examples
    --------
    >>> from tcil import decisions
    >>> rule = decisions.RiskThreshold(risk=0.05, mixture="as_sampled").fit([[0.9, 0.1]] * 20, [0] * 20)
    >>> print(rule.result_.message)
    No threshold keeps a risk of 5 % at confidence 90 % with 20 images.
    Smallest number, without a single error: 92 images.
    Estimate at the error rate of these images: 385 images.
    """

    risk: float
    confidence: float
    kind: PromiseKind
    verdicts: tuple[DecisionVerdict, ...]
    thresholds: tuple[GroupThreshold, ...]
    n_old: int
    n_new: int
    n_candidates: int
    groups: tuple[str, ...]
    steps: tuple[int, ...]
    assumptions: tuple[str, ...]

    def images_needed(self, n: int) -> dict[str, int]:
        """The number of images of each group, `n` rounded up to whole classes for a stratified draw.

        Parameters
        ----------
        n : int
            `begins_at` or `likely_begins_at` of a threshold.

        Returns
        -------
        dict of str to int
            By true group, or of "all" images for a single sample.
        """
        return {group: step * math.ceil(n / step) for group, step in zip(self.groups, self.steps, strict=True)}

    def _words(self, n: int) -> str:
        sizes = self.images_needed(n).items()
        return " and ".join(f"{size:,}" if group == ALL else f"{size:,} {group}" for group, size in sizes) + " images"

    @property
    def message(self) -> str:
        """The answer in words; where there is no threshold, with the number of images that it takes."""
        sentences = []
        for found in self.thresholds:
            of = "" if found.group == ALL else f" for images predicted as {found.group}"
            asked = f"a risk of {100 * self.risk:g} % at confidence {100 * self.confidence:g} %{of}"
            if found.exists:
                sentences.append(
                    f"Accept from {found.threshold:.4g} on: {asked}, expected coverage {100 * found.coverage:.1f} %."
                )
                continue
            both = self.n_old and self.n_new
            have = f"{self.n_old} old and {self.n_new} new images" if both else f"{self.n_old + self.n_new} images"
            sentences.append(f"No threshold keeps {asked} with {have}.")
            sentences.append(f"Smallest number, without a single error: {self._words(found.begins_at)}.")
            likely = found.likely_begins_at
            estimate = "no number is enough" if likely is None else self._words(likely)
            sentences.append(f"Estimate at the error rate of these images: {estimate}.")
        return " ".join(sentences)
