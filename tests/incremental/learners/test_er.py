"""The mathematics of experience replay."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
from torch import nn

from learner_tasks import MAIN, batch, task_data, two_tasks
from tcil.incremental.data.images import ImageSet
from tcil.incremental.learners import make_learner
from tcil.incremental.learners.base import Schedule
from tcil.incremental.learners.er import EROptions, _beta
from tcil.incremental.networks import small_cnn
from tcil.incremental.training import EpochState, OptimizerKind, train_stage


class TestER:
    def test_loss_is_cross_entropy_over_classes_seen(self, digits):
        learner, data = two_tasks("er", digits)
        learner.begin_task(data)
        stage = learner.stage("train", data, MAIN, torch.Generator())
        x, y = batch(digits, data)
        learner.model.eval()
        want = nn.functional.cross_entropy(learner.model(x)[:, :4], y)
        assert torch.allclose(stage.loss(x, y), want)

    def test_label_smoothing_spreads_a_share_of_the_target_over_classes_seen(self, digits):
        learner, data = two_tasks("er", digits, label_smoothing=0.2)
        learner.begin_task(data)
        stage = learner.stage("train", data, MAIN, torch.Generator())
        x, y = batch(digits, data)
        learner.model.eval()
        log_p = torch.log_softmax(learner.model(x)[:, :4], dim=1)
        target = 0.8 * nn.functional.one_hot(y, 4) + 0.2 / 4
        assert torch.allclose(stage.loss(x, y), -(target * log_p).sum(dim=1).mean())

    @pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
    def test_label_smoothing_out_of_range(self, share):
        with pytest.raises(ValueError, match=r"option label_smoothing: got .*; expected at least 0 and below 1"):
            EROptions(label_smoothing=share)

    def test_mixup_mixes_each_image_and_its_label_with_another_of_the_batch(self, digits):
        learner, data = two_tasks("er", digits, mixup=0.4, label_smoothing=0.1)
        learner.begin_task(data)
        stage = learner.stage("train", data, MAIN, torch.Generator().manual_seed(5))
        x, y = batch(digits, data)
        learner.model.eval()
        share = _beta(0.4, torch.Generator().manual_seed(5))
        log_p = torch.log_softmax(learner.model(share * x + (1 - share) * x.flip(0))[:, :4], dim=1)
        first, second = nn.functional.one_hot(y, 4), nn.functional.one_hot(y.flip(0), 4)
        target = 0.9 * (share * first + (1 - share) * second) + 0.1 / 4
        assert 0 < share < 1
        assert torch.allclose(stage.loss(x, y), -(target * log_p).sum(dim=1).mean(), atol=1e-6)

    def test_mixup_draws_from_the_beta_distribution(self):
        generator = torch.Generator().manual_seed(0)
        shares = torch.tensor([_beta(0.2, generator) for _ in range(2000)])
        assert abs(float(shares.mean()) - 0.5) < 0.05
        assert abs(float(shares.var()) - 1 / (4 * 1.4)) < 0.02  # of Beta(a, a): 1 / (4 (2 a + 1))

    @pytest.mark.parametrize("alpha", [-0.1, float("inf"), float("nan")])
    def test_mixup_out_of_range(self, alpha):
        with pytest.raises(ValueError, match=r"option mixup: got .*; expected a number of at least 0"):
            EROptions(mixup=alpha)

    def test_each_exemplar_once(self, digits):
        """Rows counted as the loss gets them, each known by its number, which is written into its image."""
        numbers = torch.arange(len(digits.train))
        images = torch.zeros_like(digits.train.images)
        images[:, 0, 0, 0], images[:, 0, 0, 1] = numbers // 256, numbers % 256
        numbered = dataclasses.replace(
            digits, train=ImageSet(images, digits.train.labels), mean=(0.0,), std=(1 / 255,), padding=0, flip=False
        )
        learner, data = make_learner("er", small_cnn, 10, seed=3), task_data(digits, 1)
        learner.begin_task(task_data(digits, 0))
        learner.begin_task(data)
        stage = learner.stage("train", data, Schedule(2, 1e-3, (), 0.0), torch.Generator())
        met, epochs = [], []

        def loss(x, y):
            rows = (x[:, 0, 0, 0].round() * 256 + x[:, 0, 0, 1].round()).long()
            assert torch.equal(y, data.column_of_row[rows])
            met.extend(rows.tolist())
            return stage.loss(x, y)

        def on_epoch(state, mean):
            epochs.append(collections.Counter(met))
            met.clear()

        train_stage(
            learner.model, dataclasses.replace(stage, loss=loss), numbered, data.column_of_row, batch_size=32,
            optimizer=OptimizerKind.SGD, generator=torch.Generator().manual_seed(0), state=EpochState(),
            on_epoch=on_epoch,
        )  # fmt: skip
        once = dict.fromkeys([*data.new_rows.tolist(), *torch.cat(list(data.exemplars.values())).tolist()], 1)
        assert len(once) == 2 * 30 + 2 * 6
        assert len(once) % 32  # the last batch is a short one
        assert epochs == [once, once]
