"""Mixed precision and compiled steps: training as in fp32 within tolerance, resumable, refused where it cannot be."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
import torch
from torch import nn

from tcil.experiments.config.settings import build
from tcil.experiments.runs.evaluate import TaskLogits
from tcil.experiments.runs.run import Run
from tcil.experiments.runs.store import RunFolder
from tcil.incremental import arithmetic
from tcil.incremental.arithmetic import Arithmetic, Precision, Scaler
from tcil.incremental.learners import TaskData, make_learner
from tcil.incremental.learners.base import Schedule
from tcil.incremental.networks import small_cnn
from tcil.incremental.training import EpochState, Interrupted, OptimizerKind, TrainingDiverged, train_stage

CPU = torch.device("cpu")
MIXED, COMPILED = Arithmetic(Precision.FP16), Arithmetic(compiled=True)


def second_task(digits, name="er"):
    """A learner at the beginning of its second task, untrained."""
    labels = digits.train.labels
    rows = {c: (labels == c).nonzero().squeeze(1)[:24] for c in range(4)}
    first = TaskData(0, range(2), torch.cat([rows[0], rows[1]]), {}, labels, (range(2),))
    spans, exemplars = (range(2), range(2, 4)), {c: rows[c][:6] for c in range(2)}
    data = TaskData(1, range(2, 4), torch.cat([rows[2], rows[3]]), exemplars, labels, spans)
    learner = make_learner(name, small_cnn, 10, seed=3)
    for task in (first, data):
        learner.begin_task(task)
    return learner, data


def train(
    digits, how, name="er", epochs=2, state=None, stop=lambda: False, weights=None, change=lambda stage: stage,
    stage="train",
):  # fmt: skip
    """The network after a stage, the losses, and the states after each epoch with their weights."""
    learner, data = second_task(digits, name)
    if weights is not None:
        learner.model.load_state_dict(weights)
    losses, states = [], []

    def on_epoch(now, loss):
        losses.append(loss)
        states.append((now, copy.deepcopy(learner.model.state_dict())))

    made = change(learner.stage(stage, data, Schedule(epochs, 0.02, (), 2e-4), torch.Generator()))
    try:
        train_stage(
            learner.model, made, digits, data.column_of_row, batch_size=16, optimizer=OptimizerKind.SGD,
            generator=torch.Generator().manual_seed(5), state=state or EpochState(), on_epoch=on_epoch, stop=stop,
            arithmetic=how,
        )  # fmt: skip
    except Interrupted as interrupted:
        states.append((interrupted.state, copy.deepcopy(learner.model.state_dict())))
    return learner.model, losses, states


def assert_close(one, other, tolerance):
    for name, value in one.state_dict().items():
        assert torch.allclose(value.double(), other.state_dict()[name].double(), atol=tolerance), name


def side_by_side(digits, how, name, scale=None, **options):
    """The losses of a stage in fp32 and in another precision, the state of the latter, and how far apart they end.

    That is the distance between the weights at both ends, over the distance that training moved them in fp32. The
    scale of fp16 begins low here, so that no step is skipped.
    """
    ends = []

    def noting(stage):
        ends.append((stage.parameters, [weight.detach().clone() for weight in stage.parameters]))
        return stage

    _, losses, _ = train(digits, Arithmetic(), name, change=noting, **options)
    state = (
        None if scale is None else EpochState(scale={"scale": torch.tensor(scale), "growth_tracker": torch.tensor(0)})
    )
    _, others, states = train(digits, how, name, change=noting, state=state, **options)
    (weights, start), (mixed, _) = ends
    assert all(weight.dtype == torch.float32 for weight in mixed)
    apart, moved = (
        torch.cat([(one - other).detach().flatten() for one, other in zip(weights, end, strict=True)]).norm()
        for end in (mixed, start)
    )
    return losses, others, states[-1][0], float(apart / moved)


class TestMixed:
    @pytest.mark.parametrize("name", ["er", "eeil", "wa", "der"])
    def test_fp16_trains_nearly_the_same_network(self, digits, name):
        losses, others, state, apart = side_by_side(digits, MIXED, name, scale=2.0**10)
        assert others == pytest.approx(losses, rel=0.01)
        assert others != losses
        assert apart < 0.2
        assert float(state.scale["scale"]) == 2.0**10

    @pytest.mark.parametrize("name", ["er", "eeil", "wa", "der"])
    def test_bf16_trains_nearly_the_same_network(self, digits, bf16, name):
        losses, others, state, apart = side_by_side(digits, Arithmetic(Precision.BF16), name, epochs=1)
        assert others == pytest.approx(losses, rel=0.01)
        assert others != losses
        assert apart < 0.2
        assert state.scale == {}

    @pytest.mark.parametrize("name", ["eeil", "der", "bic"])
    def test_the_second_stage_is_trained_in_bf16_too(self, digits, bf16, name):
        """On features of frozen extractors (DER), with a teacher (EEIL), and of two numbers alone (BiC)."""
        losses, others, _, apart = side_by_side(digits, Arithmetic(Precision.BF16), name, epochs=1, stage="finetune")
        assert others == pytest.approx(losses, rel=0.05)
        assert others != losses
        assert apart < 0.2

    def test_fp32_has_no_scale(self, digits):
        _, _, states = train(digits, Arithmetic(), epochs=1)
        assert states[-1][0].scale == {}

    def test_resuming_inside_an_epoch_is_bit_equal(self, digits):
        """With a scale that had moved: it is part of the state."""
        whole, _, _ = train(digits, MIXED)
        steps = iter(range(100))
        _, _, states = train(digits, MIXED, stop=lambda: next(steps) == 1)
        state, weights = states[-1]
        assert state.step == 2
        again, _, _ = train(digits, MIXED, state=state, weights=weights)
        assert all(torch.equal(v, again.state_dict()[k]) for k, v in whole.state_dict().items())

    def test_steps_that_overflow_are_skipped(self, digits):
        """Gradients of one step are infinite: the weights stay, the scale is halved, and training goes on."""
        calls, weights = [], []

        def change(stage):
            def loss(x, y):
                calls.append(len(x))
                weights.append(stage.parameters[0].detach().clone())
                value = stage.loss(x, y)
                return value + (torch.inf * (value - value.detach())).nan_to_num(0) if len(calls) == 2 else value

            return dataclasses.replace(stage, loss=loss)

        _, losses, states = train(digits, MIXED, epochs=1, change=change)
        assert torch.isfinite(torch.tensor(losses)).all()
        assert torch.equal(weights[1], weights[2])
        assert not torch.equal(weights[2], weights[3])
        assert float(states[-1][0].scale["scale"]) == 2.0**15

    def test_no_step_at_all_is_told(self, digits):
        def change(stage):
            def loss(x, y):
                value = stage.loss(x, y)
                return value + (torch.inf * (value - value.detach())).nan_to_num(0)

            return dataclasses.replace(stage, loss=loss)

        with pytest.raises(TrainingDiverged, match="stage train, epoch 4: all gradients overflow in fp16; use bf16"):
            train(digits, MIXED, epochs=9, change=change)

    def test_a_scaler_goes_on_where_it_stood(self):
        weight = nn.Parameter(torch.ones(1))
        scaler = Scaler(CPU, True, {})
        scaler.backward((weight * torch.inf).sum())
        scaler.step(torch.optim.SGD([weight], 0.1))
        assert {name: float(value) for name, value in scaler.state().items()} == {"scale": 2.0**15, "growth_tracker": 0}
        assert Scaler(CPU, True, scaler.state()).state() == scaler.state()
        assert weight.tolist() == [1.0]

    @pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
    def test_a_device_that_cannot(self):
        """Here: one that is not there, of which torch would only warn."""
        with pytest.raises(ValueError, match=r"precision: got 'bf16' on cuda \(.*\); expected fp32 on this device"):
            Arithmetic(Precision.BF16).check(torch.device("cuda"))

    def test_only_training_is_mixed(self, digits, tmp_path):
        settings = build(
            {"dataset": "digits", "tasks": 2, "epochs": 1, "milestones": [], "memory": 40, "precision": "fp16"}
        )
        run = Run(settings, tmp_path / settings.name, dataset=digits)
        run.execute(["vanilla"])
        stored = RunFolder(run.store.path).read_settings()
        assert stored.precision == "fp16"
        logits, _ = TaskLogits.read(run.store, 1).test
        assert logits.dtype == torch.float32
        assert not torch.equal(logits, logits.half().float())  # more digits than fp16 has

    def test_unknown_precision(self, digits, tmp_path):
        with pytest.raises(ValueError, match=r"precision: got 'fp8'; expected one of fp32, bf16, fp16"):
            Run(build({"dataset": "digits", "precision": "fp8"}), tmp_path, dataset=digits)


class TestCompiled:
    def test_what_is_missing_is_told(self, monkeypatch):
        def broken(function):
            raise RuntimeError("no compiler found\nmore")

        arithmetic._check_compiler.cache_clear()
        monkeypatch.setattr(torch, "compile", broken)
        with pytest.raises(ValueError, match=r"compile: got cpu \(no compiler found\).*Leave out --compile"):
            COMPILED.check(CPU)

    def test_the_function_is_compiled_and_the_network_left_alone(self, digits, monkeypatch, tmp_path):
        """Without a compiler: torch's own backend that only traces."""
        real = torch.compile
        monkeypatch.setattr(torch, "compile", lambda function: real(function, backend="eager"))
        arithmetic._check_compiler.cache_clear()
        for name in ("er", "eeil", "der"):
            plain, losses, _ = train(digits, Arithmetic(), name)
            traced, others, _ = train(digits, COMPILED, name)
            assert others == pytest.approx(losses, rel=1e-4)
            assert_close(plain, traced, 1e-4)
            assert not any("_orig_mod" in key for key in traced.state_dict())
        settings = build({"dataset": "digits", "tasks": 2, "epochs": 1, "milestones": [], "memory": 40})
        for compiled in (True, False):
            run = Run(settings, tmp_path / f"{compiled}", dataset=digits, compiled=compiled)
            run.execute(["vanilla"])
            noted = json.loads((run.store.path / "environment.json").read_text())
            assert noted.get("compiled", False) is compiled
        arithmetic._check_compiler.cache_clear()

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["er", "eeil", "wa", "der"])
    def test_compiled_steps_train_the_same_network(self, digits, name):
        COMPILED.check(CPU)
        plain, losses, _ = train(digits, Arithmetic(), name)
        compiled, others, _ = train(digits, COMPILED, name)
        assert others == pytest.approx(losses, rel=1e-3)
        assert_close(plain, compiled, 1e-3)
