"""Attacks by what a folder holds: code by name, links, other images, files of the same name. Nothing of them happens.

Each attack leaves a mark where it works, and where trust is given or no protection is asked for, it does.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import matplotlib
import pytest
import torch
from typer.testing import CliRunner

from tcil.experiments.cli.app import app
from tcil.experiments.config.settings import RunSettings, build, own_settings
from tcil.experiments.process.progress import CsvLog
from tcil.experiments.reporting import collect
from tcil.experiments.reporting.plots import drawing
from tcil.experiments.runs.run import Run
from tcil.experiments.runs.store import DamagedFileWarning, RunFolder
from tcil.experiments.scheduling.executors import Ray, Worker
from tcil.experiments.scheduling.job import Job
from tcil.foundation.files import replace_file
from tcil.incremental.networks import network_factory

EVIL = """
    from pathlib import Path

    Path({mark!r}).touch()

    def x(*anything):
        return None
"""
OWN = """
    from dataclasses import replace

    import beside_parts
    from tcil.incremental.data.datasets import load_dataset

    def load(folder):
        digits = load_dataset("digits")
        images = digits.train.images.roll(int((folder / "shift").read_text()), dims=-1)
        return replace(digits, train=replace(digits.train, images=images))
"""
TINY = {"epochs": 1, "milestones": [], "classes": 4, "tasks": 2, "memory": 20}
NAMES = ["vanilla", "ts"]


def command(*words, code=0):
    """What it says; `code` None is any but 0: what the code of an attack returns is of no use to the command."""
    outcome = CliRunner().invoke(app, [str(word) for word in words])
    assert outcome.exit_code == code if code is not None else outcome.exit_code, outcome.output
    return " ".join(outcome.output.split())


def files(folder):
    """Every file of a folder with its content, to see what changed; without who holds the lock."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    """Pages are not what is tried here, and take seconds."""
    monkeypatch.setattr("tcil.experiments.reporting.show.write_report", lambda runs, path: path)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current folder, in a process that has nothing of it on its path."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in sys.modules[name].__file__:
            del sys.modules[name]


@pytest.fixture
def evil(here, tmp_path):
    """A module `evil` in the current folder; the path is there once it was imported."""
    mark = tmp_path / "mark"
    (here / "evil.py").write_text(textwrap.dedent(EVIL.format(mark=str(mark))))
    return mark


@pytest.fixture
def own(here):
    """A dataset of the user's own in the current folder; its images depend on --data."""
    (here / "parts.py").write_text(textwrap.dedent(OWN))
    (here / "beside_parts.py").touch()
    for shift in (0, 1):
        (here / f"data{shift}").mkdir()
        (here / f"data{shift}" / "shift").write_text(str(shift))
    return here


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    Run(build({"dataset": "digits", **TINY}), folder).execute(NAMES)
    return folder


@pytest.fixture
def run(trained, tmp_path):
    """A copy of it, as others may have sent it."""
    return shutil.copytree(trained, tmp_path / "run")


def edit(folder, name="settings.json", **changes):
    store = RunFolder(folder)
    record = store.peek_json(name)
    place = record["settings"] if name == "results.json" else record
    place |= changes
    store.write_json(name, record)


