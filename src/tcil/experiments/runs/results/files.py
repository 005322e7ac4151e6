"""Which record each file of a run folder holds."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, RootModel

from tcil.experiments.runs.analysed import AnalysedTask, Analysis
from tcil.experiments.runs.records import Count, JsonObject, Share, StoredRecord
from tcil.experiments.runs.results.about import DataNote, Environment, StoredSettings
from tcil.experiments.runs.results.run import RunResult
from tcil.experiments.runs.results.task import TaskResult


class Draws(RootModel[dict[str, tuple[Share, ...]]]):
    """What `tcil calibrate --redraw` leaves: errors by calibrator."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    def record(self) -> JsonObject:
        """As it is written."""
        written: JsonObject = self.model_dump(mode="json")
        return written


class Packed(StoredRecord):
    """That a run folder is a copy with results only of these tasks: it resumes from the network of the next one."""

    without: Annotated[tuple[Count, ...], Field(strict=False)]


_IN_RUN: dict[str, type[BaseModel]] = {
    "settings.json": StoredSettings,
    "environment.json": Environment,
    "results.json": RunResult,
    "analysis.json": Analysis,
    "redraw.json": Draws,
    "packed.json": Packed,
}
_IN_TASK: dict[str, type[BaseModel]] = {"results.json": TaskResult, "analysis.json": AnalysedTask}


def kind_of(file: str | PurePath) -> type[BaseModel]:
    """The type of that file of a run folder, or of a task in it."""
    path = PurePath(file)
    kinds = _IN_TASK if re.fullmatch(r"task-\d+", path.parent.name) else _IN_RUN
    return kinds.get(path.name, DataNote)
