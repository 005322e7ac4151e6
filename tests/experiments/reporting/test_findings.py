"""The three sentences, on made-up results: usual ones and odd ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stored_runs import command
from tcil.experiments.cli.app import app
from tcil.experiments.process.screen import Screen
from tcil.experiments.reporting import collect, findings, tables
from tcil.experiments.reporting.show import present
from tcil.experiments.runs.records import parse
from tcil.experiments.runs.results import RunResult
from tcil.experiments.runs.store import StoredRun

TITLES = {"vanilla": "Vanilla", "ts": "TS", "t-cil": "T-CIL", "pact": "PACT", "optimal-ts": "Optimal TS"}
SILENT = {"not_applicable": {"reason": "needs_validation"}}
FOUND = {"magnitude": 0.1, "target_temperature": 2.0, "reachable": True, "verdict": "ok"}


def bins(gap):
    """A diagram in which all images have a confidence of 0.55, which is so much above their accuracy."""
    count, none = [0] * 10, [None] * 10
    count[5] = 100
    return {"count": count, "confidence": [*none[:5], 0.55, *none[6:]], "accuracy": [*none[:5], 0.55 - gap, *none[6:]]}


def row(name, error, floor):
    """`error`: percent on all images, or on all, on old and on new ones; None where there is no answer."""
    block = "oracle" if name.startswith("optimal") else "ranked"
    about = {"title": TITLES.get(name, name), "block": block}
    if error is None:
        return about | SILENT
    every, old, new = error if isinstance(error, tuple) else (error, error, error)
    shares = {"ece": every, "aece": every, "ece_predicted_old": old, "ece_predicted_new": new, "noise_floor": floor}
    shares = {metric: None if value is None else value / 100 for metric, value in shares.items()}
    fit = FOUND | {"trace": [{"magnitude": 0.1, "temperature": 2.0}]} if name == "t-cil" else {"verdict": "ok"}
    return about | {"accuracy": 0.5, "result": fit} | shares


def study(*seeds, tasks=3, floor=2.0, settings=(), **more):
    """A study with a run for each of these errors by calibrator, the same after every task."""
    runs = []
    for seed, errors in enumerate(seeds):
        rows = {name: row(name, error, floor) | more.get(name, {}) for name, error in errors.items()}
        about = {"dataset": "made-up", "learner": "er", "seed": seed, "tasks": tasks, **dict(settings)}
        results = [{"task": task, "seen": 2 * (task + 1), "calibrators": rows} for task in range(tasks)]
        runs.append(StoredRun(Path(f"seed{seed}"), parse(RunResult, {"settings": about, "tasks": results})))
    return collect.Study(tuple(runs))


def told(*studies):
    """Every word of it is also what a table can be made of."""
    for one in studies:
        tables.overview(one)
    return findings.sentences(studies)


USUAL = {"vanilla": 20.0, "ts": 12.0, "t-cil": 5.0, "pact": (3.1, 4.0, 5.0), "optimal-ts": (2.4, 14.0, 9.7)}


class TestOneStudy:
    def test_usual(self):
        assert told(study(USUAL)) == (
            "PACT is nearest to the oracle: its ECE is 3.1 %, 0.7 points above the 2.4 % of Optimal TS (averaged over"
            " 3 tasks, one seed); without calibration it is 20.0 %.",
            "The noise floor is 2.0 %: the ECE that a perfectly calibrated model would show on these test images by"
            " chance; the oracle is 0.4 points above it and PACT 1.1 points.",
            "One temperature hides the difference between old and new classes: over the tasks with old ones, with the"
            " best single temperature the ECE is 2.4 % on all images, but 14.0 % on those predicted as old classes and"
            " 9.7 % on those predicted as new; with PACT 4.0 % and 5.0 %.",
        )

    def test_which_group_is_over_confident_is_said_where_it_is_known(self):
        groups = {"bins_predicted_old": bins(-0.1), "bins_predicted_new": bins(0.2)}
        hidden = told(study(USUAL, **{"optimal-ts": groups}))[2]
        assert "14.0 % on those predicted as old classes (under-confident)" in hidden
        assert "9.7 % on those predicted as new (over-confident)" in hidden

    def test_one_task_has_no_old_classes(self):
        first, _, hidden = told(study({"vanilla": (9.0, None, 9.0), "ts": 4.0, "optimal-ts": 2.5}, tasks=1))
        assert "after the only task" in first
        assert hidden.startswith("With one task no class is old yet")

    def test_without_a_validation_set_nothing_is_fitted(self):
        errors = {"vanilla": 9.0, "ts": None, "t-cil": None, "optimal-ts": 2.5}
        first, floor, hidden = told(study(errors, settings={"validation": 0}.items()))
        assert first == (
            "No calibrator has an answer after every task: without calibration the ECE is 9.0 %, 6.5 points above the"
            " 2.5 % of Optimal TS (averaged over 3 tasks)."
        )
        assert floor.endswith("; the oracle is 0.5 points above it.")
        assert "PACT" not in hidden

    def test_only_the_network_as_trained(self):
        first, floor, hidden = told(study({"vanilla": 9.0}))
        assert first == "No calibrator was fitted: without calibration the ECE is 9.0 % (averaged over 3 tasks)."
        assert floor.endswith("by chance.")
        assert "with the network as trained the ECE is 9.0 % on all images" in hidden

    def test_no_answer_at_all(self):
        first, floor, hidden = told(study({"vanilla": None, "ts": None}))
        assert first.endswith("the error of the network as trained is not known.")
        assert floor.startswith("The noise floor is not known")
        assert hidden.startswith("What one temperature hides is not known")

    def test_rows_without_an_answer_are_not_the_nearest(self):
        first = told(study(USUAL | {"pact": None}))[0]
        assert first.startswith("T-CIL is nearest to the oracle: its ECE is 5.0 %, 2.6 points above")

    def test_an_oracle_below_the_floor(self):
        floor = told(study(USUAL | {"optimal-ts": 1.5}))[1]
        assert floor.endswith(
            "; the oracle is 0.5 points below it, because it was fitted on these very images;"
            " PACT is 1.1 points above it."
        )

    def test_a_calibrator_below_the_oracle(self):
        first = told(study(USUAL | {"pact": 2.0}))[0]
        assert first.startswith(
            "PACT does better than the oracle: its ECE is 2.0 %, 0.4 points below the 2.4 % of Optimal TS, which"
            " minimises the log loss and not the ECE"
        )

    def test_a_calibrator_level_with_the_oracle(self):
        first = told(study(USUAL | {"pact": 2.42}))[0]
        assert first.startswith("PACT is level with the oracle: its ECE is 2.4 %, that of Optimal TS 2.4 %")

    def test_calibrators_that_only_do_harm(self):
        first = told(study({"vanilla": 3.0, "ts": 5.0, "optimal-ts": 2.5}))[0]
        assert first == (
            "No calibrator improves on the network as trained: its ECE is 3.0 %, 0.5 points above the 2.5 % of Optimal"
            " TS (averaged over 3 tasks, one seed); TS has 5.0 %."
        )
        assert "; TS as well." in told(study({"vanilla": 3.0, "ts": 3.0, "optimal-ts": 2.5}))[0]

    def test_without_the_network_as_trained(self):
        """Then nobody knows whether calibration helps."""
        first = told(study({"ts": 5.0, "pact": 3.0, "optimal-ts": 2.5}))[0]
        assert first.endswith("; without calibration it is not known, since Vanilla was not run.")

    def test_without_an_oracle(self):
        first, floor, hidden = told(study({"vanilla": (20.0, 22.0, 25.0), "ts": 12.0}))
        assert first.endswith("without calibration it is 20.0 %; the oracle was not run.")
        assert floor.endswith("; TS is 10.0 points above it.")
        assert "with the network as trained the ECE is 20.0 % on all images, but 22.0 %" in hidden

    def test_groups_are_compared_over_the_same_tasks(self):
        """The first task, where every image is predicted as new, counts for neither group."""
        one = study(USUAL | {"optimal-ts": (2.4, 14.0, 9.7)})
        first = one.runs[0].result.tasks[0].calibrators["optimal-ts"]
        eased = first.model_copy(update={"ece": 0.0, "ece_predicted_old": None, "ece_predicted_new": 0.0})
        one.runs[0].result.tasks[0].calibrators["optimal-ts"] = eased
        hidden = told(one)[2]
        assert "the ECE is 2.4 % on all images, but 14.0 % on those predicted as old classes and 9.7 % on" in hidden

    def test_a_handful_of_images_is_no_group(self):
        few = bins(-0.1) | {"count": [0] * 5 + [3] + [0] * 4}
        hidden = told(
            study(USUAL, **{"optimal-ts": {"bins_predicted_old": few}, "vanilla": {"bins_predicted_old": few}})
        )
        assert hidden[2].startswith(
            "What one temperature hides is not known: not every task has an error, of 20 images"
        )

    def test_what_a_small_group_shows_by_chance_is_not_hidden(self):
        """A calibrated group of 100 images has an ECE of 4 points by chance."""
        sizes = {f"bins_predicted_{group}": bins(0.0) for group in ("old", "new")}
        errors = USUAL | {"optimal-ts": (1.0, 4.5, 1.0)}
        assert told(study(errors, **{"optimal-ts": sizes}))[2].startswith("One temperature hides little")
        assert told(study(errors))[2].startswith("One temperature hides the difference")

    def test_where_nothing_is_hidden(self):
        hidden = told(study(USUAL | {"optimal-ts": (2.4, 2.5, 2.6)}))[2]
        assert hidden.startswith("One temperature hides little of the difference between old and new classes")
        assert "but" not in hidden

    def test_a_second_training_is_no_calibrator(self):
        assert "PACT is nearest" in told(study(USUAL | {"vanilla-all-data": 1.0}))[0]

    def test_seeds_that_tell_calibrators_apart_or_not(self):
        apart = [USUAL | {"pact": 3.0 + 0.01 * seed, "t-cil": 5.0 + 0.02 * seed} for seed in range(3)]
        first = told(study(*apart))[0]
        assert "its ECE is 3.0 ± 0.0 %" in first
        assert "3 seeds" in first
        assert "tell it apart" not in first
        mixed = [USUAL | {"pact": 3.0 + seed, "t-cil": 6.0 - seed} for seed in range(3)]
        assert told(study(*mixed))[0].endswith("; the seeds do not tell it apart from T-CIL (5.0 ± 0.8 %).")

    def test_a_seed_without_an_answer(self):
        first = told(study(USUAL, USUAL | {"pact": None}))[0]
        assert first.startswith("T-CIL is nearest")


class TestSeveralStudies:
    def test_usual(self):
        other = study(USUAL | {"pact": 6.0}, floor=1.0, settings={"learner": "wa"}.items())
        first, floor, hidden = told(study(USUAL), study(USUAL), other)
        assert first == (
            "PACT has the lowest ECE of all calibrators in 2 of 3 studies, T-CIL in 1; averaged over them all its"
            " ECE is 4.1 %, that of the oracle 2.4 %."
        )
        mixed = study(*[USUAL | {"pact": 3.0 + seed, "t-cil": 6.0 - seed} for seed in range(3)])
        both = told(study(USUAL), mixed)[0]
        assert (
            "in 2 of 2 studies (in 1 of the 2 studies the seeds do not tell the lowest from some other); averaged"
            in both
        )
        assert "The noise floor is 1.0 to 2.0 %" in floor
        assert floor.endswith("; the oracle is 0.4 to 1.4 points above it.")
        assert hidden.startswith("One temperature hides the difference between old and new classes in 3 of 3 studies:")
        few = {name: {"bins_predicted_old": bins(-0.1) | {"count": [0] * 5 + [3] + [0] * 4}} for name in USUAL}
        assert "in 1 of 1 studies in which it is known (of 2): over" in told(study(USUAL), study(USUAL, **few))[2]

    def test_odd(self):
        nothing = study({"vanilla": None, "ts": None})
        first, floor, hidden = told(nothing, nothing)
        assert first == "No calibrator has an answer after every task in any of these studies."
        assert floor.startswith("The noise floor is not known")
        assert hidden.startswith("What one temperature hides is not known")
        without = told(study({"vanilla": 20.0, "ts": 12.0}), nothing)[0]
        assert without == "TS has the lowest ECE of all calibrators in 1 of 2 studies; the oracle was not run."
        unknown = told(study(USUAL), study({"ts": 3.0, "optimal-ts": 2.5}))[0]
        assert "in 1 the ECE without calibration is not known, since Vanilla was not run" in unknown
        worse = study(USUAL | {"vanilla": 1.0})
        assert told(worse, worse)[0] == "No calibrator improves on the networks as trained in any of the 2 studies."
        assert "in 1 of 2 studies, in 1 none improves on the network as trained" in told(study(USUAL), worse)[0]
        tied = told(study(USUAL), study(USUAL | {"pact": 9.0, "t-cil": 3.0}))[0]
        assert tied.startswith("T-CIL has the lowest ECE of all calibrators in 1 of 2 studies, PACT in 1")
        below = told(study(USUAL | {"optimal-ts": 1.0}), study(USUAL))[1]
        assert below.endswith("; the oracle is between 1.0 points below it and 0.4 above it.")


def test_the_limits_are_in_the_table():
    grid = tables.overview(study(USUAL | {"vanilla-all-data": 21.0}))
    rows = {line.label: [cell.text() for cell in line.cells] for line in grid.rows}
    assert rows["PACT"] == ["3.10", "+0.70", "4.00", "5.00", "3.10", "50.00"]
    assert rows["Optimal TS"][:2] == ["2.40", "-"]
    assert rows["vanilla-all-data"][:2] == ["21.00", "-"]  # of other networks
    assert rows["Noise floor"] == ["2.00", "-0.40", "-", "-", "-", "-"]
    assert [heading for heading, _ in grid.blocks] == ["Calibrators", "Limits"]
    both = tables.overview_of([study(USUAL), study({"vanilla": None})])
    assert [cell.text() for cell in both.rows[-1].cells] == ["2.00", "n/a"]


class TestOnTheTerminal:
    @pytest.fixture
    def folder(self, tmp_path):
        collect.keep(study(USUAL).runs, tmp_path)
        return tmp_path

    @pytest.mark.usefixtures("undrawn")
    def test_sentences_then_the_table_then_the_path(self, folder):
        output = command("report", folder, "--out", folder / "out")
        said = " ".join(output.split())
        places = [said.index(sentence) for sentence in findings.sentences([study(USUAL)])]
        assert places == sorted(places)
        assert places[-1] < said.index("Noise floor") < said.index("report.html")
        assert "by task" not in output
        assert output.rstrip().endswith(f"report {folder / 'out' / 'report.html'}")

    @pytest.mark.usefixtures("undrawn")
    def test_tables_by_task_and_the_browser_on_request(self, folder, monkeypatch):
        opened = []
        monkeypatch.setattr("webbrowser.open", lambda address: bool(opened.append(address)))
        output = command("report", folder, "--out", folder / "out", "--verbose", "--open")
        assert "ER on made-up: ECE by task, %" in output
        assert opened == [(folder / "out" / "report.html").as_uri()]
        assert "No browser was found" in output

    @pytest.mark.usefixtures("undrawn")
    def test_a_run_ends_with_its_story(self, tmp_path, capsys, monkeypatch):
        opened = []
        monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
        run = dataclasses.replace(study(USUAL).runs[0], path=tmp_path)
        present(run, Screen())
        output = capsys.readouterr().out
        assert "by task, %" not in output
        assert output.startswith("\nER on made-up\nPACT is nearest to the oracle")
        assert output.endswith(f"run folder {tmp_path}\nreport {tmp_path / 'report.html'}\n")
        assert opened == []
        present(run, Screen(), verbose=True, browse=True)
        output = capsys.readouterr().out
        assert output.index("ECE by task, %") < output.index("PACT is nearest to the oracle")
        assert opened == [(tmp_path / "report.html").as_uri()]

    @pytest.mark.parametrize("flag", ["--open", "--verbose"])
    def test_of_several_runs_the_report_is_asked_for(self, tmp_path, flag):
        outcome = CliRunner().invoke(app, ["run", "--seeds", "1,2", "--out", str(tmp_path / "runs"), flag])
        assert outcome.exit_code == 2
        assert f"{flag}: got 2 runs; expected one run." in " ".join(outcome.output.split())
        assert not (tmp_path / "runs").exists()
