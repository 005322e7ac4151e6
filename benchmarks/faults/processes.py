"""What happens to processes: killed, without memory, hung, asked to stop. Each fault returns how many it injected."""

from __future__ import annotations

import json
import os
import signal
import time

from benchmarks.faults import seams, worker
from benchmarks.faults.checks import PATIENCE, Lost, alive, at_work, is_early, kill, require, until
from benchmarks.faults.lab import SEEDS, Lab, Patch, count_steps, nothing
from tcil.experiments.scheduling.status import read_status

HUNG_AFTER = 3.0


def killed_worker(lab: Lab, patch: Patch = nothing) -> int:
    """SIGKILL of a worker in the middle of its run, once or twice in a sweep: the sweep itself goes on."""
    out, count, wanted = lab.fresh(), 0, lab.draw.randint(1, 2)
    sweep = lab.start(out, *lab.processes, patch=patch)
    while count < wanted and sweep.running():
        pause = lab.moment(0.5)
        until(lambda: at_work(out) or not sweep.running(), "a worker at work")
        time.sleep(pause)
        workers = at_work(out)
        if workers:
            os.kill(lab.draw.choice(workers), signal.SIGKILL)
            count += 1
            time.sleep(0.1)
    code, said = sweep.wait()
    require(code == 0, f"the sweep did not get over it: exit code {code}: {said[-1500:]}")
    lab.compare(out)
    lab.settle(out)
    return count


def killed_driver(lab: Lab, patch: Patch = nothing) -> int:
    """SIGKILL of the sweep's own process: its workers save and end, and the next sweep goes on."""
    out = lab.fresh()
    sweep = lab.start(out, *lab.processes, patch=patch)
    until(lambda: at_work(out) or not sweep.running(), "a worker at work")
    time.sleep(lab.moment(0.25))
    workers = at_work(out)
    early = [path.parent for path in out.glob("*/status.json") if is_early(read_status(path.parent))]
    if not sweep.running() or not early:
        sweep.wait()
        return 0
    os.kill(sweep.pid, signal.SIGKILL)
    sweep.wait()
    try:
        until(lambda: not any(map(alive, workers)), "the orphaned workers to end", 60)
    except Lost:
        kill(list(filter(alive, workers)))
        raise
    went_on = [run.name for run in early if (status := read_status(run)) is None or status.state != "stopped"]
    require(not went_on, f"workers went on though the sweep was dead: {went_on}")
    lab.settle(out, *lab.processes)
    return 1


def struck_worker(lab: Lab, stroke: str, patch: Patch = nothing, patience: float = PATIENCE) -> int:
    """A worker without memory, killed for it, or hung: its run is tried again in a new process."""
    out = lab.fresh()
    flag, at = lab.folder / f"{out.name}-struck", lab.draw.randint(1, lab.steps // len(SEEDS))

    def with_it() -> None:
        seams.start_workers_by(*worker.words(stroke, at, flag))
        seams.beat_every(worker.BEAT)
        patch()

    sweep = lab.start(out, *lab.processes, "--hung-after", str(HUNG_AFTER), patch=with_it)
    try:
        ended, said = sweep.wait(patience)
    except Lost:
        kill(list(filter(alive, at_work(out))))  # halted as they are, they do not notice that the sweep is gone
        raise
    require(flag.exists(), "nothing happened")
    require(ended == 0, f"the sweep did not get over it: exit code {ended}: {said[-1500:]}")
    hung = stroke in ("halted", "waiting for ever")
    words = ("no sign of life",) if hung else ("memory", "MemoryError")
    require(any(word in said for word in words), f"nothing was said of it: {said[-800:]}")
    lab.compare(out)
    lab.settle(out)
    return 1


def signalled(lab: Lab, number: signal.Signals, patch: Patch = nothing, times: int = 2) -> int:
    """SIGTERM or SIGUSR1: the step is finished and saved; over all restarts every step is taken once."""
    out, log, count = lab.fresh(), lab.folder / f"steps-{time.monotonic_ns()}", 0

    def noted() -> None:
        count_steps(log)
        patch()

    while count < times:
        started = time.monotonic()
        sweep = lab.start(out, patch=noted)
        before = log.stat().st_size if log.exists() else 0
        until(lambda: (log.exists() and log.stat().st_size > before) or not sweep.running(), "a step")  # noqa: B023
        time.sleep(lab.moment(0.3))
        if sweep.running():
            os.kill(sweep.pid, number)
        code, said = sweep.wait()
        if code == 0:
            break
        require(code == 75, f"{number.name} gave the exit code {code} after {time.monotonic() - started:.1f} s: {said}")
        count += 1
    code, said = lab.start(out, patch=noted).wait()
    require(code == 0, said)
    taken = log.stat().st_size
    require(taken == lab.steps, f"{taken} steps instead of {lab.steps}: something was lost and done again")
    lab.settle(out)
    return count


def signalled_sweep(lab: Lab, number: signal.Signals, *where: str, patch: Patch = nothing) -> int:
    """The same to a sweep whose runs are on other processes: it passes the signal on, and they save and end."""
    out = lab.fresh()
    sweep = lab.start(out, *where, patch=patch)
    until(lambda: at_work(out) or not sweep.running(), "a worker at work")
    time.sleep(lab.moment(0.3))
    if not sweep.running():
        return 0
    os.kill(sweep.pid, number)
    code, said = sweep.wait()
    if code == 0:
        return 0
    require(code == 75, f"{number.name} gave the exit code {code}: {said[-800:]}")
    require(not at_work(out), "a worker goes on")
    stopped = [json.loads(path.read_text())["state"] for path in out.glob("*/status.json")]
    require("stopped" in stopped, f"no run was stopped in its step: {stopped}, {said[-800:]}")
    lab.settle(out)
    return 1
