"""The mathematics of logit adjustment."""

from __future__ import annotations

import torch
from torch import nn

from learner_tasks import MAIN, batch, two_tasks
from tcil.incremental.learners.la import class_shares


class TestLA:
    def test_loss_adds_the_log_of_the_class_shares(self, digits):
        learner, data = two_tasks("la", digits, strength=0.5)
        learner.begin_task(data)
        stage = learner.stage("train", data, MAIN, torch.Generator())
        x, y = batch(digits, data)
        learner.model.eval()
        shares = torch.tensor([6.0, 6.0, 30.0, 30.0]) / 72
        assert torch.allclose(class_shares(data.column_of_row[data.all_rows], 4), shares)
        want = nn.functional.cross_entropy(learner.model(x)[:, :4] + 0.5 * shares.log(), y)
        assert torch.allclose(stage.loss(x, y), want)

    def test_strength_zero_is_er(self, digits):
        learner, data = two_tasks("la", digits, strength=0.0)
        learner.begin_task(data)
        stage = learner.stage("train", data, MAIN, torch.Generator())
        x, y = batch(digits, data)
        learner.model.eval()
        assert torch.allclose(stage.loss(x, y), nn.functional.cross_entropy(learner.model(x)[:, :4], y))
