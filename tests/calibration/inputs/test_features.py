"""What the head reads is found in any network: heads of every kind, by themselves or by name."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from blob_networks import (
    Body,
    D,
    HeadList,
    HeadListInside,
    HeadTuple,
    K,
    Plain,
    SplitInForward,
    draw_blobs,
    fit,
    trained,
)
from torch import nn

import tcil


@pytest.fixture(scope="module")
def blobs():
    return draw_blobs()


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


class MaskedByAddition(Sliced):
    def forward(self, x):
        return self.fc(self.backbone(x)) - 1e4 * (torch.arange(10) >= K)


class MaskedLogProbabilities(Masked):
    def forward(self, x):
        return nn.functional.log_softmax(super().forward(x), dim=1)


class SplitLogProbabilities(SplitInForward):
    def forward(self, x):
        return nn.functional.log_softmax(super().forward(x), dim=1)


class NumberedHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.head1, self.head2 = Body(), nn.Linear(16, 2), nn.Linear(16, 2)

    def forward(self, x):
        f = self.backbone(x)
        return self.head1(f), self.head2(f)


HEADS = [Plain, AsDict, AsObject, Cosine, SplitModule, SplitInForward, Sliced, Dropped]
HEADS += [HeadList, HeadTuple, HeadListInside, NumberedHeads]
HEADS += [Scaled, LogProbabilities, LogSoftmaxModule, Sharpened, Masked, SplitLogProbabilities]
HEADS += [MaskedByAddition, MaskedLogProbabilities]


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