class TestCodeByName:
    @pytest.fixture
    def source(self, tmp_path):
        folder = tmp_path / "foreign"
        folder.mkdir()

        def describe(**names):
            (folder / "tasks.json").write_text(json.dumps({"tasks": [[0, 1], [2, 3]], **names}))
            return folder

        return describe

    @pytest.fixture
    def scratch(self, tmp_path):
        (tmp_path / "scratch" / "work").mkdir(parents=True)
        return tmp_path / "scratch"

    def test_import_deletes_nothing(self, source, scratch, tmp_path):
        folder = source(dataset="shutil:rmtree", network="os.path:basename")
        words = ["import", folder, "--data", scratch, "--out", tmp_path / "out"]
        said = command(*words, code=2)
        assert (scratch / "work").is_dir()
        assert "dataset shutil:rmtree, network os.path:basename" in said
        assert "--trust" in said
        assert not (tmp_path / "out").exists()
        said = command(*words, "--trust", code=None)  # the attack is one: with trust it does what it says
        assert not scratch.exists()
        assert "tasks.json, which imports dataset shutil:rmtree, network os.path:basename" in said

    def test_calibrate_deletes_nothing(self, run, scratch):
        edit(run, dataset="shutil:rmtree")
        before = files(run)
        said = command("calibrate", run, "--data", scratch, code=2)
        assert (scratch / "work").is_dir()
        assert "settings.json, which names code to be imported and called: dataset shutil:rmtree" in said
        assert files(run) == before
        command("calibrate", run, "--data", scratch, "--trust", code=None)
        assert not scratch.exists()

    @pytest.mark.parametrize("kind", ["dataset", "network", "learner"])
    def test_calibrate_imports_nothing(self, run, evil, kind):
        edit(run, **{kind: "evil:x"})
        assert f"{kind} evil:x" in command("calibrate", run, code=2)
        assert not evil.exists()
        command("calibrate", run, "--trust", code=None)
        assert evil.exists()

    @pytest.mark.parametrize("kind", ["dataset", "network"])
    def test_import_imports_nothing(self, source, evil, tmp_path, kind):
        folder = source(**{"dataset": "digits", "network": "small_cnn", kind: "evil:x"})
        assert f"{kind} evil:x" in command("import", folder, "--out", tmp_path / "out", code=2)
        assert not evil.exists()
        command("import", folder, "--out", tmp_path / "out", "--trust", code=None)
        assert evil.exists()

    def test_reading_imports_nothing(self, run, evil, tmp_path):
        """Tables and pictures of a folder in which every name is code; also where a run would go on."""
        store, rows = RunFolder(run), {}
        record = store.peek_json("results.json")
        for task in record["tasks"]:
            rows = {f"evil:{name}": row for name, row in task["calibrators"].items()}
            task["calibrators"] |= rows
            task["history"] = {"evil:x": {}}
            store.write_json(f"task-{task['task']:02d}/results.json", task)
        record["settings"] |= {"dataset": "evil:x", "network": "evil:x", "learner": "evil:x"}
        store.write_json("results.json", record)
        edit(run, dataset="evil:x", network="evil:x", learner="evil:x")
        command("report", run, "--out", tmp_path / "report", "--keep", tmp_path / "kept")
        command("compare", run, tmp_path / "kept")
        words = ["reproduce", "policies", "--schedule", "mini", "--render", "--kept", run, "--kept", tmp_path / "kept"]
        command(*words, "--out", tmp_path / "none", "--report", tmp_path / "paper")
        with pytest.raises(ValueError, match="holds a run with other settings"):
            Run(build({"dataset": "digits", **TINY}), run).execute(NAMES)
        assert not evil.exists()

    def test_pictures_run_no_latex(self):
        """Whatever a matplotlibrc in the current folder asks for."""
        with matplotlib.rc_context({"text.usetex": True}), drawing():
            assert not matplotlib.rcParams["text.usetex"]

    def test_settings_that_are_read_cannot_name_code(self, evil):
        record = build({"dataset": "evil:x"}).model_dump(mode="json")
        with pytest.raises(ValueError, match="name code to be imported: dataset evil:x"):
            RunSettings(**record)
        assert own_settings(record).dataset == "evil:x"  # said by the user, or on their behalf
        assert not evil.exists()

    @pytest.mark.parametrize("style", ["flag", "study"])
    def test_the_users_own_words_need_no_trust(self, evil, here, style):
        (here / "study.toml").write_text('network = "evil:x"')
        command("run", *(["study.toml"] if style == "study" else ["--set", "network=evil:x"]), "--dry-run", code=None)
        assert evil.exists()


