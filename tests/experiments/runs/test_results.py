"""Typed results: what is written is read back the same, older forms too, and without torch."""

from __future__ import annotations

import gzip
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from conftest import ROOT
from tcil.calibration.perturbation import DirectionPolicy
from tcil.experiments.runs.analysed import POLICIES
from tcil.experiments.runs.catalogue import CATALOGUE, learner_title
from tcil.experiments.runs.entries import CALIBRATORS, ON_FEATURES, NotApplicable
from tcil.experiments.runs.reasons import NoAnswer, NotApplicableReason, in_common
from tcil.experiments.runs.records import parse
from tcil.experiments.runs.results import (
    VERSION,
    CalibratorRow,
    Environment,
    FitSummary,
    RunResult,
    TaskResult,
    TraceStep,
)
from tcil.experiments.runs.store import RunFolder, StoredRun
from tcil.foundation.checksums import Damaged, seal_json
from tcil.foundation.options import Verdict
from tcil.incremental.learners import LEARNERS

FIGURES = {
    "accuracy": 0.5, "ece": 0.1, "aece": 0.1, "noise_floor": 0.01, "ece_predicted_old": None, "ece_predicted_new": 0.1,
}  # fmt: skip
MISSED = (
    "PerturbedTemperatureScaling has no temperature (n/a): no noise up to 100 brings accuracy to 0.235;"
    " the nearest was 0.913 at noise 3.16e-05"
)


def row(title="TS", **more):
    return {"title": title, "block": "ranked", **FIGURES, **more}


def without(sentence):
    return {"title": "TS", "block": "ranked", "not_applicable": sentence}


def task(number=0, **rows):
    return {"task": number, "seen": 2, "calibrators": rows or {"ts": row()}, "history": {"ts": {"T": 1.5}}}


class TestOlderForms:
    @pytest.mark.parametrize("file", sorted((ROOT / "docs" / "results" / "runs").glob("*.json.gz"))[::8], ids=str)
    def test_stored_results_are_written_again_as_they_were(self, file):
        """Also from the first version, which had no number, and sentences instead of reasons."""
        stored = json.loads(gzip.decompress(file.read_bytes()))
        result = parse(RunResult, stored)
        assert json.dumps(result.record(), sort_keys=True) == json.dumps(stored, sort_keys=True)
        assert stored.pop("version") == VERSION
        for task in stored["tasks"]:
            assert task.pop("version") == VERSION
            for row in task["calibrators"].values():
                if "not_applicable" in row:
                    reason = NoAnswer(**row["not_applicable"])
                    assert reason.reason is not NotApplicableReason.OTHER
                    lead = (
                        MISSED.partition(": ")[0] + ": " if reason.reason is NotApplicableReason.NOT_REACHABLE else ""
                    )
                    row["not_applicable"] = lead + reason.sentence
        assert parse(RunResult, stored) == result

    def test_sentences_become_reasons(self):
        rows = {"ts": without("needs a validation set"), "perturb-ts": without(MISSED), "mine": without("no (2; 3)")}
        found = parse(TaskResult, task(**rows)).calibrators
        assert found["ts"].not_applicable == NoAnswer(reason=NotApplicableReason.NEEDS_VALIDATION)
        missed = found["perturb-ts"].not_applicable
        assert missed.reason is NotApplicableReason.NOT_REACHABLE
        assert (missed.max_noise, missed.target_accuracy, missed.accuracy, missed.noise) == (100, 0.235, 0.913, 3.16e-5)
        assert MISSED.endswith(missed.sentence)
        assert found["mine"].not_applicable == NoAnswer(reason=NotApplicableReason.OTHER, words="no (2; 3)")

    def test_a_sentence_in_the_present_version_is_refused(self):
        with pytest.raises(Damaged, match=r"calibrators\.ts\.not_applicable: got 'needs --reserve'"):
            parse(TaskResult, {**task(ts=without("needs --reserve")), "version": VERSION})

    @pytest.mark.parametrize("version", [0, -1, "2", None, True, 1.0])
    def test_what_is_no_version(self, version):
        with pytest.raises(Damaged, match="version is"):
            parse(TaskResult, {**task(), "version": version})

    def test_a_later_version_is_refused_and_stays(self, tmp_path):
        """It is not damaged: computing it anew would lose it."""
        (tmp_path / "task-00").mkdir()
        later = {**task(), "version": VERSION + 1, "told": "otherwise"}
        for name in ("results.json", "task-00/results.json"):
            (tmp_path / name).write_bytes(seal_json(later, name))
        store = RunFolder(tmp_path)
        for read in (store.read_results, lambda: store.read_task_result(0)):
            with pytest.raises(
                ValueError, match=f"of version {VERSION + 1}; expected results of version 1 to {VERSION}"
            ):
                read()


