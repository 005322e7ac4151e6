"""NCM, nearest class mean: no exemplars and no gradients, only the feature mean of each class."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from tcil.foundation.errors import invalid
from tcil.incremental.learners.base import (
    FORWARD,
    Head,
    Learner,
    LearnerOptions,
    Schedule,
    Stage,
    TaskData,
    TaskSize,
    biased_head_of,
    head_of,
)
from tcil.incremental.pretrained.heads import CosineHead


class ClassMeans(nn.Module):
    """A network whose head consists of class means; the sums and counts behind them are kept in buffers."""

    def __init__(self, network: nn.Module, n_classes: int) -> None:
        super().__init__()
        self.network = network
        why = "whose rows become class means"
        self.fc = head if isinstance(head := head_of(network, why), CosineHead) else biased_head_of(network, why)
        network.fc = nn.Identity()
        self.register_buffer("sums", torch.zeros(n_classes, self.fc.in_features))
        self.register_buffer("counts", torch.zeros(n_classes))
        self.sums: Tensor
        self.counts: Tensor

    def features(self, x: Tensor) -> Tensor:
        """The input of `fc`."""
        return cast(Tensor, self.network(x))

    def forward(self, x: Tensor) -> Tensor:
        """Logits, (N, classes)."""
        return cast(Tensor, self.fc(self.features(x)))

    def observe(self, x: Tensor, columns: Tensor) -> None:
        """Add a batch to the means of its classes."""
        features = self.features(x)
        if isinstance(self.fc, CosineHead):
            features = nn.functional.normalize(features, dim=1)
        self.sums.index_add_(0, columns, features)
        self.counts.index_add_(0, columns, torch.ones_like(columns, dtype=self.counts.dtype))

    def set_head(self) -> None:
        """Set the head from the means: logits are minus half the squared distances, up to a constant per image."""
        means = self.sums / self.counts.clamp(min=1)[:, None]
        with torch.no_grad():
            self.fc.weight.copy_(means)
            if not isinstance(self.fc, CosineHead):
                self.fc.bias.copy_(-0.5 * means.square().sum(dim=1))


class NCM(Learner):
    """Classify by the nearest class mean of frozen features.

    With a linear head, the logits are minus half the squared distance to each mean (plus a constant per image). With a
    cosine head, they are cosines times a fixed scale. In both cases the scale of the logits has no meaning before
    calibration.

    Examples
    --------
    >>> import torch, tcil
    >>> from tcil.incremental.learners import make_learner
    >>> make_learner("ncm", tcil.networks.small_cnn, 10, seed=1).rehearses
    False
    """

    meaning = "nearest class mean of frozen features: no exemplars, no gradients"
    rehearses = False
    model: ClassMeans

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.head is not Head.FIXED:
            raise invalid("option head", repr(self.head.value), "fixed, for a learner without gradients")

    @classmethod
    def passes(cls, size: TaskSize, options: LearnerOptions) -> dict[str, float]:
        """What a task costs: each new image runs through the network once."""
        return {"train": FORWARD * size.new_images}

    def begin_task(self, task: TaskData) -> None:
        """Create the network in the first task."""
        if task.index == 0:
            with self.fresh(0):
                self.model = self._network().to(self.device)
            self.model.requires_grad_(False)

    def _network(self) -> ClassMeans:
        return ClassMeans(self.network(self.n_classes), self.n_classes)

    def stage(self, name: str, task: TaskData, schedule: Schedule, generator: torch.Generator) -> Stage:
        """One pass over the new data, without training."""
        once = Schedule(1, schedule.lr, (), 0.0)
        return Stage(name, task.new_rows, once, _no_loss, [], observe=self.model.observe)

    def end_task(self, task: TaskData) -> None:
        """Called after the pass: compute the head."""
        self.model.set_head()


def _no_loss(x: Tensor, y: Tensor) -> Tensor:
    raise AssertionError("a stage that observes has no loss")
