"""What `tcil run` says of decisions: against plain counting, and never backed by what fitted the calibrator."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from tcil.experiments.runs.calibrate import calibrate
from tcil.experiments.runs.decide import ALPHA, RISKS, WatchedTask, _backing_rows, decision_figures
from tcil.experiments.runs.entries import FinishedTask
from tcil.experiments.runs.records import parse
from tcil.experiments.runs.results import TaskResult


def finished(per_class=40, reserve=30, index=1):
    """Ten classes, the last four new, by a network that prefers those; with a reserve of every class."""
    generator = torch.Generator().manual_seed(3)

    def drawn(count, columns=range(10), more=0.0):
        labels = torch.tensor(list(columns)).repeat_interleave(count)
        logits = torch.randn(len(labels), 10, generator=generator)
        logits[torch.arange(len(labels)), labels] += 3.5 + more
        logits[:, 6:] += 0.7
        return 2 * logits, labels

    new = range(6, 10) if index else range(10)
    tasks = (range(6), new) if index else (new,)
    none = (torch.zeros(0, 10), torch.zeros(0, dtype=torch.long))
    held = drawn(reserve) if reserve else none
    return FinishedTask(index, new, tasks, *drawn(per_class), *drawn(20, new), *drawn(10, more=9.0), *held)


def softmax(logits):
    return torch.softmax(logits.double(), dim=1)


@pytest.fixture(scope="module")
def figures():
    return decision_figures(finished(), softmax, backed=True)


def test_achieved_is_what_counting_gives(figures):
    task = finished()
    probs = softmax(task.test_logits).numpy()
    wrong, said_new = probs.argmax(1) != task.test_columns.numpy(), probs.argmax(1) >= 6
    for found in figures.risks:
        if found.kind == "model_based" and found.threshold is not None:
            inside = said_new == (found.group == "new") if found.group != "all" else np.ones(len(wrong), bool)
            taken = inside & (probs.max(1) >= found.threshold)
            assert found.achieved == pytest.approx(wrong[taken].mean(), abs=1e-5)
            assert found.coverage == pytest.approx(taken[inside].mean(), abs=1e-5)
            assert (1 - probs.max(1))[taken].mean() <= found.promised + 1e-9
    order = np.argsort(-probs.max(1))
    assert figures.risk_by_coverage["all"][4] == pytest.approx(wrong[order[:200]].mean(), abs=1e-5)
    kinds = [found.kind for found in figures.risks]
    assert kinds.count("model_based") == 3 * len(RISKS)
    assert kinds.count("finite_sample") == len(RISKS)


def test_sets_claim_or_promise_coverage_by_true_group(figures):
    claimed = [found for found in figures.sets if found.kind == "model_based"]
    promised = [found for found in figures.sets if found.kind == "finite_sample"]
    assert [found.group for found in claimed] == [found.group for found in promised] == ["old", "new"]
    task = finished()
    probs = softmax(task.test_logits).numpy()
    row = probs[0]
    order = np.argsort(-row)
    needed = int(np.searchsorted(row[order].cumsum(), 1 - ALPHA)) + 1
    sizes = [int(np.searchsorted(np.sort(r)[::-1].cumsum(), 1 - ALPHA)) + 1 for r in probs]
    assert needed == sizes[0]
    old = task.test_columns.numpy() < 6
    assert claimed[0].size == pytest.approx(np.mean(np.array(sizes)[old]), abs=1e-3)
    assert all(found.achieved > 0.8 for found in promised)


def test_a_first_task_has_new_classes_only():
    figures = decision_figures(finished(index=0), softmax, backed=True)
    assert {found.group for found in figures.sets} == {"new"}
    assert [f.group for f in figures.risks if f.kind == "model_based"] == ["all", "new"] * len(RISKS)
    assert {f.group for f in figures.risks if f.kind == "finite_sample"} == {"all"}


def test_without_a_reserve_nothing_is_promised():
    figures = decision_figures(finished(reserve=0), softmax, backed=True)
    assert {found.kind for found in (*figures.risks, *figures.sets)} == {"model_based"}


def test_a_reserve_of_old_classes_alone_promises_nothing():
    task = finished()
    old = task.reserve_columns < 6
    alone = dataclasses.replace(
        task, reserve_logits=task.reserve_logits[old], reserve_columns=task.reserve_columns[old]
    )
    figures = decision_figures(alone, softmax, backed=True)
    assert {found.kind for found in (*figures.risks, *figures.sets)} == {"model_based"}


def test_what_fits_a_calibrator_does_not_back_its_promises():
    result = calibrate(finished(), ["vanilla", "ts", "reserve-ts"])
    kinds = {name: {f.kind for f in row.decisions.risks} for name, row in result.calibrators.items()}
    assert kinds["ts"] == kinds["vanilla"] == {"model_based", "finite_sample"}
    assert kinds["reserve-ts"] == {"model_based"}
    again = parse(TaskResult, json.loads(json.dumps(result.record())))
    assert again == result
    path = "risks/model_based/new/0.1/achieved"
    assert result.calibrators["ts"].metric(path) == again.calibrators["ts"].decisions.figure(path)
    older = result.calibrators["ts"].record()
    del older["decisions"]
    task = result.record()
    task["calibrators"]["ts"] = older
    assert parse(TaskResult, task).calibrators["ts"].metric(path) is None  # rows of before have no such figures


@pytest.mark.parametrize("part", ["reserve", "reserve_logits", "reserve_columns"])
def test_a_task_knows_whether_its_reserve_was_read(part):
    """Images or logits: PACT-R reads the images."""
    watched = WatchedTask.of(finished())
    assert watched.valid_logits is not None
    assert not watched.used_reserve
    getattr(watched, part)
    assert watched.used_reserve


def test_a_reserve_with_unequal_classes_is_cut_to_equal_ones():
    """Ten images of one class and thirty of another are no draw of balanced classes: as many of each are used."""
    task = finished()
    kept = torch.ones(len(task.reserve_columns), dtype=torch.bool)
    kept[(task.reserve_columns == 2).nonzero().squeeze(1)[10:]] = False
    cut = dataclasses.replace(
        task, reserve_logits=task.reserve_logits[kept], reserve_columns=task.reserve_columns[kept]
    )
    rows = _backing_rows(cut)
    counts = torch.bincount(cut.reserve_columns[rows], minlength=10)
    assert counts.tolist() == [10] * 6 + [30] * 4
    found = [f for f in decision_figures(cut, softmax, backed=True).risks if f.kind == "finite_sample"]
    assert len(found) == len(RISKS)


@pytest.mark.parametrize("missing", [0, 9])
def test_a_class_without_reserved_images_takes_the_promise_away(missing):
    task = finished()
    kept = task.reserve_columns != missing
    cut = dataclasses.replace(
        task, reserve_logits=task.reserve_logits[kept], reserve_columns=task.reserve_columns[kept]
    )
    figures = decision_figures(cut, softmax, backed=True)
    assert {found.kind for found in (*figures.risks, *figures.sets)} == {"model_based"}


def test_classes_that_came_back_are_new():
    task = dataclasses.replace(finished(), returned=(1,))
    new = task.is_new(torch.arange(len(task.seen))).nonzero().squeeze(1).tolist()
    assert new == sorted(task.current) == [1, *task.new_columns]