class TestCurrentFolder:
    @pytest.fixture
    def site(self, tmp_path, monkeypatch):
        """Where packages are installed."""
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        (tmp_path / "site").mkdir()
        return tmp_path / "site"

    def test_it_does_not_stay_on_the_path(self, own):
        before = list(sys.path)
        sys.modules.pop("parts", None)
        network_factory("parts:load")
        assert Path(sys.modules["parts"].__file__).parent == own
        assert sys.path == before

    def test_nothing_stands_in_for_an_installed_package(self, evil, here, site):
        (site / "installed_part.py").write_text("import torch\n\ndef network(n):\n    return torch.nn.Linear(n, n)\n")
        shutil.copy(here / "evil.py", here / "installed_part.py")
        assert network_factory("installed_part:network")(3).in_features == 3
        assert not evil.exists()

    def test_nothing_is_found_that_nobody_named(self, evil, here, site):
        """What an installed package would like to have is not taken from there."""
        text = "import torch\ntry:\n    import evil\nexcept ImportError:\n    pass\n\n"
        text += "def network(n):\n    return torch.nn.Linear(n, n)\n"
        (site / "with_an_option.py").write_text(text)
        assert network_factory("with_an_option:network")(3).in_features == 3
        assert not evil.exists()
        network_factory("evil:x")
        assert evil.exists()

    @pytest.mark.parametrize(
        ("flags", "marked"), [((), False), (("-c", "import runpy; runpy.run_module('tcil')"), True)]
    )
    def test_python_m(self, evil, here, flags, marked):
        shutil.copy(here / "evil.py", here / "typer.py")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        words = [sys.executable, *(flags or ("-m", "tcil")), "--help"]
        subprocess.run(words, check=False, env=environment, capture_output=True)
        assert evil.exists() is marked

    def test_workers(self, evil, own, tmp_path):
        """A worker finds the user's own dataset where the sweep was started, and nothing else there."""
        for name in ("torch", "pydantic", "queue"):
            shutil.copy(own / "evil.py", own / f"{name}.py")
        job = Job(build({"dataset": "parts:load", **TINY}), tmp_path / "out", own / "data0", calibrators=("vanilla",))
        job = dataclasses.replace(job, full_data=False, home=own)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TCIL_LAYOUT": "channels_last"}
        done = subprocess.run(
            Worker.command, check=False, env=environment, capture_output=True, text=True, input=job.to_json() + "\n"
        )
        # Its input has ended, and so it stops in training, for which it had to find the dataset.
        assert json.loads(done.stdout)["state"] in ("done", "stopped"), done.stdout + done.stderr
        assert not evil.exists()

    def test_workers_of_ray(self, here, monkeypatch):
        """Ray puts the folder in which it is started before all that is installed, on every node."""
        ray = pytest.importorskip("ray")
        started = []

        def init(**options):
            started.append(os.getcwd())
            raise ConnectionError("no cluster")

        monkeypatch.setattr(ray, "init", init)
        with pytest.raises(ValueError, match="no cluster"):
            Ray("auto", 1.0, 0.0)
        assert started == [str(Path(sys.prefix).resolve())]
        assert Path.cwd() == here


class TestLinks:
    """A folder from elsewhere cannot make a command write to any other place."""

    @pytest.fixture
    def victim(self, tmp_path):
        folder = tmp_path / "victim"
        folder.mkdir()
        (folder / "file").write_text("mine")
        (folder / ".mine.part").write_text("mine as well")
        return folder

    @pytest.mark.parametrize(
        "name",
        [".lock", "settings.json", "results.json", "progress.csv", "report.html", "task-00", "task-07", "tensorboard"],
    )
    def test_links_are_refused(self, run, victim, name):
        if (run / name).is_dir():
            shutil.rmtree(run / name)
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(victim if "." not in name else victim / "file")
        before = files(run), files(victim)
        with pytest.raises(
            ValueError, match=rf"run: got .*{name}, a link to .*victim.*; expected only regular files and folders"
        ):
            Run(build({"dataset": "digits", **TINY}), run).execute(NAMES)
        command("calibrate", run, code=2)
        assert (files(run), files(victim)) == before

    def test_a_link_that_points_nowhere(self, run, victim):
        (run / ".lock").unlink()
        (run / ".lock").symlink_to(victim / "new")
        with pytest.raises(ValueError, match=r"\.lock, a link to"), RunFolder(run).held():
            pass
        assert not (victim / "new").exists()

    def test_a_link_made_meanwhile(self, run, victim):
        store = RunFolder(run)
        with store.held():
            shutil.rmtree(run / "task-00")
            (run / "task-00").symlink_to(victim)
            for write in (
                lambda: store.write_json("task-00/results.json", {}),
                lambda: store.write_tensors("task-00/model.safetensors", {"a": torch.zeros(1)}),
                lambda: store.remove("task-00/file"),
                lambda: store.task(0),
                lambda: store.write_json("../out.json", {}),
                lambda: store.write_json(str(victim / "out.json"), {}),
            ):
                with pytest.raises(ValueError, match="run: got"):
                    write()
        assert set(files(victim)) == {"file", ".mine.part"}
        assert not (run.parent / "out.json").exists()

    def test_the_run_folder_itself_may_be_one(self, run, tmp_path):
        (tmp_path / "link").symlink_to(run)
        command("calibrate", tmp_path / "link", "--calibrators", "ts")

    def test_a_lock_with_another_name(self, run, victim):
        (run / ".lock").unlink()
        os.link(victim / "file", run / ".lock")
        with RunFolder(run).held():
            pass
        assert (victim / "file").read_text() == "mine"

    def test_a_log_with_another_name(self, run, victim):
        from tcil.experiments.process.progress import Progress

        os.link(victim / "file", run / "progress.csv")
        CsvLog(run)(Progress(0, 1, "train", 1, 1, 0.5))
        assert (victim / "file").read_text() == "mine"
        assert (run / "progress.csv").read_text().startswith("mine")

    @pytest.mark.parametrize("name", [".lock", "settings.json", "task-00/model.safetensors", "notes"])
    def test_a_pipe_is_not_waited_for(self, run, name):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
        assert name in command("calibrate", run, code=2)

    @pytest.mark.parametrize("name", ["task-00", "."])
    def test_a_file_instead_of_a_folder(self, run, name):
        shutil.rmtree(run / name)
        (run / name).write_text("mine")
        with pytest.raises(ValueError, match="which is not a folder"):
            Run(build({"dataset": "digits", **TINY}), run).execute(NAMES)
        assert (run / name).read_text() == "mine"

    def test_only_own_leftovers_are_cleared(self, run):
        for place in ("", "task-00/", "notes/"):
            (run / place).mkdir(exist_ok=True)
            (run / f"{place}.it.part").touch()
        RunFolder(run).create()
        assert [str(path.relative_to(run)) for path in run.rglob(".*.part")] == ["notes/.it.part"]

    def test_parts_have_no_name_that_others_know(self, tmp_path, victim):
        (tmp_path / f".it.{os.getpid()}.part").symlink_to(victim / "file")
        replace_file(tmp_path / "it", b"content")
        assert (victim / "file").read_text() == "mine"
        assert (tmp_path / "it").read_bytes() == b"content"

    @pytest.mark.parametrize("name", ["../../x", "/tmp/x", "a:b/../../x", "a\\b"])
    def test_names_of_folders_have_one_part(self, name):
        for key in ("dataset", "learner"):
            folder = build({key: name}).name
            assert os.path.basename(folder) == folder
            assert "\\" not in folder


