"""The memory: which exemplars of old classes are kept."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tcil.foundation.errors import invalid


@dataclass(frozen=True)
class UniformMemory:
    """The paper's policy: floor(capacity / classes seen) exemplars per class, uniformly at random.

    Exemplars of new classes are drawn from the training rows, those of old classes from the stored ones.

    >>> import torch
    >>> from tcil.incremental.data.memory import UniformMemory
    >>> generator = torch.Generator().manual_seed(0)
    >>> policy = UniformMemory(capacity=10)
    >>> first = policy.update({}, {0: torch.arange(50), 1: torch.arange(50, 99)}, generator)
    >>> [len(rows) for rows in first.values()]
    [5, 5]
    >>> second = policy.update(first, {2: torch.arange(100, 150)}, generator)
    >>> [len(rows) for rows in second.values()], set(second[0].tolist()) <= set(first[0].tolist())
    ([3, 3, 3], True)
    """

    capacity: int

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise invalid("memory", f"{self.capacity}", "at least one exemplar")

    def update(self, kept: dict[int, Tensor], new: dict[int, Tensor], generator: torch.Generator) -> dict[int, Tensor]:
        """The rows to keep for each class (by column), from those kept so far and the new task's training rows."""
        share = self.capacity // (len(kept) + len(new))
        if share < 1:
            raise invalid(
                "memory", f"{self.capacity} exemplars", f"at least one for each of {len(kept) + len(new)} classes"
            )
        chosen = {}
        for column, rows in sorted({**kept, **new}.items()):
            chosen[column] = rows[torch.randperm(len(rows), generator=generator)[:share]].sort().values
        return chosen


@dataclass
class Memory:
    """Exemplar rows by class, and the reserve, which is never used for training.

    `rehearsed` is the number of exemplars while the last task was trained.

    >>> import torch
    >>> from tcil.incremental.data.memory import Memory
    >>> Memory({0: torch.tensor([3, 4]), 1: torch.tensor([9])}).rows.tolist()
    [3, 4, 9]
    """

    exemplars: dict[int, Tensor] = field(default_factory=dict)
    reserve: dict[int, Tensor] = field(default_factory=dict)
    rehearsed: int = 0

    @property
    def rows(self) -> Tensor:
        """All exemplar rows, class by class."""
        return _joined(self.exemplars)

    @property
    def reserve_rows(self) -> Tensor:
        """All reserved rows, class by class."""
        return _joined(self.reserve)


def _joined(by_class: dict[int, Tensor]) -> Tensor:
    return torch.cat([by_class[c] for c in sorted(by_class)]) if by_class else torch.zeros(0, dtype=torch.long)
