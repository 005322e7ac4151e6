"""What a set of runs will cost: trainings, images, and a time estimated from a short measurement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tcil.calibration.options import Option
from tcil.experiments.collect import differences
from tcil.experiments.grids import Cell, Grid, Row
from tcil.experiments.perform import check_names
from tcil.experiments.run import Run
from tcil.experiments.settings import RunSettings
from tcil.incremental.datasets import load_dataset
from tcil.incremental.images import Dataset
from tcil.incremental.networks import network_factory
from tcil.incremental.placement import Layout, step_seconds

LARGEST_BATCH = 512  # that is measured: an image of a larger one takes as long


class Standing(Option):
    """How far a run is."""

    FINISHED = "finished", "all that is asked of it is there"
    TRAINED = "to calibrate", "trained; some of its calibration or analysis is missing"
    MISSING = "to run", "not trained yet, or not to the end"


def plan(runs: Sequence[RunSettings], data: Path | None, standings: Sequence[Standing]) -> Grid:
    """A line per run, and the sum. Datasets that are not there yet leave images and time unknown."""
    rows, total, images_in_all = [], 0.0, 0
    told = differences([settings.model_dump(mode="json") for settings in runs])
    for settings, standing, difference in zip(runs, standings, told, strict=True):
        check_names(settings)
        dataset = _dataset(settings.dataset, data)
        if standing is not Standing.MISSING:
            cells = (str(standing), "", "", "")
        elif dataset is None:
            cells, total = ("to run", "", "data missing", "unknown"), math.nan
        else:
            run = Run(settings, Path(settings.name), dataset=dataset)
            images, seen = 0, 0
            for task in run.stream:
                images += settings.epochs * (len(task.train) + min(settings.memory, seen))
                seen += len(task.train)
            seconds = images * seconds_per_image(settings.network, settings.batch_size, run.dataset.image_shape)
            total, images_in_all = total + seconds, images_in_all + images
            cells = ("to run", str(len(run.stream)), f"{images:,}", clock(seconds))
        which = ", ".join(filter(None, [f"{settings.classes} classes" if settings.classes else "", difference]))
        rows.append(Row(settings.name, tuple(Cell(words=words) for words in (which, *cells))))
    missing = sum(standing is Standing.MISSING for standing in standings)
    counted = f"{missing} training{'' if missing == 1 else 's'}"
    cost = f"{images_in_all:,} images, about {clock(total)} one after another on this machine"
    if math.isnan(total):
        cost = "images and time unknown, since data are missing"
    note = f"{counted}, {cost}; distillation, fine-tuning and DER's extractors take more." + (
        " What is to calibrate or to analyse is not counted." if Standing.TRAINED in standings else ""
    )
    return Grid(
        f"{counted} to run", ("run", "which", "state", "tasks", "images", "estimated time"), tuple(rows), (note,)
    )


@cache
def _dataset(name: str, data: Path | None) -> Dataset | None:
    try:
        return load_dataset(name, data)
    except ValueError as error:
        if str(error).startswith("data:"):
            return None
        raise


@cache
def seconds_per_image(network: str, batch_size: int, shape: tuple[int, ...]) -> float:
    """One training step of the network, measured (the best of three)."""
    layout, batch_size = Layout.CHANNELS_LAST, min(batch_size, LARGEST_BATCH)
    model = network_factory(network)(10).to(memory_format=layout.form)  # type: ignore[call-overload]
    return min(step_seconds(model, shape, layout, batch_size) for _ in range(3)) / batch_size


def clock(seconds: float) -> str:
    """Seconds as hours and minutes."""
    if math.isnan(seconds):
        return "unknown"
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"
