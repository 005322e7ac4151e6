"""Thresholds: what they accept, what they answer where there is none, costs, top-k, files, export."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from scipy.stats import binom

import tcil
from tcil import decisions
from tcil.decisions import DecisionVerdict, ModelBasedThreshold, PromiseKind, RiskThreshold, bounds
from tcil.decisions.rules import DecisionRule

NEW = range(8, 12)


def plain_holm(losses, scores, tried, risk, error):
    """The obvious version for one sample: exact binomial p-values, Holm's step-down."""
    p = [binom.cdf(losses[scores >= t].sum(), (scores >= t).sum(), risk) if (scores >= t).any() else 1 for t in tried]
    passed = []
    for rank, place in enumerate(np.argsort(p, kind="stable")):
        if p[place] > error / (len(tried) - rank):
            break
        passed.append(tried[place])
    return min(passed, default=math.inf)


@pytest.mark.parametrize("seed", range(5))
def test_threshold_is_that_of_the_obvious_version(world, seed):
    rng = np.random.default_rng(seed)
    rows = rng.choice(len(world.columns), 200)
    probs, labels = world.probs["vanilla"][rows], world.columns[rows]
    tried = (0.99, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.0)
    rule = RiskThreshold(risk=0.15, mixture="as_sampled", candidates=tried).fit(probs, labels)
    wanted = plain_holm((probs.argmax(1) != labels), probs.max(1), tried, 0.15, 0.1)
    assert rule.result_.thresholds[0].threshold == wanted


def test_any_mixture_needs_both_groups_to_pass(world, drawn):
    probs, labels = drawn
    both = RiskThreshold(risk=0.15).fit(probs, labels, NEW).result_.thresholds[0].threshold
    new = world.new[labels]
    each = [
        RiskThreshold(risk=0.15, mixture=end).fit(probs[rows], labels[rows], NEW).result_.thresholds[0].threshold
        for end, rows in (({"old": 1, "new": 0}, ~new), ({"old": 0, "new": 1}, new))
    ]
    assert both >= max(each)  # Holm spends on both what each alone needs


def test_a_mixture_with_more_of_the_harder_group_accepts_less(drawn):
    found = [
        RiskThreshold(risk=0.15, mixture={"old": old, "new": 1 - old}).fit(*drawn, NEW).result_.thresholds[0]
        for old in (0.1, 0.5, 0.9)
    ]
    limits = [one.threshold for one in found]
    assert limits == sorted(limits)
    ends = RiskThreshold(risk=0.15, mixture=({"old": 0.1, "new": 0.9}, {"old": 0.9, "new": 0.1})).fit(*drawn, NEW)
    assert ends.result_.thresholds[0].threshold == max(limits)


def test_too_few_images_are_an_answer_that_says_where_it_begins(drawn):
    probs, labels = drawn
    right = probs.argmax(1) == labels
    sure = np.argsort(-probs.max(1) * right)
    new = np.isin(labels, NEW)
    some = np.concatenate([sure[~new[sure]][:60], sure[new[sure]][:60]])
    rule = RiskThreshold(risk=0.05, candidates=[0.0])
    for n, exists in ((44, False), (45, True)):
        rows = np.concatenate([some[:n], some[60 : 60 + n]])
        found = rule.fit(probs[rows], labels[rows], NEW).result_
        assert found.thresholds[0].begins_at == 45
        assert found.thresholds[0].exists is exists
    assert found.kind is PromiseKind.FINITE_SAMPLE
    assert DecisionVerdict.ALL_CORRECT in found.verdicts
    none = RiskThreshold(risk=0.05).fit(probs[some], labels[some], NEW).result_
    assert none.kind is PromiseKind.NONE
    assert none.verdicts[0] is DecisionVerdict.TOO_FEW_IMAGES
    assert "Smallest number, without a single error: 92 old and 92 new images." in none.message
    assert decisions.smallest_reserve(0.05) == 92


