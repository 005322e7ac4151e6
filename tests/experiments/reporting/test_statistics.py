"""Paired differences and their intervals."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from tcil.experiments.reporting.statistics import paired_difference


class TestStatistics:
    def test_paired_difference_is_students(self):
        rng = np.random.default_rng(0)
        a, b = rng.normal(size=7), rng.normal(0.5, 1, size=7)
        ours, theirs = paired_difference(a, b), stats.ttest_rel(b, a).confidence_interval(0.95)
        assert ours.low == pytest.approx(theirs.low)
        assert ours.high == pytest.approx(theirs.high)

    def test_a_single_pair_has_no_interval(self):
        assert not paired_difference([1.0], [2.0]).excludes_zero
