"""Sweeps: numbering, executors, the table, locks, exit codes; and what listens on which address."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from conftest import ROOT
from tcil.experiments.cli.app import app
from tcil.experiments.config.settings import build
from tcil.experiments.process.exits import last_line
from tcil.experiments.process.progress import Progress
from tcil.experiments.runs.locks import FolderInUse, FolderLock
from tcil.experiments.runs.store import RunFolder
from tcil.experiments.scheduling import sweep as sweep_module
from tcil.experiments.scheduling.board import Board, Line
from tcil.experiments.scheduling.executors import Processes, Resources, Serial, environments, visible_gpus
from tcil.experiments.scheduling.job import Job, Outcome
from tcil.experiments.scheduling.status import StatusWriter, read_status
from tcil.experiments.scheduling.sweep import sweep

SHORT = {"dataset": "digits", "epochs": 1, "tasks": 2, "memory": 30}
WORDS = ["--dataset", "digits", "--set", "epochs=1", "--set", "tasks=2", "--set", "memory=30", "--no-full-data"]
WORDS += ["--calibrators", "vanilla,ts"]


def command(*words, code=0):
    outcome = CliRunner().invoke(app, [str(word) for word in words])
    assert outcome.exit_code == code, outcome.output
    return " ".join(outcome.output.split())


def jobs(tmp_path, *seeds):
    return [Job(build({**SHORT, "seed": seed}), tmp_path) for seed in seeds]


@pytest.fixture
def study(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text('dataset = "digits"\nepochs = 1\ntasks = 2\nmemory = 30\nlearners = ["er", "wa"]\nseeds = [1, 2]\n')
    return path


class TestNumbers:
    def test_plan_has_a_line_for_each_run(self, study, tmp_path):
        outcome = CliRunner().invoke(app, ["plan", str(study), "--out", str(tmp_path)])
        lines = outcome.output.splitlines()
        assert [line.split()[0] for line in lines] == ["1", "2", "3", "4"]
        assert [line.split()[1].rsplit("-", 1)[0] for line in lines] == [
            "digits-er-seed1", "digits-er-seed2", "digits-wa-seed1", "digits-wa-seed2",
        ]  # fmt: skip

    def test_job_does_the_one_of_that_number(self, study, tmp_path):
        out = tmp_path / "out"
        options = ["--out", str(out), "--no-full-data", "--calibrators", "vanilla"]
        command("run", study, "--job", 3, *options)
        assert [path.name.rsplit("-", 1)[0] for path in out.iterdir()] == ["digits-wa-seed1"]
        said = CliRunner().invoke(app, ["plan", str(study), *options]).output.splitlines()
        assert [line.split()[2] for line in said] == ["to", "to", "finished", "to"]
        assert "job: got 5; expected 1 to 4" in command("run", study, "--job", 5, code=2)

    def test_the_same_run_twice_is_one(self, tmp_path):
        assert len(CliRunner().invoke(app, ["plan", "--seeds", "1,2,1"]).output.splitlines()) == 2


class TestResources:
    def test_every_worker_has_its_share(self):
        def gpus(*arguments):
            return [each["CUDA_VISIBLE_DEVICES"] for each in environments(*arguments)]

        assert gpus(1, 0.3, 9, ["0", "1"]) == ["0", "0", "0", "1", "1", "1"]
        assert gpus(1, 2, 9, ["4", "5", "6", "7", "8"]) == ["4,5", "6,7"]
        assert gpus(1, 1, 1, ["4", "5"]) == ["4"]
        assert environments(2, 0, 3, []) == [{"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}] * 3
        assert environments(0.5, 0, 1, [])[0]["OMP_NUM_THREADS"] == "1"
        with pytest.raises(ValueError, match="gpus-per-run: got 1; expected at most 0"):
            environments(1, 1, None, [])

    def test_gpus_that_were_given_to_this_process(self, monkeypatch):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
        assert visible_gpus() == ["2", "3"]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert visible_gpus() == []

    def test_threads(self):
        assert Resources("serial").threads is None
        assert (Resources("serial", cpus=2).threads, Resources("processes").threads) == (2, 1)

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--on", "slurm"], "on: got 'slurm'; expected one of serial, processes, ray"),
            (["--ray-address", "auto"], "ray-address: got 'auto'; expected none without --on ray"),
            (["--gpus-per-run", "1.5"], "gpus-per-run: got 1.5; expected a whole number, or a fraction"),
            (["--learner", "err"], "learner: got 'err'"),
            (["--calibrators", "tss"], "calibrator: got 'tss'"),
        ],
    )
    def test_errors_before_any_work(self, tmp_path, words, message):
        assert message in command("sweep", "--seeds", "1,2", "--out", tmp_path / "out", *words, code=2)
        assert not (tmp_path / "out").exists()


def test_a_job_travels_as_one_line(tmp_path):
    job = Job(build({**SHORT, "learner_options": {"head": "growing"}}), tmp_path, calibrators=("ts",), threads=2)
    again = Job.from_json(job.to_json())
    assert again.__dict__ == job.__dict__
    assert "\n" not in job.to_json()
    other = job.to_json().replace('"version": "', '"version": "9.')
    with pytest.raises(ValueError, match=r"tcil: got version .* on this node; expected 9\."):
        Job.from_json(other)


def test_what_an_error_says_last():
    assert last_line(ValueError("first\nlr: got -1\n")) == "lr: got -1"
    assert last_line(RuntimeError("the loss is nan")) == "RuntimeError: the loss is nan"
    assert last_line(KeyError()) == "KeyError: "


class TestStatus:
    def test_what_was_written_is_read(self, tmp_path):
        writer = StatusWriter(tmp_path).titled("er seed 1")
        writer(Progress(0, 2, "train", 1, 4, 0.5))
        writer(Progress(0, 2, "calibrate", 0, 1))
        status = read_status(tmp_path)
        assert (status.state, status.task, status.phase, status.pid) == ("running", 0, "calibrate", os.getpid())
        writer.end("failed", "the loss is nan")
        assert (read_status(tmp_path).state, read_status(tmp_path).error) == ("failed", "the loss is nan")

    def test_none_that_can_be_read(self, tmp_path):
        assert read_status(tmp_path) is None
        (tmp_path / "status.json").write_text("{")
        assert read_status(tmp_path) is None
        (tmp_path / "status.json").write_text('{"other": 1}')
        assert read_status(tmp_path) is None


class TestLock:
    def test_the_second_is_refused_with_the_name_of_the_first(self, tmp_path):
        holder = "import sys, tcil.experiments.runs.locks as l, pathlib, time\n"
        holder += "with l.FolderLock(pathlib.Path(sys.argv[1])).held():\n    print('held', flush=True); time.sleep(60)"
        process = subprocess.Popen([sys.executable, "-c", holder, tmp_path], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout.readline() == "held\n"
            with pytest.raises(FolderInUse, match=f"in use by process {process.pid} on "), FolderLock(tmp_path).held():
                pass
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        with FolderLock(tmp_path).held(), FolderLock(tmp_path).held():  # a killed holder leaves nothing stuck
            pass
        assert (tmp_path / ".lock").read_bytes() == b""

    def test_a_run_is_refused_and_a_sweep_waits(self, tmp_path):
        (job,) = jobs(tmp_path, 1)
        job.folder.mkdir(parents=True)
        with HeldElsewhere(job.folder) as release:
            assert "is in use by" in command("run", *WORDS, "--out", tmp_path, code=2)
            threading.Timer(2.5, release).start()
            said = command("sweep", *WORDS, "--out", tmp_path, "--on", "serial")
        assert "in use" in said
        assert "1 runs: 1 done" in said


class HeldElsewhere:
    """The lock of a folder in another process, until it is released."""

    def __init__(self, folder):
        code = (
            "import fcntl, sys; f = open(sys.argv[1], 'a+'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True)"
        )
        words = [sys.executable, "-c", f"{code}; sys.stdin.read()", str(folder / ".lock")]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self):
        assert self._process.stdout.readline() == "held\n"
        return self._process.stdin.close

    def __exit__(self, *error):
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()


class Scripted:
    """An executor that ends jobs as it was told."""

    slots = 2

    def __init__(self, *outcomes):
        self.outcomes, self.started, self.running, self.stopped = list(outcomes), [], [], False

    def start(self, job):
        assert len(self.running) < self.slots
        self.started.append(job)
        self.running.append(job)

    def ended(self, seconds):
        return [(self.running.pop(0), self.outcomes.pop(0))] if self.running else []

    def stop(self):
        self.stopped = True

    def close(self):
        pass


def quiet():
    return Console(file=io.StringIO(), width=200)


class TestSweep:
    def test_what_dies_is_tried_again_a_bounded_number_of_times(self, tmp_path):
        died, console = Outcome("died", "the worker ended by SIGKILL"), quiet()
        one, two = jobs(tmp_path, 1, 2)
        executor = Scripted(died, Outcome("done"), died, died)
        with Board([one, two], console) as board:
            lines = sweep([one, two], executor, board, stop=lambda: False, retries=2)
        assert [(line.state, line.message) for line in lines] == [
            ("failed", "the worker ended by SIGKILL (3 times)"), ("done", ""),
        ]  # fmt: skip
        assert executor.started.count(one) == 3
        assert "digits er seed 1: queued: the worker ended by SIGKILL" in console.file.getvalue()

    def test_a_failed_run_is_listed_and_the_others_go_on(self, tmp_path):
        runs = jobs(tmp_path, 1, 2, 3)
        executor = Scripted(Outcome("failed", "TrainingDiverged: the loss is nan"), Outcome("done"), Outcome("done"))
        with Board(runs, quiet()) as board:
            lines = sweep(runs, executor, board, stop=lambda: False)
        assert [line.state for line in lines] == ["failed", "done", "done"]
        assert len(executor.started) == 3

    def test_a_stop_reaches_the_workers_and_starts_nothing_more(self, tmp_path):
        runs = jobs(tmp_path, 1, 2, 3)
        executor = Scripted(Outcome("done"), Outcome("stopped", "by SIGTERM"))
        with Board(runs, quiet()) as board:
            lines = sweep(runs, executor, board, stop=lambda: len(executor.started) == 2)
        assert executor.stopped
        assert [line.state for line in lines] == ["done", "stopped", "stopped"]

    def test_a_run_in_use_elsewhere_is_told_once_and_tried_again(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sweep_module, "PAUSE", 0.01)
        (job,), console = jobs(tmp_path, 1), quiet()
        busy = Outcome("in use", "by process 7")
        with Board([job], console) as board:
            (line,) = sweep([job], Scripted(busy, busy, busy, Outcome("done")), board, stop=lambda: False)
        said = console.file.getvalue().splitlines()
        assert [text.partition(": ")[2] for text in said] == ["running", "in use: by process 7", "done"]
        assert line.state == "done"

    def test_a_damaged_file_is_told(self, tmp_path):
        (job,), console = jobs(tmp_path, 1), quiet()
        with Board([job], console) as board:
            sweep([job], Scripted(Outcome("done", "", ("x.json is damaged",))), board, stop=lambda: False)
        assert "warning: x.json is damaged" in console.file.getvalue()

    def test_the_table(self, tmp_path):
        (job,) = jobs(tmp_path, 1)
        StatusWriter(job.folder)  # writes nothing yet
        RunFolder(job.folder).create()
        StatusWriter(job.folder).titled("er seed 1")(Progress(0, 2, "train", 3, 8, 0.1))
        console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
        board = Board(jobs(tmp_path, 1, 2, 3, 4), console)
        states = [("running", ""), ("failed", "[red]odd[/red] \x1b[31m"), ("done", ""), ("queued", "")]
        for line, (state, message) in zip(board.lines, states, strict=True):
            board._lines[line.job] = replace(line, state=state, message=message, status=read_status(job.folder))
        console.print(board.table())
        rows = [row.split() for row in console.file.getvalue().splitlines() if row.strip()]
        assert rows[1] == ["1", "digits", "er", "seed", "1", "running", "1/2", "train", "3/8"]
        assert rows[2][5:7] == ["failed", "[red]odd[/red]"]
        assert [row[5] for row in rows[3:5]] == ["done", "queued"]
        assert rows[5][:2] == ["all", "runs:"]  # how much of them is done together

    def test_a_status_from_before_does_not_count(self, tmp_path):
        (job,) = jobs(tmp_path, 1)
        RunFolder(job.folder).create()
        StatusWriter(job.folder).titled("")(Progress(0, 2, "train", 3, 8, 0.1))
        status = read_status(job.folder)
        assert Line(job, "running", since=status.updated - 1, status=status).place[0] == "1/2"
        assert Line(job, "running", since=status.updated + 1, status=status).place == ("", "")


class TestCommands:
    def test_several_runs_go_through_the_sweep(self, tmp_path):
        said = command("run", *WORDS, "--seeds", "1,2", "--out", tmp_path)
        assert "2/2 digits er seed 2: done" in said
        assert "2 runs: 2 done" in said
        stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != "status.json"}
        again = command("run", *WORDS, "--seeds", "1,2", "--out", tmp_path)
        assert "2 runs: 2 done" in again
        left_alone = {path for path in stamps if path.is_file() and path.name != ".lock"}
        assert all(path.stat().st_mtime_ns == stamps[path] for path in left_alone)
        assert any(path.name == "report.html" for path in left_alone)

    def test_the_exit_code_tells_of_failures(self, tmp_path):
        said = command("sweep", *WORDS, "--set", "lr=1e30", "--out", tmp_path, "--on", "serial", code=1)
        assert "1 runs: 0 done, 1 failed" in said
        assert "the loss is nan" in said
        (folder,) = tmp_path.iterdir()
        assert "TrainingDiverged" in (folder / "error.txt").read_text()
        assert json.loads((folder / "status.json").read_text())["state"] == "failed"

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--set", "memory=3"], "memory: got 3; expected at least one exemplar"),
            (["--set", "validation=3000", "--set", "validation_pool=3000"], "validation: got 600 held-out images"),
            (["--dataset", "image-folder", "--data", "nowhere"], "data: got no"),
            (["--set", "network=resnet32"], "network: got 'resnet32'"),
        ],
    )
    def test_runs_that_cannot_begin_are_refused_before_the_first(self, tmp_path, words, message):
        said = command("run", *WORDS, *words, "--seeds", "1,2", "--out", tmp_path / "out", code=2)
        assert message in said
        assert not (tmp_path / "out").exists()

    def test_a_refused_run_that_is_finished_stays_so(self, tmp_path, monkeypatch):
        command("run", *WORDS, "--seeds", "1,2", "--out", tmp_path)

        def refused(*args, **options):
            raise ValueError("data: got other images")

        monkeypatch.setattr("tcil.experiments.scheduling.worker.complete_run", refused)
        said = command("run", *WORDS, "--seeds", "1,2", "--out", tmp_path, code=1)
        assert "2 runs: 0 done, 2 failed" in said
        assert "tcil report" not in said
        assert not list(tmp_path.rglob("error.txt"))
        assert {json.loads(path.read_text())["state"] for path in tmp_path.rglob("status.json")} == {"done"}

    def test_a_worker_that_cannot_start_is_told(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sweep_module, "PAUSE", 0.0)
        monkeypatch.setattr(
            "tcil.experiments.scheduling.executors.Worker.command",
            (sys.executable, "-c", "raise SystemExit('no torch here')"),
        )
        said = command("sweep", *WORDS, "--out", tmp_path, code=1)
        assert "the worker ended by exit code 1: no torch here (3 times)" in said

    def test_not_under_torchrun(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
        said = command("run", *WORDS, "--seeds", "1,2", "--out", tmp_path / "out", code=2)
        assert "runs: got 2 under torchrun; expected one run" in said
        assert not (tmp_path / "out").exists()

    def test_executors_start_empty(self):
        assert Serial().ended(0.0) == []
        processes = Processes(environments(1, 0, 1, []))
        assert processes.ended(0.0) == []
        processes.close()

    def test_a_worker_that_dies_idle_is_replaced(self, tmp_path, monkeypatch):
        answer = (
            'import sys\nfor _ in sys.stdin: print(\'{"state": "done", "message": "", "remarks": []}\', flush=True)'
        )
        monkeypatch.setattr("tcil.experiments.scheduling.executors.Worker.command", (sys.executable, "-c", answer))
        processes = Processes(environments(1, 0, 1, []))
        (job,) = jobs(tmp_path, 1)
        pids = set()
        for _ in range(2):
            processes.start(job)
            assert processes.ended(20.0) == [(job, Outcome("done"))]
            (worker,) = processes._ready
            pids.add(worker.process.pid)
            worker.process.kill()
            assert processes.ended(20.0) == []
            assert not processes._ready
        assert len(pids) == 2
        processes.close()

    def test_the_papers_trainings_go_through_it_too(self, tmp_path, monkeypatch):
        seen = []

        def run_jobs(jobs, resources, console):
            seen.append((jobs, resources))
            return 75

        monkeypatch.setattr("tcil.experiments.reproduction.reproduce.run_jobs", run_jobs)
        words = ["--schedule", "mini", "--out", tmp_path, "--report", tmp_path, "--on", "ray", "--ray-address", "auto"]
        assert "stopped" in command("reproduce", "claims", *words, code=75)
        ((jobs, resources),) = seen
        assert resources.ray_address == "auto"
        assert {job.settings.learner for job in jobs if job.full_data} == {"er", "eeil", "wa", "der"}
        assert [job.settings.learner for job in jobs if job.analysis] == ["er"]
        assert len({job.settings.key for job in jobs}) == len(jobs) > 3


LISTENING = """
from pathlib import Path
from benchmarks.faults.checks import family
from tcil.experiments.scheduling.executors import Ray
import os
ray = Ray(None, 1, 0)
inodes = set()
for pid in family(os.getpid()):
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
        except OSError:
            pass
found = []
for name in ("tcp", "tcp6"):
    for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and words[9] in inodes:
            found.append(words[1].split(":")[0])
print(*found)
ray.close()
"""


@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.slow
def test_ray_on_this_machine_listens_on_loopback_only():
    words = [sys.executable, "-c", LISTENING]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    addresses = done.stdout.split()
    assert len(addresses) >= 3
    assert set(addresses) <= {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1, also as IPv6 writes it


def test_ray_missing_is_told(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    said = command("sweep", *WORDS, "--out", tmp_path, "--on", "ray", code=2)
    assert "on: got ray, which is not installed; expected the extra tcil[ray]" in said
