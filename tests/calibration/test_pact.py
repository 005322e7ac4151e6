"""PACT: its three pieces of evidence on data for which the truth is known, its map, and its memory of earlier tasks."""

from __future__ import annotations

import json
import math
import re
import warnings
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import nn

import tcil
from tcil.calibration.calibrators.maps import PriorAdjustedMap
from tcil.calibration.calibrators.pact import PACTConstants, PACTFilter
from tcil.calibration.calibrators.pact.constants import MEASURED
from tcil.calibration.calibrators.pact.evidence import (
    balanced_likelihood,
    joint_fit,
    label_shift,
    laplace,
    surrogate,
    temperature_with_error,
)
from tcil.calibration.calibrators.pact.filter import Belief, BiasBelief
from tcil.calibration.exemplars import LogitSpread, centred_squares, open_exemplars
from tcil.foundation.options import Verdict

K, OLD, DIMENSIONS, OVERCONFIDENCE = 6, 4, 8, 2.5
NEW = range(OLD, K)


class World:
    """Gaussian classes, and a network that is the exact posterior under unbalanced training, times 2.5."""

    def __init__(self, imbalance: float, seed: int = 0, separation: float = 0.8) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.centres = separation * torch.randn(K, DIMENSIONS, generator=self.generator)
        prior = torch.zeros(K)
        prior[OLD:] = math.log(imbalance)
        self.model = nn.Linear(DIMENSIONS, K)
        with torch.no_grad():
            self.model.weight.copy_(OVERCONFIDENCE * self.centres)
            self.model.bias.copy_(OVERCONFIDENCE * (prior - self.centres.square().sum(dim=1) / 2))

    def draw(self, labels, noise=1.0):
        return self.centres[labels] + noise * torch.randn(len(labels), DIMENSIONS, generator=self.generator), labels

    def memory(self):
        """Exemplars lie nearer to their class's centre than unseen images do: the network knows them by heart."""
        return self.draw(torch.arange(120) % K, noise=0.3)

    def logits(self, labels):
        with torch.no_grad():
            x, y = self.draw(labels)
            return self.model(x), y


def new_labels(n):
    return OLD + torch.arange(n) % (K - OLD)


MEMO = {"calibrator": "PACT", "log_temperature": [0.7, 0.01], "bias": [0.9, 0.02], "log_imbalance": 2.0, "model": ""}
TARGET = tcil.fit_temperature([[1.0, 0.0], [0.0, 1.0], [0.4, 0.0]], [0, 1, 1])
IS_NEW = torch.tensor([column in NEW for column in range(K)])


class TestEvidence:
    @pytest.mark.parametrize("imbalance", [1.0, 5.0, 20.0])
    def test_label_shift_finds_the_prior(self, imbalance):
        """At the true temperature, from images of new classes alone."""
        found = label_shift(*World(imbalance).logits(new_labels(20000)), IS_NEW, math.log(OVERCONFIDENCE))
        assert found is not None
        # The network's logits carry 2.5 log(imbalance), so that after dividing by T the prior itself is left.
        assert found[0] == pytest.approx(math.log(imbalance), abs=0.3)
        assert 0 < found[2] < 0.25

    @pytest.mark.parametrize("separation", [0.4, 0.6, 0.8])
    def test_label_shift_error_covers_the_truth(self, separation):
        """Over 200 draws of 100 images at the true temperature, within two errors in most."""
        world = World(20.0, separation=separation)
        inside = []
        for _ in range(200):
            if found := label_shift(*world.logits(new_labels(100)), IS_NEW, math.log(OVERCONFIDENCE)):
                inside.append(abs(found[0] - math.log(20.0)) < 2 * math.hypot(found[2], MEASURED.label_shift_error))
        assert len(inside) > 100
        assert np.mean(inside) > 0.85

    def test_label_shift_counts_classes_equally(self):
        """Ten times as many images of one class change nothing."""
        logits, labels = World(10.0).logits(new_labels(400))
        more = torch.cat([torch.arange(400), (labels == OLD).nonzero().squeeze(1).repeat(9)])
        even, uneven = (label_shift(logits[r], labels[r], IS_NEW, 0.9) for r in (torch.arange(400), more))
        assert even is not None
        assert uneven is not None
        assert uneven[0] == pytest.approx(even[0], abs=1e-9)

    def test_label_shift_is_left_out_where_it_rests_on_little(self):
        logits, labels = World(10.0).logits(new_labels(60))
        assert label_shift(logits[:4], labels[:4], IS_NEW, 0.9) is None
        one = labels == OLD
        assert label_shift(logits[one], labels[one], IS_NEW, 0.9) is None  # a new class without an image

    def test_label_shift_is_unsure_where_one_image_makes_up_the_mean(self):
        logits, labels = World(10.0).logits(new_labels(60))
        logits[0, 0] += 200.0
        found = label_shift(logits, labels, IS_NEW, 0.9)
        assert found is not None
        assert found[2] > 0.9

    def test_label_shift_slope_is_the_derivative(self):
        rows = World(10.0).logits(new_labels(300))
        step = 1e-5
        low, middle, high = (label_shift(*rows, IS_NEW, 0.8 + sign * step) for sign in (-1, 0, 1))
        assert middle[1] == pytest.approx((high[0] - low[0]) / (2 * step), rel=1e-4)

    def test_new_classes_find_the_temperature_whatever_the_imbalance(self):
        for imbalance in (1.0, 20.0):
            logits, labels = World(imbalance).logits(new_labels(20000))
            found = temperature_with_error(logits[:, OLD:], labels - OLD)
            assert found is not None
            assert math.exp(found[0]) == pytest.approx(OVERCONFIDENCE, rel=0.05)

    def test_standard_errors_are_those_of_repetition(self):
        """Over 300 draws of 200 images, the estimates spread as much as their own standard errors say."""
        world = World(10.0)
        sets = [world.logits(new_labels(200)) for _ in range(300)]
        found = [temperature_with_error(z[:, OLD:], y - OLD) for z, y in sets]
        estimates = np.array([one for one in found if one is not None])
        assert len(estimates) == 300
        assert np.std(estimates[:, 0]) == pytest.approx(np.mean(estimates[:, 1]), rel=0.2)

    def test_temperature_says_when_there_is_nothing(self):
        assert (
            temperature_with_error(torch.tensor([[2.0, 1.0, -4.0]]), torch.tensor([1])) is None
        )  # one row has no error
        assert temperature_with_error(torch.tensor([[2.0, 1.0, -4.0]] * 6), torch.tensor([1] * 6)) is None
        assert temperature_with_error(torch.randn(10, 1), torch.zeros(10, dtype=torch.long)) is None
        assert temperature_with_error(5 * torch.eye(2).repeat(5, 1), torch.arange(10) % 2) is None  # all right

    def test_a_likelihood_as_one_observation_has_its_mode(self):
        """Combined with what is known, it lies where likelihood and prior together are highest."""
        logits, labels = World(10.0).logits(new_labels(60))
        z, y = logits[:, OLD:], labels - OLD
        for mean, variance in ((0.0, 1.0), (0.4, 0.02), (2.0, 0.3)):
            value, error = laplace(z, y, mean, variance)
            combined = (mean / variance + value / error**2) / (1 / variance + 1 / error**2)

            def loss(x, mean=mean, variance=variance):
                nll = nn.functional.cross_entropy(z.double() * math.exp(-x[0]), y, reduction="sum")
                return float(nll) + (x[0] - mean) ** 2 / (2 * variance)

            best = minimize(loss, [0.5], method="Nelder-Mead", options={"xatol": 1e-7, "fatol": 1e-10}).x[0]
            assert combined == pytest.approx(best, abs=1e-4)
        alone = temperature_with_error(z, y)
        wide = laplace(z, y, 0.0, 1e6)
        assert wide == pytest.approx(alone, rel=0.2)

    def test_few_images_that_are_all_right_do_not_say_that_t_is_zero(self):
        z, y = 2 * torch.eye(2).repeat(5, 1), torch.arange(10) % 2
        assert temperature_with_error(z, y) is None
        value, error = laplace(z, y, 0.5, 0.04)
        combined = (0.5 / 0.04 + value / error**2) / (1 / 0.04 + 1 / error**2)
        assert 0.2 < combined < 0.5
        assert error > 0.3

    def test_joint_fit_variances_are_those_of_repetition(self):
        world = World(8.0)
        found = [
            joint_fit(world.logits(new_labels(200)), world.logits(torch.arange(240) % OLD), IS_NEW) for _ in range(200)
        ]
        estimates = np.array([(t, b, *variances) for t, b, variances in found])
        assert np.var(estimates[:, 0]) == pytest.approx(np.mean(estimates[:, 2]), rel=0.4)
        assert np.var(estimates[:, 1]) == pytest.approx(np.mean(estimates[:, 3]), rel=0.4)

    def test_joint_fit_is_the_minimum(self):
        world = World(8.0)
        new, old = world.logits(new_labels(100)), world.logits(torch.arange(120) % OLD)
        found = joint_fit(new, old, IS_NEW)
        assert found is not None
        z, y = torch.cat([new[0], old[0]]).double(), torch.cat([new[1], old[1]])
        weight = torch.cat([torch.full((100,), 2 / 100), torch.full((120,), 4 / 120)]).double()

        def loss(point):
            log_p = torch.log_softmax(z * math.exp(-point[0]) + point[1] * (~IS_NEW).double(), dim=1)
            return float(-(weight * log_p.gather(1, y[:, None]).squeeze(1)).sum())

        best = minimize(loss, [0.5, 0.5], method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-12}).x
        assert found[:2] == pytest.approx(tuple(best), abs=1e-5)
        assert math.exp(found[0]) == pytest.approx(OVERCONFIDENCE, rel=0.35)
        assert found[1] == pytest.approx(math.log(8.0), abs=0.8)

    def test_joint_fit_without_a_minimum(self):
        right = 9 * torch.eye(K)
        assert joint_fit((right[OLD:], torch.arange(OLD, K)), (right[:OLD], torch.arange(OLD)), IS_NEW) is None
        wrong = torch.roll(right, 1, dims=1)
        assert joint_fit((wrong[OLD:], torch.arange(OLD, K)), (wrong[:OLD], torch.arange(OLD)), IS_NEW) is None


