"""The command line with odd words, files and circumstances: a clear message, the documented code, no traceback."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tcil
from tcil.calibration.checksums import Damaged
from tcil.experiments import collect, commands, exits, figures, records, report, stopping, tables
from tcil.experiments.calibration import CALIBRATORS
from tcil.experiments.cli import app
from tcil.experiments.exits import ExitCode, RunFailed, answered
from tcil.experiments.grids import Cell, Grid, Row, terminal
from tcil.experiments.screen import Screen
from tcil.experiments.settings import build
from tcil.experiments.store import DamagedFileWarning, RunFolder
from tcil.incremental.datasets import load_dataset
from tcil.incremental.datasets.download import download

ROOT = Path(__file__).resolve().parent.parent
ODD = "runs[old] [/b] [red]x"
QUICK = (
    "--no-full-data",
    "--calibrators",
    "vanilla",
    "--set",
    "epochs=1",
    "--set",
    "tasks=[2,2]",
    "--set",
    "memory=20",
)


def command(*words, code=ExitCode.REFUSED):
    """What a command says, as one line; it must end with this code, and not by an error that nobody caught."""
    outcome = CliRunner().invoke(app, [str(word) for word in words])
    assert isinstance(outcome.exception, SystemExit | None), outcome.exception
    assert outcome.exit_code == code, outcome.output
    return " ".join(outcome.output.split())


def process(*words, **options):
    """`python -m tcil` with these words, on one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **options}
    return subprocess.Popen(
        [sys.executable, "-m", "tcil", *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def row(title="Vanilla", **more):
    """A calibrator's figures after the first task, with two classes seen."""
    bins = {"count": [1] * 10, "confidence": [0.5] * 10, "accuracy": [None] * 10}
    figures = {"accuracy": 0.5, "ece": 0.1, "aece": 0.1, "noise_floor": 0.01, "gap": 0.1}
    return {
        "title": title, "block": "ranked", **figures, "ece_predicted_old": None, "ece_predicted_new": 0.1,
        "ece_interval": [0.0, 0.2], "bins": bins, "by_task": {"accuracy": [0.5], "ece": [0.1], "gap": [0.1]},
        "by_class": {"accuracy": [0.5, 0.5], "gap": [0.1, 0.1]}, **more,
    }  # fmt: skip


def results():
    """A small finished run as its file holds it."""
    fit = {"verdicts": ["ok"], "reachable": True, "magnitude": 0.1, "target_temperature": 2.0}
    fit["trace"] = [{"magnitude": 0.0, "temperature": 1.0}, {"magnitude": 0.1, "temperature": "inf"}]
    rows = {name: row(entry.title) for name, entry in CALIBRATORS.items()}
    rows["t-cil"] |= {"temperature": 2.0, "temperature_interval": [1.0, 3.0], "result": fit}
    rows["reserve-ts"] = {"title": "Reserve TS", "block": "oracle", "not_applicable": "needs --reserve"}
    memory = {"count": 4, "accuracy": 1.0, "accuracy_by_task": [1.0]}
    task = {"task": 0, "seen": 2, "memory": memory, "calibrators": rows, "history": {}}
    settings = {**build({}).model_dump(mode="json"), "tasks": [2]}
    environment = {"torch": "2", "threads": 1, "layout": "contiguous", "seconds": {"task-00": {"training": 1.0}}}
    return {"settings": settings, "tasks": [task], "environment": environment}


class Paper:
    """Takes whatever is drawn on it, and shows nothing."""

    def __getattr__(self, name):
        return self

    def __call__(self, *words, **more):
        return self

    def __getitem__(self, place):
        return self

    def __iter__(self):
        return iter(())


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures are worked out, but not drawn."""
    monkeypatch.setattr(figures, "drawing", lambda *sizes, **more: contextlib.nullcontext((Paper(), Paper())))
    monkeypatch.setattr(figures, "picture", lambda figure, *words: figures.Picture("<svg></svg>", *words))


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
        assert "OWN[/I] on [/b]" in said
        assert "[/u]Vanilla" in said
        assert str(out) in said.replace(" ", "")
        assert "OWN[/I] on [/b]" in command("compare", folder, folder, code=ExitCode.DONE)

    def test_errors_and_plans(self, tmp_path):
        assert f"got {tmp_path}/[/b], without a finished run" in command("report", tmp_path / "[/b]")
        assert "preset: got '[/b]'" in command("run", "--preset", "[/b]")
        assert "learner: got '[red]'" in command("plan", "--learner", "[red]")
        assert "'[/b]'" in command("download", "[/b]", "--data", tmp_path)
        assert "No such option: --x[/b]" in command("run", "--x[/b]")  # typer's own message


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
            (["calibrate", ".", "--calibrators", "tss"], "calibrator: got 'tss'"),
            (["calibrate", ".", "--redraw", str(10**30)], "--redraw"),
        ],
    )
    def test_unknown_names_before_any_work(self, tmp_path, monkeypatch, words, message):
        monkeypatch.chdir(tmp_path)
        assert message in command(*words)
        assert not list(tmp_path.iterdir())

    def test_download_into_a_file(self, tmp_path):
        (tmp_path / "file").write_text("mine")
        for place in (tmp_path / "file", tmp_path / "file" / "below"):
            assert f"data: got {place}" in command("download", "cifar10", "--data", place)
        (tmp_path / "cifar-10-batches-py").write_text("mine")
        with pytest.raises(ValueError, match="which is no folder"):
            download("cifar10", tmp_path)
        assert {path.read_text() for path in tmp_path.iterdir()} == {"mine"}

    def test_version(self):
        assert command("--version", code=ExitCode.DONE) == f"tcil {tcil.__version__}"

    def test_a_data_error_of_an_own_dataset_stays_one(self, tmp_path, monkeypatch):
        code = "from tcil.incremental.datasets import load_dataset\ndef read(folder): return load_dataset('cifar100')\n"
        (tmp_path / "own_data.py").write_text(code)
        monkeypatch.syspath_prepend(str(tmp_path))
        with pytest.raises(ValueError, match=r"^data: got no folder"):
            load_dataset("own_data:read")
        sys.modules.pop("own_data")


def places(record, path=()):
    """Every field of a record."""
    yield path
    if isinstance(record, dict | list):
        for key, value in record.items() if isinstance(record, dict) else enumerate(record[:2]):
            yield from places(value, (*path, key))


def changed(record, path, value):
    """The record with another value at this place; `...` takes it away."""
    if not path:
        return value
    record = copy.deepcopy(record)
    place = record
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return record


WRONG = (..., None, 5, -1, "x", [], {}, [None], 1e999, float("nan"), 10**400, True, [[]], {"a": {}})


class TestRunFolders:
    """JSON that is whole, but not what is due."""

    @pytest.mark.usefixtures("undrawn")
    def test_every_field_of_other_types(self, tmp_path):
        """Whatever is changed: it is refused with the file's name and a field, or every table and page can be made."""
        few = results()
        rows = few["tasks"][0]["calibrators"]
        few["tasks"][0]["calibrators"] = {name: rows[name] for name in ("vanilla", "t-cil", "reserve-ts")}
        file = tmp_path / "results.json"
        refused, accepted = [], 0
        for number, path in enumerate(places(few)):
            for value in (WRONG[number % len(WRONG)], WRONG[(5 * number + 3) % len(WRONG)]):
                if not path and value is ...:
                    continue
                file.write_text(json.dumps(changed(few, path, value)))
                try:
                    runs = collect.read_runs([tmp_path])
                except ValueError as error:
                    refused.append(str(error))
                    continue
                accepted += 1
                assert report.study_sections(collect.studies(collect.shown(runs)))
                assert tables.comparison(runs, runs, "ece").rows
                assert isinstance(runs[0].complete, bool)
        assert all(text.startswith(f"runs: got {file}, which cannot be read (") for text in refused)
        assert len(refused) > 100
        assert accepted > 30

    @pytest.mark.parametrize(
        ("path", "value", "field"),
        [
            ((), [], "the whole file"),
            (("tasks",), {}, "tasks: got {}"),
            (("tasks", 0), [], "tasks[0]: got []"),
            (("tasks", 0, "calibrators", "ts", "ece"), "0.1", "tasks[0].calibrators.ts.ece: got '0.1'"),
            (("tasks", 0, "calibrators", "ts", "ece"), ..., "tasks[0].calibrators.ts: ece is missing"),
            (("tasks", 0, "calibrators", "ts", "ece"), 1e300, "tasks[0].calibrators.ts.ece: got 1e+300"),
            (("tasks", 0, "calibrators", "ts", "bins", "count"), [1], "tasks[0].calibrators.ts.bins.count"),
            (("tasks", 0, "calibrators", "t-cil", "result", "verdicts"), ["?"], "verdict: got '?'"),
            (("tasks", 0, "task"), 3, "by_task of vanilla has not 4 tasks"),
            (("settings", "seed"), 2**70, "settings.seed: got 1180591620717411303424"),
            (("settings", "tasks"), 7, "its settings ask for 7"),
            (("environment", "seconds"), [1], "environment.seconds: got [1]"),
        ],
    )
    def test_the_field_is_named(self, tmp_path, path, value, field):
        file = tmp_path / "results.json"
        file.write_text(json.dumps(changed(results(), path, value)))
        for words in (["report", tmp_path, "--out", tmp_path / "out"], ["compare", tmp_path, tmp_path]):
            said = command(*words)
            assert f"runs: got {file}" in said
            assert field in said
        assert not (tmp_path / "out").exists()

    def test_stored_results_have_the_shape(self):
        files = list((ROOT / "docs" / "results" / "runs").glob("*.json"))
        assert files
        for file in files[:20]:
            records.check("results.json", json.loads(file.read_text()))

    @pytest.mark.parametrize("content", ["[" * 100_000, "[]", "5", "null", '{"a": ', "\udcff", '{"settings": 5}'])
    def test_no_results_at_all(self, tmp_path, content):
        (tmp_path / "results.json").write_text(content, errors="surrogateescape")
        assert f"got {tmp_path}/results.json, which cannot be read" in command("report", tmp_path)

    @pytest.mark.parametrize(
        ("name", "content", "field"),
        [
            ("environment.json", '{"threads": "2"}', "threads: got '2'"),
            ("environment.json", '{"threads": 0}', "threads: got 0"),
            ("environment.json", '{"layout": "sideways"}', "layout: got 'sideways'"),
            ("environment.json", '{"seconds": {"task-00": 5}}', "seconds.task-00: got 5"),
            ("environment.json", "[]", "the whole file: got []"),
            ("analysis.json", '{"format": 2, "tasks": {}}', "tasks: got {}"),
            ("settings.json", '{"dataset": 5}', "dataset: got 5"),
            ("data.json", "[1]", "the whole file: got [1]"),
            ("redraw.json", '{"TS": 5}', "TS: got 5"),
            ("task-00/results.json", '{"calibrators": []}', "calibrators: got []"),
            ("task-00/analysis.json", '{"task": 0, "epsilon": 5}', "epsilon: got 5"),
        ],
    )
    def test_other_files_count_as_damaged(self, tmp_path, name, content, field):
        """So a run computes them anew, as it does where a checksum does not match."""
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
        with pytest.warns(DamagedFileWarning, match=re.escape(str(tmp_path / name))):
            assert RunFolder(tmp_path).read_json(name) is None
        with pytest.raises(Damaged) as error:
            records.check(name, json.loads(content))
        assert field in " ".join(part for part in (str(error.value), _all(name, content)))

    def test_a_run_goes_on_whatever_its_files_say(self, tmp_path, monkeypatch):
        monkeypatch.setattr(commands, "present", lambda run, console: None)
        command("run", "--out", tmp_path, *QUICK, code=ExitCode.DONE)
        (folder,) = tmp_path.iterdir()
        names = ["results.json", "environment.json", "task-00/results.json", "task-01/results.json", "status.json"]
        before = {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}
        for content in ("[]", '{"tasks": 5, "calibrators": 5, "threads": "x", "seconds": []}'):
            for name in names:
                (folder / name).write_text(content)
            said = command("run", "--out", tmp_path, *QUICK, code=ExitCode.DONE)
            assert "task-00/results.json is damaged" in said
            for name in ("results.json", "task-00/results.json", "task-01/results.json"):
                assert (folder / name).read_bytes() == before[name]


def _all(name, content):
    """Every error of a record, as pydantic has them."""
    from pydantic import ValidationError

    kinds = records._IN_TASK if "/" in name else records._IN_RUN
    try:
        kinds.get(name.split("/")[-1], records._Object).model_validate(json.loads(content))
    except ValidationError as error:
        return "; ".join(f"{records._field(e['loc'])}: got {e['input']!r}" for e in error.errors())
    return ""


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
            (stopping.SecondInterrupt(), 130, "ended at once"),
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

    def test_ctrl_c_twice(self):
        with stopping.on_signals(signal.SIGINT):
            os.kill(os.getpid(), signal.SIGINT)
            assert stopping.requested()
            with pytest.raises(stopping.SecondInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert not stopping.requested()

    def test_ctrl_c_in_a_run_finishes_the_step(self, tmp_path, monkeypatch):
        from tcil.experiments import progress

        monkeypatch.setattr(progress.ProgressDisplay, "__call__", lambda *words: os.kill(os.getpid(), signal.SIGINT))
        said = command("run", "--out", tmp_path, *QUICK, "--set", "epochs=2", code=ExitCode.STOPPED)
        assert "stopped in task 0" in said
        (folder,) = tmp_path.iterdir()
        assert (folder / "task-00" / "epoch.safetensors").exists()
        monkeypatch.undo()
        command("run", "--out", tmp_path, *QUICK, "--set", "epochs=2", code=ExitCode.DONE)

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


BLOCKER = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""
EXTRAS = exits._EXTRAS["bench"]


class TestInstallation:
    def test_extras_are_those_of_the_project(self):
        text = (ROOT / "pyproject.toml").read_text()
        listed = re.findall(r'"([a-z0-9-]+)>', text.partition("bench = [")[2].partition("]")[0])
        modules = {"pillow": "PIL", "scikit-learn": "sklearn"}
        assert {modules.get(name, name) for name in listed} == set(EXTRAS) - {"markupsafe"}  # jinja2 brings that

    @pytest.mark.parametrize(
        ("package", "words"),
        [
            ("pydantic", ["plan"]),
            ("pydantic", ["settings"]),
            ("matplotlib", ["report", "."]),
            ("jinja2", ["report", "."]),
            ("markupsafe", ["run", "--dry-run"]),
            ("sklearn", ["run", "--set", "epochs=1"]),
            ("PIL", ["run", "--dataset", "image-folder", "--data", "images"]),
        ],
    )
    def test_one_package_is_missing(self, tmp_path, monkeypatch, package, words):
        (tmp_path / "results.json").write_text(json.dumps(results()))
        for part in ("train", "test"):
            for name in "ab":
                (tmp_path / "images" / part / name).mkdir(parents=True)
                (tmp_path / "images" / part / name / "1.png").write_bytes(b"")
        monkeypatch.chdir(tmp_path)
        # Modules of tcil that were imported already would not ask for the package again.
        ours = [n for n in sys.modules if n.startswith("tcil.experiments.") and not n.endswith((".exits", ".stopping"))]
        for name in ours if package not in ("sklearn", "PIL") else ():
            monkeypatch.delitem(sys.modules, name)
            monkeypatch.delattr(sys.modules["tcil.experiments"], name.rpartition(".")[2], raising=False)
        for name in [n for n in sys.modules if n.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)

        class Missing:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == package:
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
        assert f"without {package}; expected the extra tcil[bench]. pip install 'tcil[bench]'" in command(*words)

    @pytest.mark.processes
    @pytest.mark.parametrize("names", [{"typer"}, {"rich"}, set(EXTRAS)], ids=["typer", "rich", "all"])
    def test_a_base_install(self, tmp_path, names):
        words = ["tcil", "run"] if len(names) > 1 else ["tcil", "--version"]
        code = (
            BLOCKER.format(names=names)
            + f"sys.argv = {words}\nimport runpy; runpy.run_module('tcil', run_name='__main__')"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == ExitCode.REFUSED
        assert "pip install 'tcil[bench]'" in done.stderr
        assert "Traceback" not in done.stderr
        assert not list(tmp_path.iterdir())


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
        assert capfd.readouterr().err.count("No space left on device): going on without it") == 1

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
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_signal_while_the_command_starts(tmp_path, number):
    """As soon as there is a handler, and while torch is imported, there is a message and the documented code."""
    code = (
        "import sys, tcil.experiments.stopping as stopping, importlib.abc\n"
        "class Told(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            print('importing', flush=True); import time; time.sleep(20)\n"
        "sys.meta_path.insert(0, Told())\n"
        f"sys.argv = ['tcil', 'run', '--out', {str(tmp_path / 'runs')!r}]\n"
        "from tcil.experiments.launch import main; main()\n"
    )
    starting = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert starting.stdout.readline() == "importing\n"
    starting.send_signal(number)
    said = starting.communicate(timeout=60)[1]
    assert starting.returncode == ExitCode.STOPPED
    assert said == f"stopped by {number.name}; start the same command again\n"
    assert not (tmp_path / "runs").exists()