class TestRecords:
    def test_read_back_the_same_with_what_is_not_described(self, tmp_path):
        given = {**task(), "seconds": {"new": [1, "x", None]}}
        given["calibrators"]["ts"] |= {"temperature": 2, "result": {"verdict": "ok", "gradient": "nan", "n": 3}}
        result, store = parse(TaskResult, given), RunFolder(tmp_path)
        store.write_task_result(result)
        assert store.read_task_result(0) == result
        written = store.peek_json("task-00/results.json")
        assert written == {**given, "version": VERSION}

    def test_frozen(self):
        result = parse(TaskResult, task())
        with pytest.raises(ValidationError, match="frozen"):
            result.seen = 3
        with pytest.raises(ValidationError, match="frozen"):
            result.calibrators["ts"].ece = 0.0

    def test_what_a_row_tells(self):
        fit = {"verdicts": ["at_bound", "single_exemplar"], "trace": [{"magnitude": 0.1, "temperature": "inf"}]}
        found = parse(CalibratorRow, row(temperature=2.0, result=fit))
        assert found.answered
        assert found.verdicts == (Verdict.AT_BOUND, Verdict.SINGLE_EXEMPLAR)
        assert found.metric("ece") == 0.1
        assert not found.up_to_date  # an older row, without bins
        assert found.result.trace == (TraceStep(magnitude=0.1, temperature=math.inf),)
        assert found.record()["result"] == fit
        assert not parse(CalibratorRow, {**without({"reason": "needs_reserve"})}).answered
        assert (FitSummary(verdict="all_correct").all_verdicts, FitSummary().all_verdicts) == (
            (Verdict.ALL_CORRECT,),
            (),
        )

    def test_rows_are_renewed_added_and_filled_in(self):
        first = parse(TaskResult, {**task(ts=row(ece=0.2), ets=row("ETS")), "note": "first"})
        second = parse(TaskResult, {**task(ts=row(ece=0.3), irm=row("IRM")), "history": {"irm": {}}, "seen": 3})
        renewed = first.renewed(second)
        assert {name: found.ece for name, found in renewed.calibrators.items()} == {"ts": 0.3, "ets": 0.1, "irm": 0.1}
        assert (set(renewed.history), renewed.seen, renewed.record()["note"]) == ({"ts", "irm"}, 3, "first")
        filled = first.filled_from(second)
        assert {name: found.ece for name, found in filled.calibrators.items()} == {"ts": 0.2, "ets": 0.1, "irm": 0.1}
        assert (set(filled.history), filled.seen, filled.record()["note"]) == ({"ts"}, 2, "first")
        more = first.with_row("other", first.calibrators["ts"].titled("Other"))
        assert more.calibrators["other"].title == "Other"
        assert set(first.calibrators) == {"ts", "ets"}

    def test_means_over_tasks(self):
        settings = {"dataset": "digits", "learner": "er", "tasks": 2}
        tasks = [task(0, ts=row(ece=0.2)), task(1, ts=row(ece=0.4, ece_predicted_old=0.3), irm=row("IRM"))]
        result = parse(RunResult, {"settings": settings, "tasks": tasks})
        assert result.values("ts", "ece") == [0.2, 0.4]
        assert result.mean("ts", "ece") == pytest.approx(0.3)
        assert result.mean("ts", "ece_predicted_old") == 0.3  # no class is old after the first task
        assert (result.mean("irm", "ece"), result.values("irm", "ece")) == (None, [None, 0.1])
        with pytest.raises(AttributeError):
            result.mean("ts", "eec")

    def test_seconds_add_up(self):
        noted = Environment(seconds={"task-00": {"training": 1.25}})
        noted = noted.timed("task-00", "training", 0.5).timed("task-01", "calibration", 2.00049)
        assert noted.seconds == {"task-00": {"training": 1.75}, "task-01": {"calibration": 2.0}}