class TestFit:
    def fitted(self, imbalance, world=None, **options):
        world = world or World(imbalance)
        memory = world.memory()
        return world, tcil.PACT(**options).fit(
            world.model, memory, world.draw(new_labels(500)), NEW, imbalance=imbalance
        )

    def test_an_unbalanced_network_becomes_honest_in_both_groups(self):
        world, pact = self.fitted(20.0)
        logits, labels = world.logits(torch.arange(12000) % K)
        result = pact.result_
        assert abs(math.log(result.temperature / OVERCONFIDENCE)) < 3 * result.log_temperature_error
        assert abs(result.bias - math.log(20.0)) < 3 * result.bias_error

        def errors(probs):
            groups = tcil.metrics.predicted_groups(probs, NEW)
            score = tcil.metrics.expected_calibration_error(probs, labels, groups=groups)
            return [float(score), score.by_group["old"], score.by_group["new"]]

        ours = errors(pact.predict_proba(logits))
        oracle = errors(tcil.TemperatureScaling().fit(logits, labels).predict_proba(logits))
        assert max(ours) < 0.08
        assert oracle[2] > 0.06  # what one temperature cannot do, even if it knows the test set
        assert ours[0] <= oracle[0] + 0.02

    def test_where_the_learner_balances_by_itself_the_bias_is_small(self):
        """The counts say 20, the network's logits hold no prior."""
        world = World(1.0)
        memory = world.memory()
        pact = tcil.PACT().fit(world.model, memory, world.draw(new_labels(500)), NEW, imbalance=20.0)
        assert abs(pact.bias_) < 0.3 * math.log(20.0)

    def test_a_network_that_favours_new_classes_more_than_the_counts_say(self):
        """The counts say 1, the network's logits hold a prior of 20: the evidence overrules the counts."""
        world = World(20.0)
        pact = tcil.PACT().fit(world.model, world.memory(), world.draw(new_labels(500)), NEW, imbalance=1.0)
        assert pact.bias_ > 0.35  # from one task; the next ones go on

    def test_first_task_is_temperature_scaling(self):
        world = World(1.0)
        valid = world.draw(torch.arange(300) % K)
        pact = tcil.PACT().fit(world.model, world.memory(), valid, range(K))
        with torch.no_grad():
            ts = tcil.TemperatureScaling().fit(world.model(valid[0]), valid[1])
        spread, new = pact.result_.evidence
        assert (spread.source, new.source) == ("spread", "new classes")
        assert new.log_temperature == pytest.approx(math.log(ts.temperature_), abs=0.02)
        assert pact.temperature_ == pytest.approx(ts.temperature_, rel=0.06)  # the spread says 29 % more
        assert pact.result_.bias == 0.0

    def test_one_new_class(self):
        """Among one class there is no temperature; the other pieces are left."""
        world = World(6.0)
        memory = world.memory()
        pact = tcil.PACT().fit(world.model, memory, world.draw(torch.full((80,), 5)), [5], imbalance=6.0)
        assert [piece.source for piece in pact.result_.evidence] == ["spread", "surrogate", "label shift"]
        assert pact.temperature_ > 1
        assert pact.result_.verdicts == (Verdict.OK,)

    def test_the_filter_by_hand(self):
        """Every piece enters once, with its sampling error and its constant; that of T widens label shift's."""
        world = World(6.0)
        evidence = tcil.TCIL().evidence(world.model, world.memory(), world.draw(new_labels(80)), NEW)
        state = PACTFilter.of(MEMO, 2.5, TARGET)
        state.weigh(evidence)

        def combined(*pairs):
            precision = sum(1 / error**2 for _, error in pairs)
            return sum(value / error**2 for value, error in pairs) / precision, precision**-0.5

        t, t_error, b, b_error = surrogate(evidence)
        log_t = combined(
            (0.7, math.hypot(0.1, MEASURED.temperature_drift)),
            (t, math.hypot(t_error, MEASURED.surrogate_temperature_error)),
        )
        seen = laplace(
            evidence.valid[0][:, OLD:], evidence.valid[1] - OLD, log_t[0], log_t[1] ** 2 + MEASURED.new_class_error**2
        )
        log_t = combined(log_t, (seen[0], math.hypot(seen[1], MEASURED.new_class_error)))
        assert (state.log_t.mean, math.sqrt(state.log_t.variance)) == pytest.approx(log_t)
        value, slope, error = label_shift(*evidence.valid, IS_NEW, log_t[0])
        prior = 0.9 + 0.25, math.hypot(math.sqrt(0.02), MEASURED.bias_drift)
        shift = value, math.hypot(error, MEASURED.label_shift_error, slope * log_t[1])
        # Nothing is known of the offset, so that it widens the surrogate's error.
        offset = math.hypot(MEASURED.surrogate_offset, MEASURED.offset_drift)
        bias = combined(prior, (b, math.hypot(b_error, MEASURED.surrogate_bias_error, offset)), shift)
        assert (state.bias.mean, math.sqrt(state.bias.variance)) == pytest.approx(bias)

    def test_without_a_magnitude_there_is_nosurrogate(self):
        world = World(6.0)
        evidence = tcil.TCIL().evidence(world.model, world.memory(), world.draw(new_labels(80)), NEW)
        assert surrogate(evidence) is not None
        assert surrogate(replace(evidence, result=replace(evidence.result, reachable=False))) is None

    def test_how_the_search_ended_does_not_matter_where_other_evidence_is(self):
        """Exemplars as hard as validation images: T-CIL has no magnitude, PACT has the other pieces."""
        world = World(6.0)
        memory, valid = world.draw(torch.arange(240) % K, noise=1.5), world.draw(new_labels(200))
        with pytest.warns(tcil.CalibrationWarning, match="at or above the target"):
            assert Verdict.TARGET_BELOW_RANGE in tcil.TCIL().fit(world.model, memory, valid, NEW).result_.verdicts
        with pytest.warns(tcil.CalibrationWarning, match="is the validation set held out of training"):
            pact = tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=6.0)
        assert [piece.source for piece in pact.result_.evidence] == ["spread", "new classes", "label shift"]
        assert pact.result_.verdicts == (Verdict.TARGET_BELOW_RANGE,)  # it may hint at validation data in training

    def test_a_magnitude_out_of_range_does_not_matter(self):
        """The validation set is warmer than exemplars can be made: T-CIL says so, PACT has the other pieces."""
        world = World(6.0)
        evidence = tcil.TCIL().evidence(world.model, world.memory(), world.draw(new_labels(80)), NEW)
        verdicts = (Verdict.TARGET_ABOVE_RANGE, Verdict.SINGLE_EXEMPLAR)
        result = replace(evidence.result, reachable=False, verdicts=verdicts)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tcil.TCIL, "evidence", lambda *args, **kwargs: replace(evidence, result=result))
            pact = tcil.PACT().fit(world.model, world.memory(), world.draw(new_labels(80)), NEW, imbalance=6.0)
        assert pact.result_.verdicts == (Verdict.SINGLE_EXEMPLAR,)
        assert "surrogate" not in [piece.source for piece in pact.result_.evidence]

    def test_an_imbalance_that_looks_inverted(self):
        world = World(6.0)
        memory, valid = world.memory(), world.draw(new_labels(80))
        with pytest.warns(tcil.CalibrationWarning, match="the wrong way round"):
            pact = tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=torch.tensor(1 / 6))
        assert pact.result_.verdicts == (Verdict.IMBALANCE_BELOW_ONE,)

    def test_the_threshold_of_the_wrong_way_round_is_documented(self):
        world = World(1.0)
        memory, valid = world.memory(), world.draw(new_labels(200))
        at = tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=0.5)
        assert Verdict.IMBALANCE_BELOW_ONE not in at.result_.verdicts
        with pytest.warns(tcil.CalibrationWarning, match="more than twice as many training images"):
            below = tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=0.49)
        assert Verdict.IMBALANCE_BELOW_ONE in below.result_.verdicts
        pages = Path(__file__).parents[2] / "docs"
        (row,) = re.findall(r"\| `imbalance_below_one` .*", (pages / "start" / "troubleshooting.md").read_text())
        assert "below 0.5" in row

    def test_label_shift_leaves_the_temperature_alone(self):
        """Where classes hardly overlap its mean misses the tail: that must not become a temperature."""
        for separation in (0.8, 1.6):
            world = World(6.0, separation=separation)
            evidence = tcil.TCIL().evidence(world.model, world.memory(), world.draw(new_labels(80)), NEW)
            states = [PACTFilter.of(MEMO, 2.5, TARGET) for _ in range(2)]
            states[0].weigh(evidence)
            states[1].surrogate(evidence)
            states[1].new_classes(evidence)
            assert states[0].log_t == states[1].log_t
            assert separation == 1.6 or states[0].bias != states[1].bias

    def test_a_class_without_validation_images_does_not_move_the_bias(self):
        """Ten new classes, two of them in the validation set: the others still count as new. (Counted by those that
        are there, it would be 2.6.)"""
        generator = torch.Generator().manual_seed(0)
        centres, n_old, n = torch.randn(12, 8, generator=generator), 2, 12
        is_new = torch.arange(n) >= n_old
        found = []
        for _ in range(20):

            def logits(y):
                x = centres[y] + torch.randn(len(y), 8, generator=generator)
                return x @ centres.T - centres.square().sum(1) / 2 + math.log(5.0) * is_new, y

            fit = joint_fit(logits(n_old + torch.arange(200) % 2), logits(torch.arange(200) % n_old), is_new)
            found.append(fit[1])
        assert np.mean(found) == pytest.approx(math.log(5.0), abs=0.8)

    def test_nothing_identified(self):
        """A validation set that is all right and memory that is all right: T stays 1, and it says so."""
        model = nn.Linear(K, K)
        with torch.no_grad():
            model.weight.copy_(30 * torch.eye(K))
            model.bias.zero_()
        every = torch.eye(K), torch.arange(K)
        valid = torch.eye(K)[OLD:].repeat(3, 1), torch.arange(OLD, K).repeat(3)
        with pytest.warns(tcil.CalibrationWarning, match="no temperature"):
            pact = tcil.PACT().fit(model, every, valid, NEW, imbalance=4.0)
        assert (pact.temperature_, pact.bias_) == (1.0, 0.0)
        assert Verdict.DEGENERATE_VALID in pact.result_.verdicts
        assert pact.history_ is None

    def test_a_piece_that_says_less_than_the_prior_is_none(self):
        """All right by a margin of 12: nearly any T does, and it says so instead of taking half the imbalance."""
        model = nn.Linear(K, K)
        with torch.no_grad():
            model.weight.copy_(12 * torch.eye(K))
            model.bias.zero_()
        memory = torch.eye(K).repeat(2, 1), torch.arange(K).repeat(2)
        valid = torch.eye(K)[OLD:].repeat(3, 1), torch.arange(OLD, K).repeat(3)
        with pytest.warns(tcil.CalibrationWarning, match="no temperature"):
            pact = tcil.PACT().fit(model, memory, valid, NEW, imbalance=20.0)
        assert (pact.temperature_, pact.bias_, pact.result_.evidence) == (1.0, 0.0, ())

    def test_nothing_identified_is_not_ok(self):
        world = World(6.0)
        with pytest.warns(tcil.CalibrationWarning, match="no temperature"):
            pact = tcil.PACT().fit(world.model, world.memory(), world.draw(torch.full((4,), 5)), [5], imbalance=6.0)
        assert Verdict.NOT_IDENTIFIED in pact.result_.verdicts
        assert pact.temperature_ == 1.0

    def test_only_what_is_remembered(self):
        """The same with history: its temperature is used, and the verdict says so."""
        model = nn.Linear(K, K)
        with torch.no_grad():
            model.weight.copy_(30 * torch.eye(K))
            model.bias.zero_()
        valid = torch.eye(K)[OLD:].repeat(3, 1), torch.arange(OLD, K).repeat(3)
        pact = tcil.PACT().fit(
            model, (torch.eye(K).repeat(2, 1), torch.arange(K).repeat(2)), valid, NEW, imbalance=4.0, history=MEMO
        )
        assert pact.temperature_ == pytest.approx(math.exp(0.7), rel=0.25)
        assert pact.result_.verdicts == (Verdict.REMEMBERED,)
        assert [piece.source for piece in pact.result_.evidence] == ["history", "label shift"]
        shift = pact.result_.evidence[1]
        assert shift.bias_error > 1  # classes do not overlap at all: it says next to nothing
        assert pact.bias_ < 3

    @pytest.mark.parametrize("n", [1, 2, 3, 6])
    @pytest.mark.filterwarnings("ignore::tcil.CalibrationWarning")
    def test_tiny_validation_sets_give_finite_answers(self, n):
        for seed in range(3):
            world = World(10.0, seed)
            pact = tcil.PACT().fit(world.model, world.memory(), world.draw(new_labels(n)), NEW, imbalance=10.0)
            assert 0.2 < pact.temperature_ < 20
            assert abs(pact.bias_) < 6

    def test_labels_in_another_order(self):
        """The same with classes= permuted, and with a wide head by columns=."""
        world = World(20.0)
        memory, valid = world.memory(), world.draw(new_labels(200))
        plain = tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=20.0)
        names = torch.tensor([14, 3, 8, 21, 5, 9])
        renamed = tcil.PACT().fit(
            world.model, (memory[0], names[memory[1]]), (valid[0], names[valid[1]]), names[OLD:].tolist(),
            imbalance=np.float32(20.0), classes=names.tolist(),
        )  # fmt: skip
        wide = nn.Linear(DIMENSIONS, 25)
        with torch.no_grad():
            wide.weight[names], wide.bias[names] = world.model.weight, world.model.bias
        by_column = tcil.PACT().fit(
            wide, (memory[0], names[memory[1]]), (valid[0], names[valid[1]]), names[OLD:].tolist(),
            imbalance=20.0, columns=names.tolist(),
        )  # fmt: skip
        for other in (renamed, by_column):
            assert other.temperature_ == pytest.approx(plain.temperature_, rel=1e-4)
            assert other.bias_ == pytest.approx(plain.bias_, rel=1e-3)

    def test_predictions_stay_or_move(self):
        world, kept = self.fitted(20.0)
        _, moved = self.fitted(20.0, World(20.0), keep_predictions=False)
        logits, labels = world.logits(torch.arange(3000) % K)
        stay, move = kept.predict_proba(logits), moved.predict_proba(logits)
        assert torch.equal(stay.argmax(dim=1), logits.argmax(dim=1))
        assert (move.argmax(dim=1) == labels).double().mean() > (stay.argmax(dim=1) == labels).double().mean() + 0.02

    def test_the_imbalance_as_presentations_of_each_class(self):
        """The same as their ratio, by label and in the order of the columns, also where labels are others."""
        world = World(20.0)
        memory, valid = world.memory(), world.draw(new_labels(200))
        counts = torch.tensor([8.0, 12.0, 10.0, 10.0, 150.0, 250.0])  # means of 10 and 200
        plain = tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=20.0).result_
        forms = [dict(enumerate(counts.tolist())), counts, counts.numpy(), counts.tolist(), counts.long()]
        for form in forms:
            assert tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=form).result_ == plain
        names = torch.tensor([14, 3, 8, 21, 5, 9])
        for form in (dict(zip(names.tolist(), counts.tolist(), strict=True)), counts):
            renamed = tcil.PACT().fit(
                world.model, (memory[0], names[memory[1]]), (valid[0], names[valid[1]]), names[OLD:].tolist(),
                imbalance=form, classes=names.tolist(),
            )  # fmt: skip
            assert renamed.result_ == plain

    def test_presentations_at_the_first_task(self):
        world = World(1.0)
        memory, valid = world.memory(), world.draw(torch.arange(300) % K)
        found = tcil.PACT().fit(world.model, memory, valid, range(K), imbalance=[10, 20, 30, 40, 50, 60]).result_
        assert found == tcil.PACT().fit(world.model, memory, valid, range(K)).result_

    def test_constants_of_ones_own(self, tmp_path):
        """A piece that is trusted less moves the answer less; they are stored."""
        world = World(20.0)
        memory, valid = world.memory(), world.draw(new_labels(200))
        usual = tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=20.0)
        own = tcil.PACT(constants=PACTConstants(label_shift_error=5.0)).fit(
            world.model, memory, valid, NEW, imbalance=20.0
        )
        shift = next(piece for piece in own.result_.evidence if piece.source == "label shift")
        assert shift.bias_error > 5.0
        assert own.temperature_ == usual.temperature_
        assert own.result_.bias_error > usual.result_.bias_error
        again = tcil.load(own.save(tmp_path / "pact.json"))
        assert again.constants == own.constants != usual.constants
        assert tcil.load(usual.save(tmp_path / "usual.json")).constants == MEASURED