class TestCalibrateIsOfTheSameRun:
    def test_other_images(self, own, tmp_path):
        settings = build({"dataset": "parts:load", **TINY})
        Run(settings, tmp_path / "run", data=own / "data0").execute(NAMES)
        before = files(tmp_path / "run")
        words = ["calibrate", tmp_path / "run", "--calibrators", "ts", "--trust", "--data"]
        assert "data: got other images than those of" in command(*words, own / "data1", code=2)
        assert files(tmp_path / "run") == before
        command(*words, own / "data0")

    @pytest.mark.parametrize("sealed", [True, False])
    @pytest.mark.parametrize("changes", [{"lr": 0.2}, {"validation_seed": 7}, {"memory": 10}, {"network": "resnet32"}])
    def test_edited_settings(self, run, changes, sealed):
        edit(run, **changes)
        if not sealed:
            record = RunFolder(run).peek_json("settings.json")
            (run / "settings.json").write_text(json.dumps(record))
        before = files(run)
        assert "got" in command("calibrate", run, "--calibrators", "ts", code=2)
        assert files(run) == before

    def test_edited_everywhere(self, run):
        """The images of each task tell as well."""
        for name in ("settings.json", "results.json"):
            edit(run, name, validation_seed=7)
        before = files(run)
        assert "whose task 0 has other images than its settings say" in command("calibrate", run, code=2)
        assert files(run) == before

    def test_edited_before_the_end(self, run):
        """Without results, the folder's name tells."""
        settings = build({"dataset": "digits", **TINY})
        (run / "results.json").unlink()
        whole = run.rename(run.parent / settings.name)
        command("calibrate", whole, "--calibrators", "ts")
        edit(whole, lr=0.2)
        assert "holds a run with other settings" in command("calibrate", whole, code=2)

    @pytest.mark.parametrize("name", ["model", "logits", "indices"])
    def test_a_run_without_its_last_files(self, run, name):
        (run / "task-01" / f"{name}.safetensors").unlink()
        before = files(run)
        assert "of task 1; expected a finished run" in command("calibrate", run, code=2)
        assert files(run) == before

    def test_settings_of_an_earlier_version(self, run):
        """With fewer entries, whose defaults hold."""
        for name in ("settings.json", "results.json"):
            store = RunFolder(run)
            record = store.peek_json(name)
            del (record["settings"] if name == "results.json" else record)["crop"]
            store.write_json(name, record)
        command("calibrate", run, "--calibrators", "ts")

    @pytest.mark.parametrize("content", ["[]", "3", '"text"', '{"dataset": 3}', '{"epochs": "many"}'])
    def test_settings_of_another_kind(self, run, content):
        (run / "settings.json").write_text(content)
        results = (run / "results.json").read_bytes()
        with pytest.warns(DamagedFileWarning, match="settings.json is damaged"):
            assert "run: got" in command("calibrate", run, code=2)
        with pytest.warns(DamagedFileWarning, match="settings.json is damaged"):
            Run(build({"dataset": "digits", **TINY}), run).execute(NAMES)  # it is written anew, nothing else changes
        assert RunFolder(run).peek_json("settings.json")["learner"] == "er"
        assert (run / "results.json").read_bytes() == results


