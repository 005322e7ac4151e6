"""PerturbTS: even accuracy levels, one frozen noise draw, and "not reachable" as a result."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import tcil
from tcil.calibration.calibrators.perturbed import MAX_NOISE, monotone_levels


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
        assert abs(level.accuracy - level.target_accuracy) <= 0.03 * clean
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


def test_one_scan_serves_all_levels():
    calls = []

    def accuracy_at(noise):
        calls.append(noise)
        return 0.25 + 0.65 / (1 + noise**2)

    levels = monotone_levels(accuracy_at, np.linspace(0.9, 0.25, 6).tolist())
    assert len(calls) == len(set(calls))
    assert sum(level.evaluations for level in levels) == len(calls) <= 40
    assert all(level.reachable for level in levels)
