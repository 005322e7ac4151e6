"""The task stream that settings describe, the memory that goes with it, and how unbalanced training is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from tcil.experiments.config.settings import RunSettings
from tcil.foundation.errors import invalid
from tcil.incremental.data.images import Dataset
from tcil.incremental.data.memory import Memory, UniformMemory
from tcil.incremental.data.stream import Task, TaskStream, class_order, equal_sizes
from tcil.incremental.learners.base import Learner
from tcil.incremental.learners.registry import learner_type

EXEMPLARS, RESERVE = 8, 9  # what a task's generators of these numbers draw; those before them belong to its stages


def make_stream(settings: RunSettings, dataset: Dataset) -> TaskStream:
    """The task stream that the settings describe."""
    order = class_order(dataset.n_classes, settings.class_order_seed)
    if settings.classes is not None and settings.classes > len(order):
        raise invalid("classes", f"{settings.classes}", f"at most {len(order)}, all of {dataset.name}")
    order = order[: settings.classes or len(order)]
    sizes = equal_sizes(len(order), settings.tasks) if isinstance(settings.tasks, int) else list(settings.tasks)
    if sum(sizes) > len(order):
        raise invalid("tasks", f"{sizes}", f"numbers of classes that sum to at most {len(order)}")
    if sizes[0] < 2:
        raise invalid("tasks", f"{sizes}", "at least two classes in the first task: with one there is nothing to tell")
    if not settings.memory:
        if learner_type(settings.learner).rehearses or settings.reserve:
            needs = "a reserve" if settings.reserve else settings.learner
            raise invalid("memory", "0", f"at least one exemplar for each class: {needs} needs exemplars")
    elif sum(sizes) > settings.memory:
        raise invalid("memory", f"{settings.memory}", f"at least one exemplar for each of {sum(sizes)} classes")
    elif share_of(settings, sum(sizes))[0] < 1:
        share = settings.memory // sum(sizes)
        raise invalid(
            "reserve",
            f"{settings.reserve:g} with a memory of {settings.memory}, {share} for each of {sum(sizes)} classes",
            "a reserve that leaves at least one exemplar for each class",
        )
    if settings.validation and settings.validation < max(sizes):
        raise invalid(
            "validation", f"{settings.validation}", f"at least one image for each of {max(sizes)} new classes"
        )
    seen = list(itertools.accumulate(sizes))
    return TaskStream(
        dataset.train.labels,
        order=order,
        sizes=sizes,
        valid_per_class=[settings.validation // size for size in sizes],
        pool_per_class=[settings.validation_pool // size for size in sizes],
        seed=settings.validation_seed,
        reserve_per_class=[share_of(settings, count)[1] for count in seen],
        returning=settings.returning,
        smallest=settings.smallest_class,
    )


def share_of(settings: RunSettings, seen: int) -> tuple[int, int]:
    """Exemplars and reserved images of each class, once `seen` classes have been seen."""
    share = settings.memory // seen
    if settings.reserve >= 1:
        held = int(settings.reserve)
    else:
        held = max(1, round(settings.reserve * share)) if settings.reserve else 0
    return share - held, held


def check_stages(learner: str, stages: Sequence[str]) -> None:
    """Refuse a task with too many stages: their random numbers would be those of the memory."""
    if len(stages) > EXEMPLARS:
        raise invalid("learner", f"{learner!r} with {len(stages)} stages in a task", f"at most {EXEMPLARS} stages")


def task_generator(settings: RunSettings, task: int, purpose: int) -> torch.Generator:
    """Every task and purpose has a stream of its own: nothing depends on what was drawn before."""
    return torch.Generator().manual_seed((settings.seed * 1000 + task) * 10 + purpose)


def update_memory(settings: RunSettings, stream: TaskStream, task: Task, memory: Memory) -> Memory:
    """The paper's memory after a task; with a reserve, that share of it is held-out rows instead of exemplars."""
    seen = task.columns.stop
    if not settings.memory:
        return Memory()
    kept, held = share_of(settings, seen)

    def by_class(rows: Tensor) -> dict[int, Tensor]:
        return {column: rows[stream.columns[rows] == column] for column in task.columns}

    def chosen(share: int, before: dict[int, Tensor], rows: Tensor, purpose: int) -> dict[int, Tensor]:
        generator = task_generator(settings, task.index, purpose)
        return UniformMemory(share * seen).update(before, by_class(rows), generator)

    exemplars = chosen(kept, memory.exemplars, task.train, EXEMPLARS)
    reserve = chosen(held, memory.reserve, task.reserve, RESERVE) if held else {}
    check_indices(stream, task.index, exemplars, reserve)
    return Memory(exemplars, reserve, rehearsed=len(memory.rows))


def check_indices(stream: TaskStream, index: int, exemplars: dict[int, Tensor], reserve: dict[int, Tensor]) -> None:
    """What must hold of every split, checked on the rows themselves."""
    tasks = [stream[i] for i in range(index + 1)]
    trained = set(torch.cat([task.train for task in tasks]).tolist())
    held = set(torch.cat([torch.cat([task.pool, task.reserve]) for task in tasks]).tolist())
    kept = {int(row) for rows in exemplars.values() for row in rows}
    reserved = {int(row) for rows in reserve.values() for row in rows}
    if trained & held or not kept <= trained or not reserved <= held or kept & held:
        raise RuntimeError(f"task {index}: training, validation and memory rows are not apart")
    if set(stream.columns[stream[index].valid].tolist()) - set(stream[index].current):
        raise RuntimeError(f"task {index}: validation rows of old classes")


def imbalance(stream: TaskStream, task: Task, memory: Memory, learner: Learner) -> float | None:
    """How often training presents a new class for each time it presents an old one; None where no class is old.

    Classes that came back count as new. A learner that does not rehearse has seen old classes in earlier tasks only.
    """
    if len(task.current) == task.columns.stop:
        return None
    if not learner.rehearses and not task.returned:
        return 1.0
    if not task.returned:
        whole = (len(task.train) / len(task.columns)) / (memory.rehearsed / task.columns.start)
        return whole / learner.replays(len(task.train), memory.rehearsed)
    seen, current = task.columns.stop, torch.tensor(task.current)
    presented = torch.bincount(stream.columns[task.train], minlength=seen).double()
    if learner.rehearses:
        share = memory.rehearsed / task.columns.start
        presented[: task.columns.start] += share * learner.replays(len(task.train), memory.rehearsed)
    else:  # what was seen of a class in all tasks
        before = [stream.columns[stream[i].train] for i in range(task.index)]
        presented += torch.bincount(torch.cat(before), minlength=seen)
    is_new = torch.zeros(seen, dtype=torch.bool)
    is_new[current] = True
    return float(presented[is_new].mean() / presented[~is_new].mean())
