"""The settings of a run. Errors name the key, the value and the nearest valid name."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from tcil.experiments.config.presets import DEFAULT_PRESET, PRESETS, preset_values
from tcil.foundation.errors import invalid, nearest
from tcil.foundation.extensions import code_named, consent

FORMAT = 1  # of run folders; part of every run's key
DATA_OPTIONS = ("image_side", "train_per_class", "test_per_class", "data_seed")  # of datasets; None by default
# Settings that were added later, with their defaults.
_LATER = {
    **dict.fromkeys(DATA_OPTIONS),
    "lr_shape": "steps",
    "precision": "fp32",
    "returning": 0,
    "smallest_class": 1.0,
}
_MAY_NAME_CODE = {"code": True}  # the context in which settings may name code to be imported
Count = Annotated[int, Field(le=2**31 - 1)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TrainingSeed = Annotated[int, Field(ge=0, lt=10**15)]  # other seeds are derived from it, within 64 bits


class RunSettings(BaseModel):
    """Everything that a training depends on. `key` is a hash of it; the same settings are the same run.

    Names such as `package.module:name` are imported when a run is trained. They are therefore rejected here, unless the
    settings come from the user (`build`, `own_settings`) or from a file that the user trusts (`stored_settings`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    dataset: str = Field("noisy-digits", description="see 'tcil datasets'")
    classes: Count | None = Field(None, ge=2, description="use only the first N classes of the order")
    tasks: Count | tuple[Count, ...] = Field(
        5, description="number of tasks, of equal size if possible, or the number of classes of each"
    )
    class_order_seed: Seed | None = Field(None, description="seed of the class order; none: natural order")
    learner: str = Field("er", description="see 'tcil learners'")
    learner_options: dict[str, Any] = Field(default_factory=dict, description="options of the learner, by name")
    network: str = Field("small_cnn", description="see 'tcil networks'")
    optimizer: str = Field("sgd", description="sgd or adam")
    epochs: Count = Field(30, ge=1, description="epochs of each task")
    milestones: tuple[Annotated[Count, Field(ge=0)], ...] = Field(
        (15, 22), description="epochs at which lr is divided by 10"
    )
    lr: float = Field(0.1, gt=0, description="initial learning rate of each task")
    weight_decay: float = Field(2e-4, ge=0, description="weight decay of the optimizer")
    batch_size: Count = Field(32, ge=1, description="images per training step")
    crop: int | None = Field(None, ge=0, le=1024, description="padding of random crops; none: that of the dataset")
    memory: Count = Field(60, ge=0, description="total number of exemplars; 0 for ncm and ranpac")
    validation: Count = Field(40, ge=0, description="total number of validation images of a new task")
    validation_pool: Count = Field(80, ge=0, description="total number of held-out images of a new task")
    reserve: float = Field(
        0.0,
        ge=0,
        le=10_000,
        description="data kept out of training: a share of the memory, or (from 1 on) images per class",
    )
    seed: TrainingSeed = Field(1, description="seed of training: initialisation, batches, augmentation, memory")
    validation_seed: Seed = Field(1, ge=0, description="seed of the held-out images; 'seed': the same as seed")
    image_side: int | None = Field(
        None, ge=1, le=9999, description="image side in pixels for image-folder (none: 32) and tiny-imagenet (none: 64)"
    )
    lr_shape: Literal["steps", "cosine", "one-cycle"] = Field(
        "steps", description="steps (at the milestones), cosine or one-cycle; fine-tuning always uses steps"
    )
    train_per_class: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="training images per class of letters and letters-large; none: 220",
    )
    test_per_class: int | None = Field(
        None, ge=1, le=100_000, description="test images per class of letters (none: 200) and letters-large (none: 250)"
    )
    data_seed: Seed | None = Field(None, ge=0, description="seed of the images of letters and letters-large; none: 0")
    returning: Count = Field(0, ge=0, description="old classes that occur again in each task, with half their images")
    smallest_class: float = Field(
        1.0, gt=0, le=1, description="training images of a task's last class, as a share of those of its first"
    )
    precision: str = Field("fp32", description="precision of training steps: fp32, bf16 or fp16 (mixed, for GPUs)")

    @model_validator(mode="before")
    @classmethod
    def _no_code(cls, values: Any, info: ValidationInfo) -> Any:
        if isinstance(values, Mapping) and info.context is not _MAY_NAME_CODE and (imports := code_named(values)):
            raise ValueError(f"settings that were read name code to be imported: {', '.join(imports)}")
        return values

    @field_validator("*", mode="before")
    @classmethod
    def _no_flags(cls, value: Any) -> Any:
        """Reject true and false, which Python would accept as numbers."""
        if any(isinstance(part, bool) for part in (value if isinstance(value, (list, tuple)) else [value])):
            raise ValueError("numbers or names are expected, not true or false")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> RunSettings:
        sizes = (self.tasks,) if isinstance(self.tasks, int) else self.tasks
        expected = {}
        if self.validation_pool < self.validation:
            expected["validation_pool"] = f"at least validation, {self.validation}"
        if self.reserve > 1 and self.reserve != int(self.reserve):
            expected["reserve"] = "a share below 1 or a whole number of images"
        if not sizes or min(sizes) < 1:
            expected["tasks"] = "a number of tasks or their sizes, each at least 1"
        if any(m >= self.epochs for m in self.milestones):
            expected["milestones"] = f"numbers below epochs, {self.epochs}"
        if expected:
            raise ValueError("\n".join(str(invalid(name, self._shown(name), what)) for name, what in expected.items()))
        return self

    def _shown(self, name: str) -> str:
        value = getattr(self, name)
        return shown(list(value) if isinstance(value, tuple) else value)

    @model_serializer(mode="wrap")
    def _as_before(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit settings that were added later and have their default, so that keys of earlier runs do not change."""
        record = dump(self)
        return {name: value for name, value in record.items() if name not in _LATER or value != _LATER[name]}

    @property
    def data_options(self) -> dict[str, int]:
        """The given options of the dataset, as arguments of `load_dataset`."""
        return {name: value for name in DATA_OPTIONS if (value := getattr(self, name)) is not None}

    @property
    def key(self) -> str:
        """A hash of all settings."""
        return key_of(self.model_dump(mode="json"))

    def on_all_data(self) -> RunSettings:
        """The same training without a validation set, for the Vanilla row as in the paper."""
        return self.model_copy(update={"validation": 0, "validation_pool": 0, "reserve": 0.0})

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        dataset, learner = (re.sub(r"[:/\\\0]", "-", name) for name in (self.dataset, self.learner))
        return f"{dataset}-{learner}-seed{self.seed}-{self.key}"


def key_of(record: Mapping[str, Any]) -> str:
    """The hash of settings as they are stored."""
    text = json.dumps({"format": FORMAT, **record}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def own_settings(values: Any) -> RunSettings:
    """Settings that the user gave, for instance in a job of a sweep. Never use it for a file of unknown origin."""
    return RunSettings.model_validate(values, context=_MAY_NAME_CODE)


def stored_settings(record: Any, file: Path, *, trust: bool, tell: Callable[[str], None]) -> RunSettings:
    """The settings in a file of a run folder; raises if they name code, unless the user trusts the folder."""
    if not isinstance(record, Mapping):
        raise invalid("run", f"{file} with {type(record).__name__}", "the settings of a run")
    consent(record, file, trust=trust, tell=tell)
    try:
        return RunSettings.model_validate(record, context=_MAY_NAME_CODE if trust else None)
    except ValidationError as error:
        raise invalid("run", f"{file} ({explain(error)})", "settings as 'tcil run' stored them") from None


def stored_key(record: Any) -> str | None:
    """The key of the settings in a file; None for those of other tools. Nothing is imported."""
    try:
        return own_settings(record).key
    except ValidationError:
        return None


def build(values: Mapping[str, Any]) -> RunSettings:
    """Settings from a preset (`preset`, or that of the dataset) and the values that override it."""
    given = dict(values)
    for key in ("dataset", "learner", "preset"):
        if not isinstance(given.get(key, ""), str):
            raise invalid(key, shown(given[key]), "a name")
    preset = given.pop("preset", None)
    if preset is None:
        named = given.get("dataset", DEFAULT_PRESET)
        preset = named if named in PRESETS else "digits"
    merged = preset_values(preset, given.get("learner", "er"), given.get("tasks"))
    options = given.get("learner_options", {})
    if isinstance(options, Mapping):  # options of the preset apply unless the user overrides them
        preset_options = merged.get("learner_options", {})
        # An option that the preset turns on and the user off is omitted, as in settings of versions without the option.
        off = {name for name in options if options[name] is False and preset_options.get(name) is True}
        moved = _moved_milestones(given.get("learner", "er"), preset_options, options)
        chosen = {**preset_options, **options, **moved}
        given["learner_options"] = {name: _plain(value) for name, value in chosen.items() if name not in off}
    merged |= given
    validation, epochs = given.get("validation"), given.get("epochs")
    if isinstance(validation, int) and "validation_pool" not in given:
        pool = merged.get("validation_pool", RunSettings.model_fields["validation_pool"].default)
        merged["validation_pool"] = max(pool, validation) if validation else 0
    if isinstance(epochs, int) and "milestones" not in given:
        merged["milestones"] = sorted({m for m in (epochs // 2, epochs * 3 // 4) if 0 < m < epochs})
    if merged.get("validation_seed") == "seed":
        merged["validation_seed"] = merged.get("seed", RunSettings.model_fields["seed"].default)
    try:
        return own_settings(merged)
    except ValidationError as error:
        raise ValueError(explain(error)) from None


def _moved_milestones(learner: str, preset: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, list[int]]:
    """Milestones of stage two in proportion to its epochs, where options of a built-in learner change these alone."""
    epochs = given.get("finetune_epochs")
    if type(epochs) is not int or "finetune_milestones" in given:
        return {}
    from tcil.incremental.learners.base import FinetuningOptions  # with torch
    from tcil.incremental.learners.registry import LEARNERS

    kind = LEARNERS[learner].options_type if learner in LEARNERS else None
    if kind is None or not issubclass(kind, FinetuningOptions):
        return {}
    own = kind()
    before = preset.get("finetune_epochs", own.finetune_epochs)
    if epochs == before:
        return {}
    milestones = preset.get("finetune_milestones", own.finetune_milestones)
    moved = {(2 * milestone * epochs + before) // (2 * before) for milestone in milestones}  # to the nearest epoch
    return {"finetune_milestones": sorted(milestone for milestone in moved if 0 < milestone < epochs)}


def _plain(value: Any) -> Any:
    """An option with whole numbers as such, so that 1 and 1.0 are the same run."""
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def explain(error: ValidationError) -> str:
    """All errors at once, each with its key, its value and, for unknown keys, the nearest valid one."""
    lines = []
    for entry in error.errors():
        key, message = ".".join(map(str, entry["loc"])) or "settings", entry["msg"].removeprefix("Value error, ")
        if not entry["loc"] and entry["type"] == "value_error":  # of several settings, which the message names
            lines.append(message)
        elif entry["type"] == "extra_forbidden":
            advice = nearest(key, [*RunSettings.model_fields, "seeds", "learners", "datasets", "preset"])
            lines.append(f"{key}: got {shown(entry['input'])}; there is no such setting. {advice}".rstrip())
        elif entry["type"] == "tuple_type":
            lines.append(f"{key}: got {shown(entry['input'])}; expected a list, such as [10, 15].")
        else:
            lines.append(f"{key}: got {shown(entry['input'])}; {message}.")
    return "\n".join(lines)


def shown(value: object) -> str:
    """A value as text for messages; Python cannot print very long numbers."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of more than 4,300 digits"
    return text if len(text) <= 200 else f"{text[:200]}..."


def read_toml(path: Path) -> dict[str, Any]:
    """Settings from a TOML file; lists under `seeds`, `learners` and `datasets` form a grid."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise invalid("study", f"{path} ({error.strerror})", "a TOML file with settings") from None
    except (ValueError, RecursionError) as error:
        raise invalid("study", f"{path}, which is not TOML ({error})", "a TOML file with settings") from None


def expand(values: Mapping[str, Any], wins: Collection[str] = ()) -> list[RunSettings]:
    """One run for each combination of `seeds`, `learners` and `datasets`, if these are given.

    A value named in `wins`, such as a `learner` or `seeds` given as a flag, replaces the list or single value of a
    study file.
    """
    rest = dict(values)
    for one, several in (("dataset", "datasets"), ("learner", "learners"), ("seed", "seeds")):
        if one in rest and several in rest:
            if (one in wins) == (several in wins):
                given = f"{shown(rest[one])} and {shown(rest[several])}"
                raise invalid(f"{one} and {several}", given, "one of the two")
            del rest[several if one in wins else one]
        if isinstance(rest.get(one), list):
            raise invalid(one, shown(rest[one]), "one", f"Several go under {several}.")
    grid = {name: rest.pop(f"{name}s") for name in ("dataset", "learner", "seed") if f"{name}s" in rest}
    runs: list[dict[str, Any]] = [rest]
    for name, choices in grid.items():
        if not isinstance(choices, list) or not choices:
            raise invalid(f"{name}s", shown(choices), "a list with at least one entry")
        runs = [{**run, name: choice} for run in runs for choice in choices]
    return [build(run) for run in runs]
