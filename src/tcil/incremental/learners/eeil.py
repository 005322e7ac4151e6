"""EEIL, end-to-end incremental learning (Castro et al. 2018): distillation per old task, then balanced fine-tuning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tcil.foundation.options import Option
from tcil.incremental.learners.base import (
    FORWARD,
    FinetuningOptions,
    Learner,
    LearnerOptions,
    Schedule,
    Stage,
    TaskData,
    TaskSize,
    frozen_copy,
    frozen_teacher,
    soft_cross_entropy,
)


class Distillation(Option):
    """The form of EEIL's distillation term."""

    SOFTMAX = "softmax", "cross-entropy between softmaxes of each task's own logits, summed over tasks (the paper's)"
    BCE = "bce", "mean binary cross-entropy between sigmoids over those logits, as some ports have it: far weaker"


@dataclass(frozen=True)
class EEILOptions(FinetuningOptions):
    """EEIL's options; the fine-tuning defaults are those for 10 tasks."""

    distillation: Distillation | str = Distillation.SOFTMAX
    distillation_temperature: float = 2.0
    finetune_epochs: int = 30
    finetune_lr: float = 0.01
    finetune_milestones: tuple[int, ...] = (10, 20)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("distillation_temperature")


class EEIL(Learner):
    """CE + sum over old tasks of H(teacher, student) on that task's logits; then fine-tuning on balanced data."""

    meaning = "end-to-end incremental learning: distillation per task, then balanced fine-tuning"
    options_type = EEILOptions
    options: EEILOptions

    @classmethod
    def passes(cls, size: TaskSize, options: LearnerOptions) -> dict[str, float]:
        """What a task costs, by stage: after the first, a teacher sees every image too, in both stages.

        Without crops it sees each image twice in all, plain and mirrored; with crops, in every epoch.
        """
        if size.index == 0:
            return super().passes(size, options)
        assert isinstance(options, EEILOptions)
        train, tune = (n + FORWARD * size.frozen_passes(n) for n in (size.epochs, options.finetune_epochs))
        return {"train": train * size.images, "finetune": tune * size.balanced}

    def stages(self, task: TaskData) -> tuple[str, ...]:
        """The names of this task's stages."""
        return ("train",) if task.old == 0 else ("train", "finetune")

    def stage(self, name: str, task: TaskData, schedule: Schedule, generator: torch.Generator) -> Stage:
        """Build a stage; called when the previous one is done. `schedule` is the run's main schedule."""
        if name == "train":
            heads = task.task_columns[: task.index]
            rows, teacher = task.all_rows, self.teacher
        else:
            # The network after stage one is the teacher of all heads, including the new one.
            heads = task.task_columns[: task.index + 1]
            rows, teacher = task.balanced_rows(generator), frozen_copy(self.model)
            schedule = self.options.finetuning(schedule.weight_decay)
        loss = self._loss(task, heads, taught=teacher is not None)
        return Stage(name, rows, schedule, loss, list(self.model.parameters()), beside=frozen_teacher(teacher))

    def _loss(self, task: TaskData, heads: tuple[range, ...], *, taught: bool) -> Callable[..., Tensor]:
        form = Distillation.parse(self.options.distillation, "distillation")
        temperature = self.options.distillation_temperature

        def first_task(x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.logits(x, task.seen), y)

        def later_task(x: Tensor, before: Tensor, y: Tensor) -> Tensor:
            logits = self.logits(x, task.seen)
            total = nn.functional.cross_entropy(logits, y)
            for head in heads:
                old, new = (z[:, head.start : head.stop] for z in (before, logits))
                if form is Distillation.SOFTMAX:
                    total = total + soft_cross_entropy(old, new, temperature)
                else:
                    target = torch.sigmoid(old / temperature)
                    total = total + nn.functional.binary_cross_entropy_with_logits(new / temperature, target)
            return total

        return later_task if taught else first_task
