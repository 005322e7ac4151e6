"""Finished runs as their folders hold them, without a training; and the command line that reads them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from typer.testing import CliRunner

from conftest import ROOT
from tcil.experiments.cli.app import app
from tcil.experiments.reporting.collect import read_runs
from tcil.experiments.runs.records import parse
from tcil.experiments.runs.results import RunResult, StoredSettings
from tcil.experiments.runs.store import StoredRun

DIGITS = ["--dataset", "noisy-digits", "--set", "epochs=3", "--set", "tasks=3"]


def command(*words):
    outcome = CliRunner().invoke(app, list(map(str, words)))
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


def stored(settings, errors, accuracy=0.5, until=None, memorised=None):
    """A finished run in which each calibrator has the same error after all tasks, or after the first `until`."""
    row = {"block": "ranked", "accuracy": accuracy, "noise_floor": 0.0, "result": {"verdict": "ok"}}
    metrics = ("ece", "aece", "ece_predicted_old", "ece_predicted_new")
    rows = {name: row | {"title": name} | dict.fromkeys(metrics, error) for name, error in errors.items()}
    about = StoredSettings.of(settings)
    tasks = [{"task": number, "seen": 2, "calibrators": rows} for number in range(until or about.n_tasks)]
    if memorised is not None:
        for task in tasks:
            by_task = [memorised] * (task["task"] + 1)
            task["memory"] = {"count": 20, "accuracy": memorised, "accuracy_by_task": by_task}
    more = {} if until is None else {"until": until}
    return StoredRun(Path("none"), parse(RunResult, {"settings": about.record(), "tasks": tasks, **more}))


def with_settings(run, settings):
    settings = parse(StoredSettings, settings)
    return dataclasses.replace(run, result=run.result.model_copy(update={"settings": settings}))


def with_rows(run, change):
    """The run with `change(rows)` in place of the rows of each task."""
    tasks = [task.model_copy(update={"calibrators": change(task.calibrators)}) for task in run.tasks]
    return dataclasses.replace(run, result=run.result.with_tasks(tasks))


def kept_run():
    """The first run that docs/results keeps with all calibrators of its tables."""
    files = sorted((ROOT / "docs/results/runs").glob("cifar100-er-*"))
    runs = (run for file in files for run in read_runs([file]))
    return next(run for run in runs if {"pact", "t-cil", "optimal-ts"} <= run.tasks[-1].calibrators.keys())


def full_run():
    """A kept run with all that a row of this version has: diagrams of groups, too (here all have the whole one's)."""
    run = kept_run()

    def filled(rows, task):
        return {
            name: row.model_copy(
                update={"bins_predicted_new": row.bins, "bins_predicted_old": row.bins if task else None}
                if row.bins is not None
                else {}
            )
            for name, row in rows.items()
        }

    tasks = [task.model_copy(update={"calibrators": filled(task.calibrators, task.task)}) for task in run.tasks]
    return dataclasses.replace(run, result=run.result.with_tasks(tasks))
