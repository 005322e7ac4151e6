"""The mathematics of EEIL: distillation per task, balanced fine-tuning."""

from __future__ import annotations

import copy

import torch
from torch import nn

from learner_tasks import MAIN, batch, loss_of, run_task, task_data, two_tasks
from tcil.incremental.learners.base import soft_cross_entropy


class TestEEIL:
    def test_distils_each_old_task_on_its_own_logits(self, digits):
        learner, data = two_tasks("eeil", digits, finetune_epochs=1, finetune_milestones=())
        run_task(learner, digits, data)
        third = task_data(digits, 2)
        before = copy.deepcopy(learner.model).eval()
        learner.begin_task(third)
        stage = learner.stage("train", third, MAIN, torch.Generator())
        with torch.no_grad():
            learner.model.fc.weight += 0.05
        learner.model.eval()
        x, y = batch(digits, third)
        now, old = learner.model(x), before(x)
        want = nn.functional.cross_entropy(now[:, :6], y)
        for span in (slice(0, 2), slice(2, 4)):
            target = torch.softmax(old[:, span] / 2, dim=1)
            want = want - (target * torch.log_softmax(now[:, span] / 2, dim=1)).sum(1).mean()
        assert torch.allclose(loss_of(stage, x, y), want, atol=1e-5)

    def test_finetuning_distils_all_heads_from_stage_one_on_balanced_data(self, digits):
        learner, data = two_tasks("eeil", digits)
        learner.begin_task(data)
        teacher = copy.deepcopy(learner.model).eval()
        stage = learner.stage("finetune", data, MAIN, torch.Generator().manual_seed(0))
        counts = torch.bincount(data.column_of_row[stage.rows], minlength=4)
        assert counts.tolist() == [6, 6, 6, 6]
        assert (stage.schedule.epochs, stage.schedule.lr, stage.schedule.milestones) == (30, 0.01, (10, 20))
        with torch.no_grad():
            learner.model.fc.weight += 0.05
        learner.model.eval()
        x, y = batch(digits, data)
        now, old = learner.model(x), teacher(x)
        want = nn.functional.cross_entropy(now[:, :4], y)
        for span in (slice(0, 2), slice(2, 4)):
            want = want + soft_cross_entropy(old[:, span], now[:, span], 2.0)
        assert torch.allclose(loss_of(stage, x, y), want, atol=1e-5)
        assert len(stage.parameters) == len(list(learner.model.parameters()))

    def test_bce_form_is_weaker(self, digits):
        """The pull back toward the teacher, as the gradient on the head that the distillation term alone has."""
        pull = {}
        for form in ("softmax", "bce"):
            learner, data = two_tasks("eeil", digits, distillation=form)
            learner.begin_task(data)
            stage = learner.stage("train", data, MAIN, torch.Generator())
            model = learner.model.eval()
            with torch.no_grad():
                model.fc.weight[0] += 0.3
            x, y = batch(digits, data)
            term = loss_of(stage, x, y) - nn.functional.cross_entropy(model(x)[:, :4], y)
            pull[form] = torch.autograd.grad(term, model.fc.weight)[0].norm().item()
        assert 0 < pull["bce"] < pull["softmax"]

    def test_soft_cross_entropy_is_least_at_the_teacher(self):
        teacher = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
        least = soft_cross_entropy(teacher, teacher, 2.0)
        entropy = -(torch.softmax(teacher / 2, 1) * torch.log_softmax(teacher / 2, 1)).sum(1).mean()
        assert torch.allclose(least, entropy)
        assert soft_cross_entropy(teacher, teacher + torch.eye(5, 3), 2.0) > least
