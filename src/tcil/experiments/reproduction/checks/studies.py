"""Shared by the checks: the studies that they compare, all with the same seeds, and means over them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tcil.experiments.reporting.collect import Study, same_seeds
from tcil.experiments.reproduction import paper
from tcil.experiments.reproduction.finished import FinishedRuns
from tcil.experiments.reproduction.schedules import LEARNERS, MAIN, Edition, Variation
from tcil.experiments.runs.analysed import Analysis
from tcil.experiments.runs.catalogue import learner_title

BOTH = ("cifar100", "tiny-imagenet")
EVERY = ("cifar10", *BOTH)
RESERVED = Variation(reserve=0.25)


def mean_of(study: Study, calibrator: str, metric: str = "ece") -> float | None:
    """The mean over tasks and seeds, in percent; None if a seed has no value."""
    values = study.means(calibrator, metric)
    return None if None in values else 100 * float(np.mean([v for v in values if v is not None]))


def expected(study: Study, calibrator: str, metric: str = "ece") -> float:
    """The same mean, but NaN if a seed has no value; no rule holds for NaN."""
    value = mean_of(study, calibrator, metric)
    return float("nan") if value is None else value


def values_by_task(study: Study, calibrator: str, metric: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A metric by task, averaged over seeds."""
    rows = [
        [float("nan") if value is None else value for value in run.values(calibrator, metric)] for run in study.runs
    ]
    return np.asarray(np.mean(rows, axis=0), dtype=np.float64)


Pair = tuple[str, str]  # dataset and learner


def studies_run(
    finished: FinishedRuns,
    edition: Edition,
    datasets: Sequence[str],
    learners: Sequence[str] = LEARNERS,
    variation: Variation = MAIN,
) -> dict[Pair, Study]:
    """The studies that were run, by dataset and learner, all with the same seeds."""
    studies = {
        (dataset, learner): study
        for dataset, learner in itertools.product(datasets, learners)
        if (study := finished.study(edition, dataset, learner, variation)) is not None
    }
    alike = same_seeds(list(studies.values()))
    return dict(zip(studies, alike, strict=True)) if alike else {}


def varied(finished: FinishedRuns, edition: Edition, dataset: str, variations: Sequence[Variation]) -> list[Study]:
    """The variations of ER that were run, in order, all with the same seeds."""
    studies = [finished.study(edition, dataset, "er", variation) for variation in variations]
    return same_seeds([study for study in studies if study is not None])


def n_seeds(studies: Sequence[Study]) -> int:
    """The number of seeds that every study has."""
    return min(len(study.runs) for study in studies)


def where(dataset: str, learner: str) -> str:
    """A learner and a dataset, as text."""
    return f"{learner_title(learner)} on {paper.DATASETS[dataset]}"


def analyses_of(finished: FinishedRuns, edition: Edition) -> list[Analysis]:
    """The results of `tcil.experiments.runs.analysis` for ER on CIFAR-100, by seed."""
    study = finished.study(edition, "cifar100", "er")
    return [run.analysis for run in study.runs if run.analysis is not None] if study is not None else []


def average(values: Iterator[float | None]) -> float | None:
    """The mean of the values that are not None; None if there are none."""
    answers = [value for value in values if value is not None]
    return float(np.mean(answers)) if answers else None
