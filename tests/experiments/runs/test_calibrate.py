"""All calibrators on one finished task: rows of those that answer, reasons of those that do not."""

from __future__ import annotations

import torch

import tcil
from tcil.experiments.runs.calibrate import calibrate
from tcil.experiments.runs.entries import CALIBRATORS, Entry, FinishedTask
from tcil.experiments.runs.reasons import NotApplicableReason


def finished_task():
    logits, none = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(0, dtype=torch.long)
    rows = logits, torch.arange(40) % 4
    return FinishedTask(1, range(2, 4), (range(2), range(2, 4)), *rows, *rows, logits[:0], none, logits[:0], none)


def test_the_reason_is_the_calibrators_own(monkeypatch):
    """Whether it is the first, or comes after one that was fitted."""

    def unreachable(task):
        raise tcil.NotReachableError("there is no such temperature")

    monkeypatch.setitem(CALIBRATORS, "mine", Entry("Mine", "never answers", unreachable))
    for names in (["mine"], ["ts", "mine"]):
        answer = calibrate(finished_task(), names).calibrators["mine"].not_applicable
        assert (answer.reason, answer.words) == (NotApplicableReason.OTHER, "there is no such temperature")
