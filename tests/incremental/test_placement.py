"""Layout and threads of a run: chosen once by trying, noted, and kept."""

from __future__ import annotations

import json

import pytest
import torch

from tcil.experiments.config.settings import build
from tcil.experiments.runs.run import Run
from tcil.incremental import placement
from tcil.incremental.data.datasets import load_dataset
from tcil.incremental.data.images import Pixels
from tcil.incremental.data.layout import Layout
from tcil.incremental.networks import small_cnn
from tcil.incremental.placement import choose_placement


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.delenv("TCIL_LAYOUT", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    choose_placement.cache_clear()
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    choose_placement.cache_clear()


def timed_as(monkeypatch, seconds):
    """Let a training step take that long: by layout and threads."""

    def step(model, shape, layout, batch_size, arithmetic):
        tried.append((str(layout), torch.get_num_threads()))
        return seconds[tried[-1]]

    tried = []
    monkeypatch.setattr(placement, "step_seconds", step)
    return tried


EVEN = {(layout, n): 1.0 for layout in ("channels_last", "contiguous") for n in (1, 2)}


@pytest.mark.parametrize(
    ("seconds", "layout", "threads"),
    [
        ({}, "channels_last", 2),
        ({("contiguous", 2): 0.8}, "channels_last", 2),  # could be noise, and sums would differ
        ({("contiguous", 2): 0.4}, "contiguous", 2),
        ({("channels_last", 1): 0.95}, "channels_last", 2),
        ({("channels_last", 1): 0.6}, "channels_last", 1),
        ({("contiguous", 1): 0.2}, "contiguous", 1),
    ],
)
def test_another_way_must_be_clearly_faster(monkeypatch, seconds, layout, threads):
    torch.set_num_threads(2)
    tried = timed_as(monkeypatch, EVEN | seconds)
    chosen = choose_placement(small_cnn, (1, 8, 8), 32)
    assert (chosen.layout, chosen.threads) == (layout, threads)
    assert set(tried) == set(EVEN)
    assert torch.get_num_threads() == 2
    assert chosen.record()["images_per_second"]["channels_last, 2 threads"] > 0
    count = len(tried)
    assert choose_placement(small_cnn, (1, 8, 8), 32) is chosen  # one choice for all runs of a process
    assert len(tried) == count


def test_the_user_decides(monkeypatch):
    torch.set_num_threads(2)
    tried = timed_as(monkeypatch, EVEN)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("TCIL_LAYOUT", "contiguous")
    chosen = choose_placement(small_cnn, (1, 8, 8), 32)
    assert (chosen.layout, chosen.threads, chosen.images_per_second, tried) == (Layout.CONTIGUOUS, 2, (), [])
    choose_placement.cache_clear()
    monkeypatch.setenv("TCIL_LAYOUT", "sideways")
    with pytest.raises(ValueError, match="TCIL_LAYOUT"):
        choose_placement(small_cnn, (1, 8, 8), 32)


def test_really_measured():
    state = torch.get_rng_state()
    chosen = choose_placement(small_cnn, (1, 8, 8), 32)
    assert len(chosen.images_per_second) == (2 if torch.get_num_threads() == 1 else 4)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.training
def test_a_run_notes_its_choice_and_goes_on_with_it(monkeypatch, tmp_path):
    settings = build({"dataset": "digits", "tasks": 2, "epochs": 1, "milestones": [], "memory": 40})
    digits = load_dataset("digits")
    timed_as(monkeypatch, EVEN | {("contiguous", n): 0.1 for n in (1, 2)})
    run = Run(settings, tmp_path, dataset=digits)
    run.execute(["vanilla"])
    noted = json.loads((tmp_path / "environment.json").read_text())
    assert (noted["layout"], noted["threads"]) == ("contiguous", torch.get_num_threads())
    assert noted["images_per_second"]
    assert Pixels(run.dataset).plain(digits.train, torch.arange(3)).is_contiguous()
    assert next(learner for *_, learner in run.walk()).model.conv1.weight.is_contiguous()

    choose_placement.cache_clear()
    tried = timed_as(monkeypatch, EVEN)  # would choose the other layout now
    (tmp_path / "task-01" / "results.json").unlink()
    again = Run(settings, tmp_path, dataset=digits)
    again.execute(["vanilla"])
    assert tried == []
    assert again.dataset.layout is Layout.CONTIGUOUS
    assert json.loads((tmp_path / "environment.json").read_text())["layout"] == "contiguous"


def test_noted_before_anything_is_trained(monkeypatch, tmp_path):
    """Killed in the first epoch, a run still goes on with the layout it began with."""
    settings = build({"dataset": "digits", "tasks": 2, "epochs": 1, "milestones": [], "memory": 40})
    timed_as(monkeypatch, EVEN | {("contiguous", n): 0.1 for n in (1, 2)})
    run = Run(settings, tmp_path, dataset=load_dataset("digits"))
    with run.threads():
        pass
    assert json.loads((tmp_path / "environment.json").read_text())["layout"] == "contiguous"


def test_both_layouts_hold_the_same_pixels():
    digits = load_dataset("digits")
    from dataclasses import replace

    rows = torch.arange(5)
    pictures = [Pixels(replace(digits, layout=layout)) for layout in Layout]
    plain = [pixels.plain(digits.train, rows) for pixels in pictures]
    moved = [pixels.augmented(digits.train, rows, torch.Generator().manual_seed(0)) for pixels in pictures]
    for one, other in (plain, moved):
        assert torch.equal(one, other)
        assert one.is_contiguous(memory_format=torch.channels_last)
        assert other.is_contiguous()
