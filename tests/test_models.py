"""Any trained network: heads of every kind, wrappers, half precision; and it comes back as it was given."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tcil

N, D, K = 48, 12, 4


@pytest.fixture(scope="module")
def blobs():
    """Four overlapping classes in twelve dimensions: 0 and 1 old, 2 and 3 new."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(K, D, generator=generator)

    def draw(labels):
        return centres[labels] + torch.randn(len(labels), D, generator=generator), labels

    return draw(torch.arange(N) % K), draw(2 + torch.arange(200) % 2)


class Body(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(D, 16), nn.ReLU())


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.fc = Body(), nn.Linear(16, K)

    def forward(self, x):
        return self.fc(self.backbone(x))


class AsDict(Plain):
    def forward(self, x):
        f = self.backbone(x)
        return {"features": f, "logits": self.fc(f)}


class AsObject(Plain):
    def forward(self, x):
        return SimpleNamespace(logits=super().forward(x), loss=None)


class Cosine(nn.Module):
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(K, 16))
            self.scale = nn.Parameter(torch.tensor(10.0))

        def forward(self, f):
            return self.scale * nn.functional.linear(nn.functional.normalize(f), nn.functional.normalize(self.weight))

    def __init__(self):
        super().__init__()
        self.backbone, self.head = Body(), self.Head()

    def forward(self, x):
        return self.head(self.backbone(x))


class SplitModule(nn.Module):
    """Split heads inside a module of their own."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(16, 2), nn.Linear(16, 2)])

        def forward(self, f):
            return torch.cat([part(f) for part in self.parts], dim=1)

    def __init__(self):
        super().__init__()
        self.backbone, self.heads = Body(), self.Heads()

    def forward(self, x):
        return self.heads(self.backbone(x))


class SplitInForward(nn.Module):
    """Split heads put together in the model's own forward."""

    def __init__(self):
        super().__init__()
        self.backbone, self.heads = Body(), nn.ModuleList([nn.Linear(16, 2), nn.Linear(16, 2)])

    def forward(self, x):
        f = self.backbone(x)
        return torch.cat([head(f) for head in self.heads], dim=1)


class Sliced(nn.Module):
    """The authors' way: a wide head, sliced in forward."""

    def __init__(self):
        super().__init__()
        self.backbone, self.fc = Body(), nn.Linear(16, 10)

    def forward(self, x):
        return self.fc(self.backbone(x))[:, :K]


class Dropped(nn.Module):
    """Modules after the head that pass the logits through in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(Body(), nn.Linear(16, K), nn.Dropout(0.5), nn.Identity())

    def forward(self, x):
        return self.net(x)


class Functional(nn.Module):
    """No module emits the logits."""

    def __init__(self):
        super().__init__()
        self.backbone, self.weight = Body(), nn.Parameter(torch.randn(K, 16))

    def extract(self, x):
        return self.backbone(x)

    def head(self, f):
        return nn.functional.linear(f, self.weight)

    def forward(self, x):
        return self.head(self.extract(x))


class Scaled(Plain):
    """forward() changes the logits after the last layer."""

    def forward(self, x):
        return 3.0 * super().forward(x)


def trained(kind, blobs, steps=80):
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    (x, y), _ = blobs
    for _ in range(steps):
        optimizer.zero_grad()
        out = model(x)
        out = out["logits"] if isinstance(out, dict) else getattr(out, "logits", out)
        nn.functional.cross_entropy(out, y).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model


def fit(model, blobs, **options):
    memory, valid = blobs
    return tcil.TCIL().fit(model, memory, valid, [2, 3], **options)


HEADS = [Plain, AsDict, AsObject, Cosine, SplitModule, SplitInForward, Sliced, Dropped]


@pytest.mark.parametrize("kind", HEADS, ids=lambda kind: kind.__name__)
def test_features_are_found(kind, blobs):
    model = trained(kind, blobs)
    calibrator = fit(model, blobs)
    with torch.no_grad():
        want = model.eval().net[0](blobs[0][0]) if kind is Dropped else model.eval().backbone(blobs[0][0])
    seen = calibrator._fit_state.source.run(model, blobs[0][0])[1]
    assert torch.allclose(seen, want, atol=1e-5)
    assert calibrator.temperature_ > 0


def test_the_same_network_in_other_clothes_gives_the_same_answer(blobs):
    plain = trained(Plain, blobs)
    want = fit(plain, blobs).temperature_
    for kind in (AsDict, AsObject):
        other = kind()
        other.load_state_dict(plain.state_dict())
        assert fit(other, blobs).temperature_ == pytest.approx(want, rel=1e-9)
    split = SplitInForward()
    split.backbone.load_state_dict(plain.backbone.state_dict())
    for i, head in enumerate(split.heads):
        head.weight.data = plain.fc.weight.data[2 * i : 2 * i + 2]
        head.bias.data = plain.fc.bias.data[2 * i : 2 * i + 2]
    assert fit(split, blobs).temperature_ == pytest.approx(want, rel=1e-5)


def test_a_single_layer_is_its_own_head(blobs):
    model = trained(lambda: nn.Linear(D, K), blobs)
    assert fit(model, blobs)._fit_state.source.heads == ("",)


class Twice(Plain):
    """The head runs twice; the second call is not the logits."""

    def forward(self, x):
        z = self.fc(self.backbone(x))
        return {"logits": z, "aux": self.fc(self.backbone(-x))}


class Prototypes(nn.Module):
    """The head's first tensor is not the features."""

    class Head(nn.Module):
        def forward(self, prototypes, f):
            return f @ prototypes.T

    def __init__(self):
        super().__init__()
        self.backbone, self.head, self.weight = Body(), self.Head(), nn.Parameter(torch.randn(K, 16))

    def forward(self, x):
        return self.head(self.weight, self.backbone(x))


