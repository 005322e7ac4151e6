"""NCM and RanPAC: what one pass over each task keeps is what all the data together would give."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tcil.incremental.data.images import Pixels
from tcil.incremental.learners import TaskData, make_learner
from tcil.incremental.learners.base import Schedule
from tcil.incremental.pretrained.heads import CosineHead
from tcil.incremental.training import EpochState, Interrupted, OptimizerKind, train_stage


class Flat(nn.Module):
    """A network on frozen features: the pixels themselves."""

    def __init__(self, n_classes, head=nn.Linear):
        super().__init__()
        self.fc = head(64, n_classes)

    def forward(self, x):
        return self.fc(x.flatten(1))


def task_of(digits, index, per_class=40):
    labels = digits.train.labels
    columns = range(2 * index, 2 * index + 2)
    rows = torch.cat([(labels == c).nonzero().squeeze(1)[:per_class] for c in columns])
    spans = tuple(range(2 * i, 2 * i + 2) for i in range(index + 1))
    return TaskData(index, columns, rows, {}, labels, spans)


def learn(learner, digits, n_tasks, stop_at=None):
    """Train task by task; with `stop_at`, each pass is interrupted after so many batches and resumed."""
    for index in range(n_tasks):
        data = task_of(digits, index)
        learner.begin_task(data)
        generator = torch.Generator().manual_seed(0)
        state, steps, epochs = EpochState(), [0], []

        def stop(steps=steps):
            steps[0] += 1
            return steps[0] == stop_at

        while not epochs:
            stage = learner.stage("train", data, Schedule(5, 0.1, (), 0.0), generator)
            try:
                train_stage(
                    learner.model, stage, digits, data.column_of_row, batch_size=16, optimizer=OptimizerKind.SGD,
                    generator=generator, state=state, on_epoch=lambda now, loss, e=epochs: e.append(now), stop=stop,
                )  # fmt: skip
            except Interrupted as interrupted:
                state = interrupted.state
        assert [one.epoch for one in epochs] == [1]
        learner.end_task(data)
    rows = torch.cat([task_of(digits, index).new_rows for index in range(n_tasks)])
    return Pixels(digits).plain(digits.train, rows), digits.train.labels[rows]


def test_ncm_classifies_by_the_nearest_mean(digits):
    learner = make_learner("ncm", Flat, 10, seed=1)
    x, y = learn(learner, digits, 3)
    means = torch.stack([x[y == c].flatten(1).mean(dim=0) for c in range(6)])
    distances = torch.cdist(x.flatten(1), means).square()
    logits = learner.model(x)[:, :6]
    assert torch.allclose(logits.softmax(dim=1), (-0.5 * distances).softmax(dim=1), atol=1e-4)
    assert float((logits.argmax(1) == y).float().mean()) > 0.9


def test_ncm_with_cosines(digits):
    learner = make_learner("ncm", lambda n: Flat(n, CosineHead), 10, seed=1)
    x, y = learn(learner, digits, 2)
    unit = nn.functional.normalize(x.flatten(1), dim=1)
    means = torch.stack([nn.functional.normalize(unit[y == c].mean(dim=0), dim=0) for c in range(4)])
    assert torch.allclose(learner.model(x)[:, :4], learner.model.fc.scale * unit @ means.T, atol=1e-4)


def test_ranpac_is_ridge_regression_on_all_tasks_together(digits):
    learner = make_learner("ranpac", Flat, 10, seed=1, options={"projections": 50, "ridge": 3.0})
    x, y = learn(learner, digits, 3)
    h = learner.model.features(x).double()
    targets = nn.functional.one_hot(y, 10).double()
    expected = torch.linalg.solve(h.T @ h + 3.0 * torch.eye(50).double(), h.T @ targets)
    assert torch.allclose(learner.model.fc.weight.double().T, expected, atol=1e-4)


def test_ranpac_chooses_the_ridge_on_every_fifth_image_of_a_class(digits):
    learner = make_learner("ranpac", Flat, 10, seed=1, options={"projections": 50})
    x, y = learn(learner, digits, 2)
    assert learner.model.counts.tolist() == [40.0] * 4 + [0.0] * 6
    h, targets = learner.model.features(x).double(), nn.functional.one_hot(y, 10).double()
    held = torch.zeros(len(y), dtype=torch.bool)
    for c in range(4):
        held[(y == c).nonzero().squeeze(1)[4::5]] = True
    assert torch.allclose(learner.model.sums[1, :4].double(), (targets[held].T @ h[held])[:4], atol=1e-3)

    def error(ridge):
        fit = h[~held]
        weight = torch.linalg.solve(fit.T @ fit + ridge * torch.eye(50).double(), fit.T @ targets[~held])
        return float((h[held] @ weight - targets[held]).square().sum())

    best = min((10.0**power for power in range(-4, 9)), key=error)
    expected = torch.linalg.solve(h.T @ h + best * torch.eye(50).double(), h.T @ targets)
    assert torch.allclose(learner.model.fc.weight.double().T, expected, atol=1e-3)


def observed(x, y, **options):
    """RanPAC's network of five classes after one pass over these features."""
    learner = make_learner("ranpac", Flat, 5, seed=1, options={"projections": 300, **options})
    learner.begin_task(TaskData(0, range(5), torch.arange(len(y)), {}, y, (range(5),)))
    for rows in torch.arange(len(y)).split(50):
        learner.model.observe(x[rows], y[rows])
    return learner.model


