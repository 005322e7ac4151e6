"""Calibrated models: wrapped, exported, moved and converted."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import pytest
import torch
from every_calibrator import NAMES, ByNorm
from torch import nn

import tcil
from tcil.calibration.calibrators.maps import (
    PriorAdjustedMap,
    TemperatureMap,
)


@pytest.mark.parametrize("name", NAMES)
class TestEveryCalibrator:
    def test_wrap_is_transform(self, fitted, name):
        task, calibrators = fitted
        calibrated = calibrators[name].wrap(task.model, wider_head=True).eval()
        with torch.no_grad():
            out, logits = calibrated(task.test[0]), task.model(task.test[0])[:, :6]
        assert torch.allclose(out, calibrators[name].transform(logits), atol=1e-5)
        assert torch.allclose(out.exp().sum(1), torch.ones(len(out)).double())

    def test_state_dict_round_trip(self, fitted, name):
        task, calibrators = fitted
        calibrated = calibrators[name].wrap(task.model, wider_head=True).eval()
        saved = {key: value.clone() for key, value in calibrated.state_dict().items()}
        assert any(key.startswith("model.fc") for key in saved)
        other = calibrators[name].wrap(tcil.networks.small_cnn(10), wider_head=True, force=True).eval()
        other.load_state_dict(saved)
        with torch.no_grad():
            assert torch.equal(other(task.test[0]), calibrated(task.test[0]))

    def test_torch_export(self, fitted, name):
        task, calibrators = fitted
        calibrated = calibrators[name].wrap(task.model, wider_head=True).eval()
        batch = torch.export.Dim("batch", min=2, max=4096)
        program = torch.export.export(calibrated, (task.test[0][:8],), dynamic_shapes=({0: batch},))
        with torch.no_grad():
            assert torch.allclose(program.module()(task.test[0]), calibrated(task.test[0]), atol=1e-6)

    def test_numpy_and_tensor_agree(self, fitted, name):
        _, calibrators = fitted
        logits = np.random.default_rng(0).standard_normal((20, 6)).astype(np.float32)
        from_numpy = calibrators[name].predict_proba(logits)
        assert isinstance(from_numpy, np.ndarray)
        np.testing.assert_array_equal(from_numpy, calibrators[name].predict_proba(torch.from_numpy(logits)).numpy())


class TestCalibratedTwice:
    """The probabilities of a calibrated model would be calibrated a second time."""

    @pytest.mark.parametrize("name", NAMES)
    def test_a_calibrated_model_is_refused(self, fitted, name):
        task, calibrators = fitted
        once = calibrators[name].wrap(task.model, wider_head=True)
        with pytest.raises(ValueError, match=r"^model: got a model that is calibrated already.*the attribute \.model"):
            calibrators[name].wrap(once, wider_head=True)

    @pytest.mark.parametrize("name", NAMES)
    def test_nor_are_its_log_probabilities_taken_for_the_logits_of_its_calibrator(self, fitted, name):
        task, calibrators = fitted
        calibrated = calibrators[name].wrap(task.model, wider_head=True)
        with pytest.raises(ValueError, match=r"^model: got a model that is calibrated already.*pass its classes_"):
            tcil.predict_logits(calibrated, task.test, calibrator=calibrators[name])
        tcil.predict_logits(calibrated, task.test)  # its log-probabilities

    def test_twice_on_purpose(self, fitted):
        task, calibrators = fitted
        scaling, x = calibrators["TemperatureScaling"], task.test[0][:4]
        once = scaling.wrap(task.model, wider_head=True).eval()
        with torch.no_grad():
            twice = scaling.wrap(once, wider_head=True, force=True).eval()(x)
            assert torch.allclose(twice, scaling.transform(once(x)))

    def test_a_calibrated_teacher_beside_the_head_is_accepted(self, fitted):
        """What the model returns is not calibrated."""
        task, calibrators = fitted

        class Student(nn.Module):
            def __init__(self):
                super().__init__()
                self.network, self.teacher = task.model, calibrators["TCIL"].wrap(task.model)

            def forward(self, x):
                return self.network(x)

        x, plain = task.test[0][:4], calibrators["TemperatureScaling"].wrap(task.model, wider_head=True).eval()
        wrapped = calibrators["TemperatureScaling"].wrap(Student(), wider_head=True).eval()
        with torch.no_grad():
            assert torch.equal(wrapped(x), plain(x))

    @pytest.mark.parametrize(
        "around", [nn.DataParallel, nn.Sequential, lambda once: nn.Sequential(nn.Identity(), once)]
    )
    def test_inside_another_module_too(self, fitted, around):
        task, calibrators = fitted
        once = calibrators["TCIL"].wrap(task.model)
        for name in ("TCIL", "TemperatureScaling"):
            with pytest.raises(ValueError, match=r"^model: got a model that is calibrated already"):
                calibrators[name].wrap(around(once))

    def test_what_the_message_says_works(self, fitted):
        task, calibrators = fitted
        once = calibrators["TCIL"].wrap(task.model)
        x = task.test[0][:4]
        assert torch.equal(calibrators["TCIL"].wrap(once.model).eval()(x), once.eval()(x))

    def test_a_calibrator_of_the_calibrated_model_itself_is_accepted(self, task):
        once = tcil.TCIL().fit(task.model, task.memory, task.valid, task.new_classes).wrap(task.model).eval()
        with pytest.warns(tcil.CalibrationWarning, match=r"^model: it is calibrated already"):
            again = tcil.PerturbedTemperatureScaling(search="nelder-mead").fit(once, valid=task.valid)
        twice = again.wrap(once)
        x = task.test[0][:4]
        with torch.no_grad():
            assert torch.allclose(twice(x), again.transform(once(x)))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("example", ["plain", "masked", "overtaken"])
def test_a_trace_does_not_depend_on_its_example(example):
    """It holds for rows that PACT's bias would give to another class, and for masked ones."""
    rows = {
        "plain": [[4.0, 0.0, 0.5], [0.1, 3.0, 0.2]],
        "masked": [[4.0, -torch.inf, 0.5], [0.1, 3.0, -1e9]],
        "overtaken": [[1.0, 0.0, 1.5], [0.2, 1.0, 1.1]],  # old classes gain 2
    }
    flags, numbers = torch.tensor([False, False, True]), torch.tensor([1.5, 2.0], dtype=torch.float64)
    mapping = PriorAdjustedMap(numbers[0], numbers[1], flags, torch.tensor(True))
    traced = torch.jit.trace(mapping, torch.tensor(rows[example]), check_trace=False)
    for other in rows.values():
        logits = torch.tensor(other)
        assert torch.allclose(traced(logits).exp(), mapping(logits).exp(), atol=1e-12)
        assert torch.equal(traced(logits).argmax(dim=1), logits.argmax(dim=1))


