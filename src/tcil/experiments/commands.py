"""What `tcil run` and `tcil sweep` do: one run with its tables, or many through an executor; signals and exit codes."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tcil.calibration import ranks
from tcil.calibration.errors import invalid
from tcil.experiments import stopping
from tcil.experiments.collect import read_runs
from tcil.experiments.execute import present, show_summary
from tcil.experiments.executors import Resources, make_executor
from tcil.experiments.exits import ExitCode, RunFailed
from tcil.experiments.perform import note_error, train
from tcil.experiments.progress import ProgressDisplay
from tcil.experiments.screen import Screen
from tcil.experiments.sweep import Board, Line, sweep
from tcil.experiments.worker import Job


def run_one(job: Job, console: Screen) -> int:
    """One run in this process, or on all ranks of torchrun together; returns the exit code."""
    with stopping.on_signals(signal.SIGINT), _plain_warnings(console), torchrun(job.device) as device:
        if not ranks.current().first:
            console = Screen(quiet=True)
        try:
            stored = train(
                job.settings, job.out, data=job.data, device=device, calibrators=job.calibrators, log=job.log,
                full_data=job.full_data, display=partial(ProgressDisplay, console),
            )  # fmt: skip
        except stopping.Stopped as reason:
            console.print(str(reason), soft_wrap=True)
            return ExitCode.STOPPED
        except RunFailed as error:
            note_error(job.folder)
            raise RunFailed(f"{error} (more in {job.folder / 'error.txt'})") from error
        if ranks.current().first:
            (job.folder / "error.txt").unlink(missing_ok=True)
            present(stored, console)
    return ExitCode.DONE


def run_many(jobs: Sequence[Job], resources: Resources, console: Screen) -> int:
    """Many runs through an executor; returns the exit code."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise invalid("runs", f"{len(jobs)} under torchrun", "one run: a sweep starts processes of its own")
    here = Path.cwd()
    jobs = [
        replace(job, out=job.out.resolve(), data=job.data and job.data.resolve(), threads=resources.threads, home=here)
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


def _conclude(lines: Sequence[Line], console: Screen) -> int:
    """The tables of what is done, the errors of what is not, and the exit code."""
    done = [line for line in lines if line.state == "done"]
    if done:
        show_summary(read_runs([line.job.folder for line in done]), console)
    counts = {state: sum(line.state == state for line in lines) for state in ("done", "failed", "stopped")}
    out = lines[0].job.out
    said = ", ".join(f"{count} {state}" for state, count in counts.items() if count or state == "done")
    console.print(f"{len(lines)} runs: {said}; tables and pictures: tcil report {out}", soft_wrap=True)
    for line in lines:
        if line.state == "failed":
            text = f"{line.job.settings.name}: {line.message} (more in {line.job.folder / 'error.txt'})"
            console.print(text, style="red", soft_wrap=True)
    if counts["stopped"]:
        console.print("stopped; the same command goes on where it was")
        return ExitCode.STOPPED
    return ExitCode.FAILED if counts["failed"] else ExitCode.DONE


@contextmanager
def torchrun(device: str) -> Iterator[str]:
    """Under torchrun, one run on all its ranks: NCCL with a GPU for each, else gloo. Yields the rank's device."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield device
        return
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        local = int(os.environ["LOCAL_RANK"])
        if local >= torch.cuda.device_count():
            raise invalid("nproc-per-node", f"rank {local}", f"at most {torch.cuda.device_count()}, the GPUs here")
        torch.cuda.set_device(local)
        device = f"cuda:{local}"
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        with ranks.sharded():
            yield device
    finally:
        dist.destroy_process_group()


@contextmanager
def _plain_warnings(console: Screen) -> Iterator[None]:
    """Warnings as one line without the place in the code."""
    with warnings.catch_warnings():

        def show(message: Warning | str, category: type[Warning], *rest: Any) -> None:
            console.print(f"warning: {message}", soft_wrap=True)

        warnings.showwarning = show  # type: ignore[assignment]
        yield
