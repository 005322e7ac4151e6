"""The learners' mathematics, each as the method's definition has it."""

from __future__ import annotations

import collections
import copy
import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from tcil.foundation.errors import invalid
from tcil.incremental import training
from tcil.incremental.data.datasets import load_dataset
from tcil.incremental.data.images import ImageSet, Pixels
from tcil.incremental.learners import LEARNERS, LearnerOptions, TaskData, make_learner
from tcil.incremental.learners.base import Schedule, Stage, grow_head, soft_cross_entropy
from tcil.incremental.learners.bic import corrected, fold_correction
from tcil.incremental.learners.der import auxiliary_labels
from tcil.incremental.learners.er import EROptions
from tcil.incremental.learners.la import class_shares
from tcil.incremental.learners.wa import align_weights
from tcil.incremental.networks import small_cnn
from tcil.incremental.training import EpochState, OptimizerKind, TrainingDiverged, _reader, train_stage

MAIN = Schedule(epochs=2, lr=0.05, milestones=(1,), weight_decay=2e-4)


@pytest.fixture(scope="module")
def digits():
    return load_dataset("digits")


def task_data(digits, index, size=2, share=6):
    """Task `index` of the digits, with `share` exemplars of each old class."""
    labels = digits.train.labels
    columns = range(index * size, (index + 1) * size)
    rows = {c: (labels == c).nonzero().squeeze(1) for c in range(columns.stop)}
    spans = tuple(range(i * size, (i + 1) * size) for i in range(index + 1))
    exemplars = {c: rows[c][:share] for c in range(columns.start)}
    return TaskData(index, columns, torch.cat([rows[c][10:40] for c in columns]), exemplars, labels, spans)


def run_task(learner, digits, data, schedule=MAIN, seed=0):
    generator = torch.Generator().manual_seed(seed)
    learner.begin_task(data)
    for name in learner.stages(data):
        stage = learner.stage(name, data, schedule, generator)
        train_stage(
            learner.model,
            stage,
            digits,
            data.column_of_row,
            batch_size=32,
            optimizer=OptimizerKind.SGD,
            generator=generator,
            state=EpochState(),
            on_epoch=lambda state, loss: None,
        )
    learner.end_task(data)


def batch(digits, data, n=24):
    rows = data.all_rows[torch.linspace(0, len(data.all_rows) - 1, n).long()]
    return Pixels(digits).plain(digits.train, rows), data.column_of_row[rows]


def two_tasks(name, digits, **options):
    learner = make_learner(name, small_cnn, 10, seed=3, options=options)
    run_task(learner, digits, task_data(digits, 0))
    return learner, task_data(digits, 1)


@pytest.mark.parametrize("head", ["fixed", "growing"])
@pytest.mark.parametrize("name", [name for name, kind in LEARNERS.items() if kind.rehearses])
def test_every_learner_learns_three_tasks(name, head, digits):
    short = {"finetune_epochs": 1, "finetune_milestones": ()} if name in ("eeil", "der", "bic") else {}
    learner = make_learner(name, small_cnn, 10, seed=1, options={"head": head, **short})
    for index in range(3):
        run_task(learner, digits, task_data(digits, index))
        x, _ = batch(digits, task_data(digits, index))
        width = learner.model(x).shape[1]
        assert width == (10 if head == "fixed" else 2 * (index + 1))
    assert learner.teacher is None


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
        assert torch.allclose(stage.loss(x, y), want, atol=1e-6)

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

        def loss(x, y):  # what the step before left
            least.append(fc.weight.min().item())
            assert not fc.bias.any()
            return stage.loss(x, y)

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
        assert torch.allclose(stage.loss(x, y), want, atol=1e-5)

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
        assert torch.allclose(stage.loss(x, y), want, atol=1e-5)
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
            term = stage.loss(x, y) - nn.functional.cross_entropy(model(x)[:, :4], y)
            pull[form] = torch.autograd.grad(term, model.fc.weight)[0].norm().item()
        assert 0 < pull["bce"] < pull["softmax"]

    def test_soft_cross_entropy_is_least_at_the_teacher(self):
        teacher = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
        least = soft_cross_entropy(teacher, teacher, 2.0)
        entropy = -(torch.softmax(teacher / 2, 1) * torch.log_softmax(teacher / 2, 1)).sum(1).mean()
        assert torch.allclose(least, entropy)
        assert soft_cross_entropy(teacher, teacher + torch.eye(5, 3), 2.0) > least


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
        assert sum(seen) == views * len(stage.rows)
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

    @pytest.mark.parametrize(("flip", "views"), [(True, 2), (False, 1)])
    def test_first_stage_runs_frozen_extractors_once_where_nothing_is_cropped(self, digits, flip, views):
        """On the images that it would draw anyway, and with the network that it would train anyway."""
        data_set = dataclasses.replace(digits, padding=0, flip=flip)
        learner, data = two_tasks("der", digits)
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
        assert sum(seen) == views * len(stage.rows)

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

    def test_inference_omits_the_temperature_and_the_auxiliary_head(self, digits):
        learner, data = two_tasks("der", digits, finetune_epochs=1, finetune_milestones=())
        run_task(learner, digits, data)
        assert learner.model.aux is None
        x, _ = batch(digits, data)
        assert torch.equal(learner.model(x), learner.model.fc(learner.model.features(x)))


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
        assert torch.allclose(stage.loss(x, y), want)

    def test_what_is_held_out_is_never_trained_on_and_stays_so(self, digits):
        learner, data = two_tasks("bic", digits, **self.HELD)
        learner.begin_task(data)
        assert learner.stages(data) == ("train", "finetune")
        first, second = (learner.stage(n, data, MAIN, torch.Generator()) for n in ("train", "finetune"))
        trained, tuned = set(first.rows.tolist()), set(second.rows.tolist())
        assert not trained & tuned
        assert trained | tuned <= set(data.all_rows.tolist())
        later = task_data(digits, 2)
        again = {int(r) for c in data.exemplars for r in later.exemplars[c]}
        assert trained & again <= set(later.all_rows[~learner._held(later, later.all_rows)].tolist())
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


