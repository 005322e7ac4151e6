"""Finished runs, found by the settings that an experiment of the paper asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tcil.experiments.collect import StoredRun, Study
from tcil.experiments.schedules import Edition
from tcil.experiments.settings import RunSettings


class Evidence:
    """Finished runs, found by their settings."""

    def __init__(self, editions: Sequence[Edition], runs: Sequence[StoredRun]) -> None:
        self.editions = editions
        self._runs = {run.settings_key: run for run in runs}

    def find(self, settings: RunSettings | None) -> StoredRun | None:
        """The finished run with these settings."""
        return None if settings is None else self._runs.get(settings.key)

    def study(self, edition: Edition, dataset: str, learner: str, **variation: Any) -> Study | None:
        """Whichever seeds of an experiment are finished."""
        wanted = (edition.settings(dataset, learner, seed, **variation) for seed in edition.seeds)
        found = [run for run in map(self.find, wanted) if run is not None]
        return Study(tuple(found)) if found else None

    def on(self, dataset: str, learner: str, **variation: Any) -> Iterator[tuple[Edition, Study]]:
        """The experiment in every edition that has it."""
        for edition in self.editions:
            study = self.study(edition, dataset, learner, **variation)
            if study is not None:
                yield edition, study
