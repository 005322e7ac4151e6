"""Runs on a pre-trained backbone, without exemplars, in one pass, and with classes that come back."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from tcil.experiments.cli.app import app
from tcil.experiments.config.settings import build, stored_settings
from tcil.experiments.process.stopping import Stopped
from tcil.experiments.runs.reasons import NotApplicableReason
from tcil.experiments.runs.recalibrate import recalibrate
from tcil.experiments.runs.run import Run
from tcil.experiments.scheduling.cost import count_passes, passes_as_released, seconds_per_image
from tcil.experiments.scheduling.plan import Planned, plan
from tcil.extending import Backbone
from tcil.incremental.pretrained import backbones, features, networks

NAMES = ["vanilla", "ts", "t-cil", "pact", "statistics-ts"]
SHORT = {
    "preset": "digits", "dataset": "digits", "network": "pretrained:tiny,side=8", "classes": 5,
    "tasks": [3, 2], "epochs": 2, "lr": 0.05, "memory": 60, "validation": 30, "validation_pool": 30,
}  # fmt: skip


def tiny() -> Backbone:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        trunk = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        last = nn.Sequential(nn.Conv2d(8, 24, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return Backbone("tiny", trunk, last, (0.5,) * 3, (0.5,) * 3, multiple=1)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(backbones.BACKBONES, "tiny", tiny)
    monkeypatch.setattr(features, "ROWS", 300)
    for cache in (networks.loaded, networks._width):
        cache.cache_clear()
    yield
    for cache in (networks.loaded, networks._width):
        cache.cache_clear()


def run_of(tmp_path, **changes):
    settings = build({**SHORT, **changes})
    return Run(settings, tmp_path / settings.name)


@pytest.mark.training
@pytest.mark.parametrize(
    "changes",
    [
        {"learner": "er"},
        {"learner": "wa", "network": "pretrained:tiny,side=8,tune=last"},
        {"learner": "er", "network": "pretrained:tiny,side=8,head=cosine", "learner_options": {"head": "growing"}},
        {"learner": "ncm"},
        {"learner": "ranpac", "learner_options": {"projections": 40}},
    ],
    ids=lambda changes: "-".join(str(value) for value in changes.values()),
)
def test_every_learner_runs_and_is_calibrated(tmp_path, changes):
    run = run_of(tmp_path, **changes)
    result = run.execute(NAMES)
    assert (tmp_path / "features").is_dir()
    for task in result.tasks:
        assert {name for name, row in task.calibrators.items() if row.ece is not None} == set(NAMES)
    assert result.tasks[0].calibrators["vanilla"].accuracy > 0.5  # of three classes
    resumed = Run(run.settings, run.store.path).execute(NAMES)
    assert resumed == result
    finished = recalibrate(run.store.path, data=None, calibrators=["statistics-ts"], redraw=0)
    assert finished.run.tasks[-1].calibrators["statistics-ts"] == result.tasks[-1].calibrators["statistics-ts"]


@pytest.mark.training
def test_without_exemplars_the_rows_that_need_them_say_so(tmp_path):
    result = run_of(tmp_path, learner="ncm", memory=0).execute([*NAMES, "exemplar-ts", "first-task-ts"])
    rows = result.tasks[-1].calibrators
    for name in ("t-cil", "pact", "exemplar-ts"):
        assert rows[name].not_applicable.reason is NotApplicableReason.NEEDS_MEMORY
    assert rows["statistics-ts"].ece is not None
    with_memory = run_of(tmp_path, learner="ncm").execute(NAMES)
    assert with_memory.tasks[-1].calibrators["vanilla"] == rows["vanilla"]  # exemplars are for calibration alone


def test_who_needs_a_memory_says_so(tmp_path):
    with pytest.raises(ValueError, match=r"memory: got 0; expected .*er needs exemplars"):
        run_of(tmp_path, learner="er", memory=0)
    with pytest.raises(ValueError, match="a reserve needs exemplars"):
        run_of(tmp_path, learner="ncm", memory=0, reserve=0.5)


def test_features_that_are_stopped_go_on(tmp_path):
    settings = build({**SHORT, "learner": "ncm"})
    asked = []

    def stop():
        asked.append(None)
        return len(asked) == 3

    with pytest.raises(Stopped, match="stopped at 2 of 6 files of features"):
        Run(settings, tmp_path / settings.name, stop=stop)
    told = []
    Run(settings, tmp_path / settings.name, on_features=lambda done, files: told.append(done))
    assert told == list(range(7))
    assert len(list((tmp_path / "features").rglob("*.safetensors"))) == 6


@pytest.mark.training
def test_one_pass_presents_exemplars_as_often_as_new_images(tmp_path):
    run = run_of(tmp_path, learner="er", learner_options={"online": True})
    result = run.execute(["vanilla", "pact"])
    for task, memory, learner in run.walk():
        finished = run.finished(task, memory, learner, {})
        if task.index == 0:
            assert finished.imbalance is None
        else:  # as many old images as new ones, of more or fewer classes
            assert finished.imbalance == pytest.approx(task.columns.start / len(task.columns))
    assert len(result.tasks) == 2


@pytest.mark.training
@pytest.mark.parametrize("learner", ["er", "ncm"])
def test_classes_that_come_back_are_new_again(tmp_path, learner):
    run = run_of(tmp_path, learner=learner, returning=1, classes=6, tasks=[3, 2, 1])
    result = run.execute([*NAMES, "optimal-group-ts"])
    for task, memory, model in run.walk():
        finished = run.finished(task, memory, model, {})
        assert finished.current == [*task.columns, *task.returned]
        assert set(finished.valid_columns.tolist()) == set(finished.current)
        if task.index:
            assert len(task.returned) == 1
            presented = torch.bincount(run.stream.columns[task.train], minlength=task.columns.stop).double()
            if learner == "er":
                presented[: task.columns.start] += memory.rehearsed / task.columns.start
            else:
                before = [run.stream.columns[run.stream[i].train] for i in range(task.index)]
                presented += torch.bincount(torch.cat(before), minlength=task.columns.stop)
            old = [column for column in range(task.columns.stop) if column not in finished.current]
            expected = presented[finished.current].mean() / presented[old].mean()
            assert finished.imbalance == pytest.approx(float(expected))
    assert all(row.ece is not None for row in result.tasks[-1].calibrators.values())


def test_runs_without_returning_classes_keep_their_key():
    assert "returning" not in build(SHORT).model_dump()
    assert build(SHORT).key != build({**SHORT, "returning": 1}).key


def test_a_folder_may_name_a_backbone_but_no_code(tmp_path):
    record = json.loads(json.dumps(build(SHORT).model_dump(mode="json")))
    file = tmp_path / "settings.json"
    assert stored_settings(record, file, trust=False, tell=print).network == SHORT["network"]
    for code in ("pretrained:evil:make", "pretrained:evil:make,side=8"):
        with pytest.raises(ValueError, match=r"trust: got .*network pretrained:evil:make"):
            stored_settings({**record, "network": code}, file, trust=False, tell=print)


def test_what_it_costs_is_known_before():
    settings = build({**SHORT, "learner": "ncm"})
    assert seconds_per_image(settings.network, 32, (1, 8, 8)) > 0
    assert passes_as_released(settings).total < passes_as_released(build(SHORT)).total


def test_the_command_takes_a_network(tmp_path):
    words = ["run", "--preset", "digits", "--network", "pretrained:nothing", "--out", str(tmp_path), "--dry-run"]
    outcome = CliRunner().invoke(app, words)
    assert outcome.exit_code != 0
    assert "nothing" in outcome.output


def test_a_plan_computes_no_features(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = build(SHORT)
    (row,) = plan([Planned(settings)], None).rows
    run = run_of(tmp_path / "runs")
    passes = count_passes(
        settings, [len(task.columns) for task in run.stream], [len(task.train) for task in run.stream]
    )
    assert f"{passes.total:,.0f}" in [cell.words for cell in row.cells]
    assert not (tmp_path / "features").exists()  # beside a run folder in the current folder
