"""Metrics of calibration and accuracy: pure functions of probabilities and labels.

Labels are column indices of `probs`, unless `classes` gives the label of each column. Every metric accepts
`sample_weight` and `groups`. With `groups` (one value per sample, for instance `predicted_groups(probs, new_classes)`),
the result is still the value over all samples, and `by_group` holds the value of each group. Compare the groups: a
single temperature can leave predicted-new classes over-confident and predicted-old classes under-confident, which the
pooled value hides. All values are fractions, not percentages. Groups are numbers or strings, not NaN. A masked class
(probability 0 in every row and no sample) is ignored.
"""

from tcil.metrics.calibration_error import (
    adaptive_calibration_error,
    classwise_calibration_error,
    confidence_gap,
    debiased_calibration_error,
    expected_calibration_error,
    smooth_calibration_error,
)
from tcil.metrics.likelihood import BrierParts, accuracy, brier_parts, brier_score, negative_log_likelihood
from tcil.metrics.reliability import ReliabilityBins, reliability_bins
from tcil.metrics.sample import Score, predicted_groups
from tcil.metrics.selective import area_under_risk_coverage, risk_at_coverage
from tcil.metrics.uncertainty import (
    CalibrationComparison,
    CalibrationEstimate,
    calibration_estimate,
    compare_calibration,
    noise_floor,
)

__all__ = [
    "BrierParts",
    "CalibrationComparison",
    "CalibrationEstimate",
    "ReliabilityBins",
    "Score",
    "accuracy",
    "adaptive_calibration_error",
    "area_under_risk_coverage",
    "brier_parts",
    "brier_score",
    "calibration_estimate",
    "classwise_calibration_error",
    "compare_calibration",
    "confidence_gap",
    "debiased_calibration_error",
    "expected_calibration_error",
    "negative_log_likelihood",
    "noise_floor",
    "predicted_groups",
    "reliability_bins",
    "risk_at_coverage",
    "smooth_calibration_error",
]
