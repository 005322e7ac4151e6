"""Study files: whatever stands in them, a plan or one paragraph that says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from fuzz import oracles
from fuzz.cases import cases
from fuzz.commands import run, workshop
from fuzz.strategies import JUNK
from tcil.experiments.config.presets import PRESETS
from tcil.experiments.config.settings import RunSettings

ENTRY = "study files"
KEYS = [
    *RunSettings.model_fields,
    "preset",
    "seeds",
    "learners",
    "datasets",
    "epoch",
    "learner_options.head",
    "",
    "a.b",
]
GOOD: dict[str, list[Any]] = {
    "preset": [*PRESETS],
    "dataset": ["digits", "noisy-digits", "cifar100"],
    "learner": ["er", "der", "eeil", "wa"],
    "seeds": [[1, 2], [3]],
    "learners": [["er", "wa"]],
    "datasets": [["digits", "noisy-digits"]],
    "tasks": [2, 5, 20, [5, 5], [2, 8]],
    "classes": [4, 10],
    "epochs": [1, 30],
    "milestones": [[], [1], [15, 22]],
    "validation": [0, 20],
    "learner_options": [{}, {"head": "growing"}],
}
ODD_VALUES = st.one_of(JUNK, st.integers(-5, 50), st.floats(), st.text(max_size=8), st.lists(JUNK, max_size=3))


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with workshop(tmp_path_factory.mktemp("studies") / "room") as folder:
        yield folder


def toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {toml(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float):
        return repr(value).replace("e+", "e")
    return "''" if value is None else json.dumps(value)


@st.composite
def studies(draw: st.DrawFn) -> str:
    """Known and unknown settings, with values in order and out of it."""
    lines = {}
    orderly = draw(st.booleans())
    for key in draw(st.lists(st.sampled_from([*GOOD] if orderly else KEYS), max_size=4, unique=True)):
        known = st.sampled_from(GOOD[key]) if key in GOOD else ODD_VALUES
        lines[key] = toml(draw(known if orderly else st.one_of(known, ODD_VALUES)))
    return "\n".join(f"{json.dumps(key)} = {value}" for key, value in lines.items())


COMMANDS = [["plan"], ["run", "--dry-run"], ["plan", "--set", "epochs=2"], ["plan", "--learner", "wa"],
            ["plan", "--seeds", "1,2"], ["plan", "--preset", "digits"]]  # fmt: skip


@cases(test=60, fuzz=2000)
@given(studies(), st.sampled_from(COMMANDS))
@example("learner_options = 5", ["plan"])
@example("preset = []", ["plan"])
@example("seed = 18446744073709551616", ["plan"])
@example("classes = 1180591620717411303424", ["run", "--dry-run"])
@example("learner = 'x'", ["plan"])
def test_settings(room, text, command):
    study = room / "study.toml"
    study.write_text(text, encoding="utf-8", errors="surrogatepass")
    before = sorted(room.iterdir())
    oracles.command(ENTRY, run([command[0], str(study), *command[1:]]))
    assert sorted(room.iterdir()) == before, "a plan writes nothing"


@cases(test=20, fuzz=1000)
@given(st.one_of(st.binary(max_size=40), st.text(max_size=40).map(lambda text: text.encode("utf-8", "replace"))))
@example(b"\xff")
@example(b"a = " + b"[" * 3000)
@example(b"x = 1" + b"0" * 5000)
def test_any_bytes(room, content):
    study = room / "study.toml"
    study.write_bytes(content)
    oracles.command(ENTRY, run(["plan", str(study)]))


@cases(test=4, fuzz=100)
@given(st.sampled_from(["", ".", "missing.toml", "/", "a\x00b", "[/b].toml", "/dev/null", "x" * 300]))
def test_places(room, path):
    assume("\x00" not in path)  # no command line can hold it
    oracles.command(ENTRY, run(["plan", path]))
