"""The paper's artifacts: what is planned, run, and drawn."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import shlex
import shutil

import numpy as np
import pytest

from conftest import ROOT
from stored_runs import command, stored
from tcil.experiments.config.settings import build
from tcil.experiments.reporting import collect, grids, tables
from tcil.experiments.reproduction import checks, paper, schedules
from tcil.experiments.reproduction.artifacts import ARTIFACTS, all_needs, artifacts_named
from tcil.experiments.reproduction.finished import FinishedRuns, drawable, read_finished
from tcil.experiments.reproduction.reproduce import satisfied
from tcil.experiments.reproduction.schedules import SCHEDULES, editions
from tcil.experiments.runs.catalogue import CATALOGUE, Description

QUICK = ["--set", "epochs=1", "--set", "milestones=[]"]


def mini(**changes):
    """The words that ask for a run of the mini schedule."""
    settings = {**SCHEDULES["mini"][0].presets["cifar100"], **changes}
    return ["--preset", settings.pop("preset"), *(w for k, v in settings.items() for w in ("--set", f"{k}={v}"))]


class TestReproduce:
    def test_the_papers_plan(self):
        needs = all_needs(list(ARTIFACTS.values()), editions("paper"))
        base = {(n.settings.dataset, n.settings.learner) for n in needs}
        assert len(base) == 12
        assert {n.settings.seed for n in needs} == {1, 2, 3, 4, 5}
        assert all(n.settings.epochs == 200 for n in needs)
        trainings = len(needs) + sum(n.full_data for n in needs)
        assert trainings == 255
        assert len({n.settings.key for n in needs}) == len(needs)

    def test_no_more_is_planned_than_is_drawn(self):
        """All the data, and the analysis, only where a table, figure or claim shows it."""
        needs = all_needs(list(ARTIFACTS.values()), editions("paper"))
        whole = [n for n in needs if n.settings.memory == build({"preset": n.settings.dataset}).memory]
        assert all(n in whole and not n.settings.reserve for n in needs if n.full_data)
        assert {(n.settings.dataset, n.settings.learner) for n in needs if n.analysis} == {("cifar100", "er")}
        claims = all_needs(artifacts_named("claims"), editions("paper"))
        assert {n.settings.tasks for n in claims if n.settings.dataset == "cifar100"} == {10, 20}
        assert len({n.settings.validation for n in claims if n.settings.dataset == "cifar100"}) == 5

    def test_small_analyses_the_first_seed(self):
        for seeds in (None, (7, 5)):
            needs = all_needs(artifacts_named("all"), editions("small", seeds))
            own = [
                n for n in needs if (n.settings.dataset, n.settings.learner, n.settings.tasks) == ("cifar100", "er", 10)
            ]
            assert [n.settings.seed for n in own] == list(seeds or (1, 2, 3))
            assert [n.analysis for n in own] == [True] + [False] * (len(own) - 1)
        assert all(n.analysis for n in all_needs(artifacts_named("feature-space"), editions("short")))

    def test_short_is_three_seeds_and_one_full_size(self):
        needs = all_needs(list(ARTIFACTS.values()), editions("short"))
        full = [n.settings for n in needs if n.settings.network == "resnet32"]
        assert [(s.learner, s.epochs, s.seed, s.memory, s.tasks) for s in full] == [("er", 10, 1, 2000, 10)]
        assert {n.settings.seed for n in needs if n.settings.network == "small_resnet"} == {1, 2, 3}

    def test_compact_is_the_papers_network_and_protocol(self):
        needs = all_needs(artifacts_named("all"), editions("compact"))
        told = [(n.settings.dataset, n.settings.learner, n.settings.validation, n.until) for n in needs]
        assert told == [
            ("cifar100", "er", 500, None), ("cifar10", "er", 500, None), ("cifar100", "eeil", 300, 5),
            ("cifar100", "wa", 500, 5), ("cifar100", "der", 1000, 5),
        ]  # fmt: skip
        assert {n.settings.network for n in needs} == {"resnet32"}
        assert [(n.settings.tasks, n.settings.memory) for n in needs[:2]] == [(10, 2000), (5, 200)]
        assert not any(n.full_data for n in needs)
        everything = all_needs(artifacts_named("all"), editions("compact", full_data=True))
        assert any(n.full_data for n in everything)

    @pytest.mark.parametrize(
        ("values", "paper"), [("COMPACT", "cifar100"), ("SMALL", "cifar100"), ("SMALL_TINY", "tiny-imagenet")]
    )
    def test_weight_decay_over_a_task_is_the_papers(self, values, paper):
        """The sum of lr * weight_decay over the steps of a task: epochs at each rate, by the number of steps in one."""

        def decay(settings):
            bounds = [0, *settings.milestones, settings.epochs]
            lengths = [end - start for start, end in itertools.pairwise(bounds)]
            rates = sum(length * settings.lr * 0.1**step for step, length in enumerate(lengths))
            return rates * settings.weight_decay / settings.batch_size

        ours = build({"preset": paper, **getattr(schedules, values)})
        assert decay(ours) == pytest.approx(decay(build({"preset": paper})), rel=0.02)

    def test_small_has_a_class_order_for_each_seed(self):
        needs = all_needs(artifacts_named("all"), editions("small"))
        main = [n.settings for n in needs if n.settings.dataset == "cifar100" and n.settings.tasks == 10]
        assert sorted((s.learner, s.seed) for s in main) == sorted(
            (learner, seed) for learner in ("er", "eeil", "wa", "der") for seed in (1, 2, 3)
        )
        assert all(n.settings.class_order_seed == n.settings.validation_seed == n.settings.seed for n in needs)
        assert {(s.settings.learner, s.settings.seed) for s in needs if s.settings.tasks == 20} == {
            ("er", 1),
            ("wa", 1),
        }
        tiny = [n.settings for n in needs if n.settings.dataset == "tiny-imagenet"]
        assert {(s.image_side, s.memory, s.tasks, s.seed) for s in tiny} == {(32, 4000, 10, 1)}
        assert len(needs) == 12 + 4 + 4 + 2
        (study,) = collect.studies([stored(s, {"ts": 0.1}) for s in main if s.learner == "er"])
        assert len(study.runs) == 3

    def test_first_tasks_and_vanilla_as_trained_say_so(self):
        (edition, _) = editions("compact")
        errors = {"vanilla": 0.3, "ts": 0.2, "t-cil": 0.05, "pact": 0.04, "optimal-ts": 0.03}
        runs = [
            stored(edition.settings("cifar100", "er", 1), errors, memorised=0.99),
            stored(edition.settings("cifar100", "wa", 1), errors, memorised=0.9, until=5),
        ]
        finished = FinishedRuns([edition], runs)
        (grid, *_) = ARTIFACTS["compatibility"].render(finished).grids
        rows = {row.label: row for row in grid.rows}
        whole, part = rows["ER: Vanilla (validation images held out)"], rows["WA: T-CIL; tasks 0 to 4 of 10"]
        assert (whole.cells[3].text(), part.cells[3].text()) == ("30.00", "5.00")
        assert whole.cells[5].text() != ""
        assert part.cells[5].text() == ""
        assert [cell.text() for cell in rows["ER: PACT (ours)"].cells[3:6]] == ["4.00", "n/a", ""]
        assert "10 tasks or tasks 0 to 4 of 10, n = 1" in grid.title
        notes = " ".join(grid.notes)
        assert "predicted correctly, mean over tasks: ER 99.0 % (accuracy 50.00 %), WA 90.0 %" in notes
        assert "no difference is given" in notes
        assert "varied in 'short' only" in " ".join(ARTIFACTS["compatibility"].render(finished).lines)
        assert [study.settings.learner for _, study in finished.whole().on("cifar100", "wa")] == []
        assert ARTIFACTS["ece-progression"].render(finished).pictures
        need = next(n for n in all_needs(artifacts_named("grid"), [edition]) if n.settings.learner == "wa")
        assert not satisfied(dataclasses.replace(need, until=None), runs[1])

    def test_unknown_names(self):
        with pytest.raises(ValueError, match="Did you mean 'baselines'"):
            artifacts_named("baseline")
        with pytest.raises(ValueError, match="schedule: got 'long'"):
            editions("long")

    def test_every_table_of_the_paper_has_its_artifact(self):
        assert {row.table for row in paper.rows()} <= set(ARTIFACTS)
        assert set(SCHEDULES) == {"mini", "short", "short-0.2", "compact", "small", "paper"}

    def test_nothing_is_filled_in(self):
        finished = FinishedRuns(editions("paper"), [])
        for name in ("baselines", "grid", "validation", "tasks20"):
            section = ARTIFACTS[name].render(finished)
            assert not section.grids
            for grid in section.more["Not run: the paper's numbers alone"]:
                for row in grid.rows:
                    assert [cell.words for cell in row.cells[::3]] == ["not run"] * (len(row.cells) // 3)
        claims = ARTIFACTS["claims"].render(finished).grids[0]
        ours = [row for row in claims.rows if row.cells[1].words != "the paper's own table"]
        assert {row.cells[2].words for row in ours} == {"not run"}
        assert {row.cells[1].words for row in ours} == {"none"}

    @pytest.mark.usefixtures("undrawn")
    def test_figures_give_their_values(self, kept_runs):
        """Every picture of the paper's figures has the table of what it shows."""
        finished = FinishedRuns(editions("short-0.2"), kept_runs)
        for artifact in ARTIFACTS.values():
            section = artifact.render(finished)
            assert all(picture.values is not None and picture.values.rows for picture in section.pictures)
            assert section.tables
        (first, *_) = ARTIFACTS["temperature-bias"].render(finished).tables
        study = finished.study(finished.editions[0], "cifar100", "er")
        expected = np.mean([run.values("ts", "temperature")[-1] for run in study.runs])
        (row,) = [row for row in first.rows if row.label == "TS"]
        assert row.cells[-1].spread.mean == pytest.approx(expected)

    def test_rows_with_fewer_seeds_say_so(self):
        (edition, *_) = editions("short")
        runs = [
            stored(
                edition.settings("cifar100", "er", seed), {"ts": 0.2 + seed / 100, "t-cil": 0.05 + seed / 100} | more
            )
            for seed, more in ((1, {"vanilla-all-data": 0.3}), (2, {}), (3, {}))
        ]
        finished = FinishedRuns([edition], runs)
        (grid,) = ARTIFACTS["baselines"].render(finished).grids
        rows = {row.label: row.cells[3] for row in grid.rows}
        assert grid.title.endswith("n = 3")
        assert rows["Vanilla (all data)"].text() == "30.00 (n = 1)"
        assert rows["TS"].text() == "22.00 ± 0.82"
        assert rows["T-CIL"].bold
        assert rows["IRM"].text() == "not run"
        assert sum(note.startswith("Bold") for note in grid.notes) == 1
        (one,) = ARTIFACTS["baselines"].render(FinishedRuns([edition], runs[:1])).grids
        assert not any(note.startswith("Bold") for note in one.notes)
        side = {row.label: row.cells[0].text() for row in tables.side_by_side([collect.Study(tuple(runs))], "ece").rows}
        assert side == {"vanilla-all-data": "30.00 (n = 1)", "ts": "22.00 ± 0.82", "t-cil": "7.00 ± 0.82"}
        answer = checks.CHECKS["accuracy_hardly_changes"].ask(finished, edition)
        assert (answer.ours, answer.n) == ("ER on CIFAR-100 +0.00 points", 1)  # seed 1 alone has both
        assert answer.agreement == "in part"

    @pytest.mark.training
    def test_a_run_with_few_calibrators_is_not_finished(self, tmp_path):
        places = ["--schedule", "mini", "--out", tmp_path / "runs", "--report", tmp_path / "report"]
        run = ["run", *mini(), "--calibrators", "vanilla", "--set", "epochs=1", "--no-full-data"]
        command(*run, "--out", tmp_path / "runs")
        output = command("reproduce", "policies", *places, "--set", "epochs=1", "--dry-run")
        assert "0 trainings to run" in output
        assert "to calibrate" in output
        command("report", tmp_path / "runs", "--keep", tmp_path / "kept")  # without the networks
        elsewhere = ["--schedule", "mini", "--out", tmp_path / "other", "--kept", tmp_path / "kept"]
        again = command("reproduce", "policies", *elsewhere, "--set", "epochs=1", "--dry-run")
        assert "1 training to run" in again
        command("reproduce", "claims", *places, "--set", "epochs=1", "--render")

    @pytest.mark.training
    def test_the_tasks_of_an_unfinished_training_are_not_planned_again(self, tmp_path):
        places = ["--schedule", "mini", "--out", tmp_path, *QUICK]
        command("run", *mini(), "--seeds", "1", *QUICK, "--no-full-data", "--out", tmp_path)
        (folder,) = [path.parent for path in tmp_path.glob("*/results.json")]
        shutil.rmtree(folder / "task-02")
        (folder / "results.json").unlink()
        assert "2 done" in command("reproduce", "policies", *places, "--dry-run")

    @pytest.mark.training
    def test_an_all_data_training_that_is_there_is_not_planned_again(self, tmp_path):
        places = ["--schedule", "mini", "--out", tmp_path, *QUICK]
        command("run", *mini(), "--seeds", "1", *QUICK, "--no-full-data", "--out", tmp_path)
        planned = command("reproduce", "baselines", *places, "--dry-run")
        assert "to calibrate" in planned
        assert "1 training to run" in planned  # the one on all the data
        assert "is not counted" in planned
        command("run", *mini(validation=0, validation_pool=0), "--seeds", "1", *QUICK, "--out", tmp_path)
        assert "0 trainings to run" in command("reproduce", "baselines", *places, "--dry-run")

    def test_a_plan_tells_the_commands_of_the_runs_that_it_plans(self, tmp_path):
        given = ["--seeds", "3", "--tasks-until", "2", "--set", "epochs=1", "--set", "learner_options.head=growing"]
        kept = tmp_path / "with space"
        kept.mkdir()
        given += ["--no-full-data", "--kept", str(kept)]
        told = command("reproduce", "policies", "--schedule", "mini", "--out", tmp_path, *given, "--dry-run")
        lines = [line.split("tcil ", 1)[1] for line in told.splitlines() if "tcil reproduce" in line]
        assert len(lines) == 4
        for line in lines:
            words = shlex.split(line)
            assert words[:4] == ["reproduce", "policies", "--schedule", "mini"]
            own = words[4 : words.index("--data")]
            assert sorted(own) == sorted(given)
        assert "a Slurm array, --array=1-1 " in told
        one = command(*words[: words.index("--data")], "--out", tmp_path, "--dry-run", "--job", "1")
        assert one.count("--job 1 ") == 3
        assert one.count('--job "$SLURM_ARRAY_TASK_ID"') == 1
        again = command(*words[: words.index("--data")], "--out", tmp_path, "--dry-run")
        assert [line.split("tcil ", 1)[1] for line in again.splitlines() if "tcil reproduce" in line] == lines

    def test_one_more_calibrator_leaves_finished_runs_finished(self, monkeypatch):
        kept = read_finished([ROOT / "docs/results/runs"])
        before = {key for key, run in kept.items() if drawable(run)}
        monkeypatch.setitem(CATALOGUE, "new", Description("New", "a calibrator of the next version"))
        assert {key for key, run in kept.items() if drawable(run)} == before
        needs = all_needs(artifacts_named("all"), editions("short-0.2"))
        found = [need for need in needs if need.settings.key in before]
        assert len(found) > 30
        assert all(satisfied(need, kept[need.settings.key]) for need in found)

    def reproduced(self, artifact, tmp_path):
        """Planned, run, found finished, kept, and drawn again from the kept copies."""
        places = ["--schedule", "mini", "--out", tmp_path / "runs", "--report", tmp_path / "report"]
        plan = command("reproduce", artifact, *places, *QUICK, "--dry-run")
        assert "to run" in plan
        assert not (tmp_path / "runs").exists()
        output = command("reproduce", artifact, *places, *QUICK)
        before = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("results.json")}
        again = command("reproduce", artifact, *places, *QUICK)
        assert "0 trainings to run" in again
        assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("results.json")}
        # Kept copies are enough to draw everything anew.
        command("report", tmp_path / "runs", "--out", tmp_path / "r", "--keep", tmp_path / "kept")
        elsewhere = ["--schedule", "mini", "--out", tmp_path / "none", "--kept", tmp_path / "kept", "--render"]
        command("reproduce", artifact, *elsewhere, *QUICK, "--report", tmp_path / "second")
        assert (tmp_path / "second/tables.csv").read_bytes() == (tmp_path / "report/tables.csv").read_bytes()
        assert (tmp_path / "second/report.html").read_bytes() == (tmp_path / "report/report.html").read_bytes()
        return output, (tmp_path / "report/report.html").read_text()

    @pytest.mark.training
    @pytest.mark.slow
    def test_one_table_on_letters(self, tmp_path):
        _, page = self.reproduced("baselines", tmp_path)
        assert str(grids.escape(ARTIFACTS["baselines"].title)) in page

    @pytest.mark.slow
    @pytest.mark.timeout(900)
    def test_everything_on_letters(self, tmp_path):
        output, page = self.reproduced("all", tmp_path)
        assert "holds" in output
        for artifact in ARTIFACTS.values():
            assert str(grids.escape(artifact.title)) in page
        assert page.count("<svg") == 8 + 4 * 6  # the paper's figures, and of each learner's runs all there is
        assert "Reliability after the last task" in page
        written = list(csv.DictReader((tmp_path / "report/tables.csv").read_text().splitlines()))
        assert any(row["table"].startswith("Baselines, ER, Tiny-ImageNet; not run") for row in written)
        assert any(row["table"].startswith("ECE after each task, %; CIFAR-100, ours: letters") for row in written)
