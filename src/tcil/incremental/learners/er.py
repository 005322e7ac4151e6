"""ER, experience replay (Chaudhry et al. 2019): cross-entropy on new data and exemplars together."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tcil.incremental.learners.base import Learner, Schedule, Stage, TaskData


class ER(Learner):
    """Cross-entropy over new data and memory shuffled together, each exemplar once an epoch.

    Examples
    --------
    >>> import torch, tcil
    >>> from tcil.extending import ER
    >>> options = ER.options_type()
    >>> ER(options, tcil.networks.small_cnn, 10, seed=1, device=torch.device("cpu")).n_classes
    10
    """

    meaning = "experience replay: cross-entropy on new data and exemplars together"

    def stage(self, name: str, task: TaskData, schedule: Schedule, generator: torch.Generator) -> Stage:
        """Build a stage when its turn comes; `schedule` is the run's main one."""

        def loss(x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.logits(x, task.seen), y)

        return Stage(name, task.all_rows, schedule, loss, list(self.model.parameters()))
