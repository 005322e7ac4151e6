"""Whether networks are better than guessing. If they are not, errors of calibrators say nothing about calibrators."""

from __future__ import annotations

from dataclasses import dataclass

from scipy import stats

from tcil.experiments.reporting.collect import Study
from tcil.experiments.runs.catalogue import AS_TRAINED, CATALOGUE
from tcil.experiments.runs.results import CalibratorRow, TaskResult

SIGNIFICANCE = 0.05  # of the test


@dataclass(frozen=True)
class Guessing:
    """Networks of a study whose accuracy is not above chance, and the last of them.

    Attributes
    ----------
    count : int
        How many there are.
    networks : int
        How many networks the study has: one after each task of each run.
    task : int
        After which task the last one was.
    accuracy : float
        Its share of correct predictions.
    images : int
        The test images that this is of.
    classes : int
        The classes seen by then: guessing is correct once in so many images.
    """

    count: int
    networks: int
    task: int
    accuracy: float
    images: int
    classes: int

    @property
    def told(self) -> str:
        """The same in words."""
        which = "the last" if self.count > 1 else "it"
        return (
            f"{self.count} of {self.networks} networks {'are' if self.count > 1 else 'is'} no better than guessing"
            f" ({which} has an accuracy of {100 * self.accuracy:.1f} % on {self.images:,} test images of"
            f" {self.classes} classes after task {self.task}; one-sided binomial test, {100 * SIGNIFICANCE:g} %)"
        )


def guessing(study: Study) -> Guessing | None:
    """The networks of a study that are no better than guessing; None where all are better, or nothing tells.

    Parameters
    ----------
    study : Study
        Its rows must have bins, which say how many test images there were. Rows of the first versions have none.

    Returns
    -------
    Guessing or None
        By a one-sided binomial test of each network as trained, at 5 %.
    """
    tasks = [task for run in study.runs for task in run.tasks]
    found = [(task, row, images) for task in tasks if (row := _as_trained(task)) and (images := _test_images(row))]
    low = [one for one in found if not above_chance(one[1].accuracy or 0.0, one[2], one[0].seen)]
    if not low:
        return None
    task, row, images = low[-1]
    return Guessing(len(low), len(tasks), task.task, row.accuracy or 0.0, images, task.seen)


def above_chance(accuracy: float, images: int, classes: int) -> bool:
    """Whether this accuracy is above that of guessing, by a one-sided binomial test at 5 %.

    >>> from tcil.experiments.reporting.guessing import above_chance
    >>> above_chance(0.06, 1000, 20), above_chance(0.07, 1000, 20)
    (False, True)
    """
    if classes < 2:
        return True
    correct = round(accuracy * images)
    return float(stats.binomtest(correct, images, 1 / classes, alternative="greater").pvalue) <= SIGNIFICANCE


def _as_trained(task: TaskResult) -> CalibratorRow | None:
    """The row of the network as trained; else one of a calibrator of tcil, which leaves the predictions as they are."""
    names = (AS_TRAINED, *(name for name in task.calibrators if name.partition("[")[0] in CATALOGUE))
    return next((row for name in names if (row := task.answer(name)) is not None), None)


def _test_images(row: CalibratorRow) -> int:
    """How many test images a row is of; 0 where that is not known."""
    return 0 if row.bins is None else sum(row.bins.count)
