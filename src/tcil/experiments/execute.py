"""What the commands do with a run: execute it with a display, or calibrate it anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tcil.calibration.errors import invalid
from tcil.experiments.calibration import calibrate, entry_of
from tcil.experiments.progress import CsvLog, ProgressDisplay, TensorBoardLog
from tcil.experiments.report import write_report
from tcil.experiments.run import Listener, Run
from tcil.experiments.settings import RunSettings
from tcil.experiments.store import RunFolder
from tcil.experiments.tables import by_task, summary

LOGS: dict[str, Callable[[Path], Listener]] = {"csv": CsvLog, "tensorboard": TensorBoardLog}


def execute(
    settings: RunSettings,
    out: Path,
    *,
    data: Path | None,
    device: str,
    calibrators: Sequence[str] | None,
    log: str | None,
    console: Console,
) -> dict[str, Any]:
    """Run (or resume, or find finished) one run, and show its tables and report."""
    for name in calibrators or ():
        entry_of(name)
    if log is not None and log not in LOGS:
        raise invalid("log", repr(log), "one of " + ", ".join(LOGS))
    folder = out / settings.name
    run = Run(settings, folder, data=data, device=device)
    listeners: list[Listener] = [LOGS[log](folder)] if log else []
    with ProgressDisplay(console, f"{settings.learner} seed {settings.seed}") as display:
        listeners.append(display)

        def listener(progress: Any) -> None:
            for one in listeners:
                one(progress)

        results = run.execute(calibrators, listener)
    console.print(by_task(results, "ece"))
    console.print(summary(results, f"{settings.learner} on {settings.dataset}, seed {settings.seed}"))
    report = write_report(results, run.store.read_json("environment.json") or {}, folder / "report.html")
    console.print(f"run folder {folder}\nreport {report}", highlight=False, soft_wrap=True)
    return results


def recalibrate(
    folder: Path, *, data: Path | None, calibrators: Sequence[str] | None, redraw: int, console: Console
) -> list[dict[str, Any]]:
    """Calibrate every finished task anew from what is stored; with `redraw`, over other draws of the validation set."""
    store = RunFolder(folder)
    record = store.read_json("settings.json")
    if record is None:
        raise invalid("run", f"{folder}, which has no settings.json", "a run folder")
    run = Run(RunSettings(**record), folder, data=data)
    results: list[dict[str, Any]] = []
    scores: dict[str, list[float]] = {}
    for task, memory, learner in run.walk():
        history = results[-1]["history"] if results else {}
        results.append(calibrate(run.finished(task, memory, learner, history), calibrators))
        if redraw and task.index == len(run.stream) - 1:
            for number in range(redraw):
                valid = run.redraw(task, torch.Generator().manual_seed(number))
                outcome = calibrate(run.finished(task, memory, learner, history, valid), calibrators)
                for row in outcome["calibrators"].values():
                    if "ece" in row:
                        scores.setdefault(row["title"], []).append(100 * row["ece"])
    console.print(summary({"tasks": results}, f"{folder.name}, calibrated anew"))
    if redraw:
        table = Table(title=f"ECE after the last task over {redraw} draws of the validation set, %")
        for column in ("calibrator", "mean", "std", "least", "most"):
            table.add_column(column, justify="left" if column == "calibrator" else "right")
        for title, values in scores.items():
            v = torch.tensor(values)
            table.add_row(title, *(f"{float(x):.2f}" for x in (v.mean(), v.std(correction=0), v.min(), v.max())))
        console.print(table)
    return results
