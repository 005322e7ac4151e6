"""Options that several commands share, and their completion in a shell."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from command_lines import BLOCKER
from tcil.experiments.cli.app import app
from tcil.experiments.cli.options import with_options
from tcil.experiments.process.exits import ExitCode


class TestSharedOptions:
    @dataclasses.dataclass(frozen=True)
    class Group:
        size: Annotated[int, typer.Option(min=1)] = 3
        names: Annotated[list[str] | None, typer.Option("--name")] = None

    def run_with(self, command, *words):
        small = typer.Typer()
        small.command()(with_options(command))
        return CliRunner().invoke(small, list(words))

    def test_a_group_becomes_options_and_comes_back(self):
        seen = []

        def command(word: Annotated[str, typer.Argument()], group: TestSharedOptions.Group, flag: bool = False) -> None:
            """Does something."""
            seen.append((word, group, flag))

        assert self.run_with(command, "w").exit_code == 0
        assert self.run_with(command, "w", "--size", "5", "--name", "a", "--name", "b", "--flag").exit_code == 0
        assert seen == [("w", self.Group(), False), ("w", self.Group(5, ["a", "b"]), True)]
        assert self.run_with(command, "w", "--size", "0").exit_code == 2
        assert "Does something." in self.run_with(command, "--help").output

    def test_a_default_group_gives_the_defaults(self):
        seen = []

        def command(group: TestSharedOptions.Group = self.Group(size=9)) -> None:  # noqa: B008
            seen.append(group)

        assert self.run_with(command).exit_code == 0
        assert seen == [self.Group(size=9)]

    def test_run_and_sweep_take_the_same(self):
        run, sweep = (
            {option.name: option for option in typer.main.get_command(app).commands[name].params}
            for name in ("run", "sweep")
        )
        assert set(run) - set(sweep) == {"dry_run", "job", "verbose", "browse"}
        assert set(sweep) <= set(run)
        different = {name for name in sweep if sweep[name].default != run[name].default}
        assert different == {"on"}


class TestCompletion:
    """What a shell asks for, as typer's own scripts do."""

    def completed(self, line, monkeypatch):
        monkeypatch.setenv("_TCIL_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        return CliRunner().invoke(app, [], prog_name="tcil").output.split()

    def test_commands_options_and_presets(self, monkeypatch):
        assert self.completed("tcil re", monkeypatch) == ["report", "reproduce"]
        assert self.completed("tcil sweep --hung", monkeypatch) == ["--hung-after"]
        assert self.completed("tcil run --preset cifar100", monkeypatch) == [
            "cifar100",
            "cifar100-mini",
            "cifar100-pretrained",
            "cifar100-mini-0.2",
        ]

    @pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
    def test_the_script(self, monkeypatch, shell):
        monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
        monkeypatch.setattr(typer.testing, "_get_command", typer.main.get_command)  # built anew: it reads the variable
        outcome = CliRunner().invoke(app, ["--show-completion", shell], prog_name="tcil")
        assert outcome.exit_code == ExitCode.DONE
        assert f"_TCIL_COMPLETE=complete_{shell}" in outcome.output

    @pytest.mark.processes
    def test_without_torch(self, tmp_path):
        code = BLOCKER.format(names={"torch"}) + (
            "import os; os.environ |= dict(_TCIL_COMPLETE='complete_bash', COMP_WORDS='tcil ru', COMP_CWORD='1')\n"
            "sys.argv = ['tcil']\nfrom tcil.experiments.cli.launch import main; main()"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.stdout.split() == ["run"], done.stderr