class TestWeights:
    def test_other_weights_are_refused_unless_forced(self, fitted, tmp_path):
        task, calibrators = fitted
        path = calibrators["TCIL"].save(tmp_path / "c.json")
        other = tcil.networks.small_cnn(10)
        with pytest.raises(tcil.WeightsMismatchError, match="was fitted on"):
            tcil.TCIL.load(path, model=other)
        loaded = tcil.TCIL.load(path, model=task.model)
        with pytest.raises(tcil.WeightsMismatchError, match="force=True"):
            loaded.wrap(other)
        assert tcil.TCIL.load(path, model=other, force=True).temperature_ == loaded.temperature_
        loaded.wrap(other, force=True)

    @pytest.mark.parametrize("name", ["TCIL", "TemperatureScaling"])
    @pytest.mark.parametrize("model", [5, "model.pt", {}, torch.nn.Linear], ids=repr)
    def test_what_is_no_module_is_refused(self, fitted, tmp_path, name, model):
        calibrator = fitted[1][name]
        path = calibrator.save(tmp_path / "c.json")
        for call in (
            lambda: tcil.load(path, model=model),
            lambda: calibrator.check_weights(model),
            lambda: calibrator.wrap(model),
            lambda: calibrator.save(path, model=model),
        ):
            with pytest.raises(ValueError, match=r"^model: got .*; expected a torch\.nn\.Module"):
                call()

    def test_logits_calibrators_record_the_model_on_request(self, fitted, tmp_path):
        task, calibrators = fitted
        path = calibrators["TemperatureScaling"].save(tmp_path / "c.json", model=task.model)
        tcil.TemperatureScaling.load(path, model=task.model)
        with pytest.raises(tcil.WeightsMismatchError):
            tcil.TemperatureScaling.load(path, model=tcil.networks.small_cnn(10))

    def test_one_changed_number_is_noticed(self, task):
        calibrator = tcil.TCIL().fit(task.model, task.memory, task.valid, task.new_classes)
        calibrator.wrap(task.model)
        with torch.no_grad():
            task.model.bn1.running_mean[0] += 1e-6
        with pytest.raises(tcil.WeightsMismatchError):
            calibrator.wrap(task.model)


