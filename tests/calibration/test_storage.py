"""Calibrators on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from every_calibrator import NAMES

import tcil
from tcil.calibration import storage
from tcil.foundation.checksums import open_json, seal_json


@pytest.fixture
def two_files(monkeypatch):
    """Arrays of a few numbers are already large, and go to a file of their own."""
    monkeypatch.setattr(storage, "_INLINE_ELEMENTS", 16)


@pytest.mark.parametrize("name", NAMES)
def test_save_and_load(fitted, name, tmp_path):
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


def test_load_finds_the_class_by_itself(fitted, tmp_path):
    path = fitted[1]["EnsembleTemperatureScaling"].save(tmp_path / "c.json")
    assert isinstance(tcil.load(path), tcil.EnsembleTemperatureScaling)


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

    def test_damaged_arrays(self, fitted, tmp_path, two_files):
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

    def test_arrays_are_in_the_same_file(self, fitted, tmp_path):
        """So that one file is replaced in one step, copied, and linked."""
        (tmp_path / "v1").mkdir()
        isotonic = fitted[1]["MulticlassIsotonic"]
        isotonic.save(tmp_path / "v1" / "c.json")
        assert [path.name for path in (tmp_path / "v1").iterdir()] == ["c.json"]
        loaded = tcil.load(tmp_path / "v1" / "c.json")
        logits = torch.randn(9, len(isotonic.classes_))
        assert torch.equal(loaded.predict_proba(logits), isotonic.predict_proba(logits))

    def test_a_link_to_another_folder_finds_the_arrays_there(self, fitted, tmp_path, two_files):
        (tmp_path / "v1").mkdir()
        fitted[1]["MulticlassIsotonic"].save(tmp_path / "v1" / "c.json")
        (tmp_path / "current.json").symlink_to("v1/c.json")
        assert tcil.load(tmp_path / "current.json").classes_ == fitted[1]["MulticlassIsotonic"].classes_

    def test_files_that_are_replaced_while_they_are_read_are_read_again(self, fitted, tmp_path, two_files, monkeypatch):
        path, labels = tmp_path / "c.json", torch.arange(600) % 6
        later = tcil.MulticlassIsotonic().fit(torch.randn(600, 6) + 2 * torch.eye(6)[labels], labels)
        fitted[1]["MulticlassIsotonic"].save(path)
        read_arrays, missed = storage._read_arrays, list[str]()

        def replaced_first(beside, digest):
            if not missed:
                later.save(path)  # removes the arrays that the JSON file just read refers to
                missed.append(beside.name)
            return read_arrays(beside, digest)

        monkeypatch.setattr(storage, "_read_arrays", replaced_first)
        assert tcil.load(path).classes_ == later.classes_
        assert missed

    def test_arrays_that_vanish_while_they_are_opened_are_read_again(self, fitted, tmp_path, two_files, monkeypatch):
        path, labels = tmp_path / "c.json", torch.arange(600) % 6
        later = tcil.MulticlassIsotonic().fit(torch.randn(600, 6) + 2 * torch.eye(6)[labels], labels)
        fitted[1]["MulticlassIsotonic"].save(path)
        open_regular, vanished = storage.open_regular, list[str]()

        def replaced_first(file):
            if file.suffix == ".safetensors" and not vanished:
                vanished.append(file.name)
                monkeypatch.setattr(storage, "open_regular", open_regular)
                later.save(path)
            return open_regular(file)

        monkeypatch.setattr(storage, "open_regular", replaced_first)
        assert torch.equal(tcil.load(path).transform(5 * torch.eye(6)), later.transform(5 * torch.eye(6)))
        assert vanished

    def test_arrays_of_another_writer_are_kept(self, fitted, tmp_path, two_files, monkeypatch):
        """Between the two steps of a save another one may put back the arrays that this one is about to remove."""
        path, labels = tmp_path / "c.json", torch.arange(600) % 6
        later = tcil.MulticlassIsotonic().fit(torch.randn(600, 6) + 2 * torch.eye(6)[labels], labels)
        first = fitted[1]["MulticlassIsotonic"]
        first.save(path)
        needed = storage._needed

        def after_another(arrays):
            monkeypatch.setattr(storage, "_needed", needed)
            first.save(path)
            return needed(arrays)

        monkeypatch.setattr(storage, "_needed", after_another)
        later.save(path)
        assert tcil.load(path).classes_ == first.classes_

    def test_a_folder_is_not_a_file(self, tmp_path):
        with pytest.raises(ValueError, match="Is a directory"):
            tcil.load(tmp_path)

    def test_saving_again_leaves_no_old_arrays(self, fitted, tmp_path, two_files):
        path = fitted[1]["MulticlassIsotonic"].save(tmp_path / "c.json")
        labels = torch.arange(600) % 6
        logits = torch.randn(600, 6) + 2 * torch.eye(6)[labels]
        tcil.MulticlassIsotonic().fit(logits, labels).save(path)
        assert len(list(tmp_path.glob("*.safetensors"))) == 1
        fitted[1]["TCIL"].save(path)
        assert list(tmp_path.iterdir()) == [path]

    def test_array_file_cannot_point_elsewhere(self, fitted, tmp_path, two_files):
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
