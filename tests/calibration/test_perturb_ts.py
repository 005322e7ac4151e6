"""PerturbTS: even accuracy levels, bisected to their crossings, "not reachable" as a result, the original's search."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import tcil
from tcil.calibration.calibrators.noise_levels import MAX_NOISE, monotone_levels, nelder_mead_levels
from tcil.calibration.calibrators.perturbed import union_temperature
from tcil.experiments.runs.entries import entry_of
from tcil.options import Verdict


@pytest.fixture(scope="module")
def cross():
    """The linear model of the reference cases, with overlapping classes."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(2, 4, bias=False)
    model.weight.data = torch.tensor([[3.0, 0], [0, 3], [-3, 0], [0, -3]])
    labels = torch.arange(800) % 4
    inputs = model.weight.data[labels] / 3 + 0.5 * torch.randn(800, 2, generator=generator)
    return model, inputs, labels


def test_levels_fall_evenly_to_chance(cross):
    model, inputs, labels = cross
    result = tcil.PerturbedTemperatureScaling().fit(model, valid=(inputs, labels)).result_
    targets = [level.target_accuracy for level in result.levels]
    clean = result.levels[0].accuracy
    np.testing.assert_allclose(targets, np.linspace(clean, 0.25, 6))
    assert result.reachable
    for level in result.levels:
        assert abs(level.accuracy - level.target_accuracy) <= (0.05 if level is result.levels[-1] else 0.03) * clean
    noises = [level.noise for level in result.levels]
    assert noises == sorted(noises)
    assert noises[-1] <= MAX_NOISE


def test_temperature_is_that_of_all_levels_together(cross):
    model, inputs, labels = cross
    calibrator = tcil.PerturbedTemperatureScaling(n_levels=3, batch_size=800).fit(model, valid=(inputs, labels))
    noise = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        union = torch.cat([model(inputs + level.noise * noise) for level in calibrator.result_.levels])
    exact = tcil.fit_temperature(union, labels.repeat(3)).temperature
    assert calibrator.temperature_ == pytest.approx(min(exact, 5.0), rel=1e-6)


def test_same_seed_same_answer(cross):
    model, inputs, labels = cross
    one, same, other = (
        tcil.PerturbedTemperatureScaling(seed=seed, n_levels=3).fit(model, valid=(inputs, labels)).result_
        for seed in (0, 0, 1)
    )
    assert one == same
    assert one != other


@pytest.mark.parametrize("search", ["monotone", "nelder-mead"])
@pytest.mark.parametrize("width", [2, 16, 21])
def test_the_size_of_batches_and_the_default_type_do_not_matter(search, width):
    """Noise is drawn for each example, not for a batch; 16 numbers are one block of torch's generator."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(36) % 3
    inputs = torch.eye(3, width)[labels] + 0.4 * torch.randn(36, width, generator=generator)
    model = nn.Linear(width, 3, bias=False)
    model.weight.data = 3 * torch.eye(3, width)

    def fitted(size, valid):
        options = {"search": search, "n_levels": 3, "batch_size": size}
        return tcil.PerturbedTemperatureScaling(**options).fit(model, valid).result_.levels

    whole = fitted(256, (inputs, labels))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_size=13)
    assert all(fitted(size, (inputs, labels)) == whole for size in (1, 7, 20))
    assert fitted(64, loader) == whole
    torch.set_default_dtype(torch.float64)
    try:
        assert fitted(256, (inputs, labels)) == whole
    finally:
        torch.set_default_dtype(torch.float32)


class Stubborn(nn.Module):
    """Looks at the sign of the sum only: noise never brings its accuracy below one half, and 1/K is 0.25."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, x):
        side = x.sum(1, keepdim=True).sign()
        return self.scale * torch.cat([side, -side, side - 9, -side - 9], dim=1)