def test_too_many_errors_are_another_answer():
    probs = np.tile([0.6, 0.4], (400, 1))
    labels = np.arange(400) % 2
    hopeless = RiskThreshold(risk=0.2, mixture="as_sampled").fit(probs, labels).result_
    assert hopeless.verdicts == (DecisionVerdict.NONE_FOUND,)
    assert "Estimate at the error rate of these images: no number is enough." in hopeless.message
    labels = (np.arange(400) % 6 == 0).astype(int)  # 17 % errors: a matter of more images
    short = RiskThreshold(risk=0.2, mixture="as_sampled").fit(probs, labels).result_
    likely = short.thresholds[0].likely_begins_at
    assert likely is not None
    assert likely > 400
    many = RiskThreshold(risk=0.2, mixture="as_sampled").fit(
        np.tile([0.6, 0.4], (2 * likely, 1)), (np.arange(2 * likely) % 6 == 0).astype(int)
    )
    assert many.result_.thresholds[0].exists


def test_the_estimate_is_the_first_number_at_which_the_expected_errors_pass():
    """Not a bisection to two per cent: one image fewer would not do."""
    probs, labels = np.tile([0.6, 0.4], (120, 1)), (np.arange(120) % 6 == 0).astype(int)
    rule = RiskThreshold(risk=0.2, mixture="as_sampled", candidates=[0.5])
    likely = rule.fit(probs, labels).result_.thresholds[0].likely_begins_at
    rate = (labels.sum() + 0.5) / 120.5

    def bound(n):
        return bounds.binomial_upper(rate * n, n * (rate + (120 - labels.sum()) / 120.5), 0.1)

    assert bound(likely) <= 0.2 < bound(likely - 1)
    assert rule.fit(probs, labels).result_.thresholds[0].likely_begins_at == likely


def test_the_estimate_is_of_each_group_whatever_the_sizes_here():
    """Ten times as many old images with the same error rate need no more than before: the number is of each group."""

    def estimate(n_old, n_new):
        probs = np.concatenate([np.tile([0.5, 0.3, 0.2], (n_old, 1)), np.tile([0.2, 0.3, 0.5], (n_new, 1))])
        wrong = np.concatenate([np.arange(n_old) % 8 == 0, np.arange(n_new) % 8 == 0])
        labels = np.where(np.arange(n_old + n_new) < n_old, np.where(wrong, 1, 0), np.where(wrong, 3, 2))
        padded = np.concatenate([probs, np.zeros((len(probs), 1))], axis=1)
        return RiskThreshold(risk=0.2, candidates=[0.3]).fit(padded, labels, [2, 3]).result_.thresholds[0]

    both, more = estimate(40, 40), estimate(400, 40)
    assert both.begins_at == more.begins_at == 11
    assert 40 < more.likely_begins_at <= both.likely_begins_at < 400


def test_numbers_of_a_stratified_reserve_are_whole_classes(world):
    rows = np.concatenate([np.flatnonzero(world.columns == column)[:3] for column in range(12)])
    found = RiskThreshold(risk=0.05, design="stratified").fit(world.probs["vanilla"][rows], world.columns[rows], NEW)
    assert found.result_.steps == (8, 4)
    assert found.result_.thresholds[0].begins_at == 106
    assert found.result_.images_needed(106) == {"old": 112, "new": 108}
    assert "without a single error: 112 old and 108 new images." in found.result_.message


def test_numbers_name_the_groups_that_are_met(drawn):
    probs, labels = drawn
    new = np.isin(labels, NEW)
    only = RiskThreshold(risk=0.01, mixture={"old": 0, "new": 1}).fit(probs[new], labels[new], NEW).result_
    assert only.groups == ("new",)
    assert f"{only.thresholds[0].begins_at} new images." in only.message
    apart = (
        RiskThreshold(risk=0.01, groups="predicted", mixture={"old": 0.6, "new": 0.4}).fit(probs, labels, NEW).result_
    )
    assert apart.message.count("Smallest number") == 2
    assert len({found.begins_at for found in apart.thresholds}) == 2  # each predicted group has its own


def test_a_bound_that_passed_is_at_most_the_risk(world):
    """Holm's later steps have more of the error to spend: the bound is that of the step."""
    tried, above = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3), 0
    for seed in range(60):
        rows = np.random.default_rng(seed).choice(len(world.columns), 250)
        probs, labels = world.probs["vanilla"][rows], world.columns[rows]
        found = (
            RiskThreshold(risk=0.12, mixture="as_sampled", candidates=tried).fit(probs, labels).result_.thresholds[0]
        )
        if found.exists:
            assert found.risk_bound <= 0.12
            taken = probs.max(1) >= found.threshold
            wrong = (probs.argmax(1) != labels)[taken].sum()
            above += bounds.binomial_upper(wrong, taken.sum(), 0.1 / len(tried)) > 0.12
    assert above, "no draw in which a later step of Holm's mattered"


