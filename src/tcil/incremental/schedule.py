"""Epochs and learning rates of a stage, and how much weight decay they add up to. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tcil.foundation.options import Option

MOMENTUM = 0.9  # of SGD
_WARM_UP, _FIRST_RATE = 0.3, 1 / 25  # of "one-cycle": share of the epochs, share of the highest rate


class RateShape(Option):
    """How the learning rate moves over the epochs of a stage."""

    STEPS = "steps", "divided by 10 at each milestone (the paper's)"
    COSINE = "cosine", "half a cosine from the first rate to 0"
    ONE_CYCLE = "one-cycle", "up from a 25th in a straight line for 30 % of the epochs, then half a cosine to 0"


@dataclass(frozen=True)
class Schedule:
    """Epochs and learning rates of one stage.

    Attributes
    ----------
    epochs : int
        Passes over the rows.
    lr : float
        The highest learning rate; except for "one-cycle", also the first.
    milestones : tuple of int
        Epochs, counted from 0, at which it is divided by 10. Only "steps" uses them.
    weight_decay : float
        Of SGD.
    shape : {"steps", "cosine", "one-cycle"}
        How the rate moves between the first epoch and the last.

    Examples
    --------
    >>> from tcil.extending import Schedule
    >>> schedule = Schedule(epochs=60, lr=0.1, milestones=(30, 50), weight_decay=5e-4)
    >>> [round(schedule.rate(epoch), 4) for epoch in (0, 30, 59)]
    [0.1, 0.01, 0.001]

    A short schedule with as much weight decay over a task as the paper's has with 51 batches an epoch:

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

        Training asks for it at every step, so "cosine" and "one-cycle" move smoothly within an epoch.
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
        """Weight decay of the whole stage with SGD: lr * weight_decay / (1 - momentum), summed over its steps.

        Weights that the loss does not move shrink to about exp(-total_decay).

        Parameters
        ----------
        batches : int
            Steps of an epoch.

        Returns
        -------
        float
            The sum.
        """
        rates = sum(self.rate(step / batches) for step in range(self.epochs * batches))
        return rates * self.weight_decay / (1 - MOMENTUM)

    def decaying(self, total: float, batches: int) -> Schedule:
        """The same schedule with the weight decay that adds up to `total`.

        Parameters
        ----------
        total : float
            The wanted `total_decay`.
        batches : int
            Steps of an epoch.

        Returns
        -------
        Schedule
            With another `weight_decay`.
        """
        return replace(self, weight_decay=total / replace(self, weight_decay=1.0).total_decay(batches))
