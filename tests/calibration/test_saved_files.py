"""Saved calibrators: any change of a file is noticed, and what cannot be the result of a fit is refused."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import tcil
from tcil.calibration import storage

K = 4


@pytest.fixture(scope="module")
def calibrators():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(80) % K
    logits = 3 * torch.eye(K)[labels] + 2 * torch.randn(80, K, generator=generator)
    inputs = torch.randn(80, 6, generator=generator) + 2 * torch.eye(K, 6)[labels]
    network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    new = labels >= 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tcil.CalibrationWarning)
        fit = tcil.PACT().fit(network, (inputs, labels), (inputs[new] + 1, labels[new]), [2, 3], imbalance=9.0)
    return {
        "ts": tcil.TemperatureScaling().fit(logits, labels),
        "ets": tcil.EnsembleTemperatureScaling().fit(logits, labels),
        "group": tcil.GroupTemperatureScaling().fit(logits, labels, new_classes=[2, 3]),
        "irm": tcil.MulticlassIsotonic().fit(logits, labels),
        "pact": fit,
    }


def test_a_file_of_an_earlier_version_is_read():
    """It was saved at commit 97df583, before new classes could have a temperature of their own."""
    pact = tcil.load(Path(__file__).parent / "pact_before_contrast.json")
    assert pact.result_.new_temperature is None
    assert pact.new_temperature_ == pact.temperature_ == pact.result_.temperature
    assert pact.predict_proba(3 * torch.eye(K)).shape == (K, K)
    assert pact.constants == tcil.PACT().constants


LOGITS = torch.linspace(-4, 4, 3 * K).reshape(3, K).sin() * 5


def saved(calibrators, name, folder):
    path = calibrators[name].save(folder / "c.json")
    return path, calibrators[name].transform(LOGITS)


def content_of(path):
    return {file: file.read_bytes() for file in sorted(path.parent.iterdir())}


@pytest.mark.parametrize(
    ("name", "inline"), [("ts", 16), ("ets", 16), ("group", 16), ("irm", 16), ("irm", 1 << 16), ("pact", 16)]
)
def test_no_flipped_bit_changes_a_probability(calibrators, name, inline, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_INLINE_ELEMENTS", inline)  # more than this many numbers go to a second file
    path, want = saved(calibrators, name, tmp_path)
    files = content_of(path)
    assert len(files) == (2 if name == "irm" and inline == 16 else 1)
    for file, content in files.items():
        bits = range(0, 8 * len(content), 8 * len(content) // (600 if name == "ts" else 150) | 1)
        for bit in bits:
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            file.write_bytes(damaged)
            with pytest.raises(ValueError, match="path: got"):
                tcil.load(path)
        file.write_bytes(content)
    assert torch.equal(tcil.load(path).transform(LOGITS), want)


@pytest.mark.parametrize("name", ["ts", "irm"])
def test_no_end_cut_off_is_read(calibrators, name, tmp_path):
    path, _ = saved(calibrators, name, tmp_path)
    for file, content in content_of(path).items():
        for length in range(0, len(content), 97):
            file.write_bytes(content[:length])
            with pytest.raises(ValueError, match="path: got"):
                tcil.load(path)
        file.write_bytes(content + b"\0")
        with pytest.raises(ValueError, match="path: got"):
            tcil.load(path)
        file.write_bytes(content)


def unsealed(path, **changes):
    """The file as version 1 of the format had it: the same fields without a checksum."""
    record = json.loads(path.read_bytes())
    record.pop("checksum", None)
    path.write_text(json.dumps({**record, "format_version": 1, **changes}, indent=2))
    return path


@pytest.mark.parametrize("name", ["ts", "ets", "group", "irm"])
def test_files_of_version_1_stay_readable(calibrators, name, tmp_path):
    path, want = saved(calibrators, name, tmp_path)
    assert torch.equal(tcil.load(unsealed(path)).transform(LOGITS), want)
    with pytest.raises(ValueError, match="format version 2 without a checksum"):
        tcil.load(unsealed(path, format_version=2))


def number(value, dtype="float64"):
    return {"dtype": dtype, "value": value}


TS, GROUP, ETS = "ts", "group", "ets"
RANGES = {
    "a tiny temperature": (TS, {"arrays": {"temperature": number(1e-320)}}),
    "a huge temperature": (TS, {"arrays": {"temperature": number(1e200)}}),
    "an infinite temperature": (TS, {"arrays": {"temperature": number("inf")}}),
    "a temperature as text": (TS, {"arrays": {"temperature": number("2")}}),
    "a temperature as a whole number": (TS, {"arrays": {"temperature": number(2, "int64")}}),
    "another temperature than the result's": (TS, {"arrays": {"temperature": number(2.0)}}),
    "a number beyond 64 bits": (TS, {"arrays": {"temperature": number(2**70, "int64")}}),
    "a number beyond all floats": (TS, {"arrays": {"temperature": number(10**400)}}),
    "an unknown array": (TS, {"arrays": {"temperature": number(2.0), "more": number(1.0)}}),
    "no classes": (TS, {"classes": []}),
    "repeated classes": (TS, {"classes": [0, 1, 2, 2]}),
    "a class that is true": (TS, {"classes": [0, True, 2, 3]}),
    "a class beyond 64 bits": (TS, {"classes": [0, 1, 2, 2**63]}),
    "fewer columns than classes": (TS, {"columns": [0, 1, 2]}),
    "negative columns": (TS, {"columns": [-1, 1, 2, 3]}),
    "a column beyond the head": (TS, {"columns": [0, 1, 2, 9], "head_width": 9}),
    "a head narrower than the classes": (TS, {"head_width": 3}),
    "half a column": (TS, {"head_width": 4.0}),
    "a history of another kind": (TS, {"history": [1]}),
    "a hash of another kind": (TS, {"model_hash": 5}),
    "a hash without its parts": (TS, {"model_hash": {"digest": "0"}}),
    "a head that is a number": (TS, {"features": [[5], None, 0]}),
    "a call as text": (TS, {"features": [["fc"], None, "0"]}),
    "a call before the first": (TS, {"features": [["fc"], None, -1]}),
    "an unhashable class name": (TS, {"calibrator": ["TCIL"]}),
    "a module's name": (TS, {"calibrator": "os:system"}),
    "the base class": (TS, {"calibrator": "SingleTemperature"}),
    "options as a list": (TS, {"options": [1]}),
    "an option of another kind": (TS, {"options": {"seed": "0"}}),
    "groups that are numbers": (GROUP, {"is_new": number([0, 0, 5, 1], "int64")}),
    "a group too many": (GROUP, {"is_new": number([True] * 5, "bool")}),
    "groups of numbers as flags": (GROUP, {"is_new": number([0, 0, 1, 1], "bool")}),
    "a negative temperature": (GROUP, {"temperatures": number([1.0, -1.0])}),
    "weights off the simplex": (ETS, {"weights": number([0.5, 0.6, 0.0])}),
    "a negative weight": (ETS, {"weights": number([1.5, -0.5, 0.0])}),
}


@pytest.mark.parametrize("case", RANGES, ids=list(RANGES))
def test_what_no_fit_leaves_is_refused(calibrators, case, tmp_path):
    name, changes = RANGES[case]
    path, _ = saved(calibrators, name, tmp_path)
    if name != TS:
        changes = {"arrays": {**json.loads(path.read_bytes())["arrays"], **changes}}
    with pytest.raises(ValueError, match="path: got"):
        tcil.load(unsealed(path, **changes))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 3.0),
        ("n_samples", "80"),
        ("n_samples", True),
        ("verdict", "fine"),
        ("nll_before", None),
        ("nll_after", [1.0]),
    ],
)
def test_results_that_no_fit_leaves_are_refused(calibrators, field, value, tmp_path):
    path, _ = saved(calibrators, TS, tmp_path)
    result = json.loads(path.read_bytes())["result"]
    with pytest.raises(ValueError, match="path: got"):
        tcil.load(unsealed(path, result={**result, field: value}))


@pytest.mark.parametrize("knots", [[0.5, 0.2], [-0.1, 0.5], [0.2, 1.5], [0.2]])
def test_knots_that_are_no_probabilities(calibrators, knots, tmp_path):
    labels = torch.arange(6) % 2
    calibrator = tcil.MulticlassIsotonic().fit(torch.randn(6, 2, generator=torch.Generator().manual_seed(0)), labels)
    path = calibrator.save(tmp_path / "c.json")
    arrays = {"knots": number(knots), "values": number([0.1, 0.4][: len(knots)])}
    with pytest.raises(ValueError, match="which is damaged"):
        tcil.load(unsealed(path, arrays=arrays, array_file=None))


BOMBS = {
    "deep lists": b"[" * 200_000 + b"]" * 200_000,
    "deep objects": b'{"a":' * 200_000,
    "a number of many digits": b'{"format": ' + b"9" * 10_000 + b"}",
    "not a number": b'{"format": NaN}',
    "infinity": b'{"format": -Infinity}',
    "a key twice": b'{"format": "tcil-calibrator", "format": "tcil-calibrator"}',
    "UTF-16": '{"format": "tcil-calibrator"}'.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf{}",
    "bytes": bytes(range(256)),
    "nothing": b"",
    "a number": b"3",
    "null": b"null",
    "text": b'"tcil-calibrator"',
}


@pytest.mark.parametrize("content", BOMBS.values(), ids=list(BOMBS))
def test_foreign_files(calibrators, content, tmp_path):
    path = tmp_path / "c.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"path: got .*c\.json"):
        tcil.load(path)
    calibrators[TS].save(path)  # saving over it works
    assert tcil.load(path).temperature_ == calibrators[TS].temperature_


def test_a_key_twice_in_a_whole_file(calibrators, tmp_path):
    path, _ = saved(calibrators, TS, tmp_path)
    text = unsealed(path).read_text()
    path.write_text(text[:-2] + ', "classes": [3, 2, 1, 0]}')
    with pytest.raises(ValueError, match="'classes' occurs twice"):
        tcil.load(path)


def test_files_that_are_no_files(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(ValueError, match="pipe or a device"):  # and does not wait for a writer
        tcil.load(tmp_path / "pipe.json")
    with pytest.raises(ValueError, match="Is a directory"):
        tcil.load(tmp_path)
    with pytest.raises(ValueError, match="No such file"):
        tcil.load(tmp_path / "none.json")
    with pytest.raises(ValueError, match="path: got"):
        tcil.load("a\0b.json")
    monkeypatch.setattr(storage, "_LARGEST_JSON", 10)
    (tmp_path / "large.json").write_text("{" + " " * 20 + "}")
    with pytest.raises(ValueError, match="22 bytes, more than 10"):
        tcil.load(tmp_path / "large.json")


def test_saving_deletes_nothing_but_its_own_arrays(calibrators, tmp_path):
    """A foreign JSON at the path may name any file of the folder as its arrays."""
    path, treasure = tmp_path / "c.json", tmp_path / "thesis.safetensors"
    treasure.write_text("mine")
    path.write_text(json.dumps({"format": "tcil-calibrator", "array_file": {"file": treasure.name}}))
    calibrators[TS].save(path)
    assert treasure.read_text() == "mine"


def test_saving_does_not_write_through_a_link(calibrators, tmp_path):
    target, path = tmp_path / "target.txt", tmp_path / "c.json"
    target.write_text("mine")
    (tmp_path / f".c.json.{os.getpid()}.part").symlink_to(target)
    calibrators[TS].save(path)
    assert target.read_text() == "mine"
    assert not path.is_symlink()


class Matrix(tcil.extending.CalibrationMap):
    def __init__(self, mix, counts):
        super().__init__()
        self.set_state(mix=mix, counts=counts)

    def forward(self, logits, features=None):
        return torch.log_softmax(logits.double() @ self.mix, dim=1)


class Mixing(tcil.extending.Calibrator):
    map_type = Matrix
    result_type = float


def test_arrays_of_every_shape_and_type_come_back(tmp_path):
    mix, counts = torch.eye(2, dtype=torch.float64), torch.tensor([[1, 2]], dtype=torch.int16)
    path = Mixing()._fitted(Matrix(mix, counts), (0, 1), 0.5).save(tmp_path / "c.json")
    again = tcil.load(path)._mapping()
    assert torch.equal(again.mix, mix)
    assert torch.equal(again.counts, counts)
    assert again.counts.dtype == torch.int16


def test_two_classes_of_one_name(calibrators, tmp_path):
    """A user's class that has the name of another is never taken for it, nor the other way round."""
    path, _ = saved(calibrators, "ets", tmp_path)
    namesake = type("EnsembleTemperatureScaling", (tcil.EnsembleTemperatureScaling,), {"__module__": "elsewhere"})
    try:
        assert type(tcil.load(path)) is tcil.EnsembleTemperatureScaling
        assert type(tcil.EnsembleTemperatureScaling.load(path)) is tcil.EnsembleTemperatureScaling
        assert type(namesake.load(path)) is namesake
    finally:
        del tcil.extending.Calibrator._known["EnsembleTemperatureScaling"]["elsewhere"]
    assert type(tcil.load(path)) is tcil.EnsembleTemperatureScaling


