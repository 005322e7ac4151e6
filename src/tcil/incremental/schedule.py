"""Epochs and learning rates of a stage, and their total weight decay. Does not need torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tcil.foundation.options import Option

MOMENTUM = 0.9  # of SGD
_WARM_UP, _FIRST_RATE = 0.3, 1 / 25  # "one-cycle": share of the epochs, first rate relative to the highest


class RateShape(Option):
    """How the learning rate changes over the epochs of a stage."""

    STEPS = "steps", "divided by 10 at each milestone (the paper's)"
    COSINE = "cosine", "half a cosine from the first rate to 0"
    ONE_CYCLE = "one-cycle", "linear increase from a 25th over 30 % of the epochs, then half a cosine to 0"


@dataclass(frozen=True)
class Schedule:
    """Epochs and learning rates of one stage.

    Attributes
    ----------
    epochs : int
        Number of passes over the rows.
    lr : float
        The highest learning rate; except for "one-cycle", also the first.
    milestones : tuple of int
        Epochs, counted from 0, at which the learning rate is divided by 10. Used by "steps" only.
    weight_decay : float
        Weight decay of the optimizer.
    shape : {"steps", "cosine", "one-cycle"}
        How the learning rate changes over the epochs.

    Examples
    --------
    >>> from tcil.extending import Schedule
    >>> schedule = Schedule(epochs=60, lr=0.1, milestones=(30, 50), weight_decay=5e-4)
    >>> [round(schedule.rate(epoch), 4) for epoch in (0, 30, 59)]
    [0.1, 0.01, 0.001]

    A short schedule with the same total weight decay over a task as the paper's with 51 batches per epoch:

    >>> paper = Schedule(epochs=200, lr=0.1, milestones=(100, 150), weight_decay=2e-4)
    >>> short = Schedule(epochs=30, lr=0.05, milestones=(15, 22), weight_decay=0.0)
    >>> f"{short.decaying(paper.total_decay(51), 69).weight_decay:.2g}"
    '0.002'
    """

    epochs: int
    lr: float
    milestones: tuple[int, ...]
    weight_decay: float
    shape: RateShape | str = RateShape.STEPS

    def rate(self, epoch: float) -> float:
        """The learning rate at a point of training, in epochs from 0; step 5 of 10 in epoch 3 is at 3.5.

        It is evaluated at every step, so that "cosine" and "one-cycle" change smoothly within an epoch.
        """
        shape, part = RateShape.parse(self.shape, "lr_shape"), epoch / self.epochs
        if shape is RateShape.STEPS:
            return self.lr * 0.1 ** sum(epoch >= milestone for milestone in self.milestones)
        if shape is RateShape.ONE_CYCLE:
            if part < _WARM_UP:
                return self.lr * (_FIRST_RATE + (1 - _FIRST_RATE) * part / _WARM_UP)
            part = (part - _WARM_UP) / (1 - _WARM_UP)
        return self.lr * (1 + math.cos(math.pi * part)) / 2

    def total_decay(self, batches: int) -> float:
        """Total weight decay of the stage with SGD: lr * weight_decay / (1 - momentum), summed over its steps.

        Weights that do not affect the loss shrink to about exp(-total_decay).

        Parameters
        ----------
        batches : int
            Number of steps per epoch.

        Returns
        -------
        float
            The sum.
        """
        rates = sum(self.rate(step / batches) for step in range(self.epochs * batches))
        return rates * self.weight_decay / (1 - MOMENTUM)

    def decaying(self, total: float, batches: int) -> Schedule:
        """The same schedule with a weight decay that adds up to `total`.

        Parameters
        ----------
        total : float
            The desired `total_decay`.
        batches : int
            Number of steps per epoch.

        Returns
        -------
        Schedule
            The schedule with another `weight_decay`.
        """
        return replace(self, weight_decay=total / replace(self, weight_decay=1.0).total_decay(batches))