class InPlace(Plain):
    """Works on its input in place."""

    def forward(self, x):
        return super().forward(x.sub_(0.5))


def test_a_head_that_runs_twice(blobs):
    plain = trained(Plain, blobs)
    twice = Twice()
    twice.load_state_dict(plain.state_dict())
    want = fit(plain, blobs).temperature_
    assert fit(twice, blobs).temperature_ == pytest.approx(want, rel=1e-9)
    assert fit(twice, blobs, features="backbone").temperature_ == pytest.approx(want, rel=1e-9)
    memory, valid = blobs
    small = tcil.TCIL(batch_size=7).fit(twice, memory, valid, [2, 3])
    assert small.temperature_ == pytest.approx(want, rel=1e-4)


def test_a_head_whose_first_tensor_is_not_the_features(blobs):
    assert fit(trained(Prototypes, blobs), blobs).temperature_ > 0


def test_networks_that_work_in_place_do_not_reach_the_data(blobs):
    plain = trained(Plain, blobs)
    model = InPlace()
    model.load_state_dict(plain.state_dict())
    memory, valid = (tuple(t.clone() for t in part) for part in blobs)
    first = fit(model, (memory, valid)).temperature_
    assert torch.equal(memory[0], blobs[0][0])
    assert torch.equal(valid[0], blobs[1][0])
    assert fit(model, (memory, valid)).temperature_ == first


