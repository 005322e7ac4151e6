"""Schedules of the paper's experiments: as printed, with fewer epochs, with smaller networks, or for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tcil.experiments.config.settings import RunSettings, build
from tcil.foundation.errors import unknown_name

LEARNERS = ("er", "eeil", "wa", "der")


@dataclass(frozen=True)
class Variation:
    """What an experiment of the paper varies, in the paper's numbers; None for what does not vary."""

    many_tasks: bool = False
    memory: int | None = None
    validation: int | None = None
    reserve: float | None = None


MAIN = Variation()  # the main experiments vary nothing


@dataclass(frozen=True)
class Edition:
    """One way of running an experiment of the paper.

    `presets` are the settings for each of the paper's datasets; other datasets are not run. If an experiment varies the
    sizes of the memory or the validation set, they are multiplied by `memory_scale` and `validation_scale`, and only
    the validation set is held out. `variations`: only these experiments (None: all). `first_tasks`: the number of tasks
    to run for a learner; others run all. `own_order`: every seed has its own class order and split. `full_data`:
    whether networks are trained a second time on all the data, for the Vanilla row as in the paper. `n_analysed`: how
    many seeds, from the first, have what figures need besides the tables (None: all). `left_out` describes what the
    schedule does not run.
    """

    name: str
    detail: str
    seeds: tuple[int, ...]
    presets: Mapping[str, Mapping[str, object]]
    learners: tuple[str, ...] = LEARNERS
    many_tasks: int | tuple[int, ...] = 20
    memory_scale: float = 1.0
    validation_scale: float = 1.0
    variations: tuple[Variation, ...] | None = None
    first_tasks: Mapping[str, int] = field(default_factory=dict)
    own_order: bool = False
    full_data: bool = True
    n_analysed: int | None = None
    left_out: str = ""
    changes: Mapping[str, object] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The name and its details."""
        return f"{self.name} ({self.detail})"

    def settings(self, dataset: str, learner: str, seed: int, variation: Variation = MAIN) -> RunSettings | None:
        """The settings for one run of the paper; None if this edition does not include it."""
        if dataset not in self.presets or learner not in self.learners:
            return None
        if self.variations is not None and variation not in self.variations:
            return None
        values: dict[str, object] = {**self.presets[dataset], "learner": learner, "seed": seed}
        if self.own_order:
            values |= {"class_order_seed": seed, "validation_seed": seed}
        if variation.many_tasks:
            values["tasks"] = self.many_tasks
        if variation.memory is not None:
            values["memory"] = round(variation.memory * self.memory_scale)
        if variation.validation is not None:
            values["validation"] = values["validation_pool"] = round(variation.validation * self.validation_scale)
        if variation.reserve is not None:
            values["reserve"] = variation.reserve
        return build({**values, **self.changes})


# How each task is trained in `compact`. The weight decay is chosen so that its sum over the steps of a task,
# lr * weight_decay / (1 - momentum), is the paper's. With 20 epochs: {"epochs": 20, "weight_decay": 1e-3, ...}.
COMPACT = {"epochs": 30, "weight_decay": 6.7e-4, "batch_size": 64, "crop": 0}
# The number of tasks for these learners in `compact`; `--tasks-until 10` completes them.
COMPACT_FIRST_TASKS = {"eeil": 5, "wa": 5, "der": 5}
# How each task is trained in `small`: as in the preset cifar100-mini, with weight decay by the same rule. It is half as
# large for Tiny-ImageNet, where the paper's batches are twice as large.
SMALL = {
    "network": "small_resnet", "epochs": 30, "lr": 0.05, "batch_size": 32, "weight_decay": 6.7e-4, "crop": 0,
}  # fmt: skip
SMALL_TINY = {**SMALL, "weight_decay": 3.3e-4, "image_side": 32}
_SIZES_LEFT_OUT = "The sizes of the memory and of the validation set and the reserve are varied in 'short' only."
_NO_SECOND = "Networks are not trained a second time on all the data: Vanilla is without the validation images."
_SMALL_LEFT_OUT = (
    f"{_SIZES_LEFT_OUT} Tiny-ImageNet in 20 tasks is left out, and so are EEIL and DER in 20. {_NO_SECOND}"
)

SCHEDULES: dict[str, tuple[Edition, ...]] = {
    "mini": (
        Edition(
            "letters", "10 classes, 20 epochs", (1,),
            {"cifar100": {
                "preset": "letters", "classes": 10, "train_per_class": 80, "test_per_class": 60, "memory": 100,
                "validation": 40, "validation_pool": 40,
            }},
            many_tasks=(2, 1, 1, 1, 1, 1, 1, 1, 1), memory_scale=0.05, validation_scale=0.08,
        ),
    ),
    "short": (
        Edition(
            "cifar100-mini", "20 classes of CIFAR-100, small ResNet, 30 epochs", (1, 2, 3),
            {"cifar100": {"preset": "cifar100-mini"}}, many_tasks=10, memory_scale=0.2, validation_scale=0.2,
        ),
        Edition(
            "CIFAR-100 at full size", "ResNet-32, 10 epochs", (1,),
            {"cifar100": {"preset": "cifar100", "epochs": 10, "weight_decay": 4e-3}},
            learners=("er",), variations=(MAIN,),
        ),
    ),
    # The schedule of version 0.2.0, used for the stored runs in docs/results-short.md.
    "short-0.2": (
        Edition(
            "cifar100-mini", "20 classes of CIFAR-100, small ResNet, 30 epochs", (1, 2, 3),
            {"cifar100": {"preset": "cifar100-mini-0.2"}}, many_tasks=10, memory_scale=0.2, validation_scale=0.2,
        ),
        Edition(
            "CIFAR-100 at full size", "ResNet-32, 10 epochs", (1,), {"cifar100": {"preset": "cifar100", "epochs": 10}},
            learners=("er",), variations=(MAIN,),
        ),
    ),
    "compact": (
        Edition(
            "compact", f"ResNet-32, {COMPACT['epochs']} epochs, no crops", (1,),
            {"cifar100": {"preset": "cifar100", **COMPACT}}, variations=(MAIN,), first_tasks=COMPACT_FIRST_TASKS,
            full_data=False,
            left_out=f"{_SIZES_LEFT_OUT} Tiny-ImageNet and 20 tasks are in 'small'. {_NO_SECOND}",
        ),
        Edition(
            "compact, CIFAR-10", f"ResNet-32, {COMPACT['epochs']} epochs, no crops", (1,),
            {"cifar10": {"preset": "cifar10", **COMPACT}}, learners=("er",), variations=(MAIN,), full_data=False,
        ),
    ),
    "small": (
        Edition(
            "small", f"small ResNet, {SMALL['epochs']} epochs, no crops, a class order for each seed", (1, 2, 3),
            {"cifar100": {"preset": "cifar100", **SMALL}}, variations=(MAIN,), own_order=True, full_data=False,
            n_analysed=1, left_out=_SMALL_LEFT_OUT,
        ),
        Edition(
            "small, one seed", f"small ResNet, images of 32x32, {SMALL['epochs']} epochs, no crops", (1,),
            {
                "cifar10": {"preset": "cifar10", **SMALL},
                "tiny-imagenet": {"preset": "tiny-imagenet", **SMALL_TINY},
            },
            variations=(MAIN,), own_order=True, full_data=False,
        ),
        Edition(
            "small, 20 tasks", f"small ResNet, {SMALL['epochs']} epochs, no crops", (1,),
            {"cifar100": {"preset": "cifar100", **SMALL}}, learners=("er", "wa"),
            variations=(Variation(many_tasks=True),), own_order=True, full_data=False,
        ),
    ),
    "paper": (
        Edition(
            "as printed", "200 epochs", (1, 2, 3, 4, 5),
            {name: {"preset": name} for name in ("cifar10", "cifar100", "tiny-imagenet")},
        ),
    ),
}  # fmt: skip


def editions(
    schedule: str,
    seeds: Sequence[int] | None = None,
    changes: Mapping[str, object] | None = None,
    full_data: bool | None = None,
) -> list[Edition]:
    """The editions of a schedule, optionally with other seeds or settings, and with or without second trainings.

    >>> [edition.seeds for edition in editions("short")]
    [(1, 2, 3), (1,)]
    """
    if schedule not in SCHEDULES:
        raise unknown_name("schedule", schedule, SCHEDULES)
    more = "".join(f"; {key}={value}" for key, value in (changes or {}).items())
    return [
        replace(
            edition,
            seeds=tuple(seeds) if seeds else edition.seeds,
            changes=dict(changes or {}),
            detail=edition.detail + more,
            full_data=edition.full_data if full_data is None else full_data,
            left_out=edition.left_out.replace(_NO_SECOND, "").strip() if full_data else edition.left_out,
        )
        for edition in SCHEDULES[schedule]
    ]
