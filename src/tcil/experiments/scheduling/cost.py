"""What runs cost, counted before they start, and how much of it is left while they are done.

The unit is an image pass: one image through a network in training, forward and backward. Each learner says how many a
task takes (`Learner.passes`). Evaluation and calibration are not counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from tcil.experiments.config.settings import RunSettings
from tcil.experiments.runs.store import RunFolder
from tcil.experiments.runs.tasks import share_of
from tcil.experiments.scheduling.job import Job
from tcil.experiments.scheduling.status import Status
from tcil.foundation.errors import invalid
from tcil.incremental.arithmetic import Arithmetic, Precision, death_by
from tcil.incremental.data.images import Dataset, ImageSet
from tcil.incremental.data.layout import Layout
from tcil.incremental.data.stream import equal_sizes
from tcil.incremental.learners.base import TaskSize
from tcil.incremental.learners.registry import learner_options, learner_type
from tcil.incremental.networks import network_factory
from tcil.incremental.placement import alone_seconds, step_seconds
from tcil.incremental.pretrained.networks import input_shape, is_pretrained

LARGEST_BATCH, MOST_SECONDS = 64, 5.0  # of a measurement, about: an image of a larger batch takes as long


@dataclass(frozen=True)
class _Released:
    """A dataset as it was released, without its images: enough to count and to weigh runs by."""

    classes: int
    per_class: int  # training images
    channels: int
    side: int
    padding: int = 4
    flip: bool = True


_UNKNOWN = _Released(0, 100, 3, 32)
_RELEASED = {
    "digits": _Released(10, 90, 1, 8, 1, flip=False), "noisy-digits": _Released(10, 90, 1, 8, 0, flip=False),
    "cifar10": _Released(10, 5000, 3, 32), "cifar100": _Released(100, 500, 3, 32),
    "tiny-imagenet": _Released(200, 500, 3, 64), "letters": _Released(20, 220, 1, 16, 0, flip=False),
    "letters-large": _Released(40, 220, 1, 16, 0, flip=False),
}  # fmt: skip


@dataclass(frozen=True)
class Speed:
    """Images that a machine trains on in a second, by network, and where the numbers come from."""

    where: str
    images_per_second: Mapping[str, float]
    source: str

    def seconds(self, network: str, passes: float) -> float:
        """How long this number of image passes takes; NaN for a network of unknown speed."""
        return passes / self.images_per_second.get(network, float("nan"))

    @property
    def told(self) -> str:
        """The numbers in words."""
        return ", ".join(f"{name} {number:,.0f}" for name, number in self.images_per_second.items())


A100 = Speed(
    "one NVIDIA A100",
    {"resnet32": 10_000, "resnet18": 2_000},
    "assumed for PyTorch in eager mode with TF32 and one run at a time: ResNet-32 on 32x32 images in batches of 128 is"
    " limited by the start of its small kernels, ResNet-18 on 64x64 images in batches of 256 by arithmetic. Not"
    " measured: replace it with --images-per-second",
)


def given_speed(entries: Sequence[str]) -> Speed:
    """What `--images-per-second NETWORK=NUMBER` says.

    >>> given_speed(["resnet32=25000"]).told
    'resnet32 25,000'
    """
    speeds = {}
    for entry in entries:
        name, _, number = entry.partition("=")
        try:
            speeds[name] = float(number)
        except ValueError:
            speeds[name] = 0.0
        if not 0 < speeds[name] < float("inf"):
            raise invalid("images-per-second", repr(entry), "NETWORK=NUMBER, such as resnet32=25000")
        network_factory(name)
    return Speed("a machine of the speed given", speeds, "as given")


@dataclass(frozen=True)
class Passes:
    """Image passes of one training, by task and by stage."""

    tasks: tuple[Mapping[str, float], ...]

    @property
    def total(self) -> float:
        """Of all tasks."""
        return sum(sum(stages.values()) for stages in self.tasks)

    def first(self, count: int | None) -> Passes:
        """Of the first `count` tasks; of all, for None."""
        return Passes(self.tasks[:count])

    def after(self, count: int) -> float:
        """What is left after the first `count` tasks."""
        return Passes(self.tasks[count:]).total

    def before(self, task: int, stage: str, share: float) -> float:
        """What has been done when a stage of a task is done to this share; a stage that costs nothing is the last."""
        done = self.first(task).total
        for name, passes in (self.tasks[task] if task < len(self.tasks) else {}).items():
            if name == stage:
                return done + share * passes
            done += passes
        return done


def count_passes(
    settings: RunSettings, sizes: Sequence[int], rows: Sequence[int], dataset: Dataset | None = None
) -> Passes:
    """Image passes of a training, from the new classes and training images of each task, as its learner counts them.

    The dataset, or what is known of it, says whether its images are cropped and mirrored.

    >>> from tcil.experiments.config.settings import build
    >>> er = build({"preset": "cifar100", "tasks": 2, "classes": 20, "memory": 200, "epochs": 10})
    >>> count_passes(er, [10, 10], [4900, 4900]).tasks
    ({'train': 49000.0}, {'train': 51000.0})
    """
    kind, options = learner_type(settings.learner), learner_options(settings.learner, settings.learner_options)
    known = dataset or _RELEASED.get(settings.dataset, _UNKNOWN)
    changes = not is_pretrained(settings.network)  # features of a backbone are neither cropped nor mirrored
    crops = changes and (known.padding if settings.crop is None else settings.crop) != 0
    mirrors = changes and known.flip
    tasks, seen = [], 0
    for task, (classes, new) in enumerate(zip(sizes, rows, strict=True)):
        share = share_of(settings, seen)[0] if seen else 0
        size = TaskSize(task, new, share * seen, share * (seen + classes), settings.epochs, crops, mirrors)
        tasks.append(kind.passes(size, options))
        seen += classes
    return Passes(tuple(tasks))


def passes_as_released(settings: RunSettings) -> Passes:
    """The same without reading the data; a dataset that is not known counts as one of 100 images per class."""
    given = settings.tasks
    known = _RELEASED.get(settings.dataset, _UNKNOWN)
    classes = known.classes or (2 * given if isinstance(given, int) else sum(given))
    images = settings.train_per_class or known.per_class
    sizes = equal_sizes(settings.classes or classes, given) if isinstance(given, int) else list(given)
    return count_passes(settings, sizes, [max(1, images * size - settings.validation_pool) for size in sizes])


def released_shape(settings: RunSettings) -> tuple[int, int, int] | None:
    """The shape of an image of a known dataset, without reading it; None for others."""
    known = _RELEASED.get(settings.dataset)
    if known is None:
        return None
    side = settings.image_side or known.side
    return known.channels, side, side


def as_released(settings: RunSettings) -> Dataset:
    """A known dataset that is not there, with its labels and black images, in which settings can be checked."""
    known, shape = _RELEASED[settings.dataset], released_shape(settings)
    assert shape is not None

    def part(per_class: int) -> ImageSet:
        labels = torch.arange(known.classes).repeat_interleave(per_class)
        return ImageSet(torch.zeros(1, *shape, dtype=torch.uint8).expand(len(labels), *shape), labels)

    names, one = tuple(map(str, range(known.classes))), (1.0,) * known.channels
    return Dataset(settings.dataset, part(known.per_class), part(1), names, one, one, known.padding, known.flip)


@cache
def seconds_per_image(network: str, batch_size: int, shape: tuple[int, ...], precision: str = "fp32") -> float:
    """One training step of the network, measured: the best of three, or of fewer where they take long.

    All threads of a process wait for the slowest, so that on a busy machine a step takes many times as long. There the
    processor time of one thread counts: what a run takes that has a core of its own. NaN where this processor cannot.
    """
    layout, few, make = Layout.CHANNELS_LAST, 4, network_factory(network)
    shape = input_shape(make) or shape
    model = make(10).to(memory_format=layout.form)  # type: ignore[call-overload]
    arithmetic = Arithmetic(Precision.parse(precision, "precision"))
    if death_by(arithmetic.precision):
        return float("nan")  # on another device it may train
    warm = min(
        step_seconds(model, shape, layout, few, arithmetic) for _ in range(2)
    )  # the first step of a process takes longer
    batch_size = min(batch_size, LARGEST_BATCH, max(few, int(few * MOST_SECONDS / 6 / max(warm, 1e-6))))
    best, started = float("inf"), time.perf_counter()
    for _ in range(3):
        # The clock of a thread may be too coarse for a small network, and then shows no time at all.
        took = [measure(model, shape, layout, batch_size, arithmetic) for measure in (step_seconds, alone_seconds)]
        best = min([best, *(seconds for seconds in took if seconds > 0)])
        if time.perf_counter() - started > MOST_SECONDS:
            break
    return best / batch_size


@dataclass(frozen=True)
class _JobCost:
    """What a job costs, its second training on all the data included, and how much of it was there at the start."""

    own: Passes
    twin: Passes
    weight: float
    found: float = field(default=0.0)

    @property
    def total(self) -> float:
        return self.weight * (self.own.total + self.twin.total)

    def done(self, status: Status | None) -> float:
        """How much of it is done, according to the run's status."""
        if status is None or not status.phase:
            return self.found
        name = status.phase.removeprefix("all data, ")
        before, passes = (self.own.total, self.twin) if name != status.phase else (0.0, self.own)
        if name == "analyse":
            return self.total
        share = status.done / status.total if status.total else 0.0
        return max(self.found, self.weight * (before + passes.before(status.task, name, share)))


