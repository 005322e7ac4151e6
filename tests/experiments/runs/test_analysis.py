"""What the paper's figures need of a run's networks: right by its definition, computed once, and resumable."""

from __future__ import annotations

import math
import signal
from functools import partial

import pytest
import torch

from tcil.calibration.perturbation import DirectionPolicy
from tcil.calibration.perturbed_exemplars import PerturbedExemplars
from tcil.calibration.temperature import solve_temperature
from tcil.experiments.config.settings import build
from tcil.experiments.process import stopping
from tcil.experiments.runs.analysed import OldAndNew
from tcil.experiments.runs.analysis import (
    FITS,
    FORMAT,
    STEPS,
    analyse,
    analyse_task,
    epsilon_gap,
    exemplars_of,
    matching,
    projection,
    temperature,
)
from tcil.experiments.runs.run import Run
from tcil.incremental.data.datasets import load_dataset

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


@pytest.fixture
def exemplars(last):
    with exemplars_of(last) as found:
        yield found


def untimed(analysis):
    return analysis.tasks, analysis.projection


def test_stopped_and_started_again_it_goes_on_with_that_task(run, make_run):
    told = []
    whole = analyse(run, told.append)
    last = STEPS + FITS  # the last task's, which ends with the fits whose time is taken
    assert [(p.task, p.done, p.total) for p in told] == [
        (task, done, total) for task, total in ((0, STEPS), (1, STEPS), (2, last)) for done in range(total + 1)
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
    assert [(p.task, p.done) for p in told if p.task == 0] == [(0, STEPS)]
    assert [p.parent for p in run.store.path.rglob("analysis.json")] == [run.store.path]
    told.clear()
    assert untimed(analyse(make_run(), told.append)) == untimed(whole)
    assert told == []


@pytest.mark.parametrize(
    "change",
    [
        lambda whole: {"format": FORMAT - 1},
        lambda whole: {"tasks": tuple(part.model_copy(update={"magnitude": 0.5}) for part in whole.tasks)},
    ],
)
def test_of_other_results_or_an_older_version_it_is_made_anew(run, make_run, change):
    whole, kept = analyse(run, lambda _: None), OldAndNew(old=None, new=0.125)
    run.store.write_analysis(whole.model_copy(update=change(whole)))
    for task, changes in ((0, {"accuracy": kept}), (1, {"magnitude": 0.5})):
        run.store.write_analysed_task(whole.tasks[task].model_copy(update={"format": FORMAT, **changes}))
    again = analyse(make_run(), lambda _: None)
    assert again.tasks[0].accuracy == kept  # a part that fits is used
    assert again.tasks[1:] == whole.tasks[1:]
    assert not any(part.has("format") for part in again.tasks)


def test_what_it_says_of_a_task(last, exemplars):
    magnitude = 0.2
    said = analyse_task(last, magnitude)
    is_new = last.test_columns >= last.new_columns.start
    right = last.test_logits.argmax(1) == last.test_columns
    assert said.accuracy.record() == pytest.approx(
        {"old": float(right[~is_new].double().mean()), "new": float(right[is_new].double().mean())}
    )
    images, columns = last.memory
    perturbed = PerturbedExemplars(exemplars)
    unit = (perturbed.inputs(1.0)[perturbed.rows.argsort()] - images).double()
    steps = unit.round().float()
    assert set(steps.unique().tolist()) <= {-1.0, 0.0, 1.0}
    assert float((unit - steps).abs().max()) < 1e-4
    logits = last.model(images + magnitude * steps)[:, : len(last.seen)].detach()
    wrong, is_new = logits.argmax(1) != columns, columns >= last.new_columns.start
    assert said.misprediction.record() == pytest.approx(
        {"old": float(wrong[~is_new].double().mean()), "new": float(wrong[is_new].double().mean())}
    )
    points, temperatures = said.curve.magnitudes, said.curve.temperatures
    assert (points[0], points[-1]) == pytest.approx((0.0, 4 * magnitude))
    there = last.model(images + points[10] * steps)[:, : len(last.seen)].detach()[is_new]
    assert temperatures[10] == pytest.approx(solve_temperature(there, columns[is_new]).limit, rel=1e-3)


def test_the_projection_is_on_the_axes_of_most_variance(last, exemplars):
    shown = projection(last, 0.1)
    features = PerturbedExemplars(exemplars).features(0.0).double()
    largest = torch.linalg.svdvals(features - features.mean(0))[:2]
    before = torch.tensor(shown.before, dtype=torch.float64)
    torch.testing.assert_close(before.norm(dim=0), largest, rtol=1e-3, atol=1e-3)
    assert shown.new_from == last.new_columns.start
    assert len(shown.after) == len(before) == len(shown.columns)
    assert shown == projection(last, 0.1)


@pytest.mark.parametrize("policy", DirectionPolicy)
def test_logits_kept_of_all_exemplars_are_those_of_the_new_ones(last, exemplars, policy):
    fresh, used = (PerturbedExemplars(exemplars, policy, keep=True) for _ in range(2))
    assert 0 < fresh.n_new < len(exemplars)
    direct = last.model(fresh.inputs(0.25))[:, : len(last.seen)].detach()
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)  # other batches and layouts round otherwise
    close(used.logits(0.25), direct)
    close(PerturbedExemplars(exemplars, policy).logits(0.25), direct)  # found anew, they are the same
    passes = []
    handle = last.model.register_forward_hook(lambda *_: passes.append(1))
    close(used.logits(0.25, new_only=True), direct[: used.n_new])
    used.logits(0.25)
    assert passes == []
    close(fresh.logits(0.25, new_only=True), direct[: fresh.n_new])
    assert len(passes) == 1
    handle.remove()


def test_the_matching_magnitude_gives_the_target(exemplars):
    """The target lies between the temperatures at both ends of the last bracket, which are tried again."""
    pushed = PerturbedExemplars(exemplars, keep=True)
    for new_only in (False, True):
        clean, *others = (temperature(pushed, k / 8, new_only=new_only).limit for k in range(9))
        targets = [t for t in others if clean < t < math.inf]  # there for the taking, whatever network this is
        assert targets
        for target in targets[:2]:
            magnitude = matching(pushed, target, new_only=new_only)
            if magnitude is None:  # the bisection went up to its end
                assert temperature(pushed, 1 - 1 / 1024, new_only=new_only).limit < target
                continue
            ends = (temperature(pushed, magnitude + side / 2048, new_only=new_only).limit for side in (-1, 1))
            below, above = ends
            assert below < target <= above


def test_the_gap_is_between_all_and_new(last, exemplars):
    pushed = PerturbedExemplars(exemplars, keep=True)
    found = epsilon_gap(last, pushed, last.test_columns >= last.new_columns.start)
    for name, new_only, rows in (
        ("all", False, slice(None)),
        ("new", True, last.test_columns >= last.new_columns.start),
    ):
        target = solve_temperature(last.test_logits[rows], last.test_columns[rows]).limit
        assert getattr(found, name) == matching(pushed, target, new_only=new_only)
    reached = None not in (found.all, found.new)
    assert found.gap == (abs(found.all - found.new) if reached else None)
