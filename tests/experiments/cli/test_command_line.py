"""The command line with odd words, names and text: a clear message, the documented code, no traceback."""

from __future__ import annotations

import json
import re
import sys
import warnings

import pytest

import tcil
from command_lines import QUICK, command, process, results
from tcil.experiments.process.exits import ExitCode, answered
from tcil.experiments.process.screen import Screen
from tcil.experiments.reporting import collect
from tcil.experiments.reporting.grids import Cell, Grid, Row, terminal
from tcil.incremental.data.datasets import load_dataset
from tcil.incremental.data.datasets.download import download

ODD = "runs[old] [/b] [red]x"


@pytest.mark.usefixtures("undrawn")
class TestNames:
    """Names and paths are printed as they are, whatever they look like to rich."""

    def screen(self, capsys, *objects):
        Screen().print(*objects)
        return capsys.readouterr().out

    def test_the_screen(self, capsys):
        assert self.screen(capsys, ODD) == f"{ODD}\n"
        assert self.screen(capsys, ":warning: 1.5") == ":warning: 1.5\n"
        assert self.screen(capsys, "a\x1b]0;title\x9bb") == "a\\x1b]0;title\\x9bb\n"
        grid = Grid(ODD, ("[/b]", "[red]"), (Row(f"[/i] {'-' * 30}", (Cell(words="[bold]"),)),), (f"note {ODD}",))
        shown = self.screen(capsys, terminal(grid))
        for text in (ODD, "[/b]", "[red]", "[/i]", "[bold]"):
            assert text in shown

    def test_report_and_compare(self, tmp_path):
        folder = tmp_path / ODD.replace("/", "\\") / "[red]"
        folder.mkdir(parents=True)
        record = results()
        record["settings"] |= {"dataset": "[/b]", "learner": "own[/i]"}
        record["tasks"][0]["calibrators"]["vanilla"]["title"] = "[/u]Vanilla"
        (folder / "results.json").write_text(json.dumps(record))
        out = tmp_path / "[/b]out"
        said = command("report", folder, "--out", out, code=ExitCode.DONE)
        assert "own[/i] on [/b]" in said
        assert "[/u]Vanilla" in said
        assert str(out) in said.replace(" ", "")
        assert "own[/i] on [/b]" in command("compare", folder, folder, code=ExitCode.DONE)

    def test_errors_and_plans(self, tmp_path):
        assert f"got {tmp_path}/[/b], without a finished run" in command("report", tmp_path / "[/b]")
        assert "preset: got '[/b]'" in command("run", "--preset", "[/b]")
        assert "learner: got '[red]'" in command("plan", "--learner", "[red]")
        assert "'[/b]'" in command("download", "[/b]", "--data", tmp_path)
        assert re.search(r"No such option:? '?--x\[/b\]", command("run", "--x[/b]"))  # typer's own message, or click's


