"""What users add without touching the package: by package.module:name, and by entry points."""

from __future__ import annotations

import sys
import textwrap

import pytest
from typer.testing import CliRunner

from tcil.experiments.calibration import entry_of
from tcil.experiments.cli import app
from tcil.incremental.datasets import load_dataset
from tcil.incremental.learners import make_learner
from tcil.incremental.networks import network_factory, small_cnn

OWN = """
    from tcil import TemperatureScaling
    from tcil.experiments.calibration import Entry
    from tcil.incremental.datasets import load_dataset
    from tcil.incremental.learners.er import ER
    from tcil.incremental.networks import small_cnn

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
        ("gone", "learner: got 'gone', announced as 'own_parts:nothing'"),
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
        (["--calibrators", "own_parts:wrong_fit", "--set", "tasks=2"], "whose fit returned int"),
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
    assert outcome.exit_code == 2, outcome.output
    assert message in " ".join(outcome.output.split())


def test_modules_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "beside_me.py").write_text(
        "from tcil.networks import small_cnn\n\ndef network(n):\n    return small_cnn(n)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert network_factory("beside_me:network")(3).fc.out_features == 3