def test_what_could_not_be_read_is_not_written(tmp_path):
    calibrator = tcil.TemperatureScaling()
    result = tcil.fit_temperature([[2.0, 0.0], [0.0, 3.0], [1.0, 0.0]], [0, 1, 1])
    calibrator._fitted(calibrator._map(1e-320), (0, 1), result)
    with pytest.raises(ValueError, match="arrays that no TemperatureScaling has"):
        calibrator.save(tmp_path / "c.json")
    assert not list(tmp_path.iterdir())


def test_names_of_files(tmp_path):
    calibrator = tcil.TemperatureScaling().fit([[2.0, 0.0], [1.0, 0.0], [0.0, 1.0]], [0, 1, 1])
    with pytest.raises(
        ValueError, match=r"path: got .*\.json; expected a file name that ends in \.json\. For instance"
    ):
        calibrator.save(tmp_path / ".json")
    longest = tmp_path / ("a" * 250 + ".json")  # 255 bytes, as long as a name may be
    assert tcil.load(calibrator.save(longest)).temperature_ == calibrator.temperature_
    with pytest.raises(OSError, match=r"could not be written \(File name too long\)"):
        calibrator.save(tmp_path / ("a" * 251 + ".json"))
    assert [path.name for path in tmp_path.iterdir()] == [longest.name]