class TestReserve:
    def drawn(self, each, imbalance=20.0):
        world = World(imbalance)
        return world, world.memory(), world.draw(new_labels(200)), world.draw(torch.arange(each * OLD) % OLD)

    def test_the_mode_is_that_of_likelihood_and_prior(self):
        world = World(8.0)
        valid, reserve = world.logits(new_labels(100)), world.logits(torch.arange(8) % OLD)  # 50 and 2 a class
        mean, variance = (0.5, 1.0), (0.04, 0.3)
        said, both, surprise = balanced_likelihood(valid, reserve, IS_NEW, mean, variance)
        z, y = torch.cat([valid[0], reserve[0]]).double(), torch.cat([valid[1], reserve[1]])
        weight = torch.cat([torch.full((100,), 2 / 50), torch.ones(8)]).double()  # every class counts two

        def loss(point):
            log_p = torch.log_softmax(z * math.exp(-point[0]) + point[1] * (~IS_NEW).double(), dim=1)
            prior = sum((a - m) ** 2 / (2 * v) for a, m, v in zip(point, mean, variance, strict=True))
            return prior - float((weight * log_p.gather(1, y[:, None]).squeeze(1)).sum())

        best = minimize(loss, [0.5, 0.5], method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-12}).x
        assert (both[0], both[2]) == pytest.approx(tuple(best), abs=1e-5)
        assert both[1] < 0.2
        assert both[3] < math.sqrt(0.3)
        assert said is not None
        assert said[1] > both[1]
        assert surprise == pytest.approx(math.sqrt(2 * (loss(mean) - loss(best))), abs=1e-4)

    def test_many_images_find_the_truth(self):
        world = World(8.0)
        reserve = world.logits(torch.arange(8000) % OLD)
        said, _, _ = balanced_likelihood(world.logits(new_labels(4000)), reserve, IS_NEW, (0.0, 0.0), (1.0, 1.0))
        assert said is not None
        assert math.exp(said[0]) == pytest.approx(OVERCONFIDENCE, rel=0.1)
        assert said[2] == pytest.approx(math.log(8.0), abs=0.2)
        assert said[1] < 0.05

    def test_errors_are_those_of_repetition(self):
        """The reserve's own error, over 60 draws of four images a class, is not too small."""
        world, found = World(8.0), []
        for _ in range(60):
            said, _, _ = balanced_likelihood(
                world.logits(new_labels(100)), world.logits(torch.arange(16) % OLD), IS_NEW, (0.9, 2.0), (0.25, 0.5)
            )
            found.append(said)
        values = np.array(found)
        assert np.std(values[:, 2]) < 1.3 * np.mean(values[:, 3])
        assert np.std(values[:, 2]) > 0.4 * np.mean(values[:, 3])

    def test_a_reserve_makes_it_surer_and_is_no_part_of_the_history(self):
        world, memory, valid, reserve = self.drawn(20)
        plain = tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=20.0)
        rich = tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=20.0, reserve=reserve)
        assert rich.result_.bias_error < 0.8 * plain.result_.bias_error
        assert [piece.source for piece in rich.result_.evidence] == [
            "spread", "surrogate", "new classes", "label shift", "reserve",
        ]  # fmt: skip
        assert (rich.result_.n_reserve, plain.result_.n_reserve) == (80, 0)
        assert rich.history_ == plain.history_
        assert abs(rich.result_.bias - math.log(20.0)) < 3 * rich.result_.bias_error

    def test_rows_of_new_classes_are_not_used(self):
        world, memory, valid, reserve = self.drawn(2)
        more = tuple(torch.cat(pair) for pair in zip(reserve, world.draw(new_labels(30)), strict=True))
        first, second = (
            tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=20.0, reserve=part).result_
            for part in (reserve, more)
        )
        assert first.temperature == pytest.approx(second.temperature, rel=1e-6)
        assert first.n_reserve == second.n_reserve == 8

    @pytest.mark.parametrize("loaded", [False, True])
    def test_a_reserve_of_new_classes_alone_is_refused(self, loaded):
        world, memory, valid, _ = self.drawn(1)
        reserve, seen = world.draw(new_labels(10)), []
        world.model.register_forward_hook(lambda *_: seen.append(1))
        with pytest.raises(ValueError, match=r"^reserve: got 10 images of new classes only; expected .*old classes"):
            tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=20.0, reserve=[reserve] if loaded else reserve)
        assert loaded or not seen  # a loader is read batch by batch, after the memory

    def test_without_old_classes_a_reserve_is_not_used(self):
        """After the first task the same call with a reserve of all classes is accepted."""
        world, memory, valid, reserve = self.drawn(1)
        valid = tuple(torch.cat(pair) for pair in zip(valid, world.draw(torch.arange(80) % K), strict=True))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tcil.CalibrationWarning)
            plain = tcil.PACT().fit(world.model, memory, valid, range(K)).result_
            assert tcil.PACT().fit(world.model, memory, valid, range(K), reserve=reserve).result_ == plain

    def test_other_labels_and_wide_heads(self):
        world, memory, valid, reserve = self.drawn(3)
        plain = tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=20.0, reserve=reserve)
        names = torch.tensor([14, 3, 8, 21, 5, 9])
        wide = nn.Linear(DIMENSIONS, 25)
        with torch.no_grad():
            wide.weight[names], wide.bias[names] = world.model.weight, world.model.bias
        sets = [(x, names[y]) for x, y in (memory, valid, reserve)]
        found = tcil.PACT().fit(
            wide, *sets[:2], names[OLD:].tolist(), imbalance=20.0, reserve=sets[2], columns=names.tolist()
        )
        assert found.bias_ == pytest.approx(plain.bias_, rel=1e-3)

    def test_wrong_labels_are_told_before_any_work(self):
        world, memory, valid, reserve = self.drawn(2)
        seen = []
        world.model.register_forward_hook(lambda *_: seen.append(1))
        with pytest.raises(ValueError, match="reserve labels: got"):
            tcil.PACT().fit(
                world.model, memory, valid, NEW, imbalance=20.0, reserve=(reserve[0], reserve[1] + 40), classes=range(K)
            )
        assert not seen

    def test_exemplars_are_no_reserve(self):
        """They were trained on: their confidence is that of memorised images."""
        world, memory, valid, reserve = self.drawn(2)
        old = memory[1] < OLD
        seen = []
        world.model.register_forward_hook(lambda *_: seen.append(1))
        kept = memory[0][old].numpy(), memory[1][old].numpy()
        with pytest.raises(ValueError, match=r"^reserve: got .* also in memory; expected .*never trained"):
            tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=20.0, reserve=kept)
        new = tuple(np.concatenate([part, held[~old].numpy()]) for part, held in zip(kept, memory, strict=True))
        new = new[0] + (new[1] >= OLD)[:, None] * 0.5, new[1]  # unseen images of new classes, which a reserve ignores
        with pytest.raises(ValueError, match=r"^reserve: got .* also in memory"):
            tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=20.0, reserve=new)
        assert not seen
        mixed = tuple(torch.cat([part, held[old][:1]]) for part, held in zip(reserve, memory, strict=True))
        assert tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=20.0, reserve=mixed).result_.n_reserve == 9

    def test_stored_with_the_rest(self, tmp_path):
        world, memory, valid, reserve = self.drawn(2)
        fitted = tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=20.0, reserve=reserve)
        assert tcil.load(fitted.save(tmp_path / "pact.json")).result_ == fitted.result_

    def test_contradictions_are_told(self):
        """A reserve whose labels are wrong contradicts all else."""
        world, memory, valid, reserve = self.drawn(50)
        with pytest.warns(tcil.CalibrationWarning, match="contradict"):
            found = tcil.PACT().fit(
                world.model, memory, valid, NEW, imbalance=20.0, reserve=(reserve[0], (reserve[1] + 1) % OLD)
            )
        assert Verdict.OUT_OF_DEPTH in found.result_.verdicts