class TestNotReachable:
    def fit(self):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(500, 3, generator=generator) + 3 * (torch.arange(500) % 2 * -2 + 1)[:, None]
        return tcil.PerturbedTemperatureScaling().fit(
            Stubborn(), valid=(inputs, torch.arange(500) % 2), classes=range(4)
        )

    def test_is_a_result_not_a_number(self):
        calibrator = self.fit()
        result = calibrator.result_
        assert (result.reachable, result.temperature, result.verdicts) == (False, None, ("not_reachable",))
        missed = [level for level in result.levels if not level.reachable]
        assert missed
        assert all(abs(level.accuracy - level.target_accuracy) > 0.03 * result.levels[0].accuracy for level in missed)

    def test_fit_warns(self):
        with pytest.warns(tcil.CalibrationWarning, match=r"PerturbedTemperatureScaling: .*\(500 samples\)"):
            assert not hasattr(self.fit(), "temperature_")

    def test_is_a_result_of_a_subclass_too(self):
        class Own(tcil.PerturbedTemperatureScaling):
            pass

        labels = torch.arange(200) % 2
        inputs = torch.randn(200, 3, generator=torch.Generator().manual_seed(0)) + 3 * (labels * -2 + 1)[:, None]
        own = Own().fit(Stubborn(), valid=(inputs, labels), classes=range(4))
        assert own.result_.temperature is None

    def test_using_it_says_so(self, tmp_path):
        calibrator = self.fit()
        for use in (
            lambda: calibrator.temperature_,
            lambda: calibrator.transform(torch.randn(2, 4)),
            lambda: calibrator.wrap(Stubborn()),
        ):
            with pytest.raises(tcil.NotReachableError, match=r"n/a.*no noise up to 100 brings accuracy"):
                use()
        again = tcil.load(calibrator.save(tmp_path / "c.json"))  # n/a is a result, and can be kept
        assert again.result_ == calibrator.result_
        with pytest.raises(tcil.NotReachableError):
            _ = again.temperature_

    def test_the_original_search_returns_a_number_all_the_same(self, cross):
        """Why it is for parity only: it gives a number whatever it found."""
        model, inputs, labels = cross
        calibrator = tcil.PerturbedTemperatureScaling(search="nelder-mead").fit(model, valid=(inputs, labels))
        assert calibrator.temperature_ > 0


TARGETS = np.linspace(0.9, 0.25, 6).tolist()


class Counted:
    """An accuracy curve, with the noises that it was asked for."""

    def __init__(self, curve):
        self.curve, self.calls = curve, []

    def __call__(self, noise):
        self.calls.append(noise)
        return self.curve(noise)


class TestMonotoneSearch:
    @pytest.mark.parametrize("scale", [0.02, 0.3, 1.0, 7.0])
    def test_bisects_to_the_crossing(self, scale):
        """The curve falls to 0.2 at last, below the last target, so that the noise of each level has a closed form."""
        curve = Counted(lambda noise: 0.2 + 0.7 / (1 + (noise / scale) ** 2))
        levels = monotone_levels(curve, TARGETS)
        for level, target in zip(levels[1:], TARGETS[1:], strict=True):
            crossing = scale * math.sqrt(0.7 / (target - 0.2) - 1)
            assert crossing <= level.noise <= 1.002 * crossing  # never an octave's end
            assert level.accuracy == curve.curve(level.noise) <= target
            assert level.reachable

    def test_a_level_that_is_approached_only_is_met_at_the_smallest_noise_within_the_tolerance(self):
        """The accuracy falls to chance without crossing it: the noise is not the largest of all."""
        last = monotone_levels(lambda noise: 0.25 + 0.65 / (1 + noise**2), TARGETS)[-1]
        within = math.sqrt(0.65 / (0.05 * 0.9) - 1)
        assert within <= last.noise <= 1.002 * within
        assert last.reachable

    @pytest.mark.parametrize(("level", "tolerance"), [(3, 0.03), (5, 0.05)])
    def test_the_last_level_has_the_wider_tolerance(self, level, tolerance):
        """A plateau just inside the tolerance above a target, and just outside."""
        for miss, reachable in ((0.999, True), (1.001, False)):
            plateau = TARGETS[level] + miss * tolerance * 0.9
            found = monotone_levels(lambda noise: max(plateau, 0.9 - noise), TARGETS)  # noqa: B023
            assert [each.reachable for each in found[: level + 1]] == [True] * level + [reachable]
            assert found[level].accuracy == pytest.approx(plateau)
            if reachable:
                assert found[level].noise == pytest.approx(0.9 - plateau, rel=0.002)

    def test_no_noise_is_tried_twice_and_evaluations_are_few(self):
        curve = Counted(lambda noise: 0.25 + 0.65 / (1 + noise**2))
        levels = monotone_levels(curve, TARGETS)
        assert len(curve.calls) == len(set(curve.calls))
        assert sum(level.evaluations for level in levels) == len(curve.calls) <= 29 + 5 * 10
        assert max(curve.calls) <= MAX_NOISE

    def test_a_jump_over_a_level_takes_the_nearer_side(self):
        """At noise 0.5 the accuracy falls from just above the second target to 0: the noise is that before the jump."""
        targets = [0.9, 0.6, 0.0]
        curve = Counted(lambda noise: 0.61 if noise < 0.5 else 0.0)
        levels = monotone_levels(curve, targets)
        assert [level.reachable for level in levels] == [True, True, True]
        assert levels[1].accuracy == 0.61
        assert levels[2].noise == pytest.approx(0.5, rel=0.002)
        assert len(curve.calls) <= 29 + 2 * 20

    def test_a_jump_over_the_tolerance_is_not_reachable(self):
        levels = monotone_levels(lambda noise: 0.9 if noise < 0.5 else 0.25, TARGETS)
        assert [level.reachable for level in levels] == [True, False, False, False, False, True]

    def test_accuracies_of_few_images_meet_targets_up_to_rounding(self):
        target = 0.1 + 0.2  # above 0.3 by rounding; 1 - 0.7 is below
        levels = monotone_levels(lambda noise: 0.3 if noise > 1 else 0.9, [0.9, 0.3 - 1e-12])
        assert levels[-1].noise == pytest.approx(1, rel=0.002)
        assert monotone_levels(lambda noise: 0.3 if noise > 1 else 0.9, [0.9, target])[-1].reachable


