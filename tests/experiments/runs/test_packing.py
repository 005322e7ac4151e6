"""A run taken to its first tasks, and a small copy of it: both go on to the results of the run done at once."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tcil.experiments.cli.app import app
from tcil.experiments.config.settings import build
from tcil.experiments.reporting.collect import Study, read_runs
from tcil.experiments.runs.packing import pack, run_folders
from tcil.experiments.runs.run import Run
from tcil.experiments.runs.store import DamagedFileWarning, RunFolder

CALIBRATORS = ("vanilla", "ts", "t-cil", "first-task-ts")


def short(learner):
    options = {"finetune_epochs": 2, "finetune_milestones": [1]} if learner in ("eeil", "der") else {}
    return build(
        {
            "dataset": "digits", "learner": learner, "learner_options": options, "tasks": 3, "epochs": 2,
            "milestones": [1], "memory": 40,
        }
    )  # fmt: skip


def contents(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in ("environment.json", ".lock")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    "learner", ["er", *(pytest.param(name, marks=pytest.mark.slow) for name in ("eeil", "wa", "der"))]
)
def test_first_tasks_then_a_copy_then_the_rest(learner, digits, tmp_path):
    settings = short(learner)
    whole = Run(settings, tmp_path / "whole" / settings.name, dataset=digits)
    whole.execute(CALIBRATORS)
    part = Run(settings, tmp_path / "part" / settings.name, dataset=digits, until=2)
    first = part.execute(CALIBRATORS)
    assert (first.until, len(first.tasks), first.tasks_told) == (2, 2, "tasks 0 to 1 of 3")
    assert first.tasks == whole.store.read_results().tasks[:2]
    copy = pack(part.store.path, tmp_path / "other")
    there = set(contents(copy))
    assert {"task-00/results.json", "task-01/results.json", "task-01/model.safetensors", "packed.json"} <= there
    assert not {"task-00/model.safetensors", "task-00/logits.safetensors", "task-01/logits.safetensors"} & there
    with pytest.raises(ValueError, match="without the network of task 0, for irm"):
        Run(settings, copy, dataset=digits).execute([*CALIBRATORS, "irm"])
    for one in (part.store.path, copy):
        Run(settings, one, dataset=digits).execute(CALIBRATORS)
    assert contents(part.store.path) == contents(whole.store.path)
    ours, expected = contents(copy), contents(whole.store.path)
    assert ours["results.json"] == expected["results.json"]
    assert all(ours[name] == expected[name] for name in expected if name.startswith("task-02"))
    said = CliRunner().invoke(app, ["calibrate", str(copy), "--calibrators", "ts"])
    assert said.exit_code == 2
    assert "has the results of task 0, but not its indices; expected the whole run folder" in " ".join(
        said.output.split()
    )


def test_the_first_tasks_do_not_replace_the_whole(digits, tmp_path):
    settings = short("er")
    Run(settings, tmp_path / settings.name, dataset=digits).execute(CALIBRATORS)
    before = contents(tmp_path)
    again = Run(settings, tmp_path / settings.name, dataset=digits, until=1).execute(CALIBRATORS)
    assert len(again.tasks) == 3
    assert contents(tmp_path) == before
    with pytest.raises(ValueError, match=r"^tasks-until: got 0"):
        Run(settings, tmp_path / settings.name, dataset=digits, until=0)


def test_a_part_is_reported_planned_and_calibrated_as_such(tmp_path):
    words = ["--dataset", "digits", "--set", "epochs=1", "--set", "tasks=3", "--no-full-data", "--out", str(tmp_path)]

    def command(*more):
        outcome = CliRunner().invoke(app, [*more])
        assert outcome.exit_code == 0, outcome.output
        return " ".join(outcome.output.split())

    assert "Mean over tasks 0 to 1 of 3" in command(
        "run", *words, "--calibrators", "vanilla,ts", "--tasks-until", "2", "--backup", str(tmp_path / "backup")
    )
    (folder,) = (path for path in tmp_path.iterdir() if path.name.startswith("digits"))
    assert RunFolder(tmp_path / "backup" / folder.name).read_packed().without == (0,)
    assert "to do, 2 tasks done" in command("plan", *words)
    until = [*words, "--tasks-until", "2"]
    assert "to do, 2 tasks done" in command("plan", *until)  # for the other calibrators
    assert command("plan", *until, "--calibrators", "vanilla,ts").endswith("finished")
    assert "to do, 2 tasks done" in command("plan", *until, "--calibrators", "vanilla,ts", "--full-data")
    assert "3, 2 done" in command("run", *words, "--dry-run")
    command("calibrate", str(folder), "--calibrators", "ets")
    (run,) = read_runs([folder])
    assert (run.result.until, Study((run,)).tasks_told, len(run.tasks)) == (2, "tasks 0 to 1 of 3", 2)
    assert "ets" in run.tasks[1].calibrators


def test_a_copy_without_its_network_is_refused(digits, tmp_path):
    settings = short("er")
    Run(settings, tmp_path / settings.name, dataset=digits, until=2).execute(["vanilla"])
    copy = pack(tmp_path / settings.name, tmp_path / "copy")
    (copy / "task-01" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="a packed copy without a whole network of task 1"):
        Run(settings, copy, dataset=digits).execute(["vanilla"])
    with pytest.raises(ValueError, match=r"^to: got .*where the run itself is"):
        pack(tmp_path / settings.name, tmp_path)
    with pytest.raises(ValueError, match="without the settings of a training"):
        pack(tmp_path / "nothing", tmp_path / "copy")


def test_a_folder_of_runs_is_packed_whole(digits, tmp_path):
    for learner in ("er", "wa"):
        Run(short(learner), tmp_path / "runs" / learner, dataset=digits, until=1).execute(["vanilla"])
    (tmp_path / "runs" / "report").mkdir()
    packed = CliRunner().invoke(app, ["pack", str(tmp_path / "runs"), "--to", str(tmp_path / "copies")])
    assert packed.exit_code == 0, packed.output
    assert sorted(path.name for path in (tmp_path / "copies").iterdir()) == ["er", "wa"]
    assert run_folders(tmp_path / "runs" / "er") == [tmp_path / "runs" / "er"]
    refused = CliRunner().invoke(app, ["pack", str(tmp_path / "nowhere"), "--to", str(tmp_path / "copies")])
    assert refused.exit_code == 2


def test_only_an_earlier_copy_is_replaced(digits, tmp_path):
    """A copy brought back over the whole run, another run, a file of the user: each is refused and stays as it is."""
    settings, others = short("er"), build({"dataset": "digits", "tasks": 3, "epochs": 1, "milestones": []})
    run = tmp_path / "runs" / "run"
    Run(settings, run, dataset=digits, until=2).execute(["vanilla"])
    copy = pack(run, tmp_path / "copies")
    assert pack(run, tmp_path / "copies") == copy  # again, to update it
    before = contents(run)
    with pytest.raises(ValueError, match=r"^to: got .*which is a whole run folder and would lose its networks"):
        pack(copy, tmp_path / "runs")
    assert contents(run) == before

    Run(others, tmp_path / "others" / "run", dataset=digits, until=1).execute(["vanilla"])
    kept = contents(copy)
    with pytest.raises(ValueError, match=r"^to: got .*which belongs to a run with other settings"):
        pack(tmp_path / "others" / "run", tmp_path / "copies")
    assert contents(copy) == kept

    (tmp_path / "mine" / "run").mkdir(parents=True)
    (tmp_path / "mine" / "run" / "settings.json").write_text("mine")
    with pytest.raises(ValueError, match=r"^to: got .*not a copy of a run"), pytest.warns(DamagedFileWarning):
        pack(run, tmp_path / "mine")
    assert (tmp_path / "mine" / "run" / "settings.json").read_text() == "mine"


def test_a_backup_that_has_more_tasks_is_kept(digits, tmp_path):
    """A run begun anew does not replace the backup of the run that was lost; this is said before any training."""
    settings = short("er")
    Run(settings, tmp_path / "lost" / "run", dataset=digits, until=2, backup=tmp_path / "backup").execute(["vanilla"])
    kept = contents(tmp_path / "backup")
    anew = Run(settings, tmp_path / "anew" / "run", dataset=digits, backup=tmp_path / "backup")
    with pytest.raises(ValueError, match=r"^backup: got .*which has results of more tasks than the run"):
        anew.execute(["vanilla"])
    assert not list((tmp_path / "anew" / "run").glob("task-*/model.safetensors"))
    assert contents(tmp_path / "backup") == kept