def spread(log=1.0, per_class=20.0):
    return LogitSpread(log, per_class)


class TestSpread:
    """T goes with the spread of the exemplars' logits."""

    @pytest.mark.parametrize("batch_size", [7, 64])
    def test_it_is_the_root_mean_square_about_the_mean_of_each_row(self, batch_size):
        world = World(5.0)
        memory = world.memory()
        with torch.no_grad():
            z = world.model(memory[0]).double()
        wanted = float((z - z.mean(dim=1, keepdim=True)).square().mean().sqrt().log())
        with open_exemplars(world.model, memory, NEW, batch_size=batch_size) as exemplars:
            assert exemplars.logit_spread.log == pytest.approx(wanted, abs=1e-6)
            assert exemplars.logit_spread.per_class == 20

    def test_columns_that_are_masked_or_of_no_class_do_not_count(self):
        world = World(5.0)
        memory = world.memory()
        wide = nn.Linear(DIMENSIONS, K + 3)
        with torch.no_grad():
            wide.weight[:K], wide.bias[:K] = world.model.weight, world.model.bias
            wide.weight[K:], wide.bias[K:] = 100.0, 50.0
        with open_exemplars(world.model, memory, NEW) as plain, open_exemplars(wide, memory, NEW) as wider:
            assert wider.logit_spread.log == pytest.approx(plain.logit_spread.log, abs=1e-6)
        masked = torch.tensor([[1.0, 3.0, -torch.inf], [2.0, 4.0, 6.0]])
        assert centred_squares(masked).tolist() == [2.0 + 8.0, 5.0]

    def test_logits_that_do_not_differ_have_none(self):
        flat = nn.Linear(DIMENSIONS, K)
        with torch.no_grad():
            flat.weight.zero_()
            flat.bias.zero_()
        with open_exemplars(flat, World(1.0).memory(), NEW) as exemplars:
            assert exemplars.logit_spread is None

    def test_before_any_evidence_t_is_a_share_of_it(self):
        few = MEASURED.few_exemplars / 20
        first = PACTFilter.of(None, None, TARGET, spread=spread())
        assert first.log_t.mean == pytest.approx(1 + math.log(MEASURED.spread_ratio))
        assert first.log_t.variance == pytest.approx(MEASURED.spread_error**2 + few**2)
        late = PACTFilter.of(None, 2.0, TARGET, spread=spread())
        assert late.log_t.mean == first.log_t.mean
        assert late.log_t.variance == pytest.approx(first.log_t.variance + MEASURED.late_spread_error**2)

    def test_log_t_moves_with_it_from_task_to_task(self):
        memo = {**MEMO, "log_spread": 1.0}
        few = MEASURED.few_exemplars / 5
        state = PACTFilter.of(memo, 2.5, TARGET, spread=spread(1.3, per_class=5))
        assert state.log_t.mean == pytest.approx(0.7 + 0.3)
        assert state.log_t.variance == pytest.approx(0.01 + MEASURED.spread_drift**2 + few**2)
        assert state.memo()["log_spread"] == 1.3
        first = {**memo, "bias": None, "log_imbalance": None}
        state = PACTFilter.of(first, 2.5, TARGET, spread=spread(1.3, per_class=5))
        assert state.log_t.variance == pytest.approx(0.01 + MEASURED.first_spread_drift**2 + few**2)

    def test_a_memo_without_it_is_joined_with_what_it_says(self):
        """As version 0.2 left it."""
        state = PACTFilter.of(MEMO, 2.5, TARGET, spread=spread())
        says = 1 + math.log(MEASURED.spread_ratio)
        assert min(0.7, says) < state.log_t.mean < max(0.7, says)
        assert state.log_t.variance < 0.01 + MEASURED.temperature_drift**2
        assert abs(state.log_t.mean - 0.7) < 0.3 * abs(says - 0.7)  # nothing has shown yet that the ratio holds here

    def test_a_network_of_another_kind_is_believed_by_its_images(self):
        """The spread says 8 times the T that 4,000 validation images say: it gives way.

        Where there are no old classes, T is measured. Later, the verdict tells of the contradiction.
        """
        world, wrong = World(1.0), PACTConstants(spread_ratio=8 * 0.44)
        memory, valid = world.memory(), world.draw(torch.arange(4000) % K)
        pact = tcil.PACT(constants=wrong).fit(world.model, memory, valid, range(K))
        assert pact.result_.verdicts == (Verdict.OK,)
        assert pact.temperature_ == pytest.approx(OVERCONFIDENCE, rel=0.1)
        with pytest.warns(tcil.CalibrationWarning, match="contradict"):
            later = tcil.PACT(constants=wrong).fit(
                world.model, memory, world.draw(new_labels(4000)), NEW, imbalance=1.0
            )
        assert Verdict.OUT_OF_DEPTH in later.result_.verdicts
        assert later.temperature_ == pytest.approx(OVERCONFIDENCE, rel=0.4)

    @pytest.mark.parametrize("factor", [100, 1e-2])
    def test_few_images_are_not_lost_where_the_spread_is_far_off(self, factor):
        world, wrong = World(1.0), PACTConstants(spread_ratio=factor * 0.44)
        pact = tcil.PACT(constants=wrong).fit(world.model, world.memory(), world.draw(torch.arange(200) % K), range(K))
        assert [piece.source for piece in pact.result_.evidence] == ["spread", "new classes"]
        assert pact.temperature_ == pytest.approx(OVERCONFIDENCE, rel=0.3)

    def test_an_exemplar_far_out_does_not_take_over(self):
        world = World(1.0)
        memory, valid = world.memory(), world.draw(torch.arange(300) % K)
        memory[0][0] *= 1000
        pact = tcil.PACT().fit(world.model, memory, valid, range(K))
        assert pact.temperature_ == pytest.approx(OVERCONFIDENCE, rel=0.3)

    def test_constants_that_an_earlier_version_stored_are_those_of_now(self):
        now = tcil.PACT().constants
        names = [f.name for f in fields(PACTConstants) if "spread" not in f.name or f.name == "bias_spread"]
        stored = {name: getattr(now, name) for name in names if name != "few_exemplars"}
        before = {**stored, "new_class_error": 0.06, "surrogate_temperature_error": 0.30}
        assert PACTConstants.parse(before) == now
        own = PACTConstants.parse({**before, "bias_drift": 0.5, "new_class_error": 0.07})
        assert (own.bias_drift, own.new_class_error) == (0.5, 0.07)

    def test_a_belief_is_widened_until_an_observation_is_so_many_errors_away(self):
        belief = Belief(0.0, 0.01)
        belief.widen(2.0, 0.3, 3.0)
        assert belief.surprise(2.0, 0.3) == pytest.approx(3.0)
        before = belief.variance
        belief.widen(0.1, 0.3, 3.0)  # it is near enough
        assert belief.variance == before


