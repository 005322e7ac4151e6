"""Bounds against exact enumeration: nothing is drawn here."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom

from research.decisions import attacks
from tcil import decisions
from tcil.decisions import bounds


@pytest.mark.parametrize("error", [0.01, 0.1, 0.25])
@pytest.mark.parametrize("n", [1, 7, 40])
def test_binomial_bounds_fail_no_more_often_than_they_say(n, error):
    counts = np.arange(n + 1)
    upper, lower = bounds.binomial_upper(counts, n, error), bounds.binomial_lower(counts, n, error)
    for p in np.linspace(0.001, 0.999, 101):
        chance = binom.pmf(counts, n, p)
        assert chance[upper < p].sum() <= error + 1e-12
        assert chance[lower > p].sum() <= error + 1e-12


def test_binomial_upper_is_where_the_tail_is_the_error():
    assert binom.cdf(3, 50, bounds.binomial_upper(3, 50, 0.05)) == pytest.approx(0.05)
    assert bounds.binomial_upper([5, 0], [5, 0], 0.1).tolist() == [1.0, 1.0]
    assert bounds.binomial_lower([0, 0], [5, 0], 0.1).tolist() == [0.0, 0.0]


def poisson_binomial(chances):
    found = np.ones(1)
    for chance in chances:
        found = np.convolve(found, [1 - chance, chance])
    return found


@pytest.mark.parametrize("error", [0.02, 0.1, 0.25])
def test_stratified_bounds_hold_for_classes_of_any_difficulty(error):
    rng = np.random.default_rng(0)
    for trial in range(150):
        n_classes, each = int(rng.integers(2, 9)), int(rng.integers(1, 6))
        chances = rng.uniform(size=n_classes) ** rng.choice([0.2, 1, 5])
        if trial % 3 == 0:
            chances = np.round(chances)  # classes that are always or never correct
        n, mean = n_classes * each, chances.mean()
        spread = poisson_binomial(np.repeat(chances, each))
        counts = np.arange(n + 1)
        assert spread[bounds.stratified_upper(counts, n, error) < mean - 1e-12].sum() <= error + 1e-9
        assert spread[bounds.stratified_lower(counts, n, error) > mean + 1e-12].sum() <= error + 1e-9


@pytest.mark.parametrize("identical", [True, False])
def test_bounds_on_means_hold_for_plain_errors_and_are_not_below_the_exact_ones(identical):
    counts = np.arange(31)
    upper = bounds.mean_upper(counts, 30, 0.1, identical=identical)
    assert (upper >= bounds.binomial_upper(counts, 30, 0.1) - 1e-9).all()
    for p in np.linspace(0.01, 0.99, 50):
        assert binom.pmf(counts, 30, p)[upper < p].sum() <= 0.1 + 1e-12
    assert bounds.mean_lower(30 - counts, 30, 0.1, identical=identical) == pytest.approx(1 - upper)


def test_smallest_reserve_is_the_smallest():
    for risk in (0.05, 0.1, 0.2, 0.45):
        n = decisions.smallest_reserve(risk, 0.9, n_candidates=1)
        assert bounds.binomial_upper(0, n, 0.1) <= risk < bounds.binomial_upper(0, n - 1, 0.1)
    assert decisions.smallest_reserve(1e-9, 0.9, n_candidates=1) > 2e9  # counted, not cut off


def test_coverage_of_stratified_scores_is_the_integral_that_it_says():
    from scipy.integrate import quad

    for n, rank in ((10, 10), (40, 38), (80, 74)):
        integral, _ = quad(lambda u, n=n, rank=rank: binom.cdf(rank - 1, n, u), 0, (rank - 1) / n)
        assert float(bounds.stratified_coverage(n, rank)) == pytest.approx(integral, abs=1e-9)


def test_conformal_ranks():
    assert bounds.conformal_rank(9, 0.1) == 9
    assert bounds.conformal_rank(8, 0.1) == 9  # none: one more than there are
    assert bounds.conformal_begins_at(0.1) == 9
    for n_classes in (1, 4, 16):
        n = bounds.conformal_begins_at(0.1, n_classes)
        assert n % n_classes == 0
        assert bounds.conformal_rank(n, 0.1, n_classes) <= n
        assert bounds.conformal_rank(n - n_classes, 0.1, n_classes) > n - n_classes or n == n_classes
    assert bounds.conformal_begins_at(1e-9) == 999_999_999  # found by bisection, not by counting
    for n in (9, 19, 99, 1000, 4999):  # the edge: alpha = 1 / (n + 1)
        assert bounds.conformal_rank(n, 1 / (n + 1)) == n == bounds.conformal_begins_at(1 / (n + 1))
        assert bounds.conformal_rank(n, (1 - 1e-9) / (n + 1)) == n + 1
    # Never below what independent images need, and one class is the plain case or better.
    assert bounds.conformal_rank(100, 0.1, 1) == bounds.conformal_rank(100, 0.1)


def coverage_of_classes(rank, each, chances):
    """Exact expected coverage of the rank-th score where class c scores below u with chance chances(u)[c]."""
    grid = np.linspace(0, 1, 401)
    inside = [poisson_binomial(np.repeat(chances(u), each))[:rank].sum() for u in grid]
    return np.trapezoid(inside, grid)


@pytest.mark.parametrize("n_classes", [2, 5])
def test_stratified_ranks_cover_where_classes_differ_as_much_as_they_can(n_classes):
    """Class c has its scores between c / C and (c + 1) / C of the mixture: the least spread out case, and iid."""
    each, alpha = 60 // n_classes, 0.2
    rank = bounds.conformal_rank(60, alpha, n_classes)
    apart = coverage_of_classes(rank, each, lambda u: np.clip(u * n_classes - np.arange(n_classes), 0, 1))
    alike = coverage_of_classes(rank, each, lambda u: np.full(n_classes, u))
    assert min(apart, alike) >= 1 - alpha - 1e-3
    assert alike == pytest.approx(rank / 61, abs=2e-3)


def test_hoeffding_compares_tails_on_his_side_of_the_mean_only():
    """The condition of the theorem is needed: one count lower the comparison fails."""
    right, wrong = attacks.hoeffding(True, tries=150), attacks.hoeffding_near_the_mean(tries=150)
    assert right.tried > 500
    assert right.held
    assert not wrong.held


@pytest.mark.parametrize(("n_classes", "each", "alpha"), [(2, 5, 0.2), (4, 5, 0.1), (16, 2, 0.1)])
def test_stratified_ranks_cover_every_distribution_of_scores(n_classes, each, alpha):
    """Over all chances with a given mean, not only over some families; and a rank lower would not do for the bound."""
    assert attacks.stratified_rank(n_classes, each, alpha).held


def test_the_usual_rank_falls_short_for_stratified_scores():
    short = attacks.stratified_rank(2, 1, 2 / 3, naive=True)
    assert not short.held
    assert short.worst == pytest.approx(1 / 4)
