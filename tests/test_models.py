"""Any trained network: heads of every kind, wrappers, half precision; and it comes back as it was given."""

from __future__ import annotations

import contextlib
import copy
import warnings
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


class Averaged(nn.Module):
    """Two heads, of which no one emits the logits."""

    def __init__(self):
        super().__init__()
        self.backbone, self.one, self.other = Body(), nn.Linear(16, K), nn.Linear(16, K)

    def forward(self, x):
        f = self.backbone(x)
        return (self.one(f) + self.other(f)) / 2


class LogProbabilities(Plain):
    def forward(self, x):
        return nn.functional.log_softmax(super().forward(x) / 0.07, dim=1)


class LogSoftmaxModule(Plain):
    """The last module makes log-probabilities: what it reads are logits, not features."""

    def __init__(self):
        super().__init__()
        self.last = nn.LogSoftmax(dim=1)

    def forward(self, x):
        return self.last(super().forward(x))


class Sharpened(Plain):
    """A learned scale after a cosine head."""

    def __init__(self):
        super().__init__()
        self.sigma = nn.Parameter(torch.tensor(5.0))

    def forward(self, x):
        return self.sigma * super().forward(x)


class Masked(Sliced):
    """Classes to come are masked out of a wide head."""

    def forward(self, x):
        z = self.fc(self.backbone(x))
        return z.masked_fill(torch.arange(10) >= K, -1e4)


class SplitLogProbabilities(SplitInForward):
    def forward(self, x):
        return nn.functional.log_softmax(super().forward(x), dim=1)


class HeadList(SplitInForward):
    def forward(self, x):
        f = self.backbone(x)
        return [head(f) for head in self.heads]


class HeadTuple(SplitInForward):
    def forward(self, x):
        f = self.backbone(x)
        return tuple(head(f) for head in self.heads)


class HeadListInside(SplitInForward):
    def forward(self, x):
        f = self.backbone(x)
        return {"logits": [head(f) for head in self.heads]}


class NumberedHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.head1, self.head2 = Body(), nn.Linear(16, 2), nn.Linear(16, 2)

    def forward(self, x):
        f = self.backbone(x)
        return self.head1(f), self.head2(f)


def joined(out):
    """The logits in whatever a model returns."""
    out = out["logits"] if isinstance(out, dict) else getattr(out, "logits", out)
    return torch.cat(tuple(out), dim=1) if isinstance(out, (list, tuple)) else out


