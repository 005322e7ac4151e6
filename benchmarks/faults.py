"""Faults on real processes, at moments drawn from a seed: after each, the same command gives what it gives undisturbed.

    python benchmarks/faults.py --faults 50 --out docs/results/faults.json

A small sweep (two seeds of ER on digits, two tasks each) is run once undisturbed. Then it is disturbed again and again,
and every time started once more by the same command: it must end well, leave the same bytes, and not repeat a run that
was finished. tests/test_faults.py runs a few of each kind, and shows that each check fails once the protection that it
is about is taken out (`patch`).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import tcil.experiments.cli as cli
import tcil.experiments.executors as executors
import tcil.experiments.store as store_module
import tcil.experiments.worker as worker_module
import tcil.incremental.training as training
from tcil.experiments.screen import Screen
from tcil.experiments.status import Status, read_status
from tcil.incremental.datasets import load_dataset

SEED = 20261116
EPOCHS, TASKS, SEEDS, BATCH = 6, 2, (1, 2), 64
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
QUICK = ("failed write (file-size limit)", "truncated or bit-flipped file")  # these start no other processes
PLAIN_WORKER = "import tcil.experiments.worker as w; w._report = lambda run: None; w.main()"
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
    """What torch imports at the first step of an optimizer, and digits: here once instead of in every fork."""
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
        settings = f'dataset = "digits"\nepochs = {EPOCHS}\ntasks = {TASKS}\nmemory = 40\nbatch_size = {BATCH}\n'
        for name, learner in (("study", "er"), ("faulty", "faulty:Faulty")):
            text = f'{settings}learner = "{learner}"\nseeds = {list(SEEDS)}\n'
            (folder / f"{name}.toml").write_text(text)
        log, out = folder / "steps", self.fresh()
        code, said = self.start(out, patch=lambda: count_steps(log)).wait()
        require(code == 0, said)
        self.steps = log.stat().st_size
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
    files = [path for path in out.rglob("*") if path.is_file() and path.name not in PASSING]
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


class RayCluster:
    """Two Ray nodes on loopback addresses, each in processes of its own."""

    def __init__(self) -> None:
        self.ray = str(Path(sys.executable).parent / "ray")
        # A token of this cluster's own: Ray's ports take no orders without it.
        self.environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.environment |= {"OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "token"}
        self.folder = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp")
        self.port = 20000 + os.getpid() % 20000
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=50, help="at least so many")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--out", type=Path, default=None, help="JSON file for the counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    draw = random.Random(options.seed)
    print(f"seed {options.seed}")
    counts: collections.Counter[str] = collections.Counter()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, RayCluster().joined() as cluster:
        lab = Lab(Path(folder), draw)
        kinds: dict[str, Callable[[], int]] = {
            "SIGKILL of a worker": lambda: killed_worker(lab),
            "SIGKILL of the driver": lambda: killed_driver(lab),
            "SIGKILL of a Ray node": lambda: killed_node(lab, cluster),
            "failed write (file-size limit)": lambda: failed_write(lab),
            "truncated or bit-flipped file": lambda: damaged_file(lab),
            "two sweeps on one folder": lambda: two_sweeps(lab),
            "SIGTERM": lambda: signalled(lab, signal.SIGTERM, times=4),
            "SIGUSR1": lambda: signalled(lab, signal.SIGUSR1, times=4),
            "SIGTERM to a sweep on processes": lambda: signalled_sweep(lab, signal.SIGTERM, *processes()),
            "NaN loss": lambda: not_a_number(lab),
        }
        while counts.total() < options.faults or len(counts) < len(kinds):
            for name, inject in kinds.items():
                for _ in range(5 if name in QUICK else 1):
                    counts[name] += inject()
                    print(f"{time.monotonic() - started:6.0f} s  {counts.total():3d} faults  {name}", flush=True)
    record = {
        "command": "python " + " ".join(sys.argv),
        "seed": options.seed,
        "faults": dict(counts),
        "in_all": counts.total(),
        "lost": 0,  # a loss ends this script with an error
        "sweep": {"runs": len(SEEDS), "tasks": TASKS, "epochs": EPOCHS, "steps": lab.steps},
        "seconds": round(time.monotonic() - started),
    }
    print(json.dumps(record, indent=1))
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
