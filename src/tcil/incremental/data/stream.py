"""The task stream: the classes of each task, and the split of their images into training and held-out data."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tcil.foundation.errors import invalid, shortened


@dataclass(frozen=True, eq=False)
class Task:
    """One task: its classes as logit columns, and row indices into the training set.

    `pool` is held out of training and in random order within each class; `valid` is its first part. `reserve` is held
    out too, for the comparison with old-task validation data. Tasks are numbered from 0.

    `returned` are the columns of old classes that occur again, with new images in `train` and in the held-out parts.
    """

    index: int
    columns: range
    train: Tensor
    valid: Tensor
    pool: Tensor
    reserve: Tensor
    returned: tuple[int, ...] = ()

    @property
    def current(self) -> list[int]:
        """The columns of all classes with images in this task, new or returned."""
        return [*self.columns, *self.returned]


class TaskStream:
    """Splits a labelled training set into tasks of new classes.

    `order` lists the class labels in the order of the tasks: column i of the logits is class `order[i]`. The rows of
    each class are split at random by `seed`: `valid_per_class` for validation out of a pool of `pool_per_class`
    held-out rows, `reserve_per_class` for the old-task reserve, and the rest for training. Each of these is one number,
    or one number per task.

    `returning` is the number of old classes that occur again in each later task, drawn by `seed`, each class at most
    once. Half of the training rows of such a class are kept for the later task; as many of them as for a new class are
    held out.

    With `smallest` below 1 the classes of a task have unequal numbers of training rows: the first keeps all of them,
    the last this share, and those between fall geometrically. Held-out rows stay as they are.

    >>> import torch
    >>> from tcil.incremental.data.stream import TaskStream
    >>> labels = torch.arange(60) % 6
    >>> stream = TaskStream(labels, order=[5, 4, 3, 2, 1, 0], sizes=[2, 4], valid_per_class=3, pool_per_class=4, seed=0)
    >>> [(task.columns, len(task.train), len(task.valid), len(task.pool)) for task in stream]
    [(range(0, 2), 12, 6, 8), (range(2, 6), 24, 12, 16)]
    >>> sorted(set(labels[stream[0].train].tolist()))
    [4, 5]
    """

    def __init__(
        self,
        labels: Tensor,
        *,
        order: Sequence[int],
        sizes: Sequence[int],
        valid_per_class: int | Sequence[int],
        pool_per_class: int | Sequence[int],
        seed: int,
        reserve_per_class: int | Sequence[int] = 0,
        returning: int = 0,
        smallest: float = 1.0,
    ) -> None:
        if len(set(order)) != len(order):
            raise invalid("order", shortened(order), "distinct classes")
        if missing := sorted(set(order) - set(labels.unique().tolist())):
            raise invalid("dataset", f"no training image of the classes {shortened(missing)}", "images of every class")
        if not sizes or min(sizes) < 1 or sum(sizes) > len(order):
            raise invalid("sizes", f"{list(sizes)}", f"positive task sizes that sum to at most {len(order)} classes")
        if not 0 < smallest <= 1:
            raise invalid("smallest", f"{smallest}", "a share above 0 and at most 1")
        valids = _each(valid_per_class, len(sizes), "valid_per_class")
        pools = _each(pool_per_class, len(sizes), "pool_per_class")
        reserves = _each(reserve_per_class, len(sizes), "reserve_per_class")
        for valid, pool in zip(valids, pools, strict=True):
            if not 0 <= valid <= pool:
                raise invalid("valid_per_class", f"{valid}", f"0 to {pool}, the held-out pool")
        self.order = tuple(order[: sum(sizes)])
        self.columns = self.column_of(labels)
        generator = torch.Generator().manual_seed(seed)
        self._tasks: list[Task] = []
        start = 0
        for index, size in enumerate(sizes):
            columns = range(start, start + size)
            parts: dict[str, list[Tensor]] = {"train": [], "valid": [], "pool": [], "reserve": []}
            for column in columns:
                rows = (self.columns == column).nonzero().squeeze(1)
                rows = rows[torch.randperm(len(rows), generator=generator)]
                held = pools[index] + reserves[index]
                if len(rows) <= held:
                    raise invalid(
                        "validation",
                        f"{held} held-out images per class",
                        f"fewer than the {len(rows)} training images of class {self.order[column]}",
                        "Lower validation and validation_pool.",
                    )
                parts["valid"].append(rows[: valids[index]])
                parts["pool"].append(rows[: pools[index]])
                parts["reserve"].append(rows[pools[index] : held])
                place = (column - start) / max(size - 1, 1)
                kept = max(1, round((len(rows) - held) * smallest**place))
                parts["train"].append(rows[held : held + kept].sort().values)
            split = [torch.cat(rows) for rows in parts.values()]
            self._tasks.append(Task(index, columns, split[0], split[1], split[2], split[3]))
            start += size
        if returning:
            self._bring_back(returning, valids, pools, seed)

    def _bring_back(self, returning: int, valids: Sequence[int], pools: Sequence[int], seed: int) -> None:
        """Move half the training rows of some old classes to later tasks."""
        generator = torch.Generator().manual_seed(seed)
        waiting: list[int] = []
        for index, task in enumerate(self._tasks):
            order = torch.randperm(len(waiting), generator=generator)[:returning].tolist()
            returned = tuple(sorted(waiting[place] for place in order))
            waiting = [column for column in waiting if column not in returned] + list(task.columns)
            parts: dict[str, list[Tensor]] = {"train": [task.train], "valid": [task.valid], "pool": [task.pool]}
            for column in returned:
                later = self._second_half(column, generator)
                if len(later) <= pools[index]:
                    given = f"{returning}, with {len(later)} images left of class {self.order[column]}"
                    raise invalid("returning", given, f"more than {pools[index]}, which are held out")
                for name, rows in (
                    ("valid", later[: valids[index]]), ("pool", later[: pools[index]]), ("train", later[pools[index] :])
                ):  # fmt: skip
                    parts[name].append(rows)
            train, valid, pool = (torch.cat(parts[name]) for name in ("train", "valid", "pool"))
            self._tasks[index] = replace(self._tasks[index], train=train, valid=valid, pool=pool, returned=returned)

    def _second_half(self, column: int, generator: torch.Generator) -> Tensor:
        """Half the rows of a class, in random order, removed from the task that had them."""
        home = next(index for index, task in enumerate(self._tasks) if column in task.columns)
        task = self._tasks[home]
        rows = (self.columns[task.train] == column).nonzero().squeeze(1)
        moved = rows[torch.randperm(len(rows), generator=generator)[: len(rows) // 2]]
        stays = torch.ones(len(task.train), dtype=torch.bool)
        stays[moved] = False
        self._tasks[home] = replace(task, train=task.train[stays])
        return task.train[moved]

    def column_of(self, labels: Tensor) -> Tensor:
        """The logit column of each label; -1 for classes that no task has."""
        known = torch.tensor(self.order)
        column = torch.full((int(torch.cat([known, labels]).max()) + 1,), -1)
        column[known] = torch.arange(len(known))
        return column[labels]

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Task:
        return self._tasks[index]

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)

    def first(self, count: int) -> TaskStream:
        """The first `count` tasks of this stream; columns, rows and class order are unchanged."""
        cut = copy.copy(self)
        cut._tasks = self._tasks[:count]
        return cut

    def redrawn(self, task: Task, generator: torch.Generator) -> Tensor:
        """Another validation set of the same size, drawn from a task's held-out pool."""
        share = len(task.valid) // len(task.current)
        chosen = []
        for column in task.current:
            rows = task.pool[self.columns[task.pool] == column]
            chosen.append(rows[torch.randperm(len(rows), generator=generator)[:share]])
        return torch.cat(chosen)

    def seen(self, index: int) -> int:
        """The number of classes seen after task `index`."""
        return self._tasks[index].columns.stop


