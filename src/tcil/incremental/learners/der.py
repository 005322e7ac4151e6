"""DER, dynamically expandable representation (Yan et al. 2021): one extractor per task, then a balanced head."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from tcil.incremental.learners.base import (
    FORWARD,
    FinetuningOptions,
    Head,
    Learner,
    LearnerOptions,
    Schedule,
    Stage,
    TaskData,
    TaskSize,
    plain_head_of,
)
from tcil.incremental.learners.frozen import Frozen
from tcil.incremental.networks import ResNet


@dataclass(frozen=True)
class DEROptions(FinetuningOptions):
    """DER's options; the fine-tuning defaults are those for 10 tasks.

    `finetune_temperature` divides the logits in stage two only; it is not used at inference, which plausibly causes
    DER's over-confidence.
    """

    finetune_temperature: float = 5.0
    finetune_epochs: int = 30
    finetune_lr: float = 0.1
    finetune_milestones: tuple[int, ...] = (15,)
    finetune_weight_decay: float = 5e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("finetune_temperature")
        self._check_least(finetune_weight_decay=0)


class ExpandableNetwork(nn.Module):
    """One extractor per task; `fc` reads the features of all of them, `aux` those of the newest during its task."""

    def __init__(self, extractor: ResNet, n_classes: int) -> None:
        super().__init__()
        width = plain_head_of(extractor, "which DER replaces").in_features
        self.fc = nn.Linear(width, n_classes)
        self.aux: nn.Linear | None = None
        extractor.fc = nn.Identity()  # type: ignore[assignment]
        self.extractors = nn.ModuleList([extractor])

    @property
    def width(self) -> int:
        """Number of features of one extractor."""
        return self.fc.in_features // len(self.extractors)

    def expand(self, n_classes: int, n_new: int) -> None:
        """Freeze the extractors and add a copy of the last one; the head keeps its old weights."""
        width = self.width
        self.extractors.append(copy.deepcopy(self.extractors[-1]))
        for extractor in self.extractors[:-1]:
            extractor.eval().requires_grad_(False)
        self.extractors[-1].requires_grad_(True)
        old = self.fc
        self.fc = nn.Linear(old.in_features + width, n_classes).to(old.weight.device)
        with torch.no_grad():
            self.fc.weight[: old.out_features, : old.in_features] = old.weight
            self.fc.bias[: old.out_features] = old.bias
        self.aux = nn.Linear(width, n_new + 1).to(old.weight.device)

    def train(self, mode: bool = True) -> Self:
        """Keep frozen extractors in evaluation mode, so that their BN statistics do not change."""
        super().train(mode)
        for extractor in self.extractors[:-1]:
            extractor.eval()
        return self

    def features(self, x: Tensor) -> Tensor:
        """The input of `fc`: the features of all extractors."""
        return torch.cat([extractor(x) for extractor in self.extractors], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, differentiable through every extractor (calibration needs the whole input gradient)."""
        logits: Tensor = self.fc(self.features(x))
        return logits


class DER(Learner):
    """Stage one: CE + CE of an auxiliary head (old classes as one class). Stage two: a new head on balanced data."""

    meaning = "dynamically expandable representation: one extractor per task, then a balanced head"
    options_type = DEROptions
    options: DEROptions
    model: ExpandableNetwork

    @classmethod
    def passes(cls, size: TaskSize, options: LearnerOptions) -> dict[str, float]:
        """What a task costs, by stage: every extractor of an earlier task runs too; in stage two all of them only run.

        Without crops they see each image twice in all, plain and mirrored; with crops, in every epoch.
        """
        if size.index == 0:
            return super().passes(size, options)
        assert isinstance(options, DEROptions)
        frozen = size.index * size.frozen_passes(size.epochs) * size.images
        tuned = (size.index + 1) * size.frozen_passes(options.finetune_epochs) * size.balanced
        return {"train": size.epochs * size.images + FORWARD * frozen, "finetune": FORWARD * tuned}

    def begin_task(self, task: TaskData) -> None:
        """Prepare for new classes: add an extractor."""
        n_classes = self.n_classes if self.head is Head.FIXED else task.seen
        with self.fresh(task.index):
            if task.index == 0:
                self.model = ExpandableNetwork(self.network(1), n_classes)
            else:
                self.model.expand(n_classes, len(task.columns))
        self.model.to(self.device)

    def stages(self, task: TaskData) -> tuple[str, ...]:
        """The names of this task's stages."""
        return ("train",) if task.old == 0 else ("train", "finetune")

    def stage(self, name: str, task: TaskData, schedule: Schedule, generator: torch.Generator) -> Stage:
        """Build a stage; called when the previous one is done. `schedule` is the run's main schedule."""
        if name == "train":
            return self._representation(name, task, schedule)
        o = self.options
        with self.fresh(500 + task.index):
            self.model.fc.reset_parameters()
        schedule = o.finetuning(o.finetune_weight_decay)
        rows = task.balanced_rows(generator)

        def loss(features: Tensor, y: Tensor) -> Tensor:
            logits = self.model.fc(features)[:, : task.seen]
            return nn.functional.cross_entropy(logits / o.finetune_temperature, y)

        # Only the head is trained; extractors run as at inference.
        embed = Frozen(self.model.extractors)
        return Stage(name, rows, schedule, loss, list(self.model.fc.parameters()), embed)

    def _representation(self, name: str, task: TaskData, schedule: Schedule) -> Stage:
        """Stage one: train the newest extractor next to the frozen ones of earlier tasks."""
        model, trained = self.model, [p for p in self.model.parameters() if p.requires_grad]

        def first_task(x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(model(x)[:, : task.seen], y)

        def later_task(x: Tensor, before: Tensor, y: Tensor) -> Tensor:
            assert model.aux is not None
            newest = model.extractors[-1](x)
            logits = model.fc(torch.cat([before, newest], dim=1))[:, : task.seen]
            auxiliary = nn.functional.cross_entropy(model.aux(newest), auxiliary_labels(y, task.old))
            return nn.functional.cross_entropy(logits, y) + auxiliary

        if task.old == 0:
            return Stage(name, task.all_rows, schedule, first_task, trained)
        frozen = Frozen(model.extractors[:-1])
        return Stage(name, task.all_rows, schedule, later_task, trained, beside=frozen)

    def end_task(self, task: TaskData) -> None:
        """Called after the last stage: drop the auxiliary head."""
        super().end_task(task)
        self.model.aux = None


def auxiliary_labels(columns: Tensor, old: int) -> Tensor:
    """0 for all old classes, 1..C_n for the new ones."""
    return (columns - old + 1).clamp(min=0)
