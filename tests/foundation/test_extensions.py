"""What users add without touching the package: by package.module:name, and by entry points."""

from __future__ import annotations

import importlib
import sys
import textwrap

import pytest
from typer.testing import CliRunner

from tcil.experiments.cli.app import app
from tcil.experiments.runs.entries import entry_of
from tcil.foundation.extensions import modules_in, resolve
from tcil.incremental.data.datasets import load_dataset
from tcil.incremental.learners import make_learner
from tcil.incremental.networks import network_factory, small_cnn

OWN = """
    from tcil import TemperatureScaling
    from tcil.extending import ER, Entry, load_dataset
    from tcil.networks import small_cnn

    class Mine(ER):
        meaning = "ER under another name"

    def dataset(folder):
        return load_dataset("digits")

    def network(n_classes):
        return small_cnn(n_classes)

    def calibrator():
        return Entry("Mine", "TS again", lambda t: TemperatureScaling().fit(t.valid_logits, t.valid_columns))

    not_a_learner = 3
"""
POINTS = """
    [tcil.learners]
    mine = own_parts:Mine
    wrong = own_parts:not_a_learner
    gone = own_parts:nothing

    [tcil.datasets]
    my-digits = own_parts:dataset

    [tcil.networks]
    my-network = own_parts:network

    [tcil.calibrators]
    my-ts = own_parts:calibrator
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package of a user's own."""
    (tmp_path / "own_parts.py").write_text(textwrap.dedent(OWN))
    info = tmp_path / "own_parts-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-parts\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(textwrap.dedent(POINTS))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("own_parts", None)


@pytest.mark.parametrize("style", ["entry point", "home"])
def test_every_kind(package, style):
    def name(announced, home):
        return announced if style == "entry point" else f"own_parts:{home}"

    assert type(make_learner(name("mine", "Mine"), small_cnn, 10, seed=1)).__name__ == "Mine"
    assert load_dataset(name("my-digits", "dataset")).name == "digits"
    assert network_factory(name("my-network", "network"))(4).fc.out_features == 4
    assert entry_of(name("my-ts", "calibrator")).title == "Mine"


@pytest.mark.training
def test_a_run_with_nothing_but_own_parts(package, tmp_path):
    command = ["run", "--dataset", "my-digits", "--learner", "mine", "--calibrators", "vanilla,my-ts", "--no-full-data"]
    for entry in ("network=my-network", "epochs=1", "tasks=2"):
        command += ["--set", entry]
    outcome = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "runs")])
    assert outcome.exit_code == 0, outcome.output
    assert "Mine" in outcome.output


def test_lists(package):
    outcome = CliRunner().invoke(app, ["learners"])
    assert "mine" in outcome.output
    assert "own_parts:Mine" in outcome.output
    assert "resnet32" in CliRunner().invoke(app, ["networks"]).output


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mime", "learner: got 'mime'.*Did you mean 'mine'"),
        ("wrong", "learner: got 'wrong'; expected a subclass"),
        ("gone", "learner: got 'gone', registered as 'own_parts:nothing'"),
        ("own_parts:nothing", "learner: got 'own_parts:nothing'"),
        (":nothing", "learner: got ':nothing'"),
    ],
)
def test_errors(package, name, message):
    with pytest.raises(ValueError, match=message):
        make_learner(name, small_cnn, 10, seed=1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dataset", "own_parts:Mine"], "dataset: got 'own_parts:Mine'"),
        (["--calibrators", "own_parts:fit"], "calibrator: got 'own_parts:fit'"),
        pytest.param(
            ["--calibrators", "own_parts:wrong_fit", "--set", "tasks=2"],
            "calibrator own_parts:wrong_fit: fit: got int; expected a fitted Calibrator",
            marks=pytest.mark.training,
        ),
        (["--learner", "own_parts:NoStage"], "learner: got 'own_parts:NoStage' without stage"),
    ],
)
def test_parts_of_the_wrong_kind(package, tmp_path, words, message):
    more = """
def fit(task):
    return None

wrong_fit = Entry("Wrong", "returns a number", lambda task: 3)

from tcil.incremental.learners import Learner

class NoStage(Learner):
    pass
"""
    source = tmp_path / "own_parts.py"
    source.write_text(source.read_text() + more)
    words = ["run", "--set", "epochs=1", "--no-full-data", "--out", str(tmp_path / "runs"), *words]
    outcome = CliRunner().invoke(app, words)
    assert outcome.exit_code == (1 if "wrong_fit" in message else 2), outcome.output  # it fails after the training
    assert message in " ".join(outcome.output.split())


def test_modules_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "beside_me.py").write_text(
        "from tcil.networks import small_cnn\n\ndef network(n):\n    return small_cnn(n)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert network_factory("beside_me:network")(3).fc.out_features == 3


class TestOwnFolder:
    """A folder that is named: neither the current one nor one of the path."""

    @pytest.fixture
    def folder(self, tmp_path):
        (tmp_path / "named_part.py").write_text("import named_neighbour\n\nvalue = named_neighbour.value\n")
        (tmp_path / "named_neighbour.py").write_text("value = 7\n")
        (tmp_path / "named_space" / "inner").mkdir(parents=True)  # a package without __init__.py
        (tmp_path / "named_space" / "inner" / "deep.py").write_text("value = 8\n")
        (tmp_path / "torch.py").write_text("raise SystemExit('not the real one')\n")
        yield tmp_path
        for name in [name for name in sys.modules if name.startswith("named_")]:
            del sys.modules[name]

    def test_a_module_with_its_neighbour(self, folder):
        path, finders = list(sys.path), list(sys.meta_path)
        with modules_in(folder):
            assert resolve("named_part:value", "dataset") == 7
            assert resolve("named_space.inner.deep:value", "dataset") == 8
            assert resolve("torch:nn", "dataset").__name__ == "torch.nn"
        assert (sys.path, sys.meta_path) == (path, finders)

    def test_nothing_is_found_there_otherwise(self, folder):
        with pytest.raises(ValueError, match="No module named 'named_part'"):
            resolve("named_part:value", "dataset")
        with modules_in(folder):
            resolve("named_part:value", "dataset")
            with pytest.raises(ModuleNotFoundError):
                importlib.import_module("named_space.inner.deep")

    def test_a_module_that_fails_leaves_nothing(self, folder):
        (folder / "named_bad.py").write_text("import named_neighbour, no_such_module\n")
        finders = list(sys.meta_path)
        with modules_in(folder), pytest.raises(ValueError, match="No module named 'no_such_module'"):
            resolve("named_bad:value", "dataset")
        assert sys.meta_path == finders
