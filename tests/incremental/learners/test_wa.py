"""The mathematics of weight alignment, with its restricted head and without."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

from learner_tasks import MAIN, batch, loss_of, run_task, task_data, two_tasks
from tcil.incremental.learners import make_learner
from tcil.incremental.learners.base import Schedule
from tcil.incremental.learners.wa import align_weights
from tcil.incremental.networks import small_cnn
from tcil.incremental.training import EpochState, OptimizerKind, TrainingDiverged, train_stage


class TestWA:
    def test_loss(self, digits):
        learner, data = two_tasks("wa", digits)
        before = copy.deepcopy(learner.model).eval()
        learner.begin_task(data)
        stage = learner.stage("train", data, MAIN, torch.Generator())
        with torch.no_grad():
            learner.model.fc.weight += 0.1
        learner.model.eval()
        x, y = batch(digits, data)
        now, old = learner.model(x), before(x)
        share = 2 / 4  # old / (old + new)
        teacher = torch.softmax(old[:, :2] / 2, dim=1)
        distilled = -(teacher * torch.log_softmax(now[:, :2] / 2, dim=1)).sum(1).mean()
        want = (1 - share) * nn.functional.cross_entropy(now[:, :4], y) + share * distilled
        assert torch.allclose(loss_of(stage, x, y), want, atol=1e-6)

    @torch.no_grad()
    def test_alignment_ratio(self):
        model = small_cnn(6)
        before = model.fc.weight.detach().clone()
        gamma = align_weights(model, old=2, seen=4)
        norms = before.norm(dim=1)
        assert gamma == pytest.approx(float(norms[:2].mean() / norms[2:4].mean()))
        assert torch.equal(model.fc.weight[:2], before[:2])
        assert torch.allclose(model.fc.weight[2:4], gamma * before[2:4])
        assert torch.equal(model.fc.weight[4:], before[4:])
        after = model.fc.weight.norm(dim=1)
        assert float(after[:2].mean()) == pytest.approx(float(after[2:4].mean()))

    @torch.no_grad()
    @pytest.mark.parametrize(("zero", "told"), [((0, 2), "old"), ((2, 4), "new"), ((0, 4), "old and new")])
    def test_rows_that_are_all_0_cannot_be_aligned(self, zero, told):
        model = small_cnn(6)
        model.fc.weight[slice(*zero)] = 0
        before = model.fc.weight.clone()
        with pytest.raises(TrainingDiverged, match=f"the head's rows of {told} classes are all 0; lower lr"):
            align_weights(model, old=2, seen=4)
        assert torch.equal(model.fc.weight, before)

    def test_first_task_is_not_aligned(self, digits):
        learner = make_learner("wa", small_cnn, 10, seed=3)
        data = task_data(digits, 0)
        learner.begin_task(data)
        before = learner.model.fc.weight.detach().clone()
        learner.end_task(data)
        assert torch.equal(before, learner.model.fc.weight)

    def test_the_aligned_network_is_the_next_teacher(self, digits):
        learner, data = two_tasks("wa", digits)
        run_task(learner, digits, data)
        weights = learner.model.fc.weight.detach().clone()
        learner.begin_task(task_data(digits, 2))
        assert torch.equal(learner.teacher.fc.weight, weights)


class TestRestrictedWA:
    """The original's restriction of the head: no weight below 0 after any step, and no bias."""

    def stage(self, digits, index=0, head="fixed"):
        learner = make_learner("wa", small_cnn, 10, seed=3, options={"restrict_head": True, "head": head})
        for before in range(index):
            run_task(learner, digits, task_data(digits, before))
        data = task_data(digits, index)
        learner.begin_task(data)
        return learner, data, learner.stage("train", data, MAIN, torch.Generator())

    @pytest.mark.parametrize("head", ["fixed", "growing"])
    def test_after_every_step(self, digits, head):
        learner, data, stage = self.stage(digits, 1, head)
        fc, least = learner.model.fc, []

        def loss(x, before, y):  # what the step before left
            least.append(fc.weight.min().item())
            assert not fc.bias.any()
            return stage.loss(x, before, y)

        train_stage(
            learner.model, dataclasses.replace(stage, loss=loss), digits, data.column_of_row, batch_size=16,
            optimizer=OptimizerKind.SGD, generator=torch.Generator().manual_seed(0), state=EpochState(),
            on_epoch=lambda state, loss: None,
        )  # fmt: skip
        assert len(least) > 8
        assert min(least[1:]) == 0 == fc.weight.min().item()
        assert fc.weight[: data.seen].max().item() > 0
        learner.end_task(data)
        assert not learner.model.fc.bias.any()

    def test_one_step_is_the_step_without_it_clamped(self, digits):
        learner, data, stage = self.stage(digits)
        plain = copy.deepcopy(learner.model)
        free = dataclasses.replace(
            stage,
            loss=lambda x, y: nn.functional.cross_entropy(plain(x)[:, :2], y),
            parameters=[p for p in plain.parameters() if p.requires_grad],
            after_step=None,
        )
        for model, one in ((learner.model, stage), (plain, free)):
            train_stage(
                model, dataclasses.replace(one, schedule=Schedule(1, 0.1, (), 2e-4)), digits, data.column_of_row,
                batch_size=len(one.rows), optimizer=OptimizerKind.SGD, generator=torch.Generator().manual_seed(0),
                state=EpochState(), on_epoch=lambda state, loss: None,
            )  # fmt: skip
        assert plain.fc.weight.min().item() < 0
        for name, value in plain.state_dict().items():
            want = value.clamp(min=0) if name == "fc.weight" else value
            assert torch.equal(learner.model.state_dict()[name], want)

    def test_the_bias_is_there_and_not_trained(self, digits):
        learner, _, stage = self.stage(digits)
        assert learner.model.fc.bias.shape == (10,)
        assert not any(p is learner.model.fc.bias for p in stage.parameters)
        assert len(stage.parameters) == len(list(learner.model.parameters())) - 1
        assert learner.model.state_dict().keys() == small_cnn(10).state_dict().keys()

    def test_new_rows_that_are_clamped_to_0_end_the_task(self, digits):
        learner, data, stage = self.stage(digits, 1)
        with torch.no_grad():
            learner.model.fc.weight[2:4] -= 10
            stage.after_step()
        with pytest.raises(TrainingDiverged, match="rows of new classes are all 0"):
            learner.end_task(data)

    @torch.no_grad()
    def test_alignment_is_applied(self, digits):
        with torch.enable_grad():
            learner, data, stage = self.stage(digits, 1)
        stage.after_step()
        norms = learner.model.fc.weight[:4].norm(dim=1)
        learner.end_task(data)
        after = learner.model.fc.weight[:4].norm(dim=1)
        assert torch.equal(after[:2], norms[:2])
        assert float(after[2:].mean()) == pytest.approx(float(norms[:2].mean()))
        assert not torch.allclose(after[2:], norms[2:])
        assert float(learner.model.fc.weight.min()) >= 0

    def test_without_the_option_nothing_changes(self, digits):
        """Stored runs have no such option in their settings, and mean what they did."""
        learner = make_learner("wa", small_cnn, 10, seed=3)
        learner.begin_task(task_data(digits, 0))
        stage = learner.stage("train", task_data(digits, 0), MAIN, torch.Generator())
        assert stage.after_step is None
        assert learner.model.fc.bias.any()
        assert [id(p) for p in stage.parameters] == [id(p) for p in learner.model.parameters()]