@pytest.mark.parametrize("below", [0.0, 1e-3])
@pytest.mark.parametrize("options", [{}, {"ridge": 1e-4}])
@pytest.mark.parametrize("spread", [0.0, 1e-4])
def test_ranpac_on_classes_that_hardly_vary(spread, options, below):
    """Rounding moves eigenvalues of their moments below 0, here also by a given amount."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(5).repeat(60)
    x = 10 * torch.randn(5, 64, generator=generator)[y] + spread * torch.randn(300, 64, generator=generator)
    model = observed(x, y, **options)
    model.moments -= below * torch.eye(300)
    model.set_head()
    assert model.fc.weight.isfinite().all()
    assert torch.equal(model(x).argmax(dim=1), y)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_ranpac_names_features_that_are_not_finite(value):
    x, y = torch.ones(50, 64), torch.arange(5).repeat(10)
    x[3] = value
    with pytest.raises(ValueError, match=r"network: got features that are not finite.*; expected finite features"):
        observed(x, y).set_head()


@pytest.mark.parametrize("name", ["ncm", "ranpac"])
def test_a_pass_that_was_interrupted_counts_each_image_once(name, digits):
    options = {"projections": 30} if name == "ranpac" else {}
    whole, stopped = (make_learner(name, Flat, 10, seed=1, options=options) for _ in range(2))
    learn(whole, digits, 2)
    learn(stopped, digits, 2, stop_at=3)
    for key, value in whole.model.state_dict().items():
        assert torch.equal(value, stopped.model.state_dict()[key]), key


def test_options_out_of_range_are_told():
    with pytest.raises(ValueError, match="option projections: got 0"):
        make_learner("ranpac", Flat, 10, seed=1, options={"projections": 0})
    with pytest.raises(ValueError, match=r"option head: got 'growing'; expected fixed"):
        make_learner("ncm", Flat, 10, seed=1, options={"head": "growing"})


def test_online_replay_presents_each_new_image_once_and_as_many_exemplars(digits):
    learner = make_learner("er", Flat, 10, seed=1, options={"online": True})
    first, data = task_of(digits, 0), task_of(digits, 1)
    exemplars = {c: first.new_rows[digits.train.labels[first.new_rows] == c][:5] for c in first.columns}
    data = TaskData(1, data.columns, data.new_rows, exemplars, data.column_of_row, data.task_columns)
    learner.begin_task(first)
    generator = torch.Generator().manual_seed(0)
    alone = learner.stage("train", first, Schedule(7, 0.1, (3,), 0.0), generator)
    assert alone.rows.tolist() == first.new_rows.tolist()
    stage = learner.stage("train", data, Schedule(7, 0.1, (3,), 0.0), generator)
    assert (stage.schedule.epochs, stage.schedule.milestones) == (1, ())
    assert stage.rows[:80].tolist() == data.new_rows.tolist()
    replayed = stage.rows[80:].tolist()
    assert len(replayed) == 80
    assert set(replayed) <= {int(row) for rows in exemplars.values() for row in rows}
    assert learner.replays(80, 10) == 8.0
    assert make_learner("er", Flat, 10, seed=1).replays(80, 10) == 1.0
