"""A model comes back as it was given, whatever it does to itself, also after a fit that failed."""

from __future__ import annotations

import contextlib
import copy
import threading
import warnings

import pytest
import torch
import torch.utils.checkpoint
from blob_networks import D, K, Plain, draw_blobs, fit, state_of, trained
from torch import nn

import tcil


@pytest.fixture(scope="module")
def blobs():
    return draw_blobs()


class InPlace(Plain):
    """Works on its input in place."""

    def forward(self, x):
        return super().forward(x.sub_(0.5))


def test_networks_that_work_in_place_do_not_reach_the_data(blobs):
    plain = trained(Plain, blobs)
    model = InPlace()
    model.load_state_dict(plain.state_dict())
    memory, valid = (tuple(t.clone() for t in part) for part in blobs)
    first = fit(model, (memory, valid)).temperature_
    assert torch.equal(memory[0], blobs[0][0])
    assert torch.equal(valid[0], blobs[1][0])
    assert fit(model, (memory, valid)).temperature_ == first


def test_a_model_made_in_inference_mode(blobs):
    with torch.inference_mode():
        model = Plain()
    before = [parameter.requires_grad for parameter in model.parameters()]
    tcil.predict_logits(model, blobs[1])
    assert [parameter.requires_grad for parameter in model.parameters()] == before


class Touchy(Plain):
    """Fails at the batch that `fail_at` says."""

    def __init__(self):
        super().__init__()
        self.dropout, self.batches, self.fail_at = nn.Dropout(0.3), 0, 10**9

    def forward(self, x):
        self.batches += 1
        if self.batches >= self.fail_at:
            raise RuntimeError("out of memory, say")
        return self.fc(self.dropout(self.backbone(x)))


class TestComesBackAsItWas:
    def model(self, blobs, fail_at=10**9):
        model = trained(Touchy, blobs)
        model.batches, model.fail_at = 0, fail_at
        model.train()
        model.backbone.eval()  # a frozen part inside a training model
        model.backbone[0].weight.requires_grad_(False)
        return model

    def test_after_fit(self, blobs):
        model = self.model(blobs)
        before, weights = state_of(model), copy.deepcopy(model.state_dict())
        fit(model, blobs)
        assert state_of(model) == before
        assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())

    @pytest.mark.parametrize("fail_at", [1, 2, 3, 5, 9])
    def test_after_a_failed_fit(self, blobs, fail_at):
        model = self.model(blobs, fail_at=fail_at)
        before = state_of(model)
        calibrator = tcil.TCIL()
        with pytest.raises(RuntimeError, match="out of memory"):
            calibrator.fit(model, *blobs, [2, 3])
        assert state_of(model) == before
        with pytest.raises(tcil.NotFittedError):
            _ = calibrator.temperature_

    def test_a_failed_fit_keeps_the_old_one(self, blobs):
        calibrator = tcil.TCIL().fit(trained(Plain, blobs), *blobs, [2, 3])
        before = calibrator.result_
        with pytest.raises(ValueError):
            calibrator.fit(trained(Plain, blobs), *blobs, [2, 3, 99])
        assert calibrator.result_ is before

    def test_under_no_grad_and_inference_mode(self, blobs):
        model = trained(Plain, blobs)
        want = fit(model, blobs).temperature_
        with torch.no_grad():
            assert fit(model, blobs).temperature_ == want
        with torch.inference_mode():
            assert fit(model, blobs).temperature_ == want

    def test_perturb_ts_and_predict_logits(self, blobs):
        model = self.model(blobs)
        before = state_of(model)
        tcil.PerturbedTemperatureScaling().fit(model, valid=blobs[1])
        tcil.predict_logits(model, blobs[1])
        assert state_of(model) == before


class Restless(nn.Module):
    """Changes itself in every forward pass, in each of the ways that a module can."""

    def __init__(self):
        super().__init__()
        self.backbone, self.fc = nn.Sequential(nn.Linear(D, 16), nn.BatchNorm1d(16), nn.ReLU()), nn.Linear(16, K)
        self.again = self.fc  # a module at two places
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.full((16,), float("nan")))
        self.calls, self.last, self.fail_at = 0, None, 10**9
        self.seen = []

    def forward(self, x):
        self.calls += 1
        self.seen.append(len(x))
        self.passes += 1
        f = self.backbone(x.mul_(2.0))
        self.mean = f.detach().mean(dim=0)
        self.last = f
        self.late = nn.Linear(2, 2)
        self.fc.training = not self.fc.training
        if self.calls >= self.fail_at:
            raise RuntimeError("out of memory, say")
        return self.again(f)


