"""Finished runs, looked up by the settings of the paper's experiments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from tcil.experiments.reporting.collect import Study, any_runs, read_runs
from tcil.experiments.reproduction import paper
from tcil.experiments.reproduction.schedules import MAIN, Edition, Variation
from tcil.experiments.runs.store import StoredRun


def read_finished(folders: Sequence[Path]) -> dict[str, StoredRun]:
    """The runs in these folders by the hash of their settings; drawable runs and earlier folders take precedence."""
    runs: dict[str, StoredRun] = {}
    for folder in folders:
        for run in read_runs([folder]) if any_runs(folder) else []:
            key = run.settings.key
            if key is not None and (key not in runs or (drawable(run) and not drawable(runs[key]))):
                runs[key] = run
    return runs


def drawable(run: StoredRun) -> bool:
    """Whether a run has all calibrators of the paper; others may be missing."""
    return run.is_complete(paper.CALIBRATORS)


class FinishedRuns:
    """Finished runs of some editions of the paper's experiments, looked up by their settings."""

    def __init__(self, editions: Sequence[Edition], runs: Sequence[StoredRun]) -> None:
        self.editions = editions
        self._runs = {run.settings.key: run for run in runs}

    def study(self, edition: Edition, dataset: str, learner: str, variation: Variation = MAIN) -> Study | None:
        """The finished seeds of an experiment; if they have different numbers of tasks, those with the most."""
        asked = (edition.settings(dataset, learner, seed, variation) for seed in edition.seeds)
        runs = [self._runs[one.key] for one in asked if one is not None and one.key in self._runs]
        furthest = max((len(run.tasks) for run in runs), default=0)
        alike = tuple(run for run in runs if len(run.tasks) == furthest)
        return Study(alike) if alike else None

    def whole(self) -> Self:
        """Without the runs that stopped before their last task."""
        return type(self)(self.editions, [run for run in self._runs.values() if run.result.until is None])

    def on(self, dataset: str, learner: str, variation: Variation = MAIN) -> Iterator[tuple[Edition, Study]]:
        """The experiment in every edition that includes it."""
        for edition in self.editions:
            study = self.study(edition, dataset, learner, variation)
            if study is not None:
                yield edition, study
