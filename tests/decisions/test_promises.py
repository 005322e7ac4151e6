"""Promises against the truth, over a few hundred draws; `python -m research.decisions redraws` does it on letters."""

from __future__ import annotations

import pytest

from research.decisions.redraws import MEMORY, Draw, coverage_study, risk_study

REDRAWS = 250
THRESHOLDS = {
    "any mixture": (Draw(n_old=150, n_new=150), {"risk": 0.15}),
    "in sequence": (Draw(n_old=100, n_new=100), {"risk": 0.15, "search": "sequence", "reference": 400}),
    "known mixture": (Draw(n_old=250, n_new=120), {"risk": 0.2, "mixture": {"old": 0.8, "new": 0.2}}),
    "predicted groups": (
        Draw(n_old=300, n_new=200),
        {"risk": 0.25, "groups": "predicted", "mixture": ({"old": 0.7, "new": 0.3}, {"old": 0.6, "new": 0.4})},
    ),
    "as sampled": (Draw(n=150, share_new=0.3), {"risk": 0.12, "mixture": "as_sampled"}),
    "stratified": (Draw(per_class=25), {"risk": 0.2, "design": "stratified"}),
    "new only": (Draw(n_new=60), {"risk": 0.15, "mixture": {"old": 0, "new": 1}}),
}


@pytest.mark.parametrize("name", THRESHOLDS)
def test_risks_are_exceeded_no_more_often_than_promised(world, name):
    draw, options = THRESHOLDS[name]
    study = risk_study(world, "vanilla", draw, REDRAWS, **options)
    assert study.exists > 0.3, "a promise that is never made says nothing"
    assert study.kept, study


def test_the_memory_as_calibration_set_breaks_the_promise(world):
    _, options = THRESHOLDS["any mixture"]
    broken = risk_study(world, "vanilla", Draw(n_old=150, n_new=150, source=MEMORY), 60, **options)
    assert broken.exists == 1.0
    assert not broken.kept
    assert broken.failures == 60


def test_the_test_of_risks_sees_a_rule_that_is_a_little_too_bold(world):
    """Promises at confidence 30 % that are read as promises at 90 % must fail: the check has power."""
    study = risk_study(world, "vanilla", Draw(n=150, share_new=0.3), REDRAWS, risk=0.06, mixture="as_sampled",
                       confidence=0.3, candidates=(0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.45, 0.4),
                       search="sequence")  # fmt: skip
    assert study.kept
    assert study.failures > 0.1 * REDRAWS + 4 * (REDRAWS * 0.09) ** 0.5


SETS = {
    "lac": (Draw(n_old=40, n_new=25), {"score": "lac"}),
    "aps": (Draw(n_old=40, n_new=25), {"score": "aps"}),
    "raps": (Draw(n_old=40, n_new=25), {"score": "raps", "penalty": 0.05, "free_ranks": 2}),
    "marginal": (Draw(n=60, share_new=0.3), {"by": "marginal"}),
    "stratified": (Draw(per_class=5), {"design": "stratified"}),
    "new": (Draw(n_new=25), {"by": "new"}),
}


@pytest.mark.parametrize("name", SETS)
def test_coverage_is_within_its_bounds(world, name):
    draw, options = SETS[name]
    study = coverage_study(world, "vanilla", draw, REDRAWS, allow_empty=True, **options)
    assert study.most, "no group to check"
    assert study.kept, study


def test_sets_from_the_memory_do_not_cover(world):
    broken = coverage_study(world, "vanilla", Draw(n_old=40, n_new=25, source=MEMORY), 60, allow_empty=True)
    assert not broken.kept
    assert broken.coverage["old"] < 0.7
