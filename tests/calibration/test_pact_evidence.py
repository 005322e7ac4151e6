"""PACT's pieces of evidence, and a reserve, on data for which the truth is known."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from pact_worlds import DIMENSIONS, IS_NEW, NEW, OLD, OVERCONFIDENCE, K, World, new_labels
from scipy.optimize import minimize
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tcil
from tcil.calibration.calibrators.pact.constants import MEASURED
from tcil.calibration.calibrators.pact.evidence import (
    balanced_likelihood,
    joint_fit,
    label_shift,
    laplace,
    temperature_with_error,
)
from tcil.foundation.options import Verdict


def loader(pair):
    return DataLoader(TensorDataset(*map(torch.as_tensor, pair)), 16)


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


class TestReserve:
    def drawn(self, each, imbalance=20.0):
        world = World(imbalance)
        return world, world.memory(), world.draw(new_labels(200)), world.draw(torch.arange(each * OLD) % OLD)

    def test_the_mode_is_that_of_likelihood_and_prior(self):
        world = World(8.0)
        valid, reserve = world.logits(new_labels(100)), world.logits(torch.arange(8) % OLD)  # 50 and 2 per class
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
        """The reserve's own error, over 60 draws of four images per class, is not too small."""
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
            "spread", "new classes", "surrogate", "label shift", "reserve",
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

    @pytest.mark.parametrize("nothing", [(torch.zeros(0, DIMENSIONS), torch.zeros(0, dtype=torch.long)), []])
    def test_an_empty_reserve_is_refused_with_advice(self, nothing):
        world, memory, valid, _ = self.drawn(2)
        with pytest.raises(ValueError, match=r"^reserve.*at least one example\. Pass reserve=None until"):
            tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=20.0, reserve=nothing)

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
        for given in (mixed, loader(mixed)):
            with pytest.warns(tcil.CalibrationWarning, match=r"reserve .*also in memory.*reserve: 1 of 9 images"):
                pact = tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=20.0, reserve=given)
            assert pact.result_.n_reserve == 9
            assert Verdict.RESERVE_IN_MEMORY in pact.result_.verdicts
        with pytest.raises(ValueError, match=r"^reserve: got .* also in memory"):
            tcil.PACT().fit(world.model, memory, valid, NEW, imbalance=20.0, reserve=loader(new))

    def test_exemplars_among_the_validation_images_are_told(self):
        world, memory, valid, _ = self.drawn(2)
        new = memory[1] >= OLD
        mixed = tuple(torch.cat([part, held[new][:3]]) for part, held in zip(valid, memory, strict=True))
        for given, held in ((mixed, memory), (loader(mixed), memory), (mixed, loader(memory))):
            with pytest.warns(tcil.CalibrationWarning, match=rf"also in memory.*valid: 3 of {len(valid[1]) + 3} image"):
                fitted = tcil.TCIL().fit(world.model, held, given, NEW)
            assert fitted.result_.verdicts == (Verdict.VALID_IN_MEMORY,)
            assert fitted.result_.n_valid_in_memory == 3

    def test_only_the_same_image_is_shared(self):
        """Also of sparse inputs, most of which is zeros."""
        from tcil.calibration.inputs.duplicates import count_shared, digests_of

        generator, first, second = torch.Generator().manual_seed(0), torch.zeros(20, 50_000), torch.zeros(20, 50_000)
        for rows in (first, second):
            rows.scatter_(1, torch.randint(50_000, (20, 8), generator=generator), 1.0)
        everything = torch.ones(20, dtype=torch.bool)

        def shared(inputs, chosen=everything):
            return count_shared(digests_of(inputs), chosen, set(digests_of(second)))

        assert shared(first) == (0, 20)
        mixed = torch.cat([first[:17], second[17:]])
        assert shared(mixed) == (3, 20)
        assert shared(mixed.double()) == (3, 20)
        assert shared(mixed.reshape(20, 2, -1)) == (0, 20)
        assert shared(mixed, torch.arange(20) < 18) == (1, 18)

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
