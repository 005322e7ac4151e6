"""`tcil reproduce`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tcil.experiments.cli import output
from tcil.experiments.cli.options import (
    REPORT,
    Backup,
    Compiled,
    Device,
    Overwrite,
    PlaceOptions,
    Precision,
    Report,
    TasksUntil,
    changed_settings,
    check_report_place,
    check_twice,
    numbers,
)


def reproduce(
    name: Annotated[str, typer.Argument(help="a table, figure or 'claims' of the paper, or 'all'; 'list' lists them")],
    place: PlaceOptions,
    schedule: Annotated[
        str,
        typer.Option(
            help="mini (for tests), short, small or compact (on a CPU; see --dry-run), short-0.2 (as in version 0.2.0) "
            "or paper (as printed)"
        ),
    ] = "short",
    data: Annotated[Path | None, typer.Option(help="folder that holds the datasets")] = None,
    out: Annotated[Path, typer.Option(help="folder for run folders")] = Path("runs"),
    report: Report = REPORT,
    overwrite: Overwrite = False,
    kept: Annotated[
        list[Path] | None, typer.Option(help="more finished runs: folders, or JSON files from 'tcil report --keep'")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="seeds instead of the schedule's, such as 1,2")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="change a setting of every run: --set epochs=2")
    ] = None,
    device: Device = "cpu",
    full_data: Annotated[
        bool | None,
        typer.Option(
            help="also train on all the data, for the Vanilla row as in the paper [default: depends on the schedule]"
        ),
    ] = None,
    tasks_until: TasksUntil = None,
    backup: Backup = None,
    job: Annotated[
        int | None, typer.Option(min=1, help="execute only the run with this number in the plan; draw nothing")
    ] = None,
    images_per_second: Annotated[
        list[str] | None,
        typer.Option(help="speed of another machine, to plan its hours: resnet32=25000, for each network"),
    ] = None,
    precision: Precision = None,
    compiled: Compiled = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan and its cost, train nothing")] = False,
    render: Annotated[bool, typer.Option("--render", help="draw from finished runs, train nothing")] = False,
) -> None:
    """Reproduce a table, figure or claim of the paper: run, resume or reuse its trainings, and show both results."""
    from tcil.experiments.reproduction.artifacts import ARTIFACTS, all_needs, artifacts_named

    if name == "list":
        for artifact in ARTIFACTS.values():
            output.console.print(f"{artifact.name:18}{artifact.title}")
        return
    from tcil.experiments.reporting.page import PAPER, check_replaced
    from tcil.experiments.reproduction import schedules
    from tcil.experiments.reproduction.reproduce import reproduce as run_and_draw
    from tcil.experiments.scheduling import cost
    from tcil.foundation.boundary import check_place

    artifacts = artifacts_named(name)
    changes = changed_settings(setting)
    check_twice(changes, seeds=seeds, precision=precision)
    changes |= {"precision": precision} if precision is not None else {}
    chosen = schedules.editions(schedule, numbers(seeds) if seeds else None, changes, full_data)
    speed = cost.given_speed(images_per_second) if images_per_second else cost.A100 if schedule == "paper" else None
    only = "plan" if dry_run else "render" if render else ""
    resources = place.resources()
    check_report_place(report, "report")
    if not (overwrite or dry_run or job is not None):  # one run draws nothing
        check_replaced(report, {PAPER}, "report")
    check_place(out)
    if backup is not None:
        check_place(backup, "backup")
    run_and_draw(
        artifacts, chosen, out, report, data=data, device=device, kept=kept or [], only=only,
        console=output.console, resources=resources, until=tasks_until, backup=backup, job=job, speed=speed,
        compiled=compiled,
    )  # fmt: skip
    if dry_run:
        flags: dict[str, object] = {
            "--seeds": seeds, "--tasks-until": tasks_until, "--precision": precision,
            "--full-data": full_data or None, "--no-full-data": full_data is False or None,
            "--compile": compiled or None,
        }  # fmt: skip
        given = [word for flag, value in flags.items() if value is not None for word in _flag(flag, value)]
        given += [word for one in setting or [] for word in ("--set", one)]
        given += [word for one in kept or [] for word in ("--kept", str(one))]
        output.console.print(
            _commands(name, schedule, given, job, len(all_needs(artifacts, chosen))), markup=False, soft_wrap=True
        )


def _flag(name: str, value: object) -> list[str]:
    return [name] if value is True else [name, str(value)]


def _commands(name: str, schedule: str, given: Sequence[str], job: int | None, last: int) -> str:
    """The commands that run the plan on one machine and on several, with the options that say which runs they are."""
    words = shlex.join(["tcil", "reproduce", name, "--schedule", schedule, *given])
    words += " --data DIR --out RUNS --backup OTHER_DISK"
    many, only = f"{words} --device cuda", "" if job is None else f" --job {job}"
    return "\n".join(
        [
            "To run it (docs/scale-out.md has more):",
            f"  this machine, one run per core   {words}{only} --on processes",
            f"  one GPU, four runs at once       {many}{only} --on processes --gpus-per-run 0.25",
            f"  a Ray cluster                    {many}{only} --on ray --ray-address auto --gpus-per-run 0.25",
            f'  {f"a Slurm array, --array=1-{last}":33}{many} --job "$SLURM_ARRAY_TASK_ID"',
            "  When all are done, draw them with --render.",
        ]
    )