class TestKeep:
    """`tcil report --keep` never writes over the copy of another run."""

    @pytest.fixture
    def two(self, trained, tmp_path):
        """Runs with other settings in folders of the same name."""
        for place in ("a", "b"):
            shutil.copytree(trained, tmp_path / place / "run")
        edit(tmp_path / "b" / "run", "results.json", lr=0.2)
        return tmp_path

    def keep(self, two, *places, refused=None):
        runs = [two / place / "run" for place in places]
        if refused is None:
            return collect.keep(collect.read_runs(runs), two / "kept")
        before = files(two / "kept")
        with pytest.raises(ValueError, match=refused):
            collect.keep(collect.read_runs(runs), two / "kept")
        assert files(two / "kept") == before
        return []

    def test_another_run_of_the_same_name(self, two):
        command("report", two / "a" / "run", "--out", two / "report", "--keep", two / "kept")
        before = files(two / "kept")
        words = ["--out", two / "other", "--keep", two / "kept"]
        assert "beside that of another run as" in command("report", two / "b" / "run", *words, code=2)
        assert files(two / "kept") == before
        self.keep(two, "a")  # its own
        assert files(two / "kept") == before

    def test_both_at_once(self, two):
        self.keep(two, "a", "b", refused="keep: got both")
        assert not (two / "kept").exists()

    def test_other_images(self, two):
        edit(two / "b" / "run", "results.json", lr=RunFolder(two / "a" / "run").peek_json("settings.json")["lr"])
        self.keep(two, "a", "b")  # the same run, found twice
        edit(two / "b" / "run", "data.json", sha256="another")
        self.keep(two, "b", refused="of another run")
        self.keep(two, "a", "b", refused="the same settings with other images")

    def test_a_copy_from_before_images_were_told(self, two):
        (file,) = self.keep(two, "a")
        record = json.loads(file.read_text())
        del record["data"]
        file.write_text(json.dumps(record))
        self.keep(two, "a")
        assert json.loads(file.read_text())["data"]

    def test_a_file_of_another_kind(self, two):
        (two / "kept").mkdir()
        (two / "kept" / "run.json").write_text('{"mine": 1}')
        self.keep(two, "a", refused="beside a file that cannot be read")

    def test_rows_are_added_not_lost(self, two):
        self.keep(two, "a")
        store = RunFolder(two / "a" / "run")
        record = store.peek_json("results.json")
        for task in record["tasks"]:
            task["calibrators"]["other"] = task["calibrators"].pop("ts")
        store.write_json("results.json", record)
        self.keep(two, "a")
        (kept,) = collect.read_runs([two / "kept"])
        assert {"vanilla", "ts", "other"} <= set(kept.tasks[0].calibrators)

    def test_the_current_folder_has_a_name(self, two, monkeypatch):
        monkeypatch.chdir(two / "a" / "run")
        collect.keep(collect.read_runs([Path()]), two / "kept")
        assert [path.name for path in (two / "kept").iterdir()] == ["run.json"]


def test_a_report_that_nobody_placed_follows_no_link(trained, here, tmp_path):
    """`report` in the current folder may be someone else's link; a folder that the user names may be one of theirs."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "notes.csv").write_text("precious")
    (here / "report").symlink_to(victim)
    before = files(victim)
    assert "out: got report, a link to" in command("report", trained, code=2)
    assert "report: got report, a link to" in command("reproduce", "baselines", "--render", code=2)
    assert files(victim) == before
    command("report", trained, "--out", victim)
    assert files(victim) != before
    (here / "elsewhere").symlink_to(victim)
    command("report", trained, "--out", "elsewhere")
