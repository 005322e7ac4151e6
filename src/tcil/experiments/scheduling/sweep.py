"""Many runs: independent jobs through an executor; jobs whose worker died are tried again, failures are listed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tcil.experiments.process import stopping
from tcil.experiments.process.exits import ExitCode
from tcil.experiments.process.screen import Screen
from tcil.experiments.reporting.collect import read_runs
from tcil.experiments.reporting.show import show_summary
from tcil.experiments.runs.machine import check_device
from tcil.experiments.scheduling.board import Board, Line
from tcil.experiments.scheduling.executors import HUNG_AFTER, Executor, ExecutorLost, Resources, make_executor
from tcil.experiments.scheduling.job import Job, Outcome
from tcil.experiments.scheduling.plan import stream_of
from tcil.experiments.scheduling.status import read_status
from tcil.foundation.errors import invalid
from tcil.foundation.extensions import modules_in
from tcil.incremental.data.datasets import load_dataset

RETRIES = 2  # how often a run is tried again whose worker died
PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before a run is tried again; twice as long each time
STARTING = 300.0  # seconds that a worker may take to its first sign of life: it imports, and reads its data


def run_jobs(jobs: Sequence[Job], resources: Resources, console: Screen) -> ExitCode:
    """Do many runs where `resources` says, and show how each ended; returns the exit code."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise invalid("runs", f"{len(jobs)} under torchrun", "one run: a sweep starts processes of its own")
    for device in {job.device for job in jobs} if resources.here else ():  # nodes of Ray may have other devices
        check_device(device)
    here = Path.cwd()
    if resources.here:
        _check_beginnings(jobs, here)
    jobs = [
        replace(
            job,
            out=job.out.resolve(),
            data=job.data and job.data.resolve(),
            backup=job.backup and job.backup.resolve(),
            threads=resources.threads,
            home=here,
        )
        for job in jobs
    ]
    executor = make_executor(resources)
    try:
        # After the executor was made: Ray sets handlers of its own.
        with stopping.on_signals(signal.SIGINT), Board(jobs, console) as board:
            lines = sweep(
                jobs,
                executor,
                board,
                stop=stopping.requested,
                at_once=resources.at_once,
                hung_after=resources.hung_after,
            )
    finally:
        executor.close()
    return _conclude(lines, console)


def _check_beginnings(jobs: Sequence[Job], home: Path) -> None:
    """Refuse all runs, before the first of them, if one cannot begin: its images are missing, too few or unfit."""
    by_data: dict[tuple[Any, ...], list[Job]] = {}
    for job in jobs:
        options = job.settings.data_options
        by_data.setdefault((job.settings.dataset, job.data, *options.items()), []).append(job)
    with modules_in(home):
        for alike in by_data.values():
            first = alike[0].settings
            dataset = load_dataset(first.dataset, alike[0].data, **first.data_options)
            for job in alike:
                stream_of(job.settings, dataset)
            del dataset  # before the next one is read


def _conclude(lines: Sequence[Line], console: Screen) -> ExitCode:
    """The tables of what is done, the errors of what is not, and the exit code."""
    done = [line for line in lines if line.state == "done"]
    if done:
        show_summary(read_runs([line.job.folder for line in done]), console)
    counts = {state: sum(line.state == state for line in lines) for state in ("done", "failed", "stopped")}
    out = lines[0].job.out
    said = ", ".join(f"{count} {state}" for state, count in counts.items() if count or state == "done")
    where = f"; tables and pictures: tcil report {out}" if done else ""
    console.print(f"{len(lines)} runs: {said}{where}", soft_wrap=True)
    for line in lines:
        if line.state == "failed":
            trace = line.job.folder / "error.txt"
            more = f" (more in {trace})" if trace.exists() else ""
            console.print(f"{line.job.settings.name}: {line.message}{more}", style="red", soft_wrap=True)
    if counts["stopped"]:
        console.print("stopped; run the same command again to resume")
        return ExitCode.STOPPED
    return ExitCode.FAILED if counts["failed"] else ExitCode.DONE


class Watch:
    """How long running jobs have given no sign of life: their status files have not changed meanwhile.

    Time is this process's own, and counts only while it looks: clocks of other nodes do not matter, and whoever was
    halted together with the sweep is not taken for hung.
    """

    def __init__(self, limit: float) -> None:
        self._limit, self._pause, self._looked = limit, min(limit / 20, 5.0), time.monotonic()
        self._silent: dict[Job, tuple[object, float, bool]] = {}  # last sign, seconds since, whether it was this one's

    def hung(self, running: Iterable[Job]) -> list[Job]:
        """Of these jobs, those that have been silent for too long; of a limit of 0, none."""
        passed = time.monotonic() - self._looked
        if not self._limit or passed < self._pause:
            return []
        self._looked += passed
        return [job for job in running if self._look(job, min(passed, 2 * self._pause + 1))]

    def forget(self, job: Job) -> None:
        """The job has ended."""
        self._silent.pop(job, None)

    def _look(self, job: Job, passed: float) -> bool:
        status = read_status(job.folder)
        sign = status and (status.host, status.pid, status.updated)
        last, silent, own = self._silent.get(job, (sign, 0.0, False))
        silent, own = (silent + passed, own) if sign == last else (0.0, True)
        self._silent[job] = sign, silent, own
        return silent >= (self._limit if own else max(self._limit, STARTING))


def sweep(
    jobs: Sequence[Job],
    executor: Executor,
    board: Board,
    *,
    stop: Callable[[], bool],
    at_once: int | None = None,
    retries: int = RETRIES,
    hung_after: float = HUNG_AFTER,
) -> list[Line]:
    """Do all runs; those that another process works on are tried again until it ends. Returns how each ended.

    One without a sign of life for `hung_after` seconds (0: never) is ended, and tried again as if it had died.
    """
    watch = Watch(hung_after)
    queue, deaths, asked = list(jobs), dict.fromkeys(jobs, 0), False
    running: set[Job] = set()
    not_before, pauses = dict.fromkeys(jobs, 0.0), dict.fromkeys(jobs, PAUSE)
    while running or (queue and not asked):
        if stop() and not asked:
            asked = True
            executor.stop()
        due = [job for job in queue if not_before[job] <= time.monotonic()] if not asked else []
        free = min(executor.slots, at_once or len(jobs)) - len(running) if due else 0
        for job in due[: max(0, free)]:
            queue.remove(job)
            running.add(job)
            board.set(job, "running")
            executor.start(job)
        for job in watch.hung(running):
            watch.forget(job)
            executor.kill(job, f"the worker hung: no sign of life for {hung_after:g} s")
        try:
            ended = executor.ended(0.2)
        except ExecutorLost as reason:
            board.remark(str(reason))
            break
        for job, outcome in ended:
            running.remove(job)
            watch.forget(job)
            for text in outcome.remarks:
                board.remark(text)
            again = outcome.state == "in use"
            if outcome.state == "died":
                deaths[job] += 1
                again = deaths[job] <= retries
                outcome = Outcome("queued" if again else "failed", _died(outcome.message, deaths[job]))
            board.set(job, outcome.state, outcome.message)
            if again:
                not_before[job] = time.monotonic() + pauses[job]
                pauses[job] = min(2 * pauses[job], LONGEST_PAUSE)
                queue.append(job)
        if not running:
            time.sleep(0.05)
    for line in board.lines:
        if line.state in ("queued", "in use", "running"):
            board.set(line.job, "stopped", line.message)
    return board.lines


def _died(message: str, times: int) -> str:
    return message if times == 1 else f"{message} ({times} times)"