def test_the_first_candidate_does_not_depend_on_the_labels(world, drawn):
    """One sample of what is met: how many of it are old is part of the data that is tested."""
    probs, labels = drawn[0][:450], drawn[1][:450]
    rule = RiskThreshold(risk=0.1, mixture="as_sampled", search="sequence")
    few_new = np.where(np.arange(450) < 3, 9, labels % 8)
    tried = {rule.fit(probs, given, NEW, reference=drawn[0][450:]).result_.n_candidates for given in (labels, few_new)}
    assert len(tried) == 1


def test_ties_are_decided_in_service_as_in_calibration():
    """Quantised networks have equal probabilities: the first class is taken, whatever the number of columns."""
    probs = np.full((64, 40), 1 / 40)
    labels = np.zeros(64, int)
    for top_k in (1, 3):
        rule = RiskThreshold(risk=0.3, mixture="as_sampled", candidates=[0.0], top_k=top_k).fit(probs, labels)
        assert rule.result_.thresholds[0].errors == 0
        decided = rule.predict(probs).reshape(64, top_k)
        assert (decided == np.arange(top_k)).all()


def test_thresholds_apart_hold_for_what_is_predicted(world, drawn):
    probs, labels = drawn
    rule = RiskThreshold(risk=0.3, groups="predicted", mixture={"old": 0.6, "new": 0.4}).fit(probs, labels, NEW)
    limits = {found.group: found.threshold for found in rule.result_.thresholds}
    assert set(limits) == {"old", "new"}
    said_new = np.isin(probs.argmax(1), NEW)
    wanted = probs.max(1) >= np.where(said_new, limits["new"], limits["old"])
    assert (rule.accept(probs) == wanted).all()
    assert (rule.predict(probs) == probs.argmax(1)).all()
    for found in rule.result_.thresholds:
        assert found.risk_estimate <= found.risk_bound <= 0.3


def test_top_k_accepts_more(drawn):
    one, three = (
        RiskThreshold(risk=0.1, mixture="as_sampled", top_k=k).fit(*drawn).result_.thresholds[0] for k in (1, 3)
    )
    assert three.coverage > one.coverage
    rule = RiskThreshold(risk=0.1, mixture="as_sampled", top_k=3).fit(*drawn)
    likeliest = rule.predict(drawn[0])
    assert likeliest.shape == (len(drawn[0]), 3)
    assert (likeliest[:, 0] == drawn[0].argmax(1)).all()


def test_costs_of_one_are_errors(drawn):
    costs = 1 - np.eye(12)
    plain = RiskThreshold(risk=0.15, mixture="as_sampled").fit(*drawn)
    costly = RiskThreshold(risk=0.15, mixture="as_sampled", costs=costs).fit(*drawn)
    assert costly.result_.thresholds[0].threshold == plain.result_.thresholds[0].threshold
    twice = RiskThreshold(risk=0.3, mixture="as_sampled", costs=2 * costs).fit(*drawn)
    assert twice.result_.thresholds[0].risk_bound == pytest.approx(2 * plain.result_.thresholds[0].risk_bound)


def test_costs_that_differ_are_bounded_on_average(drawn):
    costs = 1 - np.eye(12)
    costs[8:, :8] = 5  # a new class that is taken for an old one
    rule = RiskThreshold(risk=0.6, mixture="as_sampled", costs=costs, candidates=(0.95, 0.9, 0.8)).fit(*drawn)
    found = rule.result_.thresholds[0]
    probs, labels = drawn
    expected = probs @ costs
    score, decided = 1 - expected.min(1) / 5, expected.argmin(1)
    accepted = score >= found.threshold
    assert found.exists
    assert found.risk_estimate == pytest.approx(costs[labels, decided][accepted].mean())
    assert found.risk_estimate < found.risk_bound <= 0.6
    assert (rule.accept(probs) == accepted).all()
    assert (rule.predict(probs) == decided).all()


