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
from rich.console import Console

from tcil.calibration import ranks
from tcil.calibration.errors import invalid
from tcil.experiments import stopping
from tcil.experiments.collect import read_runs
from tcil.experiments.execute import present, show_summary
from tcil.experiments.executors import Resources, make_executor
from tcil.experiments.perform import check_options, train
from tcil.experiments.progress import ProgressDisplay
from tcil.experiments.sweep import Board, Line, sweep
from tcil.experiments.worker import Job
from tcil.incremental.learners.registry import learner_type
from tcil.incremental.networks import network_factory

FAILED = 1


def run_one(job: Job, console: Console) -> int:
    """One run in this process, or on all ranks of torchrun together; returns the exit code."""
    with stopping.on_signals(), _plain_warnings(console), torchrun(job.device) as device:
        if not ranks.current().first:
            console = Console(quiet=True)
        try:
            stored = train(
                job.settings, job.out, data=job.data, device=device, calibrators=job.calibrators, log=job.log,
                full_data=job.full_data, display=partial(ProgressDisplay, console),
            )  # fmt: skip
        except stopping.Stopped as reason:
            console.print(str(reason), highlight=False, soft_wrap=True)
            return stopping.EXIT_CODE
        if ranks.current().first:
            present(stored, console)
    return 0


def run_many(jobs: Sequence[Job], resources: Resources, console: Console) -> int:
    """Many runs through an executor; returns the exit code: 0, 1 if some failed, 75 if a signal stopped it."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise invalid("runs", f"{len(jobs)} under torchrun", "one run: a sweep starts processes of its own")
    check_options(jobs[0].calibrators, jobs[0].log)
    for job in jobs:
        learner_type(job.settings.learner)
        network_factory(job.settings.network)
    here = Path.cwd()
    jobs = [
        replace(job, out=job.out.resolve(), data=job.data and job.data.resolve(), threads=resources.threads, home=here)
        for job in jobs
    ]
    executor = make_executor(resources)
    try:
        # After the executor was made: Ray sets handlers of its own.
        with stopping.on_signals(signal.SIGINT), Board(jobs, console) as board:
            lines = sweep(jobs, executor, board, stop=stopping.requested, at_once=resources.at_once)
    finally:
        executor.close()
    return _conclude(lines, console)


def _conclude(lines: Sequence[Line], console: Console) -> int:
    """The tables of what is done, the errors of what is not, and the exit code."""
    done = [line for line in lines if line.state == "done"]
    if done:
        show_summary(read_runs([line.job.folder for line in done]), console)
    counts = {state: sum(line.state == state for line in lines) for state in ("done", "failed", "stopped")}
    out = lines[0].job.out
    said = ", ".join(f"{count} {state}" for state, count in counts.items() if count or state == "done")
    console.print(f"{len(lines)} runs: {said}; tables and pictures: tcil report {out}", highlight=False, soft_wrap=True)
    for line in lines:
        if line.state == "failed":
            text = f"{line.job.settings.name}: {line.message} (more in {line.job.folder / 'error.txt'})"
            console.print(text, style="red", highlight=False, soft_wrap=True, markup=False)
    if counts["stopped"]:
        console.print("stopped; the same command goes on where it was", highlight=False)
        return stopping.EXIT_CODE
    return FAILED if counts["failed"] else 0


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
def _plain_warnings(console: Console) -> Iterator[None]:
    """Warnings as one line without the place in the code."""
    with warnings.catch_warnings():

        def show(message: Warning | str, category: type[Warning], *rest: Any) -> None:
            console.print(f"warning: {message}", highlight=False, soft_wrap=True, markup=False)

        warnings.showwarning = show  # type: ignore[assignment]
        yield
