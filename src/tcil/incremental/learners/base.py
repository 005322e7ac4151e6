"""The base class of learners: a network over the classes seen, trained in stages that can be resumed."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from tcil.foundation.errors import invalid
from tcil.foundation.options import Option
from tcil.incremental.learners.frozen import Frozen
from tcil.incremental.networks import ResNet, seeded
from tcil.incremental.pretrained.heads import CosineHead
from tcil.incremental.schedule import Schedule as Schedule


class Head(Option):
    """How the classification layer handles new classes.

    Examples
    --------
    >>> from tcil.extending import Head
    >>> print(Head.GROWING.meaning)
    rows are added with each task; old ones keep their weights
    """

    FIXED = "fixed", "one layer for all classes from the start, sliced to those seen (as in the authors' code)"
    GROWING = "growing", "rows are added with each task; old ones keep their weights"


@dataclass(frozen=True, eq=False)
class TaskData:
    """The data of a task that a learner may use.

    Attributes
    ----------
    index : int
        Number of the task, from 0.
    columns : range
        Logit columns of its new classes.
    new_rows : tensor
        Rows of the training set that belong to this task.
    exemplars : dict of int to tensor
        Rows of the exemplars of old classes, by column.
    column_of_row : tensor
        The column of every row of the training set.
    task_columns : tuple of range
        The columns of each task so far.

    Examples
    --------
    >>> import torch
    >>> from tcil.extending import TaskData
    >>> first = TaskData(0, range(2), torch.arange(4), {}, torch.tensor([0, 1, 0, 1]), (range(2),))
    >>> first.old, first.seen, first.all_rows.tolist()
    (0, 2, [0, 1, 2, 3])
    """

    index: int
    columns: range
    new_rows: Tensor
    exemplars: dict[int, Tensor]
    column_of_row: Tensor
    task_columns: tuple[range, ...]

    @property
    def old(self) -> int:
        """The number of classes of earlier tasks."""
        return self.columns.start

    @property
    def seen(self) -> int:
        """The number of classes including this task."""
        return self.columns.stop

    @property
    def all_rows(self) -> Tensor:
        """The rows of new data and exemplars, each once."""
        return torch.cat([self.new_rows, *(self.exemplars[c] for c in sorted(self.exemplars))])

    def balanced_rows(self, generator: torch.Generator) -> Tensor:
        """The same number of rows of every class: exemplars of old ones, and a random selection of each new one."""
        new_columns = self.column_of_row[self.new_rows]
        new = [self.new_rows[new_columns == column] for column in self.columns]
        share = min(len(rows) for rows in (*self.exemplars.values(), *new))
        chosen = [rows[:share] for _, rows in sorted(self.exemplars.items())]
        chosen += [rows[torch.randperm(len(rows), generator=generator)[:share]] for rows in new]
        return torch.cat(chosen)


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage of training: its rows, loss, parameters and schedule.

    Attributes
    ----------
    name : str
        One of the learner's `stages`.
    rows : tensor
        Rows of the training set.
    schedule : Schedule
        Epochs and learning rates.
    loss : callable
        Maps a batch of images and their columns to a scalar tensor. With `embed` it gets features instead of images,
        with `beside` both: `loss(images, features, columns)`.
    parameters : sequence of torch.nn.Parameter
        The parameters to train.
    embed : callable, optional
        A frozen first part of the network: the loss gets its output instead of the images. It runs only once for all
        epochs if augmentation produces only a few versions of each image.
    after_step : callable, optional
        Called after every optimizer step, without gradients, for instance to clamp weights. It must depend on the
        parameters only: every rank calls it, and a resumed run continues after it.
    beside : callable, optional
        A frozen part of the network that runs next to the trained one on the same images, also only once if possible.
        A stage has at most one of `embed` and `beside`.
    observe : callable, optional
        For a stage without gradients: called with each batch of unaugmented images and their columns, once and in the
        order of `rows`. It must store its state in buffers of the model. There is no loss and only one epoch.

    Examples
    --------
    >>> import torch
    >>> from tcil.extending import Schedule, Stage
    >>> head, schedule = torch.nn.Linear(2, 2), Schedule(epochs=1, lr=0.1, milestones=(), weight_decay=0.0)
    >>> def loss(x, y):
    ...     return torch.nn.functional.cross_entropy(head(x), y)
    >>> Stage("train", torch.arange(8), schedule, loss, list(head.parameters())).name
    'train'
    """

    name: str
    rows: Tensor
    schedule: Schedule
    loss: Callable[..., Tensor]
    parameters: Sequence[nn.Parameter]
    embed: Callable[[Tensor], Tensor] | None = None
    after_step: Callable[[], None] | None = None
    beside: Callable[[Tensor], Tensor] | None = None
    observe: Callable[[Tensor, Tensor], None] | None = None

    def __post_init__(self) -> None:
        if self.embed is not None and self.beside is not None:
            raise invalid("stage", f"{self.name!r} with embed and beside", "one of the two")