@dataclass
class _Pace:
    """What was done of a job between two moments, from which its speed is measured."""

    since: float
    at_first: float
    until: float
    by_then: float


class Outlook:
    """How long all the runs of a sweep will take together, from the speed at which they have been done so far.

    A run is measured from its first progress on, because starting a process and reading data say nothing about the
    speed of training; a finished run, from its start to its end. The time left is given once the measurement covers
    `LEAST_SECONDS` of training and `LEAST_SHARE` of the work. `left` looks at all runs; after it, `left_of` tells
    the time left of one at its own speed.
    """

    LEAST_SECONDS, LEAST_SHARE = 10.0, 0.01

    def __init__(self, jobs: Sequence[Job], now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        weights = _weights([job.settings for job in jobs])
        self._costs = {job: _cost(job, weight) for job, weight in zip(jobs, weights, strict=True)}
        self._started: dict[Job, float] = {}
        self._paces: dict[Job, _Pace] = {}

    def left(self, states: Mapping[Job, tuple[str, Status | None]]) -> tuple[float, float | None]:
        """The share of all that is done, and the seconds left; None until there is a measurement."""
        total, done, running = 0.0, 0.0, 0
        for job, cost in self._costs.items():
            state, status = states[job]
            mine = cost.total if state == "done" else cost.done(status if state == "running" else None)
            total += mine if state == "failed" else cost.total
            done, running = done + mine, running + (state == "running")
            self._measure(job, state, mine)
        if total <= done:
            return 1.0, 0.0
        seconds = sum(pace.until - pace.since for pace in self._paces.values())
        work = sum(pace.by_then - pace.at_first for pace in self._paces.values())
        if seconds < self.LEAST_SECONDS or work < self.LEAST_SHARE * total:
            return done / total, None
        return done / total, (total - done) * seconds / work / max(1, running)

    def left_of(self, job: Job) -> float | None:
        """The seconds left of a running job when `left` last looked; None until there is a measurement."""
        pace, total = self._paces.get(job), self._costs[job].total
        if pace is None or pace.until - pace.since < self.LEAST_SECONDS or pace.by_then >= total:
            return None  # at the end what is left, such as an analysis, is not counted
        work = pace.by_then - pace.at_first
        return (total - pace.by_then) * (pace.until - pace.since) / work if work >= self.LEAST_SHARE * total else None

    def _measure(self, job: Job, state: str, mine: float) -> None:
        """Note how far a job is; `mine` is what is done of it."""
        now, found, pace = self._now(), self._costs[job].found, self._paces.get(job)
        if state == "running":
            self._started.setdefault(job, now)
        if state not in ("running", "done") or mine <= found:
            return
        if pace is None:
            pace = self._paces[job] = _Pace(now, mine, now, mine)
        if mine > pace.by_then:
            pace.until, pace.by_then = now, mine
        if state == "done" and job in self._started:
            pace.since, pace.at_first, pace.until = self._started.pop(job), found, now


def _cost(job: Job, weight: float) -> _JobCost:
    settings = job.settings
    own, none = passes_as_released(settings).first(job.until), Passes(())
    has_twin = job.full_data and settings.validation > 0
    twin = passes_as_released(settings.on_all_data()).first(job.until) if has_twin else none
    folders = {job.folder: own, job.out / settings.on_all_data().name: twin}
    there = [passes.total - passes.after(RunFolder(folder).n_done) for folder, passes in folders.items()]
    return _JobCost(own, twin, weight, weight * sum(there))


def _weights(settings: Sequence[RunSettings]) -> list[float]:
    """What an image of each run costs beside those of the others: measured where networks or images differ."""
    shapes = [released_shape(one) for one in settings]
    kinds = [(one.network, one.batch_size, shape, one.precision)
             for one, shape in zip(settings, shapes, strict=True) if shape is not None]  # fmt: skip
    if len(kinds) < len(settings):
        return [1.0] * len(settings)
    if len(set(kinds)) == 1:
        return [1.0] * len(kinds)
    measured = [seconds_per_image(*kind) for kind in kinds]
    return measured if all(map(math.isfinite, measured)) else [1.0] * len(kinds)