class TestOriginalSearch:
    def test_every_evaluation_draws_anew(self, cross):
        model, inputs, labels = cross
        seen = []
        handle = model.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
        try:
            calibrator = tcil.PerturbedTemperatureScaling(search="nelder-mead", batch_size=800)
            levels = calibrator.fit(model, valid=(inputs, labels)).result_.levels
        finally:
            handle.remove()
        clean, noisy = seen[0], [(x - inputs).flatten() for x in seen[1:]]
        assert torch.equal(clean, inputs)
        # One pass for each evaluation, and one more for each noisy level of the union, whose noise is new as well.
        assert len(noisy) == sum(level.evaluations for level in levels) + 5
        units = torch.stack([noise / noise.norm() for noise in noisy])
        apart = (units @ units.T - torch.eye(len(units))).abs()
        assert apart.max() < 0.15  # 1,600 numbers: a correlation of 0.15 is six standard errors

    def test_the_frozen_search_repeats_its_draw(self, cross):
        model, inputs, labels = cross
        seen = []
        handle = model.register_forward_pre_hook(lambda module, args: seen.append((args[0] - inputs).flatten()))
        try:
            tcil.PerturbedTemperatureScaling(batch_size=800).fit(model, valid=(inputs, labels))
        finally:
            handle.remove()
        units = torch.stack([noise / noise.norm() for noise in seen[1:]])
        assert (units @ units.T).min() > 0.99

    @pytest.mark.parametrize("options", [{}, {"search": "nelder-mead"}, {"search": "nelder-mead", "bounded": False}])
    def test_is_determined_by_its_seed_and_touches_no_global_state(self, cross, options):
        model, inputs, labels = cross
        before, found = torch.get_rng_state(), []
        for seed in (0, 0, 1):
            torch.manual_seed(len(found))
            state = torch.get_rng_state()
            calibrator = tcil.PerturbedTemperatureScaling(seed=seed, **options).fit(model, valid=(inputs, labels))
            assert torch.equal(torch.get_rng_state(), state)
            found.append(calibrator.result_)
        torch.set_rng_state(before)
        assert found[0] == found[1] != found[2]

    def test_goes_on_until_noise_and_accuracy_agree(self):
        """One point is better than all others: points that are close but differ in accuracy have not converged."""
        targets = [0.8, 0.55, 0.5]
        flat = nelder_mead_levels(lambda noise: 0.8, targets, 0.1)[1]
        peak = nelder_mead_levels(lambda noise: 0.8 if noise == 0.1 else 0.2, targets, 0.1)[1]
        assert flat.evaluations < 40  # halved nine times until 0.05 is below 1e-4
        assert peak.evaluations > 100  # halved until float64 knows no difference
        assert (flat.noise, peak.noise) == (pytest.approx(0.1, abs=0.1), 0.1)
        assert not peak.reachable

    def test_stops_after_200_evaluations(self):
        """Accuracy that is drawn need never converge; the step that is under way is finished."""
        draws = iter(np.random.default_rng(0).uniform(0.6, 0.8, size=2000))
        level = nelder_mead_levels(lambda noise: next(draws), [0.8, 0.3, 0.2], 0.1)[1]
        assert 200 <= level.evaluations <= 202
        assert not level.reachable

    def test_no_evaluation_is_repeated(self):
        """A stochastic accuracy: what was seen is what counts, and each level's count is right."""
        draws = iter(np.random.default_rng(0).normal(scale=0.02, size=2000))
        curve = Counted(lambda noise: 0.2 + 0.7 / (1 + noise**2) + next(draws))
        levels = nelder_mead_levels(curve, TARGETS, 0.1)
        assert sum(level.evaluations for level in levels) == len(curve.calls)
        for index, level in enumerate(levels[1:], start=1):
            tolerance = (0.05 if index == 5 else 0.03) * 0.9
            assert level.reachable == (abs(level.accuracy - level.target_accuracy) < tolerance)

    def test_stops_as_soon_as_it_is_close(self):
        curve = Counted(lambda noise: 0.9 - noise)
        level = nelder_mead_levels(curve, [0.9, 0.81, 0.5], 0.1)[1]
        assert (level.noise, level.evaluations) == (0.1, 2)


