"""What a run says of itself: its settings, what it was computed with, and which images it had."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, JsonValue, model_validator

from tcil.experiments.config.settings import DATA_OPTIONS, FORMAT, RunSettings, stored_key
from tcil.experiments.runs.records import Amount, Count, JsonObject, Number, StoredRecord
from tcil.incremental.data.layout import Layout

KnownLayout = Annotated[Layout, BeforeValidator(lambda value: Layout.parse(value, "layout"))]


class StoredSettings(StoredRecord):
    """Settings as tables name them; whether they are those of a training is for RunSettings to tell."""

    dataset: str
    learner: str
    network: str | None = None
    seed: Number = 0
    classes: Count | None = None
    memory: Count | None = None
    validation: Count | None = None
    validation_pool: Count | None = None
    epochs: Count | None = None
    reserve: Amount | None = None
    tasks: JsonValue = None
    image_side: Count | None = None
    train_per_class: Count | None = None
    test_per_class: Count | None = None
    data_seed: Count | None = None
    precision: str = "fp32"
    imported: bool = False

    @classmethod
    def of(cls, settings: RunSettings) -> Self:
        """The settings of a training, as they are stored."""
        return cls.model_validate(settings.model_dump(mode="json"))

    @property
    def data_options(self) -> dict[str, int]:
        """Options of the dataset that are given, as `load_dataset` takes them."""
        return {name: value for name in DATA_OPTIONS if (value := getattr(self, name)) is not None}

    @property
    def n_tasks(self) -> int | None:
        """How many tasks they ask for."""
        if isinstance(self.tasks, list):
            return len(self.tasks)
        return self.tasks if isinstance(self.tasks, int) else None

    @property
    def key(self) -> str | None:
        """The hash of the settings; None for runs of other tools, which were imported."""
        return stored_key(self.record())

    def but_for_seeds(self) -> JsonObject:
        """The settings but for the training seed, and but for the seeds of class order and split where these follow it.

        >>> StoredSettings(dataset="d", learner="er", seed=3, class_order_seed=3, validation_seed=3).but_for_seeds()
        {'dataset': 'd', 'learner': 'er', 'class_order_seed': 'that of training', 'validation_seed': 'that of training'}
        """
        record = self.record()
        seed = record.pop("seed", 0)
        if record.get("validation_seed") == seed:
            followers = [name for name in ("class_order_seed", "validation_seed") if record.get(name) == seed]
            record |= dict.fromkeys(followers, "that of training")
        return record

    def without(self, *names: str) -> str:
        """The settings but for these, as text."""
        return json.dumps({k: v for k, v in self.record().items() if k not in names}, sort_keys=True)


class FormatNote(StoredRecord):
    """What an environment says of the folder it is in, whatever else it holds."""

    format: JsonValue = FORMAT
    tcil: JsonValue = None


class Environment(FormatNote):
    """With what a run was computed, and how long it took: not part of the results."""

    torch: JsonValue = None
    numpy: JsonValue = None
    scipy: JsonValue = None
    python: JsonValue = None
    machine: JsonValue = None
    threads: Annotated[int, Field(ge=1, le=2**20)] | None = None
    ranks: JsonValue = None
    cores: JsonValue = None
    device: JsonValue = None
    cuda: JsonValue = None
    compiled: JsonValue = None
    layout: KnownLayout = Layout.CHANNELS_LAST
    images_per_second: Mapping[str, float] = {}
    seconds: Mapping[str, Mapping[str, Amount]] = {}

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if self.has("threads") and self.threads is None:
            raise ValueError("threads is null")
        return self

    def placed_as(self, other: Environment) -> Environment:
        """The same with the layout and threads that another was computed with."""
        names = [name for name in ("layout", "threads", "images_per_second") if other.has(name)]
        return self.model_copy(update={name: getattr(other, name) for name in names})

    def timed(self, task: str, what: str, seconds: float) -> Environment:
        """The same with these seconds added to those of a task."""
        known = self.seconds.get(task, {})
        mine = {**known, what: round(known.get(what, 0.0) + seconds, 3)}
        return self.model_copy(update={"seconds": {**self.seconds, task: mine}})


class DataNote(StoredRecord):
    """What tells images (or imported logits) from others, and how they become inputs; older notes lack the latter."""

    inputs: Mapping[str, object] | None = None

    def agrees(self, other: DataNote) -> bool:
        """Whether both are of the same images, and have the same inputs where both name them."""
        ours, theirs = self.record(), other.record()
        if not (self.has("inputs") and other.has("inputs")):
            ours, theirs = ({k: v for k, v in one.items() if k != "inputs"} for one in (ours, theirs))
        return ours == theirs