class TestWidths:
    def test_a_grown_head_is_refused(self, fitted):
        _, calibrators = fitted
        with pytest.raises(ValueError, match=r"model: got 10 logits; expected 6.*wider_head=True"):
            calibrators["TemperatureScaling"].wrap(fitted[0].model)(fitted[0].test[0][:2])

    def test_the_head_seen_in_fit_is_sliced(self, fitted):
        task, calibrators = fitted
        assert calibrators["TCIL"].wrap(task.model)(task.test[0][:2]).shape == (2, 6)

    def test_too_narrow(self, fitted):
        with pytest.raises(ValueError, match=r"model: got 3 logits; expected .* was fitted on\. Pass the") as told:
            fitted[1]["TCIL"].wrap(tcil.networks.small_cnn(3), force=True)(fitted[0].test[0][:2])
        assert "wider_head" not in str(told.value)  # it slices heads with more columns


class TestPrecision:
    @pytest.mark.usefixtures("bf16")
    def test_half_does_not_touch_the_temperature(self, fitted):
        task, calibrators = fitted
        import copy

        calibrated = calibrators["TCIL"].wrap(copy.deepcopy(task.model))
        calibrated.bfloat16()
        assert calibrated.model.fc.weight.dtype == torch.bfloat16
        assert float(calibrated.calibration.temperature) == calibrators["TCIL"].temperature_
        assert calibrated(task.test[0][:4].bfloat16()).dtype == torch.float64

    def test_meta_device_moves(self, fitted):
        task, calibrators = fitted
        import copy

        calibrated = calibrators["MulticlassIsotonic"].wrap(copy.deepcopy(task.model), wider_head=True)
        calibrated.to("meta")
        assert calibrated.calibration.knots.device.type == "meta"


class TestCalibratorsWithFeatures:
    def test_wrap_supplies_the_features(self, fitted):
        task, _ = fitted
        calibrator = ByNorm().fit(task.model, task.valid, classes=range(6))
        x = task.test[0][:16]
        with torch.no_grad():
            logits, features = task.model(x)[:, :6], task.model.features(x)
            out = calibrator.wrap(task.model).eval()(x)
        assert torch.allclose(out, calibrator.transform(logits, features), atol=1e-6)

    @pytest.mark.skipif(
        torch.__version__.startswith("2.6."), reason="torch 2.6 exports no hooks, by which features are read"
    )
    def test_export(self, fitted):
        task, _ = fitted
        calibrated = ByNorm().fit(task.model, task.valid, classes=range(6)).wrap(task.model).eval()
        program = torch.export.export(calibrated, (task.test[0][:8],))
        with torch.no_grad():
            assert torch.allclose(program.module()(task.test[0][:8]), calibrated(task.test[0][:8]), atol=1e-6)
        assert not any(m._forward_pre_hooks for m in task.model.modules())

    def test_features_are_asked_for(self, fitted):
        task, _ = fitted
        calibrator = ByNorm().fit(task.model, task.valid, classes=range(6))
        with pytest.raises(ValueError, match="features: got None; expected the features"):
            calibrator.transform(torch.randn(2, 6))
        with pytest.raises(ValueError, match="features: got 3 rows; expected 2"):
            calibrator.transform(torch.randn(2, 6), torch.randn(3, 32))

    def test_saves_and_loads(self, fitted, tmp_path):
        task, _ = fitted
        calibrator = ByNorm().fit(task.model, task.valid, classes=range(6))
        loaded = tcil.extending.Calibrator.load(calibrator.save(tmp_path / "c.json"), model=task.model)
        with torch.no_grad():
            assert torch.equal(loaded.wrap(task.model)(task.test[0][:4]), calibrator.wrap(task.model)(task.test[0][:4]))


