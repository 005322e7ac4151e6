"""Statistics TS: old classes drawn from what is kept of frozen features."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import tcil
from tcil.calibration.calibrators.class_statistics import _Statistics
from tcil.options import Verdict

CENTRES = 0.5 * torch.randn(6, 12, generator=torch.Generator().manual_seed(1))


def draw(labels, seed, shape=(12,)):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(len(labels), 12, generator=generator) @ torch.diag(torch.linspace(0.5, 2.0, 12))
    return (CENTRES[labels] + noise).reshape(len(labels), *shape), labels


def head(sharpness, n_classes=6):
    """The exact posterior of the classes, its logits too large by a factor."""
    inverse = torch.diag(1 / torch.linspace(0.5, 2.0, 12) ** 2)
    layer = nn.Linear(12, n_classes)
    means = CENTRES[:n_classes]
    with torch.no_grad():
        layer.weight.copy_(sharpness * means @ inverse)
        layer.bias.copy_(-0.5 * sharpness * ((means @ inverse) * means).sum(dim=1))
    return layer.eval()


def new(start, seed, count=300):
    return draw(start + torch.arange(count) % 2, seed)


def test_the_temperature_is_that_of_all_classes():
    calibrator = tcil.StatisticsTemperatureScaling()
    for task in range(3):
        calibrator.partial_fit(
            head(3.0, 2 * task + 2), new(2 * task, task), range(2 * task, 2 * task + 2), classes=range(2 * task + 2)
        )
    assert calibrator.result_.n_remembered == 4
    assert calibrator.result_.n_drawn == 400
    x, y = draw(torch.arange(3000) % 6, 9)
    optimal = tcil.TemperatureScaling().fit(head(3.0)(x).detach(), y)
    assert calibrator.temperature_ == pytest.approx(optimal.temperature_, rel=0.15)


def test_draws_have_the_moments_of_the_classes():
    x, y = draw(torch.arange(4000) % 4, 3)
    for rank in (0, 3, 12):
        statistics = _Statistics.read(None).merged(x, y, rank)
        again = _Statistics.read(json.loads(json.dumps(statistics.record())))
        drawn = again.draw([0, 3], 4000, seed=0)
        assert torch.allclose(drawn[:4000].mean(dim=0), x[y == 0].mean(dim=0), atol=0.15)
        assert torch.allclose(drawn[4000:].std(dim=0), torch.linspace(0.5, 2.0, 12), rtol=0.1)
    correlated = torch.randn(4000, 1, generator=torch.Generator().manual_seed(0)).repeat(1, 2)
    kept = _Statistics.read(None).merged(correlated, torch.zeros(4000, dtype=torch.long), 1).draw([0], 2000, seed=0)
    assert torch.corrcoef(kept.T)[0, 1] > 0.99


def test_tasks_are_merged_as_if_they_came_together():
    x, y = draw(torch.arange(600) % 6, 3)
    first, rest = y < 2, y >= 2
    one = _Statistics.read(None).merged(x, y, 12)
    two = _Statistics.read(None).merged(x[first], y[first], 12).merged(x[rest], y[rest], 12)
    assert one.freedom == two.freedom == 594
    assert torch.allclose(one.factor.T @ one.factor, two.factor.T @ two.factor, rtol=1e-3, atol=0.5)
    assert all(torch.equal(one.means[label], two.means[label]) for label in range(6))


def test_maps_are_taken_as_they_are():
    x, y = draw(torch.arange(200) % 2, 0, shape=(3, 2, 2))
    model = nn.Sequential(nn.Flatten(), head(2.0, 4))
    first = tcil.StatisticsTemperatureScaling().fit(model, (x, y), [0, 1], classes=[0, 1])
    later = draw(2 + torch.arange(200) % 2, 1, shape=(3, 2, 2))
    second = tcil.StatisticsTemperatureScaling().fit(model, later, [2, 3], history=first.history_)
    assert second.result_.n_remembered == 2


def test_a_class_that_comes_back_is_known_anew():
    first = tcil.StatisticsTemperatureScaling().fit(
        head(2.0, 4), draw(torch.arange(200) % 2, 0), [0, 1], classes=[0, 1]
    )
    labels = torch.tensor([1, 2, 3]).repeat(70)
    second = tcil.StatisticsTemperatureScaling().fit(head(2.0, 4), draw(labels, 1), [1, 2, 3], history=first.history_)
    assert second.result_.n_remembered == 1
    means = _Statistics.read(second.history_).means
    assert sorted(means) == [0, 1, 2, 3]
    assert torch.allclose(means[1], draw(labels, 1)[0][labels == 1].mean(dim=0), atol=0.01)


def test_the_first_task_is_temperature_scaling():
    x, y = new(0, 5)
    own = tcil.StatisticsTemperatureScaling().fit(head(2.0, 2), (x, y), [0, 1])
    plain = tcil.TemperatureScaling().fit(head(2.0, 2)(x).detach(), y)
    assert own.temperature_ == pytest.approx(plain.temperature_)


def test_it_is_saved_with_what_it_remembers(tmp_path):
    model = head(2.0, 4)
    first = tcil.StatisticsTemperatureScaling(rank=3).fit(model, new(0, 0), [0, 1], classes=[0, 1])
    first.save(tmp_path / "c.json")
    loaded = tcil.load(tmp_path / "c.json")
    assert loaded.history_ == first.history_
    loaded.partial_fit(model, new(2, 1), [2, 3])
    assert loaded.result_.n_remembered == 2


HISTORY = tcil.StatisticsTemperatureScaling().fit(head(2.0, 2), new(0, 0), [0, 1]).history_


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"history": None}, r"history: got none for the old classes \[0, 1\]"),
        ({"history": {}}, "history: got"),
        ({"history": {**HISTORY, "calibrator": "PACT"}}, "history: got"),
        ({"history": {**HISTORY, "width": 0}}, "history: got"),
        ({"history": {**HISTORY, "width": 6}}, "history: got"),
        ({"history": {**HISTORY, "means": {"size": 1.0, "halves": "!"}}}, "history: got"),
        ({"history": {**HISTORY, "freedom": float("nan")}}, "history: got"),
        ({"new_classes": [3]}, r"valid: got samples of other classes than the new ones \(labels \[2\]\)"),
        ({"new_classes": [7]}, "new_classes: got"),
        ({"valid": draw(torch.arange(8) % 4, 0)}, "valid: got samples of other classes"),
    ],
)
def test_what_cannot_be_is_told(changes, message):
    given = {"valid": new(2, 1), "new_classes": [2, 3], "history": HISTORY, **changes}
    with pytest.raises(ValueError, match=message):
        tcil.StatisticsTemperatureScaling().fit(
            head(2.0, 4), given["valid"], given["new_classes"], history=given["history"]
        )


def test_other_features_are_told():
    wide = nn.Sequential(nn.Linear(5, 4))
    with pytest.raises(ValueError, match="statistics of 12 features for 5"):
        tcil.StatisticsTemperatureScaling().fit(
            wide, (torch.randn(20, 5), 2 + torch.arange(20) % 2), [2, 3], history=HISTORY
        )


@pytest.mark.parametrize(("option", "value"), [("rank", -1), ("per_class", 0), ("seed", -1), ("batch_size", 0)])
def test_options_are_checked(option, value):
    with pytest.raises(ValueError, match=option):
        tcil.StatisticsTemperatureScaling(**{option: value})


def test_nothing_of_the_user_s_is_changed():
    model, (x, y) = head(2.0, 2).train(), new(0, 0)
    before, state = x.clone(), torch.get_rng_state()
    tcil.StatisticsTemperatureScaling().fit(model, (x, y), [0, 1])
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training


def test_a_masked_own_class_is_refused_as_by_other_calibrators():
    class Masked(nn.Module):
        def forward(self, x):
            logits = head(3.0, 3)(x)
            logits[::7, 2] = -torch.inf
            return logits

    with pytest.raises(ValueError, match="valid labels: got"):
        tcil.StatisticsTemperatureScaling().fit(Masked(), draw(torch.arange(300) % 3, 0), range(3))


def test_statistics_of_another_width_are_refused_also_where_no_old_class_is_among_the_classes():
    before = tcil.StatisticsTemperatureScaling().fit(head(3.0, 2), new(0, 0), range(2), classes=range(2)).history_
    wide = torch.randn(60, 16), 2 + torch.arange(60) % 2
    with pytest.raises(ValueError, match="history: got statistics of 12 features for 16"):
        tcil.StatisticsTemperatureScaling().fit(nn.Linear(16, 2), wide, [2, 3], classes=[2, 3], history=before)


@pytest.mark.filterwarnings("ignore::tcil.CalibrationWarning")  # noise tells no temperature
def test_statistics_of_another_width_do_not_make_the_draws_narrower():
    many = draw(torch.arange(2000) % 2, 0)
    before = tcil.StatisticsTemperatureScaling().fit(head(3.0, 2), many, range(2), classes=range(2)).history_
    labels = torch.arange(100) % 2
    wide = torch.randn(100, 16, generator=torch.Generator().manual_seed(1)), labels
    fit = tcil.StatisticsTemperatureScaling().fit
    head_of_noise = nn.Linear(16, 2)
    after = fit(head_of_noise, wide, range(2), classes=range(2), history=before).history_
    fresh = fit(head_of_noise, wide, range(2), classes=range(2)).history_
    assert after["freedom"] == fresh["freedom"] == 98


def two_modes(labels, seed):
    """Classes that are no clouds around their means: each is two clouds, far from its mean."""
    generator = torch.Generator().manual_seed(seed)
    side = 3.0 * (2 * torch.randint(2, (len(labels),), generator=generator) - 1)
    x = torch.randn(len(labels), 4, generator=generator)
    x[torch.arange(len(labels)), labels] += side
    return x, labels


class Squared(nn.Module):
    """Logits by the squares of the inputs, which tell both clouds of a class."""

    def forward(self, x):
        return 0.2 * x.square()


def test_a_spread_that_cannot_be_matched_is_told():
    first = tcil.StatisticsTemperatureScaling().fit(
        Squared(), two_modes(torch.arange(400) % 2, 0), [0, 1], classes=range(2)
    )
    assert first.result_.verdict is Verdict.OK
    later = two_modes(2 + torch.arange(400) % 2, 1)
    with pytest.warns(tcil.CalibrationWarning, match="no spread of features drawn"):
        second = tcil.StatisticsTemperatureScaling().fit(Squared(), later, [2, 3], history=first.history_)
    assert second.result_.verdict is Verdict.SPREAD_NOT_MATCHED
    assert second.result_.spread == pytest.approx(0.25, rel=0.01)


def test_a_validation_set_without_a_temperature_matches_no_spread():
    """All of it is correct, so any spread would do: that of the statistics is used, and a warning says so."""
    model = head(3.0, 4)
    first = tcil.StatisticsTemperatureScaling().fit(model, new(0, 0), [0, 1], classes=range(2))
    x, y = 100 * CENTRES[2 + torch.arange(40) % 2], 2 + torch.arange(40) % 2
    logits = model(x).detach()
    assert torch.equal(logits.argmax(dim=1), y)
    with pytest.warns(tcil.CalibrationWarning, match="no spread of features drawn"):
        second = tcil.StatisticsTemperatureScaling().fit(model, (x, y), [2, 3], history=first.history_)
    assert second.result_.spread == 1.0
    assert second.result_.verdict is Verdict.SPREAD_NOT_MATCHED