def trained(kind, blobs, steps=80):
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    (x, y), _ = blobs
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(joined(model(x)), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model


def fit(model, blobs, **options):
    memory, valid = blobs
    return tcil.TCIL().fit(model, memory, valid, [2, 3], **options)


HEADS = [Plain, AsDict, AsObject, Cosine, SplitModule, SplitInForward, Sliced, Dropped]
HEADS += [HeadList, HeadTuple, HeadListInside, NumberedHeads]
HEADS += [Scaled, LogProbabilities, LogSoftmaxModule, Sharpened, Masked, SplitLogProbabilities]


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

    @pytest.mark.parametrize("given", [None, "backbone", lambda x: x])
    def test_no_findable_layer(self, blobs, given):
        model = trained(Functional, blobs)
        with pytest.raises(ValueError, match=r"no module of the model that emits .* Pass features=\(extract, head\)"):
            fit(model, blobs, features=given)
        fit(model, blobs, features=(model.extract, model.head))  # what the message says works

    def test_averaged_heads(self, blobs):
        model = trained(Averaged, blobs)
        with pytest.raises(ValueError, match=r"no module of the model that emits .* Pass features=\(extract, head\)"):
            fit(model, blobs)
        calibrator = fit(model, blobs, features=(model.backbone, lambda f: (model.one(f) + model.other(f)) / 2))
        assert calibrator.temperature_ > 0

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


class TestOutputsAfterTheHead:
    """A log-softmax or a scale after the last layer changes neither what it reads nor which class is the target."""

    @pytest.mark.parametrize(("kind", "factor"), [(Scaled, 3.0), (Sharpened, 5.0), (LogSoftmaxModule, 1.0)])
    def test_the_temperature_follows_the_scale(self, blobs, kind, factor):
        plain = trained(Plain, blobs)
        other = kind()
        other.load_state_dict(plain.state_dict(), strict=False)
        want = fit(plain, blobs)
        for given in ({}, {"features": "fc"}, {"features": "backbone"}, {"features": other.backbone.forward}):
            calibrator = fit(other, blobs, **given)
            assert calibrator.temperature_ == pytest.approx(factor * want.temperature_, rel=1e-3)
        x = blobs[1][0][:5]
        with torch.no_grad():
            assert torch.allclose(calibrator.wrap(other)(x), want.wrap(plain)(x), atol=1e-3)

    def test_a_wrong_layer_is_still_refused(self, blobs):
        model = trained(Scaled, blobs)
        with pytest.raises(ValueError, match=r"re-running the head 'fc' differs .*Leave features= out"):
            fit(model, blobs, features="backbone.0")
        with pytest.raises(ValueError, match="the given head differs"):
            fit(model, blobs, features=(model.backbone, model.fc))  # its answers are used as the logits
        fit(model, blobs)  # what the message says works

    @pytest.mark.parametrize("change", [lambda z: z.tanh(), lambda z: -z, lambda z: z * torch.arange(1.0, 5)])
    def test_other_changes_are_refused(self, blobs, change):
        class Changed(Plain):
            def forward(self, x):
                return change(super().forward(x))

        model = trained(Plain, blobs)
        changed = Changed()
        changed.load_state_dict(model.state_dict())
        with pytest.raises(ValueError, match=r"no module of the model that emits .* Pass features=\(extract, head\)"):
            fit(changed, blobs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tcil.CalibrationWarning)
            fit(changed, blobs, features=(changed.backbone, lambda f: change(changed.fc(f))))


class LogitsAndFeatures(Plain):
    def forward(self, x):
        f = self.backbone(x)
        return self.fc(f), f


class LogitsAndProjection(Plain):
    def __init__(self):
        super().__init__()
        self.projection = nn.Linear(16, 8)

    def forward(self, x):
        f = self.backbone(x)
        return self.fc(f), self.projection(f)


class Exits(nn.Module):
    """Several answers for the same classes, from features of several depths."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(D, 16), nn.Linear(16, 16)])
        self.exits = nn.ModuleList([nn.Linear(16, K), nn.Linear(16, K)])

    def forward(self, x):
        answers = []
        for layer, leave in zip(self.layers, self.exits, strict=True):
            x = layer(x).relu()
            answers.append(leave(x))
        return answers


class TestListsOfLogits:
    @pytest.mark.parametrize("kind", [HeadList, HeadTuple, HeadListInside])
    def test_heads_are_put_side_by_side(self, blobs, kind):
        split = trained(SplitInForward, blobs)
        model = kind()
        model.load_state_dict(split.state_dict())
        memory, valid = blobs
        assert torch.equal(tcil.predict_logits(model, valid)[0], tcil.predict_logits(split, valid)[0])
        calibrator, want = fit(model, blobs), fit(split, blobs)
        assert calibrator.temperature_ == want.temperature_
        assert torch.equal(calibrator.wrap(model)(memory[0]), want.wrap(split)(memory[0]))

    def test_new_heads_that_are_all_zero(self, blobs):
        model = HeadTuple()
        for head in model.heads:
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)
        assert tcil.predict_logits(model, blobs[1])[0].shape == (200, K)

    @pytest.mark.parametrize(
        ("kind", "container"),
        # A list of what two modules make of the same features is taken as heads; a tuple may be anything.
        [(LogitsAndFeatures, tuple), (LogitsAndFeatures, list), (LogitsAndProjection, tuple), (Exits, list)],
    )
    def test_other_things_are_not(self, blobs, kind, container):
        class Model(kind):
            def forward(self, x):
                return container(super().forward(x))

        model = Model()
        for act in (lambda: fit(model, blobs), lambda: tcil.predict_logits(model, blobs[1])):
            with pytest.raises(ValueError, match=r"with 2 matrices of the shapes .*returns the logits only"):
                act()

        class LogitsOnly(nn.Module):  # what the message says works
            def __init__(self):
                super().__init__()
                self.model = model

            def forward(self, x):
                return self.model(x)[0]

        assert tcil.predict_logits(LogitsOnly(), blobs[1])[0].shape == (200, K)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tcil.CalibrationWarning)
            fit(LogitsOnly(), blobs)

    @pytest.mark.parametrize("output", [(), [], (torch.zeros(200, 2), None), "logits", [torch.zeros(200)]])
    def test_what_holds_no_logits(self, blobs, output):
        class Odd(Plain):
            def forward(self, x):
                return output

        with pytest.raises(ValueError, match="model: got an output of type"):
            tcil.predict_logits(Odd(), blobs[1])


class TestDevices:
    @pytest.mark.parametrize("device", ["meta", torch.device("meta"), "foo", "cuda:77", "mps:9", -1, True, 3.5, "", []])
    def test_no_such_device(self, blobs, device):
        model = trained(Plain, blobs)
        before, weights = state_of(model), copy.deepcopy(model.state_dict())
        acts = [
            lambda: tcil.TCIL(device=device).fit(model, *blobs, [2, 3]),
            lambda: tcil.PACT(device=device).fit(model, *blobs, [2, 3], imbalance=2.0),
            lambda: tcil.PerturbedTemperatureScaling(device=device).fit(model, valid=blobs[1]),
            lambda: tcil.predict_logits(model, blobs[1], device=device),
        ]
        for act in acts:
            with pytest.raises(ValueError, match=r"device: got .*; expected a device of this machine"):
                act()
        assert state_of(model) == before
        assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())

    @pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
    @pytest.mark.parametrize("device", ["cuda", "cuda:0", 0])
    def test_cuda_where_there_is_none(self, blobs, device):
        with pytest.raises(ValueError, match=r"device: got .*; expected a device of this machine"):
            tcil.predict_logits(Plain(), blobs[1], device=device)

    def test_a_model_without_values(self, blobs):
        model = Plain().to("meta")
        calibrator = fit(trained(Plain, blobs), blobs)
        acts = [
            lambda: fit(model, blobs),
            lambda: tcil.TCIL(device="cpu").fit(model, *blobs, [2, 3]),
            lambda: tcil.predict_logits(model, blobs[1], device="cpu"),
            lambda: calibrator.wrap(model),
            lambda: calibrator.check_weights(model),
        ]
        for act in acts:
            with pytest.raises(ValueError, match=r"model: got 'backbone\.0.*on the meta device"):
                act()

    def test_a_lazy_model(self, blobs):
        class Lazy(Plain):
            def __init__(self):
                super().__init__()
                self.fc = nn.LazyLinear(K)

        model = Lazy()
        with pytest.raises(ValueError, match=r"model: got 'fc\.weight' of a lazy module"):
            fit(model, blobs)
        with pytest.raises(ValueError, match="lazy"):
            tcil.predict_logits(model, blobs[1])
        assert nn.parameter.is_lazy(model.fc.weight)
        model(blobs[0][0])  # what the message says works
        tcil.predict_logits(model, blobs[1])

    def test_the_model_s_own_device(self, blobs):
        model = trained(Plain, blobs)
        want = fit(model, blobs).temperature_
        for device in ("cpu", torch.device("cpu")):
            assert tcil.TCIL(device=device).fit(model, *blobs, [2, 3]).temperature_ == want


class Autocast(Plain):
    """Mixed precision as it is commonly written: inside forward."""

    wide = False

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = super().forward(x)
        return z.float() if self.wide else z


class WideAutocast(Autocast):
    wide = True


class AutocastBody(Plain):
    """The body in half precision, the head in float32."""

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            f = self.backbone(x)
        return self.fc(f.float())


@pytest.mark.usefixtures("bf16")
class TestHalfPrecision:
    @pytest.mark.parametrize("kind", [Autocast, WideAutocast, AutocastBody])
    @pytest.mark.parametrize("features", [None, "fc", "backbone"])
    def test_autocast_inside_forward(self, blobs, kind, features):
        plain = trained(Plain, blobs)
        model = kind()
        model.load_state_dict(plain.state_dict())
        calibrator = fit(model, blobs, features=features)
        assert calibrator.temperature_ == pytest.approx(fit(plain, blobs).temperature_, rel=0.15)
        assert calibrator.wrap(model)(blobs[1][0]).dtype == torch.float64

    def test_autocast_inside_forward_and_a_feature_function(self, blobs):
        model = trained(Autocast, blobs)
        assert fit(model, blobs, features=model.backbone.forward).temperature_ > 0

    def test_fit_and_use_inside_an_autocast_region(self, blobs):
        model = trained(Plain, blobs)
        want = fit(model, blobs)
        logits = tcil.predict_logits(model, blobs[1])[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            calibrator = fit(model, blobs)
            out = calibrator.wrap(model)(blobs[1][0])
            # What is done with logits is done in full precision.
            assert torch.equal(want.transform(logits), want.transform(logits.clone()))
            inside = want.transform(logits)
        assert calibrator.temperature_ == pytest.approx(want.temperature_, rel=0.15)
        assert out.dtype == torch.float64
        assert torch.equal(inside, want.transform(logits))

    def test_a_map_of_one_s_own_never_runs_in_half_precision(self):
        class Rotated(tcil.CalibrationMap):
            def forward(self, logits, features=None):
                return torch.log_softmax(logits.float() @ torch.eye(K), dim=1)

        class Rotation(tcil.Calibrator):
            map_type, result_type = Rotated, float

        calibrator = Rotation()._fitted(Rotated(), tuple(range(K)), 1.0)
        network, x = nn.Linear(D, K), torch.linspace(0, 1, 2 * D).reshape(2, D)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = network(x)
            assert torch.equal(calibrator.wrap(network)(x), torch.log_softmax(logits.float(), dim=1))
            assert calibrator.transform(logits).dtype == torch.float32

    def test_wrapped_models_cast_their_inputs_as_fit_does(self, blobs):
        model = trained(Plain, blobs).bfloat16()
        calibrated = fit(model, blobs).wrap(model)
        x = blobs[1][0][:6]
        want = calibrated(x.bfloat16())
        assert torch.equal(calibrated(x), want)
        assert torch.equal(calibrated(x.double()), want)
        assert torch.equal(calibrated(x=x), want)


def test_wrapped_models_cast_doubles(blobs):
    model = trained(Plain, blobs)
    calibrated, x = fit(model, blobs).wrap(model), blobs[1][0][:6]
    assert torch.equal(calibrated(x.double()), calibrated(x))
    double = copy.deepcopy(model).double()
    assert calibrated(x).shape == fit(double, blobs).wrap(double)(x).shape


def test_whole_numbers_are_not_cast():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.fc = nn.Embedding(10, 8), nn.Linear(8, K)

        def forward(self, x, mask=None):
            return self.fc(self.embedding(x).mean(dim=1))

    model, tokens = Tokens(), torch.arange(12).reshape(3, 4) % 10
    scaling = tcil.TemperatureScaling().fit(5 * torch.eye(K)[[0, 1, 2, 3]], torch.tensor([0, 1, 2, 2]))
    assert torch.equal(scaling.wrap(model)(tokens).argmax(1), model(tokens).argmax(1))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_body_in_torchscript(blobs):
    plain = trained(Plain, blobs)
    want = fit(plain, blobs).temperature_
    model = copy.deepcopy(plain).train()
    model.backbone = torch.jit.script(model.backbone)
    assert torch.equal(tcil.predict_logits(model, blobs[1])[0], tcil.predict_logits(plain, blobs[1])[0])
    assert fit(model, blobs).temperature_ == pytest.approx(want, rel=1e-6)
    assert all(module.training for module in model.modules())


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


def state_of(model):
    plain = (int, float, str, type(None))
    return (
        [{k: v if isinstance(v, plain) else id(v) for k, v in vars(module).items()} for module in model.modules()],
        [(name, b.device, b.dtype, b.data_ptr(), str(b.tolist())) for name, b in model.named_buffers()],
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
