"""Run, kill, stop, corrupt, calibrate and report in any order, against a model of what must be in the run folder.

Whatever happened: the same run, started again, ends with the bytes of an undisturbed one; a damaged file that is read
is named; a kill damages nothing; rows that are stored whole are kept, and are those of the undisturbed run. The same
machine finds a failure once the checksums, the atomic rename or the names in the files are taken out.

TCIL_FUZZ=thorough walks twenty times as far (`make fuzz`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import warnings
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from safetensors.torch import load

import tcil.experiments.runs.run as run_module
import tcil.experiments.runs.store as store
import tcil.foundation.checksums as checksums
from tcil.experiments.config.settings import build
from tcil.experiments.process.stopping import Stopped
from tcil.experiments.reporting.collect import keep, read_runs
from tcil.experiments.runs.recalibrate import recalibrate
from tcil.experiments.runs.run import Run
from tcil.experiments.runs.store import DamagedFileWarning, RunFolder
from tcil.incremental.data.images import Dataset, ImageSet

THOROUGH = os.environ.get("TCIL_FUZZ") == "thorough"
NAMES = ("vanilla", "ts", "first-task-ts")
PASSING = {"environment.json", "status.json", ".lock"}
SETTINGS = build(
    {
        "dataset": "digits", "tasks": 2, "epochs": 1, "milestones": [], "memory": 8, "batch_size": 16,
        "validation": 8, "validation_pool": 8,
    }
)  # fmt: skip


def images(count, seed):
    labels = torch.arange(count) % 4
    noise = torch.randint(0, 120, (count, 1, 8, 8), generator=torch.Generator().manual_seed(seed))
    noise[torch.arange(count), 0, labels] += 100
    return ImageSet(noise.to(torch.uint8), labels)


DATASET = Dataset("tiny", images(48, 1), images(40, 2), tuple("abcd"), (0.3,), (0.3,), padding=1, flip=False)


class Killed(BaseException):
    """What SIGKILL is to a process: no `except Exception` sees it."""


@contextlib.contextmanager
def killed_at(moment):
    """Inside, the so-many-th step on the way to the disk is the last: half a file is written, or all but the rename."""
    fsync, replace, steps = os.fsync, os.replace, 0

    def step(die):
        nonlocal steps
        steps += 1
        if steps == moment:
            die()
            raise Killed

    def half(file):
        os.ftruncate(file, os.fstat(file).st_size // 2)

    def killed_fsync(file):
        step(lambda: half(file) if os.path.isfile(f"/proc/self/fd/{file}") else None)
        fsync(file)

    def killed_replace(source, target):
        step(lambda: shutil.copy(source, Path(target).with_name(f".{Path(target).name}.1.part")))  # nobody cleans up
        replace(source, target)

    os.fsync, os.replace = killed_fsync, killed_replace
    try:
        yield
    except Killed:
        pass
    finally:
        os.fsync, os.replace = fsync, replace


def contents(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in PASSING)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def rows_in(record):
    """The rows of a results.json, of a task or of all, by task and calibrator."""
    tasks = record.get("tasks", [record])
    return {(task["task"], name): row for task in tasks for name, row in task["calibrators"].items()}


def rows_of(result):
    """The same of results that were read, or computed."""
    return rows_in(result.record())


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """What the undisturbed run leaves."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    Run(SETTINGS, folder, dataset=DATASET).execute(NAMES)
    return contents(folder)


@pytest.fixture
def machine(reference, monkeypatch):
    """The machine, with what it is held against."""
    monkeypatch.setattr(run_module, "load_dataset", lambda *args, **more: DATASET)

    class Own(FolderMachine):
        wanted = reference
        rows = rows_in(json.loads(reference["results.json"]))

    return Own