class TestWords:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--set", "learner_options=5"], "learner_options: got 5"),
            (["--set", "learner_options=[]"], "learner_options: got []"),
            (["--set", "learner_options.=1"], "--set: got 'learner_options.=1'"),
            (["--set", "=1"], "--set: got '=1'"),
            (["--set", "epochs"], "--set: got 'epochs'"),
            (["--set", "no_such.x=1"], "no_such: got {'x': 1}; there is no such setting"),
            (["--set", "preset=[]"], "preset: got []"),
            (["--set", "preset={}"], "preset: got {}"),
            (["--set", "preset=5"], "preset: got 5"),
            (["--set", "seeds=5"], "seeds: got 5"),
            (["--set", "learners=[[]]"], "learner: got []"),
            (["--set", f"seed={2**70}"], "seed: got 1180591620717411303424"),
            (["--set", "seed=1" + "0" * 5000], "seed: got "),
            (["--seeds", str(2**70)], "seed: got 1180591620717411303424"),
            (["--set", f"class_order_seed=-{2**70}"], "class_order_seed: got"),
            (["--set", f"validation_seed={2**64}"], "validation_seed: got"),
            (["--set", f"batch_size={10**30}"], "batch_size: got 1" + "0" * 30),
            (["--set", f"epochs={10**30}"], "epochs: got"),
            (["--set", f"memory={10**30}"], "memory: got"),
            (["--set", f"tasks=[{10**30}]"], "tasks"),
            (["--set", f"crop={10**6}"], "crop: got 1000000"),
            (["--set", "lr=NaN"], "lr: got nan"),
            (["--set", "lr=Infinity"], "lr: got inf"),
            (["--set", "weight_decay=1e999"], "weight_decay: got inf"),
            (["--reserve", "nan"], "reserve: got nan"),
            (["--precision", "fp61"], "precision: got 'fp61'; expected one of fp32, bf16, fp16"),
            (["--precision", "bf16", "--set", "precision=fp16"], "precision beside --precision"),
            (["--learner", "wa", "--set", "learner_options.distillation_temperature=NaN"], "option distillation_temp"),
            (
                ["--learner", "wa", "--set", "learner_options.distillation_temperature=1e999"],
                "option distillation_temp",
            ),
            (["--learner", "eeil", "--set", f"learner_options.finetune_epochs={10**30}"], "option finetune_epochs"),
            (["--cpus-per-run", "inf"], "cpus-per-run: got inf"),
            (["--gpus-per-run", "nan"], "gpus-per-run"),
            (["--gpus-per-run", "inf"], "gpus-per-run: got inf"),
            (["--at-once", str(10**30)], "at-once: got"),
            (["--set", "network=math:sqrt"], "network: got 'math:sqrt', which returned an object of the type float"),
            (["--set", "network=math:pi"], "network: got 'math:pi'; expected"),
            (["--set", "network=sys:exit"], "network: got 'sys:exit', the function exit, which failed (SystemExit: 2)"),
            (["--set", "network=..x:y"], "network: got '..x:y' ("),
            (["--set", "dataset=os:getcwd"], "It is the function getcwd."),
            (["--set", "dataset=json:dumps"], "dataset: got 'json:dumps', which returned an object of the type str"),
            (["--data", "/", "--set", "dataset=json:dumps"], "the function dumps, which failed (TypeError: Object of"),
            (["--set", "learner=json:dumps"], "expected a subclass of tcil's Learner. It is the function dumps."),
            (["--calibrators", "math:sqrt"], "calibrator: got 'math:sqrt'; expected an Entry"),
        ],
    )
    def test_are_refused(self, tmp_path, words, message):
        assert message in command("run", "--out", tmp_path / "runs", *words)
        assert not (tmp_path / "runs").exists()

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("learner_options = 5", "learner_options: got 5"),
            ("lr = nan", "lr: got nan"),
            ("lr = -inf", "lr: got -inf"),
            ("seeds = [1180591620717411303424]", "seed: got 1180591620717411303424"),
            ("seed = 0x" + "f" * 5000, "seed: got a number of more than 4,300 digits"),
            ("epochs = 1979-05-27", "epochs: got datetime.date(1979, 5, 27)"),
            ("learners = 'er'", "learners: got 'er'"),
            ("learners = ['er', 'eerr']", "learner: got 'eerr'"),
            ("datasets = ['digits', 'digit']", "dataset: got 'digit'"),
            ("x = " + "[" * 5000, "study: got"),
            ("seed = 2\nseeds = [1]", "seed and seeds: got 2 and [1]; expected one of the two."),
            ("learner = 'wa'\nlearners = ['er']", "learner and learners: got 'wa' and ['er']"),
            ("dataset = 'digits'\ndatasets = ['letters']", "dataset and datasets: got 'digits' and ['letters']"),
            ("[learner_options]\nhead = 'x'", "head: got 'x'"),
            ("[learner_options]\nnope = 1", "option of learner er: got 'nope'"),
            ("learners = ['er', 'wa']\n[learner_options]\nrestrict_head = true", "option of learner er: got 'restr"),
        ],
    )
    def test_study_files(self, tmp_path, text, message):
        study = tmp_path / "study.toml"
        study.write_text(text)
        for name in ("plan", "run", "sweep"):
            assert message in command(name, study, "--out", tmp_path / "runs")
        assert not (tmp_path / "runs").exists()

    def test_a_study_that_is_no_text(self, tmp_path):
        (tmp_path / "study.toml").write_bytes(b"\xff\xfe")
        assert "which is not TOML" in command("plan", tmp_path / "study.toml")

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["plan", "--learner", "eerr"], "learner: got 'eerr'"),
            (["plan", "--dataset", "cifar"], "dataset: got 'cifar'"),
            (["plan", "--set", "network=resnet"], "network: got 'resnet'"),
            (["plan", "--set", "optimizer=sdg"], "optimizer: got 'sdg'"),
            (["plan", "--preset", "cifar"], "preset: got 'cifar'"),
            (["plan", "--calibrators", "t-cl"], "calibrator: got 't-cl'"),
            (["run", "--dry-run", "--calibrators", "tss"], "calibrator: got 'tss'"),
            (["run", "--dry-run", "--log", "cvs"], "log: got 'cvs'"),
            (["run", "--dry-run", "--on", "ry"], "on: got 'ry'"),
            (["sweep", "--calibrators", "tss"], "calibrator: got 'tss'"),
            (["reproduce", "baseline"], "name: got 'baseline'"),
            (["reproduce", "baselines", "--schedule", "shrt"], "schedule: got 'shrt'"),
            (
                ["reproduce", "baselines", "--render", "--schedule", "mini", "--set", "network=smal"],
                "network: got 'smal'",
            ),
            (["reproduce", "baselines", "--dry-run", "--schedule", "mini", "--set", "learner=x"], "learner: got 'x'"),
            (["reproduce", "baselines", "--dry-run", "--schedule", "mini", "--set", "epoch=1"], "epoch: got 1"),
            (
                ["reproduce", "baselines", "--schedule", "mini", "--set", "learner_options.nope=1"],
                "option of learner er: got 'nope'",
            ),
            (["calibrate", ".", "--calibrators", "tss"], "calibrator: got 'tss'"),
            (["calibrate", ".", "--redraw", str(10**30)], "--redraw"),
        ],
    )
    def test_unknown_names_before_any_work(self, tmp_path, monkeypatch, words, message):
        monkeypatch.chdir(tmp_path)
        assert message in command(*words)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        "words", [["run", "--dry-run"], ["sweep"], ["reproduce", "baselines", "--schedule", "mini"]]
    )
    def test_an_unknown_layout_in_the_environment(self, tmp_path, monkeypatch, words):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("TCIL_LAYOUT", "x")
        assert "TCIL_LAYOUT: got 'x'; expected" in command(*words)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        ("words", "message"),
        [(["nope"], "name: got 'nope'"), (["baselines", "--schedule", "x"], "schedule: got 'x'")],
    )
    def test_names_before_the_report_folder(self, tmp_path, words, message):
        """Which may be a report of other runs, so that the folder would be blamed for a name."""
        (tmp_path / "report.html").write_text("mine")
        assert message in command("reproduce", *words, "--report", tmp_path)

    @pytest.mark.parametrize(
        ("text", "flags", "names"),
        [
            ("seed = 2", ["--seeds", "3,4"], ["er-seed3", "er-seed4"]),
            ("seed = 2", ["--set", "seeds=[3,4]"], ["er-seed3", "er-seed4"]),
            ("seeds = [1, 2]", ["--set", "seed=3"], ["er-seed3"]),
            ("learner = 'wa'", ["--set", "learners=['er', 'la']".replace("'", '"')], ["er-seed1", "la-seed1"]),
            ("learners = ['wa', 'la']", ["--learner", "er"], ["er-seed1"]),
            ("learner = 'bic'", ["--learner", "er, wa,"], ["er-seed1", "wa-seed1"]),
            ("datasets = ['letters']", ["--dataset", "digits"], ["digits-er-seed1"]),
        ],
    )
    def test_flags_replace_what_the_study_says(self, tmp_path, text, flags, names):
        study = tmp_path / "study.toml"
        study.write_text(text)
        said = command("plan", study, "--out", tmp_path / "runs", *flags, code=ExitCode.DONE)
        planned = re.findall(r"\d+ (\S+) to do", said)
        assert len(planned) == len(names)
        assert all(name in run for name, run in zip(names, planned, strict=True))

    def test_one_and_several_by_flags(self, tmp_path):
        words = ["plan", "--out", tmp_path / "runs", "--set", "seed=2", "--set", "seeds=[1]"]
        assert "seed and seeds: got 2 and [1]; expected one of the two." in command(*words)

    def test_download_into_a_file(self, tmp_path):
        (tmp_path / "file").write_text("mine")
        for place in (tmp_path / "file", tmp_path / "file" / "below"):
            assert f"data: got {place}" in command("download", "cifar10", "--data", place)
        (tmp_path / "cifar-10-batches-py").write_text("mine")
        with pytest.raises(ValueError, match="which is not a folder"):
            download("cifar10", tmp_path)
        assert {path.read_text() for path in tmp_path.iterdir()} == {"mine"}

    def test_version(self):
        assert command("--version", code=ExitCode.DONE) == f"tcil {tcil.__version__}"

    def test_a_data_error_of_an_own_dataset_stays_one(self, tmp_path, monkeypatch):
        code = "from tcil.incremental.data.datasets import load_dataset\n"
        code += "def read(folder): return load_dataset('cifar100')\n"
        (tmp_path / "own_data.py").write_text(code)
        monkeypatch.syspath_prepend(str(tmp_path))
        with pytest.raises(ValueError, match=r"^data: got no folder"):
            load_dataset("own_data:read")
        sys.modules.pop("own_data")


