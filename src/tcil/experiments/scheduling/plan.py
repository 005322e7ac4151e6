"""What a set of runs will cost: trainings, images, and a time estimated from a short measurement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tcil.experiments.config.settings import RunSettings
from tcil.experiments.reporting.collect import differences
from tcil.experiments.reporting.grids import Cell, Grid, Row
from tcil.experiments.runs.complete import check_names
from tcil.experiments.runs.results import StoredSettings
from tcil.experiments.runs.run import Run
from tcil.experiments.runs.tasks import make_stream
from tcil.experiments.scheduling.cost import (
    Passes,
    Speed,
    as_released,
    count_passes,
    released_shape,
    seconds_per_image,
)
from tcil.foundation.options import Option
from tcil.incremental.data.datasets import load_dataset
from tcil.incremental.data.datasets.files import UnreadableData
from tcil.incremental.data.images import Dataset
from tcil.incremental.data.stream import TaskStream
from tcil.incremental.pretrained.networks import is_pretrained

COUNTED = (
    "A pass is an image through the network in training; those of teachers and frozen extractors count a third."
    " Evaluation and calibration come on top: a few per cent of long trainings, and up to as much as short ones."
)


class Standing(Option):
    """How far a run is."""

    FINISHED = "finished", "all that is asked of it is there"
    TRAINED = "to calibrate", "trained; some of its calibration or analysis is missing"
    MISSING = "to run", "not trained yet, or not to the end"


@dataclass(frozen=True)
class Planned:
    """A training in a plan: how far it is, the number of its job, and the tasks that it is taken to (None: all)."""

    settings: RunSettings
    standing: Standing = Standing.MISSING
    job: int | None = None
    until: int | None = None
    done: int = 0


def plan(
    trainings: Sequence[Planned], data: Path | None, speed: Speed | None = None, notes: Sequence[str] = ()
) -> Grid:
    """A line per training, and the sum. Datasets that are not there count as released; of unknown ones the cost is too.

    Time is that of this machine, measured, and also that at `speed`, where one is given.
    """
    rows, seconds_in_all, passes_in_all, elsewhere = [], 0.0, 0.0, 0.0
    unread = ""  # why data could not be read
    uncounted = False  # whether there are data of which nothing is known
    impossible = set[str]()  # precisions in which this machine does not train
    measured: dict[str, float] = {}
    told = differences([StoredSettings.of(one.settings) for one in trainings])
    for one, difference in zip(trainings, told, strict=True):
        settings = one.settings
        check_names(settings)
        dataset, reason = _dataset(settings, data)
        cells = [str(one.standing), "", "", ""] + [""] * (speed is not None)
        unread = unread or (reason if one.standing is Standing.MISSING else "")
        shape = dataset.image_shape if dataset is not None else released_shape(settings)
        if one.standing is Standing.MISSING and shape is None:
            cells = ["to run", "", "data missing" if data is None else "no data", *["unknown"] * (len(cells) - 3)]
            uncounted = True
        elif one.standing is Standing.MISSING and shape is not None:
            whole = _passes(settings, dataset)
            passes = whole.first(one.until)
            left, last = passes.after(one.done), len(passes.tasks)
            side, precision = shape[-1], settings.precision
            each = seconds_per_image(settings.network, settings.batch_size, shape, precision)
            kind = f"{settings.network} on {side}x{side}" + (f" in {precision}" if precision != "fp32" else "")
            if math.isnan(each):
                impossible.add(precision)
            else:
                measured[kind] = 1 / each
            seconds = left * each
            seconds_in_all, passes_in_all = seconds_in_all + seconds, passes_in_all + left
            of = f"{last}" if last == len(whole.tasks) else f"{last} of {len(whole.tasks)}"
            cells = ["to run", f"{of}, {min(one.done, last)} done" if one.done else of, f"{left:,.0f}", clock(seconds)]
            if speed is not None:
                elsewhere += speed.seconds(settings.network, left)
                cells.append(clock(speed.seconds(settings.network, left)))
        which = ", ".join(filter(None, [f"{settings.classes} classes" if settings.classes else "", difference]))
        name = settings.name if one.job is None else f"{one.job} {settings.name}"
        rows.append(Row(name, tuple(Cell(words=words) for words in (which, *cells))))
    missing = sum(one.standing is Standing.MISSING for one in trainings)
    counted = f"{missing} training{'' if missing == 1 else 's'}"
    cost = f"{passes_in_all:,.0f} image passes, about {clock(seconds_in_all)} one after another on this machine"
    if uncounted:
        cost = f"image passes and time unknown, since data are missing: {_why(data, unread)}"
    elif impossible:
        cost = f"{passes_in_all:,.0f} image passes; this machine's processor does not train in {', '.join(impossible)}"
    lines = [f"{counted}, {cost}{'' if cost.endswith('.') else '.'} {COUNTED}"]
    if unread and not uncounted:
        lines.append(f"Data are missing, so that images are counted as released: {_why(data, unread)}")
    if measured:
        speeds = ", ".join(f"{name} {number:,.{0 if number > 10 else 1}f}" for name, number in measured.items())
        lines.append(f"Images a second in a run on this machine, measured just now: {speeds}.")
    if speed is not None and not uncounted:
        lines.append(f"On {speed.where}: about {clock(elsewhere)}. Images a second: {speed.told} ({speed.source}).")
    if any(one.standing is Standing.TRAINED for one in trainings):
        lines.append("What is to calibrate or to analyse is not counted.")
    columns = ("run", "which", "state", "tasks", "image passes", "estimated time")
    more = (f"on {speed.where}",) if speed is not None else ()
    return Grid(f"{counted} to run", (*columns, *more), tuple(rows), (*lines, *notes))


def _why(data: Path | None, unread: str) -> str:
    return "no folder was given. Pass --data DIR; see 'tcil download'." if data is None else unread


def _passes(settings: RunSettings, dataset: Dataset | None) -> Passes:
    """Image passes of a training; of data that are not there, as they were released.

    They are the same in every precision, and another machine may train in one in which this one does not.
    """
    dataset = dataset or as_released(settings)
    stream = stream_of(settings.model_copy(update={"precision": "fp32"}), dataset)
    return count_passes(settings, [len(task.columns) for task in stream], [len(task.train) for task in stream], dataset)


def stream_of(settings: RunSettings, dataset: Dataset) -> TaskStream:
    """The tasks of a run; raises if it cannot begin, for instance because its network does not take these images.

    A run on a pre-trained backbone is not created, since that computes all features.
    """
    if is_pretrained(settings.network):
        return make_stream(settings, dataset)
    return Run(settings, Path(settings.name), dataset=dataset).stream


read_once = cache(load_dataset)


def _dataset(settings: RunSettings, data: Path | None) -> tuple[Dataset | None, str]:
    """The dataset, or why it cannot be read."""
    try:
        return read_once(settings.dataset, data, **settings.data_options), ""
    except UnreadableData as error:
        return None, str(error)


def clock(seconds: float) -> str:
    """Seconds as hours and minutes."""
    if math.isnan(seconds):
        return "unknown"
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"
