"""The mathematics of BiC: a correction of new logits."""

from __future__ import annotations

import collections
import copy
import dataclasses
import math
from typing import ClassVar

import pytest
import torch
from torch import nn

from learner_tasks import MAIN, batch, loss_of, task_data, two_tasks
from tcil.incremental.data.images import Pixels
from tcil.incremental.learners import make_learner
from tcil.incremental.learners.base import soft_cross_entropy
from tcil.incremental.learners.bic import corrected, fold_correction
from tcil.incremental.networks import small_cnn
from tcil.incremental.training import EpochState, OptimizerKind, train_stage


class TestBiC:
    HELD: ClassVar = {"held_out": 0.3, "finetune_epochs": 40, "finetune_milestones": ()}

    def test_loss_of_stage_one(self, digits):
        learner, data = two_tasks("bic", digits, **self.HELD)
        before = copy.deepcopy(learner.model).eval()
        learner.begin_task(data)
        stage = learner.stage("train", data, MAIN, torch.Generator())
        with torch.no_grad():
            learner.model.fc.weight += 0.1
        learner.model.eval()
        x, y = batch(digits, data)
        logits = learner.model(x)[:, :4]
        distilled = soft_cross_entropy(before(x)[:, :2], logits[:, :2], 2.0)
        want = 0.5 * nn.functional.cross_entropy(logits, y) + 0.5 * distilled
        assert torch.allclose(loss_of(stage, x, y), want)

    def test_a_head_that_cannot_be_corrected_is_refused_before_anything_is_trained(self, digits):
        def network(n_classes):
            made = small_cnn(n_classes)
            made.fc = nn.Linear(made.fc.in_features, n_classes, bias=False)
            return made

        learner, first = make_learner("bic", network, 10, seed=1), task_data(digits, 0)
        with pytest.raises(ValueError, match=r"network: got .* without a bias; expected a linear layer fc with a bias"):
            learner.begin_task(first)

    def test_what_is_held_out_is_trained_on_in_the_first_task_alone(self, digits):
        """From the second task on, held-out rows stay held out; the first task trains on all its rows."""
        learner, data = two_tasks("bic", digits, **self.HELD)
        zero = task_data(digits, 0)
        assert learner.stages(zero) == ("train",)
        at_first = learner.stage("train", zero, MAIN, torch.Generator()).rows
        assert at_first.tolist() == zero.all_rows.tolist()
        learner.begin_task(data)
        kept = {c: at_first[zero.column_of_row[at_first] == c] for c in zero.columns}
        stage = learner.stage("finetune", dataclasses.replace(data, exemplars=kept), MAIN, torch.Generator())
        assert set(stage.rows.tolist()) & set(at_first.tolist())  # exemplars that the first task trained on
        assert learner.stages(data) == ("train", "finetune")
        first, second = (learner.stage(n, data, MAIN, torch.Generator()) for n in ("train", "finetune"))
        trained, tuned = set(first.rows.tolist()), set(second.rows.tolist())
        assert not trained & tuned
        assert trained | tuned <= set(data.all_rows.tolist())
        later = task_data(digits, 2)
        again = {int(r) for c in data.exemplars for r in later.exemplars[c]}
        assert trained & again <= set(later.all_rows[~learner._held(later, later.all_rows)].tolist())
        learner.end_task(data)
        learner.begin_task(later)
        now, corrected_on = (
            set(learner.stage(n, later, MAIN, torch.Generator()).rows.tolist()) for n in learner.stages(later)
        )
        assert not corrected_on & (now | trained)
        assert not tuned & now
        by_class = collections.Counter(data.column_of_row[second.rows].tolist())
        old = sum(by_class[c] for c in range(2))
        assert [by_class[c] for c in (2, 3)] == [math.ceil(old / 2)] * 2

    def test_without_held_out_exemplars_nothing_is_corrected(self, digits):
        learner, data = two_tasks("bic", digits, held_out=1e-6)
        learner.begin_task(data)
        assert learner.stages(data) == ("train",)
        weight = learner.model.fc.weight.clone()
        learner.end_task(data)
        assert torch.equal(learner.model.fc.weight, weight)

    def test_stage_two_moves_alpha_and_beta_alone_and_lowers_the_loss(self, digits):
        learner, data = two_tasks("bic", digits, **self.HELD)
        learner.begin_task(data)
        with torch.no_grad():
            learner.model.fc.bias[2:4] += 3  # new classes are favoured
        stage = learner.stage("finetune", data, MAIN, torch.Generator())
        x = Pixels(digits).plain(digits.train, stage.rows)
        y, fixed = data.column_of_row[stage.rows], copy.deepcopy(learner.model.state_dict())
        before = float(stage.loss(stage.embed(x), y).detach())
        train_stage(
            learner.model, stage, dataclasses.replace(digits, padding=0, flip=False), data.column_of_row, batch_size=32,
            optimizer=OptimizerKind.SGD, generator=torch.Generator().manual_seed(0), state=EpochState(),
            on_epoch=lambda state, loss: None,
        )  # fmt: skip
        after = learner.model.state_dict()
        assert all(torch.equal(fixed[name], after[name]) for name in fixed if name != "correction")
        assert float(stage.loss(stage.embed(x), y).detach()) < before
        assert float(after["correction"][1]) < 0

    def test_folded_head_gives_the_corrected_logits(self):
        model = small_cnn(6).eval()
        model.register_parameter("correction", nn.Parameter(torch.tensor([0.7, -1.5])))
        x = torch.randn(5, 1, 8, 8)
        with torch.no_grad():
            want = corrected(model(x)[:, :5], model.correction, 3)
            assert torch.allclose(want[:, 3:], 0.7 * model(x)[:, 3:5] - 1.5)
            untouched = model(x)[:, 5]
            fold_correction(model, 3, 5)
            assert torch.allclose(model(x)[:, :5], want, atol=1e-6)
            assert torch.equal(model(x)[:, 5], untouched)
        assert "correction" not in model.state_dict()

    @pytest.mark.parametrize("share", [0.0, 1.0])
    def test_share_is_checked(self, share):
        with pytest.raises(ValueError, match="option held_out"):
            make_learner("bic", small_cnn, 10, seed=1, options={"held_out": share})
