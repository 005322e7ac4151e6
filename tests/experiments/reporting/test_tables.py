"""Summaries and comparisons of studies."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import pytest
from scipy import stats

from stored_runs import command, stored, with_rows, with_settings
from tcil.experiments.config.settings import build
from tcil.experiments.reporting import collect, tables
from tcil.experiments.reporting.collect import Study
from tcil.experiments.reporting.figures import claimed_and_achieved, risk_by_coverage
from tcil.experiments.reporting.findings import sentences
from tcil.experiments.reporting.guessing import guessing
from tcil.experiments.runs.reasons import NoAnswer
from tcil.experiments.runs.results import Bins
from tcil.foundation.options import Verdict


@pytest.mark.parametrize(
    ("scores", "winner"),
    [
        ({"a": [0.1, 0.11, 0.09], "b": [0.5, 0.52, 0.49]}, "a"),
        ({"a": [0.1, 0.9, 0.09], "b": [0.5, 0.52, 0.49]}, None),
        ({"a": [0.1], "b": [0.5]}, None),
        ({"a": [0.1, 0.11, 0.09], "b": [0.5, 0.52, 0.49], "c": [0.9]}, "a"),  # c lost with the one seed it has
        ({"a": [0.1, 0.11, 0.09], "b": [0.5, 0.52, 0.49], "c": [0.05]}, None),  # c, with one seed, is lower
        ({"a": [0.1, 0.11, 0.09], "b": [0.5, 0.52, 0.49], "c": [0.12]}, "a"),
    ],
)
def test_bold_needs_more_than_the_least_mean(scores, winner):
    runs = [
        stored(
            build({"dataset": "noisy-digits", "seed": seed}),
            {name: own[seed] for name, own in scores.items() if seed < len(own)},
        )
        for seed in range(max(map(len, scores.values())))
    ]
    assert tables.best(collect.Study(tuple(runs)), list(scores), "ece") == winner


def test_what_was_odd_is_said(runs):
    study = next(s for s in collect.studies(collect.read_runs([runs])) if s.settings.validation)
    accuracies = iter([0.25, 0.5, 0.125])

    def odd(rows):
        missed = {"reason": "not_reachable", "max_noise": 100.0, "accuracy": 0.9, "noise": 1e-5}
        silent = NoAnswer(**missed, target_accuracy=next(accuracies))
        perturbed = rows["vanilla"].model_copy(update={"title": "PerturbTS", "not_applicable": silent})
        fit = rows["t-cil"].result.model_copy(update={"verdicts": (Verdict.TARGET_BELOW_RANGE, Verdict.OK)})
        other = perturbed.titled("mine").model_copy(
            update={"not_applicable": NoAnswer(reason="other", words="no noise; the nearest was 3")}
        )
        return {"t-cil": rows["t-cil"].model_copy(update={"result": fit}), "perturb-ts": perturbed, "mine": other}

    notes = tables.summary(collect.Study((with_rows(study.runs[0], odd),))).notes
    assert notes == (
        "One seed.",
        "PerturbTS: n/a: no noise up to 100 brings accuracy to 0.125 to 0.500 (3 of 3 tasks).",
        "T-CIL: the unperturbed new exemplars already have a temperature at or above the target (3 of 3 tasks).",
        "mine: n/a: no noise (3 of 3 tasks).",
    )


class TestCompare:
    def test_differences_are_paired(self, runs, tmp_path):
        first, second = tmp_path / "a", tmp_path / "b"
        own = [r for r in collect.read_runs([runs]) if r.settings.learner == "er" and r.settings.validation]
        collect.keep(own, first)
        worse = []
        for run in own:
            more = 0.01 * run.seed
            worse.append(
                with_rows(
                    run,
                    lambda rows, more=more: {
                        **rows,
                        "ts": rows["ts"].model_copy(update={"ece": rows["ts"].ece + more}),
                    },
                )
            )
        collect.keep(worse, second)
        output = command("compare", first, second, "--out", tmp_path / "tables")
        rows = list(csv.reader((tmp_path / "tables/tables.csv").read_text().splitlines()))
        lines = [row for row in rows if (row[0], row[3]) == ("ECE, A against B", "ER on noisy-digits: TS")]
        found = {row[4]: row[5] for row in lines}
        assert found["B - A"] == "1.5"
        ends = stats.ttest_1samp([1.0, 2.0], 0).confidence_interval(0.95)
        assert [float(found[end]) for end in ("low", "high")] == pytest.approx(list(ends), rel=1e-4)
        assert found["n"] == "2"
        assert "B - A" in output

    def test_what_one_side_lacks_is_not_run_there(self):
        """Each setting of a learner has its own rows, and what has no partner is counted."""
        a = [
            stored(build({"dataset": "noisy-digits", "seed": s, "memory": m}), {"ts": 0.1, "irm": 0.2})
            for s in (1, 2)
            for m in (100, 60)
        ]
        b = [
            stored(build({"dataset": "noisy-digits", "seed": s, "memory": m}), {"ts": 0.1 + s / 100})
            for s in (1, 2, 3)
            for m in (100, 60)
        ]
        grid = tables.comparison(a, b, "ece")
        assert {row.block for row in grid.rows} == {"ER on noisy-digits, memory 100", "ER on noisy-digits, memory 60"}
        found = {row.label: [cell.text() for cell in row.cells] for row in grid.rows}
        assert found["ER on noisy-digits, memory 60: irm"] == ["20.00 ± 0.00", "not run", "", "", "", ""]
        assert found["ER on noisy-digits, memory 60: ts"][2:] == ["+1.50", "-4.85", "+7.85", "2"]
        assert "Left out, without a run to pair with: 0 of A, 2 of B." in grid.notes

    def test_both_sides_are_over_the_same_pairs(self):
        a = [stored(build({"dataset": "noisy-digits", "seed": s}), {"ts": s / 100}) for s in (1, 2, 3)]
        b = [
            stored(build({"dataset": "noisy-digits", "seed": s}), {"ts": s / 100} if s > 1 else {"irm": 0.1})
            for s in (1, 2, 3)
        ]
        (row,) = [row for row in tables.comparison(a, b, "ece").rows if row.label.endswith(": ts")]
        assert [cell.text() for cell in row.cells] == ["2.50 ± 0.50", "2.50 ± 0.50", "+0.00", "+0.00", "+0.00", "2"]

    def test_imported_runs_pair_wherever_they_lie(self):
        run = stored(build({"dataset": "noisy-digits", "seed": 1}), {"ts": 0.1})
        imported = with_settings(run, {"dataset": "mine", "learner": "own", "imported": True})
        a, b = (dataclasses.replace(imported, path=Path(name)) for name in ("a", "b"))
        (row,) = tables.comparison([a], [b], "ece").rows
        assert row.cells[-1].words == "1"
        assert [study.title for study in collect.studies([a, b])] == ["OWN on mine, a", "OWN on mine, b"]

    def test_nothing_to_pair(self, runs, tmp_path):
        own = [r for r in collect.read_runs([runs]) if r.settings.learner == "er"]
        other = [r for r in collect.read_runs([runs]) if r.settings.learner == "wa"]
        told = r"B: got no run .*\(A has er on .*; B has wa on .*\).* tcil report shows several learners"
        with pytest.raises(ValueError, match=told):
            tables.comparison(own, other, "ece")

    def test_a_set_with_itself(self, runs):
        own = collect.read_runs([runs])
        rows = [row for row in tables.comparison(own, own, "ece").rows if row.cells[0].words != "n/a"]
        assert rows
        for row in rows:
            assert [cell.text() for cell in row.cells[2:]] == ["+0.00", "+0.00", "+0.00", "2"]

    def test_what_changed_is_named_and_paired(self):
        a, b = (
            [stored(build({"dataset": "noisy-digits", "seed": s, "memory": m}), {"ts": s / m}) for s in (1, 2)]
            for m in (100, 60)
        )
        grid = tables.comparison(a, b, "ece")
        assert "memory 100 in A, 60 in B" in grid.notes[1]
        (row,) = grid.rows
        assert row.cells[-1].words == "2"
        assert row.cells[2].spread


def test_decisions_show_what_is_promised_beside_what_is_achieved():
    from tcil.experiments.config.settings import build
    from tcil.experiments.runs.results import CalibratorRow

    risks = [
        {"kind": kind, "group": group, "promised": risk, "threshold": 0.9, "achieved": 2 * risk, "coverage": 0.3,
         "begins_at": 45}
        for risk in (0.05, 0.1, 0.2) for kind, group in (("model_based", "old"), ("model_based", "new"),
                                                         ("model_based", "all"), ("finite_sample", "all"))
    ]  # fmt: skip
    sets = [
        {"kind": kind, "group": group, "promised": 0.9, "achieved": 0.93, "size": 2.5}
        for kind in ("model_based", "finite_sample")
        for group in ("old", "new")
    ]
    curve = dict.fromkeys(("all", "old", "new"), [0.1] * 10)
    figures = {"risk_by_coverage": curve, "risks": risks, "sets": sets}
    plain = stored(build({"preset": "letters"}), {"ts": 0.1, "pact": 0.1})
    assert tables.decisions(collect.Study((plain,))) == []
    assert claimed_and_achieved(collect.Study((plain,))) is None
    assert risk_by_coverage(collect.Study((plain,))) is None
    run = with_rows(
        plain,
        lambda rows: {
            name: CalibratorRow.model_validate({**row.record(), "decisions": figures}) if name == "ts" else row
            for name, row in rows.items()
        },
    )
    achieved, accepted, promised, coverage, size = tables.decisions(collect.Study((run,)))
    assert [[cell.spread.mean for cell in row.cells] for row in achieved.rows] == [[10, 10, 20, 20, 40, 40]]
    assert {cell.spread.mean for cell in accepted.rows[0].cells} == {30}
    assert "45, 45, 45 images" in promised.notes[0]
    assert {cell.spread.mean for cell in coverage.rows[0].cells} == {93}
    assert {cell.spread.mean for cell in size.rows[0].cells} == {2.5}
    drawn = claimed_and_achieved(collect.Study((run,)))
    assert "ts, predicted old: 10.0, 20.0, 40.0" in drawn.words
    assert "10.0, 10.0, 10.0" in risk_by_coverage(collect.Study((run,))).words
    assert [line.label for line in drawn.legend] == ["ts"]


class TestTasksWithoutAValue:
    """Means over tasks that lack a value say so, are not ranked, and are not told in sentences."""

    @staticmethod
    def study(seeds=(1, 2, 3), lacking=2, task=3):
        """TS has the least error in `ece_predicted_old`; `lacking` of the runs have no such value after a task."""
        errors = {"vanilla": 0.3, "ts": 0.1, "irm": 0.2}
        runs = [stored(build({"dataset": "noisy-digits", "seed": s}), errors) for s in seeds]
        for place in range(lacking):
            tasks = list(runs[place].tasks)
            rows = dict(tasks[task].calibrators)
            rows["ts"] = rows["ts"].model_copy(update={"ece_predicted_old": None})
            tasks[task] = tasks[task].model_copy(update={"calibrators": rows})
            runs[place] = dataclasses.replace(runs[place], result=runs[place].result.with_tasks(tasks))
        return Study(tuple(runs))

    def test_cells_say_so(self):
        study = self.study()
        assert tables.percent_of(study, "ts", "ece_predicted_old").text() == "10.00 ± 0.00 (10 of 12 tasks)"
        assert tables.percent_of(study, "ts", "ece").text() == "10.00 ± 0.00"
        assert tables.percent_of(self.study(lacking=0), "ts", "ece_predicted_old").text() == "10.00 ± 0.00"
        row = next(row for row in tables.by_task(study, "ece_predicted_old").rows if row.label == "ts")
        assert [cell.text() for cell in row.cells][3:] == ["n/a", "10.00 ± 0.00", "10.00 ± 0.00 (10 of 12 tasks)"]

    def test_the_first_task_lacks_nothing(self):
        """In it no class is old."""
        assert tables.percent_of(self.study(task=0), "ts", "ece_predicted_old").text() == "10.00 ± 0.00"

    def test_such_rows_are_not_ranked(self):
        """`vanilla` and `irm` are."""
        ranked = ["vanilla", "ts", "irm"]
        assert tables.best(self.study(lacking=0), ranked, "ece_predicted_old") == "ts"
        assert tables.best(self.study(lacking=1), ranked, "ece_predicted_old") == "irm"
        assert tables.best(self.study(lacking=1), ranked, "ece") == "ts"

    def test_comparisons_say_so_too(self):
        whole, lacking = self.study(lacking=0), self.study()
        grid = tables.comparison(whole.runs, lacking.runs, "ece_predicted_old")
        row = next(row for row in grid.rows if row.label.endswith(": ts"))
        assert [cell.text() for cell in row.cells][:2] == ["10.00 ± 0.00 (10 of 12 tasks)"] * 2

    def test_comparisons_are_over_common_tasks(self):
        """A is better in every task; over all tasks that either has, B would have the lower mean."""
        one, two = self.study(lacking=0).runs[0], self.study(lacking=0).runs[0]

        def errors(run, values):
            rows = [{"ts": task.calibrators["ts"].model_copy(update={"ece_predicted_old": v})} for task, v in values]
            tasks = [task.model_copy(update={"calibrators": row}) for (task, _), row in zip(values, rows, strict=True)]
            return dataclasses.replace(run, result=run.result.with_tasks(tasks))

        steps = [0.1 * place for place in range(len(one.tasks))]
        a = errors(one, list(zip(one.tasks, [None, *steps[1:]], strict=True)))
        b = errors(two, list(zip(two.tasks, [None, 0.15, *[None] * (len(steps) - 2)], strict=True)))
        (row,) = tables.comparison([a], [b], "ece_predicted_old").rows
        assert row.cells[0].text() == f"10.00 (1 of {len(steps) - 1} tasks)"
        assert row.cells[2].text() == "+5.00"
        first = dataclasses.replace(a, result=a.result.model_copy(update={"tasks": a.tasks[:2], "until": 2}))
        (row,) = tables.comparison([a], [first], "ece_predicted_old").rows
        assert row.cells[1].text() == f"10.00 (1 of {len(steps) - 1} tasks)"


class TestGuessing:
    @staticmethod
    def study(accuracy, images=400, seen=4):
        """Two seeds in which TS is better than Vanilla by far."""

        def row(rows):
            count = [images, *[0] * 9]
            bins = Bins(count=count, confidence=[0.05, *[None] * 9], accuracy=[accuracy, *[None] * 9])
            parts = {"bins": bins, "by_task": None, "by_class": None}
            return {name: row.model_copy(update=parts) for name, row in rows.items()}

        def with_seen(run):
            tasks = [task.model_copy(update={"seen": seen}) for task in run.tasks]
            return dataclasses.replace(run, result=run.result.with_tasks(tasks))

        errors = {"vanilla": 0.3, "ts": 0.1, "irm": 0.2}
        runs = [stored(build({"dataset": "noisy-digits", "seed": s}), errors, accuracy=accuracy) for s in (1, 2)]
        return Study(tuple(with_seen(with_rows(run, row)) for run in runs))

    def test_the_bound_is_binomial(self):
        """The least number of correct predictions of 400 that chance of 1 in 4 reaches in at most 5 % of the cases."""
        least = next(k for k in range(401) if stats.binom.sf(k - 1, 400, 0.25) <= 0.05)
        assert guessing(self.study(least / 400)) is None
        found = guessing(self.study((least - 1) / 400))
        assert (found.count, found.networks, found.task, found.images, found.classes) == (10, 10, 4, 400, 4)
        assert guessing(self.study(0.5, images=4)) is not None  # too few images to tell
        assert guessing(self.study(0.5)) is None

    def test_no_calibrator_is_named(self):
        study, better = self.study(0.26), self.study(0.5)
        first, floor, hidden = sentences([study])
        assert first.startswith("No calibrator is named, because 10 of 10 networks are no better than guessing")
        assert "accuracy of 26.0 % on 400 test images of 4 classes after task 4" in first
        assert "ts" not in floor.replace("points", "").split()
        assert "with ts" not in hidden
        assert sentences([better])[0].startswith("ts has the lowest ECE")
        assert tables.best(study, ["ts", "irm"], "ece") is None
        assert tables.best(better, ["ts", "irm"], "ece") == "ts"
        assert any(note.endswith("nothing is ranked.") for note in tables.overview(study).notes)
        assert not any("guessing" in note for note in tables.overview(better).notes)

    def test_of_several_studies_those_are_not_counted(self):
        study, better = self.study(0.26), self.study(0.5)
        told = sentences([study, better, better])[0]
        assert told.startswith("ts has the lowest ECE of all calibrators in 2 of 2 studies")
        assert told.endswith("1 study is not counted, because some of the networks are no better than guessing.")
        assert sentences([study, study])[0].startswith("No calibrator is named: in all of the 2 studies")
        assert any("nothing is ranked" in note for note in tables.overview_of([study, better]).notes)

    def test_rows_without_diagrams_tell_nothing(self):
        runs = [stored(build({"dataset": "noisy-digits"}), {"vanilla": 0.3}, accuracy=0.1)]
        assert guessing(Study(tuple(runs))) is None
