"""Rules after a first task, in which all classes are new: there is one group, and nothing is missing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tcil import decisions
from tcil.decisions import ConformalSets, ModelBasedThreshold, RiskThreshold

ALL_NEW = range(12)


@pytest.mark.parametrize("design", ["independent", "stratified"])
@pytest.mark.parametrize("groups", ["pooled", "predicted"])
def test_a_promise_is_that_of_new_images_alone(drawn, groups, design, tmp_path):
    probs, labels = drawn
    if design == "stratified":
        rows = np.concatenate([np.flatnonzero(labels == label)[:15] for label in ALL_NEW])
        probs, labels = probs[rows], labels[rows]
    mixture = {"old": 0.7, "new": 0.3} if groups == "predicted" else None
    rule = RiskThreshold(risk=0.3, groups=groups, mixture=mixture, design=design).fit(probs, labels, ALL_NEW)
    alone = RiskThreshold(risk=0.3, mixture={"old": 0.0, "new": 1.0}, design=design).fit(probs, labels, ALL_NEW)
    (found,), (expected,) = rule.result_.thresholds, alone.result_.thresholds
    assert found.group == ("new" if groups == "predicted" else "all")
    assert replace(found, group="all") == expected
    assert found.exists
    assert (rule.result_.n_old, rule.result_.groups) == (0, ("new",))
    assert "all classes are new" in " ".join(rule.result_.assumptions)
    rule.save(tmp_path / "rule.json")
    assert np.array_equal(decisions.load(tmp_path / "rule.json").accept(probs), rule.accept(probs))
    assert rule.accept(probs).any()


def test_a_mixture_without_new_images_is_refused(drawn):
    with pytest.raises(ValueError, match="mixture: got 100 % old and 0 % new images; expected a share of new images"):
        RiskThreshold(risk=0.3, mixture={"old": 1.0, "new": 0.0}).fit(*drawn, ALL_NEW)


def test_claims_are_of_one_group(drawn):
    probs, _ = drawn
    rule = ModelBasedThreshold(risk=0.3, groups="predicted").fit(probs, ALL_NEW)
    pooled = ModelBasedThreshold(risk=0.3).fit(probs)
    (found,), (expected,) = rule.result_.thresholds, pooled.result_.thresholds
    assert found == replace(expected, group="new")
    assert "predicted as old" not in rule.result_.message


def test_sets_are_those_of_new_classes(drawn, tmp_path):
    probs, labels = drawn
    sets = ConformalSets(alpha=0.1).fit(probs[:200], labels[:200], ALL_NEW)
    assert [found.group for found in sets.result_.thresholds] == ["new"]
    marginal = ConformalSets(alpha=0.1, by="marginal").fit(probs[:200], labels[:200])
    assert np.array_equal(sets.predict(probs[200:]), marginal.predict(probs[200:]))
    sets.save(tmp_path / "sets.json")
    assert np.array_equal(decisions.load(tmp_path / "sets.json").predict(probs), sets.predict(probs))


def test_old_classes_without_images_are_missing_still(drawn):
    probs, labels = drawn
    own = labels >= 8
    with pytest.raises(ValueError, match=r"no image of an old class.* mixture='as_sampled'"):
        RiskThreshold(risk=0.3).fit(probs[own], labels[own], range(8, 12))
    with pytest.raises(ValueError, match="no image of the group old"):
        ConformalSets(alpha=0.1).fit(probs[own], labels[own], range(8, 12))


@pytest.mark.parametrize("allow_empty", [False, True])
@pytest.mark.parametrize("score", ["lac", "aps", "raps"])
def test_a_set_of_an_image_of_which_nothing_is_known_has_all_classes(drawn, score, allow_empty):
    probs, labels = drawn
    sets = ConformalSets(alpha=0.1, by="marginal", score=score, allow_empty=allow_empty).fit(probs, labels)
    head = sets.wrap(torch.nn.Identity(), calibrated=False).eval()
    rows = torch.tensor(probs[:3]).log()
    rows[1] = torch.nan
    found = head(rows)
    assert found[1].all()
    assert torch.equal(found[[0, 2]], torch.tensor(sets.predict(probs[[0, 2]])))