FORWARD = 1 / 3  # of an image pass: a forward pass alone, as of a teacher or of a frozen extractor


@dataclass(frozen=True)
class TaskSize:
    """How much a task has to train on: what the cost of a task is counted from before anything is read.

    Attributes
    ----------
    index : int
        The number of the task, from 0.
    new_images : int
        Training images of its new classes.
    exemplars : int
        Exemplars of old classes.
    balanced : int
        Images of a balanced set: as many of every class as there are exemplars of an old one.
    epochs : int
        Those of the run's main schedule.
    crops : bool
        Whether images are cropped at random. If not, an image has two forms only, plain and mirrored, and what a
        frozen part of the network or a teacher makes of them is computed once.
    mirrors : bool, default True
        Whether images are mirrored at random.

    Examples
    --------
    >>> from tcil.extending import TaskSize
    >>> size = TaskSize(index=1, new_images=1000, exemplars=100, balanced=120, epochs=20, crops=False)
    >>> size.images, size.frozen_passes(30)
    (1100, 2)
    """

    index: int
    new_images: int
    exemplars: int
    balanced: int
    epochs: int
    crops: bool
    mirrors: bool = True

    @property
    def images(self) -> int:
        """New images and exemplars together."""
        return self.new_images + self.exemplars

    def frozen_passes(self, epochs: int) -> int:
        """How often a frozen part of the network sees each image in this many epochs."""
        return epochs if self.crops else min(2 if self.mirrors else 1, epochs)


@dataclass(frozen=True)
class LearnerOptions:
    """Options that every learner has. Subclass it to add more, each with a default.

    A value given by the user must have the type of the default. Other checks belong in `__post_init__` of the subclass
    or in `__init__` of the learner; errors raised there end a run before any training.

    Attributes
    ----------
    head : {"fixed", "growing"}
        How the classification layer handles new classes (`Head`).

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> from tcil.extending import LearnerOptions
    >>> @dataclass(frozen=True)
    ... class MyOptions(LearnerOptions):
    ...     strength: float = 0.5
    >>> MyOptions(head="growing").strength
    0.5
    """

    head: Head | str = Head.FIXED

    def __post_init__(self) -> None:
        """For subclasses, which may call it."""

    def _check_least(self, **least: int) -> None:
        """Raise if an option is smaller than its bound."""
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise invalid(f"option {name}", repr(getattr(self, name)), f"at least {bound}")

    def _check_positive(self, *names: str) -> None:
        """Raise if one of these options is not greater than 0."""
        for name in names:
            if not getattr(self, name) > 0:
                raise invalid(f"option {name}", repr(getattr(self, name)), "greater than 0")


