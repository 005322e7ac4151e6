"""Calibrated models and calibrators on disk."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tcil
from tcil.calibration import storage
from tcil.calibration.calibrators.maps import (
    CalibrationMap,
    EnsembleMap,
    GroupTemperatureMap,
    IsotonicMap,
    PriorAdjustedMap,
    TemperatureMap,
    interpolated,
)
from tcil.foundation.checksums import open_json, seal_json


def all_calibrators(task):
    seen = range(task.seen)
    logits, labels = tcil.predict_logits(task.model, task.valid, classes=seen)
    on_test = tcil.predict_logits(task.model, task.test, classes=seen)
    known = tcil.StatisticsTemperatureScaling(rank=2).fit(task.model, task.test, seen, classes=seen).history_
    return {
        "TCIL": tcil.TCIL().fit(task.model, task.memory, task.valid, task.new_classes),
        "PACT": tcil.PACT().fit(task.model, task.memory, task.valid, task.new_classes, imbalance=9.0),
        "TemperatureScaling": tcil.TemperatureScaling(solver="sgd", seed=3).fit(logits, labels),
        "FirstTaskTemperatureScaling": tcil.FirstTaskTemperatureScaling().fit(logits, labels),
        "GroupTemperatureScaling": tcil.GroupTemperatureScaling().fit(*on_test, new_classes=task.new_classes),
        "EnsembleTemperatureScaling": tcil.EnsembleTemperatureScaling().fit(logits, labels),
        "MulticlassIsotonic": tcil.MulticlassIsotonic().fit(*on_test),
        "StatisticsTemperatureScaling": tcil.StatisticsTemperatureScaling(rank=2, per_class=5).fit(
            task.model, task.valid, task.new_classes, classes=seen, history=known
        ),
        "PerturbedTemperatureScaling": tcil.PerturbedTemperatureScaling(search="nelder-mead").fit(
            task.model, valid=task.valid, classes=seen
        ),
    }


NAMES = [
    "TCIL",
    "PACT",
    "TemperatureScaling",
    "FirstTaskTemperatureScaling",
    "GroupTemperatureScaling",
    "EnsembleTemperatureScaling",
    "MulticlassIsotonic",
    "PerturbedTemperatureScaling",
    "StatisticsTemperatureScaling",
]


@pytest.fixture(scope="module")
def fitted(digits_tasks):
    task = digits_tasks[2]
    return task, all_calibrators(task)


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

    def test_save_and_load(self, fitted, name, tmp_path):
        _, calibrators = fitted
        one = calibrators[name]
        path = one.save(tmp_path / "calibrator.json")
        other = tcil.extending.Calibrator.load(path)
        logits = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
        assert type(other) is type(one)
        assert torch.equal(other.transform(logits), one.transform(logits))
        assert other.classes_ == one.classes_
        assert other.history_ == one.history_
        assert repr(other) == repr(one)
        assert storage.encode(other.result_) == storage.encode(one.result_)
        if name != "FirstTaskTemperatureScaling":
            assert other.result_ == one.result_
        json.loads(path.read_text())  # plain JSON, no NaN or Infinity
        assert not list(tmp_path.glob("*.part"))

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
        again = tcil.PerturbedTemperatureScaling(search="nelder-mead").fit(once, valid=task.valid)
        twice = again.wrap(once)
        x = task.test[0][:4]
        with torch.no_grad():
            assert torch.allclose(twice(x), again.transform(once(x)))


def test_load_finds_the_class_by_itself(fitted, tmp_path):
    path = fitted[1]["EnsembleTemperatureScaling"].save(tmp_path / "c.json")
    assert isinstance(tcil.load(path), tcil.EnsembleTemperatureScaling)


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


def edit(path, **changes):
    """Change fields of a saved file, with a checksum that fits."""
    path.write_bytes(seal_json({**open_json(path.read_bytes()), **changes}))


class TestDisk:
    def test_wrong_class(self, fitted, tmp_path):
        path = fitted[1]["TemperatureScaling"].save(tmp_path / "c.json")
        with pytest.raises(ValueError, match="a saved TemperatureScaling; expected a saved TCIL"):
            tcil.TCIL.load(path)

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda p: p.unlink(), "expected an existing file"),
            (lambda p: p.write_text("{"), "it is not JSON"),
            (lambda p: p.write_text("[]"), "not a saved calibrator"),
            (lambda p: edit(p, format_version=99), "version 99"),
            (lambda p: edit(p, calibrator="Evil"), "a saved 'Evil'"),
            (
                lambda p: p.write_text(json.dumps({"format": "tcil-calibrator", "format_version": 1})),
                "without calibrator",
            ),
            *(
                (lambda p, k=k, v=v: edit(p, **{k: v}), "which is damaged")
                for k, v in [
                    ("arrays", []),
                    ("arrays", {}),
                    ("options", {"foo": 1}),
                    ("result", {}),
                    ("result", None),
                    ("features", 3),
                    ("array_file", {"file": "x"}),
                    ("classes", [0.5, 1]),
                    ("classes", "abc"),
                    ("head_width", "4"),
                    ("arrays", {"temperature": {"dtype": "float64", "value": -2.0}}),
                    ("arrays", {"temperature": {"dtype": "complex", "value": 2.0}}),
                ]
            ),
        ],
    )
    def test_damaged_files(self, fitted, tmp_path, damage, message):
        path = fitted[1]["TCIL"].save(tmp_path / "c.json")
        damage(path)
        with pytest.raises(ValueError, match=message):
            tcil.extending.Calibrator.load(path)

    def test_damaged_arrays(self, fitted, tmp_path):
        path = fitted[1]["MulticlassIsotonic"].save(tmp_path / "c.json")
        (arrays,) = tmp_path.glob("*.safetensors")
        content = bytearray(arrays.read_bytes())
        content[-1] ^= 1
        arrays.write_bytes(content)
        with pytest.raises(ValueError, match="does not match its checksum"):
            tcil.extending.Calibrator.load(path)
        arrays.unlink()
        with pytest.raises(ValueError, match="without its array file"):
            tcil.extending.Calibrator.load(path)

    def test_a_folder_is_not_a_file(self, tmp_path):
        with pytest.raises(ValueError, match="Is a directory"):
            tcil.load(tmp_path)

    def test_saving_again_leaves_no_old_arrays(self, fitted, tmp_path):
        path = fitted[1]["MulticlassIsotonic"].save(tmp_path / "c.json")
        labels = torch.arange(600) % 6
        logits = torch.randn(600, 6) + 2 * torch.eye(6)[labels]
        tcil.MulticlassIsotonic().fit(logits, labels).save(path)
        assert len(list(tmp_path.glob("*.safetensors"))) == 1
        fitted[1]["TCIL"].save(path)
        assert list(tmp_path.iterdir()) == [path]

    def test_array_file_cannot_point_elsewhere(self, fitted, tmp_path):
        path = fitted[1]["MulticlassIsotonic"].save(tmp_path / "c.json")
        edit(path, array_file={**json.loads(path.read_text())["array_file"], "file": "../../etc/passwd"})
        with pytest.raises(ValueError, match="without its array file"):
            tcil.extending.Calibrator.load(path)

    def test_bad_paths(self, fitted, tmp_path):
        with pytest.raises(ValueError, match=r"expected a file name that ends in \.json"):
            fitted[1]["TCIL"].save(tmp_path / "c.pkl")
        with pytest.raises(ValueError, match="an existing folder"):
            fitted[1]["TCIL"].save(tmp_path / "no" / "c.json")
        with pytest.raises(tcil.NotFittedError):
            tcil.TCIL().save(tmp_path / "c.json")
        assert not list(tmp_path.iterdir())

    def test_a_tilde_is_not_expanded(self, fitted, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        for call in (fitted[1]["TCIL"].save, tcil.load):
            with pytest.raises(ValueError, match=r"^path: got ~/c\.json.*'~' is not expanded.*expanduser\(\)") as told:
                call("~/c.json")
            assert "Create ~" not in str(told.value)

    def test_a_link_is_replaced(self, fitted, tmp_path):
        target = fitted[1]["TCIL"].save(tmp_path / "target.json")
        before, link = target.read_bytes(), tmp_path / "link.json"
        link.symlink_to(target)
        fitted[1]["TemperatureScaling"].save(link)
        assert not link.is_symlink()
        assert target.read_bytes() == before

    def test_a_failed_write_leaves_the_old_file(self, fitted, tmp_path, monkeypatch):
        path = fitted[1]["TCIL"].save(tmp_path / "c.json")
        before = path.read_bytes()

        def full(*_):
            raise OSError("no space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="no space"):
            fitted[1]["TCIL"].save(path)
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]

    def test_loads_in_a_fresh_process_without_pickle(self, fitted, tmp_path):
        path = fitted[1]["MulticlassIsotonic"].save(tmp_path / "c.json")
        code = (
            "import pickle, sys, tcil\n"
            "def no(*a, **k): raise AssertionError('unpickled')\n"
            "pickle.load = pickle.loads = pickle.Unpickler = no\n"
            "c = tcil.extending.Calibrator.load(sys.argv[1]); print(len(c.classes_))"
        )
        done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "6"

    def test_file_is_readable_by_others(self, fitted, tmp_path):
        path = fitted[1]["TCIL"].save(tmp_path / "c.json")
        mask = os.umask(0)
        os.umask(mask)
        assert path.stat().st_mode & 0o777 == 0o666 & ~mask


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


# --- a calibrator of the user's own, which needs features ---------------------------------------------------------


class DistanceMap(CalibrationMap):
    """T grows with the norm of the features."""

    needs_features = True

    def __init__(self, slope: Tensor) -> None:
        super().__init__()
        self.set_state(slope=slope)

    def forward(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
        assert features is not None
        norm = features.double().norm(dim=1, keepdim=True)
        return torch.log_softmax(logits.double() / (1 + self.slope * norm), dim=1)


class DistanceScaling(tcil.extending.Calibrator):
    map_type = DistanceMap
    result_type = float

    def fit(self, model, valid, n_classes):
        from tcil.calibration.inputs.classifier import Classifier
        from tcil.calibration.inputs.weights import weights_hash

        with Classifier(model) as classifier, torch.no_grad():
            classifier.logits_and_features(classifier.place(valid[0]))
            return self._fitted(
                DistanceMap(torch.tensor(0.25, dtype=torch.float64)),
                tuple(range(n_classes)),
                0.25,
                head_width=classifier.width,
                source=classifier.source,
                model_hash=weights_hash(model),
            )


class TestCalibratorsWithFeatures:
    def test_wrap_supplies_the_features(self, fitted):
        task, _ = fitted
        calibrator = DistanceScaling().fit(task.model, task.valid, 6)
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
        calibrated = DistanceScaling().fit(task.model, task.valid, 6).wrap(task.model).eval()
        program = torch.export.export(calibrated, (task.test[0][:8],))
        with torch.no_grad():
            assert torch.allclose(program.module()(task.test[0][:8]), calibrated(task.test[0][:8]), atol=1e-6)
        assert not any(m._forward_pre_hooks for m in task.model.modules())

    def test_features_are_asked_for(self, fitted):
        task, _ = fitted
        calibrator = DistanceScaling().fit(task.model, task.valid, 6)
        with pytest.raises(ValueError, match="features: got None; expected the features"):
            calibrator.transform(torch.randn(2, 6))
        with pytest.raises(ValueError, match="features: got 3 rows; expected 2"):
            calibrator.transform(torch.randn(2, 6), torch.randn(3, 32))

    def test_saves_and_loads(self, fitted, tmp_path):
        task, _ = fitted
        calibrator = DistanceScaling().fit(task.model, task.valid, 6)
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


def test_wrapped_model_shares_the_network_and_its_mode(task):
    task.model.train()
    calibrator = tcil.TCIL().fit(task.model, task.memory, task.valid, task.new_classes)
    calibrated = calibrator.wrap(nn.DataParallel(task.model))
    assert calibrated.model is task.model
    assert calibrated.training
    calibrated.eval()
    assert not task.model.training


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


# --- networks that mask classes -----------------------------------------------------------------------------------

MASKS = [-torch.inf, -1e4, -1e9, torch.finfo(torch.float32).min, "-1e4 + z"]


class MaskedHead(nn.Module):
    """Columns 4 and 5 are forbidden to inputs that do not say, in their last entry, that they are of the last task."""

    def __init__(self, mask):
        super().__init__()
        self.fc, self.mask = nn.Linear(16, 6), mask

    def forward(self, features, task):
        forbidden = (torch.arange(6) >= 4) & (task.detach() < 1.5)[:, None]
        logits = self.fc(features)
        return logits - 1e4 * forbidden if self.mask == "-1e4 + z" else logits.masked_fill(forbidden, self.mask)


class MaskedNetwork(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), MaskedHead(mask)

    def forward(self, x):
        return self.head(self.body(x[:, :8]), x[:, 8])


@pytest.fixture(scope="module")
def masked_task():
    """Weights and data of six classes in three tasks; the network with another mask has the same weights."""
    generator = torch.Generator().manual_seed(0)
    centres = 1.5 * torch.randn(6, 8, generator=generator)

    def draw(labels):
        inputs = centres[labels] + torch.randn(len(labels), 8, generator=generator)
        return torch.cat([inputs, (labels // 2)[:, None].float()], dim=1), labels

    memory, valid = draw(torch.arange(60) % 6), draw(4 + torch.arange(200) % 2)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = MaskedNetwork(-torch.inf)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(memory[0]), memory[1]).backward()
        optimizer.step()
    networks = [MaskedNetwork(mask) for mask in MASKS]
    for other in networks:
        other.load_state_dict(network.state_dict())
    return networks, memory, valid


@pytest.mark.parametrize("policy", ["paper", "random", "closest", "farthest"])
def test_no_exemplar_is_pushed_toward_a_masked_class(masked_task, policy):
    """The gradient would be NaN; how the mask is written does not matter."""
    networks, memory, valid = masked_task
    temperatures = []
    for network in networks:
        calibrator = tcil.TCIL(policy=policy).fit(network, memory, valid, new_classes=[4, 5])
        pushed, columns = calibrator.evidence_.pushed
        assert not bool(torch.isnan(pushed).any())
        assert torch.equal(pushed == -torch.inf, (columns < 4)[:, None] & (torch.arange(6) >= 4))
        temperatures.append(calibrator.temperature_)
    assert temperatures == pytest.approx([temperatures[0]] * len(MASKS), rel=1e-9)


@pytest.mark.parametrize(
    "name", ["PACT", "PerturbedTemperatureScaling", "EnsembleTemperatureScaling", "MulticlassIsotonic"]
)
def test_masked_classes_stay_at_zero_in_wrapped_and_exported_models(masked_task, name):
    networks, memory, valid = masked_task
    x, answers = memory[0], []
    forbidden = (memory[1] < 4)[:, None] & (torch.arange(6) >= 4)
    for network in networks:
        if name == "PACT":
            calibrator = tcil.PACT().fit(network, memory, valid, new_classes=[4, 5], imbalance=5.0)
        elif name == "PerturbedTemperatureScaling":
            calibrator = tcil.PerturbedTemperatureScaling(search="nelder-mead").fit(network, valid=memory)
        else:
            calibrator = getattr(tcil, name)().fit(*tcil.predict_logits(network, memory))
        with torch.no_grad():
            calibrated, logits = calibrator.wrap(network).eval(), network(x)
            out = calibrated(x)
        assert bool((out[forbidden] == -torch.inf).all())
        assert torch.equal(calibrator.transform(logits), out)
        assert torch.allclose(out.exp().sum(1), torch.ones(len(x)).double())
        assert torch.equal(out.argmax(1), logits.argmax(1))
        answers.append(out.exp())
    for answer in answers[1:]:
        torch.testing.assert_close(answer, answers[0])
    batch = torch.export.Dim("batch", min=2, max=4096)
    program = torch.export.export(calibrated, (x[:8],), dynamic_shapes=({0: batch},))
    with torch.no_grad():
        assert torch.allclose(program.module()(x).exp(), calibrated(x).exp(), atol=1e-6)


def test_labels_that_the_network_masks(masked_task):
    networks, memory, valid = masked_task
    for network in networks:
        wrong = memory[0].clone()
        wrong[4, 8] = 0.0  # an exemplar of class 4 that may not be one
        with pytest.raises(ValueError, match=r"memory labels: got the label 4 in row 4, whose logit is masked"):
            tcil.TCIL().fit(network, (wrong, memory[1]), valid, new_classes=[4, 5])
        wrong = valid[0].clone()
        wrong[:, 8] = 0.0
        with pytest.raises(
            ValueError, match=r"valid labels: got the label 4 in row 0, whose logit is masked.*200 such"
        ):
            tcil.PerturbedTemperatureScaling().fit(network, valid=(wrong, valid[1]))


def test_a_row_with_one_class_left(fitted):
    """Its probability is 1, in every map."""
    for calibrator in fitted[1].values():
        logits = torch.full((2, 6), -torch.inf)
        logits[0, 3], logits[1, :2] = 2.0, torch.tensor([1.0, 5.0])
        probs = calibrator.predict_proba(logits)
        assert torch.equal(probs[0], torch.eye(6)[3].double())
        assert not bool(torch.isnan(probs).any())
        assert float(probs[1].sum()) == pytest.approx(1)
        assert int(probs[1].argmax()) == 1
