"""The mathematics of DER: an extractor per task, and two stages."""

from __future__ import annotations

import copy

import torch
from torch import nn

from learner_tasks import MAIN, batch, run_task, two_tasks
from tcil.incremental.learners.der import auxiliary_labels


class TestDER:
    def test_old_extractors_are_really_frozen(self, digits):
        """Weights and BN statistics bit-equal after a whole task of training."""
        learner, data = two_tasks("der", digits, finetune_epochs=1, finetune_milestones=())
        before = copy.deepcopy(learner.model.extractors[0].state_dict())
        run_task(learner, digits, data)
        after = learner.model.extractors[0].state_dict()
        assert all(torch.equal(before[key], after[key]) for key in before)
        newest = learner.model.extractors[1].state_dict()
        assert any(not torch.equal(before[key], newest[key]) for key in before)

    def test_expansion(self, digits):
        learner, data = two_tasks("der", digits)
        old_head = learner.model.fc.weight.detach().clone()
        learner.begin_task(data)
        model = learner.model
        last, new = model.extractors[0].state_dict(), model.extractors[1].state_dict()
        assert all(torch.equal(last[key], new[key]) for key in last)
        assert torch.equal(model.fc.weight[:, :32], old_head)
        assert model.fc.in_features == 64
        assert model.aux.out_features == 3
        model.train()
        assert not model.extractors[0].training
        assert model.extractors[1].training

    def test_auxiliary_labels(self):
        assert auxiliary_labels(torch.tensor([0, 1, 2, 3, 4, 5]), old=4).tolist() == [0, 0, 0, 0, 1, 2]

    def test_first_loss(self, digits):
        learner, data = two_tasks("der", digits)
        learner.begin_task(data)
        stage = learner.stage("train", data, MAIN, torch.Generator())
        model = learner.model.eval()
        x, y = batch(digits, data)
        features = model.features(x)
        want = nn.functional.cross_entropy(model.fc(features)[:, :4], y)
        want = want + nn.functional.cross_entropy(model.aux(features[:, 32:]), auxiliary_labels(y, 2))
        assert torch.allclose(stage.loss(x, stage.beside(x), y), want, atol=1e-5)
        trained = {id(p) for p in stage.parameters}
        assert not any(id(p) in trained for p in model.extractors[0].parameters())

    def test_second_stage_trains_a_new_head_only(self, digits):
        learner, data = two_tasks("der", digits)
        learner.begin_task(data)
        head = learner.model.fc.weight.detach().clone()
        stage = learner.stage("finetune", data, MAIN, torch.Generator().manual_seed(0))
        assert not torch.equal(head, learner.model.fc.weight)
        assert {id(p) for p in stage.parameters} == {id(p) for p in learner.model.fc.parameters()}
        s = stage.schedule
        assert (s.epochs, s.lr, s.milestones, s.weight_decay) == (30, 0.1, (15,), 5e-4)
        assert torch.bincount(data.column_of_row[stage.rows], minlength=4).tolist() == [6, 6, 6, 6]
        x, y = batch(digits, data)
        want = nn.functional.cross_entropy(learner.model.eval()(x)[:, :4] / 5, y)
        assert torch.allclose(stage.loss(stage.embed(x), y), want, atol=1e-5)
        assert not stage.embed(x).requires_grad

    def test_inference_omits_the_temperature_and_the_auxiliary_head(self, digits):
        learner, data = two_tasks("der", digits, finetune_epochs=1, finetune_milestones=())
        run_task(learner, digits, data)
        assert learner.model.aux is None
        x, _ = batch(digits, data)
        assert torch.equal(learner.model(x), learner.model.fc(learner.model.features(x)))
