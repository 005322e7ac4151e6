"""Where faults are injected: a small sweep, what it gives undisturbed, and fresh folders to disturb it in."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.faults import seams, worker
from benchmarks.faults.checks import PATIENCE, Lost, contents, finished, require, require_nothing_half_written
from tcil.incremental.data.datasets import load_dataset
from tcil.incremental.placement import choose_placement

CLASSES, EPOCHS, TASKS, SEEDS, BATCH = 4, 5, 2, (1, 2), 32
CALIBRATORS = "vanilla,ts,t-cil"
LEARNERS = {"study": "er", "faulty": "benchmarks.faults.learner:Faulty"}  # by study
Patch = Callable[[], None]  # what a process does to itself before it begins


def nothing() -> None:
    """All protections in place."""


class Command:
    """The `tcil` command in a process forked from this one (which has imported everything), with changes made to it."""

    def __init__(self, words: list[str], log: Path, patch: Patch = nothing) -> None:
        self._log = log
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                # A fork has no other thread, and would wait for ever for those of its parent, if it chose as it did.
                torch.set_num_threads(1)
                choose_placement.cache_clear()
                file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
                os.dup2(file, 1)
                os.dup2(file, 2)
                known = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
                os.environ["PYTHONPATH"] = os.pathsep.join(known)  # for workers, wherever this was started
                seams.without_pages()
                seams.start_workers_by(*worker.words())
                patch()
                seams.command(words)
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
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


class Lab:
    """Studies, what they give undisturbed, and fresh folders to disturb them in; `at_once` workers on processes."""

    def __init__(self, folder: Path, draw: random.Random, at_once: int = 2) -> None:
        self.folder, self.draw, self._at_once, self._number = folder, draw, at_once, 0
        warm_up()
        settings = f'dataset = "digits"\nclasses = {CLASSES}\ntasks = {TASKS}\nmemory = 40\n'
        settings += f"epochs = {EPOCHS}\nbatch_size = {BATCH}\nseeds = {list(SEEDS)}\n"
        for study, learner in LEARNERS.items():
            (folder / f"{study}.toml").write_text(f'{settings}learner = "{learner}"\n')
        log, writes, out = folder / "steps", folder / "writes", self.fresh()

        def counted() -> None:
            count_steps(log)
            count_syncs(writes)

        code, said = self.start(out, patch=counted).wait()
        require(code == 0, said)
        self.steps, self.syncs = log.stat().st_size, writes.stat().st_size
        self._reference = {"study": contents(out)}

    @property
    def processes(self) -> tuple[str, ...]:
        """The words for a sweep on processes."""
        return "--on", "processes", "--at-once", str(self._at_once)

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

    def start(self, out: Path, *more: str, study: str = "study", patch: Patch = nothing) -> Command:
        words = ["sweep", str(self.folder / f"{study}.toml"), "--out", str(out), "--no-full-data"]
        words += ["--calibrators", CALIBRATORS, *(more or ("--on", "serial"))]
        return Command(words, self.folder / f"{out.name}-{time.monotonic_ns()}.log", patch)

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
        require_nothing_half_written(out)

    def moment(self, longest: float) -> float:
        return self.draw.uniform(0.0, longest)


def warm_up() -> None:
    """What a sweep imports, also at the first step of an optimizer, and digits: once instead of in every fork."""
    seams.import_all()
    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.ones(1))
    weight.square().backward()
    torch.optim.SGD([weight], lr=0.1, momentum=0.9).step()
    load_dataset("digits")


def _note(log: Path) -> None:
    """A byte more in the file."""
    with log.open("ab") as file:
        file.write(b".")


def count_steps(log: Path) -> None:
    """A byte in the file for every step that this process takes."""
    seams.before_each_step(lambda: _note(log))


def count_syncs(log: Path) -> None:
    """A byte in the file whenever this process flushes or renames something."""

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            _note(log)
            return original(*args)

        return call

    for name in ("fsync", "replace"):
        seams.wrap(os, name, counted)
