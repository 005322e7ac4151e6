"""What our runs say to the claims of the paper's text."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from stored_runs import stored
from tcil.experiments.reproduction import checks, claims, paper
from tcil.experiments.reproduction.artifacts import ARTIFACTS
from tcil.experiments.reproduction.checks import exemplars
from tcil.experiments.reproduction.finished import FinishedRuns
from tcil.experiments.reproduction.schedules import Variation, editions


class TestClaims:
    """What our runs say to the claims of the paper's text."""

    def test_what_the_paper_contradicts_stands_at_the_table_and_at_the_claim(self):
        finished = FinishedRuns(editions("paper"), [])
        (table,) = [g for g in ARTIFACTS["compatibility"].render(finished).tables if "CIFAR-100" in g.title]
        assert any(note.startswith("[4] DER 'exhibits the highest") for note in table.notes)
        claim = ARTIFACTS["claims"].render(finished).grids[0]
        (row,) = [row for row in claim.rows if row.label.startswith("DER has the highest calibration error")]
        assert row.label.endswith(" [4]")
        assert any(note.startswith("[4] DER") for note in claim.notes)
        assert row.cells[0].words.endswith("(Compatibility with CIL Techniques, line 344)")
        tables_and_claims = {f"{r.table}:{r.dataset}" for r in paper.rows()} | set(paper.claims())
        assert {about for one in paper._document().contradictions for about in one.about} <= tables_and_claims

    def test_what_is_compared_has_the_same_seeds(self):
        (edition, *_) = editions("short")
        runs = [stored(edition.settings("cifar100", "er", seed), {"vanilla": 0.3}, 0.5 + seed / 10) for seed in (1, 2)]
        runs.append(stored(edition.settings("cifar100", "er", 2, Variation(reserve=0.25)), {"vanilla": 0.3}, 0.6))
        answer = checks.CHECKS["reserve_costs_accuracy"].ask(FinishedRuns([edition], runs), edition)
        assert (answer.ours, answer.n) == ("60.00 % with the reserve, 70.00 % without", 1)
        assert checks.CHECKS["reserve_costs_accuracy"].ask(FinishedRuns([edition], runs[::2]), edition) is None

    def test_learners_without_a_common_seed_are_not_compared(self):
        (edition, *_) = editions("short")
        runs = [
            stored(edition.settings("cifar100", learner, seed), {"t-cil": 0.1})
            for learner, seed in (("er", 1), ("wa", 2))
        ]
        assert checks.CHECKS["wa_on_tiny_is_the_exception"].ask(FinishedRuns([edition], runs), edition) is None

    @pytest.mark.parametrize(
        ("changes", "agreement"), [((-0.1, -0.11), "in part"), ((-0.1, 0.12), "undecided"), ((0.1, 0.11), "no")]
    )
    def test_undecided_where_an_interval_includes_zero(self, changes, agreement):
        (edition, *_) = editions("short")
        runs = [
            stored(
                edition.settings("cifar100", "er", seed, Variation(memory=500, validation=100)),
                {"vanilla": 0.3, "t-cil": 0.3 + change},
            )
            for seed, change in enumerate(changes, start=1)
        ]
        assert checks.CHECKS["memory_sizes"].ask(FinishedRuns([edition], runs), edition).agreement == agreement

    @pytest.mark.parametrize(
        ("claim", "errors", "agreement"),
        [
            ("near_optimal_ts", {"t-cil": 0.03, "optimal-ts": 0.02}, "in part"),
            ("near_optimal_ts", {"t-cil": 0.05, "optimal-ts": 0.02}, "no"),
            ("near_optimal_ts", {"optimal-ts": 0.02}, "no"),
            ("optimal_ts_is_best", {"ts": 0.03, "optimal-ts": 0.02}, "in part"),
            ("optimal_ts_is_best", {"ts": 0.01, "optimal-ts": 0.02}, "no"),
            ("optimal_ts_is_best", {"ts": 0.01}, "undecided"),
        ],
    )
    def test_nothing_holds_by_a_missing_answer(self, claim, errors, agreement):
        (edition, *_) = editions("short")
        runs = [stored(edition.settings("cifar100", "er", 1), {"vanilla": 0.3, **errors})]
        assert checks.CHECKS[claim].ask(FinishedRuns([edition], runs), edition).agreement == agreement

    @pytest.mark.parametrize(
        ("curve", "holds"), [((1.0, 2.0, 3.0), True), ((1.0, 2.0, None, None), True), ((1.0, 2.0, None, 3.0), False)]
    )
    def test_an_infinite_temperature_is_part_of_the_curve(self, monkeypatch, curve, holds):
        """It is stored as null."""
        task = SimpleNamespace(curve=SimpleNamespace(temperatures=curve))
        monkeypatch.setattr(exemplars, "analyses_of", lambda *args: [SimpleNamespace(tasks=[task])])
        answer = checks.CHECKS["magnitude_raises_temperature"].ask(FinishedRuns([], []), editions("short")[0])
        assert answer.holds is holds

    @pytest.mark.parametrize(("tcil", "agreement"), [(0.2, "in part"), (0.4, "no"), (None, "no")])
    def test_agreement(self, tcil, agreement):
        (edition, *_) = editions("short")
        errors = {"vanilla": 0.3} | ({"t-cil": tcil} if tcil else {})  # without an answer nothing holds
        runs = [stored(edition.settings("cifar100", learner, 1), errors) for learner in ("er", "eeil", "wa", "der")]
        answer = checks.CHECKS["wa_on_tiny_is_the_exception"].ask(FinishedRuns([edition], runs), edition)
        assert answer.agreement == agreement

    def test_every_claim_says_by_what_rule_it_holds(self, kept_runs):
        grid = claims.claims_grid(FinishedRuns(editions("short-0.2"), kept_runs))
        told = {column: [row.cells[place].words for row in grid.rows] for place, column in enumerate(grid.columns[1:])}
        assert set(told["holds"]) == set(checks.Agreement)
        assert all(told["counts as holding if"])
        ours = [k for k, where in enumerate(told["our runs"]) if where != "the paper's own table"]
        assert all(
            (told["seeds"][k] == "") == (told["ours"][k] == "not run") == (told["holds"][k] == "-") for k in ours
        )