class TestHistory:
    def test_the_next_task_goes_on_from_it(self):
        world = World(20.0)
        memory, valid = world.memory(), world.draw(new_labels(100))
        first = tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=20.0)
        history = json.loads(json.dumps(first.history_))
        with pytest.raises(ValueError, match="history: got that of a fit of this very network"):
            tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=20.0, history=history)
        with torch.no_grad():
            world.model.bias += 1e-4  # another network, if only just
        again = tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=20.0, history=history)
        assert again.result_.log_temperature_error < 0.95 * first.result_.log_temperature_error
        elsewhere = {**history, "log_temperature": [history["log_temperature"][0] + 0.5, history["log_temperature"][1]]}
        moved = tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=20.0, history=elsewhere)
        assert again.temperature_ < moved.temperature_ < math.exp(elsewhere["log_temperature"][0])

    def test_drift_makes_it_less_certain_and_the_bias_follows_the_imbalance(self):
        state = PACTFilter.of(MEMO, 2.5, TARGET)
        assert (state.log_t.mean, state.log_t.variance) == pytest.approx((0.7, 0.01 + MEASURED.temperature_drift**2))
        assert (state.bias.mean, state.bias.variance) == pytest.approx(
            (0.9 + (2.5 - 2.0) / 2, 0.02 + MEASURED.bias_drift**2)
        )

    def test_the_bias_enters_with_the_first_old_classes(self):
        first = {"calibrator": "PACT", "log_temperature": [0.3, 0.01], "bias": None, "log_imbalance": None}
        still = PACTFilter.of(first, None, TARGET)
        assert (still.log_t.mean, still.log_t.variance, still.bias) == (
            0.3,
            pytest.approx(0.01 + MEASURED.temperature_drift**2),
            None,
        )
        state = PACTFilter.of(first, 2.0, TARGET)
        assert (state.log_t.mean, state.log_t.variance) == (0.3, pytest.approx(0.01 + MEASURED.first_drift**2))
        assert (state.bias.mean, state.bias.variance) == (1.0, pytest.approx(4 / 12 + MEASURED.bias_spread**2))
        again = PACTFilter.of(MEMO, None, TARGET)  # a new sequence that goes on from an old one
        assert (again.log_t.mean, again.bias) == (0.7, None)

    def test_weighing_is_by_precision(self):
        belief = Belief(0.0, 0.25)
        belief.see(1.0, 0.5)  # as precise as what was known
        assert (belief.mean, belief.variance) == (0.5, 0.125)
        assert belief.surprise(0.5 + 3 * math.sqrt(0.125 + 1), 1.0) == pytest.approx(3.0)

    def test_the_bias_and_the_offset_are_a_kalman_filter_of_two_numbers(self):
        belief = BiasBelief(0.5, 0.3, 0.1, 0.4, -0.05)
        mean, covariance = np.array([0.5, 0.1]), np.array([[0.3, -0.05], [-0.05, 0.4]])
        for value, error, with_offset in ((1.2, 0.3, True), (0.2, 0.5, False), (0.9, 0.1, True)):
            row = np.array([1.0, float(with_offset)])
            total = row @ covariance @ row + error**2
            assert belief.surprise(value, error, with_offset=with_offset) == pytest.approx(
                abs(value - row @ mean) / math.sqrt(total)
            )
            belief.see(value, error, with_offset=with_offset)
            gain = covariance @ row / total
            mean, covariance = mean + gain * (value - row @ mean), covariance - np.outer(gain, row @ covariance)
            assert (belief.mean, belief.offset) == pytest.approx(tuple(mean))
            assert (belief.variance, belief.offset_variance, belief.covariance) == pytest.approx(
                (covariance[0, 0], covariance[1, 1], covariance[0, 1])
            )

    def test_the_offset_is_learned_from_task_to_task(self):
        """A surrogate that is always 1 too high, beside an honest label shift, is seen through."""
        belief = BiasBelief(0.0, 1.0, 0.0, 0.65**2)
        for _ in range(6):
            belief.see(1.0, 0.2, with_offset=True)
            belief.see(0.0, 0.4)
            belief.move(0.0, 0.1, 0.1)
        assert belief.offset == pytest.approx(1.0, abs=0.3)
        assert abs(belief.mean) < 0.3

    def test_a_memo_goes_through_json_and_one_of_version_0_2_is_taken(self):
        state = PACTFilter.of(MEMO, 2.5, TARGET)  # without an offset
        wanted = MEASURED.surrogate_offset**2 + MEASURED.offset_drift**2
        assert state.bias.offset_variance == pytest.approx(wanted)
        state.bias.see(2.0, 0.3, with_offset=True)
        memo = json.loads(json.dumps(state.memo()))
        again = PACTFilter.of({**memo, "model": ""}, 2.5, TARGET)
        assert (again.bias.offset, again.bias.covariance) == (state.bias.offset, state.bias.covariance)

    def test_the_first_prior_follows_the_scale_of_the_logits(self):
        """Networks whose logits are a thousand times smaller get a temperature that is a thousand times smaller."""
        world = World(1.0)
        valid = world.draw(torch.arange(300) % K)
        memory = world.memory()
        plain = tcil.PACT().fit(world.model, memory, valid, range(K)).temperature_
        with torch.no_grad():
            world.model.weight.mul_(1e-3)
            world.model.bias.mul_(1e-3)
        assert tcil.PACT().fit(world.model, memory, valid, range(K)).temperature_ == pytest.approx(
            1e-3 * plain, rel=0.05
        )

    @pytest.mark.parametrize(
        "history",
        [
            {},
            [1],
            {"calibrator": "FirstTaskTemperatureScaling", "temperature": 2.0},
            {**MEMO, "log_temperature": [0.0]},
            {**MEMO, "log_temperature": ["0.7", 0.01]},
            {**MEMO, "log_temperature": [800.0, 0.01]},
            {**MEMO, "bias": [float("nan"), 0.02]},
            {**MEMO, "bias": [0.9, -0.02]},
            {**MEMO, "bias": None},
            {**MEMO, "log_imbalance": None},
            {**MEMO, "log_imbalance": "2.0"},
            {**MEMO, "model": None},
            {**MEMO, "offset": [0.1, 0.2]},
            {**MEMO, "offset": [0.1, -0.2, 0.0]},
            {**MEMO, "offset": [0.1, 0.2, 0.5]},  # more than variances allow
            {**MEMO, "offset": "none"},
            {**MEMO, "log_spread": "1.0"},
            {**MEMO, "log_spread": float("nan")},
            {**MEMO, "log_spread": 1e5},
            {"calibrator": "PACT", "mean": [0.7, 0.9], "covariance": [[0.01, 0.0], [0.0, 0.02]]},
        ],
    )
    def test_other_things_are_refused(self, history):
        world = World(1.0)
        with pytest.raises(ValueError, match=r"(?s)history: got .* expected history_ of the PACT"):
            tcil.PACT().fit(world.model, world.memory(), None, NEW, imbalance=1.0, history=history)


