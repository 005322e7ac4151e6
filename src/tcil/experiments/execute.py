"""What the commands do with finished runs: show them, or calibrate them anew."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tcil.calibration.errors import invalid
from tcil.calibration.storage import replace_file
from tcil.experiments.boundary import check_entries
from tcil.experiments.calibration import calibrate, entry_of, merged
from tcil.experiments.collect import StoredRun, Study, read_runs, shown, studies
from tcil.experiments.grids import Cell, Grid, Row, comma_separated, latex, markdown, terminal
from tcil.experiments.report import write_report
from tcil.experiments.run import Run
from tcil.experiments.settings import stored_settings
from tcil.experiments.statistics import Spread
from tcil.experiments.store import RunFolder, check_format
from tcil.experiments.tables import by_task, side_by_side, summary


def present(run: StoredRun, console: Console) -> None:
    """The tables of a finished run, its report, and where they are."""
    show_run(run, console)
    report = write_report([run], run.path / "report.html")
    console.print(f"run folder {run.path}\nreport {report}", soft_wrap=True)


def show_run(run: StoredRun, console: Console) -> None:
    """All tables of a run; the means come last, where the eye is."""
    study = Study((run,))
    for key in ("accuracy", "aece", "ece_predicted_old", "ece_predicted_new", "ece"):
        console.print(terminal(by_task(study, key)))
    console.print(terminal(summary(study)))


def show_summary(runs: Sequence[StoredRun], console: Console) -> None:
    """The means of any set of runs, a table for each study."""
    for study in studies(shown(runs)):
        console.print(terminal(summary(study)))


def show_report(runs: Sequence[StoredRun], out: Path, console: Console) -> None:
    """The tables of any set of runs on the terminal and as files, and their page."""
    groups = studies(shown(runs))
    grids = [summary(study) for study in groups]
    if len(groups) > 1:
        grids = [
            side_by_side(groups, key) for key in ("accuracy", "ece", "ece_predicted_old", "ece_predicted_new")
        ] + grids
    for grid in grids:
        console.print(terminal(grid))
    write_tables(grids, out)
    page = write_report(runs, out / "report.html")
    console.print(f"report {page}\ntables {out / 'tables.md'}, .tex, .csv", soft_wrap=True)


def write_tables(grids: Sequence[Grid], out: Path) -> None:
    """The same tables as Markdown, LaTeX and CSV."""
    out.mkdir(parents=True, exist_ok=True)
    for suffix, form in {"md": markdown, "tex": latex}.items():
        replace_file(out / f"tables.{suffix}", "\n".join(form(grid) for grid in grids).encode())
    replace_file(out / "tables.csv", comma_separated(grids).encode())


def recalibrate(
    folder: Path,
    *,
    data: Path | None,
    calibrators: Sequence[str] | None,
    redraw: int,
    console: Console,
    trust: bool = False,
) -> list[dict[str, Any]]:
    """Calibrate every finished task anew from what is stored, and store the rows beside the others.

    With `redraw`, also over other draws of the validation set after the last task, stored as redraw.json. Code that the
    folder's settings name is imported only with `trust`.
    """
    for name in calibrators or ():
        entry_of(name)
    check_entries(folder)
    store = RunFolder(folder)
    check_format(store.read_json("environment.json"), folder)
    record = store.read_json("settings.json")
    if record is None or (isinstance(record, dict) and record.get("imported")):
        raise invalid("run", f"{folder}, without the settings of a training", "a folder that 'tcil run' made")
    tell = partial(console.print, soft_wrap=True)
    run = Run(stored_settings(record, folder / "settings.json", trust=trust, tell=tell), folder, data=data)
    if redraw and run.settings.validation_pool <= run.settings.validation:
        pool = f"a run whose validation_pool ({run.settings.validation_pool}) is larger than its validation set"
        raise invalid("redraw", f"{redraw}", pool)
    run.check_folder()
    run.check_finished()
    with store.held():
        return _recalibrated(run, record, calibrators, redraw, console)


def _recalibrated(
    run: Run, record: dict[str, Any], calibrators: Sequence[str] | None, redraw: int, console: Console
) -> list[dict[str, Any]]:
    store, folder = run.store, run.store.path
    results: list[dict[str, Any]] = []
    draws: dict[str, list[float]] = {}
    histories: list[dict[str, Any]] = [{} for _ in range(redraw)]
    whole = store.read_json("results.json")
    with run.threads():
        for task, memory, learner in run.walk():
            history = results[-1]["history"] if results else {}
            results.append(calibrate(run.finished(task, memory, learner, history), calibrators))
            name = f"{store.task(task.index).name}/results.json"
            store.write_json(name, merged(run.stored_results(task, whole), results[-1]))
            last = task.index == len(run.stream) - 1
            for number, remembered in enumerate(histories):
                valid = run.redraw(task, torch.Generator().manual_seed(1000 * number + task.index))
                # Before the last task only what later ones remember is needed.
                names = calibrators if last else list(results[-1]["history"])
                if names == []:
                    continue
                outcome = calibrate(run.finished(task, memory, learner, remembered, valid), names)
                histories[number] = outcome["history"]
                for row in outcome["calibrators"].values() if last else ():
                    if "ece" in row:
                        draws.setdefault(row["title"], []).append(row["ece"])
    if whole is not None:
        tasks = [merged(old, new) for old, new in zip(whole["tasks"], results, strict=True)]
        store.write_json("results.json", {**whole, "tasks": tasks})
        write_report(read_runs([folder]), folder / "report.html")
    environment = store.read_json("environment.json") or {}
    console.print(terminal(summary(Study((StoredRun(folder, record, results, environment),)))))
    if redraw:
        store.write_json("redraw.json", draws)
        console.print(terminal(redrawn(draws, redraw)))
    return results


def redrawn(draws: dict[str, list[float]], count: int) -> Grid:
    """How much each calibrator's ECE depends on which validation images it was given."""
    rows = []
    for title, values in draws.items():
        percents = [100 * value for value in values]
        ends = (Cell(Spread.lone(end(percents))) for end in (min, max))
        rows.append(Row(title, (Cell(Spread.of(percents)), *ends)))
    title = f"ECE after the last task over {count} draws of the validation set, %"
    return Grid(title, ("calibrator", "mean", "least", "most"), tuple(rows))