class TestModelsThatChangeThemselves:
    def model(self, fail_at=10**9):
        torch.manual_seed(0)
        model = Restless().train()
        model.fail_at = fail_at
        model.fc.weight.grad = torch.ones_like(model.fc.weight)
        model.backbone[1].eval()
        return model

    @pytest.mark.parametrize("fail_at", [10**9, 1, 2, 3])
    def test_are_handed_back_as_they_were(self, blobs, fail_at):
        model = self.model(fail_at)
        memory, valid = (tuple(t.clone() for t in part) for part in blobs)
        before, weights = state_of(model), copy.deepcopy(model.state_dict())
        acts = {
            "fit": lambda: tcil.TCIL(batch_size=20).fit(model, memory, valid, [2, 3]),
            "noise": lambda: tcil.PerturbedTemperatureScaling(batch_size=20).fit(model, valid=valid),
            "predict": lambda: tcil.predict_logits(model, valid, batch_size=20),
        }
        for act in acts.values():
            fails = pytest.raises(RuntimeError, match="out of memory, say")
            with contextlib.nullcontext() if fail_at == 10**9 else fails, warnings.catch_warnings():
                warnings.simplefilter("ignore", tcil.CalibrationWarning)
                act()
            assert state_of(model) == before
            assert not hasattr(model, "late")
            assert all(torch.equal(weights[k], v) or k == "mean" for k, v in model.state_dict().items())
        assert model.seen  # it did run
        assert torch.equal(memory[0], blobs[0][0])
        assert torch.equal(valid[0], blobs[1][0])

    def test_are_left_alone_by_wrap(self, blobs):
        model = trained(Plain, blobs).train()
        calibrator, before = fit(model, blobs), state_of(model)
        calibrator.wrap(model)
        calibrator.check_weights(model)
        assert state_of(model) == before


def test_batch_norm_statistics_stay(task):
    task.model.train()
    before = copy.deepcopy(task.model.state_dict())
    tcil.TCIL().fit(task.model, task.memory, task.valid, task.new_classes)
    assert all(torch.equal(before[k], v) for k, v in task.model.state_dict().items())
    assert task.model.training


class Merging(nn.Linear):
    """A LoRA layer as it is commonly written: eval() merges the adapter into the weights, train() takes it out."""

    def __init__(self):
        super().__init__(16, K)
        self.down, self.up = nn.Parameter(torch.randn(2, 16)), nn.Parameter(torch.randn(K, 2))
        self.merged = False

    def train(self, mode=True):
        super().train(mode)
        if self.merged == mode:
            self.weight.data += (-1 if mode else 1) * self.up @ self.down
            self.merged = not mode
        return self

    def forward(self, x):
        return super().forward(x) if self.merged else super().forward(x) + x @ self.down.T @ self.up.T


@pytest.mark.filterwarnings("ignore::tcil.CalibrationWarning")
def test_layers_that_merge_in_eval_are_left_alone(blobs):
    model = Plain()
    model.fc = Merging()
    before, want = copy.deepcopy(model.state_dict()), model(blobs[1][0]).detach()
    logits, _ = tcil.predict_logits(model, blobs[1])
    fit(model, blobs)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.allclose(logits, want, atol=1e-5)


