"""What learners share: a network over the classes seen, and stages of training that can be resumed."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from tcil.calibration.options import Option
from tcil.incremental.networks import ResNet, seeded


class Head(Option):
    """How the classification layer meets new classes."""

    FIXED = "fixed", "one layer for all classes from the start, sliced to those seen (the authors' way)"
    GROWING = "growing", "rows are added with each task; old ones keep their weights"


@dataclass(frozen=True)
class Schedule:
    """Epochs and learning rates of one stage: the rate is divided by 10 at each milestone."""

    epochs: int
    lr: float
    milestones: tuple[int, ...]
    weight_decay: float

    def rate(self, epoch: int) -> float:
        """The learning rate in an epoch (from 0)."""
        return self.lr * 0.1 ** sum(epoch >= milestone for milestone in self.milestones)


@dataclass(frozen=True, eq=False)
class TaskData:
    """What a learner may know of a task: rows of new data, the old exemplars by class, and the classes' columns."""

    index: int
    columns: range
    new_rows: Tensor
    exemplars: dict[int, Tensor]
    column_of_row: Tensor
    task_columns: tuple[range, ...]

    @property
    def old(self) -> int:
        """How many classes came before."""
        return self.columns.start

    @property
    def seen(self) -> int:
        """How many classes there are with this task."""
        return self.columns.stop

    @property
    def all_rows(self) -> Tensor:
        """New data and exemplars together, each once."""
        return torch.cat([self.new_rows, *(self.exemplars[c] for c in sorted(self.exemplars))])

    def balanced_rows(self, generator: torch.Generator) -> Tensor:
        """As many rows of every new class as there are exemplars of an old one, with all the exemplars."""
        share = min(len(rows) for rows in self.exemplars.values())
        chosen = [rows[:share] for _, rows in sorted(self.exemplars.items())]
        own = self.column_of_row[self.new_rows]
        for column in self.columns:
            rows = self.new_rows[own == column]
            chosen.append(rows[torch.randperm(len(rows), generator=generator)[:share]])
        return torch.cat(chosen)


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage of training: on which rows, with which loss, which parameters, how long.

    Where a frozen part of the network comes first, `embed` is that part, and the loss reads what it makes of the
    images; once for all epochs, where augmentation can make only a few of each.
    """

    name: str
    rows: Tensor
    schedule: Schedule
    loss: Callable[[Tensor, Tensor], Tensor]
    parameters: Sequence[nn.Parameter]
    embed: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class LearnerOptions:
    """Options that every learner has."""

    head: Head | str = Head.FIXED


class Learner(ABC):
    """A class-incremental learner.

    The moments of a task, in order: `begin_task`, then each of `stages` (built by `stage` when its turn comes, so that
    it can start from what the one before left), then `end_task`. All state that must survive is in `model`: a run that
    is interrupted rebuilds everything else from the models saved at these moments.
    """

    options_type: ClassVar[type[LearnerOptions]] = LearnerOptions
    meaning: ClassVar[str] = ""
    model: nn.Module

    def __init__(
        self,
        options: LearnerOptions,
        network: Callable[[int], ResNet],
        n_classes: int,
        *,
        seed: int,
        device: torch.device,
    ) -> None:
        self.options, self.network, self.n_classes, self.seed, self.device = options, network, n_classes, seed, device
        self.head = Head.parse(options.head, "head")
        self.teacher: nn.Module | None = None

    def fresh(self, key: int) -> AbstractContextManager[None]:
        """Initialise layers inside this: the draw depends on the run's seed and `key` alone."""
        return seeded(self.seed * 1000 + key)

    def begin_task(self, task: TaskData) -> None:
        """Make ready for new classes: the first network, or a longer head; the network so far becomes the teacher."""
        if task.index == 0:
            with self.fresh(0):
                self.model = self.network(self.n_classes if self.head is Head.FIXED else task.seen).to(self.device)
            return
        self.teacher = frozen_copy(self.model)
        if self.head is Head.GROWING:
            with self.fresh(task.index):
                grow_head(self.model, task.seen)

    def stages(self, task: TaskData) -> tuple[str, ...]:
        """The names of this task's stages."""
        return ("train",)

    @abstractmethod
    def stage(self, name: str, task: TaskData, schedule: Schedule, generator: torch.Generator) -> Stage:
        """Build a stage when its turn comes; `schedule` is the run's main one."""

    def end_task(self, task: TaskData) -> None:
        """After the last stage."""
        self.teacher = None

    def logits(self, x: Tensor, seen: int) -> Tensor:
        """The model's logits over the classes seen."""
        logits: Tensor = self.model(x)
        return logits[:, :seen]


def frozen_copy(model: nn.Module) -> nn.Module:
    """The network as it is now, for ever: a teacher."""
    return copy.deepcopy(model).eval().requires_grad_(False)


def grow_head(model: nn.Module, n_classes: int) -> None:
    """Add rows to `model.fc` up to `n_classes`; old rows keep their weights."""
    old = model.fc
    assert isinstance(old, nn.Linear)
    grown = nn.Linear(old.in_features, n_classes).to(old.weight.device)
    with torch.no_grad():
        grown.weight[: old.out_features] = old.weight
        grown.bias[: old.out_features] = old.bias
    model.fc = grown


def soft_cross_entropy(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """H(softmax(teacher / T), softmax(student / T)), mean over samples: the distillation term, without a T^2."""
    target = torch.softmax(teacher / temperature, dim=1)
    return -(target * torch.log_softmax(student / temperature, dim=1)).sum(dim=1).mean()