class TestNamedFeatures:
    @pytest.mark.parametrize("name", ["fc", "backbone", "backbone.1"])
    def test_head_or_body_by_name(self, blobs, name):
        model = trained(Plain, blobs)
        assert fit(model, blobs, features=name).temperature_ == fit(model, blobs).temperature_

    def test_function(self, blobs):
        model = trained(Plain, blobs)
        named = fit(model, blobs, features=lambda x: model.backbone(x))
        assert named.temperature_ == pytest.approx(fit(model, blobs).temperature_, rel=1e-9)

    def test_function_and_head(self, blobs):
        model = trained(Functional, blobs)
        calibrator = fit(model, blobs, features=(model.extract, model.head))
        plain = Plain()
        plain.backbone.load_state_dict(model.backbone.state_dict())
        plain.fc.weight.data, plain.fc.bias.data = model.weight.data, torch.zeros(K)
        assert calibrator.temperature_ == pytest.approx(fit(plain, blobs).temperature_, rel=1e-5)

    def test_no_findable_layer(self, blobs):
        model = trained(Functional, blobs)
        with pytest.raises(
            ValueError, match=r"features: got no module of the model that emits the logits.*features='fc'"
        ):
            fit(model, blobs)

    def test_scaled_after_the_head(self, blobs):
        model = trained(Scaled, blobs)
        with pytest.raises(ValueError, match="no module of the model that emits the logits"):
            fit(model, blobs)
        with pytest.raises(ValueError, match="neither emits the logits nor feeds the module that does"):
            fit(model, blobs, features="fc")
        fit(model, blobs, features=(model.backbone, lambda f: 3.0 * model.fc(f)))

    def test_wrong_layer(self, blobs):
        model = trained(Plain, blobs)
        with pytest.raises(
            ValueError, match=r"features='backbone.0'.*re-running the head 'fc' differs from the logits"
        ):
            fit(model, blobs, features="backbone.0")

    def test_wrong_function(self, blobs):
        model = trained(Plain, blobs)
        with pytest.raises(ValueError, match="re-running the head 'fc' fails"):
            fit(model, blobs, features=lambda x: x)
        with pytest.raises(ValueError, match="re-running the given head differs"):
            fit(model, blobs, features=(model.backbone, lambda f: model.fc(f) + 1))

    def test_unknown_name_suggests(self, blobs):
        with pytest.raises(ValueError, match=r"features: got 'backbon'.*Nearest: backbone"):
            fit(trained(Plain, blobs), blobs, features="backbon")
        with pytest.raises(ValueError, match="features: got 3; expected a module name"):
            fit(trained(Plain, blobs), blobs, features=3)


class TestWrappers:
    def test_data_parallel(self, blobs):
        model = trained(Plain, blobs)
        assert fit(nn.DataParallel(model), blobs).temperature_ == fit(model, blobs).temperature_

    def test_compiled(self, blobs):
        model = trained(Plain, blobs)
        compiled = torch.compile(model, backend="eager")
        calibrator = fit(compiled, blobs)
        assert calibrator.temperature_ == fit(model, blobs).temperature_
        calibrator.check_weights(model)

    def test_distributed_data_parallel(self, blobs, tmp_path):
        model = trained(Plain, blobs)
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        try:
            wrapped = nn.parallel.DistributedDataParallel(model)
            assert fit(wrapped, blobs).temperature_ == fit(model, blobs).temperature_
        finally:
            torch.distributed.destroy_process_group()

    @pytest.mark.usefixtures("bf16")
    def test_bfloat16_weights(self, blobs):
        model = trained(Plain, blobs)
        want = fit(model, blobs).temperature_
        calibrator = fit(copy.deepcopy(model).bfloat16(), blobs)
        assert calibrator.temperature_ == pytest.approx(want, rel=0.15)
        assert calibrator._mapping().temperature.dtype == torch.float64

    def test_float64_weights(self, blobs):
        model = trained(Plain, blobs)
        assert fit(copy.deepcopy(model).double(), blobs).temperature_ == pytest.approx(
            fit(model, blobs).temperature_, rel=1e-4
        )

    def test_networks_that_cannot_take_channels_last(self, task):
        class Viewing(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv, self.fc = nn.Conv2d(1, 3, 3), nn.Linear(108, 6)

            def forward(self, x):
                return self.fc(torch.relu(self.conv(x)).view(len(x), 108))

        class Reshaping(Viewing):
            def forward(self, x):
                return self.fc(torch.relu(self.conv(x)).reshape(len(x), 108))

        torch.manual_seed(0)
        viewing, reshaping = Viewing(), Reshaping()
        reshaping.load_state_dict(viewing.state_dict())
        one, other = (tcil.predict_logits(model, task.valid)[0] for model in (viewing, reshaping))
        assert torch.allclose(one, other, atol=1e-5)


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


def state_of(model):
    return (
        [(name, module.training) for name, module in model.named_modules()],
        [(name, p.requires_grad, p.grad, p.device, p.data_ptr(), p._version) for name, p in model.named_parameters()],
        [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()],
    )


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


def test_batch_norm_statistics_stay(task):
    task.model.train()
    before = copy.deepcopy(task.model.state_dict())
    tcil.TCIL().fit(task.model, task.memory, task.valid, task.new_classes)
    assert all(torch.equal(before[k], v) for k, v in task.model.state_dict().items())
    assert task.model.training