class TestTraining:
    def test_schedule(self):
        schedule = Schedule(200, 0.1, (100, 150), 2e-4)
        assert [schedule.rate(e) for e in (0, 99, 100, 149, 150, 199)] == pytest.approx(
            [0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
        )

    def test_total_decay(self):
        """Of the paper's CIFAR-100: (100 x 0.1 + 50 x 0.01 + 50 x 0.001) x 51 steps x 2e-4 / 0.1."""
        paper = Schedule(200, 0.1, (100, 150), 2e-4)
        assert paper.total_decay(51) == pytest.approx(10.55 * 51 * 2e-3) == pytest.approx(1.0761)
        assert Schedule(30, 0.05, (15, 22), 2e-4).total_decay(69) == pytest.approx(0.789 * 69 * 2e-3)
        short = Schedule(30, 0.05, (15, 22), 7.0).decaying(paper.total_decay(51), 69)
        assert short.total_decay(69) == pytest.approx(paper.total_decay(51))
        assert (short.epochs, short.lr, short.milestones) == (30, 0.05, (15, 22))
        assert short.weight_decay == pytest.approx(1.977e-3, rel=1e-3)

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


def test_growing_head_keeps_old_rows():
    model = small_cnn(4)
    before = model.fc.weight.detach().clone(), model.fc.bias.detach().clone()
    grow_head(model, 7)
    assert model.fc.out_features == 7
    assert torch.equal(model.fc.weight[:4], before[0])
    assert torch.equal(model.fc.bias[:4], before[1])


@dataclass(frozen=True)
class OwnOptions(LearnerOptions):
    flag: bool = False
    count: int = 0
    weights: tuple[float, ...] = (0.5, 1)
    steps: tuple[int, ...] = ()
    limit: float = float("inf")
    name: str = "plain"
    more: tuple[str, ...] | None = None

    def __post_init__(self):
        if self.count > 8:
            raise invalid("count", f"{self.count}", "at most 8")


class TestOptions:
    def learner(self, monkeypatch, **options):
        own = type("Own", (LEARNERS["er"],), {"options_type": OwnOptions})
        monkeypatch.setitem(LEARNERS, "own", own)
        return make_learner("own", small_cnn, 10, seed=1, options=options).options

    def test_defaults_are_legal(self, monkeypatch):
        assert self.learner(monkeypatch) == OwnOptions()

    @pytest.mark.parametrize(
        "given",
        [
            {"flag": True},
            {"flag": False},
            {"count": 0},
            {"count": -1},
            {"weights": [0.1, 2]},
            {"weights": ()},
            {"steps": [3, 0.5]},
            {"limit": 2},
            {"name": "other"},
            {"more": ["x"]},
            {"head": "growing"},
        ],
    )
    def test_values_of_the_defaults_type(self, monkeypatch, given):
        ((name, value),) = given.items()
        assert getattr(self.learner(monkeypatch, **given), name) == value

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"flag": 1}, "option flag of learner own: got 1; expected true or false"),
            ({"count": True}, "option count of learner own: got True; expected a whole number"),
            ({"count": 1.0}, "option count of learner own: got 1.0; expected a whole number"),
            ({"count": 2**31}, "option count of learner own: got 2147483648; expected a whole number of at most"),
            ({"count": 9}, "count: got 9; expected at most 8"),  # by the learner
            ({"weights": 0.5}, "option weights of learner own: got 0.5; expected a list, each a number"),
            ({"weights": ["a"]}, "option weights of learner own"),
            ({"limit": float("nan")}, "option limit of learner own"),
            ({"name": 3}, "option name of learner own: got 3; expected text"),
            ({"head": "groing"}, "head: got 'groing'.*Did you mean 'growing'"),
        ],
    )
    def test_others_are_refused(self, monkeypatch, given, message):
        with pytest.raises(ValueError, match=message):
            self.learner(monkeypatch, **given)

    @pytest.mark.parametrize(
        ("name", "given", "message"),
        [
            ("der", {"finetune_epochs": 0}, "option finetune_epochs: got 0; expected at least 1"),
            ("eeil", {"finetune_lr": -0.1}, "option finetune_lr: got -0.1; expected at least 0"),
            ("eeil", {"distillation": "bc"}, "distillation: got 'bc'.*Did you mean 'bce'"),
            ("wa", {"distillation_temperature": -1}, "option distillation_temperature: got -1"),
            ("wa", {"distillation_temperature": 0}, "distillation_temperature: got 0; expected greater than 0"),
            ("eeil", {"distillation_temperature": 0}, "distillation_temperature: got 0; expected greater than 0"),
            ("der", {"finetune_temperature": 0}, "finetune_temperature: got 0; expected greater than 0"),
        ],
    )
    def test_ranges_of_ours(self, name, given, message):
        with pytest.raises(ValueError, match=message):
            make_learner(name, small_cnn, 10, seed=1, options=given)