class TestMap:
    @settings(deadline=None, max_examples=200)
    @given(
        n=st.integers(2, 12),
        bias=st.floats(-6, 12),
        temperature=st.floats(0.05, 50),
        scale=st.floats(0.0, 100),
        seed=st.integers(0, 10**6),
    )
    def test_the_prediction_stays_and_rows_are_probabilities(self, n, bias, temperature, scale, seed):
        generator = torch.Generator().manual_seed(seed)
        logits = scale * torch.randn(40, n, generator=generator)
        is_new = torch.rand(n, generator=generator) < 0.5
        t, b = torch.tensor(temperature).double(), torch.tensor(bias).double()
        out = PriorAdjustedMap(t, b, is_new, torch.tensor(True))(logits)
        q = torch.log_softmax(logits.double() / t + b * (~is_new), dim=1).exp()
        top = logits.argmax(dim=1, keepdim=True)
        assert torch.allclose(out.exp().sum(dim=1), torch.ones(40).double(), atol=1e-9)
        chosen = out.gather(1, top)
        expected = q.gather(1, top).clamp(min=(1 + 2e-5) / n)
        moved = torch.log_softmax(logits.double() / t + b * (~is_new), dim=1).argmax(dim=1) != top.squeeze(1)
        for rounded in (out, out.float(), out.exp().float()):  # also where the margin is smallest
            assert torch.equal(rounded.argmax(dim=1)[moved], top.squeeze(1)[moved])
        assert torch.equal(out.argmax(dim=1)[~moved], q.argmax(dim=1)[~moved])
        assert torch.allclose(chosen.exp()[moved], expected[moved], atol=1e-9)
        assert torch.allclose(out.exp()[~moved], q[~moved], atol=1e-12)
        free = PriorAdjustedMap(t, b, is_new, torch.tensor(False))(logits)
        assert torch.allclose(free.exp(), q, atol=1e-12)

    def test_a_group_for_every_class(self):
        assert not PriorAdjustedMap(
            torch.tensor(2.0), torch.tensor(1.0), torch.tensor([True]), torch.tensor(True)
        ).sound(2)

    def test_gradients_are_finite(self):
        logits = torch.tensor([[200.0, 0.0, 0.0, 0.0], [1.0, 0.9, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]], requires_grad=True)
        t, b, is_new = torch.tensor(2.0), torch.tensor(3.0), torch.tensor([True, False, False, True])
        for keep in (True, False):
            out = PriorAdjustedMap(t, b, is_new, torch.tensor(keep))(logits)
            (gradient,) = torch.autograd.grad(out[:, 1].sum(), logits)
            assert bool(torch.isfinite(gradient).all())

    def test_a_damaged_one_is_not_sound(self):
        good = [torch.tensor(2.0), torch.tensor(1.0), torch.tensor([True, False]), torch.tensor(True)]
        assert PriorAdjustedMap(*good).sound(2)
        assert not PriorAdjustedMap(torch.tensor(-2.0), *good[1:]).sound(2)
        assert not PriorAdjustedMap(*good[:3], torch.tensor(1.0)).sound(2)
        assert not PriorAdjustedMap(good[0], torch.tensor(float("nan")), *good[2:]).sound(2)


