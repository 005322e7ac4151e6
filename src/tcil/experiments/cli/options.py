"""Options shared by several commands, in groups: dataclasses whose fields become options of a command."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from tcil.foundation.errors import invalid

if TYPE_CHECKING:
    from tcil.experiments.config.settings import RunSettings
    from tcil.experiments.scheduling.executors import Resources
    from tcil.experiments.scheduling.job import Job

Out = Annotated[Path, typer.Option(help="folder for run folders")]
REPORT = Path("report")  # the default
Report = Annotated[Path, typer.Option(help="folder for report.html and the tables")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace a report or tables of other runs")]
Verbose = Annotated[bool, typer.Option("--verbose", help="also print the tables by task")]
Browse = Annotated[bool, typer.Option("--open", help="open the report in the browser")]
Device = Annotated[str, typer.Option(help="cpu, cuda or mps")]
Precision = Annotated[
    str | None,
    typer.Option(help="precision of training steps: fp32, bf16 or fp16; calibration is always in fp32 [default: fp32]"),
]
Compiled = Annotated[bool, typer.Option("--compile", help="compile training steps with torch.compile, for GPUs")]
Trust = Annotated[
    bool, typer.Option("--trust", help="import and run the code (package.module:name) that the folder names")
]
TasksUntil = Annotated[
    int | None, typer.Option(min=1, help="stop after this many tasks; omit it later to complete the run")
]
Backup = Annotated[
    Path | None,
    typer.Option(help="after every task, copy what is needed to resume into this folder, like 'tcil pack'"),
]
SomeCalibrators = Annotated[
    str | None,
    typer.Option(help="only these, separated by commas, also with options: ts[solver=sgd],t-cil[policy=random]"),
]


def _presets(incomplete: str) -> list[str]:
    """Completions of `--preset` for shells."""
    from tcil.experiments.config.presets import PRESETS

    return [name for name in PRESETS if name.startswith(incomplete)]


@dataclass(frozen=True)
class StudyOptions:
    """The runs: a study file, and flags that override its settings."""

    study: Annotated[Path | None, typer.Argument(help="study file (TOML) with settings; flags override it")] = None
    preset: Annotated[
        str | None, typer.Option(help="start from these settings; see 'tcil settings'", autocompletion=_presets)
    ] = None
    dataset: Annotated[str | None, typer.Option(help="see 'tcil datasets'")] = None
    learner: Annotated[str | None, typer.Option(help="see 'tcil learners'; several as er,wa")] = None
    network: Annotated[str | None, typer.Option(help="see 'tcil networks'; or pretrained:NAME")] = None
    seeds: Annotated[str | None, typer.Option(help="training seeds, such as 1,2,3")] = None
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="any other setting of 'tcil settings': --set epochs=10 --set learner_options.head=growing"
        ),
    ] = None
    reserve: Annotated[
        float | None, typer.Option(help="data kept out of training: a share of the memory, or images per class")
    ] = None
    precision: Precision = None

    def runs(self) -> list[RunSettings]:
        """The runs of the study file and the flags, without duplicates; all names in them are checked."""
        from tcil.experiments.config.settings import expand, read_toml

        values = read_toml(self.study) if self.study else {}
        flags: dict[str, Any] = {
            "preset": self.preset, "dataset": self.dataset, "learner": self.learner, "reserve": self.reserve,
            "precision": self.precision, "network": self.network,
        }  # fmt: skip
        changes = changed_settings(self.setting)
        check_twice(changes, seeds=self.seeds, **flags)
        if self.learner is not None and "," in self.learner:
            flags |= {"learner": None, "learners": [name.strip() for name in self.learner.split(",") if name.strip()]}
        values |= {key: value for key, value in flags.items() if value is not None}
        if self.dataset is not None and self.preset is None:
            values.pop("preset", None)
        if self.seeds is not None:
            values["seeds"] = numbers(self.seeds)
        options = [where.get("learner_options", {}) for where in (values, changes)]
        if all(isinstance(given, dict) for given in options):  # anything else raises an error below
            changes |= {"learner_options": options[0] | options[1]} if any(options) else {}
        given = flags | {"seeds": self.seeds}
        flags_given = {key for key, value in given.items() if value is not None} | set(changes)
        runs = list({one.name: one for one in expand(values | changes, flags_given)}.values())
        from tcil.experiments.runs.complete import check_names  # after all that is told without torch

        for one in runs:
            check_names(one)
        return runs


@dataclass(frozen=True)
class TrainingOptions:
    """The data, calibrators, device and output folder of runs."""

    data: Annotated[Path | None, typer.Option(help="folder that holds the dataset")] = None
    out: Out = Path("runs")
    calibrators: SomeCalibrators = None
    device: Device = "cpu"
    log: Annotated[str | None, typer.Option(help="csv or tensorboard")] = None
    full_data: Annotated[
        bool, typer.Option(help="also train without a validation set, for the Vanilla row as in the paper")
    ] = True
    tasks_until: TasksUntil = None
    backup: Backup = None
    compiled: Compiled = False

    def jobs(self, runs: Sequence[RunSettings], *, here: bool) -> list[Job]:
        """A job for each run; raises if these options are invalid, `here` also if this machine lacks what they need."""
        from tcil.experiments.runs.complete import check_options
        from tcil.experiments.runs.entries import specs_of
        from tcil.experiments.scheduling.job import Job
        from tcil.foundation.boundary import check_place

        specs = specs_of(self.calibrators)
        names = None if specs is None else tuple(specs)
        check_options(names, self.log, here=here)
        check_place(self.out)
        if self.backup is not None:
            check_place(self.backup, "backup")
        more: dict[str, Any] = {"until": self.tasks_until, "backup": self.backup, "compiled": self.compiled}
        return [Job(one, self.out, self.data, self.device, names, self.log, self.full_data, **more) for one in runs]

    def has_finished(self, run: RunSettings) -> bool:
        """Whether the run has results of all tasks, or of the first `--tasks-until`."""
        from tcil.experiments.runs.results import StoredSettings
        from tcil.experiments.runs.store import RunFolder

        n_tasks = StoredSettings.of(run).n_tasks or 1
        return RunFolder(self.out / run.name).n_results >= min(self.tasks_until or n_tasks, n_tasks)


@dataclass(frozen=True)
class PlaceOptions:
    """Where runs are executed, and the resources of each."""

    on: Annotated[str, typer.Option(help="where several runs are executed: serial, processes or ray")] = "serial"
    ray_address: Annotated[str | None, typer.Option(help="a running Ray cluster: auto, or HOST:PORT")] = None
    cpus_per_run: Annotated[
        float | None, typer.Option(min=0.01, help="CPUs (and threads) per run; fractions allowed")
    ] = None
    gpus_per_run: Annotated[float, typer.Option(min=0, help="GPUs per run; fractions allowed")] = 0.0
    at_once: Annotated[int | None, typer.Option(min=1, help="maximum number of concurrent runs")] = None
    hung_after: Annotated[
        float,
        typer.Option(min=0, help="restart a worker that shows no sign of life for this many seconds; 0: never"),
    ] = 600.0

    def resources(self) -> Resources:
        """The validated resources."""
        from tcil.experiments.scheduling.executors import Resources

        return Resources(self.on, self.ray_address, self.cpus_per_run, self.gpus_per_run, self.at_once, self.hung_after)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command in the form that typer expects: a parameter that is a group of options is replaced by its fields.

    If the parameter has a default, its fields are the defaults of the options.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type[Any]] = {}
    options: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if not is_dataclass(kind):
            options.append(parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        assert isinstance(kind, type)
        groups[parameter.name] = kind
        defaults = kind() if parameter.default is inspect.Parameter.empty else parameter.default
        for name, hint in get_type_hints(kind, include_extras=True).items():
            default = getattr(defaults, name)
            options.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint))

    @functools.wraps(command)
    def call(**given: Any) -> None:
        made = {
            name: kind(**{field.name: given.pop(field.name) for field in fields(kind)}) for name, kind in groups.items()
        }
        command(**made, **given)

    call.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    call.__annotations__ = {option.name: option.annotation for option in options}
    return call


def check_report_place(folder: Path, argument: str) -> None:
    """Raise if no report can be written to the folder; the default folder must not be a link either."""
    from tcil.experiments.reporting.page import check_report
    from tcil.foundation.boundary import check_own_place, check_place

    (check_own_place if folder == REPORT else check_place)(folder, argument)
    check_report(folder, argument)


def numbers(text: str) -> list[int]:
    """The seeds in `1,2,3`."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise invalid("seeds", repr(text), "whole numbers separated by commas, such as 1,2,3") from None


def check_twice(changes: Mapping[str, object], **flags: object) -> None:
    """Raise if both a flag and `--set` give the same setting."""
    for name in (name for name, value in flags.items() if value is not None):
        for key in {name, name.removesuffix("s"), f"{name}s"} & changes.keys():
            raise invalid("--set", f"{key} beside --{name}", "one of the two")


def changed_settings(entries: list[str] | None) -> dict[str, Any]:
    """The settings given by `--set`. `a.b=1` sets a nested value, the last entry wins, and values are JSON or text."""
    values: dict[str, Any] = {}
    for entry in entries or []:
        key, equals, text = entry.partition("=")
        if not equals or not all(key.split(".")):
            raise invalid("--set", repr(entry), "name=value")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = text
        *path, last = key.split(".")
        place = values
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise invalid("--set", repr(entry), f"{part} either as a value or with names below it")
        place[last] = value
    return values
