"""The training loop: resuming, divergence, and what frozen parts compute once."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch

from learner_tasks import MAIN, run_task, task_data, two_tasks
from tcil.incremental import training
from tcil.incremental.data.images import Pixels
from tcil.incremental.learners import TaskData, make_learner
from tcil.incremental.learners.base import Schedule, Stage
from tcil.incremental.networks import small_cnn
from tcil.incremental.training import EpochState, OptimizerKind, TrainingDiverged, _reader, train_stage


class TestTraining:
    def test_weights_that_the_loss_does_not_move_shrink_by_the_total_decay(self, digits):
        learner, data = make_learner("er", small_cnn, 10, seed=3), task_data(digits, 0)
        schedule = Schedule(30, 0.05, (15, 22), 0.0).decaying(0.8, 8)
        learner.begin_task(data)
        unused = learner.model.fc.weight[2:].detach().clone()
        stage = learner.stage("train", dataclasses.replace(data, new_rows=data.new_rows[:16]), schedule, None)
        train_stage(
            learner.model, stage, digits, data.column_of_row, batch_size=2, optimizer=OptimizerKind.SGD,
            generator=torch.Generator().manual_seed(0), state=EpochState(), on_epoch=lambda state, loss: None,
        )  # fmt: skip
        shrunk = learner.model.fc.weight[2:].detach() / unused
        assert shrunk.min() == pytest.approx(math.exp(-0.8), rel=0.05)
        assert shrunk.max() == pytest.approx(math.exp(-0.8), rel=0.05)

    @pytest.mark.parametrize("kind", list(OptimizerKind))
    def test_resuming_after_any_epoch_is_bit_equal(self, digits, kind):
        data = task_data(digits, 0)
        schedule = Schedule(4, 0.05, (2,), 2e-4)

        def run(learner, stage, generator, state, states):
            train_stage(
                learner.model, stage, digits, data.column_of_row, batch_size=16, optimizer=kind, generator=generator,
                state=state, on_epoch=lambda s, loss: states.append((s, copy.deepcopy(learner.model.state_dict()))),
            )  # fmt: skip

        def start():
            learner = make_learner("er", small_cnn, 10, seed=1)
            learner.begin_task(data)
            generator = torch.Generator().manual_seed(5)
            return learner, learner.stage("train", data, schedule, generator), generator

        learner, stage, generator = start()
        states = []
        run(learner, stage, generator, EpochState(), states)
        whole = learner.model.state_dict()
        for after in (0, 1, 2):
            again, stage, generator = start()
            state, weights = states[after]
            again.model.load_state_dict(weights)
            run(again, stage, generator, state, [])
            assert all(torch.equal(whole[k], v) for k, v in again.model.state_dict().items())

    def test_nan_stops_with_a_verdict(self, digits):
        learner = make_learner("er", small_cnn, 10, seed=1)
        data = task_data(digits, 0)
        with pytest.raises(TrainingDiverged, match="stage train, epoch 0: the loss is nan"):
            run_task(learner, digits, data, Schedule(2, math.inf, (), 0.0))

    def test_same_seed_same_network(self):
        one, same, other = (make_learner("er", small_cnn, 10, seed=s) for s in (1, 1, 2))
        data = TaskData(0, range(2), torch.arange(2), {}, torch.arange(2), (range(2),))
        torch.manual_seed(0)
        state = torch.get_rng_state()
        for learner in (one, same, other):
            learner.begin_task(data)
        assert torch.equal(torch.get_rng_state(), state)  # the global generator is left alone
        assert torch.equal(one.model.fc.weight, same.model.fc.weight)
        assert not torch.equal(one.model.fc.weight, other.model.fc.weight)


CHECKED = 2  # images, the first of a stage, on which it is checked whether networks can be folded


class TestFrozenParts:
    """What the frozen parts of a stage compute (DER's extractors, teachers) is kept where an image has few views."""

    @pytest.mark.parametrize("padding", [0, 1])
    def test_networks_are_checked_for_folding_on_the_same_images_whatever_was_drawn(self, digits, padding):
        data_set = dataclasses.replace(digits, padding=padding)
        learner, data = two_tasks("wa", digits)
        learner.begin_task(data)
        stage = learner.stage("train", data, Schedule(3, 0.05, (), 2e-4), torch.Generator())
        first = []

        def beside(x):
            first.append(x)
            return stage.beside(x)

        for seed in (1, 2):
            generator = torch.Generator().manual_seed(seed)
            _reader(dataclasses.replace(stage, beside=beside), Pixels(data_set), data_set.train, generator, 7)
            assert torch.equal(first[0], Pixels(data_set).plain(data_set.train, stage.rows[:CHECKED]))
            first.clear()

    @pytest.mark.parametrize(("flip", "views"), [(True, 2), (False, 1)])
    def test_second_stage_sees_every_image_once_where_nothing_is_cropped(self, digits, flip, views):
        """And trains the head as on images embedded anew each time."""
        data_set = dataclasses.replace(digits, padding=0, flip=flip)
        learner, data = two_tasks("der", digits, finetune_epochs=4, finetune_milestones=())
        learner.begin_task(data)
        stage = learner.stage("finetune", data, MAIN, torch.Generator().manual_seed(0))
        seen = []

        def embed(x):
            seen.append(len(x))
            return stage.embed(x)

        def reader():
            generator = torch.Generator().manual_seed(1)
            return _reader(dataclasses.replace(stage, embed=embed), Pixels(data_set), data_set.train, generator, 7)

        kept = reader()
        rows = stage.rows[torch.randperm(len(stage.rows), generator=torch.Generator().manual_seed(5))][:11]
        (read,) = kept(rows, slice(None))
        assert sum(seen) == CHECKED + views * len(stage.rows)
        ways = [stage.embed(view) for view in Pixels(data_set).views(data_set.train, rows)]
        matches = torch.stack([(read - way).abs().amax(dim=1) < 1e-4 for way in ways])
        assert matches.any(dim=0).all()
        assert not flip or matches.float().mean(dim=1).min() > 0  # both views turn up
        assert torch.equal(read, *reader()(rows, slice(None)))  # and the generator says which

    def test_second_stage_embeds_crops_anew(self, digits):
        learner, data = two_tasks("der", digits)
        learner.begin_task(data)
        stage = learner.stage("finetune", data, MAIN, torch.Generator().manual_seed(0))
        pixels, rows = Pixels(digits), stage.rows[:5]
        assert pixels.n_views > 2
        (read,) = _reader(stage, pixels, digits.train, torch.Generator().manual_seed(1), 7)(rows, slice(None))
        again = stage.embed(pixels.augmented(digits.train, rows, torch.Generator().manual_seed(1)))
        assert torch.equal(read, again)

    @pytest.mark.parametrize("name", ["der", "eeil", "wa", "bic"])
    @pytest.mark.parametrize(("flip", "views"), [(True, 2), (False, 1)])
    def test_first_stage_runs_frozen_networks_once_where_nothing_is_cropped(self, digits, name, flip, views):
        """On the images that it would draw anyway, and with the network that it would train anyway."""
        data_set = dataclasses.replace(digits, padding=0, flip=flip)
        learner, data = two_tasks(name, digits)
        learner.begin_task(data)
        stage = learner.stage("train", data, Schedule(3, 0.05, (), 2e-4), torch.Generator())
        start, seen, pixels = copy.deepcopy(learner.model.state_dict()), [], Pixels(data_set)

        def counted(x):
            seen.append(len(x))
            return stage.beside(x)

        generator, same = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
        read = _reader(dataclasses.replace(stage, beside=counted), pixels, data_set.train, generator, 7)
        for rows in stage.rows[torch.randperm(len(stage.rows))].split(11):
            x, features = read(rows, slice(2, 9))
            assert torch.equal(x, pixels.augmented(data_set.train, rows, same)[2:9])
            assert torch.allclose(features, stage.beside(x), atol=1e-4)
        assert torch.equal(generator.get_state(), same.get_state())
        assert sum(seen) == CHECKED + views * len(stage.rows)

        def trained(stage):
            learner.model.load_state_dict(start)
            train_stage(
                learner.model, stage, data_set, data.column_of_row, batch_size=16, optimizer=OptimizerKind.SGD,
                generator=torch.Generator().manual_seed(3), state=EpochState(), on_epoch=lambda state, loss: None,
            )  # fmt: skip
            return copy.deepcopy(learner.model.state_dict())

        anew = dataclasses.replace(stage, beside=None, loss=lambda x, y: stage.loss(x, stage.beside(x), y))
        for one, other in zip(trained(stage).values(), trained(anew).values(), strict=True):
            assert torch.allclose(one, other, atol=1e-3)

    def test_first_stage_keeps_nothing_of_crops_nor_beyond_its_bound(self, digits, monkeypatch):
        whole = dataclasses.replace(digits, padding=0, flip=True)
        learner, data = two_tasks("der", digits)
        learner.begin_task(data)
        stage = learner.stage("train", data, MAIN, torch.Generator())
        size = 2 * len(stage.rows) * 32 * 4
        for bound, data_set, fits in ((size, whole, True), (size - 1, whole, False), (2**30, digits, False)):
            monkeypatch.setattr(training, "_MOST_KEPT", bound)
            pixels, rows = Pixels(data_set), stage.rows[:5]
            assert (training._kept(stage, pixels, data_set.train, 7) is not None) == fits
            x, features = _reader(stage, pixels, data_set.train, torch.Generator().manual_seed(1), 7)(rows, slice(None))
            assert torch.equal(x, pixels.augmented(data_set.train, rows, torch.Generator().manual_seed(1)))
            assert torch.allclose(features, stage.beside(x), atol=1e-4)

    def test_a_stage_has_one_frozen_part(self):
        with pytest.raises(ValueError, match="stage: got 'train' with embed and beside; expected one of the two"):
            Stage("train", torch.arange(2), MAIN, torch.add, [], embed=torch.relu, beside=torch.relu)