class TestBadInput:
    def test_imbalance(self):
        world = World(1.0)
        seen = []
        world.model.register_forward_hook(lambda *_: seen.append(1))
        memory, valid = world.memory(), world.draw(new_labels(50))
        with pytest.raises(ValueError, match="imbalance: got None; expected training images of a new class"):
            tcil.PACT().fit(world.model, memory, valid, NEW)
        with pytest.raises(ValueError, match=r"imbalance: got 1e\+90; expected between"):
            tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=1e90)
        for wrong in (0, -1.0, math.inf, math.nan, "3", True):
            with pytest.raises(ValueError, match=r"imbalance: got .* expected a positive number"):
                tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=wrong)
        assert not seen

    @pytest.mark.parametrize(
        ("wrong", "match"),
        [
            ({0: 5, 1: 5, 2: 5, 3: 5, 4: 30}, r"imbalance: got no presentations of the classes \[5\]"),
            ({label: 5 for label in range(7)}, r"imbalance: got presentations of the classes \[6\]"),
            ({**dict.fromkeys(range(K), 5), 3: 0}, r"imbalance\[3\]: got 0; expected a positive number"),
            ({"cat": 3}, "imbalance: got"),
            ([5.0, 30.0], "imbalance: got 2 numbers; expected 6, one for each class"),
            (np.array([5.0, 5.0, -1.0, 5.0, 30.0, 30.0]), r"imbalance\[2\]: got -1.0; expected a positive number"),
            (torch.tensor([1e-9] * OLD + [1e9] * 2), "imbalance: got .* expected between"),
            (np.ones((2, 3)), r"imbalance: got an array of shape \(2, 3\); expected a positive number, or one a class"),
        ],
    )
    def test_presentations(self, wrong, match):
        world = World(1.0)
        seen = []
        world.model.register_forward_hook(lambda *_: seen.append(1))
        with pytest.raises(ValueError, match=match):
            tcil.PACT().fit(world.model, world.memory(), world.draw(new_labels(50)), NEW, imbalance=wrong)
        assert not seen

    def test_presentations_where_labels_are_not_known_before(self):
        """A loader tells its labels as it streams; with classes= they are known at once."""
        world, loader = World(1.0), torch.utils.data.DataLoader
        seen = []
        world.model.register_forward_hook(lambda *_: seen.append(1))
        memory = loader(torch.utils.data.TensorDataset(*world.memory()), batch_size=40)
        arguments = world.model, memory, world.draw(new_labels(50)), NEW
        with pytest.raises(ValueError, match="imbalance: got 2 numbers; expected 6"):
            tcil.PACT().fit(*arguments, imbalance=(5.0, 30.0), classes=range(K))
        assert not seen
        with pytest.raises(ValueError, match="imbalance: got 2 numbers; expected 6"):
            tcil.PACT().fit(*arguments, imbalance=(5.0, 30.0))

    def test_constants(self):
        for wrong, match in (
            (3, "constants: got 3; expected PACTConstants"),
            ({"drift": 1.0}, "constants: got 'drift'"),
            ({"bias_drift": -1.0}, r"constants.bias_drift: got -1.0; expected a positive number"),
        ):
            with pytest.raises(ValueError, match=match):
                tcil.PACT(constants=wrong)

    def test_options(self):
        with pytest.raises(ValueError, match="keep_predictions: got 1; expected True or False"):
            tcil.PACT(keep_predictions=1)
        with pytest.raises(ValueError, match="tolerance"):
            tcil.PACT(tolerance=2.0)
