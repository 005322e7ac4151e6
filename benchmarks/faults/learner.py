"""ER with a loss of NaN in the second task of seed 2, in a process that was poisoned."""

from __future__ import annotations

from dataclasses import replace

import torch

from tcil.incremental.learners.base import Schedule, Stage, TaskData
from tcil.incremental.learners.er import ER

_poisoned = False


def poison() -> None:
    """From here on, in this process."""
    global _poisoned
    _poisoned = True


class Faulty(ER):
    def stage(self, name: str, task: TaskData, schedule: Schedule, generator: torch.Generator) -> Stage:
        stage = super().stage(name, task, schedule, generator)
        if not (_poisoned and self.seed == 2 and task.index == 1):
            return stage
        return replace(stage, loss=lambda x, y: stage.loss(x, y) * float("nan"))
