"""Tables, comparisons, the paper's artifacts and the HTML page."""

from __future__ import annotations

import csv
import dataclasses
import html.parser
import io
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from tcil.experiments import checks, claims, collect, grids, paper, tables
from tcil.experiments.artifacts import ARTIFACTS, all_needs, artifacts_named
from tcil.experiments.cli import app
from tcil.experiments.evidence import Evidence
from tcil.experiments.grids import Cell, Grid, Row
from tcil.experiments.schedules import SCHEDULES, editions
from tcil.experiments.settings import build
from tcil.experiments.statistics import Spread, paired_difference

QUICK = ["--set", "epochs=1", "--set", "milestones=[]"]


def command(*words):
    outcome = CliRunner().invoke(app, list(map(str, words)))
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


def stored(settings, errors, accuracy=0.5):
    """A finished run of two tasks in which each calibrator has the same error after both."""
    row = {"block": "ranked", "accuracy": accuracy}
    rows = {name: row | {"title": name, "ece": error, "aece": error} for name, error in errors.items()}
    return collect.StoredRun(Path("none"), settings.model_dump(mode="json"), [{"calibrators": rows}] * 2, {})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two learners, two seeds, on noisy digits."""
    folder = tmp_path_factory.mktemp("runs")
    for learner in ("er", "wa"):
        command("run", "--learner", learner, "--seeds", "1,2", "--set", "epochs=3", "--set", "tasks=3", "--out", folder)
    return folder


class TestStatistics:
    def test_paired_difference_is_students(self):
        rng = np.random.default_rng(0)
        a, b = rng.normal(size=7), rng.normal(0.5, 1, size=7)
        ours, theirs = paired_difference(a, b), stats.ttest_rel(b, a).confidence_interval(0.95)
        assert ours.low == pytest.approx(theirs.low)
        assert ours.high == pytest.approx(theirs.high)

    def test_a_single_pair_has_no_interval(self):
        assert not paired_difference([1.0], [2.0]).excludes_zero

    @pytest.mark.parametrize(
        ("scores", "winner"),
        [
            ({"a": [1.0, 1.1, 0.9], "b": [5.0, 5.2, 4.9]}, "a"),
            ({"a": [1.0, 9.0, 0.9], "b": [5.0, 5.2, 4.9]}, None),
            ({"a": [1.0], "b": [5.0]}, None),
            ({"a": [1.0, 1.1, 0.9], "b": [5.0, 5.2, 4.9], "c": [9.0]}, "a"),  # c lost with the one seed it has
            ({"a": [1.0, 1.1, 0.9], "b": [5.0, 5.2, 4.9], "c": [0.5]}, None),  # c, with one seed, is lower
            ({"a": [1.0, 1.1, 0.9], "b": [5.0, 5.2, 4.9], "c": [1.2]}, "a"),
        ],
    )
    def test_bold_needs_more_than_the_least_mean(self, scores, winner):
        runs = [
            stored(build({"seed": seed}), {name: own[seed] for name, own in scores.items() if seed < len(own)})
            for seed in range(max(map(len, scores.values())))
        ]
        assert tables.best(collect.Study(tuple(runs)), list(scores), "ece") == winner


class TestGrids:
    grid = Grid(
        "A & B <i>",
        ("method", "ECE_%"),
        (
            Row("TS | <b>", (Cell(Spread.of([4.0, 6.0]), bold=True),), "ranked"),
            Row("oracle", (Cell(words="n/a"),), "oracle", apart=True),
        ),
        ("50 % note",),
    )

    def test_markdown(self):
        text = grids.markdown(self.grid)
        assert "| TS \\| <b> | **5.00 ± 1.00** |" in text
        assert "| *oracle* | n/a |" in text

    def test_latex_is_escaped(self):
        text = grids.latex(self.grid)
        assert r"A \& B" in text
        assert r"ECE\_\%" in text
        assert r"\textbf{5.00\,$\pm$\,1.00}" in text
        assert r"TS \textbar{} \textless{}b\textgreater{}" in text
        assert text.count(r"\midrule") == 2

    def test_latex_of_words_breaks_lines_and_pages(self):
        text = grids.latex(dataclasses.replace(self.grid, wordy=True))
        shares = [float(share) for share in re.findall(r"p\{\\dimexpr ([\d.]+)\\linewidth-2\\tabcolsep\\relax\}", text)]
        assert len(shares) == 2
        assert sum(shares) == pytest.approx(1, abs=0.002)
        assert text.count("{") == text.count("}")
        assert "tabular" not in text

    def test_csv_is_one_line_per_cell_of_any_table(self):
        lone = Grid("lone", ("", "diff", "of one seed"), (Row("T", (Cell(Spread.lone(-2.0)), Cell(Spread.of([3.0])))),))
        rows = list(csv.reader(io.StringIO(grids.comma_separated([self.grid, lone]))))
        assert rows[0] == ["table", "line", "block", "row", "column", "value", "std", "n", "bold", "note"]
        assert rows[1] == ["A & B <i>", "1", "ranked", "TS | <b>", "ECE_%", "5", "1", "2", "yes", ""]
        assert rows[2] == ["A & B <i>", "2", "oracle", "oracle", "ECE_%", "n/a", "", "", "", ""]
        assert [row[4:8] for row in rows[3:]] == [["diff", "-2", "", ""], ["of one seed", "3", "", "1"]]

    def test_html_is_escaped_and_has_headers(self):
        page = str(grids.html(self.grid))
        assert "<i>" not in page
        assert "TS | &lt;b&gt;" in page
        assert '<th scope="row">' in page
        assert '<tr class="apart rule">' in page
        assert "<strong>5.00 ± 1.00</strong>" in page


class TestCollect:
    def test_seeds_are_one_study(self, runs):
        found = collect.studies(collect.read_runs([runs]))
        sizes = {(s.settings["learner"], s.settings["validation"] > 0): len(s.runs) for s in found}
        assert sizes == {("er", True): 2, ("er", False): 2, ("wa", True): 2, ("wa", False): 2}

    def test_other_classes_are_another_study(self):
        plain = [stored(build({"seed": seed}), {"ts": 0.1}) for seed in (1, 2)]
        other = stored(build({"seed": 1, "class_order_seed": 7}), {"ts": 0.2})
        first, second = collect.studies([*plain, other])
        assert [len(first.runs), len(second.runs)] == [2, 1]
        assert [first.difference, second.difference] == ["", "class_order_seed 7"]
        assert len(collect.studies([plain[1], other])) == 2  # whatever else is there

    def test_titles_have_no_more_than_tells_studies_apart(self):
        settings = [{"preset": "cifar100-mini"}, {"preset": "cifar100-mini", "memory": 100}, {"preset": "cifar100"}]
        found = collect.studies(stored(build({"learner": "er", **one}), {"ts": 0.1}) for one in settings)
        assert [study.difference for study in found] == ["memory 400", "memory 100", ""]

    def test_kept_copies_say_the_same(self, runs, tmp_path):
        original = collect.read_runs([runs])
        collect.keep(original, tmp_path)
        again = collect.read_runs([tmp_path])
        for old, new in zip(original, again, strict=True):
            assert (old.tasks, old.settings, old.environment) == (new.tasks, new.settings, new.environment)

    def test_means_are_those_of_the_results(self, runs):
        run = next(r for r in collect.read_runs([runs]) if r.settings["validation"])
        expected = np.mean([task["calibrators"]["t-cil"]["ece"] for task in run.tasks])
        assert run.mean("t-cil", "ece") == pytest.approx(expected)
        assert run.values("t-cil", "ece_predicted_old")[0] is None

    @pytest.mark.parametrize("content", ["{", "[]", '{"settings": {}}'])
    def test_damaged_results_are_named(self, tmp_path, content):
        (tmp_path / "results.json").write_text(content)
        with pytest.raises(ValueError, match=r"results\.json, which cannot be read"):
            collect.read_runs([tmp_path])

    def test_an_empty_folder_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match=r"runs: got .* without a finished run"):
            collect.read_runs([tmp_path])


class TestReport:
    def test_command_writes_every_form(self, runs, tmp_path):
        output = command("report", runs, "--out", tmp_path / "report", "--keep", tmp_path / "kept")
        assert "T-CIL" in output
        for name in ("report.html", "tables.md", "tables.tex", "tables.csv"):
            assert (tmp_path / "report" / name).stat().st_size > 500
        assert len(list((tmp_path / "kept").glob("*.json"))) == 8

    def test_page_is_self_contained_and_accessible(self, runs, tmp_path):
        command("report", runs, "--out", tmp_path)
        page = (tmp_path / "report.html").read_text()
        outside = re.findall(r"""(?:src|href)=["'](?!#|data:)[^"']*|https?:|url\((?!#)""", page)
        assert outside == []
        checker = Checker()
        checker.feed(page)
        assert checker.figures >= 6
        assert checker.unnamed_pictures == 0
        assert checker.tables > 4
        assert checker.tables_without_headers == 0
        ids = re.findall(r'\bid="([^"]+)"', page)
        assert len(ids) == len(set(ids))

    def test_the_same_runs_give_the_same_page(self, runs, tmp_path):
        for name in ("a", "b"):
            command("report", runs, "--out", tmp_path / name)
        assert (tmp_path / "a/report.html").read_bytes() == (tmp_path / "b/report.html").read_bytes()

    def test_studies_are_told_apart(self, runs, tmp_path):
        """Two learning rates: other titles, other anchors, other columns."""
        own = [r for r in collect.read_runs([runs]) if r.settings["learner"] == "er" and r.settings["validation"]]
        collect.keep(own, tmp_path / "a")
        for run in own:
            run.settings["lr"] = 0.05
        collect.keep([dataclasses.replace(r, path=r.path.with_name(r.path.name + "b")) for r in own], tmp_path / "a")
        titles = [study.title for study in collect.studies(collect.read_runs([tmp_path / "a"]))]
        assert sorted(titles) == ["ER on noisy-digits, lr 0.05", "ER on noisy-digits, lr 0.1"]

    def test_a_run_found_twice_counts_once(self, runs, tmp_path):
        original = collect.read_runs([runs])
        for run in original:
            for task in run.tasks:
                task["calibrators"] = {name: row for name, row in task["calibrators"].items() if name == "vanilla"}
        collect.keep(original, tmp_path)
        both = collect.read_runs([tmp_path, runs])
        assert len(both) == len(original)
        assert all("ts" in r.titles() for r in both if r.settings["validation"])

    def test_a_run_with_few_calibrators_is_not_finished(self, tmp_path):
        places = ["--schedule", "mini", "--out", tmp_path / "runs", "--report", tmp_path / "report"]
        command("run", "--calibrators", "vanilla", "--set", "epochs=1", "--no-full-data", "--out", tmp_path / "runs")
        output = command("reproduce", "policies", *places, "--set", "epochs=1", "--dry-run")
        assert "0 trainings to run" in output
        assert "to calibrate" in output
        command("reproduce", "claims", *places, "--set", "epochs=1", "--render")

    def test_hostile_names_are_escaped(self, runs, tmp_path):
        (first, *_) = collect.read_runs([runs])
        record = {"settings": {**first.settings, "learner": "<script>alert(1)</script>"}, "tasks": first.tasks}
        record["tasks"][0]["calibrators"]["vanilla"]["title"] = "<img src=x onerror=alert(1)>"
        (tmp_path / "results.json").write_text(json.dumps(record))
        command("report", tmp_path, "--out", tmp_path / "out")
        page = (tmp_path / "out/report.html").read_text()
        assert "<script" not in page.lower()
        assert "<img" not in page

    def test_every_string_of_a_run_is_escaped(self, runs, tmp_path):
        """Names, titles, settings, the environment and reasons: whatever a folder says, it is text."""
        evil = "<script>alert(1)</script>\"'><svg onload=x>"
        (first, *_) = collect.read_runs([runs])
        record = json.loads(json.dumps({"settings": first.settings, "tasks": first.tasks}))
        record["settings"] |= {"dataset": evil, "learner": evil, "network": evil, evil: evil}
        record["settings"]["learner_options"] = {evil: evil}
        record["environment"] = {"torch": evil, evil: {evil: [evil]}}
        for task in record["tasks"]:
            rows = task["calibrators"]
            for row in rows.values():
                row["title"] = evil
            rows["ts"] = {"title": evil, "block": evil, "not_applicable": evil}
            rows[evil] = {**rows["vanilla"], "block": evil}
        folder = tmp_path / evil.replace("/", "")
        folder.mkdir()
        (folder / "results.json").write_text(json.dumps(record))
        command("report", folder, "--out", tmp_path / "out")
        page = (tmp_path / "out/report.html").read_text()
        assert "&lt;script&gt;" in page
        assert "<script" not in page.lower()
        assert "<svg onload" not in page
        assert "\"'><" not in page

    @pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
    def test_in_a_real_browser(self, runs, tmp_path):
        command("report", runs, "--out", tmp_path)
        flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
        address = (tmp_path / "report.html").as_uri()
        words = ["chromium", *flags, "--virtual-time-budget=2000", "--dump-dom", address]
        dom = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout
        assert dom.count("<svg") >= 6
        assert "Side by side" in dom
        shot = tmp_path / "page.png"
        words = ["chromium", *flags, "--window-size=1280,7000", f"--screenshot={shot}", address]
        subprocess.run(words, capture_output=True, timeout=120, check=True)
        from PIL import Image

        pixels = np.asarray(Image.open(shot).convert("RGB"), dtype=int)
        coloured = (pixels.max(axis=2) - pixels.min(axis=2) > 60).mean()
        assert coloured > 0.003  # the pictures are really drawn


class Checker(html.parser.HTMLParser):
    """Counts what accessibility asks for."""

    def __init__(self):
        super().__init__()
        self.figures = self.unnamed_pictures = self.tables = self.tables_without_headers = 0
        self._headers = 0

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if tag == "svg":
            self.figures += 1
            self.unnamed_pictures += not (values.get("role") == "img" and len(values.get("aria-label") or "") > 20)
        elif tag == "table":
            self.tables += 1
            self._headers = 0
        elif tag == "th" and values.get("scope"):
            self._headers += 1

    def handle_endtag(self, tag):
        if tag == "table":
            self.tables_without_headers += self._headers == 0


def test_what_was_odd_is_said(runs):
    study = next(s for s in collect.studies(collect.read_runs([runs])) if s.settings["validation"])
    first = study.runs[0].tasks[0]["calibrators"]
    first["t-cil"]["result"]["verdicts"] = ["target_below_range"]
    first["perturb-ts"] = {"title": "PerturbTS", "block": "ranked", "not_applicable": "no noise; the nearest was 3"}
    notes = tables.summary(study).notes
    assert any(note.startswith("T-CIL: ") and "tasks)." in note for note in notes)
    assert any(note.startswith("PerturbTS: n/a: no noise (") for note in notes)


class TestCompare:
    def test_differences_are_paired(self, runs, tmp_path):
        first, second = tmp_path / "a", tmp_path / "b"
        own = [r for r in collect.read_runs([runs]) if r.settings["learner"] == "er" and r.settings["validation"]]
        collect.keep(own, first)
        for run in own:
            for task in run.tasks:
                task["calibrators"]["ts"]["ece"] += 0.01 * run.seed
        collect.keep(own, second)
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
        a = [stored(build({"seed": s, "memory": m}), {"ts": 0.1, "irm": 0.2}) for s in (1, 2) for m in (100, 60)]
        b = [stored(build({"seed": s, "memory": m}), {"ts": 0.1 + s / 100}) for s in (1, 2, 3) for m in (100, 60)]
        grid = tables.comparison(a, b, "ece")
        assert {row.block for row in grid.rows} == {"ER on noisy-digits, memory 100", "ER on noisy-digits, memory 60"}
        found = {row.label: [cell.text() for cell in row.cells] for row in grid.rows}
        assert found["ER on noisy-digits, memory 60: irm"] == ["20.00 ± 0.00", "not run", "", "", "", ""]
        assert found["ER on noisy-digits, memory 60: ts"][2:] == ["+1.50", "-4.85", "+7.85", "2"]
        assert "Left out, without a run to pair with: 0 of A, 2 of B." in grid.notes

    def test_both_sides_are_over_the_same_pairs(self):
        a = [stored(build({"seed": s}), {"ts": s / 100}) for s in (1, 2, 3)]
        b = [stored(build({"seed": s}), {"ts": s / 100} if s > 1 else {"irm": 0.1}) for s in (1, 2, 3)]
        (row,) = [row for row in tables.comparison(a, b, "ece").rows if row.label.endswith(": ts")]
        assert [cell.text() for cell in row.cells] == ["2.50 ± 0.50", "2.50 ± 0.50", "+0.00", "+0.00", "+0.00", "2"]

    def test_imported_runs_pair_wherever_they_lie(self):
        run = stored(build({"seed": 1}), {"ts": 0.1})
        settings = {"dataset": "mine", "learner": "own", "imported": True}
        a, b = (dataclasses.replace(run, path=Path(name), settings=settings) for name in ("a", "b"))
        (row,) = tables.comparison([a], [b], "ece").rows
        assert row.cells[-1].words == "1"
        assert [study.title for study in collect.studies([a, b])] == ["OWN on mine, a", "OWN on mine, b"]

    def test_nothing_to_pair(self, runs, tmp_path):
        own = [r for r in collect.read_runs([runs]) if r.settings["learner"] == "er"]
        other = [r for r in collect.read_runs([runs]) if r.settings["learner"] == "wa"]
        with pytest.raises(ValueError, match="B: got no run"):
            tables.comparison(own, other, "ece")

    def test_a_set_with_itself(self, runs):
        own = collect.read_runs([runs])
        rows = [row for row in tables.comparison(own, own, "ece").rows if row.cells[0].words != "n/a"]
        assert rows
        for row in rows:
            assert [cell.text() for cell in row.cells[2:]] == ["+0.00", "+0.00", "+0.00", "2"]

    def test_what_changed_is_named_and_paired(self, runs, tmp_path):
        command(
            "run", "--seeds", "1,2", "--set", "epochs=3", "--set", "tasks=3", "--set", "memory=60", "--out", tmp_path
        )
        old = [r for r in collect.read_runs([runs]) if r.settings["learner"] == "er"]
        grid = tables.comparison(old, collect.read_runs([tmp_path]), "ece")
        assert "memory 100 in A, 60 in B" in grid.notes[1]
        assert {row.cells[-1].words for row in grid.rows if row.cells[2].spread} == {"2"}


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

    def test_short_is_three_seeds_and_one_full_size(self):
        needs = all_needs(list(ARTIFACTS.values()), editions("short"))
        full = [n.settings for n in needs if n.settings.network == "resnet32"]
        assert [(s.learner, s.epochs, s.seed, s.memory, s.tasks) for s in full] == [("er", 10, 1, 2000, 10)]
        assert {n.settings.seed for n in needs if n.settings.network == "small_resnet"} == {1, 2, 3}

    def test_unknown_names(self):
        with pytest.raises(ValueError, match="Did you mean 'baselines'"):
            artifacts_named("baseline")
        with pytest.raises(ValueError, match="schedule: got 'long'"):
            editions("long")

    def test_every_table_of_the_paper_has_its_artifact(self):
        assert {row.table for row in paper.rows()} <= set(ARTIFACTS)
        assert set(SCHEDULES) == {"mini", "short", "paper"}

    def test_nothing_is_filled_in(self):
        evidence = Evidence(editions("paper"), [])
        for name in ("baselines", "grid", "validation", "tasks20"):
            section = ARTIFACTS[name].render(evidence)
            assert not section.grids
            for grid in section.more["Not run: the paper's numbers alone"]:
                for row in grid.rows:
                    assert [cell.words for cell in row.cells[::3]] == ["not run"] * (len(row.cells) // 3)
        claims = ARTIFACTS["claims"].render(evidence).grids[0]
        ours = [row for row in claims.rows if row.cells[1].words != "the paper's own table"]
        assert {row.cells[2].words for row in ours} == {"not run"}
        assert {row.cells[1].words for row in ours} == {"none"}

    def test_what_the_paper_contradicts_stands_at_the_table_and_at_the_claim(self):
        evidence = Evidence(editions("paper"), [])
        (table,) = [g for g in ARTIFACTS["compatibility"].render(evidence).tables if "CIFAR-100" in g.title]
        assert any(note.startswith("[4] DER 'exhibits the highest") for note in table.notes)
        claim = ARTIFACTS["claims"].render(evidence).grids[0]
        (row,) = [row for row in claim.rows if row.label.startswith("DER has the highest calibration error")]
        assert row.label.endswith(" [4]")
        assert any(note.startswith("[4] DER") for note in claim.notes)
        assert row.cells[0].words.endswith("(Compatibility with CIL Techniques, line 344)")
        tables_and_claims = {f"{r.table}:{r.dataset}" for r in paper.rows()} | set(paper.claims())
        assert {about for one in paper._document()["contradictions"] for about in one["about"]} <= tables_and_claims

    def test_figures_give_their_values(self):
        """Every picture of the paper's figures has the table of what it shows."""
        kept = Path(__file__).parents[1] / "docs/results/runs"
        evidence = Evidence(editions("short"), collect.read_runs([kept]))
        for artifact in ARTIFACTS.values():
            section = artifact.render(evidence)
            assert all(picture.values is not None and picture.values.rows for picture in section.pictures)
            assert section.tables
        (first, *_) = ARTIFACTS["temperature-bias"].render(evidence).tables
        study = evidence.study(evidence.editions[0], "cifar100", "er")
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
        evidence = Evidence([edition], runs)
        (grid,) = ARTIFACTS["baselines"].render(evidence).grids
        rows = {row.label: row.cells[3] for row in grid.rows}
        assert grid.title.endswith("n = 3")
        assert rows["Vanilla (all data)"].text() == "30.00 (n = 1)"
        assert rows["TS"].text() == "22.00 ± 0.82"
        assert rows["T-CIL"].bold
        assert rows["IRM"].text() == "not run"
        assert sum(note.startswith("Bold") for note in grid.notes) == 1
        (one,) = ARTIFACTS["baselines"].render(Evidence([edition], runs[:1])).grids
        assert not any(note.startswith("Bold") for note in one.notes)
        side = {row.label: row.cells[0].text() for row in tables.side_by_side([collect.Study(tuple(runs))], "ece").rows}
        assert side == {"vanilla-all-data": "30.00 (n = 1)", "ts": "22.00 ± 0.82", "t-cil": "7.00 ± 0.82"}
        answer = checks.CHECKS["accuracy_hardly_changes"].ask(evidence, edition)
        assert (answer.ours, answer.n) == ("ER on CIFAR-100 +0.00 points", 1)  # seed 1 alone has both
        assert answer.verdict == "in part"

    def test_what_is_compared_has_the_same_seeds(self):
        (edition, *_) = editions("short")
        runs = [stored(edition.settings("cifar100", "er", seed), {"vanilla": 0.3}, 0.5 + seed / 10) for seed in (1, 2)]
        runs.append(stored(edition.settings("cifar100", "er", 2, reserve=0.25), {"vanilla": 0.3}, 0.6))
        answer = checks.CHECKS["reserve_costs_accuracy"].ask(Evidence([edition], runs), edition)
        assert (answer.ours, answer.n) == ("60.00 % with the reserve, 70.00 % without", 1)
        assert checks.CHECKS["reserve_costs_accuracy"].ask(Evidence([edition], runs[::2]), edition) is None

    def test_learners_without_a_common_seed_are_not_compared(self):
        (edition, *_) = editions("short")
        runs = [
            stored(edition.settings("cifar100", learner, seed), {"t-cil": 0.1})
            for learner, seed in (("er", 1), ("wa", 2))
        ]
        assert checks.CHECKS["wa_on_tiny_is_the_exception"].ask(Evidence([edition], runs), edition) is None

    @pytest.mark.parametrize(
        ("changes", "verdict"), [((-0.1, -0.11), "in part"), ((-0.1, 0.12), "undecided"), ((0.1, 0.11), "no")]
    )
    def test_undecided_where_an_interval_includes_zero(self, changes, verdict):
        (edition, *_) = editions("short")
        runs = [
            stored(
                edition.settings("cifar100", "er", seed, memory=500, validation=100),
                {"vanilla": 0.3, "t-cil": 0.3 + change},
            )
            for seed, change in enumerate(changes, start=1)
        ]
        assert checks.CHECKS["memory_sizes"].ask(Evidence([edition], runs), edition).verdict == verdict

    @pytest.mark.parametrize(("tcil", "verdict"), [(0.2, "in part"), (0.4, "no"), (None, "no")])
    def test_verdicts(self, tcil, verdict):
        (edition, *_) = editions("short")
        errors = {"vanilla": 0.3} | ({"t-cil": tcil} if tcil else {})  # without an answer nothing holds
        runs = [stored(edition.settings("cifar100", learner, 1), errors) for learner in ("er", "eeil", "wa", "der")]
        answer = checks.CHECKS["wa_on_tiny_is_the_exception"].ask(Evidence([edition], runs), edition)
        assert answer.verdict == verdict

    def test_every_claim_says_by_what_rule_it_holds(self, tmp_path):
        kept = Path(__file__).parents[1] / "docs/results/runs"
        grid = claims.claims_grid(Evidence(editions("short"), collect.read_runs([kept])))
        told = {column: [row.cells[place].words for row in grid.rows] for place, column in enumerate(grid.columns[1:])}
        assert set(told["holds"]) == set(checks.VERDICTS)
        assert all(told["counts as holding if"])
        ours = [k for k, where in enumerate(told["our runs"]) if where != "the paper's own table"]
        assert all(
            (told["seeds"][k] == "") == (told["ours"][k] == "not run") == (told["holds"][k] == "-") for k in ours
        )

    @pytest.mark.training
    def test_an_all_data_training_that_is_there_is_not_planned_again(self, tmp_path):
        places = ["--schedule", "mini", "--out", tmp_path, *QUICK]
        command("run", "--seeds", "1", *QUICK, "--no-full-data", "--out", tmp_path)
        planned = command("reproduce", "baselines", *places, "--dry-run")
        assert "to calibrate" in planned
        assert "1 training to run" in planned  # the one on all the data
        assert "is not counted" in planned
        command("run", "--seeds", "1", *QUICK, "--set", "validation=0", "--set", "validation_pool=0", "--out", tmp_path)
        assert "0 trainings to run" in command("reproduce", "baselines", *places, "--dry-run")

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
    def test_one_table_on_digits(self, tmp_path):
        _, page = self.reproduced("baselines", tmp_path)
        assert str(grids.escape(ARTIFACTS["baselines"].title)) in page

    @pytest.mark.slow
    @pytest.mark.timeout(900)
    def test_everything_on_digits(self, tmp_path):
        output, page = self.reproduced("all", tmp_path)
        assert "holds" in output
        for artifact in ARTIFACTS.values():
            assert str(grids.escape(artifact.title)) in page
        assert page.count("<svg") == 8 + 4 * 6  # the paper's figures, and of each learner's runs all there is
        assert "Reliability after the last task" in page
        written = list(csv.DictReader((tmp_path / "report/tables.csv").read_text().splitlines()))
        assert any(row["table"].startswith("Baselines, ER, Tiny-ImageNet; not run") for row in written)
        assert any(row["table"].startswith("ECE after each task, %; CIFAR-100, ours: noisy digits") for row in written)
