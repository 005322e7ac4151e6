"""Faults on real processes, at moments drawn from a seed: after each, the same command gives what it gives undisturbed.

    python benchmarks/faults.py --faults 200 --out docs/results/faults.json

A small sweep (two seeds of ER on digits, two tasks each) is run once undisturbed. Then it is disturbed again and again,
and every time started once more by the same command: it must end well, leave the same bytes, and not repeat a run that
was finished. Every fault has its own seed, and the counts are stored after each: interrupted, the same command resumes
the same series. tests/test_faults.py runs a few of each kind, and shows that each check fails once the protection that
it is about is taken out (`patch`).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import errno
import importlib
import itertools
import json
import os
import random
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import tcil.calibration.storage as storage
import tcil.experiments.cli as cli
import tcil.experiments.executors as executors
import tcil.experiments.status as status_module
import tcil.experiments.store as store_module
import tcil.experiments.worker as worker_module
import tcil.incremental.training as training
from tcil.calibration.checksums import Damaged, open_json, open_tensors, seal_json
from tcil.experiments.screen import Screen
from tcil.experiments.settings import FORMAT
from tcil.experiments.status import Status, read_status
from tcil.incremental.datasets import load_dataset

SEED = 20261116
CLASSES, EPOCHS, TASKS, SEEDS, BATCH = 4, 5, 2, (1, 2), 32
AT_ONCE = 2  # workers of a sweep on processes
CALIBRATORS = "vanilla,ts,t-cil"
PATIENCE = 120.0
# Files that tell of the time, or of who was at work.
PASSING = {"environment.json", "status.json", "report.html", ".lock", "error.txt"}
FAULTY = """
from pathlib import Path
from tcil.incremental.learners import Learner
from tcil.incremental.learners.er import ER

class Faulty(ER):
    def stage(self, name, task, schedule, generator):
        stage = super().stage(name, task, schedule, generator)
        if self.seed == 2 and task.index == 1 and Path("poison").exists():
            loss = stage.loss
            object.__setattr__(stage, "loss", lambda x, y: loss(x, y) * float("nan"))
        return stage