@pytest.mark.processes
def test_python_m():
    """The same command under another name, which it calls by its own."""
    asked = process("--version")
    assert asked.communicate(timeout=60)[0] == f"tcil {tcil.__version__}\n"
    wrong = process("nonsense")
    assert "Usage: tcil " in wrong.communicate(timeout=60)[1]
    assert wrong.returncode == ExitCode.REFUSED


def test_what_the_paper_needs_is_refused_without_its_data(tmp_path):
    """Before any training, whatever would have been first."""
    words = ["reproduce", "policies", "--out", tmp_path / "runs", "--report", tmp_path / "report"]
    assert "data: got no folder; expected the folder that holds cifar100. Pass --data DIR." in command(*words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--seeds", "1,2", "--set", "seed=5"), "seed beside --seeds"),
        (("--seeds", "1,2", "--set", "seeds=[5]"), "seeds beside --seeds"),
        (("--learner", "er", "--set", "learner=wa"), "learner beside --learner"),
        (("--learner", "er", "--set", 'learners=["wa"]'), "learners beside --learner"),
    ],
)
def test_a_setting_that_is_given_twice(words, told):
    assert f"--set: got {told}; expected one of the two." in command("run", "--dry-run", *words)


def test_seeds_twice_in_a_reproduction(tmp_path):
    words = ["reproduce", "claims", "--dry-run", "--seeds", "1", "--set", "seed=5", "--out", tmp_path / "runs"]
    assert "--set: got seed beside --seeds" in command(*words, "--report", tmp_path / "report")