def _each(number: int | Sequence[int], count: int, name: str) -> tuple[int, ...]:
    """One number for each task."""
    numbers = (number,) * count if isinstance(number, int) else tuple(number)
    if len(numbers) != count:
        raise invalid(name, f"{len(numbers)} numbers", f"{count}, one for each task")
    return numbers


def class_order(n_classes: int, seed: int | None) -> list[int]:
    """The natural order without a seed, else a permutation that depends only on the seed.

    >>> from tcil.incremental.data.stream import class_order
    >>> class_order(5, None), sorted(class_order(5, seed=1))
    ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
    """
    if seed is None:
        return list(range(n_classes))
    return torch.randperm(n_classes, generator=torch.Generator().manual_seed(seed)).tolist()


def equal_sizes(n_classes: int, n_tasks: int) -> list[int]:
    """Task sizes that differ by at most one; the first tasks are the larger ones.

    >>> from tcil.incremental.data.stream import equal_sizes
    >>> equal_sizes(10, 5), equal_sizes(10, 4)
    ([2, 2, 2, 2, 2], [3, 3, 2, 2])
    """
    if not 1 <= n_tasks <= n_classes:
        raise invalid("tasks", f"{n_tasks}", f"1 to {n_classes}, the number of classes")
    small, more = divmod(n_classes, n_tasks)
    return [small + (i < more) for i in range(n_tasks)]