def test_cheapest_decision_is_the_least_expected_cost():
    probs = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]])
    costs = [[0, 1, 1, 0.4], [1, 0, 1, 0.4], [1, 1, 0, 0.4]]
    assert decisions.cheapest_decision(probs, costs, classes=[7, 8, 9]).tolist() == [-1, 9]


@pytest.mark.parametrize("groups", ["pooled", "predicted"])
def test_wrapped_network_decides_as_the_rule_does(drawn, groups):
    rule = RiskThreshold(risk=0.3, groups=groups, mixture={"old": 0.6, "new": 0.4}).fit(*drawn, NEW)
    inputs = torch.from_numpy(drawn[0]).log()
    served = rule.wrap(torch.nn.Identity(), calibrated=False)
    labels, accepted = served(inputs)
    assert (labels.numpy() == rule.predict(drawn[0])).all()
    assert (accepted.numpy() == rule.accept(drawn[0])).all()
    if groups == "pooled":  # exporting once takes long enough
        return
    exported = torch.export.export(served, (inputs,), dynamic_shapes=({0: torch.export.Dim("n")},))
    again_labels, again = exported.module()(inputs[:7])
    assert torch.equal(again_labels, labels[:7])
    assert torch.equal(again, accepted[:7])


def test_wrap_refuses_a_model_that_has_a_rule(drawn):
    rule = ModelBasedThreshold(risk=0.1, groups="predicted").fit(drawn[0], NEW)
    once = rule.wrap(torch.nn.Identity(), calibrated=False)
    with pytest.raises(ValueError, match="model: got a model that has a decision rule already"):
        rule.wrap(once, calibrated=False)


def test_wrap_refuses_a_calibrated_model_of_other_classes(drawn):
    rule = ModelBasedThreshold(risk=0.1, groups="predicted").fit(drawn[0], NEW)
    logits, labels = torch.from_numpy(drawn[0]).log(), torch.from_numpy(drawn[1])
    turned = tuple(reversed(rule.classes_))
    calibrated = [
        tcil.TemperatureScaling().fit(logits, torch.tensor(names)[labels], classes=names).wrap(torch.nn.Identity())
        for names in (rule.classes_, turned)
    ]
    rule.wrap(calibrated[0])
    with pytest.raises(ValueError, match=r"^model: got a calibrated model of the classes \[11, 10.*classes=calibrator"):
        rule.wrap(calibrated[1])
    with pytest.warns(tcil.CalibrationWarning, match="not wrapped") as caught:
        rule.wrap(torch.nn.Identity())
    assert caught[0].filename == __file__


def test_rules_are_read_back_as_they_were(drawn, tmp_path):
    rules = [
        RiskThreshold(risk=0.3, groups="predicted", mixture={"old": 0.6, "new": 0.4}).fit(*drawn, NEW),
        RiskThreshold(risk=0.01, mixture="as_sampled").fit(drawn[0][:20], drawn[1][:20]),  # infinity inside
        RiskThreshold(risk=0.6, mixture="as_sampled", costs=(1 - np.eye(12)) * 2).fit(*drawn),
        ModelBasedThreshold(risk=0.1, groups="predicted").fit(drawn[0], NEW),
    ]
    for number, rule in enumerate(rules):
        path = rule.save(tmp_path / f"{number}.json")
        again = decisions.load(path)
        assert type(again) is type(rule)
        assert again.result_ == rule.result_
        assert again.get_params() == rule.get_params()
        assert (again.accept(drawn[0]) == rule.accept(drawn[0])).all()
    with pytest.raises(ValueError, match="a saved ModelBasedThreshold"):
        ModelBasedThreshold.load(tmp_path / "0.json")
    text = (tmp_path / "0.json").read_text()
    (tmp_path / "0.json").write_text(text.replace('"risk": 0.3', '"risk": 0.2', 1))
    with pytest.raises(ValueError, match="damaged"):
        decisions.load(tmp_path / "0.json")
    (tmp_path / "not.json").write_text(json.dumps({"format": "tcil-calibrator"}))
    with pytest.raises(ValueError, match="decision rule"):
        decisions.load(tmp_path / "not.json")


