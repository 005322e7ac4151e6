"""What the paper's figures need of a run's networks: right by its definition, computed once, and resumable."""

from __future__ import annotations

import signal

import pytest
import torch

from tcil.calibration.perturbation import DirectionPolicy
from tcil.calibration.temperature import solve_temperature
from tcil.experiments import stopping
from tcil.experiments.analysis import Exemplars, Perturbed, analyse, epsilon_gap
from tcil.experiments.run import Run
from tcil.experiments.settings import build
from tcil.incremental.datasets import load_dataset

TASKS = 3


@pytest.fixture(scope="module")
def make_run(tmp_path_factory):
    """The same trained run, as often as it is opened."""
    settings = build(
        {"dataset": "digits", "learner": "er", "tasks": TASKS, "epochs": 4, "milestones": [3], "memory": 60}
    )
    folder, digits = tmp_path_factory.mktemp("run"), load_dataset("digits")
    Run(settings, folder, dataset=digits).execute(["vanilla", "t-cil"], lambda _: None)
    return lambda: Run(settings, folder, dataset=digits)


@pytest.fixture
def run(make_run):
    yield make_run()
    for file in make_run().store.path.rglob("analysis.json"):
        file.unlink()


@pytest.fixture(scope="module")
def last(make_run):
    run = make_run()
    for task, memory, learner in run.walk():
        finished = run.finished(task, memory, learner, {})
    return finished


def untimed(record):
    return {key: value for key, value in record.items() if key != "cost"}


def test_stopped_and_started_again_it_goes_on_with_that_task(run, make_run):
    told = []
    whole = analyse(run, told.append)
    steps = 1 + len(DirectionPolicy)
    assert [(p.task, p.done, p.total) for p in told] == [
        (task, done, steps) for task in range(TASKS) for done in range(steps + 1)
    ]
    (run.store.path / "analysis.json").unlink()

    def stop_in_the_second(progress):
        if (progress.task, progress.done) == (1, 2):
            stopping.request(signal.SIGTERM)

    with stopping.on_signals(), pytest.raises(stopping.Stopped):
        analyse(make_run(), stop_in_the_second)
    assert [p.parent.name for p in run.store.path.rglob("analysis.json")] == ["task-00"]
    told.clear()
    assert untimed(analyse(make_run(), told.append)) == untimed(whole)
    assert [(p.task, p.done) for p in told if p.task == 0] == [(0, steps)]
    assert [p.parent for p in run.store.path.rglob("analysis.json")] == [run.store.path]
    told.clear()
    assert untimed(analyse(make_run(), told.append)) == untimed(whole)
    assert told == []


@pytest.mark.parametrize("policy", DirectionPolicy)
def test_logits_kept_of_all_exemplars_are_those_of_the_new_ones(last, policy):
    exemplars = Exemplars(last)
    assert 0 < int(exemplars.is_new.sum()) < len(exemplars.is_new)
    fresh, used = Perturbed(exemplars, policy), Perturbed(exemplars, policy)
    pushed = exemplars.images + 0.25 * fresh.steps
    direct = last.model(pushed)[:, : exemplars.seen].detach()
    torch.testing.assert_close(used.logits(0.25), direct)
    passes = []
    handle = last.model.register_forward_hook(lambda *_: passes.append(1))
    torch.testing.assert_close(used.logits(0.25, new_only=True), direct[exemplars.is_new])
    used.logits(0.0), used.logits(0.25)
    assert passes == []
    torch.testing.assert_close(fresh.logits(0.25, new_only=True), direct[exemplars.is_new])
    assert len(passes) == 1
    handle.remove()


def test_the_matching_magnitude_gives_the_test_sets_temperature(last):
    """Within the bracket's tolerance: the target lies between the temperatures just below and above the magnitude."""
    pushed = Perturbed(Exemplars(last), DirectionPolicy.PAPER)
    new_test = last.test_columns >= last.new_columns.start
    found = epsilon_gap(last, pushed, new_test)
    assert found["gap"] == abs(found["all"] - found["new"])
    for magnitude, new_only, rows in ((found["all"], False, slice(None)), (found["new"], True, new_test)):
        target = solve_temperature(last.test_logits[rows], last.test_columns[rows]).limit
        below, above = (pushed.temperature(magnitude + side * 5e-4, new_only=new_only).limit for side in (-1, 1))
        assert below < target <= above
