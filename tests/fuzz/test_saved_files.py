"""Saved calibrators that were damaged or edited: refused by name, or as good as the one that was saved."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import tcil
from fuzz import oracles
from fuzz.cases import cases
from fuzz.files import BYTES, JSON, Mutation, content_of, fresh_copy, mutations
from fuzz.networks import NEW, Plain, draw_data
from fuzz.strategies import JUNK
from tcil.calibration import storage

ENTRY = "saved files"
NAMES = ("ts", "group", "ets", "irm", "t-cil", "pact", "many")
CLASSES = 4


@dataclass(frozen=True, repr=False)
class Saved:
    """A folder with a saved calibrator of every kind, and what each says of some logits."""

    folder: Path
    logits: np.ndarray
    wanted: dict[str, np.ndarray]

    def __repr__(self) -> str:
        return "Saved(...)"


def calibrators() -> dict[str, tcil.extending.Calibrator]:
    rng = np.random.default_rng(0)
    labels = np.arange(60) % CLASSES
    logits = rng.normal(size=(60, CLASSES)) + 2 * np.eye(CLASSES)[labels]
    wide, many = rng.normal(size=(60, 20)), np.arange(60) % 20
    model, data = Plain(0), draw_data(0)
    return {
        "ts": tcil.TemperatureScaling().fit(logits, labels),
        "group": tcil.GroupTemperatureScaling().fit(logits, labels, new_classes=NEW),
        "ets": tcil.EnsembleTemperatureScaling().fit(logits, labels),
        "irm": tcil.MulticlassIsotonic().fit(logits, labels),
        "t-cil": tcil.TCIL(tolerance=0.02).fit(model, data.memory, data.valid, NEW, columns=[0, 1, 2, 3]),
        "pact": tcil.PACT(tolerance=0.02).fit(model, data.memory, data.valid, NEW, imbalance=5),
        "many": tcil.GroupTemperatureScaling().fit(wide, many, new_classes=[19]),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Each in a folder of its own: irm and many have arrays beside their JSON."""
    folder = tmp_path_factory.mktemp("saved")
    logits = np.random.default_rng(1).normal(size=(9, 20))
    wanted = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = calibrators()
    for name, calibrator in made.items():
        (folder / name).mkdir()
        calibrator.save(folder / name / "c.json")
        wanted[name] = calibrator.predict_proba(logits[:, : len(calibrator.classes_)])
    return Saved(folder, logits, wanted)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged") / "here"


def loaded(path: Path) -> Any:
    return oracles.attempt(ENTRY, lambda: tcil.load(path), ("path",))


@cases(test=60, fuzz=1500)
@given(st.sampled_from(NAMES), mutations(["c.json", "arrays"]))
@example("ts", Mutation("c.json", "nudge", 0.95, sealed=False))  # another temperature
@example("ts", Mutation("c.json", "deep", 0.0))
@example("ts", Mutation("c.json", "digits", 0.0))
def test_damage(saved, place, name, mutation):
    """A file that is not as it was saved is refused, or gives the very same probabilities."""
    folder = fresh_copy(saved.folder / name, place)
    beside = [file for file in content_of(folder) if file.endswith(".safetensors")]
    mutation = replace(mutation, file=mutation.file if mutation.file == "c.json" else (beside or ["c.json"])[0])
    mutation.apply(folder)
    before = content_of(folder)
    calibrator = loaded(folder / "c.json")
    assert content_of(folder) == before
    if calibrator is not None:
        probs = calibrator.predict_proba(saved.logits[:, : len(calibrator.classes_)])
        assert np.array_equal(probs, saved.wanted[name]), f"changed silently by {mutation}"


EDITS = st.one_of(
    JUNK,
    st.sampled_from(
        [1e-320, 1e308, 5, -0.5, True, [2, 3], [0, 1, 2], [0, 1, 2, 2], list(range(20)), "5", "inf", "-inf"]
    ),
)


@cases(test=60, fuzz=1500)
@given(st.sampled_from(NAMES), st.floats(0, 1, exclude_max=True, width=32), st.sampled_from(JSON), EDITS)
def test_edits_that_are_sealed(saved, place, name, at, kind, value):
    """Whoever writes a file through `storage` can put anything in it: out of range is refused on load."""
    folder = fresh_copy(saved.folder / name, place)
    record, arrays = storage.read(folder / "c.json")
    kept = {key: record[key] for key in ("calibrator", "options", "classes", "head_width", "columns", "features",
                                         "model_hash", "result", "history")}  # fmt: skip
    numbers = {key: storage.encode(array.tolist()) for key, array in arrays.items()}
    text = folder / "edited.json"
    text.write_text(json.dumps({"record": kept, "arrays": numbers}))
    Mutation("edited.json", kind, at, value, sealed=False).apply(folder)
    edited = json.loads(text.read_text())
    text.unlink()
    try:
        tensors = {
            key: torch.tensor(_floats(value), dtype=arrays[key].dtype) if key in arrays else torch.tensor(value)
            for key, value in edited["arrays"].items()
        }
        storage.write(folder / "c.json", edited["record"], tensors)
    except Exception:  # it cannot even be written
        return
    calibrator = loaded(folder / "c.json")
    if calibrator is None:
        return
    width = len(calibrator.classes_)
    call = lambda: calibrator.predict_proba(saved.logits[:, :width])  # noqa: E731
    probs = oracles.attempt(ENTRY, call, ("path", "logits"))
    if probs is not None:
        oracles.probabilities(probs, len(saved.logits), width)
    if hasattr(calibrator, "temperature_"):
        oracles.sound_temperature(calibrator.temperature_)
    columns = calibrator._state.columns
    assert columns is None or len(columns) == width, (columns, calibrator.classes_)


def _floats(value: Any) -> Any:
    if isinstance(value, list):
        return [_floats(entry) for entry in value]
    return float(value) if isinstance(value, str) else value


@cases(test=15, fuzz=300)
@given(
    st.one_of(JUNK, st.text(max_size=20), st.sampled_from(["/", ".", "c.json", "no/such.json", "x" * 300 + ".json"]))
)
@example(None)
@example("\x00")
def test_paths(saved, place, path):
    """Whatever is given for a path."""
    folder = fresh_copy(saved.folder / "ts", place)
    calibrator = tcil.load(folder / "c.json")
    given_path = folder / path if isinstance(path, str) and "\x00" not in path and not path.startswith("/") else path
    oracles.attempt(ENTRY, lambda: tcil.load(given_path), ("path",))
    if isinstance(path, str) and not path.startswith(("/", "..")):
        before = content_of(folder.parent)
        try:
            done = oracles.attempt(ENTRY, lambda: calibrator.save(given_path), ("path",))
        except OSError:  # a name that the disk does not take
            done = None
        if done is None:
            assert content_of(folder.parent) == before


def test_bytes_and_edits_are_told_apart():
    """`test_damage` must see both."""
    assert not set(BYTES) & set(JSON)
