"""What the paper's figures need beyond the tables, as types; computed in analysis.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import Field, model_validator

from tcil.experiments.runs.records import Amount, Count, Number, Pair, Positive, Share, StoredRecord

POLICIES = {  # direction policies that an analysis compares, and what figures and tables call them
    "paper": "T-CIL",
    "random": "random class",
    "closest": "closest class only",
    "farthest": "farthest class only",
}


class OldAndNew(StoredRecord):
    """A share among samples of old classes, and of new ones."""

    old: Share | None
    new: Share


class Curve(StoredRecord):
    """The temperature of the new exemplars by magnitude; None where it is infinite."""

    magnitudes: Annotated[tuple[Amount, ...], Field(strict=False)]
    temperatures: Annotated[tuple[Amount | None, ...], Field(strict=False)]


class MagnitudeGap(StoredRecord):
    """The best magnitudes for all classes and for the new ones, and how far apart they are."""

    all: Amount | None = None
    new: Amount | None = None
    gap: Amount | None


class AnalysedTask(StoredRecord):
    """The analysis of one task; `format` is that of the analysis, in a file of its own."""

    format: Number | None = None
    task: Count
    magnitude: Amount | None
    accuracy: OldAndNew
    epsilon: Mapping[str, MagnitudeGap]
    misprediction: OldAndNew | None = None
    curve: Curve | None = None

    @model_validator(mode="after")
    def _usable(self) -> Self:
        for name in ("misprediction", "curve", "format"):
            if self.has(name) and getattr(self, name) is None:
                raise ValueError(f"{name} is null")
        if missing := [policy for policy in POLICIES if policy not in self.epsilon]:
            raise ValueError(f"epsilon of {', '.join(missing)} is missing")
        return self

    def without_format(self) -> AnalysedTask:
        """The same as a part of the whole analysis, which has the format of all."""
        return AnalysedTask.model_validate({name: part for name, part in self.given().items() if name != "format"})


class Cost(StoredRecord):
    """Seconds of a T-CIL fit by the number of exemplars."""

    memory: Annotated[tuple[Positive, ...], Field(strict=False, min_length=2)]
    seconds: Annotated[tuple[Positive, ...], Field(strict=False, min_length=2)]


class Projection(StoredRecord):
    """Exemplars before and after the push, on the two main axes of their features."""

    columns: Annotated[tuple[Count, ...], Field(strict=False, min_length=1)]
    new_from: Count
    before: Annotated[tuple[Pair, ...], Field(strict=False)]
    after: Annotated[tuple[Pair, ...], Field(strict=False)]

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        if not len(self.columns) == len(self.before) == len(self.after):
            raise ValueError("columns, before and after have different lengths")
        return self


class Analysis(StoredRecord):
    """The analysis of all tasks."""

    format: Number
    tasks: Annotated[tuple[AnalysedTask, ...], Field(strict=False, min_length=1)]
    cost: Cost
    projection: Projection | None