@dataclass(frozen=True)
class FinetuningOptions(LearnerOptions):
    """Options of learners with a second stage, which has a schedule of its own. Each learner has its own defaults.

    `finetune_milestones` are epochs of stage two at which its rate is divided by 10. Where settings change
    `finetune_epochs` alone, `tcil.experiments.config.settings.build` moves them in proportion.
    """

    finetune_epochs: int = 30
    finetune_lr: float = 0.01
    finetune_milestones: tuple[int, ...] = (10, 20)

    def __post_init__(self) -> None:
        self._check_least(finetune_epochs=1, finetune_lr=0)
        if not all(0 < milestone < self.finetune_epochs for milestone in self.finetune_milestones):
            expected = f"numbers above 0 and below finetune_epochs, {self.finetune_epochs}"
            advice = "Give milestones that suit the epochs, or [] for a constant rate."
            raise invalid("option finetune_milestones", repr(list(self.finetune_milestones)), expected, advice)

    def finetuning(self, weight_decay: float) -> Schedule:
        """The schedule of stage two."""
        return Schedule(self.finetune_epochs, self.finetune_lr, tuple(self.finetune_milestones), weight_decay)


class Learner(ABC):
    """Base class of class-incremental learners. Subclass it and define `stage`.

    For each task, these methods are called in order: `begin_task`, `stage` for each name in `stages` (a stage is built
    when the previous one is done, so that it can start from its result), and `end_task`. All state that must survive
    an interruption is in `model`: a resumed run rebuilds everything else from the models saved at these points.

    Parameters
    ----------
    options : LearnerOptions
        Options, of the class `options_type`.
    network : callable
        Returns the network for a number of classes.
    n_classes : int
        Number of classes of all tasks.
    seed : int
        Seed of new layers.
    device : torch.device
        Where the network is trained.

    Attributes
    ----------
    title : str
        What tables call it; the name of the class, unless the class says otherwise.
    meaning : str
        What it is, in a line, for `tcil learners`.
    model : torch.nn.Module
        The network over the classes seen.
    teacher : torch.nn.Module or None
        The network of the previous task, during training.
    rehearses : bool
        Whether it trains on exemplars. Learners that do not have seen as many images of an old class as of a new one,
        and run without a memory (`--set memory=0`).

    Examples
    --------
    >>> from tcil.extending import ER
    >>> class MyLearner(ER):
    ...     meaning = "experience replay in two stages"
    ...     def stages(self, task):
    ...         return ("train", "tune") if task.index else ("train",)
    >>> MyLearner.options_type().head, MyLearner.title
    (<Head.FIXED: 'fixed'>, 'MyLearner')
    """

    options_type: ClassVar[type[LearnerOptions]] = LearnerOptions
    title: ClassVar[str] = ""
    meaning: ClassVar[str] = ""
    rehearses: ClassVar[bool] = True
    model: nn.Module

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "title" not in vars(cls):
            cls.title = cls.__name__

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

    @classmethod
    def passes(cls, size: TaskSize, options: LearnerOptions) -> dict[str, float]:
        """What a task costs, by stage, in image passes: plans and the time left of a sweep are computed from it.

        An image pass is one image through the network in training, forward and backward; a forward pass alone counts a
        third (`FORWARD`). Unless a learner says otherwise, its only stage trains on all images in every epoch.

        Parameters
        ----------
        size : TaskSize
            How much there is to train on.
        options : LearnerOptions
            Of the class `options_type`.

        Returns
        -------
        dict of str to float
            Image passes of each stage, in the order of `stages`.
        """
        return {"train": float(size.epochs * size.images)}

    def fresh(self, key: int) -> AbstractContextManager[None]:
        """Context for initialising layers: their weights depend only on the run's seed and `key`."""
        return seeded(self.seed * 1000 + key)

    def begin_task(self, task: TaskData) -> None:
        """Prepare for new classes: create the first network, or copy the teacher and grow the head."""
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
        """Build a stage; called when the previous one is done. `schedule` is the run's main schedule."""

    def replays(self, n_new: int, n_exemplars: int) -> float:
        """How often each exemplar occurs in an epoch in which each new image occurs once."""
        return 1.0

    def end_task(self, task: TaskData) -> None:
        """Called after the last stage."""
        self.teacher = None

    def logits(self, x: Tensor, seen: int) -> Tensor:
        """The model's logits over the classes seen."""
        logits: Tensor = self.model(x)
        return logits[:, :seen]