class TestReasons:
    @pytest.mark.parametrize("reason", NotApplicableReason)
    def test_every_reason_has_a_sentence(self, reason):
        told = {"max_noise": 100.0, "target_accuracy": 0.5, "accuracy": 0.75, "noise": 0.125, "words": "so {it} is"}
        sentence = NoAnswer(reason=reason, **told).sentence
        assert sentence
        assert NoAnswer.of_sentence(sentence).reason is reason

    def test_what_a_reason_tells_must_be_there(self):
        with pytest.raises(ValidationError, match="max_noise is missing"):
            NoAnswer(reason="not_reachable", target_accuracy=0.5)
        with pytest.raises(ValidationError, match="words is missing"):
            NoAnswer(reason="other")

    def test_in_common(self):
        told = {"reason": "not_reachable", "max_noise": 100.0, "accuracy": 0.9, "noise": 0.0}
        levels = [NoAnswer(**told, target_accuracy=level) for level in (0.9, 0.25, 0.1)]
        assert in_common(levels) == "no noise up to 100 brings accuracy to 0.100 to 0.900"
        assert in_common(levels[:1]) == "no noise up to 100 brings accuracy to 0.900"
        assert in_common([NoAnswer(reason="needs_reserve")] * 2) == "needs --reserve"

    def test_a_users_own_words(self):
        assert NotApplicable("the moon is wrong").answer.sentence == "the moon is wrong"
        assert NotApplicable(NotApplicableReason.NEEDS_RESERVE).answer.reason is NotApplicableReason.NEEDS_RESERVE


def test_the_catalogue_is_that_of_the_calibrators():
    assert list(CALIBRATORS) == [name for name in CATALOGUE if name not in ON_FEATURES]
    assert set(ON_FEATURES) == set(CATALOGUE) - set(CALIBRATORS)


def test_an_analysis_compares_all_policies():
    assert set(POLICIES) == set(map(str, DirectionPolicy))


@pytest.mark.processes
def test_reading_results_imports_no_torch(tmp_path):
    """Nor does anything else that takes seconds to start."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tcil.experiments.reporting.collect import keep, read_runs, studies\n"
        f"runs = read_runs([Path({str(ROOT / 'docs' / 'results' / 'full-size')!r})])\n"
        "assert studies(runs)[0].means('t-cil', 'ece')[0] > 0\n"
        f"keep(runs, Path({str(tmp_path)!r}))\n"
        "sys.exit(', '.join({'torch', 'scipy', 'matplotlib'} & set(sys.modules)) or 0)\n"
    )
    outcome = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (outcome.returncode, outcome.stderr.strip()) == (0, "")
    assert list(tmp_path.glob("*.json"))


class TestTitlesOfLearners:
    @pytest.mark.parametrize("name", LEARNERS)
    def test_older_results_are_called_as_new_ones(self, name):
        """Readers of results have no torch, and so no classes: the title that they know is that of the class."""
        assert learner_title(name) == LEARNERS[name].title

    def test_the_stored_title_counts(self):
        settings = {"dataset": "digits", "learner": "package.module:mine", "tasks": 1}
        whole = {"settings": settings, "tasks": [task()]}
        older, newer = (parse(RunResult, {**whole, **more}) for more in ({}, {"learner_title": "My own"}))
        assert [StoredRun(Path("none"), one).learner for one in (older, newer)] == ["MINE", "My own"]
        assert newer.record()["learner_title"] == "My own"
        assert "learner_title" not in older.record()
