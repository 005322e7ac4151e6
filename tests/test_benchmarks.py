"""The benchmarks' own parts: goals, the ledger per commit, and the literal procedure they measure against."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console

import tcil
from benchmarks import ROOT, bench, expanding, frameworks, ledger, literal, precision, scaling_page, synthetic
from tcil.incremental.networks import small_resnet


def test_goals():
    assert ledger.Figure("a", "a", 12.5, at_least=12).met
    assert not ledger.Figure("a", "a", 1.4, at_most=1.3).met
    assert ledger.Figure("a", "a", 1.4).met is None
    assert ledger.Figure("a", "a", 1.4, at_most=1.3).goal == "<= 1.3"


def test_history_puts_commits_side_by_side(tmp_path):
    for number, (commit, value) in enumerate((("aaa", 12.1), ("bbb", 9.0))):
        figures = [{"key": "k", "what": "literal / ours", "value": value, "goal": ">= 12", "met": value >= 12}]
        figures += [{"key": "new", "what": "only later", "value": 1, "goal": "", "met": None}] * number
        record = {"commit": commit, "date": f"2026-01-0{number + 1}", "machine": {"load": 0.1}, "figures": figures}
        (tmp_path / f"{number}.json").write_text(json.dumps(record))
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(bench.history(5, tmp_path))
    text = console.export_text()
    assert text.index("aaa") < text.index("bbb")
    row = next(line for line in text.splitlines() if "literal" in line)
    assert "12.1" in row
    assert "9 !" in row  # the goal was missed: a regression is seen


def test_the_page_shows_the_last_table():
    last = json.loads(sorted(bench.KEPT.glob("*.json"))[-1].read_text())
    page = bench.PAGE.read_text()
    assert bench.with_table(page, last) == page
    assert f"Commit {last['commit']}" in page


def test_the_scaling_page_is_that_of_its_record():
    record = json.loads((ROOT / "docs/results/scaling.json").read_text())
    assert (ROOT / "docs/scaling.md").read_text() == scaling_page.page(record)


@pytest.fixture(scope="module")
def small():
    return synthetic.task(synthetic.make((8, 16), (1, 1), 20, stem_stride=2), 200, 4)


def test_the_synthetic_task_is_worth_calibrating(small):
    result = tcil.TCIL().fit(small.model, small.memory, small.valid, small.new_classes).result_
    assert result.reachable
    assert 0 < result.magnitude < 1


def test_the_straightforward_version_answers_as_the_library(small):
    ours = tcil.TCIL(search="bisection").fit(small.model, small.memory, small.valid, small.new_classes).result_
    theirs = literal.straightforward(small)
    assert theirs.magnitude == pytest.approx(ours.magnitude, abs=2e-3)
    assert theirs.temperature == pytest.approx(ours.temperature, rel=0.02)


def test_the_literal_version_fills_the_parameters_gradients(small):
    """And differs from the exact one by its SGD only."""
    images, labels = small.memory
    assert all(p.grad is None for p in small.model.parameters())
    targets = (labels + 1) % small.seen
    signs = literal.signs_with_backward(small.model, images[:9], targets[:9], small.seen)
    assert all(p.grad is not None for p in small.model.parameters())
    small.model.zero_grad()
    assert torch.equal(signs, literal.input_signs(small.model, images[:9], targets[:9], small.seen))
    answer = literal.literal(small)
    assert 0 <= answer.magnitude <= 1
    small.model.zero_grad()


def test_frameworks_that_are_not_there_are_told(monkeypatch, tmp_path):
    monkeypatch.setitem(frameworks.NETWORKS, "small ResNet", (small_resnet, 1))
    found = frameworks.measure({"tcil": frameworks.ours, "PyCIL": frameworks.pycil_at(tmp_path)}, 1, ["small ResNet"])
    one = found["small ResNet"]
    assert one["missing"] == {"PyCIL": "no checkout of PyCIL (--pycil DIR or TCIL_PYCIL)"}
    assert list(one["images_per_second"]) == ["tcil"]
    assert one["images_per_second"]["tcil"] > 0


def test_a_later_task_is_measured_with_kept_features_and_without():
    """Both train the same: a stage as it was before runs its frozen extractors in its loss."""
    seconds = expanding.measure(small_resnet, 1, 1, tasks=2)
    assert seconds["kept_seconds"] > 0
    assert seconds["anew_seconds"] > 0
    assert seconds["kept_over_first"] > 0


def test_precisions_are_measured_side_by_side(bf16):
    speeds = precision.measure(1, {"small": (small_resnet, 1)})["small"]
    assert speeds["bf16_over_fp32"] == pytest.approx(
        speeds["bf16_images_per_second"] / speeds["fp32_images_per_second"], rel=0.1, abs=0.01
    )
    assert all(value > 0 for value in speeds.values())


def test_stored_benchmarks_stand_in_the_page():
    page = bench.PAGE.read_text()
    precisions = json.loads((ROOT / "docs/results/precision.json").read_text())["networks"]
    for network, speeds in precisions.items():
        ratios = [f"{speeds[f'{kind}_over_fp32']:.2f}" for kind in ("bf16", "fp16")]
        assert f"| {network} | {speeds['fp32_images_per_second']:.0f} | {' | '.join(ratios)} |" in page
    for name, ratio in (("frameworks", "ours_over_theirs"), ("expanding", "kept_over_first")):
        networks = json.loads((ROOT / f"docs/results/{name}.json").read_text())["networks"]
        for network, figures in networks.items():
            values = figures[ratio].values() if isinstance(figures[ratio], dict) else [figures[ratio]]
            rows = [line for line in page.splitlines() if line.startswith(f"| {network} ")]
            assert all(any(f" {value:.2f} " in row for row in rows) for value in values), (name, network)


def test_what_was_measured_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))  # the folder may lie in a repository
    assert frameworks.versions(tmp_path)["PyCIL"] == "a folder without a commit"
    assert "PyCIL" not in frameworks.versions(None)
