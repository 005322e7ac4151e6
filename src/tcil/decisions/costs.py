"""What a decision costs: the action of least expected cost, and the loss and score on which thresholds stand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tcil.decisions.rules import Bools, class_names
from tcil.foundation.arrays import ArrayLike, Floats, Ints, as_probabilities, as_tensor, same_kind
from tcil.foundation.errors import invalid

Costs = tuple[tuple[float, ...], ...]
ROUNDING = 1e-12  # scores of the same image may differ by this between batches


def cheapest_decision(
    probs: ArrayLike, costs: ArrayLike, *, classes: Iterable[Any] | None = None, ask: int = -1
) -> Tensor | Ints:
    """The decision of least expected cost for each image, if the probabilities are calibrated.

    Parameters
    ----------
    probs : tensor or array (N, K)
        Calibrated probabilities.
    costs : array (K, K) or (K, K + 1)
        `costs[true, decided]`: what it costs to decide for a class when another is true. The last of K + 1 columns is
        the cost of asking a person.
    classes : iterable of int, optional
        The label of each column. Default: 0 to K - 1.
    ask : int
        What stands for "ask a person" in the answer.

    Returns
    -------
    tensor or array of int (N,)
        A label, or `ask`, for each image.

    Examples
    --------
    Missing class 1 costs ten times as much as a false alarm; a person costs 2.

    >>> from tcil import decisions
    >>> decisions.cheapest_decision([[0.95, 0.05], [0.7, 0.3], [0.2, 0.8]], [[0, 1, 2], [10, 0, 2]]).tolist()
    [0, 1, 1]
    >>> decisions.cheapest_decision([[0.95, 0.05], [0.7, 0.3]], [[0, 9, 2], [10, 0, 2]]).tolist()
    [0, -1]
    """
    rows = as_probabilities(probs)
    names = class_names(rows.shape[1], classes)
    matrix = np.array(checked_costs(costs, rows.shape[1], asking=True))
    if isinstance(ask, bool) or not isinstance(ask, int | np.integer):
        raise invalid("ask", repr(ask), "a whole number")
    if not -(2**63) <= ask < 2**63:
        raise invalid("ask", f"{ask}", "a whole number of at most 64 bits")
    if matrix.shape[1] > matrix.shape[0] and ask in names:
        raise invalid("ask", f"{ask}, which is a class", "a number that is no label")
    labels = np.array([*names, ask])
    chosen = torch.from_numpy(labels[(rows @ matrix).argmin(axis=1)])
    return same_kind(chosen, probs)  # type: ignore[return-value]


def checked_costs(costs: Any, n_classes: int | None = None, *, asking: bool = False) -> Costs:
    """A cost matrix as plain numbers: finite, none below 0, not all the same as nothing."""
    matrix = as_tensor(costs, "costs").double().cpu().numpy()
    wide = (0, 1) if asking else (0,)
    if matrix.ndim != 2 or matrix.shape[1] - matrix.shape[0] not in wide or matrix.shape[0] < 2:
        shapes = "(K, K) or (K, K + 1)" if asking else "(K, K)"
        raise invalid("costs", f"shape {matrix.shape}", f"a matrix {shapes}: costs[true, decided]")
    if n_classes is not None and matrix.shape[0] != n_classes:
        raise invalid("costs", f"{matrix.shape[0]} rows", f"{n_classes}, one for each class")
    if not np.isfinite(matrix).all() or matrix.min() < 0 or matrix.max() <= 0:
        raise invalid("costs", "negative, infinite or all-zero costs", "costs of 0 or more, some above 0")
    return tuple(tuple(float(cost) for cost in row) for row in matrix)


def decide(probs: Tensor, top_k: int, costs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Columns that are decided for, (N, k), the likeliest first; and the score of each decision.

    The score is one minus the loss that the probabilities expect, as a share of the largest cost. Of equally good
    columns the first is taken, so that a rule decides in deployment as it did in calibration.
    """
    if costs is not None:
        expected = probs @ costs
        least = expected.min(dim=1, keepdim=True).values
        chosen = (expected <= least + ROUNDING * costs.max()).long().argmax(dim=1, keepdim=True)
        return chosen, 1.0 - least.squeeze(1) / costs.max()
    if top_k == 1:
        most, first = probs.max(dim=1, keepdim=True)
        return first, most.squeeze(1)
    ordered, order = torch.sort(probs, dim=1, descending=True, stable=True)
    return order[:, :top_k], ordered[:, :top_k].sum(dim=1).clamp(max=1.0)


class Action:
    """What is decided for an image, how sure it is, and what it loses: errors, errors among the top k, or costs.

    Losses are within [0, 1]; with costs, as shares of the largest.
    """

    def __init__(self, top_k: int, costs: Costs | None) -> None:
        self.top_k = top_k
        self.costs = None if costs is None else np.array(costs)
        self.unit = 1.0 if self.costs is None else float(self.costs.max())
        self.zero_one = self.costs is None or set(np.unique(self.costs)) <= {0.0, self.unit}

    def _decided(self, probs: Floats) -> tuple[Ints, Floats]:
        costs = None if self.costs is None else torch.from_numpy(self.costs)
        chosen, score = decide(torch.from_numpy(np.ascontiguousarray(probs)), self.top_k, costs)
        return chosen.numpy(), score.numpy()

    def decided(self, probs: Floats) -> Ints:
        """Columns that are decided for, (N, k), the likeliest first."""
        return self._decided(probs)[0]

    def score(self, probs: Floats) -> Floats:
        """One less the expected loss of what is decided."""
        return self._decided(probs)[1]

    def loss(self, probs: Floats, columns: Ints) -> Floats:
        """What is lost on each image, from 0 to 1."""
        decided = self.decided(probs)
        if self.costs is not None:
            return np.asarray(self.costs[columns, decided[:, 0]] / self.unit)
        return np.asarray((decided != columns[:, None]).all(axis=1).astype(np.float64))

    def decided_new(self, probs: Floats, new: Bools) -> Bools:
        """Whether the first decision is a new class."""
        own: Bools = new[self.decided(probs)[:, 0]]
        return own


class AcceptHead(nn.Module):
    """From probabilities to what is decided (labels) and whether it is accepted, for export."""

    def __init__(self, action: Action, classes: Sequence[int], new: Bools, thresholds: tuple[float, float]) -> None:
        super().__init__()
        self.top_k = action.top_k
        self.register_buffer("costs", None if action.costs is None else torch.from_numpy(action.costs))
        self.register_buffer("labels", torch.tensor(list(classes)))
        self.register_buffer("thresholds", torch.tensor(thresholds, dtype=torch.float64)[torch.from_numpy(new).long()])
        self.costs: Tensor | None
        self.labels: Tensor
        self.thresholds: Tensor

    def forward(self, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Labels (N,) or (N, k), and which images are accepted (N,)."""
        chosen, score = decide(probs, self.top_k, self.costs)
        accepted = score >= self.thresholds[chosen[:, 0]] - ROUNDING
        decided = self.labels[chosen]
        return (decided if self.top_k > 1 else decided[:, 0]), accepted
