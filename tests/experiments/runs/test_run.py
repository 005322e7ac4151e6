"""Runs: the whole path on digits, resuming to the bit, calibrating anew, the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tcil.experiments.cli.app import app
from tcil.experiments.config.settings import RunSettings, build
from tcil.experiments.process.exits import RunFailed
from tcil.experiments.process.progress import Progress
from tcil.experiments.runs.catalogue import ALL_DATA
from tcil.experiments.runs.complete import _shown, check_options, own_parts
from tcil.experiments.runs.entries import CALIBRATORS
from tcil.experiments.runs.importing import import_run
from tcil.experiments.runs.reasons import NotApplicableReason
from tcil.experiments.runs.results import DataNote
from tcil.experiments.runs.run import Run, check_network
from tcil.experiments.runs.store import RunFolder
from tcil.experiments.runs.tasks import EXEMPLARS, RESERVE, check_indices, make_stream, share_of, task_generator
from tcil.incremental.data.datasets import load_dataset
from tcil.incremental.learners import LEARNERS

SHORT = {"dataset": "noisy-digits", "epochs": 2, "milestones": [1], "tasks": 3, "memory": 40}
TUNED = {"finetune_epochs": 2, "finetune_milestones": [1]}


def short(learner="er", **changes):
    options = {"learner_options": TUNED} if learner in ("eeil", "der") else {}
    return build({"learner": learner, **SHORT, **options, **changes})


@pytest.mark.parametrize("learner", ["er", "eeil", "wa", "der"])
def test_every_learner_with_every_calibrator(learner, digits, tmp_path):
    run = Run(short(learner, reserve=0.25), tmp_path / "run", dataset=digits)
    results = run.execute()
    assert [task.seen for task in results.tasks] == [4, 7, 10]
    for task in results.tasks:
        assert set(task.calibrators) == set(CALIBRATORS)
        for name, row in task.calibrators.items():
            if not row.answered:
                assert name == "perturb-ts" or (name.startswith("reserve") and task.task == 0)
                continue
            assert 0 <= row.ece <= 1
            assert row.accuracy == task.calibrators["vanilla"].accuracy
            if interval := row.temperature_interval:
                assert interval[0] < row.temperature < interval[1]
            assert len(row.by_task.accuracy) == task.task + 1
    assert any(task.calibrators["t-cil"].temperature_interval for task in results.tasks)
    assert run.store.read_results() == results  # what is written is what was computed
    assert [run.store.read_task_result(task.task) for task in results.tasks] == list(results.tasks)
    files = {path.name for path in (tmp_path / "run" / "task-02").iterdir()}
    assert files == {"indices.safetensors", "model.safetensors", "logits.safetensors", "results.json"}


def test_other_settings_are_refused(digits, tmp_path):
    Run(short(tasks=2), tmp_path / "run", dataset=digits).execute(["vanilla"])
    with pytest.raises(ValueError, match="which holds a run with other settings"):
        Run(short(tasks=2, seed=2), tmp_path / "run", dataset=digits).execute(["vanilla"])


def test_rows_are_checked(digits, tmp_path):
    run = Run(short(), tmp_path / "run", dataset=digits)
    task = run.stream[0]
    good = {c: task.train[run.stream.columns[task.train] == c][:3] for c in task.columns}
    check_indices(run.stream, 0, good, {})
    with pytest.raises(RuntimeError, match="not apart"):
        check_indices(run.stream, 0, {**good, 0: task.valid[:3]}, {})
    with pytest.raises(RuntimeError, match="not apart"):
        check_indices(run.stream, 0, good, {0: task.train[:2]})


class TestCommandLine:
    def test_help_imports_no_torch(self):
        code = (
            "import sys\n"
            "from typer.testing import CliRunner\n"
            "from tcil.experiments.cli.app import app\n"
            "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
            "assert CliRunner().invoke(app, ['run', '--help']).exit_code == 0\n"
            "sys.exit('torch' in sys.modules)"
        )
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

    @pytest.mark.parametrize(
        ("command", "word"), [("datasets", "cifar100"), ("learners", "eeil"), ("calibrators", "t-cil")]
    )
    def test_lists(self, command, word):
        outcome = CliRunner().invoke(app, [command])
        assert outcome.exit_code == 0
        assert word in outcome.stdout

    def test_run_resume_and_calibrate(self, tmp_path):
        arguments = [
            "run",
            "--dataset",
            "noisy-digits",
            "--out",
            str(tmp_path),
            "--set",
            "epochs=1",
            "--set",
            "tasks=2",
            "--set",
            "memory=30",
        ]
        outcome = CliRunner().invoke(app, arguments)
        assert outcome.exit_code == 0, outcome.output
        folder = next(path for path in tmp_path.iterdir() if "Vanilla, all data" in (path / "results.json").read_text())
        assert len(list(tmp_path.iterdir())) == 2  # the run, and the training on all data
        page = (folder / "report.html").read_text()
        assert "T-CIL" in page
        assert "http://" not in page.replace("http://www.w3.org", "")
        before = (folder / "results.json").read_bytes()
        again = CliRunner().invoke(app, arguments)
        assert again.exit_code == 0
        assert (folder / "results.json").read_bytes() == before
        anew = CliRunner().invoke(app, ["calibrate", str(folder), "--calibrators", "ts,t-cil", "--redraw", "3"])
        assert anew.exit_code == 0, anew.output
        assert "over 3 draws" in anew.stdout

    def test_study_file_and_flags(self, tmp_path):
        study = tmp_path / "study.toml"
        study.write_text('learner = "wa"\nepochs = 1\ntasks = 2\nseeds = [1, 2]\n')
        outcome = CliRunner().invoke(app, ["run", str(study), "--seeds", "7", "--dry-run"])
        assert outcome.exit_code == 0, outcome.output
        assert "2 trainings" in outcome.stdout  # one of them on all the data
        assert outcome.stdout.count("wa-seed7") == 2
        words = ["run", str(study), "--learner", "der", "--set", "seed=9", "--dry-run", "--no-full-data"]
        outcome = CliRunner().invoke(app, words)
        assert "1 training to run" in outcome.stdout
        assert "der-seed9" in outcome.stdout

    def test_errors_are_plain(self):
        outcome = CliRunner().invoke(app, ["run", "--set", "epoch=3"])
        assert outcome.exit_code == 2
        assert "Did you mean 'epochs'?" in outcome.output
        assert "Traceback" not in outcome.output
        outcome = CliRunner().invoke(app, ["run", "--dataset", "cifar100"])
        assert "Pass --data DIR" in outcome.output
        outcome = CliRunner().invoke(app, ["run", "--seeds", "one"])
        assert "expected whole numbers separated by commas" in outcome.output


class TestImport:
    """What a run computed, handed over as files and imported, gives the same figures."""

    @pytest.fixture
    def exported(self, digits, tmp_path):
        from safetensors.torch import load_file

        run = Run(short(tasks=2, class_order_seed=5), tmp_path / "run", dataset=digits)
        results = run.execute(["vanilla", "ts", "t-cil", "first-task-ts", "exemplar-ts"])
        source = tmp_path / "source"
        source.mkdir()
        order = torch.tensor(run.stream.order)
        lists = [[run.stream.order[c] for c in task.columns] for task in run.stream]
        tasks = {"tasks": lists, "dataset": "digits", "network": "small_cnn"}
        (source / "tasks.json").write_text(json.dumps(tasks))
        for task in run.stream:
            folder = tmp_path / "run" / f"task-{task.index:02d}"
            logits, rows = load_file(folder / "logits.safetensors"), load_file(folder / "indices.safetensors")
            valid = torch.isin(rows["pool"], rows["valid"])
            arrays = {
                "test_logits": logits["test_logits"], "test_labels": order[logits["test_columns"]],
                "valid_logits": logits["pool_logits"][valid], "valid_labels": order[logits["pool_columns"][valid]],
                "memory_logits": logits["memory_logits"], "memory_labels": order[logits["memory_columns"]],
                "memory_rows": rows["memory"], "valid_rows": rows["valid"],
            }  # fmt: skip
            np.savez(source / f"task-{task.index:02d}.npz", **{k: v.numpy() for k, v in arrays.items()})
            (source / f"task-{task.index:02d}.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
        return source, results

    def test_same_figures(self, exported, tmp_path):
        source, results = exported
        names = ["vanilla", "ts", "t-cil", "first-task-ts", "exemplar-ts"]
        again = import_run(source, tmp_path / "in", data=None, calibrators=names)
        for one, other in zip(results.tasks, again.tasks, strict=True):
            for name in names:
                assert other.calibrators[name].ece == pytest.approx(one.calibrators[name].ece, abs=1e-6)

    def test_logits_alone(self, exported, tmp_path):
        source, _ = exported
        record = json.loads((source / "tasks.json").read_text())
        (source / "tasks.json").write_text(json.dumps({"tasks": record["tasks"]}))
        outcome = CliRunner().invoke(app, ["import", str(source), "--out", str(tmp_path / "out")])
        assert outcome.exit_code == 0, outcome.output
        rows = RunFolder(tmp_path / "out" / "imported-source").read_results().tasks[1].calibrators
        assert rows["t-cil"].not_applicable.reason is NotApplicableReason.NEEDS_IMAGES
        assert rows["ts"].answered
        assert (tmp_path / "out" / "imported-source" / "report.html").exists()

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda s: (s / "tasks.json").unlink(), "tasks.json"),
            (lambda s: (s / "tasks.json").write_text("{}"), "without a list of tasks"),
            (lambda s: (s / "task-01.npz").unlink(), "task-01.npz"),
            (lambda s: (s / "task-01.safetensors").unlink(), "the weights of every task"),
            (lambda s: (s / "tasks.json").write_text('{"tasks": [[0, 1], [1, 2]]}'), "repeated labels"),
        ],
    )
    def test_bad_sources(self, exported, tmp_path, damage, message):
        damage(exported[0])
        with pytest.raises(ValueError, match=message):
            import_run(exported[0], tmp_path / "in", data=None, calibrators=["ts"])


def test_same_numbers_as_recalibrated(digits, tmp_path):
    """What `tcil calibrate` computes from the stored files is what the run computed."""
    from tcil.experiments.runs.calibrate import calibrate

    run = Run(short("wa", tasks=2), tmp_path / "run", dataset=digits)
    results = run.execute(["ts", "t-cil"])
    history = {}
    for stored, (task, memory, learner) in zip(results.tasks, run.walk(), strict=True):
        anew = calibrate(run.finished(task, memory, learner, history), ["ts", "t-cil"])
        assert anew == stored
        history = anew.history


def test_no_stage_draws_what_the_memory_draws(digits, tmp_path, monkeypatch):
    seeds = {task_generator(short(), task, purpose).initial_seed() for task in range(3) for purpose in range(10)}
    assert len(seeds) == 30
    assert {EXEMPLARS, RESERVE} == {8, 9}  # as ever: other numbers would change the runs that are there
    monkeypatch.setattr(LEARNERS["er"], "stages", lambda self, task: tuple(map(str, range(9))))
    with pytest.raises(ValueError, match="learner: got 'er' with 9 stages in a task; expected at most 8 stages"):
        Run(short(), tmp_path / "run", dataset=digits).execute(["vanilla"])


@pytest.mark.parametrize(
    ("reserve", "seen", "shares"),
    [(0.0, 4, (20, 0)), (0.1, 4, (18, 2)), (0.01, 4, (19, 1)), (2, 4, (18, 2)), (2, 8, (8, 2)), (1, 40, (1, 1))],
)
def test_reserve_is_a_share_or_images_of_a_class(reserve, seen, shares):
    assert share_of(short(reserve=reserve, memory=80), seen) == shares


@pytest.mark.parametrize("reserve", [-0.1, 1.5, 1e5])
def test_reserve_out_of_range(reserve):
    with pytest.raises(ValueError, match="reserve"):
        short(reserve=reserve)


def test_reserve_is_never_trained_on(digits, tmp_path):
    run = Run(short(reserve=0.25, memory=80), tmp_path / "run", dataset=digits)
    trained = torch.cat([task.train for task in run.stream])
    for _, memory, _ in run.walk(lambda progress: None):
        assert len(memory.reserve_rows)
        assert not set(memory.reserve_rows.tolist()) & set(trained.tolist())


class TestLegalButOdd:
    """Settings that a review found to be mishandled."""

    def run(self, tmp_path, *words):
        start = ["run", "--preset", "digits", "--out", str(tmp_path), "--set", "epochs=1"]
        return CliRunner().invoke(app, [*start, *words])

    def test_validation_alone(self):
        assert (build({"validation": 20}).validation, build({"validation": 20}).validation_pool) == (20, 80)
        assert build({"validation": 100}).validation_pool == 100

    def test_options_of_the_preset_hold_where_no_other_is_named(self):
        options = {"head": "growing"}
        s = build({"preset": "cifar100-mini", "learner": "eeil", "learner_options": options})
        assert s.learner_options == {"finetune_epochs": 10, "finetune_milestones": [4, 7], "head": "growing"}

    def test_unequal_tasks_have_the_same_validation_size(self, digits):
        stream = make_stream(build({"tasks": [4, 2, 3], "validation": 24, "validation_pool": 48}), digits)
        assert [len(task.valid) for task in stream] == [24, 24, 24]
        assert [len(task.pool) for task in stream] == [48, 48, 48]

    def test_without_a_validation_set(self, tmp_path, digits):
        results = Run(short(validation=0), tmp_path, dataset=digits).execute()
        for task in results.tasks:
            assert task.calibrators["vanilla"].answered
            assert task.calibrators["ts"].not_applicable.sentence == "needs a validation set"
            assert not task.calibrators["t-cil"].answered

    def test_the_reserve_is_of_old_classes(self, tmp_path, digits):
        results = Run(short(reserve=0.25), tmp_path, dataset=digits).execute()
        first, *rest = (task.calibrators["reserve-ts"] for task in results.tasks)
        assert first.not_applicable.reason is NotApplicableReason.NO_OLD_TASK
        assert all(row.answered for row in rest)

    def test_pact_r_takes_the_reserve_and_its_own_history(self, tmp_path, digits):
        names = ["pact", "pact-r"]
        results = Run(short(reserve=2), tmp_path / "with", dataset=digits).execute(names)
        assert {task.calibrators["pact-r"].block for task in results.tasks} == {"with old-task validation data"}
        stored = [task.calibrators["pact-r"].result for task in results.tasks]
        starts = [0, *(task.seen for task in results.tasks[:-1])]
        assert [result.record()["n_reserve"] for result in stored] == [2 * start for start in starts]
        for task in results.tasks:
            plain, rich = (task.history[name] for name in names)
            assert plain == rich  # what the reserve says is not handed on
        none = Run(short(), tmp_path / "without", dataset=digits).execute(names)
        assert {task.calibrators["pact-r"].not_applicable.reason for task in none.tasks} == {
            NotApplicableReason.NEEDS_RESERVE
        }

    def test_other_images_in_the_same_folder_are_refused(self, tmp_path, digits):
        Run(short(), tmp_path, dataset=digits).execute()
        other = dataclasses.replace(digits, train=dataclasses.replace(digits.train, images=255 - digits.train.images))
        with pytest.raises(ValueError, match="data: got other images"):
            Run(short(), tmp_path, dataset=other).execute()

    @pytest.mark.parametrize("change", [{"mean": (0.0,)}, {"std": (10.0,)}, {"padding": 3}, {"flip": True}])
    def test_the_same_images_with_other_inputs_are_refused(self, tmp_path, digits, change):
        run = Run(short(), tmp_path, dataset=digits, until=1)
        run.execute(["vanilla"])
        other = dataclasses.replace(digits, **change)
        with pytest.raises(ValueError, match=r"data: got other images .* or the same ones normalised or augmented"):
            Run(short(), tmp_path, dataset=other).check_folder()
        images = Run(short(), tmp_path, dataset=digits).check_folder()
        older = DataNote.model_validate({name: value for name, value in images.record().items() if name != "inputs"})
        run.store.write_data(older)  # as an earlier version wrote it
        Run(short(), tmp_path, dataset=other).check_folder()

    def test_vanilla_on_all_data_stays(self, tmp_path):
        few = ["--calibrators", "vanilla,ts"]
        for words in (few, [*few, "--no-full-data"], ["--calibrators", "ts[solver=sgd]", "--no-full-data"]):
            assert self.run(tmp_path, *words).exit_code == 0
        (folder,) = [p for p in tmp_path.iterdir() if "vanilla-all-data" in (p / "results.json").read_text()]
        rows = json.loads((folder / "results.json").read_text())["tasks"][0]["calibrators"]
        assert {"vanilla-all-data", "ts", "ts[solver=sgd]"} <= set(rows)

    def test_vanilla_on_all_data_is_calibrated_anew_with_vanilla(self, tmp_path):
        """A row that was stored before there was some metric gets it, as the others do; without its run it stays."""
        assert self.run(tmp_path, "--calibrators", "vanilla,ts").exit_code == 0
        (folder,) = [p for p in tmp_path.iterdir() if "vanilla-all-data" in (p / "results.json").read_text()]
        (twin,) = [p for p in tmp_path.iterdir() if p != folder]
        store = RunFolder(folder)

        def forget():
            whole = store.read_results()
            tasks = [task.with_row(ALL_DATA, task.calibrators[ALL_DATA].model_copy(update={"aurc": None}))
                     for task in whole.tasks]  # fmt: skip
            for task in tasks:
                store.write_task_result(task)
            store.write_results(whole.with_tasks(tasks))

        def known():
            rows = [task.calibrators[ALL_DATA] for task in store.read_results().tasks]
            own = [store.read_task_result(number).calibrators[ALL_DATA] for number in range(len(rows))]
            assert rows == own
            assert {row.title for row in rows} == {"Vanilla, all data"}
            return [row.aurc for row in rows]

        before = known()
        assert None not in before
        forget()
        for calibrators, answer in (("ts", [None] * len(before)), ("vanilla", before)):
            anew = CliRunner().invoke(app, ["calibrate", str(folder), "--calibrators", calibrators])
            assert anew.exit_code == 0, anew.output
            assert ("Vanilla, all data" in anew.output) == (calibrators == "vanilla")
            assert known() == answer
        forget()
        shutil.rmtree(twin)
        anew = CliRunner().invoke(app, ["calibrate", str(folder), "--calibrators", "vanilla"])
        assert anew.exit_code == 0, anew.output
        assert "The row 'Vanilla, all data' stays as it is, because its own run cannot be read" in anew.output
        assert known() == [None] * len(before)
        assert not twin.exists()

    def test_environment_is_of_what_was_computed(self, tmp_path, digits):
        Run(short(), tmp_path, dataset=digits).execute()
        record = json.loads((tmp_path / "environment.json").read_text())
        del record["checksum"]  # as whoever changes a file by hand must
        (tmp_path / "environment.json").write_text(json.dumps({**record, "torch": "of that day"}))
        Run(short(), tmp_path, dataset=digits).execute()
        again = json.loads((tmp_path / "environment.json").read_text())
        assert again["torch"] == "of that day"
        assert set(again["seconds"]["task-02"]) == {"training", "calibration"}

    def test_threads_are_those_that_the_run_began_with(self, tmp_path, digits):
        before = torch.get_num_threads()
        (tmp_path / "environment.json").write_text('{"threads": 3}')
        seen = []
        Run(short(), tmp_path, dataset=digits).execute(listener=lambda p: seen.append(torch.get_num_threads()))
        assert set(seen) == {3}
        assert torch.get_num_threads() == before

    def test_redraw_redraws_the_first_task_too(self, tmp_path):
        assert self.run(tmp_path, "--no-full-data", "--calibrators", "ts,first-task-ts").exit_code == 0
        (folder,) = tmp_path.iterdir()
        words = ["calibrate", str(folder), "--redraw", "4", "--calibrators", "ts,first-task-ts"]
        assert CliRunner().invoke(app, words).exit_code == 0
        draws = RunFolder(folder).read_draws().root
        assert all(len(set(values)) > 1 for values in draws.values())
        assert set(draws) == {"TS", "First-task TS"}

    def test_redraw_without_a_larger_pool_is_refused(self, tmp_path):
        words = ["--no-full-data", "--calibrators", "ts", "--set", "validation=40", "--set", "validation_pool=40"]
        assert self.run(tmp_path, *words).exit_code == 0
        (folder,) = tmp_path.iterdir()
        outcome = CliRunner().invoke(app, ["calibrate", str(folder), "--redraw", "4"])
        assert outcome.exit_code == 2
        assert "redraw: got 4" in outcome.output

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--set", "epochs=ten"], "epochs: got 'ten'"),
            (["--set", "dataset=[1]"], "dataset: got [1]"),
            (["--set", "epochs.x=2"], "--set: got 'epochs.x=2'"),
            (["--set", "tasks=[0,5]"], "tasks: got [0, 5]"),
            (["--set", "tasks=[]"], "tasks: got []"),
            (["--set", "tasks=10"], "tasks: got [1, 1"),
            (["--set", "classes=50"], "classes: got 50"),
            (["--set", "memory=5"], "memory: got 5"),
            (["--set", "memory=40", "--set", "reserve=0.99"], "reserve: got 0.99"),
            (["--set", "memory=40", "--reserve", "4"], "reserve: got 4"),
            (["--set", "validation=1"], "validation: got 1"),
            (
                ["--learner", "eeil", "--set", "learner_options.finetune_epochs=abc"],
                "option finetune_epochs of learner",
            ),
            (["--learner", "der", "--set", "learner_options.finetune_milestones=3"], "option finetune_milestones of"),
            (["--learner", "eerr"], "learner: got 'eerr'"),
            (["--set", "network=resnet32"], "network: got 'resnet32'"),
            (["--set", "optimizer=sdg"], "optimizer: got 'sdg'"),
            (["--device", "cuda"], "device: got 'cuda'"),
            (["--device", "gpu"], "device: got 'gpu'"),
            (["--log", "tensorboards"], "log: got 'tensorboards'"),
            (["--calibrators", "ts,"], "calibrators: got 'ts,'"),
            (["--calibrators", "ts[solver=fast]"], "solver: got 'fast'"),
            (["--calibrators", "t-cil[polcy=random]"], "Did you mean 'policy'"),
            (["--calibrators", "vanilla[x=1]"], "vanilla, which has no options"),
            (["--calibrators", "t-cil[device=cuda]"], "device: got 'cuda'"),
            (["--calibrators", "ts,perturb-ts[device=gpu]"], "device: got 'gpu'"),
            (["--calibrators", "pact[device=meta]"], "device: got 'meta'"),
            (["--set", "epochs=true"], "epochs: got True"),
            (["--set", "lr=true"], "lr: got True"),
            (["--set", "tasks=[true,2]"], "tasks: got [True, 2]"),
            (["--set", "milestones=[-1]"], "milestones.0: got -1"),
        ],
    )
    def test_errors_before_any_work(self, tmp_path, words, message):
        if message.startswith("device: got 'cuda'") and torch.cuda.is_available():
            pytest.skip("there is a GPU")
        outcome = self.run(tmp_path / "runs", *words)
        assert outcome.exit_code == 2, outcome.output
        assert message in " ".join(outcome.output.split())
        assert not list(tmp_path.rglob("*.safetensors"))

    @pytest.mark.parametrize("words", [["run", "--dry-run"], ["sweep"], ["sweep", "--on", "serial"]])
    def test_a_calibrator_on_a_device_that_is_not_there(self, tmp_path, words):
        """Also where the runs are only planned, or done by processes. Ray's machines may have other devices."""
        calibrators = "ts,t-cil[device=no-such]"
        outcome = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "runs"), "--calibrators", calibrators])
        assert outcome.exit_code == 2, outcome.output
        assert "device: got 'no-such'" in outcome.output
        assert not list(tmp_path.iterdir())
        check_options(("t-cil[device=no-such]",), None, here=False)

    @pytest.mark.parametrize("words", [["sweep"], ["sweep", "--on", "serial"], ["run", "--seeds", "1,2"]])
    @pytest.mark.parametrize("device", ["no-such", "meta", "cuda:99"])
    def test_runs_on_a_device_that_is_not_there(self, tmp_path, words, device):
        """Before a process is started or a folder made."""
        outcome = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "runs"), "--device", device])
        assert outcome.exit_code == 2, outcome.output
        assert f"device: got '{device}'" in outcome.output
        assert not list(tmp_path.iterdir())

    def test_a_folder_is_no_study(self, tmp_path):
        outcome = CliRunner().invoke(app, ["run", str(tmp_path)])
        assert outcome.exit_code == 2
        assert "study: got" in outcome.output

    def test_out_cannot_be_made(self, tmp_path):
        (tmp_path / "file").write_text("")
        (tmp_path / "link").symlink_to("nowhere")
        for out, what in {
            "file": "which is a file",
            "file/x": "which is a file",
            "link": "which does not exist",
        }.items():
            for words in (["run"], ["run", "--dry-run"], ["sweep"], ["report", tmp_path], ["import", tmp_path]):
                outcome = CliRunner().invoke(app, [*map(str, words), "--out", str(tmp_path / out)])
                assert outcome.exit_code == 2
                assert f"error: out: got {tmp_path / out}, " in outcome.output
                assert f"{what}; expected a folder, or a path that does not exist yet." in outcome.output
        assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_unequal_classes_train_on_fewer_images_and_pact_is_told(tmp_path):
    run = Run(short(smallest_class=0.25, epochs=1, milestones=[]), tmp_path / "run")
    run.execute(["vanilla", "pact"])
    equal = make_stream(short(epochs=1, milestones=[]), run.dataset)
    for task, memory, learner in run.walk():
        counts = torch.bincount(run.stream.columns[task.train], minlength=task.columns.stop)[list(task.columns)]
        before = torch.bincount(equal.columns[equal[task.index].train])[list(task.columns)]
        assert (counts[0], counts[-1]) == (before[0], round(float(before[-1]) * 0.25))
        if task.index:
            told = run.finished(task, memory, learner, {}).imbalance
            assert told == pytest.approx(float(counts.double().mean()) / (memory.rehearsed / task.columns.start))


