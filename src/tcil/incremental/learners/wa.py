"""WA, weight alignment (Zhao et al. 2020): distillation, then new weight rows scaled to the norm of the old ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from tcil.incremental.learners.base import (
    FORWARD,
    Learner,
    LearnerOptions,
    Schedule,
    Stage,
    TaskData,
    TaskSize,
    distilling_loss,
    frozen_teacher,
    plain_head_of,
)


@dataclass(frozen=True)
class WAOptions(LearnerOptions):
    """WA's options.

    `restrict_head` is the original method's weight restriction: after every step the weights of the head are clamped
    at 0 from below, and the head has no bias. Presets turn it on. It is off by default because runs whose settings lack
    the option were trained without it.
    """

    distillation_temperature: float = 2.0
    restrict_head: bool = False

    def __post_init__(self) -> None:
        self._check_positive("distillation_temperature")


class WA(Learner):
    """(1 - l) CE + l H(teacher, student) over all old logits in one softmax, l = old / (old + new); then alignment."""

    meaning = "weight alignment: distillation, then new weight rows scaled to the norm of the old"
    options_type = WAOptions
    options: WAOptions

    @classmethod
    def passes(cls, size: TaskSize, options: LearnerOptions) -> dict[str, float]:
        """What a task costs, by stage: after the first, a teacher sees every image too, without crops only twice."""
        taught = size.frozen_passes(size.epochs) if size.index else 0
        return {"train": (size.epochs + FORWARD * taught) * size.images}

    def begin_task(self, task: TaskData) -> None:
        """Prepare for new classes; a restricted head keeps a zero bias, so that checkpoints have the same format."""
        super().begin_task(task)
        bias = _head(self.model).bias
        if self.options.restrict_head and bias is not None:
            nn.init.zeros_(bias.requires_grad_(False))

    def stage(self, name: str, task: TaskData, schedule: Schedule, generator: torch.Generator) -> Stage:
        """Build a stage; called when the previous one is done. `schedule` is the run's main schedule."""
        loss = distilling_loss(self, task, self.options.distillation_temperature)
        beside = frozen_teacher(self.teacher)
        if not self.options.restrict_head:
            return Stage(name, task.all_rows, schedule, loss, list(self.model.parameters()), beside=beside)
        bias = _head(self.model).bias
        trained = [parameter for parameter in self.model.parameters() if parameter is not bias]
        return Stage(name, task.all_rows, schedule, loss, trained, after_step=self._restrict, beside=beside)

    def _restrict(self) -> None:
        _head(self.model).weight.clamp_(min=0)

    def end_task(self, task: TaskData) -> None:
        """Called after the last stage: align the weights."""
        super().end_task(task)
        if task.old:
            align_weights(self.model, task.old, task.seen)


@torch.no_grad()
def align_weights(model: nn.Module, old: int, seen: int) -> float:
    """Scale the new classes' weight rows by (mean norm of old rows) / (mean norm of new rows); return that ratio.

    If the rows of either kind are all 0, as a restriction may leave them, there is no such ratio: it raises.
    """
    head = _head(model)
    norms = head.weight[:seen].norm(dim=1)
    empty = [name for name, rows in (("old", norms[:old]), ("new", norms[old:])) if not rows.any()]
    if empty:
        from tcil.incremental.training import TrainingDiverged  # which imports the learners

        rows = f"the head's rows of {' and '.join(empty)} classes"
        raise TrainingDiverged(
            f"alignment of WA: {rows} are all 0; lower lr or weight_decay, or turn restrict_head off"
        )
    gamma = norms[:old].mean() / norms[old:seen].mean()
    head.weight[old:seen] *= gamma
    return float(gamma)


def _head(model: nn.Module) -> nn.Linear:
    return plain_head_of(model, "whose rows WA aligns")
