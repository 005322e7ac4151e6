"""The learners' mathematics, each as the method's definition has it."""

from __future__ import annotations

import collections
import copy
import dataclasses
import math

import pytest
import torch
from torch import nn

from tcil.incremental.datasets import load_dataset
from tcil.incremental.images import ImageSet, Pixels
from tcil.incremental.learners import LEARNERS, TaskData, make_learner
from tcil.incremental.learners.base import Schedule, grow_head, soft_cross_entropy
from tcil.incremental.learners.der import auxiliary_labels
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
@pytest.mark.parametrize("name", list(LEARNERS))
def test_every_learner_learns_three_tasks(name, head, digits):
    short = {"finetune_epochs": 1, "finetune_milestones": ()} if name in ("eeil", "der") else {}
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
        assert torch.allclose(stage.loss(x, y), want, atol=1e-5)
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
        read = kept(rows, slice(None))
        assert sum(seen) == views * len(stage.rows)
        ways = [stage.embed(view) for view in Pixels(data_set).views(data_set.train, rows)]
        matches = torch.stack([(read - way).abs().amax(dim=1) < 1e-4 for way in ways])
        assert matches.any(dim=0).all()
        assert not flip or matches.float().mean(dim=1).min() > 0  # both views turn up
        assert torch.equal(read, reader()(rows, slice(None)))  # and the generator says which

    def test_second_stage_embeds_crops_anew(self, digits):
        learner, data = two_tasks("der", digits)
        learner.begin_task(data)
        stage = learner.stage("finetune", data, MAIN, torch.Generator().manual_seed(0))
        pixels, rows = Pixels(digits), stage.rows[:5]
        assert pixels.n_views > 2
        read = _reader(stage, pixels, digits.train, torch.Generator().manual_seed(1), 7)(rows, slice(None))
        again = stage.embed(pixels.augmented(digits.train, rows, torch.Generator().manual_seed(1)))
        assert torch.equal(read, again)

    def test_inference_omits_the_temperature_and_the_auxiliary_head(self, digits):
        learner, data = two_tasks("der", digits, finetune_epochs=1, finetune_milestones=())
        run_task(learner, digits, data)
        assert learner.model.aux is None
        x, _ = batch(digits, data)
        assert torch.equal(learner.model(x), learner.model.fc(learner.model.features(x)))


class TestTraining:
    def test_schedule(self):
        schedule = Schedule(200, 0.1, (100, 150), 2e-4)
        assert [schedule.rate(e) for e in (0, 99, 100, 149, 150, 199)] == pytest.approx(
            [0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
        )

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


def test_unknown_names_suggest():
    with pytest.raises(ValueError, match=r"learner: got 'eil'; expected one of er, eeil, wa, der. Did you mean 'eeil'"):
        make_learner("eil", small_cnn, 10, seed=1)
    with pytest.raises(
        ValueError, match=r"option of learner der: got 'finetune_epoch'.*Did you mean 'finetune_epochs'"
    ):
        make_learner("der", small_cnn, 10, seed=1, options={"finetune_epoch": 3})
