"""What defines a run, with the paper's settings as presets; errors name the key, the value and the nearest name."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from tcil.calibration.errors import invalid, nearest, unknown_name
from tcil.incremental.extensions import code_named, consent

FORMAT = 1  # of run folders; part of every run's key
_OWN_WORDS = {"code": True}  # the context in which settings may name code to be imported
Count = Annotated[int, Field(le=2**31 - 1)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TrainingSeed = Annotated[int, Field(ge=0, lt=10**15)]  # those of every task and purpose are made of it, within 64 bits


class RunSettings(BaseModel):
    """Everything that a training depends on. `key` is a hash of it; the same settings are the same run.

    Names in it are imported by whoever trains. `package.module:name` is therefore refused here, wherever it comes from:
    `build` and `own_settings` make settings of the user's own words, `stored_settings` of a file that they trust.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    dataset: str = Field("noisy-digits", description="see 'tcil datasets'")
    classes: Count | None = Field(None, ge=2, description="use only the first so many classes of the order")
    tasks: Count | tuple[Count, ...] = Field(5, description="how many equal tasks, or the size of each")
    class_order_seed: Seed | None = Field(None, description="none: the natural order")
    learner: str = Field("er", description="see 'tcil learners'")
    learner_options: dict[str, Any] = Field(default_factory=dict, description="options of the learner, by name")
    network: str = Field("small_cnn", description="see 'tcil networks'")
    optimizer: str = Field("sgd", description="sgd or adam")
    epochs: Count = Field(30, ge=1, description="epochs of each task")
    milestones: tuple[Count, ...] = Field((15, 22), description="epochs after which lr falls to a tenth")
    lr: float = Field(0.1, gt=0, description="learning rate at the beginning of each task")
    weight_decay: float = Field(2e-4, ge=0, description="of the optimizer")
    batch_size: Count = Field(32, ge=1, description="images of a training step")
    crop: int | None = Field(None, ge=0, le=1024, description="pixels that crops move; none: as the dataset has it")
    memory: Count = Field(60, ge=1, description="exemplars of all old classes together")
    validation: Count = Field(40, ge=0, description="validation images of a new task in all")
    validation_pool: Count = Field(80, ge=0, description="held-out images of a new task in all, validation included")
    reserve: float = Field(0.0, ge=0, lt=1, description="share of the memory kept out of training")
    seed: TrainingSeed = Field(1, description="training: initialisation, batches, augmentation, memory")
    validation_seed: Seed = Field(1, ge=0, description="which images are held out")

    @model_validator(mode="before")
    @classmethod
    def _no_code(cls, values: Any, info: ValidationInfo) -> Any:
        if isinstance(values, Mapping) and info.context is not _OWN_WORDS and (found := code_named(values)):
            raise ValueError(f"settings that were read name code to be imported: {', '.join(found)}")
        return values

    @model_validator(mode="after")
    def _consistent(self) -> RunSettings:
        if self.validation_pool < self.validation:
            raise ValueError(f"validation_pool is {self.validation_pool}, less than validation, {self.validation}")
        sizes = (self.tasks,) if isinstance(self.tasks, int) else self.tasks
        if not sizes or min(sizes) < 1:
            raise ValueError(f"tasks is {self.tasks}; a number of tasks or their sizes, each at least 1, is expected")
        if any(m >= self.epochs for m in self.milestones):
            raise ValueError(f"milestones {self.milestones} must lie before epochs, {self.epochs}")
        return self

    @property
    def key(self) -> str:
        """A hash of all settings."""
        return key_of(self.model_dump(mode="json"))

    def on_all_data(self) -> RunSettings:
        """The same training without a validation set, for Vanilla as the paper reports it."""
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
    """Settings in the user's own words: a job of their sweep, say. Never of a file that was found somewhere."""
    return RunSettings.model_validate(values, context=_OWN_WORDS)


def stored_settings(record: Any, file: Path, *, trust: bool, tell: Callable[[str], None]) -> RunSettings:
    """The settings in a file of a run folder. Code that it names is refused, unless the user trusts the folder."""
    if not isinstance(record, Mapping):
        raise invalid("run", f"{file} with {type(record).__name__}", "the settings of a run")
    consent(record, file, trust=trust, tell=tell)
    try:
        return RunSettings.model_validate(record, context=_OWN_WORDS if trust else None)
    except ValidationError as error:
        raise invalid("run", f"{file} ({explain(error)})", "settings as 'tcil run' stored them") from None


def stored_key(record: Any) -> str | None:
    """The key of the settings in a file; None for those of other tools. Nothing that they name is looked for."""
    try:
        return own_settings(record).key
    except ValidationError:
        return None


_SHORT_TUNING = {
    "eeil": {"finetune_epochs": 10, "finetune_milestones": [4, 7]},
    "der": {"finetune_epochs": 10, "finetune_milestones": [5]},
}
_PAPER = {"epochs": 200, "milestones": [100, 150], "lr": 0.1, "weight_decay": 2e-4}
_RESNET32 = {**_PAPER, "network": "resnet32", "batch_size": 128}

_LONG_TUNING = {
    "eeil": {"finetune_epochs": 100, "finetune_milestones": [33, 67]},
    "der": {"finetune_epochs": 100, "finetune_milestones": [50]},
}
_MANY_TASKS = {
    "validation": 100, "validation_pool": 100,
    "by_learner": {k: {"learner_options": v} for k, v in _LONG_TUNING.items()},
}  # fmt: skip

