"""What maps from logits to probabilities skip for speed, and logits of extreme scales."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import tcil
from tcil.calibration.calibrators.maps import (
    EnsembleMap,
    GroupTemperatureMap,
    IsotonicMap,
    TemperatureMap,
    interpolated,
)


class Scaled(nn.Module):
    """A network of float64 whose logits may exceed float32."""

    def __init__(self, scale):
        super().__init__()
        self.fc = nn.Linear(4, 4, bias=False).double()
        self.fc.weight.data = scale * torch.eye(4).double()

    def forward(self, x):
        return self.fc(x)


@pytest.mark.parametrize("scale", [1e30, 1e90, 1e200])
def test_logits_beyond_float32(scale):
    """No NaN from a model that answers in float32, and heads are found."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 4, generator=generator).double()
    labels = torch.where(torch.rand(200, generator=generator) < 0.7, x.argmax(1), torch.arange(200) % 4)
    model = Scaled(scale)
    on_logits = (tcil.EnsembleTemperatureScaling, tcil.MulticlassIsotonic)
    for calibrator in (
        tcil.TemperatureScaling().fit(x, labels),
        *(kind().fit(scale * x, labels) for kind in on_logits),
    ):
        wrapped = [calibrator.wrap(model, force=True, dtype=kind) for kind in (torch.float64, torch.float32)]
        with torch.no_grad():
            want, got = (one(x).exp() for one in wrapped)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tcil.CalibrationWarning)
        fits = [tcil.TCIL().fit(Scaled(size), (x, labels), (x, labels), [2, 3]) for size in (1.0, scale)]
    assert fits[1].temperature_ / scale == pytest.approx(fits[0].temperature_)


class TestShortcuts:
    """What is skipped for speed (masks where there are none, indexing, operators) changes no result."""

    ROWS = torch.cat([
        4 * torch.randn(6, 5, generator=torch.Generator().manual_seed(0)),
        torch.tensor([[1.0, 2.0, -torch.inf, 0.5, -1e9], [-3.0, -torch.inf, -4.0, -5.0, -3.5], [0.0] * 5]),
    ])  # fmt: skip

    def batches(self):
        """All rows together, those without a mask, each alone, and a masked one beside a row that is not a number."""
        nan = torch.full((1, 5), torch.nan)
        return [self.ROWS, self.ROWS[:6], *self.ROWS.split(1), torch.cat([self.ROWS[7:8], nan])]

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_a_row_that_overflows_beside_others(self, dtype):
        """Whether rows need a shift is decided for each of them."""
        mapping = TemperatureMap(torch.tensor(1e-3, dtype=torch.float64))
        mapping.answer_in(dtype)
        far = torch.tensor([[-1e36, -1.1e36, -3e37, -2e37, -1.5e36]])
        both = mapping(torch.cat([self.ROWS[:1], far]))
        assert not both.isnan().any()
        assert torch.equal(both[1:], mapping(far))

    def test_knots_closer_than_slopes_can_be(self):
        """numpy's slope is infinite between them."""
        knots = torch.tensor([0.0, 1e-312, 0.5], dtype=torch.float64)
        values = torch.tensor([0.0, 0.7, 0.9], dtype=torch.float64)
        found = interpolated(torch.tensor([[5e-313, 1.0]], dtype=torch.float64), knots, values)
        assert found[0].tolist() == pytest.approx([0.35, 0.9])

    def test_derivatives_in_forward_mode(self):
        knots = torch.linspace(0.1, 0.9, 5).double()
        x, direction = torch.tensor([0.3, 0.55]).double(), torch.ones(2).double()
        _, slopes = torch.func.jvp(lambda x: interpolated(x, knots, knots.square()), (x,), (direction,))
        assert slopes.tolist() == pytest.approx([0.8, 1.2])
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, direction)
            made = interpolated(dual, knots, knots.square())
            assert torch.autograd.forward_ad.unpack_dual(made).tangent.tolist() == pytest.approx([0.8, 1.2])

    def alive(self, rows):
        return (rows > -1e8) | rows.isnan()

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_groups(self, dtype):
        is_new = torch.tensor([False, True, False, False, True])
        mapping = GroupTemperatureMap(torch.tensor([2.0, 0.5]).double(), is_new)
        mapping.answer_in(dtype)
        for rows in self.batches():
            z = rows.to(dtype).masked_fill(~self.alive(rows), -torch.inf)
            temperature = torch.where(is_new[rows.argmax(dim=1)], 0.5, 2.0)[:, None]
            wanted = torch.log_softmax(z / temperature.to(dtype), dim=1)
            assert torch.equal(mapping(rows).nan_to_num(), wanted.nan_to_num())

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_ensembles(self, dtype):
        w0, w1, w2 = weights = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
        mapping = EnsembleMap(torch.tensor(1.7, dtype=torch.float64), weights)
        mapping.answer_in(dtype)
        for rows in self.batches():
            alive = self.alive(rows)
            z = rows.double().masked_fill(~alive, -torch.inf)
            uniform = alive.double() / alive.sum(dim=1, keepdim=True)
            mixed = w0 * torch.softmax(z / 1.7, dim=1) + w1 * torch.softmax(z, dim=1) + w2 * uniform
            wanted, tolerance = mixed.log(), 1e-14 if dtype == torch.float64 else 1e-6
            assert torch.allclose(mapping(rows).double(), wanted, rtol=tolerance, atol=tolerance, equal_nan=True)

    @pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit:DeprecationWarning")
    def test_a_traced_map_keeps_no_number_of_its_example(self):
        is_new = torch.tensor([False, True, False, False, True])
        group = GroupTemperatureMap(torch.tensor([2.0, 0.5]).double(), is_new)
        knots = torch.linspace(0.1, 0.9, 5).double()
        one, other = torch.tensor([[3.0, 0.0, 0.0, 1.0, 2.0]]), torch.tensor([[0.0, 3.0, 0.0, 1.0, 2.0]])
        for mapping in (group, IsotonicMap(knots, knots.square())):
            traced = torch.jit.trace(mapping, one, check_trace=False)
            assert torch.allclose(traced(other), mapping(other))
            assert "searchsorted" not in str(traced.graph)  # which ONNX does not have

    @pytest.mark.parametrize("n_knots", [2, 3, 40])
    def test_isotonic(self, n_knots):
        """Without gradients by numpy, with them by operators: the same function, also outside the knots."""
        knots = torch.linspace(0.1, 0.9, n_knots).double()
        values = torch.linspace(0.05, 0.8, n_knots).double().square()
        mapping = IsotonicMap(knots, values)
        x = torch.cat([torch.linspace(0, 1, 101).double(), knots])
        assert torch.allclose(
            interpolated(x, knots, values), interpolated(x.requires_grad_(), knots, values), atol=1e-15
        )
        for rows in self.batches():
            one, other = mapping(rows), mapping(rows.clone().requires_grad_())
            assert torch.allclose(one, other, rtol=1e-13, atol=1e-13, equal_nan=True)
            gone = ~self.alive(rows) & ~rows.isnan().any()
            assert bool((one[gone] == -torch.inf).all())
