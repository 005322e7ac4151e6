"""What keeps a run folder whole, piece by piece: flushed writes, formats, signs of life, an executor that is lost."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import tcil.experiments.scheduling.status as status
import tcil.experiments.scheduling.sweep as sweep_module
import tcil.foundation.files as storage
from tcil import __version__
from tcil.experiments.cli.app import app
from tcil.experiments.config.settings import FORMAT, build
from tcil.experiments.process import stopping
from tcil.experiments.reporting.collect import keep, read_runs
from tcil.experiments.runs.recalibrate import recalibrate
from tcil.experiments.runs.run import Run
from tcil.experiments.runs.store import DamagedFileWarning, OtherVersionWarning, RunFolder
from tcil.experiments.scheduling.board import Board
from tcil.experiments.scheduling.executors import ExecutorLost, Resources
from tcil.experiments.scheduling.job import Job, Outcome
from tcil.experiments.scheduling.status import StatusWriter, read_status
from tcil.experiments.scheduling.sweep import Watch, sweep
from tcil.experiments.scheduling.worker import work
from tcil.incremental.data.datasets import load_dataset

SHORT = build({"dataset": "digits", "classes": 4, "epochs": 1, "milestones": [], "tasks": 2, "memory": 30})


class TestFlushed:
    @pytest.fixture
    def calls(self, monkeypatch):
        """Flushes and renames, in their order."""
        noted, fsync, replace = [], os.fsync, os.replace

        def flushed(file):
            place = Path(os.readlink(f"/proc/self/fd/{file}"))
            noted.append(("flush folder" if place.is_dir() else "flush file", place.name))
            fsync(file)

        def renamed(source, target):
            noted.append(("rename", Path(target).name))
            replace(source, target)

        monkeypatch.setattr(os, "fsync", flushed)
        monkeypatch.setattr(os, "replace", renamed)
        return noted

    def test_content_before_its_name_and_the_name_before_the_end(self, tmp_path, calls):
        storage.replace_file(tmp_path / "a.json", b"{}")
        assert [what for what, _ in calls] == ["flush file", "rename", "flush folder"]
        assert calls[-1][1] == tmp_path.name

    def test_new_folders_are_flushed_into_those_above(self, tmp_path, calls):
        storage.make_folder(tmp_path / "out" / "run")
        assert sorted(calls) == sorted([("flush folder", "out"), ("flush folder", tmp_path.name)])
        calls.clear()
        storage.make_folder(tmp_path / "out" / "run")
        assert calls == []

    def test_storage_that_cannot_flush_folders_will_do(self, tmp_path, monkeypatch):
        fsync = os.fsync

        def refuses(reason):
            def flush(file):
                if os.path.isdir(f"/proc/self/fd/{file}"):
                    raise OSError(reason, os.strerror(reason))
                fsync(file)

            return flush

        monkeypatch.setattr(os, "fsync", refuses(22))
        storage.replace_file(tmp_path / "a.json", b"{}")
        monkeypatch.setattr(os, "fsync", refuses(5))
        with pytest.raises(OSError, match="could not be flushed to disk"):
            storage.replace_file(tmp_path / "a.json", b"{}")


def test_a_whole_file_in_the_place_of_another_is_refused(tmp_path):
    folder = RunFolder(tmp_path)
    for index in (0, 1):
        folder.task(index)
        folder.write_json(f"task-0{index}/results.json", {"task": index})
        folder.write_tensors(f"task-0{index}/model.safetensors", {"w": torch.zeros(2) + index}, {"epoch": "1"})
    for name in ("results.json", "model.safetensors"):
        os.replace(tmp_path / "task-00" / name, tmp_path / "task-01" / name)
    for read, name in (
        (lambda: folder.read_task_result(1), "results.json"),
        (lambda: folder.read_tensors("task-01/model.safetensors"), "model.safetensors"),
    ):
        with pytest.warns(DamagedFileWarning, match=f"it is task-00/{name}, in the place of another file"):
            assert read() is None


def test_a_file_that_comes_between_two_looks(tmp_path, monkeypatch):
    """Another process renames it into its place at any moment: it is there, or not yet, and never something else."""
    (tmp_path / "status.json").write_text("{}")
    looks, look = [], Path.stat

    def late(path, **more):
        looks.append(path)
        if len(looks) == 1:
            raise FileNotFoundError(errno.ENOENT, "not yet")
        return look(path, **more)

    monkeypatch.setattr(Path, "stat", late)
    assert RunFolder(tmp_path).peek_json("status.json") is None
    assert RunFolder(tmp_path).peek_json("status.json") == {}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / SHORT.name
    Run(SHORT, folder, dataset=load_dataset("digits")).execute(["vanilla"])
    return folder


class TestFormats:
    @staticmethod
    def note(folder, **changes):
        store = RunFolder(folder)
        store.write_json("environment.json", {**store.peek_json("environment.json"), **changes})

    def test_another_format_is_refused_with_both_versions(self, whole, tmp_path):
        kept = keep(read_runs([whole]), tmp_path)
        self.note(whole, format=FORMAT + 1, tcil="99.0")
        before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
        said = f"in format {FORMAT + 1} of run folders, written by tcil 99.0; expected format {FORMAT}, .*{__version__}"
        with pytest.raises(ValueError, match=said):
            Run(SHORT, whole, dataset=load_dataset("digits")).execute(["vanilla", "ts"])
        with pytest.raises(ValueError, match=said):
            recalibrate(whole, data=None, calibrators=["ts"], redraw=0)
        with pytest.raises(ValueError, match=said):
            read_runs([whole])
        assert {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()} == before
        assert len(read_runs(kept)) == 1  # of this format
        kept[0].write_text(kept[0].read_text().replace('"format":1', '"format":2'))
        with pytest.raises(ValueError, match="in format 2 of run folders"):
            read_runs(kept)
        self.note(whole, format=FORMAT, tcil=__version__)

    @pytest.mark.parametrize("noted", [None, [], {"format": None}, {"format": "1"}])
    def test_what_is_no_format(self, whole, noted):
        """Folders from before formats were noted are of this one; nonsense is not."""
        known = (whole / "environment.json").read_bytes()
        store = RunFolder(whole)
        if noted is None:
            record = store.peek_json("environment.json")
            store.write_json("environment.json", {key: value for key, value in record.items() if key != "format"})
        else:
            store.write_json("environment.json", {"tcil": "99.0", **dict(noted)})
        if not noted:
            assert len(read_runs([whole])) == 1
        else:
            with pytest.raises(ValueError, match="of run folders, written by tcil 99"):
                read_runs([whole])
        (whole / "environment.json").write_bytes(known)

    def test_a_run_that_another_version_began(self, tmp_path):
        def stopped():
            return next(looks) > 3

        looks, digits = iter(range(100)), load_dataset("digits")
        with pytest.raises(stopping.Stopped):
            Run(SHORT, tmp_path, dataset=digits, stop=stopped).execute(["vanilla"])
        self.note(tmp_path, tcil="0.0.1")
        with pytest.warns(OtherVersionWarning, match=rf"started with tcil 0\.0\.1 and is resumed with {__version__}"):
            Run(SHORT, tmp_path, dataset=digits).execute(["vanilla"])


class TestSignsOfLife:
    @pytest.fixture
    def beats(self, tmp_path, monkeypatch):
        """Whether the heart of a writer beats while something is done again and again."""
        monkeypatch.setattr(status, "BEAT", 0.02)
        writer = StatusWriter(tmp_path)

        def beating(work, seconds):
            with writer.beating():
                while (first := read_status(tmp_path)) is None:
                    time.sleep(0.01)
                work()
                end = time.monotonic() + seconds
                while time.monotonic() < end and read_status(tmp_path).updated == first.updated:
                    work()
            return read_status(tmp_path).updated > first.updated

        return beating

    def test_none_without_steps_or_work(self, beats, monkeypatch):
        monkeypatch.setattr(status, "_used_by_others", lambda: 0.0)  # threads of the test runner do work at times
        assert not beats(lambda: time.sleep(0.3), 0.3)

    def test_steps(self, beats):
        def step():
            stopping.requested()
            time.sleep(0.005)

        assert beats(step, 30)

    def test_work(self, beats):
        def busy():
            end = time.process_time() + 0.1
            while time.process_time() < end:
                pass

        assert beats(busy, 30)

    def test_a_job_beats_from_its_beginning(self, tmp_path, monkeypatch):
        seen = []

        def train(job, writer):
            deadline = time.monotonic() + 20
            while not seen and time.monotonic() < deadline:
                seen.extend([found] if (found := read_status(job.folder)) else [])
            return None

        monkeypatch.setattr("tcil.experiments.scheduling.worker._train", train)
        assert work(Job(SHORT, tmp_path)).state == "done"
        assert (seen[0].state, seen[0].pid) == ("running", os.getpid())

    @pytest.mark.parametrize(("given", "allowed"), [("0", True), ("15", True), ("14", False)])
    def test_how_long_to_wait(self, given, allowed):
        if allowed:
            assert Resources(hung_after=float(given)).hung_after == float(given)
        else:
            said = CliRunner().invoke(app, ["sweep", "--hung-after", given, "--seeds", "1,2"])
            assert said.exit_code == 2
            assert f"hung-after: got {given}; expected 0, or at least 15 seconds" in " ".join(said.output.split())

    def test_no_number(self):
        with pytest.raises(ValueError, match="hung-after: got nan"):
            Resources(hung_after=float("nan"))

    def test_a_damaged_status_is_said_nothing_of(self, tmp_path, recwarn):
        (tmp_path / "status.json").write_bytes(b'{"checksum": "sha256:' + b"0" * 64 + b'"}')
        assert read_status(tmp_path) is None
        assert not recwarn


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(sweep_module.time, "monotonic", lambda: self.now)

    def pass_by(self, watch, job, seconds, step=1.0):
        """Whether the job was found hung meanwhile."""
        hung = False
        for _ in range(int(seconds / step)):
            self.now += step
            hung = hung or watch.hung([job]) == [job]
        return hung


class TestWatch:
    @pytest.fixture
    def clock(self, monkeypatch):
        return Clock(monkeypatch)

    @pytest.fixture
    def job(self, tmp_path):
        job = Job(SHORT, tmp_path)
        job.folder.mkdir()
        return job

    @staticmethod
    def beat(job):
        StatusWriter(job.folder)._refresh()

    def test_silent_for_too_long(self, clock, job):
        watch = Watch(30)
        clock.pass_by(watch, job, 3)
        self.beat(job)
        assert not clock.pass_by(watch, job, 25)
        self.beat(job)
        assert not clock.pass_by(watch, job, 25)
        assert clock.pass_by(watch, job, 15)

    def test_a_worker_that_starts_has_longer(self, clock, job):
        self.beat(job)  # of an earlier worker
        watch = Watch(30)
        assert not clock.pass_by(watch, job, 280)
        assert clock.pass_by(watch, job, 40)

    def test_time_in_which_the_sweep_was_halted_too(self, clock, job):
        watch = Watch(30)
        clock.pass_by(watch, job, 3)
        self.beat(job)
        clock.pass_by(watch, job, 3)
        clock.now += 3600
        assert watch.hung([job]) == []
        assert clock.pass_by(watch, job, 40)

    def test_never(self, clock, job):
        assert not clock.pass_by(Watch(0), job, 5000, step=10)


class Fake:
    """An executor that answers what it is told to."""

    slots = 2

    def __init__(self, *answers):
        self.answers, self.started, self.killed = list(answers), [], []

    def start(self, job):
        self.started.append(job)

    def ended(self, seconds):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return [(job, answer) for job in self.started[-1:]] if answer else []

    def stop(self):
        pass

    def kill(self, job, reason):
        self.killed.append(reason)

    def close(self):
        pass


def board_of(jobs, tmp_path):
    return Board(jobs, Console(file=(tmp_path / "said").open("w"), width=200))


def test_a_lost_executor_ends_the_sweep(tmp_path):
    jobs = [Job(build({**SHORT.model_dump(), "seed": seed}), tmp_path) for seed in (1, 2, 3)]
    board = board_of(jobs, tmp_path)
    executor = Fake(None, Outcome("done"), ExecutorLost("the Ray cluster is lost: its head at X no longer answers"))
    lines = sweep(jobs, executor, board, stop=lambda: False)
    assert sorted(line.state for line in lines) == ["done", "stopped", "stopped"]


def test_a_hung_job_is_killed_and_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_module, "PAUSE", 0.0)
    (job,) = jobs = [Job(SHORT, tmp_path)]
    hung = [[job], [], [], []]
    monkeypatch.setattr(Watch, "hung", lambda self, running: hung.pop(0) if hung else [])
    executor = Fake(Outcome("died", "the worker hung"), Outcome("done"), Outcome("done"))
    (line,) = sweep(jobs, executor, board_of(jobs, tmp_path), stop=lambda: False, hung_after=60)
    assert executor.killed == ["the worker hung: no sign of life for 60 s"]
    assert (line.state, len(executor.started)) == ("done", 2)


def refused_memory():
    torch.empty(2**50)


def raised_memory():
    raise MemoryError


@pytest.mark.parametrize("run_out", [refused_memory, raised_memory])
def test_a_run_without_memory_may_be_tried_again(tmp_path, monkeypatch, run_out):
    monkeypatch.setattr("tcil.experiments.scheduling.worker._train", lambda job, writer: run_out())
    outcome = work(Job(SHORT, tmp_path))
    assert outcome.state == "died"
    assert "emory" in outcome.message
    assert "emory" in (tmp_path / SHORT.name / "error.txt").read_text()