def test_options_by_name(drawn):
    rule = RiskThreshold(risk=0.1)
    assert repr(rule) == "RiskThreshold(risk=0.1)"
    assert rule.clone().risk == 0.1
    assert rule.set_params(confidence=0.95).confidence == 0.95
    with pytest.raises(ValueError, match="confidence"):
        rule.set_params(confidence=1.5)
    rule.risk = 2.0  # assigned behind the constructor's back
    with pytest.raises(ValueError, match="risk"):
        rule.fit(*drawn, NEW)


# What the probabilities claim --------------------------------------------------------------------------------


def test_claimed_risk_is_the_mean_doubt_of_what_is_accepted(drawn):
    probs = drawn[0]
    found = ModelBasedThreshold(risk=0.1).fit(probs).result_.thresholds[0]
    accepted = probs.max(1) >= found.threshold
    assert found.claimed_risk == pytest.approx((1 - probs.max(1))[accepted].mean())
    assert found.claimed_risk <= 0.1
    lower = np.sort(probs.max(1)[~accepted])[-1]
    assert (1 - probs.max(1))[probs.max(1) >= lower].mean() > 0.1
    assert found.gamma == pytest.approx(0.1 - found.claimed_risk)
    coverages = [step.coverage for step in found.curve]
    assert coverages == sorted(coverages, reverse=True)
    assert found.curve[0].threshold == found.threshold
    assert found.curve[-1].coverage == 0.0  # no threshold allows for a bias as large as the risk


def test_a_bias_within_gamma_keeps_the_risk(world):
    """The sensitivity curve at the true bias of the accepted images keeps the risk; at none, it need not."""
    probs, columns = world.probs["vanilla"], world.columns
    wrong = probs.argmax(1) != columns
    tempered = probs**4 / (probs**4).sum(1, keepdims=True)  # over-confident
    gammas = tuple(np.linspace(0, 0.09, 20))
    found = ModelBasedThreshold(risk=0.1, gammas=gammas).fit(tempered).result_.thresholds[0]
    broken = 0
    for step in found.curve:
        accepted = tempered.max(1) >= step.threshold
        if not accepted.any():
            continue
        bias = wrong[accepted].mean() - (1 - tempered.max(1))[accepted].mean()
        risk = wrong[accepted].mean()
        assert risk <= 0.1 + 1e-9 or bias > step.gamma
        broken += risk > 0.1
    assert broken, "the over-confident version must break the claim somewhere"


def test_claims_apart_for_predicted_groups(drawn):
    rule = ModelBasedThreshold(risk=0.1, groups="predicted").fit(drawn[0], NEW)
    said_new = np.isin(drawn[0].argmax(1), NEW)
    for found, rows in zip(rule.result_.thresholds, (~said_new, said_new), strict=True):
        alone = ModelBasedThreshold(risk=0.1).fit(drawn[0][rows]).result_.thresholds[0]
        assert (found.threshold, found.coverage, found.n) == (alone.threshold, alone.coverage, alone.n)
    assert "points over-confident" in rule.result_.message
    assert rule.result_.kind is PromiseKind.MODEL_BASED


def test_a_rule_of_the_users_own_is_loaded_as_itself(tmp_path):
    class MyOwnThreshold(decisions.RiskThreshold):
        pass

    probs, labels = [[0.9, 0.1]] * 100, [0] * 97 + [1] * 3
    path = MyOwnThreshold(risk=0.2, mixture="as_sampled").fit(probs, labels).save(tmp_path / "rule.json")
    assert type(decisions.load(path)) is type(MyOwnThreshold.load(path)) is MyOwnThreshold
    del DecisionRule._known["MyOwnThreshold"]


def test_one_sample_of_all_images_is_counted_as_one():
    """50 images of each group are 100 of one sample: enough to begin, but with errors."""
    probs = np.full((100, 12), 0.01)
    labels = np.arange(100) % 12
    probs[np.arange(100), (labels + np.where(np.arange(100) % 3 == 0, 1, 0)) % 12] = 0.89
    rule = RiskThreshold(risk=0.03, mixture="as_sampled", candidates=[0.5])
    for groups in ({}, {"new_classes": range(6, 12)}):
        (found,) = rule.fit(probs, labels, **groups).result_.thresholds
        assert 50 < found.begins_at <= 100
        assert found.verdict is DecisionVerdict.NONE_FOUND