# A preset may say more: under "by_learner", keys that replace its own for a learner; under "at_20_tasks", for 20 tasks.
PRESETS: dict[str, dict[str, Any]] = {
    "digits": {
        "dataset": "noisy-digits", "memory": 100,
        "by_learner": {k: {"learner_options": v} for k, v in _SHORT_TUNING.items()},
    },
    "cifar10": {
        **_RESNET32, "dataset": "cifar10", "tasks": 5, "memory": 200, "validation": 500, "validation_pool": 500,
        "by_learner": {
            "eeil": {"validation": 300, "validation_pool": 300},
            "wa": {"validation": 100, "validation_pool": 100},
        },
    },
    "cifar100": {
        **_RESNET32, "dataset": "cifar100", "tasks": 10, "memory": 2000, "validation": 500, "validation_pool": 500,
        "at_20_tasks": _MANY_TASKS,
        "by_learner": {
            "eeil": {"validation": 300, "validation_pool": 300},
            "der": {"validation": 1000, "validation_pool": 1000},
        },
    },
    "tiny-imagenet": {
        **_PAPER, "network": "resnet18", "batch_size": 256, "dataset": "tiny-imagenet", "tasks": 10, "memory": 4000,
        "validation": 100, "validation_pool": 100, "at_20_tasks": _MANY_TASKS,
        "by_learner": {"eeil": {"validation": 200, "validation_pool": 200}},
    },
    "image-folder": {
        **_PAPER, "network": "resnet18", "batch_size": 64, "dataset": "image-folder", "tasks": 5, "memory": 1000,
        "validation": 100, "validation_pool": 200,
    },
    "cifar100-mini": {
        # As many exemplars a class at the end (20) and validation images a class (25) as the paper has or uses least.
        # Without crops, thirty epochs are enough to know the exemplars by heart, as the paper's 200 are with them.
        "dataset": "cifar100", "classes": 20, "tasks": 5, "network": "small_resnet", "memory": 400,
        "validation": 100, "validation_pool": 200, "epochs": 30, "milestones": [15, 22], "lr": 0.05,
        "weight_decay": 2e-4, "batch_size": 32, "crop": 0,
        "by_learner": {k: {"learner_options": v} for k, v in _SHORT_TUNING.items()},
    },
}  # fmt: skip


def build(values: Mapping[str, Any]) -> RunSettings:
    """Settings from a preset (the dataset's own, or `preset`) and the values that replace its own."""
    given = dict(values)
    for key in ("dataset", "learner", "preset"):
        if not isinstance(given.get(key, ""), str):
            raise invalid(key, shown(given[key]), "a name")
    preset = given.pop("preset", None)
    if preset is None:
        preset = given["dataset"] if given.get("dataset") in PRESETS else "digits"
    if preset not in PRESETS:
        raise unknown_name("preset", str(preset), PRESETS)
    base = dict(PRESETS[preset])
    learner, many = given.get("learner", "er"), base.pop("at_20_tasks", {})
    merged = {**base, **base.get("by_learner", {}).get(learner, {})}
    if given.get("tasks") == 20:
        merged |= {**many, **many.get("by_learner", {}).get(learner, {})}
    merged.pop("by_learner", None)
    options = given.get("learner_options", {})
    if isinstance(options, Mapping):  # options of the preset hold where the user names no other
        given["learner_options"] = {**merged.get("learner_options", {}), **options}
    merged |= given
    validation, epochs = given.get("validation"), given.get("epochs")
    if isinstance(validation, int) and "validation_pool" not in given:
        pool = merged.get("validation_pool", RunSettings.model_fields["validation_pool"].default)
        merged["validation_pool"] = max(pool, validation) if validation else 0
    if isinstance(epochs, int) and "milestones" not in given:
        merged["milestones"] = sorted({m for m in (epochs // 2, epochs * 3 // 4) if 0 < m < epochs})
    try:
        return own_settings(merged)
    except ValidationError as error:
        raise ValueError(explain(error)) from None


def explain(error: ValidationError) -> str:
    """All errors at once, each with its key, its value and, for unknown keys, the nearest valid one."""
    lines = []
    for entry in error.errors():
        key = ".".join(map(str, entry["loc"])) or "settings"
        if entry["type"] == "extra_forbidden":
            advice = nearest(key, [*RunSettings.model_fields, "seeds", "learners", "datasets", "preset"])
            lines.append(f"{key}: got {shown(entry['input'])}; there is no such setting. {advice}".rstrip())
        else:
            lines.append(f"{key}: got {shown(entry['input'])}; {entry['msg'].removeprefix('Value error, ')}.")
    return "\n".join(lines)


def shown(value: object) -> str:
    """A value in a message; Python itself refuses to write out some numbers."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of more than 4,300 digits"
    return text if len(text) <= 200 else f"{text[:200]}..."


def read_toml(path: Path) -> dict[str, Any]:
    """Settings from a TOML file; lists under `seeds`, `learners` and `datasets` make a grid."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise invalid("study", f"{path} ({error.strerror})", "a TOML file with settings") from None
    except (ValueError, RecursionError) as error:
        raise invalid("study", f"{path}, which is not TOML ({error})", "a TOML file with settings") from None


def expand(values: Mapping[str, Any], wins: Collection[str] = ()) -> list[RunSettings]:
    """One run for each combination of `seeds`, `learners` and `datasets`, where these are given.

    A single value in `wins`, such as a `learner` that was given as a flag, replaces the list of a study file.
    """
    rest = {key: value for key, value in values.items() if key.removesuffix("s") not in wins or key in wins}
    grid = {name: rest.pop(f"{name}s") for name in ("dataset", "learner", "seed") if f"{name}s" in rest}
    runs: list[dict[str, Any]] = [rest]
    for name, choices in grid.items():
        if not isinstance(choices, list) or not choices:
            raise invalid(f"{name}s", shown(choices), "a list with at least one entry")
        runs = [{**run, name: choice} for run in runs for choice in choices]
    return [build(run) for run in runs]
