"""Models in wrappers, on devices, in half and double precision, in TorchScript; and those that read raw memory."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from blob_networks import D, K, Plain, draw_blobs, fit, state_of, trained
from torch import nn

import tcil


@pytest.fixture(scope="module")
def blobs():
    return draw_blobs()


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
        class Rotated(tcil.extending.CalibrationMap):
            def forward(self, logits, features=None):
                return torch.log_softmax(logits.float() @ torch.eye(K), dim=1)

        class Rotation(tcil.extending.Calibrator):
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


class Strided(nn.Module):
    """Reads the memory of its inputs as if they lay channel by channel."""

    def __init__(self, strided):
        super().__init__()
        self.fc, self.strided, self.batches = nn.Linear(3 * 16, K), strided, []

    def forward(self, x):
        self.batches.append((len(x), x.is_contiguous()))
        flat = x.as_strided((len(x), 48), (48, 1)) if self.strided else x.flatten(1)
        return self.fc(flat)


class TestNetworksThatReadMemory:
    def images(self):
        generator = torch.Generator().manual_seed(0)
        return torch.randn(40, 3, 4, 4, generator=generator), torch.arange(40) % K

    def test_see_the_pixels_that_they_were_given(self):
        torch.manual_seed(0)
        model, data = Strided(strided=True), self.images()
        want = model(data[0]).detach()
        assert torch.allclose(tcil.predict_logits(model, data, batch_size=16)[0], want, atol=1e-5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tcil.CalibrationWarning)
            target = tcil.TCIL(batch_size=16).fit(model, data, data, [2, 3]).result_.target
        new = data[1] >= 2
        assert target.nll_before == pytest.approx(tcil.fit_temperature(want[new], data[1][new]).nll_before, rel=1e-5)

    def test_also_if_the_first_images_are_blank(self):
        torch.manual_seed(0)
        model, (x, y) = Strided(strided=True), self.images()
        x[:10] = 0.5
        want = model(x).detach()
        assert torch.allclose(tcil.predict_logits(model, (x, y), batch_size=16)[0], want, atol=1e-5)

    def test_also_if_little_depends_on_it(self):
        """Half a per cent of the largest logit, which is no rounding in float32."""

        class Weakly(Strided):
            def forward(self, x):
                return self.fc(x.flatten(1)) + 0.005 * self.fc(x.as_strided((len(x), 48), (48, 1)))

        torch.manual_seed(0)
        model, data = Weakly(strided=True), self.images()
        want = model(data[0]).detach()
        assert torch.allclose(tcil.predict_logits(model, data, batch_size=16)[0], want, atol=1e-5)

    @pytest.mark.parametrize("layout", ["channels_last", "reversed"])
    def test_users_whose_inputs_lie_otherwise_are_told(self, layout):
        torch.manual_seed(0)
        model, (x, y) = Strided(strided=True), self.images()
        if layout == "channels_last":
            given = x.to(memory_format=torch.channels_last)
        else:
            given = x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
        with pytest.warns(
            tcil.CalibrationWarning, match=r"its logits depend on how the inputs lie in memory.*contiguous"
        ):
            logits, _ = tcil.predict_logits(model, (given, y))
        assert torch.allclose(logits, model(x), atol=1e-5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tcil.predict_logits(model, (x, y))
            tcil.predict_logits(Strided(strided=False), (given, y))

    def test_others_keep_the_faster_layout_at_the_cost_of_two_images_in_each(self):
        model, data, seen = Strided(strided=False), self.images(), []
        model.batches = seen
        tcil.predict_logits(model, data, batch_size=20)
        assert sorted(set(seen)) == [(2, False), (2, True), (20, False)]
        assert [size for size, _ in seen].count(2) == 2
