"""Detects whether two sets of inputs are on different scales, from statistics of their first batches."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# The largest ratio of standard deviations of inputs on the same scale, for the same classes and for other classes.
_SAME_CLASSES, _OTHER_CLASSES = 3.0, 8.0
_ENOUGH = 256  # number of examples that are used
_FEW = 8  # with fewer images a standard deviation is too uncertain, and the larger ratio is used
_NEGATIVE = 0.1  # an example counts as signed if some value is below minus this share of its root mean square
_SIGNED = 0.9  # minimum share of signed examples in centred inputs
_CHANCE = 1e-4  # accepted probability of a false alarm


class InputScale:
    """Range, and mean and standard deviation by channel (the second dimension), of the first inputs that are added."""

    def __init__(self) -> None:
        self.n_examples = 0
        self._signed = 0
        self._flat = True
        self._low, self._high = math.inf, -math.inf
        self._least, self._largest = math.inf, 0.0  # root mean square of an example
        self._weight = 0
        self._mean = self._spread = torch.zeros(0, dtype=torch.float64)  # of each channel; the sum of squares around it

    def add(self, inputs: Tensor, rows: Tensor | None = None) -> None:
        """Add a batch (B, ...), or the rows selected by the mask `rows`, until there are enough examples."""
        if self.n_examples == _ENOUGH or not inputs.is_floating_point():
            return
        inputs = (inputs if rows is None else inputs[rows])[: _ENOUGH - self.n_examples]
        if not inputs.numel():
            return
        x = inputs.detach().reshape(len(inputs), -1, math.prod(inputs.shape[2:]))
        self._flat = inputs.ndim <= 2
        low = x.amin(dim=(1, 2))
        rms = torch.linalg.vector_norm(x, dim=(1, 2)) / (x.shape[1] * x.shape[2]) ** 0.5
        self.n_examples += len(x)
        self._signed += int((low < -_NEGATIVE * rms).sum())
        self._low, self._high = min(self._low, float(low.min())), max(self._high, float(x.max()))
        self._least, self._largest = min(self._least, float(rms.min())), max(self._largest, float(rms.max()))
        mean = x.mean(dim=(0, 2))
        around = (x - mean[:, None]).square_().sum(dim=(0, 2))  # torch.var_mean takes ten times as long
        self._merge(len(x) * x.shape[2], mean.cpu().double(), around.cpu().double())

    def _merge(self, weight: int, mean: Tensor, around: Tensor) -> None:
        """Add the moments of a batch to those of the previous ones (Chan's formula), if it has as many channels."""
        if not self._weight:
            self._mean, self._spread = torch.zeros_like(mean), torch.zeros_like(mean)
        if len(mean) != len(self._mean):
            return
        total = self._weight + weight
        gap = mean - self._mean
        self._mean = self._mean + gap * (weight / total)
        self._spread = self._spread + around + gap.square() * (self._weight * weight / total)
        self._weight = total

    @property
    def deviations(self) -> Tensor:
        """The standard deviation of each channel."""
        return (self._spread / max(self._weight, 1)).sqrt()

    def __str__(self) -> str:
        mean, spread = float(self._mean.mean()), float(self.deviations.square().mean().sqrt())
        return f"values from {self._low:.3g} to {self._high:.3g} (mean {mean:.2g}, standard deviation {spread:.2g})"

    def differs_from(self, other: InputScale, *, same_classes: bool) -> bool:
        """Whether the two are on different scales, beyond what other examples (or classes) can explain.

        There are two criteria. Nearly every example of centred inputs has clearly negative values, but no example of
        inputs from 0 to 1 or 255. And the ratio of the standard deviations, as the median over channels, is too large.
        Feature vectors may have any distribution, so they are only compared for the same classes, and more strictly.
        """
        if not self.n_examples or not other.n_examples:
            return False
        if self._flat and not same_classes:
            return False
        if self._one_sided(other) or other._one_sided(self):
            return True
        if self._flat and not self._separated(other):
            return False
        few = min(self.n_examples, other.n_examples) < _FEW
        return self._log_ratio(other) > math.log(_SAME_CLASSES if same_classes and not few else _OTHER_CLASSES)

    def _one_sided(self, signed: InputScale) -> bool:
        """Whether no example here is signed, although nearly all of the other are."""
        share = signed._signed / (signed.n_examples + 1)
        return (
            self._signed == 0
            and signed._signed >= _SIGNED * signed.n_examples
            and ((1 - share) ** self.n_examples < _CHANCE)
        )

    def _separated(self, other: InputScale) -> bool:
        """Whether all examples of one are larger than all of the other, beyond chance for any distribution."""
        apart = self._least > other._largest or other._least > self._largest
        mine, its = min(self.n_examples, 50), min(other.n_examples, 50)  # more are not needed
        return apart and math.comb(mine + its, mine) * _CHANCE > 1

    def _log_ratio(self, other: InputScale) -> float:
        """The absolute log ratio of the standard deviations, as the median over channels that vary."""
        mine, its = self.deviations, other.deviations
        if len(mine) != len(its):
            return 0.0
        vary = (mine > 0) & (its > 0)
        if 2 * int(vary.sum()) < len(mine):
            return 0.0
        return abs(float((mine[vary] / its[vary]).log().median()))
