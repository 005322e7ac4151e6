"""Calibrated models as ONNX files: every calibrator, both types, random and extreme inputs."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

import tcil
from tcil.options import PACTConstants

onnx = pytest.importorskip("tcil.integrations.onnx", reason="onnx, onnxruntime or onnxscript is not installed")
K = 5


def overlapping(n=200):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(n) % K
    return 2 * torch.eye(K)[labels] + 1.5 * torch.randn(n, K, generator=generator), labels


def calibrators():
    """All of them, on a network that passes its inputs through."""
    logits, labels = overlapping()
    identity = nn.Linear(K, K, bias=False)
    identity.weight.data = torch.eye(K)
    new = labels >= 3
    memory, valid = (logits[:50], labels[:50]), (logits[new], labels[new])
    return identity, {
        "TCIL": tcil.TCIL().fit(identity, memory, valid, [3, 4]),
        "PACT": tcil.PACT().fit(identity, memory, valid, [3, 4], imbalance=4.0),
        "PACT, moving predictions": tcil.PACT(keep_predictions=False).fit(
            identity, memory, valid, [3, 4], imbalance=4.0
        ),
        "PACT, one temperature": tcil.PACT(constants=PACTConstants.one_temperature()).fit(
            identity, memory, valid, [3, 4], imbalance=4.0
        ),
        "TemperatureScaling": tcil.TemperatureScaling().fit(logits, labels),
        "FirstTaskTemperatureScaling": tcil.FirstTaskTemperatureScaling().fit(logits, labels),
        "GroupTemperatureScaling": tcil.GroupTemperatureScaling().fit(logits, labels, [3, 4]),
        "EnsembleTemperatureScaling": tcil.EnsembleTemperatureScaling().fit(logits, labels),
        "MulticlassIsotonic": tcil.MulticlassIsotonic().fit(logits, labels),
        "PerturbedTemperatureScaling": tcil.PerturbedTemperatureScaling(search="nelder-mead").fit(
            identity, (logits, labels)
        ),
    }


NAMES = (
    "TCIL", "PACT", "PACT, moving predictions", "PACT, one temperature", "TemperatureScaling",
    "FirstTaskTemperatureScaling", "GroupTemperatureScaling", "EnsembleTemperatureScaling", "MulticlassIsotonic",
    "PerturbedTemperatureScaling",
)  # fmt: skip
EXTREME = torch.tensor(
    [
        [0.0, 0.0, 0.0, 0.0, 0.0],
        [1e30, -1e30, 0.0, 1.0, 2.0],
        [1.0, 2.0, -1e9, 3.0, -torch.inf],  # two masked classes
        [3.0, 3.0, 3.0, 2.999, -1e4],
        [1e-30, 0.0, -1e-30, 1e-38, 0.0],
        [700.0, 710.0, -700.0, 0.0, 1.0],
        [-5.0, -4.0, -3.0, -2.0, -1e5],
    ]
)


def both(calibrated, path, x):
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return session.run(["probabilities", "label"], {name: x.numpy()}), calibrated.eval()(x).exp().detach()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::tcil.CalibrationWarning")
def test_every_calibrator(name, dtype, tmp_path):
    _, fitted = calibrators()
    calibrated = fitted[name].wrap(nn.Identity(), dtype=dtype, force=True)  # a product with -inf would not be a number
    path = onnx.export(calibrated, tmp_path / "model.onnx", overlapping()[0][:4])
    found = onnx.verify(calibrated, path, overlapping()[0])
    assert found.agrees, found
    (probs, _), expected = both(calibrated, path, EXTREME)
    assert np.isfinite(probs).all()
    assert probs.dtype == {torch.float64: np.float64, torch.float32: np.float32}[dtype]
    np.testing.assert_allclose(probs, expected.numpy(), atol=2e-6)


@pytest.fixture(scope="module")
def isotonic(tmp_path_factory):
    """IRM in float32 with a prior, on a network without rounding, which the steps of IRM would enlarge."""
    network = nn.Sequential(nn.Dropout(0.5), nn.Linear(K, K)).train()
    network[1].weight.data, network[1].bias.data = torch.eye(K), torch.zeros(K)
    irm = tcil.MulticlassIsotonic().fit(*overlapping(), classes=range(K))
    calibrated = irm.wrap(network, dtype=torch.float32, prior=[1, 2, 3, 4, 5])
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    state = torch.random.get_rng_state()
    onnx.export(calibrated, path, torch.randn(3, K, generator=torch.Generator().manual_seed(0)), input_names=["pixels"])
    assert torch.equal(torch.random.get_rng_state(), state)
    return calibrated, path


class TestIsotonic:
    def test_agrees_with_torch(self, isotonic):
        calibrated, path = isotonic
        found = onnx.verify(calibrated, path, torch.randn(20, K, generator=torch.Generator().manual_seed(1)))
        assert found.agrees
        assert found.n_rows > 200

    def test_is_left_in_training_mode(self, isotonic):
        assert isotonic[0].model.training

    def test_names_types_and_classes(self, isotonic):
        import onnx as package

        model = package.load(isotonic[1])
        assert [entry.name for entry in model.graph.input] == ["pixels"]
        assert [entry.name for entry in model.graph.output] == list(onnx.OUTPUTS)
        assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param
        told = {entry.key: json.loads(entry.value) for entry in model.metadata_props if entry.key == "classes"}
        assert told == {"classes": [0, 1, 2, 3, 4]}
        assert not [path for path in isotonic[1].parent.iterdir() if path != isotonic[1]]  # weights are inside

    def test_any_batch_size_and_labels(self, isotonic):
        calibrated, path = isotonic
        for size in (1, 2, 7, 130):
            x = torch.randn(size, K, generator=torch.Generator().manual_seed(size))
            (probs, label), expected = both(calibrated, path, x)
            np.testing.assert_allclose(probs, expected.numpy(), atol=1e-6)
            np.testing.assert_array_equal(label, expected.argmax(dim=1).numpy())

    def test_a_difference_is_told(self, isotonic):
        calibrated, path = isotonic
        with torch.no_grad():
            calibrated.model[1].bias[0] += 0.5
        try:
            found = onnx.verify(calibrated, path, torch.randn(20, K))
        finally:
            with torch.no_grad():
                calibrated.model[1].bias[0] -= 0.5
        assert not found.agrees
        assert found.largest_difference > 0.01


def test_huge_logits_may_differ_by_their_rounding(tmp_path):
    """Random inputs times 1000 give logits of thousands, whose last digits are probabilities."""
    generator = torch.Generator().manual_seed(0)
    network = nn.Sequential(nn.Linear(K, 64), nn.ReLU(), nn.Linear(64, K))
    for parameter in network.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    calibrated = tcil.TemperatureScaling().fit(*overlapping(), classes=range(K)).wrap(network)
    x = torch.randn(32, K, generator=generator)
    path = onnx.export(calibrated, tmp_path / "model.onnx", x[:4])
    assert onnx.verify(calibrated, path, x).agrees
    with torch.no_grad():
        network[2].weight *= 1.001
    assert not onnx.verify(calibrated, path, x).agrees


@pytest.mark.parametrize(
    ("row", "least", "most"),
    [
        ([5000.0, 5000.5, 0.0], 1e-4, 1e-2),
        ([5.0, 5.5, 0.0], 0.0, 1e-5),
        ([5000.0, 0.0, 0.0], 0.0, 1e-9),
        ([5.0, -1e4, 5.0], 1e-4, 1e-2),
    ],
)
def test_rounding_is_allowed_where_it_changes_a_probability(row, least, most):
    log_probs = torch.log_softmax(torch.tensor([row], dtype=torch.float64), dim=1).numpy()
    (allowed,) = onnx._rounding(log_probs, np.exp(log_probs))
    assert least <= allowed <= most


def test_another_model_with_huge_logits_does_not_agree(tmp_path):
    network = nn.Linear(K, K)
    network.weight.data = 1e5 * torch.randn(K, K, generator=torch.Generator().manual_seed(0))
    calibrated = tcil.TemperatureScaling().fit(*overlapping(), classes=range(K)).wrap(network)
    x = 255 * torch.rand(32, K, generator=torch.Generator().manual_seed(1))
    path = onnx.export(calibrated, tmp_path / "model.onnx", x[:4])
    with torch.no_grad():
        network.weight.copy_(1e5 * torch.randn(K, K, generator=torch.Generator().manual_seed(2)))
    assert not onnx.verify(calibrated, path, x).agrees


def test_a_model_with_a_decision_rule_is_exported_otherwise(tmp_path):
    rule = tcil.decisions.ModelBasedThreshold(risk=0.5).fit(torch.full((4, K), 1 / K))
    deciding = rule.wrap(nn.Identity(), calibrated=False)
    with pytest.raises(ValueError, match=r"calibrated: got DecidingModel.* torch\.onnx\.export\(\.\.\., dynamo=True\)"):
        onnx.export(deciding, tmp_path / "model.onnx", torch.zeros(2, K))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"calibrated": nn.Linear(2, 2)}, "calibrated: got Linear"),
        ({"example": torch.zeros(1, K)}, "two rows or more"),
        ({"example": [torch.zeros(2, K), torch.zeros(3, K)]}, "2 and 3 rows"),
        ({"example": "x"}, "something else than tensors"),
        ({"example": {"ids": torch.zeros(2, K), "mask": torch.zeros(2, K)}},
         r"got a dict; .* example=\(ids, mask\) .* input_names=\['ids', 'mask'\]"),
        ({"input_names": ["a", "b"]}, "input_names"),
        ({"opset": 9}, "opset: got 9"),
    ],
)  # fmt: skip
def test_odd_arguments_are_refused_before_any_work(isotonic, arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        onnx.export(**{"calibrated": isotonic[0], "path": tmp_path / "x", "example": torch.zeros(2, K), **arguments})
    assert not list(tmp_path.iterdir())