@pytest.mark.parametrize(
    ("answer", "told"),
    [(lambda x: x.flatten(1)[:, :5], r"a tensor of shape \(1, 5\)"), (lambda x: (x, x), "tuple")],
)
def test_a_network_that_returns_no_logits_is_refused_before_training(answer, told):
    class Odd(torch.nn.Module):
        def forward(self, x):
            return answer(x)

    with pytest.raises(ValueError, match=f"network: got 'mine', which returns {told}; expected logits"):
        check_network("mine", lambda n_classes: Odd(), load_dataset("digits").image_shape)


class TestErrorsOfOwnParts:
    """Before any work an error is a refusal; later, in a run with parts of the user's own, it may be theirs."""

    OWN, BUILT_IN = (build({"learner": name, "dataset": "letters"}) for name in ("mine:Mine", "er"))

    @dataclasses.dataclass
    class Failing:
        settings: RunSettings
        error: Exception
        begun: bool

        def execute(self, calibrators, listener):
            if self.begun:
                listener(Progress(0, 2, "train", 1, 3))
            raise self.error

    class Display(contextlib.AbstractContextManager):
        def __init__(self, title):
            pass

        def __call__(self, progress):
            pass

        def __exit__(self, *args):
            pass

    @pytest.mark.parametrize(
        ("settings", "error", "begun", "kind", "told"),
        [
            (OWN, ValueError("other images"), False, ValueError, "other images"),
            (OWN, ValueError("my bug"), True, RunFailed, "my bug (in a run with the learner mine:Mine)"),
            (OWN, KeyError("x"), True, RunFailed, "KeyError: 'x' (in a run with the learner mine:Mine)"),
            (BUILT_IN, ValueError("no such file"), True, ValueError, "no such file"),
            (BUILT_IN, RuntimeError("no memory"), True, RunFailed, "RuntimeError: no memory"),
        ],
    )
    def test_what_they_end_in(self, settings, error, begun, kind, told):
        with pytest.raises(kind) as raised:
            _shown(self.Failing(settings, error, begun), None, None, self.Display, "")
        assert str(raised.value) == told

    def test_names_of_entry_points_are_own_parts_too(self):
        settings = build({"learner": "my-learner", "network": "my-network", "dataset": "my-data"})
        assert own_parts(settings) == ["the dataset my-data", "the network my-network", "the learner my-learner"]
        assert own_parts(self.BUILT_IN) == []