def frozen_copy(model: nn.Module) -> nn.Module:
    """A frozen copy of the network in evaluation mode, used as a teacher."""
    return copy.deepcopy(model).eval().requires_grad_(False)


def head_of(model: nn.Module, why: str) -> nn.Linear:
    """The network's head `fc`; raises if it has no linear one, with what a learner does with it."""
    head = getattr(model, "fc", None)
    if isinstance(head, nn.Linear):
        return head
    given = f"{type(model).__name__} whose fc is {'missing' if head is None else f'a {type(head).__name__}'}"
    raise invalid("network", given, f"a linear layer fc as its head, {why}")


def plain_head_of(model: nn.Module, why: str) -> nn.Linear:
    """The network's head `fc`, which must not be a cosine head, whose logits do not depend on the norms of its rows."""
    head = head_of(model, why)
    if isinstance(head, CosineHead):
        given = f"{type(model).__name__} whose fc is a CosineHead"
        advice = "Use head=linear, or another learner such as er."
        raise invalid("network", given, f"a plain linear layer fc as its head, {why}", advice)
    return head


def biased_head_of(model: nn.Module, why: str) -> nn.Linear:
    """The network's head `fc`, which must be a plain one and have a bias too."""
    head = plain_head_of(model, why)
    if getattr(head, "bias", None) is None:  # torch says that it has one
        given = f"{type(model).__name__} whose fc is a {type(head).__name__} without a bias"
        raise invalid("network", given, f"a linear layer fc with a bias as its head, {why}")
    return head


def grow_head(model: nn.Module, n_classes: int) -> None:
    """Add rows to `model.fc` up to `n_classes`; old rows keep their weights."""
    old = head_of(model, "which can grow")
    if isinstance(old, CosineHead):
        model.fc = old.grown(n_classes)
        return
    grown = nn.Linear(old.in_features, n_classes, bias=old.bias is not None).to(old.weight.device)
    with torch.no_grad():
        grown.weight[: old.out_features] = old.weight
        if old.bias is not None:
            grown.bias[: old.out_features] = old.bias
    model.fc = grown


def frozen_teacher(teacher: nn.Module | None) -> Frozen | None:
    """A teacher's logits as the `beside` of a stage, so that they are computed once where images have few views."""
    return None if teacher is None else Frozen([teacher])


def distilling_loss(learner: Learner, task: TaskData, temperature: float) -> Callable[..., Tensor]:
    """(1 - l) CE + l H(teacher, student) over all old logits in one softmax, l = old / (old + new).

    The teacher's logits are its second argument: give the stage `beside=frozen_teacher(learner.teacher)`. Without a
    teacher it is the cross-entropy, of images and columns alone.
    """
    share = task.old / task.seen

    def first_task(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(learner.logits(x, task.seen), y)

    def later_task(x: Tensor, before: Tensor, y: Tensor) -> Tensor:
        logits = learner.logits(x, task.seen)
        distilled = soft_cross_entropy(before[:, : task.old], logits[:, : task.old], temperature)
        return (1 - share) * nn.functional.cross_entropy(logits, y) + share * distilled

    return first_task if learner.teacher is None else later_task


def soft_cross_entropy(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """H(softmax(teacher / T), softmax(student / T)), averaged over samples: the distillation term, without T^2."""
    target = torch.softmax(teacher / temperature, dim=1)
    return -(target * torch.log_softmax(student / temperature, dim=1)).sum(dim=1).mean()
