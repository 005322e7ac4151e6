"""Commands in this process and in one of their own, and the results of a small run for them to read."""

from __future__ import annotations

import os
import subprocess
import sys

from typer.testing import CliRunner

from tcil.experiments.cli.app import app
from tcil.experiments.config.settings import build
from tcil.experiments.process.exits import ExitCode
from tcil.experiments.runs.entries import CALIBRATORS

QUICK = (
    "--dataset",
    "noisy-digits",
    "--no-full-data",
    "--calibrators",
    "vanilla",
    "--set",
    "epochs=1",
    "--set",
    "tasks=[2,2]",
    "--set",
    "memory=20",
)

BLOCKER = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""


def command(*words, code=ExitCode.REFUSED):
    """What a command says, as one line; it must end with this code, and not by an error that nobody caught."""
    outcome = CliRunner().invoke(app, [str(word) for word in words])
    assert isinstance(outcome.exception, SystemExit | None), outcome.exception
    assert outcome.exit_code == code, outcome.output
    return " ".join(outcome.output.split())


def process(*words, **options):
    """`python -m tcil` with these words, on one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **options}
    return subprocess.Popen(
        [sys.executable, "-m", "tcil", *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def row(title="Vanilla", **more):
    """A calibrator's figures after the first task, with two classes seen."""
    bins = {"count": [1] * 10, "confidence": [0.5] * 10, "accuracy": [None] * 10}
    figures = {"accuracy": 0.5, "ece": 0.1, "aece": 0.1, "noise_floor": 0.01, "gap": 0.1}
    return {
        "title": title, "block": "ranked", **figures, "ece_predicted_old": None, "ece_predicted_new": 0.1,
        "ece_interval": [0.0, 0.2], "bins": bins, "by_task": {"accuracy": [0.5], "ece": [0.1], "gap": [0.1]},
        "by_class": {"accuracy": [0.5, 0.5], "gap": [0.1, 0.1]}, **more,
    }  # fmt: skip


def results():
    """A small finished run as its file holds it."""
    fit = {"verdicts": ["ok"], "reachable": True, "magnitude": 0.1, "target_temperature": 2.0}
    fit["trace"] = [{"magnitude": 0.0, "temperature": 1.0}, {"magnitude": 0.1, "temperature": "inf"}]
    rows = {name: row(entry.title) for name, entry in CALIBRATORS.items()}
    rows["t-cil"] |= {"temperature": 2.0, "temperature_interval": [1.0, 3.0], "result": fit}
    rows["reserve-ts"] = {"title": "Reserve TS", "block": "oracle", "not_applicable": "needs --reserve"}
    memory = {"count": 4, "accuracy": 1.0, "accuracy_by_task": [1.0]}
    task = {"task": 0, "seen": 2, "memory": memory, "calibrators": rows, "history": {}}
    settings = {**build({}).model_dump(mode="json"), "tasks": [2]}
    environment = {"torch": "2", "threads": 1, "layout": "contiguous", "seconds": {"task-00": {"training": 1.0}}}
    return {"settings": settings, "tasks": [task], "environment": environment}
