"""What cannot back a promise is refused before any work, and the message says what to do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tcil
from tcil.decisions import (
    ConformalSets,
    ModelBasedThreshold,
    RiskThreshold,
    cheapest_decision,
    cross_conformal_sets,
    smallest_reserve,
)

PROBS = np.array([[0.7, 0.2, 0.1], [0.2, 0.7, 0.1], [0.1, 0.2, 0.7], [0.3, 0.4, 0.3]])
LABELS = [0, 1, 2, 1]


@pytest.mark.parametrize("value", [0, 1, -0.1, 1.5, "0.1", None, True, float("nan")])
def test_shares_out_of_range(value):
    for make in (
        lambda: ConformalSets(alpha=value),
        lambda: RiskThreshold(risk=value),
        lambda: RiskThreshold(confidence=value),
        lambda: ModelBasedThreshold(risk=value),
        lambda: smallest_reserve(value),
    ):
        with pytest.raises(ValueError, match="above 0 and below 1"):
            make()


@pytest.mark.parametrize(
    ("mixture", "words"),
    [
        ({"old": 0.5, "new": 0.6}, "sum to 1.1"),
        ({"old": 1.5, "new": -0.5}, "from 0 to 1"),
        ({"old": 1.0}, "the groups"),
        ({"old": 0.5, "young": 0.5}, "the groups"),
        ("all", "as_sampled"),
        (0.5, "shares such as"),
        ([{"old": 1, "new": 0}] * 3, "or a pair"),
    ],
)
def test_mixtures(mixture, words):
    with pytest.raises(ValueError, match=words):
        RiskThreshold(mixture=mixture)


def test_a_predicted_group_has_no_bound_under_any_mixture():
    with pytest.raises(ValueError, match="no bound exists"):
        RiskThreshold(groups="predicted")
    with pytest.raises(ValueError, match="no bound exists"):
        RiskThreshold(groups="predicted", mixture=({"old": 1, "new": 0}, {"old": 0.5, "new": 0.5}))


def test_groups_without_images():
    with pytest.raises(ValueError, match=r"no image of an old class.*ModelBasedThreshold"):
        RiskThreshold().fit(PROBS, [2, 2, 2, 2], [2])
    with pytest.raises(ValueError, match="no image of a new class"):
        RiskThreshold(mixture={"old": 0.5, "new": 0.5}).fit(PROBS, [0, 1, 0, 1], [2])
    with pytest.raises(ValueError, match="no image of the group old"):
        ConformalSets().fit(PROBS, [2, 2, 2, 2], [2])
    with pytest.raises(ValueError, match="no image of class 2"):
        ConformalSets(by="class").fit(PROBS, [0, 1, 0, 1])
    with pytest.raises(ValueError, match="new_classes"):
        ConformalSets().fit(PROBS, LABELS)
    with pytest.raises(ValueError, match="new_classes"):
        RiskThreshold().fit(PROBS, LABELS)


@pytest.mark.parametrize("rule", [RiskThreshold(mixture="as_sampled"), ConformalSets(by="marginal")], ids=repr)
class TestImages:
    def test_that_were_used_before(self, rule):
        with pytest.raises(ValueError, match=r"2 images that were used before \(5, 9\)"):
            rule.fit(PROBS, LABELS, ids=[5, 6, 9, 7], used_ids=[1, 5, 9])
        with pytest.raises(ValueError, match="the same image twice"):
            rule.fit(PROBS, LABELS, ids=[5, 6, 5, 7], used_ids=[1])
        with pytest.raises(ValueError, match="both, or neither"):
            rule.fit(PROBS, LABELS, ids=[5, 6, 9, 7])
        rule.clone().fit(PROBS, LABELS, ids=[5, 6, 9, 7], used_ids=[1, 2])

    def test_with_unseen_labels(self, rule):
        with pytest.raises(ValueError, match="the label 3"):
            rule.fit(PROBS, [0, 1, 2, 3])
        with pytest.raises(ValueError, match="the label 0"):
            rule.fit(PROBS, LABELS, classes=[1, 2, 3])
        with pytest.raises(ValueError, match="new_classes"):
            rule.fit(PROBS, LABELS, [7])

    def test_of_which_none_is_left(self, rule):
        with pytest.raises(ValueError, match="non-empty"):
            rule.fit(np.zeros((0, 3)), np.zeros(0, int))

    def test_that_are_no_probabilities(self, rule):
        with pytest.raises(ValueError, match="probabilities"):
            rule.fit(10 * PROBS, LABELS)
        with pytest.raises(ValueError, match="labels"):
            rule.fit(PROBS, LABELS[:3])

    def test_of_another_head(self, rule):
        fitted = rule.clone().fit(PROBS, LABELS)
        with pytest.raises(ValueError, match="fit the rule again"):
            fitted.predict(np.full((2, 4), 0.25))
        with pytest.raises(ValueError, match="as the rule was fitted on"):
            fitted.wrap(torch.nn.Identity(), calibrated=False)(torch.zeros(2, 4))
        with pytest.raises(ValueError, match=r"torch\.nn\.Module"):
            fitted.wrap("network")

    def test_before_any_fit(self, rule):
        for use in (lambda r: r.predict(PROBS), lambda r: r.result_, lambda r: r.wrap(torch.nn.Identity())):
            with pytest.raises(tcil.NotFittedError):
                use(rule.clone())


def test_stratified_draws_have_equal_classes():
    for rule in (ConformalSets(design="stratified"), RiskThreshold(design="stratified")):
        with pytest.raises(ValueError, match="from 1 to 2 images of a class"):
            rule.fit(PROBS, LABELS, [2])


def test_options():
    with pytest.raises(ValueError, match="Did you mean 'raps'"):
        ConformalSets(score="rap")
    with pytest.raises(ValueError, match="by"):
        ConformalSets(by="task")
    with pytest.raises(ValueError, match="penalty"):
        ConformalSets(penalty=-1)
    with pytest.raises(ValueError, match="allow_empty"):
        ConformalSets(allow_empty=1)
    with pytest.raises(ValueError, match="top_k"):
        RiskThreshold(top_k=3, mixture="as_sampled").fit(PROBS, LABELS)
    with pytest.raises(ValueError, match="in falling order"):
        RiskThreshold(candidates=[0.5, 0.9])
    with pytest.raises(ValueError, match="one of the two"):
        RiskThreshold(candidates=[0.5], mixture="as_sampled").fit(PROBS, LABELS, reference=PROBS)
    with pytest.raises(ValueError, match="reference images"):
        RiskThreshold(search="sequence", mixture="as_sampled").fit(PROBS, LABELS)
    with pytest.raises(ValueError, match="gammas"):
        ModelBasedThreshold(gammas=(-0.1,))


def test_costs():
    for costs, words in (
        ([[0, 1], [1, 0], [1, 1]], r"\(K, K\)"),
        ([[0, -1], [1, 0]], "negative"),
        ([[0, 0], [0, 0]], "all-zero"),
    ):
        with pytest.raises(ValueError, match=words):
            RiskThreshold(costs=costs)
    with pytest.raises(ValueError, match="2 rows"):
        RiskThreshold(costs=[[0, 1], [1, 0]], mixture="as_sampled").fit(PROBS, LABELS)
    with pytest.raises(ValueError, match="below 1, the largest"):
        RiskThreshold(costs=[[0, 1], [1, 0]], risk=1)
    with pytest.raises(ValueError, match="costs"):
        cheapest_decision(PROBS, [[0, 1], [1, 0]])


def test_asking_has_a_number_of_its_own():
    asking = np.ones((3, 4))
    with pytest.raises(ValueError, match="which is a class"):
        cheapest_decision(PROBS, asking, ask=1)
    with pytest.raises(ValueError, match="a whole number"):
        cheapest_decision(PROBS, asking, ask="person")
    for ask in (2**63, -(2**63) - 1):
        with pytest.raises(ValueError, match=r"^ask: got .*at most 64 bits"):
            cheapest_decision(PROBS, asking, ask=ask)
    assert cheapest_decision(PROBS, 1 - np.eye(3), ask=2**63 - 1).tolist() == [0, 1, 2, 1]
    assert cheapest_decision(PROBS, 1 - np.eye(3), ask=1).tolist() == [0, 1, 2, 1]  # nobody can be asked


@pytest.mark.parametrize("rule", [RiskThreshold(mixture="as_sampled"), ConformalSets(by="marginal")], ids=repr)
def test_values_that_are_no_numbers(rule):
    for value in (np.nan, np.inf):
        spoilt = PROBS.copy()
        spoilt[0, 0] = value
        with pytest.raises(ValueError, match="probs"):
            rule.clone().fit(spoilt, LABELS)
        with pytest.raises(ValueError, match="probs"):
            rule.clone().fit(PROBS, LABELS).predict(spoilt)
    for shape in (PROBS[0], PROBS[None]):
        with pytest.raises(ValueError, match="probs"):
            rule.clone().fit(shape, LABELS)


def test_a_share_next_to_nothing_is_not_nothing():
    """Shares sum to 1 but for rounding, and the smaller group still counts."""
    rule = RiskThreshold(mixture={"old": 1.0, "new": 1e-10}).fit(PROBS, LABELS, [2])
    assert rule.result_.groups == ("old", "new")


def test_folds():
    with pytest.raises(ValueError, match="a list of matrices"):
        cross_conformal_sets(PROBS, LABELS, [0, 1, 0, 1], None, new_classes=None)
    for penalty in (-1, float("nan"), "0.1"):
        with pytest.raises(ValueError, match="penalty"):
            cross_conformal_sets(PROBS, LABELS, [0, 1, 0, 1], [PROBS] * 2, new_classes=None, penalty=penalty)
    with pytest.raises(ValueError, match="of every class of a group in every fold"):
        cross_conformal_sets(PROBS, LABELS, [0, 1, 0, 1], [PROBS] * 2, new_classes=None, design="stratified")
    with pytest.raises(ValueError, match="folds of one size"):
        cross_conformal_sets(PROBS, LABELS, [0, 0, 0, 1], [PROBS, PROBS], new_classes=None)
    with pytest.raises(ValueError, match="0 to 1"):
        cross_conformal_sets(PROBS, LABELS, [0, 1, 2, 3], [PROBS, PROBS], new_classes=None)
    with pytest.raises(ValueError, match="different shapes"):
        cross_conformal_sets(PROBS, LABELS, [0, 1, 0, 1], [PROBS, PROBS[:2]], new_classes=None)
