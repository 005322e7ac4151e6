"""ER, experience replay (Chaudhry et al. 2019): cross-entropy on new data and exemplars together."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from tcil.foundation.errors import invalid
from tcil.incremental.learners.base import Learner, LearnerOptions, Schedule, Stage, TaskData, TaskSize


@dataclass(frozen=True)
class EROptions(LearnerOptions):
    """ER's options.

    `online`: one pass over the new data, regardless of `epochs`, with one randomly drawn exemplar for each new image,
    as in online replay. Otherwise exemplars would occur only once in that pass, and old classes would be forgotten.

    `label_smoothing`: the share of each target that is spread evenly over the classes seen.

    `mixup`: train on mixtures of two images and their labels (Zhang et al. 2018). The share of the first is drawn for
    each batch from a beta distribution with both parameters equal to this number; the paper has 0.1 to 0.4. 0: off.
    """

    online: bool = False
    label_smoothing: float = 0.0
    mixup: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise invalid("option label_smoothing", repr(self.label_smoothing), "at least 0 and below 1")
        if not 0 <= self.mixup < math.inf:
            raise invalid("option mixup", repr(self.mixup), "a number of at least 0")


class ER(Learner):
    """Experience replay: cross-entropy on new data and memory shuffled together, each exemplar once per epoch.

    Examples
    --------
    >>> import torch, tcil
    >>> from tcil.extending import ER
    >>> options = ER.options_type(online=True)
    >>> learner = ER(options, tcil.networks.small_cnn, 10, seed=1, device=torch.device("cpu"))
    >>> learner.n_classes, learner.replays(n_new=500, n_exemplars=50)
    (10, 10.0)
    """

    meaning = "experience replay: cross-entropy on new data and exemplars together"
    options_type = EROptions
    options: EROptions

    @classmethod
    def passes(cls, size: TaskSize, options: LearnerOptions) -> dict[str, float]:
        """What a task costs: online, each new image once with an exemplar beside it; else all images in every epoch."""
        if getattr(options, "online", False):
            return {"train": size.new_images * (2.0 if size.exemplars else 1.0)}
        return super().passes(size, options)

    def stage(self, name: str, task: TaskData, schedule: Schedule, generator: torch.Generator) -> Stage:
        """Build a stage; called when the previous one is done. `schedule` is the run's main schedule."""

        smoothing = float(getattr(self.options, "label_smoothing", 0.0))
        alpha = float(getattr(self.options, "mixup", 0.0))

        def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(logits, y, label_smoothing=smoothing)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            if not alpha:
                return cross_entropy(self.logits(x, task.seen), y)
            # The order of a batch is random: its reverse is a partner for each image. One draw for every process.
            share = _beta(alpha, generator)
            logits = self.logits(share * x + (1 - share) * x.flip(0), task.seen)
            return share * cross_entropy(logits, y) + (1 - share) * cross_entropy(logits, y.flip(0))

        rows = task.all_rows
        if self._online:
            schedule = replace(schedule, epochs=1, milestones=())
            rows = self._once(task, generator)
        return Stage(name, rows, schedule, loss, list(self.model.parameters()))

    @staticmethod
    def _once(task: TaskData, generator: torch.Generator) -> Tensor:
        """Each new row once, and as many exemplars drawn with replacement."""
        if not task.exemplars:
            return task.new_rows
        memory = torch.cat([task.exemplars[column] for column in sorted(task.exemplars)])
        drawn = torch.randint(len(memory), (len(task.new_rows),), generator=generator)
        return torch.cat([task.new_rows, memory[drawn]])

    def replays(self, n_new: int, n_exemplars: int) -> float:
        """How often each exemplar occurs in an epoch in which each new image occurs once."""
        return n_new / n_exemplars if self._online else 1.0

    @property
    def _online(self) -> bool:
        return bool(getattr(self.options, "online", False))  # subclasses may have other options


def _beta(alpha: float, generator: torch.Generator) -> float:
    """A number between 0 and 1 from the symmetric beta distribution, drawn with the generator of the run."""
    seed = int(torch.randint(2**63 - 1, (1,), generator=generator))
    return float(np.random.default_rng(seed).beta(alpha, alpha))
