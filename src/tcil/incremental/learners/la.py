"""LA, replay with logit adjustment (Menon et al. 2021): cross-entropy adjusted by the class frequencies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tcil.incremental.learners.base import Learner, LearnerOptions, Schedule, Stage, TaskData


@dataclass(frozen=True)
class LAOptions(LearnerOptions):
    """LA's options: `strength` is the paper's tau, 1 for the balanced error."""

    strength: float = 1.0

    def __post_init__(self) -> None:
        self._check_least(strength=0)


class LA(Learner):
    """CE(z + tau log(share of each class in the training set), y); inference uses z, which is then balanced."""

    meaning = "logit adjustment: replay with a loss adjusted by the class frequencies"
    options_type = LAOptions
    options: LAOptions

    def stage(self, name: str, task: TaskData, schedule: Schedule, generator: torch.Generator) -> Stage:
        """Build a stage; called when the previous one is done. `schedule` is the run's main schedule."""
        rows = task.all_rows
        shares = class_shares(task.column_of_row[rows], task.seen)
        offset = (self.options.strength * shares.log()).to(self.device)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.logits(x, task.seen) + offset, y)

        return Stage(name, rows, schedule, loss, list(self.model.parameters()))


def class_shares(columns: Tensor, seen: int) -> Tensor:
    """The share of each class among the training rows."""
    counts = torch.bincount(columns, minlength=seen).float()
    return counts / counts.sum()
