"""BiC, bias correction (Wu et al. 2019): distillation, then two numbers that correct the new classes' logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tcil.foundation.errors import invalid
from tcil.incremental.learners.base import (
    FORWARD,
    FinetuningOptions,
    Learner,
    LearnerOptions,
    Schedule,
    Stage,
    TaskData,
    TaskSize,
    biased_head_of,
    distilling_loss,
    frozen_copy,
    frozen_teacher,
)

_HELD = 900  # key of the random stream that selects the held-out rows


@dataclass(frozen=True)
class BiCOptions(FinetuningOptions):
    """BiC's options.

    `held_out` is the share of images, including exemplars, that are kept for stage two (10 % in the paper). The first
    task has no stage two and trains on all its images.
    """

    distillation_temperature: float = 2.0
    held_out: float = 0.1
    finetune_epochs: int = 60
    finetune_lr: float = 0.01
    finetune_milestones: tuple[int, ...] = (30, 45)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("distillation_temperature")
        if not 0 < self.held_out < 1:
            raise invalid("option held_out", repr(self.held_out), "a share between 0 and 1")


class BiC(Learner):
    """Stage one: (1 - l) CE + l H(teacher, student) over all old logits, l = old / (old + new), on nine tenths.

    Stage two, on a class-balanced part of the last tenth: new logits become alpha z + beta; nothing else is trained.
    Afterwards the two numbers are folded into the head, so that the network is a plain one and the teacher of the next
    task is corrected. Whether a row is held out depends only on the seed and the row: from the second task on, no
    held-out row is trained on. The first task trains on all its rows, also on exemplars that later tasks hold out.
    """

    meaning = "bias correction: distillation, then new logits corrected on a small held-out set"
    options_type = BiCOptions
    options: BiCOptions

    @classmethod
    def passes(cls, size: TaskSize, options: LearnerOptions) -> dict[str, float]:
        """What a task costs, by stage: a teacher sees what stage one trains on, stage two only runs the network."""
        if size.index == 0:
            return super().passes(size, options)
        assert isinstance(options, BiCOptions)
        trained = (1 - options.held_out) * size.images
        corrected = options.held_out * size.frozen_passes(options.finetune_epochs) * size.balanced
        taught = FORWARD * size.frozen_passes(size.epochs)
        return {"train": (size.epochs + taught) * trained, "finetune": FORWARD * corrected}

    def begin_task(self, task: TaskData) -> None:
        """Prepare for new classes, and add the correction's parameters."""
        super().begin_task(task)
        biased_head_of(self.model, "into which BiC folds its correction")  # refused before anything is trained
        if task.old:
            self.model.register_parameter("correction", nn.Parameter(torch.tensor([1.0, 0.0], device=self.device)))

    def stages(self, task: TaskData) -> tuple[str, ...]:
        """The names of this task's stages: no correction if no image of an old class is held out."""
        return ("train", "finetune") if task.old and len(self._balanced(task)) else ("train",)

    def stage(self, name: str, task: TaskData, schedule: Schedule, generator: torch.Generator) -> Stage:
        """Build a stage; called when the previous one is done. `schedule` is the run's main schedule."""
        if name == "finetune":
            return self._correct(name, task)
        rows = task.all_rows if task.old == 0 else task.all_rows[~self._held(task, task.all_rows)]
        correction = self.model.correction if task.old else None
        trained = [parameter for parameter in self.model.parameters() if parameter is not correction]

        loss = distilling_loss(self, task, self.options.distillation_temperature)
        return Stage(name, rows, schedule, loss, trained, beside=frozen_teacher(self.teacher))

    def _correct(self, name: str, task: TaskData) -> Stage:
        """Stage two: train alpha and beta on fixed logits."""
        fixed, schedule = frozen_copy(self.model), self.options.finetuning(weight_decay=0.0)
        correction = self.model.correction
        assert isinstance(correction, nn.Parameter)

        def embed(x: Tensor) -> Tensor:
            with torch.no_grad():
                logits: Tensor = fixed(x)
            return logits[:, : task.seen]

        def loss(logits: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(corrected(logits, correction, task.old), y)

        return Stage(name, self._balanced(task), schedule, loss, [correction], embed)

    def _held(self, task: TaskData, rows: Tensor) -> Tensor:
        """Which rows are held out; depends only on the seed and the row."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + _HELD)
        return torch.rand(len(task.column_of_row), generator=generator)[rows] < self.options.held_out

    def _balanced(self, task: TaskData) -> Tensor:
        """The held-out exemplars, and for each new class the average number of images of an old class."""
        old = torch.cat([task.exemplars[column] for column in sorted(task.exemplars)])
        old = old[self._held(task, old)]
        new = task.new_rows[self._held(task, task.new_rows)]
        new_columns, count = task.column_of_row[new], -(-len(old) // max(task.old, 1))
        chosen = [new[new_columns == column][:count] for column in task.columns]
        return torch.cat([old, *chosen]) if len(old) else old

    def end_task(self, task: TaskData) -> None:
        """Called after the last stage: fold the correction into the head."""
        super().end_task(task)
        if task.old:
            fold_correction(self.model, task.old, task.seen)


def corrected(logits: Tensor, correction: Tensor, old: int) -> Tensor:
    """Logits of new classes times alpha, plus beta; logits of old classes are unchanged."""
    return torch.cat([logits[:, :old], correction[0] * logits[:, old:] + correction[1]], dim=1)


@torch.no_grad()
def fold_correction(model: nn.Module, old: int, seen: int) -> None:
    """Scale the head's new rows by alpha, their biases by alpha plus beta, and delete `model.correction`."""
    head, correction = model.fc, model.correction
    assert isinstance(head, nn.Linear)
    assert isinstance(correction, nn.Parameter)
    alpha, beta = correction.tolist()
    head.weight[old:seen] *= alpha
    head.bias[old:seen] = alpha * head.bias[old:seen] + beta
    del model.correction