def test_wrapped_models_take_keyword_arguments():
    class Keyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, pixel_values):
            return self.fc(pixel_values)

    scaling = tcil.TemperatureScaling().fit(5 * torch.eye(3)[[0, 1, 2, 0]], torch.tensor([0, 1, 2, 2]))
    calibrated, x = scaling.wrap(Keyword()), torch.randn(2, 4)
    assert torch.equal(calibrated(pixel_values=x), calibrated(x))


def test_inputs_follow_weights_that_are_converted_after_wrap():
    model = nn.Linear(4, 3)
    scaling = tcil.TemperatureScaling().fit(5 * torch.eye(3)[[0, 1, 2, 0]], torch.tensor([0, 1, 2, 2]))
    calibrated, x = scaling.wrap(model), torch.randn(2, 4)
    before = calibrated(x.double())
    model.double()  # the network is shared: the wrapped model is not told
    assert torch.allclose(calibrated(x), before, atol=1e-6)
    model.load_state_dict({key: value.float() for key, value in model.state_dict().items()}, assign=True)
    assert torch.equal(calibrated(x.double()), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_columns_in_order_are_those_of_the_head(dtype):
    model, places, x = nn.Linear(4, 3), torch.tensor([2, 0, 1]), torch.randn(5, 4)
    logits, labels = 5 * torch.eye(3)[[0, 1, 2, 0]], torch.tensor([0, 1, 2, 2])
    scaling = tcil.TemperatureScaling().fit(logits, labels)
    state = scaling._fit_state
    with torch.no_grad():
        z = model(x)
        for columns in (None, (0, 1, 2), (2, 0, 1)):
            scaling._state = dataclasses.replace(state, columns=columns)
            wanted = scaling.transform(z[:, places] if columns == (2, 0, 1) else z)
            assert torch.allclose(scaling.wrap(model, dtype=dtype)(x).double(), wanted, atol=1e-6)


def test_rows_out_of_range_beside_ordinary_ones():
    scaling = tcil.TemperatureScaling().fit(5 * torch.eye(3)[[0, 1, 2, 0]], torch.tensor([0, 1, 2, 2]))
    scaling._state = dataclasses.replace(scaling._fit_state, mapping=TemperatureMap(torch.tensor(1e-12).double()))
    rows = torch.tensor([[1.0, 0.0, 0.5], [-1e32, -2e32, -3e32], [3e32, 1e32, 2e32]])
    for dtype in (torch.float32, torch.float64):
        probs = scaling.wrap(nn.Identity(), dtype=dtype, force=True)(rows).exp().double()
        assert torch.allclose(probs, torch.eye(3)[[0, 0, 0]].double()), dtype
    assert scaling.wrap(nn.Identity(), force=True)(rows[:0]).shape == (0, 3)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.Dropout(0.5)])
def test_a_model_in_training_mode_says_so_once(layer):
    """Its answers are others than those that the calibrator was fitted on, without an error."""
    scaling = tcil.TemperatureScaling().fit(5 * torch.eye(3)[[0, 1, 2, 0]], torch.tensor([0, 1, 2, 2]))
    x = torch.randn(8, 4)
    calibrated = scaling.wrap(nn.Sequential(layer, nn.Linear(4, 3)).train())
    with pytest.warns(
        tcil.CalibrationWarning, match=rf"^model: it is in training mode, in which {type(layer).__name__}"
    ):
        calibrated(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrated(x)
        scaling.wrap(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).train())(x)  # answers as in evaluation mode
        scaling.wrap(nn.Sequential(layer, nn.Linear(4, 3)).eval())(x)


def test_wrapped_model_shares_the_network_and_its_mode(task):
    task.model.train()
    calibrator = tcil.TCIL().fit(task.model, task.memory, task.valid, task.new_classes)
    calibrated = calibrator.wrap(nn.DataParallel(task.model))
    assert calibrated.model is task.model
    assert calibrated.training
    calibrated.eval()
    assert not task.model.training