def test_a_plan_refuses_a_device_that_no_machine_has_and_accepts_one_of_another_machine():
    assert "device: got 'gpu'; expected cpu, cuda or mps" in command("run", *QUICK, "--dry-run", "--device", "gpu")
    assert "to run" in command("run", *QUICK, "--dry-run", "--device", "cuda", code=0)


def test_a_device_without_numbers(tmp_path):
    assert "device: got 'meta'" in command("run", "--out", tmp_path / "runs", *QUICK, "--device", "meta")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("file", ["settings.json", "environment.json"])
def test_run_folders_cannot_drive_the_terminal(tmp_path, file):
    (tmp_path / "settings.json").write_text('{"network": "os:\\u001b[31m", "dataset": "digits", "learner": "er"}')
    (tmp_path / "environment.json").write_text(
        '{"format": 99, "tcil": "\\u001b[2J"}' if file == "environment.json" else "{}"
    )
    said = command("calibrate", tmp_path, "--calibrators", "ts")
    assert "\\x1b" in said
    assert "\x1b" not in said


def test_errors_cannot_drive_the_terminal(capsys):
    with pytest.raises(SystemExit), answered():
        raise ValueError("a name \x1b[2J")
    assert capsys.readouterr().err == "error: a name \\x1b[2J\n"


def test_every_command_makes_warnings_harmless(monkeypatch, tmp_path):
    """Libraries quote names in them, matplotlib a letter that its font lacks."""
    said = []

    def warned(runs):
        said.append(warnings.formatwarning("odd \x1b[2J", UserWarning, "file", 1))
        raise ValueError("no runs")

    monkeypatch.setattr(collect, "read_runs", warned)
    assert "no runs" in command("report", tmp_path, "--out", tmp_path / "out")
    assert said[0] == "warning: odd \\x1b[2J\n"  # without the line of code, as tcil run shows them
    assert "\x1b" in warnings.formatwarning("odd \x1b", UserWarning, "file", 1)  # only while a command is done
