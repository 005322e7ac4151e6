"""WA, weight alignment (Zhao et al. 2020): distillation, then new weight rows scaled to the norm of the old ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tcil.incremental.learners.base import Learner, LearnerOptions, Schedule, Stage, TaskData, soft_cross_entropy


@dataclass(frozen=True)
class WAOptions(LearnerOptions):
    """WA's options."""

    distillation_temperature: float = 2.0


class WA(Learner):
    """(1 - l) CE + l H(teacher, student) over all old logits in one softmax, l = old / (old + new); then alignment."""

    meaning = "weight alignment: distillation, then new weight rows scaled to the norm of the old"
    options_type = WAOptions
    options: WAOptions

    def stage(self, name: str, task: TaskData, schedule: Schedule, generator: torch.Generator) -> Stage:
        """Build a stage when its turn comes; `schedule` is the run's main one."""
        share = task.old / task.seen
        teacher = self.teacher

        def loss(x: Tensor, y: Tensor) -> Tensor:
            logits = self.logits(x, task.seen)
            cross_entropy = nn.functional.cross_entropy(logits, y)
            if teacher is None:
                return cross_entropy
            with torch.no_grad():
                before = teacher(x)[:, : task.old]
            distilled = soft_cross_entropy(before, logits[:, : task.old], self.options.distillation_temperature)
            return (1 - share) * cross_entropy + share * distilled

        return Stage(name, task.all_rows, schedule, loss, list(self.model.parameters()))

    def end_task(self, task: TaskData) -> None:
        """After the last stage."""
        super().end_task(task)
        if task.old:
            align_weights(self.model, task.old, task.seen)


@torch.no_grad()
def align_weights(model: nn.Module, old: int, seen: int) -> float:
    """Scale the new classes' weight rows by mean norm of old rows / mean norm of new rows; returns that ratio."""
    head = model.fc
    assert isinstance(head, nn.Linear)
    norms = head.weight[:seen].norm(dim=1)
    gamma = norms[:old].mean() / norms[old:seen].mean()
    head.weight[old:seen] *= gamma
    return float(gamma)
