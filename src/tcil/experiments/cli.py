"""The command line. Nothing heavy is imported before a command needs it: `tcil --help` starts without torch."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperGroup

from tcil import __version__
from tcil.calibration.errors import invalid
from tcil.experiments.exits import answered
from tcil.experiments.launch import main
from tcil.experiments.screen import Screen

if TYPE_CHECKING:
    from tcil.experiments.settings import RunSettings
    from tcil.experiments.worker import Job

__all__ = ["app", "main"]


class Commands(TyperGroup):
    """All commands: whatever goes wrong in one is said in a line, with the exit code that stands for it."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        """Read the words of the command line."""
        with answered(passing=PASSING):
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        """Do the command."""
        with answered(passing=PASSING):
            return super().invoke(ctx)


PASSING = (typer.Exit, typer.Abort)
app = typer.Typer(
    help="Honest confidence for classifiers that keep learning new classes.", no_args_is_help=True,
    add_completion=False, cls=Commands, pretty_exceptions_enable=False,
)  # fmt: skip
console = Screen()


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"tcil {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="the version")] = False,
) -> None: ...


# What the commands that make runs have in common.
StudyFile = Annotated[Path | None, typer.Argument(help="TOML file with settings; flags win over it")]
Preset = Annotated[str | None, typer.Option(help="start from these settings; see 'tcil settings'")]
DatasetName = Annotated[str | None, typer.Option(help="see 'tcil datasets'")]
LearnerName = Annotated[str | None, typer.Option(help="see 'tcil learners'")]
Seeds = Annotated[str | None, typer.Option(help="training seeds, such as 1,2,3")]
DataFolder = Annotated[Path | None, typer.Option(help="folder that holds the dataset")]
Out = Annotated[Path, typer.Option(help="where run folders go")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="any other, see 'tcil settings': --set epochs=10 --set learner_options.head=growing"),
]
Reserve = Annotated[float | None, typer.Option(help="share of the memory kept out of training")]
CalibratorNames = Annotated[
    str | None, typer.Option(help="only these, by comma, also with options: ts,t-cil[policy=random]")
]
Device = Annotated[str, typer.Option(help="cpu, cuda or mps")]
Log = Annotated[str | None, typer.Option(help="csv or tensorboard")]
FullData = Annotated[
    bool, typer.Option(help="train once more without a validation set, for Vanilla as the paper reports it")
]
On = Annotated[str, typer.Option(help="where several runs are done: serial, processes or ray")]
RayAddress = Annotated[str | None, typer.Option(help="a running Ray cluster: auto, or HOST:PORT")]
CpusPerRun = Annotated[float | None, typer.Option(min=0.01, help="CPUs, and threads, of each run; fractions allowed")]
GpusPerRun = Annotated[float, typer.Option(min=0, help="GPUs of each run; fractions allowed")]
Trust = Annotated[
    bool, typer.Option("--trust", help="import and run the code (package.module:name) that the folder names")
]
AtOnce = Annotated[int | None, typer.Option(min=1, help="at most so many runs at once")]
HungAfter = Annotated[
    float,
    typer.Option(min=0, help="end and resume a worker that shows no sign of life for this many seconds; 0: never"),
]


@app.command()
def run(
    study: StudyFile = None,
    preset: Preset = None,
    dataset: DatasetName = None,
    learner: LearnerName = None,
    seeds: Seeds = None,
    data: DataFolder = None,
    out: Out = Path("runs"),
    setting: Settings = None,
    reserve: Reserve = None,
    calibrators: CalibratorNames = None,
    device: Device = "cpu",
    log: Log = None,
    full_data: FullData = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan and its cost, train nothing")] = False,
    job: Annotated[int | None, typer.Option(min=1, help="only the run of this number in 'tcil plan'")] = None,
    on: On = "serial",
    ray_address: RayAddress = None,
    cpus_per_run: CpusPerRun = None,
    gpus_per_run: GpusPerRun = 0.0,
    at_once: AtOnce = None,
    hung_after: HungAfter = 600.0,
) -> None:
    """Train a learner task by task, calibrate with every method on the same network, evaluate, report.

    Without arguments: noisy digits, ER, all calibrators, about a minute. Killed at any moment, the same command
    goes on.
    """
    runs = _runs(study, preset, dataset, learner, seeds, setting, reserve)
    if job is not None:
        if job > len(runs):
            raise invalid("job", f"{job}", f"1 to {len(runs)}, as 'tcil plan' numbers the runs")
        runs = [runs[job - 1]]
    from tcil.experiments.executors import Resources

    resources = Resources(on, ray_address, cpus_per_run, gpus_per_run, at_once, hung_after)
    jobs = _jobs(runs, out, data, device, calibrators, log, full_data)
    if dry_run:
        from tcil.experiments.grids import terminal
        from tcil.experiments.plan import Standing, plan

        with_all_data = [one for run in runs for one in (run, *([run.on_all_data()] if full_data else []))]
        found = [(out / one.name / "results.json").is_file() for one in with_all_data]
        done = [Standing.FINISHED if there else Standing.MISSING for there in found]
        console.print(terminal(plan(with_all_data, data, done)))
        return
    from tcil.experiments.commands import run_many, run_one

    alone = len(jobs) == 1 and on == "serial"
    raise typer.Exit(run_one(jobs[0], console) if alone else run_many(jobs, resources, console))


@app.command()
def sweep(
    study: StudyFile = None,
    preset: Preset = None,
    dataset: DatasetName = None,
    learner: LearnerName = None,
    seeds: Seeds = None,
    data: DataFolder = None,
    out: Out = Path("runs"),
    setting: Settings = None,
    reserve: Reserve = None,
    calibrators: CalibratorNames = None,
    device: Device = "cpu",
    log: Log = None,
    full_data: FullData = True,
    on: On = "processes",
    ray_address: RayAddress = None,
    cpus_per_run: CpusPerRun = None,
    gpus_per_run: GpusPerRun = 0.0,
    at_once: AtOnce = None,
    hung_after: HungAfter = 600.0,
) -> None:
    """Do all runs of a study, several at once, with a live table; started again, it does what is left.

    Exit codes: 0 all done, 1 some run failed, 75 stopped by a signal or Ctrl-C (start it again).
    """
    runs = _runs(study, preset, dataset, learner, seeds, setting, reserve)
    from tcil.experiments.commands import run_many
    from tcil.experiments.executors import Resources

    resources = Resources(on, ray_address, cpus_per_run, gpus_per_run, at_once, hung_after)
    jobs = _jobs(runs, out, data, device, calibrators, log, full_data)
    raise typer.Exit(run_many(jobs, resources, console))


@app.command()
def plan(
    study: StudyFile = None,
    preset: Preset = None,
    dataset: DatasetName = None,
    learner: LearnerName = None,
    seeds: Seeds = None,
    out: Out = Path("runs"),
    setting: Settings = None,
    reserve: Reserve = None,
) -> None:
    """Number the runs of a study, a line for each: 'tcil run ... --job N' does the N-th, as a Slurm array needs it."""
    for number, one in enumerate(_runs(study, preset, dataset, learner, seeds, setting, reserve), start=1):
        state = "finished" if (out / one.name / "results.json").is_file() else "to do"
        console.print(f"{number} {one.name} {state}", soft_wrap=True)


def _jobs(
    runs: list[RunSettings],
    out: Path,
    data: Path | None,
    device: str,
    calibrators: str | None,
    log: str | None,
    full_data: bool,
) -> list[Job]:
    from tcil.experiments.calibration import specs_of
    from tcil.experiments.perform import check_options
    from tcil.experiments.worker import Job

    specs = specs_of(calibrators)
    names = None if specs is None else tuple(specs)
    check_options(names, log)
    return [Job(one, out, data, device, names, log, full_data) for one in runs]


def _runs(
    study: Path | None,
    preset: str | None,
    dataset: str | None,
    learner: str | None,
    seeds: str | None,
    setting: list[str] | None,
    reserve: float | None,
) -> list[RunSettings]:
    """The runs that a study file and flags ask for, each once; every name in them is known."""
    from tcil.experiments import settings as module

    values: dict[str, Any] = module.read_toml(study) if study else {}
    flags = {"preset": preset, "dataset": dataset, "learner": learner, "reserve": reserve}
    values |= {key: value for key, value in flags.items() if value is not None}
    if dataset is not None and preset is None:
        values.pop("preset", None)
    if seeds is not None:
        values["seeds"] = _numbers(seeds)
    changes = _changes(setting)
    options = [where.get("learner_options", {}) for where in (values, changes)]
    if all(isinstance(own, dict) for own in options):  # else what is no dict is told below
        changes |= {"learner_options": options[0] | options[1]} if any(options) else {}
    flags_given = {key for key, value in flags.items() if value is not None} | set(changes)
    runs = list({one.name: one for one in module.expand(values | changes, flags_given)}.values())
    from tcil.experiments.perform import check_names  # after all that is told without torch

    for one in runs:
        check_names(one)
    return runs


@app.command()
def calibrate(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")],
    data: Annotated[Path | None, typer.Option(help="folder that holds the dataset")] = None,
    calibrators: Annotated[
        str | None, typer.Option(help="only these, by comma, also with options: ts[solver=sgd]")
    ] = None,
    redraw: Annotated[
        int, typer.Option(min=0, max=10_000, help="also with so many other draws of the validation set")
    ] = 0,
    trust: Trust = False,
) -> None:
    """Recompute calibrators on a finished run, without training."""
    from tcil.experiments.calibration import specs_of
    from tcil.experiments.execute import recalibrate

    names = specs_of(calibrators)
    recalibrate(folder, data=data, calibrators=names, redraw=redraw, console=console, trust=trust)


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="folder with tasks.json and task-00.npz, ...")],
    out: Annotated[Path, typer.Option(help="where run folders go")] = Path("runs"),
    data: Annotated[Path | None, typer.Option(help="folder that holds the dataset, for checkpoints")] = None,
    calibrators: Annotated[
        str | None, typer.Option(help="only these, by comma, also with options: ts[solver=sgd]")
    ] = None,
    trust: Trust = False,
) -> None:
    """Calibrate models that were trained elsewhere, from their logits, labels and class lists."""
    from tcil.experiments.calibration import specs_of
    from tcil.experiments.collect import read_runs
    from tcil.experiments.execute import show_run
    from tcil.experiments.importing import import_run

    folder = out / f"imported-{source.resolve().name}"
    names = specs_of(calibrators)
    tell = partial(console.print, soft_wrap=True)
    import_run(source, folder, data=data, calibrators=names, trust=trust, tell=tell)
    show_run(read_runs([folder])[0], console)
    console.print(f"run folder {folder}\nreport {folder / 'report.html'}", soft_wrap=True)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="run folders, or folders that hold some")],
    out: Annotated[Path, typer.Option(help="folder for report.html and the tables")] = Path("report"),
    keep: Annotated[
        Path | None, typer.Option(help="also copy the results, as small JSON files, into this folder")
    ] = None,
) -> None:
    """Tables and pictures of any set of runs: on the terminal, as HTML, Markdown, LaTeX and CSV."""
    from tcil.experiments import collect
    from tcil.experiments.execute import show_report

    stored = collect.read_runs(runs)
    if keep is not None:
        collect.keep(stored, keep)
    show_report(stored, out, console)


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(help="a table, figure or 'claims' of the paper, or 'all'; 'list' lists them")],
    schedule: Annotated[
        str, typer.Option(help="mini (digits), short (hours on a CPU) or paper (as printed)")
    ] = "short",
    data: Annotated[Path | None, typer.Option(help="folder that holds the datasets")] = None,
    out: Annotated[Path, typer.Option(help="where run folders are and go")] = Path("runs"),
    report: Annotated[Path, typer.Option(help="folder for report.html and the tables")] = Path("report"),
    kept: Annotated[
        list[Path] | None, typer.Option(help="more finished runs: folders, or JSON that 'tcil report --keep' left")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="other seeds than the schedule's, such as 1,2")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="any setting, for every run: --set epochs=2")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or mps")] = "cpu",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only the plan and its cost")] = False,
    render: Annotated[bool, typer.Option("--render", help="train nothing, draw from what is there")] = False,
    on: On = "serial",
    ray_address: RayAddress = None,
    cpus_per_run: CpusPerRun = None,
    gpus_per_run: GpusPerRun = 0.0,
    at_once: AtOnce = None,
    hung_after: HungAfter = 600.0,
) -> None:
    """Run (or resume, or reuse) what a table, figure or claim of the paper needs, and draw it beside the printed."""
    from tcil.experiments.artifacts import ARTIFACTS, artifacts_named

    if name == "list":
        for artifact in ARTIFACTS.values():
            console.print(f"{artifact.name:18}{artifact.title}")
        return
    from tcil.experiments import schedules
    from tcil.experiments.executors import Resources
    from tcil.experiments.reproduce import reproduce as run_and_draw

    chosen = schedules.editions(schedule, _numbers(seeds) if seeds else None, _changes(setting))
    only = "plan" if dry_run else "render" if render else ""
    resources = Resources(on, ray_address, cpus_per_run, gpus_per_run, at_once, hung_after)
    run_and_draw(
        artifacts_named(name), chosen, out, report, data=data, device=device, kept=kept or [], only=only,
        console=console, resources=resources,
    )  # fmt: skip


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="a run folder, or a folder that holds some")],
    b: Annotated[Path, typer.Argument(metavar="B", help="another, with the same datasets, learners and seeds")],
    out: Annotated[Path | None, typer.Option(help="folder for the tables as files")] = None,
) -> None:
    """Two sets of runs side by side, with paired differences and their intervals."""
    from tcil.experiments import collect, tables
    from tcil.experiments.execute import write_tables
    from tcil.experiments.grids import terminal

    left, right = collect.read_runs([a]), collect.read_runs([b])
    grids = [tables.comparison(left, right, key) for key in tables.COLUMNS if key != "noise_floor"]
    for grid in grids:
        console.print(terminal(grid))
    if out is not None:
        write_tables(grids, out)


@app.command()
def download(
    dataset: Annotated[str, typer.Argument(help="cifar10, cifar100 or tiny-imagenet")],
    data: Annotated[Path, typer.Option(help="folder to put it in")],
) -> None:
    """Fetch a dataset, resumed where it stopped, and check it."""
    from rich.progress import Progress

    from tcil.incremental.datasets.download import download as fetch

    with Progress(console=console, disable=not console.is_terminal) as bar:
        shown = bar.add_task("downloading", total=None)
        target = fetch(dataset, data, report=lambda done, total: bar.update(shown, completed=done, total=total))
    console.print(f"{dataset} is in {target}", soft_wrap=True)


@app.command()
def datasets() -> None:
    """List the datasets."""
    from tcil.incremental.datasets import DATASETS

    _list("dataset", {name: entry.meaning for name, entry in DATASETS.items()})


@app.command()
def learners() -> None:
    """List the learners."""
    from tcil.incremental.learners import LEARNERS

    _list("learner", {name: kind.meaning for name, kind in LEARNERS.items()})


@app.command("calibrators")
def list_calibrators() -> None:
    """List the calibrators."""
    from tcil.experiments.calibration import CALIBRATORS

    _list("calibrator", {name: entry.meaning for name, entry in CALIBRATORS.items()})


@app.command("settings")
def list_settings() -> None:
    """List the settings with what 'tcil run' alone would take, and the presets."""
    from tcil.experiments.settings import PRESETS, RunSettings, build

    plain = build({})
    table = Table("setting", "default", "meaning", box=None)
    for name, field in RunSettings.model_fields.items():
        table.add_row(name, str(getattr(plain, name)), field.description or "")
    console.print(table)
    console.print(f"presets: {', '.join(PRESETS)}; a study file may also list seeds, learners and datasets")


@app.command("networks")
def list_networks() -> None:
    """List the networks."""
    from tcil.incremental.networks import NETWORKS

    _list("network", {name: (factory.__doc__ or "").partition(":")[0] for name, factory in NETWORKS.items()})


def _list(kind: str, rows: dict[str, str]) -> None:
    from tcil.incremental.extensions import installed

    rows |= {name: f"from an installed package: {point.value}" for name, point in installed(kind).items()}
    table = Table(show_header=False, box=None)
    for name, meaning in rows.items():
        table.add_row(name, meaning)
    console.print(table)
    console.print("or one of your own: package.module:name")


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise invalid("seeds", repr(text), "whole numbers by comma, such as 1,2,3") from None


def _changes(entries: list[str] | None) -> dict[str, Any]:
    """What `--set` gives: `a.b=1` into nested settings, the last where one is given twice; JSON where it can be."""
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


if __name__ == "__main__":
    main()