class FolderMachine(RuleBasedStateMachine):
    wanted: dict[str, bytes]
    rows: dict[tuple[int, str], dict[str, object]]

    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.folder = self.root / "run"
        self.damaged: dict[str, bytes] = {}  # what corrupt left in the place of whole files

    def teardown(self):
        try:
            with self.watched():
                self.execute(NAMES)
            found = contents(self.folder)
            assert sorted(found) == sorted(self.wanted)
            assert [name for name in found if found[name] != self.wanted[name]] == []
        finally:
            shutil.rmtree(self.root)

    # the model: what is whole, and what must be said ------------------------------------------------------------

    def is_damaged(self, name):
        path = self.folder / name
        return name in self.damaged and path.is_file() and path.read_bytes() == self.damaged[name]

    def whole_rows(self):
        """Rows in files that nobody has touched: of each task its own, else those of the results of all tasks."""
        found = {}
        for path in [self.folder / "results.json", *self.folder.glob("task-*/results.json")]:
            name = str(path.relative_to(self.folder))
            if path.is_file() and not self.is_damaged(name):
                found |= rows_in(json.loads(path.read_bytes()))
        return found

    @contextlib.contextmanager
    def watched(self):
        """Around everything that reads the folder: damaged files that are read are named, others are not."""
        read, before = set(), self.kept_rows()
        originals = {name: getattr(RunFolder, name) for name in ("read", "read_tensors")}

        def noting(original):
            def method(store, name, *kind):
                if self.is_damaged(name):
                    read.add(name)
                return original(store, name, *kind)

            return method

        for name, original in originals.items():
            setattr(RunFolder, name, noting(original))
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                yield
        finally:
            for name, original in originals.items():
                setattr(RunFolder, name, original)
        told = {str(w.message).split(" is damaged")[0] for w in said if w.category is DamagedFileWarning}
        named = {str(Path(path).relative_to(self.folder)) for path in told}
        assert read <= named, f"used in silence: {read - named}"
        assert named <= set(self.damaged), f"damaged by nobody: {named - set(self.damaged)}"
        self.damaged = {name: content for name, content in self.damaged.items() if self.is_damaged(name)}
        lost = set(before) - set(self.whole_rows())
        assert not lost, f"rows lost: {lost}"

    def kept_rows(self):
        """Rows that nothing may lose: whole, and their task's file there (a deleted one is computed anew)."""
        there = {int(path.parent.name[-2:]) for path in self.folder.glob("task-*/results.json")}
        return {key for key in self.whole_rows() if key[0] in there}

    @invariant()
    def whole_rows_are_those_of_the_undisturbed_run(self):
        assert all(self.rows[key] == row for key, row in self.whole_rows().items())

    # what happens -----------------------------------------------------------------------------------------------

    def execute(self, names, stop=lambda: False):
        results = Run(SETTINGS, self.folder, dataset=DATASET, stop=stop).execute(names)
        for key, row in rows_of(results).items():
            assert row == self.rows[key]
        assert {(task, name) for task in range(2) for name in names} <= set(rows_of(results))
        assert not list(self.folder.rglob("*.part"))

    @rule(names=st.sets(st.sampled_from(NAMES), min_size=1))
    def run(self, names):
        with self.watched():
            self.execute(sorted(names))

    @rule(moment=st.integers(1, 60), names=st.sets(st.sampled_from(NAMES), min_size=1))
    def kill(self, moment, names):
        with self.watched(), killed_at(moment):
            self.execute(sorted(names))

    @rule(looks=st.integers(1, 12), killed=st.booleans())
    def stop_at_a_step(self, looks, killed):
        def stop():
            nonlocal looks
            looks -= 1
            if killed and looks == 0:
                raise Killed
            return looks <= 0

        with self.watched(), contextlib.suppress(Killed, Stopped):
            self.execute(NAMES, stop)

    @precondition(lambda self: self.folder.exists() and contents(self.folder))
    @rule(data=st.data(), how=st.sampled_from(["flip", "cut", "zeros", "delete", "swap", "swap"]))
    def corrupt(self, data, how):
        found = contents(self.folder)
        name = data.draw(st.sampled_from(sorted(found)), label="file")
        content = bytearray(found[name])
        if how == "delete":
            (self.folder / name).unlink()
            self.damaged.pop(name, None)
            return
        if how == "swap":
            others = [other for other in sorted(found) if other.split(".")[-1] == name.split(".")[-1] and other != name]
            if not others:
                return
            other = data.draw(st.sampled_from(others), label="other")
            self.damage(other, bytes(content))
            self.damage(name, found[other])
            return
        place = data.draw(st.integers(0, max(0, len(content) - 1)), label="place")
        if how == "flip" and content:
            content[place] ^= 1 << data.draw(st.integers(0, 7), label="bit")
        elif how == "cut":
            content = content[:place]
        elif how == "zeros":
            content[place:] = bytes(len(content) - place)
        if bytes(content) != found[name]:
            self.damage(name, bytes(content))

    def damage(self, name, content):
        (self.folder / name).write_bytes(content)
        self.damaged[name] = content

    @precondition(lambda self: self.folder.exists())
    @rule(names=st.sets(st.sampled_from(NAMES), min_size=1))
    def calibrate(self, names):
        names = [name for name in NAMES if name in names]
        needed = (
            "settings.json",
            *(f"task-0{task}/{name}.safetensors" for task in (0, 1) for name in ("model", "logits")),
        )
        ready = all((self.folder / name).is_file() and not self.is_damaged(name) for name in needed)
        refused = ""
        with self.watched():
            try:
                recalibrate(self.folder, data=None, calibrators=names, redraw=0)
            except ValueError as error:
                refused = str(error)
        assert ready != refused.startswith("run: got"), refused
        if ready:
            assert {(task, name) for task in (0, 1) for name in names} <= set(self.whole_rows())

    @precondition(lambda self: self.folder.exists())
    @rule()
    def report(self):
        path = self.folder / "results.json"
        whole = path.is_file() and not self.is_damaged("results.json")
        refused = ""
        with self.watched():
            try:
                (stored,) = read_runs([self.folder])
            except ValueError as error:
                refused = str(error)
        assert whole != refused.startswith("runs: got"), refused
        if not whole:
            return
        assert rows_of(stored.result) == rows_in(json.loads(path.read_bytes()))
        (kept,) = keep([stored], self.root / "kept")
        assert rows_in(json.loads(kept.read_bytes())) == rows_of(stored.result)