def test_unknown_names_suggest():
    expected = rf"learner: got 'eil'; expected one of {', '.join(LEARNERS)}. Did you mean 'eeil'"
    with pytest.raises(ValueError, match=expected):
        make_learner("eil", small_cnn, 10, seed=1)
    with pytest.raises(
        ValueError, match=r"option of learner der: got 'finetune_epoch'.*Did you mean 'finetune_epochs'"
    ):
        make_learner("der", small_cnn, 10, seed=1, options={"finetune_epoch": 3})


class TestRates:
    def rates(self, shape, *epochs):
        schedule = Schedule(epochs=10, lr=0.2, milestones=(5, 8), weight_decay=0.0, shape=shape)
        return [schedule.rate(epoch) for epoch in epochs]

    def test_steps_ignore_the_place_within_an_epoch(self):
        assert self.rates("steps", 0, 4.99, 5, 5.5, 8) == pytest.approx([0.2, 0.2, 0.02, 0.02, 0.002])
        assert self.rates("steps", 4.75) == self.rates("steps", 4)

    def test_cosine(self):
        assert self.rates("cosine", 0, 2.5, 5, 10) == pytest.approx([0.2, 0.1 * (1 + 0.5**0.5), 0.1, 0.0])

    def test_one_cycle(self):
        assert self.rates("one-cycle", 0, 1.5, 3, 6.5, 10) == pytest.approx([0.008, 0.104, 0.2, 0.1, 0.0])

    def test_unknown(self):
        with pytest.raises(ValueError, match="lr_shape: got 'line'"):
            self.rates("line", 0)


class TestGrowingHeads:
    def test_a_head_without_a_bias(self):
        network = small_cnn(4)
        network.fc = nn.Linear(network.fc.in_features, 4, bias=False)
        before = network.fc.weight.detach().clone()
        grow_head(network, 6)
        assert network.fc.bias is None
        assert network.fc.weight.shape[0] == 6
        assert torch.equal(network.fc.weight[:4], before)

    @pytest.mark.parametrize(
        ("network", "told"),
        [(nn.Linear(3, 2), "Linear whose fc is missing"), (nn.ModuleDict({"fc": nn.ReLU()}), "fc is a ReLU")],
    )
    def test_a_head_that_cannot_grow(self, network, told):
        with pytest.raises(ValueError, match=f"network: got .*{told}; expected a linear layer fc"):
            grow_head(network, 6)