class Shrinking(Plain):
    """Writes to its own parameters in forward(): directly, through .data, and by another tensor of another shape."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        with torch.no_grad():
            self.fc.weight.mul_(0.99)
        self.backbone[0].weight.data.mul_(0.99)
        self.fc.bias.data = self.fc.bias.data + 1.0
        self.unused.data = torch.zeros(2)
        return super().forward(x)


@pytest.mark.filterwarnings("ignore::tcil.CalibrationWarning")
@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_that_forward_changes_are_put_back(blobs, frozen):
    torch.manual_seed(0)
    model = Shrinking().requires_grad_(not frozen)
    before, parameters = copy.deepcopy(model.state_dict()), list(model.parameters())
    acts = (
        lambda: tcil.predict_logits(model, blobs[1]),
        lambda: tcil.TCIL().fit(model, *blobs, [2, 3]),
        lambda: tcil.PerturbedTemperatureScaling().fit(model, valid=blobs[1]),
    )
    for act in acts:
        act()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
        assert all(parameter.requires_grad is not frozen for parameter in parameters)


class TestLogitsThatDrift:
    """A network that changes its weights gives other logits with every call."""

    @pytest.mark.parametrize("kind", ["parameter", "buffer", "replaced buffer"])
    def test_are_told(self, blobs, kind):
        class Drifting(Plain):
            def __init__(self):
                super().__init__()
                self.register_buffer("level", torch.ones(()))

            def forward(self, x):
                logits = super().forward(x.mul_(1.0)) * self.level
                if kind == "parameter":
                    self.fc.weight.data.mul_(0.9)
                elif kind == "buffer":
                    self.level.mul_(0.9)
                else:
                    self.level = 0.9 * self.level
                return logits

        model = Drifting()
        model.load_state_dict(trained(Plain, blobs).state_dict(), strict=False)
        before = copy.deepcopy(model.state_dict())
        name = "fc.weight" if kind == "parameter" else "level"
        acts = (
            lambda: tcil.predict_logits(model, blobs[1], batch_size=20),
            lambda: tcil.PerturbedTemperatureScaling(search="nelder-mead").fit(model, valid=blobs[1]),
        )
        for act in acts:
            with pytest.warns(
                tcil.CalibrationWarning, match=rf"forward\(\) changes '{name}', and the logits with them"
            ):
                act()
            assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())

    def test_counters_and_caches_are_not(self, blobs):
        class Counting(Plain):
            def __init__(self):
                super().__init__()
                self.register_buffer("calls", torch.zeros(()))
                self.register_buffer("cache", torch.zeros(3), persistent=False)

            def forward(self, x):
                self.calls += 1
                self.cache = torch.arange(len(x)).float()
                return super().forward(x.mul_(1.0))

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tcil.predict_logits(Counting(), blobs[1], batch_size=20)


class Unusual(Plain):
    """Buffers that cannot be compared or written as others are."""

    def __init__(self, layout=torch.sparse_coo):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # sparse CSR is in beta
            self.register_buffer("adjacency", torch.eye(3).to_sparse(layout=layout))
        self.register_buffer("gap", torch.tensor(torch.nan).expand(4))
        self.register_buffer("shared", torch.zeros(1).expand(4))
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x):
        self.shared.data = torch.ones(1).expand(4)
        return super().forward(x)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_and_expanded_buffers(blobs, layout):
    model = Unusual(layout)
    model.load_state_dict(trained(Plain, blobs).state_dict(), strict=False)
    model.train()
    calibrator = fit(model, blobs)
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(model.adjacency.to_dense(), torch.eye(3))
    assert model.gap.isnan().all()
    assert torch.equal(model.shared, torch.zeros(4))
    calibrator.check_weights(model)
    model.adjacency = torch.diag(torch.tensor([1.0, 1.0, 2.0])).to_sparse(layout=layout)
    with pytest.raises(tcil.WeightsMismatchError):
        calibrator.check_weights(model)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_layouts_that_cannot_be_put_back_are_refused_before_any_work(blobs):
    model = Plain()
    model.register_buffer("odd", torch.ones(3).to_mkldnn())
    with pytest.raises(ValueError, match=r"^model: got 'odd' in the layout torch\._mkldnn"):
        fit(model, blobs)


class Crossing(Plain):
    """Ends its first call after the second has begun, and the second after the first, where that can be."""

    def __init__(self):
        super().__init__()
        self.first_in, self.second_in, self.first_out = (threading.Event() for _ in range(3))

    def forward(self, x):
        if not self.first_in.is_set():
            self.first_in.set()
            self.second_in.wait(0.3)  # in vain, if the second call waits for the first
        elif not self.second_in.is_set():
            self.second_in.set()
            self.first_out.wait(10)
        return super().forward(x)


@pytest.mark.parametrize("shared", [False, True])
def test_threads_wait_for_each_other(blobs, shared):
    model = Crossing().train()
    other = nn.Sequential(model).train() if shared else model

    def first():
        tcil.predict_logits(model, blobs[1])
        model.first_out.set()

    thread = threading.Thread(target=first)
    thread.start()
    model.first_in.wait(10)
    tcil.predict_logits(other, blobs[1])
    thread.join()
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


class Served(Plain):
    """Before each of its passes but every third, another thread makes one of as many other images."""

    passes = 0

    def forward(self, x):
        here = threading.current_thread() is threading.main_thread()
        self.passes += here
        if here and self.passes % 3 != 2:
            other = threading.Thread(target=self, args=(torch.zeros_like(x),))
            other.start()
            other.join()
        return super().forward(x)


@pytest.mark.parametrize("features", [None, "backbone"])
def test_passes_of_other_threads_do_not_disturb_a_fit(blobs, features):
    alone = trained(Plain, blobs)
    served = Served()
    served.load_state_dict(alone.state_dict())
    expected = fit(alone, blobs, features=features).temperature_
    assert fit(served, blobs, features=features).temperature_ == expected != 1.0


class Checkpointed(Plain):
    def forward(self, x):
        return self.fc(torch.utils.checkpoint.checkpoint(self.backbone, x, use_reentrant=True))


class TestWithoutGradients:
    @pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
    def test_quantised_weights(self, blobs):
        model = torch.ao.quantization.quantize_dynamic(trained(Plain, blobs).eval(), {nn.Linear})
        with pytest.raises(ValueError, match=r"^model: got logits without a graph .*a differentiable model"):
            fit(model, blobs)

    @pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
    def test_reentrant_checkpoints(self, blobs):
        model = Checkpointed()
        model.load_state_dict(trained(Plain, blobs).state_dict())
        with pytest.raises(ValueError, match=r"^model: got reentrant checkpoints .*use_reentrant=False"):
            fit(model, blobs)

    def test_weights_made_in_inference_mode(self, blobs):
        weights = trained(Plain, blobs).state_dict()
        with torch.inference_mode():
            model = Plain()
            model.load_state_dict(weights)
        with pytest.raises(ValueError, match=r"^model: got weights that were created in torch\.inference_mode"):
            fit(model, blobs)
