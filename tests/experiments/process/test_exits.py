"""Exit codes, signals, and readers that leave."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from command_lines import QUICK, command, process
from conftest import ROOT
from tcil.experiments.process import stopping
from tcil.experiments.process.exits import ExitCode, RunFailed, answered
from tcil.experiments.process.screen import Screen
from tcil.experiments.reporting import collect


class TestExitCodes:
    def ended(self, error):
        with pytest.raises(SystemExit) as end, answered():
            raise error
        return end.value.code

    @pytest.mark.parametrize(
        ("error", "code", "message"),
        [
            (ValueError("lr: got nan"), 2, "error: lr: got nan"),
            (OSError(28, "No space left"), 1, "error: [Errno 28] No space left"),
            (OSError(2, "No such file"), 2, "error: [Errno 2] No such file"),
            (RunFailed("the loss is nan"), 1, "error: the loss is nan"),
            (stopping.Stopped("stopped in task 1"), 75, "stopped in task 1"),
            (KeyboardInterrupt(), 75, "stopped by SIGINT"),
            (KeyboardInterrupt("SIGTERM"), 75, "stopped by SIGTERM"),
            (stopping.SecondInterrupt(), 130, "stopped immediately"),
            (ModuleNotFoundError("no", name="typer"), 2, "error: tcil: got an installation without typer"),
        ],
    )
    def test_each(self, capsys, error, code, message):
        assert self.ended(error) == code
        assert message in capsys.readouterr().err

    def test_errors_of_ours_are_not_hidden(self):
        with pytest.raises(ZeroDivisionError), answered():
            _ = 1 / 0

    def test_an_interrupt_that_a_library_turned_into_an_error(self):
        error = ImportError("numpy could not be imported")
        error.__context__ = KeyboardInterrupt("SIGINT")
        assert self.ended(error) == 75

    def test_the_table_in_the_docs_is_the_enum(self):
        text = (ROOT / "docs" / "scale-out.md").read_text()
        assert [int(n) for n in re.findall(r"^\| (\d+) \|", text, flags=re.MULTILINE)] == list(map(int, ExitCode))

    @pytest.mark.parametrize("number", stopping.SIGNALS, ids=lambda number: number.name)
    def test_signals_are_requests_to_stop(self, number):
        with stopping.on_signals():
            os.kill(os.getpid(), number)
            with pytest.raises(stopping.Stopped, match=f"stopped by {number.name}"):
                stopping.check()

    def test_a_hang_up_is_one_of_them_but_under_nohup(self):
        assert signal.SIGHUP in stopping.SIGNALS
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            with stopping.on_signals():
                os.kill(os.getpid(), signal.SIGHUP)
                assert not stopping.requested()
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        finally:
            signal.signal(signal.SIGHUP, before)

    def test_a_usage_error_that_cannot_be_printed(self):
        class Usage(Exception):
            exit_code = 2

        error = OSError(28, "No space left on device")
        error.__context__ = Usage()
        assert self.ended(error) == 2

    @pytest.mark.processes
    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
    def test_a_usage_error_on_a_full_device(self):
        with open("/dev/full", "w") as full:
            words = [sys.executable, "-m", "tcil", "run", "--nosuch"]
            assert subprocess.run(words, stderr=full, timeout=60, check=False).returncode == ExitCode.REFUSED

    @pytest.mark.processes
    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
    def test_output_on_a_full_device_is_a_failure(self):
        """A table that nobody can read is not done; a reader that has read enough is no failure."""
        with open("/dev/full", "w") as full:
            words = [sys.executable, "-m", "tcil", "networks"]
            ended = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
        assert (ended.returncode, ended.stderr.count("cannot write the output")) == (ExitCode.FAILED, 1)

    @pytest.mark.processes
    def test_a_current_folder_that_was_deleted(self, tmp_path):
        script = f"cd {tmp_path} && rmdir {tmp_path} && exec {sys.executable} -m tcil --version"
        ended = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.startswith("tcil ")

    def test_ctrl_c_twice(self):
        with stopping.on_signals(signal.SIGINT):
            os.kill(os.getpid(), signal.SIGINT)
            assert stopping.requested()
            with pytest.raises(stopping.SecondInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert not stopping.requested()

    @pytest.mark.training
    def test_ctrl_c_in_a_run_finishes_the_step(self, tmp_path, monkeypatch):
        from tcil.experiments.process import progress

        monkeypatch.setattr(progress.ProgressDisplay, "__call__", lambda *words: os.kill(os.getpid(), signal.SIGINT))
        said = command("run", "--out", tmp_path, *QUICK, "--set", "epochs=2", code=ExitCode.STOPPED)
        assert "stopped in task 1 of" in said
        (folder,) = tmp_path.iterdir()
        assert (folder / "task-00" / "epoch.safetensors").exists()
        monkeypatch.undo()
        command("run", "--out", tmp_path, *QUICK, "--set", "epochs=2", code=ExitCode.DONE)

    @pytest.mark.training
    def test_a_loss_that_is_not_a_number(self, tmp_path):
        words = ["run", "--out", tmp_path, *QUICK, "--set", "lr=1e30"]
        said = command(*words, code=ExitCode.FAILED)
        assert "error: TrainingDiverged: stage train" in said
        (folder,) = tmp_path.iterdir()
        assert f"more in {folder}/error.txt" in said
        assert "Traceback" in (folder / "error.txt").read_text()
        assert command(*words, "--seeds", "1", "--on", "serial", code=ExitCode.FAILED)
        reproduce = ["reproduce", "temperature-bias", "--schedule", "mini", "--set", "lr=1e30", "--set", "epochs=1"]
        assert "the loss is" in command(*reproduce, "--out", tmp_path / "r", "--report", tmp_path, code=ExitCode.FAILED)

    def test_ctrl_c_in_a_report(self, tmp_path, monkeypatch):
        monkeypatch.setattr(collect, "read_runs", lambda paths: os.kill(os.getpid(), signal.SIGINT) or time.sleep(5))
        assert "stopped by SIGINT" in command("report", tmp_path, code=ExitCode.STOPPED)


class TestOutput:
    def test_a_reader_that_left(self, capfd):
        """What can no longer be written is dropped, and whoever prints goes on."""
        read, write = os.pipe()
        os.close(read)
        with os.fdopen(write, "w") as file:
            screen = Screen(file=file)
            for _ in range(3):
                screen.print("x" * 100)
            assert screen.quiet
            print("y" * 100_000, file=file, flush=True)  # nothing fails behind it either
        assert "BrokenPipe" not in "".join(capfd.readouterr())

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
    def test_a_file_that_can_hold_no_more(self, capfd):
        with Path("/dev/full").open("w") as file:
            screen = Screen(file=file)
            screen.print("x")
            screen.print("x")
        assert capfd.readouterr().err.count("No space left on device): continuing without it") == 1

    @pytest.mark.processes
    def test_a_run_goes_on_without_its_reader(self, tmp_path):
        running = process("run", "--out", tmp_path, *QUICK)
        assert running.stdout.readline()
        running.stdout.close()
        assert running.stderr.read() == ""
        assert running.wait(60) == ExitCode.DONE
        running.stderr.close()
        (folder,) = tmp_path.iterdir()
        assert (folder / "report.html").exists()

    @pytest.mark.processes
    def test_names_that_no_encoding_has(self, tmp_path):
        study = tmp_path / os.fsdecode(b"study\xff")
        asked = process("plan", study, PYTHONIOENCODING="ascii")
        said = asked.communicate(timeout=60)[1]
        assert asked.returncode == ExitCode.REFUSED
        assert "study\\udcff (No such file" in said


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, *stopping.SIGNALS], ids=lambda number: number.name)
def test_a_signal_while_the_command_starts(tmp_path, number):
    """As soon as there is a handler, and while torch is imported, there is a message and the documented code."""
    code = (
        "import sys, tcil.experiments.process.stopping as stopping, importlib.abc\n"
        "class Told(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            print('importing', flush=True); import time; time.sleep(20)\n"
        "sys.meta_path.insert(0, Told())\n"
        f"sys.argv = ['tcil', 'run', '--out', {str(tmp_path / 'runs')!r}]\n"
        "from tcil.experiments.cli.launch import main; main()\n"
    )
    starting = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert starting.stdout.readline() == "importing\n"
    starting.send_signal(number)
    said = starting.communicate(timeout=60)[1]
    assert starting.returncode == ExitCode.STOPPED
    assert said == f"stopped by {number.name}; run the same command again\n"
    assert not (tmp_path / "runs").exists()