class TestBound:
    @pytest.mark.parametrize("search", ["monotone", "nelder-mead"])
    def test_without_it_the_temperature_is_that_of_the_likelihood(self, cross, search):
        model, inputs, labels = cross
        bounded, free = (
            tcil.PerturbedTemperatureScaling(search=search, start=1.0, bounded=bounded)
            .fit(model, valid=(inputs, labels))
            .result_
            for bounded in (True, False)
        )
        assert bounded.levels == free.levels
        assert (bounded.temperature, bounded.verdicts) == (5.0, (Verdict.AT_BOUND,))
        assert free.temperature > 5
        assert free.verdicts == (Verdict.OK,)

    def test_a_degenerate_union_leaves_t_at_one(self):
        logits, labels = torch.tensor([[3.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 1])
        assert union_temperature(logits, labels, bounded=True) == (0.05, Verdict.AT_BOUND)
        assert union_temperature(logits, labels, bounded=False) == (1.0, Verdict.ALL_CORRECT)
        assert union_temperature(logits, 1 - labels, bounded=True) == (5.0, Verdict.AT_BOUND)
        assert union_temperature(logits, 1 - labels, bounded=False) == (1.0, Verdict.ANTI_INFORMATIVE)

    def test_is_an_option_like_others(self, cross):
        calibrator = tcil.PerturbedTemperatureScaling(bounded=False)
        assert calibrator.get_params()["bounded"] is False
        assert "bounded=False" in repr(calibrator)
        with pytest.raises(ValueError, match="bounded: got 1; expected True or False"):
            tcil.PerturbedTemperatureScaling(bounded=1)
        entry = entry_of("perturb-ts[search=nelder-mead,bounded=false]")
        assert entry.title == "PerturbTS (search=nelder-mead, bounded=false)"
        with pytest.raises(ValueError, match="bounded: got 'no'"):
            entry_of("perturb-ts[bounded=no]")

    def test_files_from_before_the_option_stay_readable(self, cross, tmp_path):
        model, inputs, labels = cross
        calibrator = tcil.PerturbedTemperatureScaling(n_levels=2).fit(model, valid=(inputs, labels))
        path = calibrator.save(tmp_path / "c.json")
        record = json.loads(path.read_bytes())
        del record["checksum"], record["options"]["bounded"]
        path.write_text(json.dumps({**record, "format_version": 1}))
        again = tcil.load(path)
        assert again.get_params() == calibrator.get_params()
        assert again.result_ == calibrator.result_


def test_levels_closer_than_the_tolerance_are_no_error():
    levels = monotone_levels(lambda noise: 0.9, [0.9, 0.89, 0.3])  # a network that noise does not reach
    assert [level.reachable for level in levels] == [True, True, False]
    assert levels[1].noise == 0.0
