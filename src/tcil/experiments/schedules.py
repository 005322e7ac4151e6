"""How the paper's experiments are run: as printed, short on real images, or small enough for a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tcil.calibration.errors import unknown_name
from tcil.experiments.settings import RunSettings, build

LEARNERS = ("er", "eeil", "wa", "der")


@dataclass(frozen=True)
class Edition:
    """One way of running an experiment of the paper.

    `presets` says what stands for each of the paper's datasets; a dataset that is not named is not run. Sizes of the
    memory and of the validation set that an experiment varies are multiplied by `memory_scale` and
    `validation_scale`, and then nothing more is held out. `base_only`: only the main experiments, without what varies
    sizes or tasks.
    """

    name: str
    detail: str
    seeds: tuple[int, ...]
    presets: Mapping[str, Mapping[str, Any]]
    learners: tuple[str, ...] = LEARNERS
    many_tasks: int | tuple[int, ...] = 20
    memory_scale: float = 1.0
    validation_scale: float = 1.0
    base_only: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The name, and what it stands for."""
        return f"{self.name} ({self.detail})"

    def settings(
        self,
        dataset: str,
        learner: str,
        seed: int,
        *,
        many_tasks: bool = False,
        memory: int | None = None,
        validation: int | None = None,
        reserve: float | None = None,
    ) -> RunSettings | None:
        """The run that stands for one of the paper's; None where this edition has none."""
        varied = many_tasks or memory is not None or validation is not None or reserve is not None
        if dataset not in self.presets or learner not in self.learners or (varied and self.base_only):
            return None
        values: dict[str, Any] = {**self.presets[dataset], "learner": learner, "seed": seed}
        if many_tasks:
            values["tasks"] = self.many_tasks
        if memory is not None:
            values["memory"] = round(memory * self.memory_scale)
        if validation is not None:
            values["validation"] = values["validation_pool"] = round(validation * self.validation_scale)
        if reserve is not None:
            values["reserve"] = reserve
        return build({**values, **self.changes})


SCHEDULES: dict[str, tuple[Edition, ...]] = {
    "mini": (
        Edition(
            "noisy digits", "10 classes, 30 epochs", (1,), {"cifar100": {"preset": "digits"}},
            many_tasks=(2, 1, 1, 1, 1, 1, 1, 1, 1), memory_scale=0.05, validation_scale=0.08,
        ),
    ),
    "short": (
        Edition(
            "cifar100-mini", "20 classes of CIFAR-100, small ResNet, 30 epochs", (1, 2, 3),
            {"cifar100": {"preset": "cifar100-mini"}}, many_tasks=10, memory_scale=0.2, validation_scale=0.2,
        ),
        Edition(
            "CIFAR-100 at full size", "ResNet-32, 10 epochs", (1,), {"cifar100": {"preset": "cifar100", "epochs": 10}},
            learners=("er",), base_only=True,
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
    schedule: str, seeds: Sequence[int] | None = None, changes: Mapping[str, Any] | None = None
) -> list[Edition]:
    """The editions of a schedule, with other seeds or settings where these are given.

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
        )
        for edition in SCHEDULES[schedule]
    ]