"""
PLAIN_WORKER = "import tcil.experiments.worker as w; w._report = lambda run: None; w.main()"
# A worker to which something happens at a step of its own, once among all workers of the sweep.
STRUCK_WORKER = """
import os, resource, signal, time, torch
import tcil.experiments.status as status, tcil.experiments.worker as w, tcil.incremental.training as training
status.BEAT = {beat}
exchange, steps = training._exchange, 0
def struck(*args):
    global steps
    steps += 1
    if steps == {at}:
        try:
            os.close(os.open({flag!r}, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return exchange(*args)
        {act}
    return exchange(*args)
training._exchange = struck
w._report = lambda run: None
w.main()
"""
# What the kernel refuses once a process may have no more memory than it has; what its OOM killer does; what hangs.
NO_MORE_MEMORY = "resource.setrlimit(resource.RLIMIT_AS, (2**20, resource.RLIM_INFINITY)); {then}"
STROKES = {
    "memory refused to torch": NO_MORE_MEMORY.format(then="torch.empty(2**40)"),
    "memory refused to Python": NO_MORE_MEMORY.format(then="bytearray(2**36)"),
    "killed for its memory": "os.kill(os.getpid(), signal.SIGKILL)",
    "halted": "os.kill(os.getpid(), signal.SIGSTOP)",
    "waiting for ever": "time.sleep(10**6)",
}
BEAT, HUNG_AFTER = 0.25, 3.0
Patch = Callable[[], None]


class Lost(AssertionError):
    """Something was lost, repeated or silently used."""


def nothing() -> None:
    """All protections in place."""


def require(condition: object, what: str) -> None:
    if not condition:
        raise Lost(what)


class Command:
    """The `tcil` command in a process forked from this one (which has imported everything), with changes made to it."""

    def __init__(self, words: list[str], log: Path, patch: Patch = nothing) -> None:
        self._log = log
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
                os.dup2(file, 1)
                os.dup2(file, 2)
                os.chdir(log.parent)
                worker_module._report = lambda run: None  # pictures cost more than all the rest here
                executors.Worker.command = (sys.executable, "-c", PLAIN_WORKER)
                cli.console = Screen(width=300, file=os.fdopen(os.dup(1), "w"))
                patch()
                cli.app(words)
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                cli.console.file.flush()
                os._exit(code)

    def running(self) -> bool:
        if self._code is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if done else None
        return self._code is None

    def wait(self, patience: float = PATIENCE) -> tuple[int, str]:
        limit = time.monotonic() + patience
        while self.running():
            if time.monotonic() > limit:
                os.kill(self.pid, signal.SIGKILL)
                raise Lost(f"it hangs: {self._log.read_text()[-500:]}")
            time.sleep(0.01)
        assert self._code is not None
        return self._code, self._log.read_text()


def warm_up() -> None:
    """What a sweep imports, also at the first step of an optimizer, and digits: once instead of in every fork."""
    importlib.import_module("tcil.experiments.commands")
    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.ones(1))
    weight.square().backward()
    torch.optim.SGD([weight], lr=0.1, momentum=0.9).step()
    load_dataset("digits")


class Lab:
    """A study, what it gives undisturbed, and fresh folders to disturb it in."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.folder, self.draw, self._number = folder, draw, 0
        warm_up()
        (folder / "faulty.py").write_text(FAULTY)
        settings = f'dataset = "digits"\nclasses = {CLASSES}\ntasks = {TASKS}\nmemory = 40\n'
        settings += f"epochs = {EPOCHS}\nbatch_size = {BATCH}\n"
        for name, learner in (("study", "er"), ("faulty", "faulty:Faulty")):
            text = f'{settings}learner = "{learner}"\nseeds = {list(SEEDS)}\n'
            (folder / f"{name}.toml").write_text(text)
        log, writes, out = folder / "steps", folder / "writes", self.fresh()

        def counted() -> None:
            count_steps(log)
            count_syncs(writes)

        code, said = self.start(out, patch=counted).wait()
        require(code == 0, said)
        self.steps, self.syncs = log.stat().st_size, writes.stat().st_size
        self._reference = {"study": contents(out)}

    def reference(self, study: str) -> dict[str, bytes]:
        """What the undisturbed sweep leaves."""
        if study not in self._reference:
            out = self.fresh()
            code, said = self.start(out, study=study).wait()
            require(code == 0, said)
            self._reference[study] = contents(out)
        return self._reference[study]

    def fresh(self) -> Path:
        self._number += 1
        return self.folder / f"out-{self._number}"

    def clear(self) -> None:
        """Remove what faults have left."""
        for path in self.folder.iterdir():
            if path.name.startswith(("out-", "steps-")):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def words(self, out: Path, *more: str, study: str = "study") -> list[str]:
        own = [f"{study}.toml", "--out", str(out), "--no-full-data", "--calibrators", CALIBRATORS]
        return ["sweep", *own, *(more or ("--on", "serial"))]

    def start(self, out: Path, *more: str, study: str = "study", patch: Patch = nothing) -> Command:
        return Command(
            self.words(out, *more, study=study), self.folder / f"{out.name}-{time.monotonic_ns()}.log", patch
        )

    def settle(self, out: Path, *more: str, study: str = "study", patch: Patch = nothing, anew: str = "") -> str:
        """The same command again: it ends well, with the same bytes, without repeating what was finished.

        `anew` is the name of a run that may be repeated, since one of its files was damaged.
        """
        before = finished(out)
        code, said = self.start(out, *more, study=study, patch=patch).wait()
        require(code == 0, f"the same command again gave the exit code {code}: {said[-1500:]}")
        self.compare(out, study)
        after = finished(out)
        repeated = [name for name, stamp in before.items() if after.get(name) != stamp and not (anew and anew in name)]
        require(not repeated, f"finished and yet done again: {repeated}")
        return said

    def compare(self, out: Path, study: str = "study") -> None:
        found, wanted = contents(out), self.reference(study)
        different = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
        require(not different, f"not as undisturbed: {different}")
        left = [str(path) for path in out.rglob("*.part")]
        require(not left, f"left half-written: {left}")

    def moment(self, longest: float) -> float:
        return self.draw.uniform(0.0, longest)


def processes() -> tuple[str, ...]:
    return "--on", "processes", "--at-once", str(AT_ONCE)


def contents(out: Path) -> dict[str, bytes]:
    files = [path for path in out.rglob("*") if path.is_file() and path.name not in PASSING and path.suffix != ".part"]
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


def finished(out: Path) -> dict[str, tuple[int, int]]:
    """Networks and results of the runs that are finished, with what tells whether they were written again."""
    runs = [path.parent for path in out.glob("*/results.json")]
    files = [path for run in runs for path in [run / "results.json", *run.glob("task-*/model.safetensors")]]
    return {str(path.relative_to(out)): (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


def count_steps(log: Path) -> None:
    """A byte in the file for every step that this process takes."""
    exchange = training._exchange

    def counted(*args: Any) -> Any:
        with log.open("ab") as file:
            file.write(b".")
        return exchange(*args)

    training._exchange = counted  # type: ignore[assignment]


def count_syncs(log: Path) -> None:
    """A byte in the file whenever this process flushes or renames something."""

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with log.open("ab") as file:
                file.write(b".")
            return original(*args)

        return call

    os.fsync, os.replace = counted(os.fsync), counted(os.replace)


def require_whole(out: Path) -> None:
    """Whether every file is what was written: nothing is left to checksums."""
    for name, content in contents(out).items():
        try:
            run, _, own = name.partition("/")
            open_json(content, own) if name.endswith(".json") else open_tensors(content, own)
        except Damaged as reason:
            raise Lost(f"{run}/{own} is damaged: {reason}") from None


def at_work(out: Path) -> list[int]:
    """The processes that say that they work on a run."""
    found = [read_status(path.parent) for path in out.glob("*/status.json")]
    return sorted({status.pid for status in found if status and status.state == "running" and alive(status.pid)})


def is_early(status: Status | None) -> bool:
    """In the first task: whoever is asked to stop now does so long before the end."""
    return status is not None and status.state == "running" and status.task == 0


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def until(condition: Callable[[], object], what: str, patience: float = PATIENCE) -> object:
    limit = time.monotonic() + patience
    while not (found := condition()):
        require(time.monotonic() < limit, f"waited in vain for {what}")
        time.sleep(0.02)
    return found


# the faults; each returns how many it injected ------------------------------------------------------------------


def killed_worker(lab: Lab, patch: Patch = nothing) -> int:
    """SIGKILL of a worker in the middle of its run, once or twice in a sweep: the sweep itself goes on."""
    out, count, wanted = lab.fresh(), 0, lab.draw.randint(1, 2)
    sweep = lab.start(out, *processes(), patch=patch)
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
    sweep = lab.start(out, *processes(), patch=patch)
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
    lab.settle(out, *processes())
    return 1


def killed_node(lab: Lab, cluster: RayCluster, patch: Patch = nothing) -> int:
    """SIGKILL of all processes of a Ray node at once: its runs go on elsewhere."""
    out = lab.fresh()
    where = ("--on", "ray", "--ray-address", cluster.address)
    sweep = lab.start(out, *where, patch=patch)
    node = cluster.second

    def there() -> list[int]:
        return sorted(set(at_work(out)) & set(family(node.pid)))

    until(lambda: there() or not sweep.running(), "a run on the second node")
    time.sleep(lab.moment(0.3))
    if not there():
        sweep.wait()
        return 0
    cluster.kill_second()
    code, said = sweep.wait()
    cluster.start_second()
    require(code == 0, f"the sweep did not get over it: exit code {code}: {said[-1500:]}")
    lab.compare(out)
    lab.settle(out)
    return 1


def failed_write(lab: Lab, patch: Patch = nothing) -> int:
    """The kernel refuses to write beyond a size: the run fails and names the file, and the old one is untouched."""
    out, at, share = lab.fresh(), lab.draw.randrange(4, 40), lab.draw.random()
    note = lab.folder / f"{out.name}-failed.json"

    def limit() -> None:
        patch()
        write, count = store_module.replace_file, 0  # type: ignore[attr-defined]

        def limited(path: Path, content: bytes) -> None:
            nonlocal count
            count += path.name not in PASSING
            if count != at or path.name in PASSING:
                write(path, content)
                return
            old = path.read_bytes().hex() if path.exists() else None
            note.write_text(json.dumps({"path": str(path), "old": old}))
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(share * len(content)), hard))
            try:
                write(path, content)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

        store_module.replace_file = limited  # type: ignore[attr-defined]

    code, said = lab.start(out, patch=limit).wait()
    failed = json.loads(note.read_text())
    path, old = Path(failed["path"]), failed["old"]
    require(code == 1 and str(path) in said and "File too large" in said, f"no clear error: {code}, {said[-800:]}")
    left = [str(part) for part in out.rglob("*.part")]
    require(not left, f"left half-written: {left}")
    now = path.read_bytes().hex() if path.exists() else None
    require(now == old, f"{path.name} is not as it was before the failed write")
    lab.settle(out)
    return 1


def is_read_again(path: Path) -> bool:
    """Whether a run that goes on reads this file, and does not write it anew or remove it unseen."""
    if path.name in ("indices.safetensors", "logits.safetensors"):
        return (path.parent / "results.json").exists()  # else the sweep was killed while this task was calibrated
    if path.name in ("epoch.safetensors", "stage.safetensors"):
        return not (path.parent / "model.safetensors").exists()
    return True


def damaged_file(lab: Lab, patch: Patch = nothing) -> int:
    """A file cut short or with one bit flipped, in a finished or an interrupted sweep: named if read, and made anew."""
    out = lab.fresh()
    sweep = lab.start(out)
    if lab.draw.random() < 0.6:  # else it is finished first
        until(lambda: list(out.glob("*/task-*/epoch.safetensors")), "an epoch")
        time.sleep(lab.moment(0.8))
        if sweep.running():
            os.kill(sweep.pid, signal.SIGKILL)
    sweep.wait()
    files = sorted(path for path in out.rglob("*") if path.suffix in (".json", ".safetensors"))
    victim = lab.draw.choice([path for path in files if path.name != "status.json"])
    read = is_read_again(victim)
    content = bytearray(victim.read_bytes())
    if lab.draw.random() < 0.3:
        content = content[: lab.draw.randrange(len(content))]
    else:
        content[lab.draw.randrange(len(content))] ^= 1 << lab.draw.randrange(8)
    victim.write_bytes(content)
    said = lab.settle(out, patch=patch, anew=victim.relative_to(out).parts[0])
    require(
        f"{victim} is damaged" in said or not read, f"{victim} was damaged and nothing was said of it: {said[-800:]}"
    )
    return 1


def two_sweeps(lab: Lab, patch: Patch = nothing) -> int:
    """Two sweeps on one folder: between them every step is taken once."""
    out, log = lab.fresh(), lab.folder / f"steps-{time.monotonic_ns()}"

    def both() -> None:
        count_steps(log)
        patch()

    first = lab.start(out, patch=both)
    time.sleep(lab.moment(1.0))
    second = lab.start(out, patch=both)
    for sweep in (first, second):
        code, said = sweep.wait()
        require(code == 0, f"one of two sweeps gave the exit code {code}: {said[-800:]}")
    taken = log.stat().st_size
    require(taken == lab.steps, f"{taken} steps instead of {lab.steps}")
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


def not_a_number(lab: Lab, patch: Patch = nothing) -> int:
    """A loss of NaN: that run stops with a verdict, the other one goes on; repaired, the same command does the rest."""
    out, poison = lab.fresh(), lab.folder / "poison"
    poison.touch()
    try:
        code, said = lab.start(out, study="faulty", patch=patch).wait()
    finally:
        poison.unlink()
    require(code == 1, f"the exit code is {code}")
    require("the loss is nan" in said, f"no clear verdict: {said[-800:]}")
    require(len(list(out.glob("*/results.json"))) == len(SEEDS) - 1, "the other run did not go on")
    lab.settle(out, study="faulty")
    return 1


def struck_worker(lab: Lab, stroke: str, patch: Patch = nothing, patience: float = PATIENCE) -> int:
    """A worker without memory, killed for it, or hung: its run is tried again in a new process."""
    out = lab.fresh()
    flag, at = lab.folder / f"{out.name}-struck", lab.draw.randint(1, lab.steps // len(SEEDS))
    code = STRUCK_WORKER.format(beat=BEAT, at=at, flag=str(flag), act=STROKES[stroke])

    def with_it() -> None:
        executors.Worker.command = (sys.executable, "-c", code)
        status_module.BEAT = BEAT
        patch()

    sweep = lab.start(out, *processes(), "--hung-after", str(HUNG_AFTER), patch=with_it)
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


def power_cut(lab: Lab, patch: Patch = nothing) -> int:
    """The power fails: what was not flushed to disk is gone, cut short or zeros. What was stored is still there."""
    out, at = lab.fresh(), lab.draw.randint(1, lab.syncs)
    note = lab.folder / f"{out.name}-stored.json"
    disk = Disk(out, at, note, random.Random(lab.draw.random()))

    def with_disk() -> None:
        disk.install()
        patch()

    code, said = lab.start(out, patch=with_disk).wait()
    if code == 0:
        return 0
    require(code == -signal.SIGKILL, f"exit code {code}: {said[-800:]}")
    for path, acceptable in json.loads(note.read_text()).items():
        now = Path(path).read_bytes().hex() if Path(path).exists() else None
        require(now in acceptable, f"{path} was stored, and is lost in the power cut")
    require_whole(out)
    lab.settle(out)
    return 1


class Disk:
    """Knows what a process has flushed to disk under a folder, and takes the rest away when the power fails.

    Content is safe once its file was flushed, a name once its folder was. Of what is not, each piece is drawn: a name
    as it is or as it was, content cut short, as zeros or as it is.
    """

    def __init__(self, out: Path, at: int, note: Path, draw: random.Random) -> None:
        self._out, self._at, self._note, self._draw = out, at, note, draw
        self._content: dict[int, bytes] = {}  # by inode
        self._names: dict[str, dict[str, int]] = {}  # by folder
        self._held: list[int] = []  # open files, whose inodes are given to no other
        self._stored: dict[str, bytes] = {}
        self._pending: tuple[str, bytes] | None = None
        self._calls = 0

    def install(self) -> None:
        """From here on, in this process."""
        fsync, rename, write, remove = os.fsync, os.replace, store_module.replace_file, store_module.RunFolder.remove  # type: ignore[attr-defined]

        def flushed(file: int) -> None:
            self._step()
            fsync(file)
            place = os.readlink(f"/proc/self/fd/{file}")
            if os.path.isdir(place):
                self._names[place] = {entry.name: entry.inode() for entry in os.scandir(place)}
            else:
                self._held.append(os.dup(file))
                self._content[os.fstat(file).st_ino] = Path(place).read_bytes()

        def renamed(source: Path, target: Path) -> None:
            self._step()
            rename(source, target)

        def stored(path: Path, content: bytes) -> None:
            self._pending = str(path), content
            write(path, content)
            self._pending = None
            if path.name not in PASSING:
                self._stored[str(path)] = content

        def removed(folder: Any, name: str) -> None:
            self._stored.pop(str(folder.path / name), None)
            remove(folder, name)

        os.fsync, os.replace = flushed, renamed  # type: ignore[assignment]
        store_module.replace_file = stored  # type: ignore[attr-defined]
        store_module.RunFolder.remove = removed  # type: ignore[method-assign, assignment]

    def _step(self) -> None:
        self._calls += 1
        if self._calls == self._at:
            self._fail()

    def _fail(self) -> None:
        files: dict[int, bytes] = {}
        for path in self._out.rglob("*"):
            if path.is_file():
                files[path.stat().st_ino] = path.read_bytes()
        self._settle(self._out.parent, self._out.name, files)
        acceptable = {path: [content.hex()] for path, content in self._stored.items()}
        if self._pending and self._pending[0] in acceptable:
            acceptable[self._pending[0]].append(self._pending[1].hex())
        self._note.write_text(json.dumps(acceptable))
        os.kill(os.getpid(), signal.SIGKILL)

    def _settle(self, folder: Path, name: str, files: dict[int, bytes]) -> None:
        """What is left of one name in a folder, and of all under it."""
        path, safe = folder / name, self._names.get(str(folder), {}).get(name)
        now = path.stat().st_ino if path.exists() else None
        if path.is_dir():
            if now != safe and self._draw.random() < 0.5:
                shutil.rmtree(path)
                return
            for inner in sorted({*os.listdir(path), *self._names.get(str(path), {})}):
                self._settle(path, inner, files)
            return
        if name in PASSING or (safe is not None and safe not in {*files, *self._content}):
            return
        kept = now if now == safe else self._draw.choice([now, safe])
        if kept is None:
            path.unlink()
            return
        content = self._content.get(kept)
        if content is None or files.get(kept, content) != content:
            whole = files[kept]
            cut = self._draw.randrange(len(whole) + 1)
            content = self._draw.choice([whole, whole[:cut], whole[:cut] + bytes(len(whole) - cut)])
        path.unlink(missing_ok=True)
        path.write_bytes(content)


def full_disk(lab: Lab, patch: Patch = nothing) -> int:
    """A file system of its own that fills up: runs fail and name the file, nothing is half-written; with space, on."""
    size = int(lab.draw.uniform(0.05, 0.9) * sum(map(len, lab.reference("study").values())))
    folder = lab.folder / f"{lab.fresh().name}-disk"
    folder.mkdir()
    if can_mount():
        in_own_namespace(lambda: _fill(lab, folder / "out", patch, lambda bytes_: mount(folder, bytes_), size))
    else:  # the same error from where the kernel would give it
        _fill(lab, folder / "out", patch, nothing_to_mount, size)
    return 1


def _fill(lab: Lab, out: Path, patch: Patch, mounted: Callable[[int], None], size: int) -> None:
    simulated = mounted is nothing_to_mount
    mounted(size)

    def small() -> None:
        if simulated:
            budget(size)
        patch()

    code, said = lab.start(out, patch=small).wait()
    require(code == 1, f"the exit code is {code}: {said[-800:]}")
    named = f"{out}/" in said and "could not be written (No space left on device)" in said
    require(named, f"no clear error: {said[-800:]}")
    left = [str(part) for part in out.rglob("*.part")]
    require(not left, f"left half-written: {left}")
    require_whole(out)
    mounted(2**30)
    lab.settle(out)


def nothing_to_mount(size: int) -> None:
    """Where mounting is not allowed."""


def budget(size: int) -> None:
    """Writes beyond so many bytes in all get the error of a full disk."""
    left, open_file = size, Path.open

    def limited(path: Path, mode: str = "r", *args: Any, **more: Any) -> Any:
        nonlocal left
        file = open_file(path, mode, *args, **more)
        if mode in ("wb", "xb"):
            write = file.write

            def counted(content: bytes) -> int:
                nonlocal left
                left -= len(content)
                if left < 0:
                    write(content[: max(0, left + len(content))])
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return int(write(content))

            return _Written(file, counted)
        return file

    Path.open = limited  # type: ignore[method-assign, assignment]


class _Written:
    """A file with another `write`."""

    def __init__(self, file: Any, write: Callable[[bytes], int]) -> None:
        self._file, self.write = file, write

    def __enter__(self) -> _Written:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


_libc = ctypes.CDLL(None, use_errno=True)
_NEW_NAMESPACE, _NEW_USER, _PRIVATE, _REMOUNT = 0x20000, 0x10000000, 0x44000, 0x20  # of <sched.h> and <sys/mount.h>


def can_mount() -> bool:
    """Whether a process may have file systems of its own here."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            in_own_namespace(lambda: mount(Path(folder), 2**20))
    except OSError:
        return False
    return True


def mount(folder: Path, size: int) -> None:
    """A file system in memory of that size, or another size for the one that is there."""
    flags = _REMOUNT if folder.is_mount() else 0
    if _libc.mount(b"tmpfs", bytes(folder), b"tmpfs", flags, f"size={size}".encode()):
        raise OSError(ctypes.get_errno(), "mount")


def in_own_namespace(work: Callable[[], None]) -> None:
    """Do this in a process that sees mounts of its own, which end with it; its `Lost` and OSError are raised here."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = ["", ""]
        try:
            own = _NEW_NAMESPACE | (0 if os.geteuid() == 0 else _NEW_USER)
            if _libc.unshare(own) or _libc.mount(None, b"/", None, _PRIVATE, None):
                raise OSError(ctypes.get_errno(), "unshare")
            work()
        except BaseException as error:
            said = [type(error).__name__, str(error)]
        finally:
            os.write(writer, json.dumps(said).encode()[:60000])
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        kind, what = json.loads(file.read())
    os.waitpid(pid, 0)
    if kind:
        raise Lost(what) if kind == "Lost" else OSError(f"{kind}: {what}")


def two_versions(lab: Lab, patch: Patch = nothing) -> int:
    """A folder of a newer format: refused with both versions, untouched. One that an older tcil began: resumed."""
    out = lab.fresh()
    sweep = lab.start(out)
    until(lambda: list(out.glob("*/task-*/epoch.safetensors")), "an epoch")
    time.sleep(lab.moment(0.5))
    if sweep.running():
        os.kill(sweep.pid, signal.SIGKILL)
    sweep.wait()
    run = lab.draw.choice(sorted(path.parent for path in out.glob("*/environment.json")))
    note = run / "environment.json"
    before = note.read_bytes()
    newer = {"format": FORMAT + 1, "tcil": "99.0"}
    note.write_bytes(seal_json({**open_json(before), **newer}, note.name))
    files = {name: content for name, content in contents(out).items() if name.startswith(run.name)}
    code, said = lab.start(out, patch=patch).wait()
    require(code == 1 and f"in format {FORMAT + 1} of run folders" in said and "99.0" in said, f"{code}: {said[-800:]}")
    now = {name: content for name, content in contents(out).items() if name.startswith(run.name)}
    require(now == files, "a run of another format was changed")
    note.write_bytes(seal_json({**open_json(before), "tcil": "0.0.1"}, note.name))
    said = lab.settle(out)
    told = "was begun with tcil 0.0.1 and goes on with" in said
    require(told or f"{run.name}/results.json" in files, f"nothing was said of the other version: {said[-800:]}")
    return 1


def lost_head(lab: Lab, cluster: RayCluster, patch: Patch = nothing) -> int:
    """SIGKILL of Ray's head with all its processes: the sweep ends and says why; the same command resumes."""
    out = lab.fresh()
    sweep = lab.start(out, "--on", "ray", "--ray-address", cluster.address, patch=patch)
    until(lambda: at_work(out) or not sweep.running(), "a worker at work")
    time.sleep(lab.moment(0.3))
    if not sweep.running():
        sweep.wait()
        return 0
    cluster.kill_head()
    started = time.monotonic()
    code, said = sweep.wait()
    cluster.kill_second()
    if code == 0:
        return 0
    require(code == 75 and "the Ray cluster is lost" in said, f"no clear end: exit code {code}: {said[-800:]}")
    require(time.monotonic() - started < 45, "it took long to notice")
    lab.settle(out)
    return 1


class RayCluster:
    """Two Ray nodes on loopback addresses, each in processes of its own."""

    def __init__(self) -> None:
        self.ray = str(Path(sys.executable).parent / "ray")
        # A token of this cluster's own: Ray's ports take no orders without it.
        self.environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.environment |= {"OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "token"}
        self.folder = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp")
        with socket.create_server(("127.0.0.2", 0)) as free:
            self.port = free.getsockname()[1]
        self.address = f"127.0.0.2:{self.port}"
        words = ["--head", f"--port={self.port}", "--include-dashboard=false", f"--temp-dir={self.folder.name}"]
        self.head = self._start("127.0.0.2", *words)
        self.start_second()

    def _start(self, ip: str, *words: str) -> subprocess.Popen[bytes]:
        own = [f"--node-ip-address={ip}", "--num-cpus=1", "--object-store-memory=80000000", "--block"]
        return subprocess.Popen(
            [self.ray, "start", *own, *words],
            env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def start_second(self) -> None:
        self.second = self._start("127.0.0.3", f"--address={self.address}")

    def kill_head(self) -> None:
        kill(family(self.head.pid))
        self.head.wait()

    def kill_second(self) -> None:
        kill(family(self.second.pid))
        self.second.wait()

    @contextlib.contextmanager
    def joined(self) -> Iterator[RayCluster]:
        """Inside, commands started from here know the cluster's token."""
        before = dict(os.environ)
        os.environ.update(self.environment)
        try:
            yield self
        finally:
            os.environ.clear()
            os.environ.update(before)
            for node in (self.second, self.head):
                kill(family(node.pid))
                node.wait()
            with contextlib.suppress(OSError):
                self.folder.cleanup()


def family(pid: int) -> list[int]:
    """A process and all that it started, and so on."""
    parents = collections.defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                parents[int((entry / "stat").read_text().rpartition(")")[2].split()[1])].append(int(entry.name))
    found, new = [pid], [pid]
    while new:
        new = [child for parent in new for child in parents[parent]]
        found += new
    return found


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Nodes:
    """A Ray cluster, started when a fault first needs one, and anew after its head is gone."""

    def __init__(self) -> None:
        self._life = contextlib.ExitStack()
        self._cluster: RayCluster | None = None

    def get(self) -> RayCluster:
        if self._cluster is None or self._cluster.head.poll() is not None:
            self.close()
            self._cluster = self._life.enter_context(RayCluster().joined())
        return self._cluster

    def close(self) -> None:
        """End the cluster, so that it takes no time from faults that need none."""
        self._life.close()
        self._cluster = None


def faults_of(lab: Lab, nodes: Nodes) -> dict[str, tuple[int, Callable[[], int]]]:
    """Every kind of fault, how often it is injected in a round, and how."""
    signals = (signal.SIGTERM, signal.SIGUSR1)
    disk = "full disk" if can_mount() else "full disk (simulated: no mount allowed)"
    return {
        "SIGKILL of a worker": (1, lambda: killed_worker(lab)),
        "SIGKILL of the driver": (1, lambda: killed_driver(lab)),
        "failed write (file-size limit)": (4, lambda: failed_write(lab)),
        disk: (4, lambda: full_disk(lab)),
        "power cut (unsynced writes dropped)": (6, lambda: power_cut(lab)),
        "truncated or bit-flipped file": (5, lambda: damaged_file(lab)),
        "two versions of tcil": (3, lambda: two_versions(lab)),
        "two sweeps on one folder": (1, lambda: two_sweeps(lab)),
        **{number.name: (1, lambda number=number: signalled(lab, number, times=3)) for number in signals},  # type: ignore[misc]
        "SIGTERM to a sweep on processes": (1, lambda: signalled_sweep(lab, signal.SIGTERM, *processes())),
        **{f"worker {name}": (1, lambda name=name: struck_worker(lab, name)) for name in STROKES},  # type: ignore[misc]
        "NaN loss": (1, lambda: not_a_number(lab)),
        "SIGKILL of a Ray node": (1, lambda: killed_node(lab, nodes.get())),
        "SIGKILL of Ray's head": (1, lambda: lost_head(lab, nodes.get())),
    }


def read_record(path: Path | None, seed: int, again: bool) -> dict[str, Any]:
    """The series so far, if the file holds one of this seed."""
    fresh: dict[str, Any] = {"seed": seed, "faults": {}, "in_all": 0, "lost": 0, "losses": [], "next": 0, "seconds": 0}
    if path is None or again or not path.exists():
        return fresh
    record = json.loads(path.read_text())
    return record if record.get("seed") == seed and "next" in record else fresh


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=200, help="at least so many")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--out", type=Path, default=None, help="JSON file for the counts; a series in it is continued")
    parser.add_argument("--again", action="store_true", help="start the series anew")
    parser.add_argument("--only", default="", help="only kinds of fault whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TCIL_LAYOUT", "channels_last")  # else every process measures which is faster
    record = read_record(options.out, options.seed, options.again)
    before, started, nodes = record["seconds"], time.monotonic(), Nodes()
    first = record["in_all"]
    print(f"seed {options.seed}, {first} faults so far", flush=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(nodes):
        lab = Lab(Path(folder), random.Random(options.seed))
        kinds = {name: kind for name, kind in faults_of(lab, nodes).items() if options.only in name}
        plan = [(name, inject) for name, (times, inject) in kinds.items() for _ in range(times)]
        for number in itertools.count(record["next"]):
            if record["in_all"] >= options.faults:
                break
            name, inject = plan[number % len(plan)]
            lab.draw = random.Random(f"{options.seed} {number} {name}")  # its own: a resumed series is the same
            if "Ray" not in name:
                nodes.close()
            try:
                count = inject()
            except Lost as what:
                record["lost"] += 1
                record["losses"].append(f"{number} {name}: {what}"[:2000])
                print(f"LOST {number} {name}: {what}", flush=True)
                count = 1
            lab.clear()
            record["faults"][name] = record["faults"].get(name, 0) + count
            record["in_all"] += count
            spent = time.monotonic() - started
            rate = spent / max(1, record["in_all"] - first)
            record |= {"next": number + 1, "seconds": round(before + spent)}
            record |= {"command": f"python benchmarks/faults.py --faults {options.faults} --out {options.out}"}
            record |= {"sweep": {"runs": len(SEEDS), "tasks": TASKS, "epochs": EPOCHS, "steps": lab.steps}}
            if options.out:
                storage.replace_file(options.out, (json.dumps(record, indent=1) + "\n").encode())
            left = max(0, options.faults - record["in_all"]) * rate / 60
            print(f"{spent:6.0f} s  {record['in_all']:3d} faults, {left:4.0f} min left  {name}", flush=True)
    print("\n| fault | injected |\n|---|---:|")
    for name, count in record["faults"].items():
        print(f"| {name} | {count} |")
    print(f"\n{record['in_all']} faults in {record['seconds']} s, {record['lost']} with a loss")
    sys.exit(1 if record["lost"] else 0)


if __name__ == "__main__":
    main()