def walk(machine, examples, steps=10):
    """As many walks of as many steps, the same in every test run; without looking for the shortest failure."""
    options = settings(
        max_examples=examples * (20 if THOROUGH else 1), stateful_step_count=steps, derandomize=True, deadline=None,
        database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=options)


@pytest.mark.timeout(3600 if THOROUGH else 300)
def test_any_order_of_run_kill_corrupt_calibrate_and_report(machine):
    walk(machine, 12)


def in_place(path, content):
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def unchecked(read):
    """Whatever can be read is taken as it is."""

    def opened(content, name=""):
        try:
            return read(content)
        except Exception as error:  # not even that
            raise checksums.Damaged(str(error)) from None

    return opened


def plain_json(content):
    record = json.loads(content)
    record.pop("checksum", None)
    return record


def plain_tensors(content):
    size = int.from_bytes(content[:8], "little")
    words = json.loads(content[8 : 8 + size])["__metadata__"]["note"].split(" ")
    return load(content), dict(word.split("=", 1) for word in words)


def kill_and_run(machine):
    """Walks in which nothing happens but kills."""
    for moment in range(4, 60, 12):
        state = machine()
        state.kill(moment=moment, names={"vanilla"})
        state.teardown()


def flip_and_run(machine):
    state = machine()
    state.run(names=set(NAMES))
    content = bytearray(contents(state.folder)["task-00/logits.safetensors"])
    content[-300] ^= 1
    state.damage("task-00/logits.safetensors", bytes(content))
    state.teardown()


def swap_and_run(machine):
    state = machine()
    state.run(names=set(NAMES))
    first, second = (f"task-0{task}/model.safetensors" for task in (0, 1))
    whole = contents(state.folder)
    state.damage(first, whole[second])
    state.damage(second, whole[first])
    state.teardown()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("without", "steps"), [("rename", kill_and_run), ("checksums", flip_and_run), ("names", swap_and_run)]
)
def test_the_machine_fails_without(machine, monkeypatch, without, steps):
    """These steps lead to a failure without the protection, and to none with it; so does a random walk, given time."""
    steps(machine)
    if without == "rename":
        monkeypatch.setattr(store, "replace_file", in_place)
    elif without == "checksums":
        monkeypatch.setattr(store, "open_json", unchecked(plain_json))
        monkeypatch.setattr(store, "open_tensors", unchecked(plain_tensors))
    else:
        monkeypatch.setattr(checksums, "_check_name", lambda found, name: None)
    with pytest.raises(AssertionError, match=r"used in silence|damaged by nobody"):
        walk(machine, 10) if THOROUGH else steps(machine)


def test_calibrate_keeps_the_rows_of_a_damaged_task(machine):
    """They are in the results of all tasks as well; a run that comes next takes them from the task's file."""
    state = machine()
    state.run(names=set(NAMES))
    state.damage("task-00/results.json", contents(state.folder)["task-00/results.json"][:-20])
    state.calibrate(names={"ts"})
    state.run(names={"vanilla"})
    state.teardown()