def test_arrays_that_a_copy_needs_are_kept(calibrators, tmp_path):
    path, want = saved(calibrators, "irm", tmp_path)
    copy = tmp_path / "after-task-3.json"
    copy.write_bytes(path.read_bytes())
    calibrators["ts"].save(path)
    assert torch.equal(tcil.load(copy).transform(LOGITS), want)
    path.write_bytes(copy.read_bytes())
    copy.unlink()
    calibrators["ts"].save(path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "changes",
    [
        {"model_hash": {"axis": 99}},
        {"model_hash": {"axis": -3}},
        {"model_hash": {"first": -5}},
        {"model_hash": {"width": 0}},
        {"array_file": {"file": "a" * 5000, "sha256": "0" * 64}},
        {"array_file": {"file": "\ud800", "sha256": "0" * 64}},
    ],
)
def test_numbers_and_names_that_cannot_be_are_damage(calibrators, changes, tmp_path):
    path, _ = saved(calibrators, "pact", tmp_path)
    record = json.loads(path.read_bytes())
    if "model_hash" in changes:
        first, *rest = record["model_hash"]["head"]
        changes = {"model_hash": {**record["model_hash"], "head": [{**first, **changes["model_hash"]}, *rest]}}
    with pytest.raises(ValueError, match=r"^path: got .*c\.json, which is damaged"):
        tcil.load(unsealed(path, **changes))


@pytest.mark.parametrize("change", [{"axis": 5}, {"width": 2**62, "apart": False}])
def test_a_head_of_another_shape_is_another_model(calibrators, change, tmp_path):
    path, _ = saved(calibrators, "pact", tmp_path)
    record = json.loads(path.read_bytes())
    heads = [{**head, **change} for head in record["model_hash"]["head"]]
    path = unsealed(path, model_hash={**record["model_hash"], "head": heads})
    with pytest.raises(tcil.WeightsMismatchError):
        tcil.load(path, model=nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)))


def test_the_version_in_a_file_cannot_steer_a_terminal(calibrators, tmp_path):
    path, _ = saved(calibrators, "ts", tmp_path)
    with pytest.raises(ValueError, match="written by tcil") as caught:
        tcil.load(unsealed(path, format_version=99, tcil_version="\x1b[2J"))
    assert "\x1b" not in str(caught.value)
