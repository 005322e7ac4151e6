"""From confidence to decisions: thresholds with a stated risk, and prediction sets with stated coverage.

A rule is fitted on probabilities, usually those of a calibrator, and says what it promises and on what grounds:

- `RiskThreshold`: accept a prediction or ask a person, so that errors among the accepted ones stay below a stated risk.
- `ModelBasedThreshold`: the same without labelled images of old classes. No theorem backs it; it says by how much the
  confidence may be off.
- `ConformalSets`: sets of classes that contain the true one with a stated probability, separately for old and new
  classes.
- `cheapest_decision`: the decision of least expected cost.

What can be promised, and what cannot, is in docs/decisions.md; docs/decisions-theory.md has the proofs.
"""

from tcil.decisions.claims import ClaimedThreshold, GammaStep, ModelBasedResult, ModelBasedThreshold
from tcil.decisions.costs import cheapest_decision
from tcil.decisions.crossfit import CrossConformalResult, cross_conformal_sets
from tcil.decisions.promises import (
    DecisionVerdict,
    Design,
    PromiseKind,
    Search,
    SetGroups,
    SetScore,
    ThresholdGroups,
)
from tcil.decisions.rules import DecidingModel, load
from tcil.decisions.sets import ConformalResult, ConformalSets, SetThreshold
from tcil.decisions.thresholds.result import GroupThreshold, RiskThresholdResult
from tcil.decisions.thresholds.rule import RiskThreshold, smallest_reserve

__all__ = [
    "ClaimedThreshold",
    "ConformalResult",
    "ConformalSets",
    "CrossConformalResult",
    "DecidingModel",
    "DecisionVerdict",
    "Design",
    "GammaStep",
    "GroupThreshold",
    "ModelBasedResult",
    "ModelBasedThreshold",
    "PromiseKind",
    "RiskThreshold",
    "RiskThresholdResult",
    "Search",
    "SetGroups",
    "SetScore",
    "SetThreshold",
    "ThresholdGroups",
    "cheapest_decision",
    "cross_conformal_sets",
    "load",
    "smallest_reserve",
]
