"""The report's files: self-contained, accessible, escaped, and drawn without torch."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from conftest import ROOT
from stored_runs import command, full_run, stored, with_rows
from tcil.experiments.cli.app import app
from tcil.experiments.config.settings import build
from tcil.experiments.reporting import collect, page, tables
from tcil.experiments.reporting.page import PAPER, check_replaced, check_report, marks_of
from tcil.experiments.runs.reasons import NoAnswer


@pytest.fixture(scope="module")
def report(runs, tmp_path_factory):
    """What `tcil report` says of the runs, and the folder that it writes."""
    folder = tmp_path_factory.mktemp("report")
    return command("report", runs, "--out", folder / "report", "--keep", folder / "kept"), folder


class TestReport:
    def test_command_writes_every_form(self, report):
        output, folder = report
        assert "T-CIL" in output
        for name in ("report.html", "tables.md", "tables.tex", "tables.csv"):
            assert (folder / "report" / name).stat().st_size > 500
        assert len(list((folder / "kept").glob("*.json"))) == 8

    @pytest.mark.parametrize("name", ["tables.tex", "tables.md", "tables.csv", "report.html"])
    def test_files_of_others_are_not_overwritten(self, runs, tmp_path, name):
        own = tmp_path / "paper"
        own.mkdir()
        (own / name).write_text("my own work")
        for words in (("report", runs, "--out", own), ("compare", runs, runs, "--out", own)):
            outcome = CliRunner().invoke(app, [*map(str, words)])
            assert outcome.exit_code == 2
            assert f"whose {name} is not of an earlier report" in " ".join(outcome.output.split())
        assert [file.name for file in own.iterdir()] == [name]
        assert (own / name).read_text() == "my own work"

    def test_an_earlier_report_is_overwritten(self, runs, report, tmp_path):
        shutil.copytree(report[1] / "report", tmp_path / "report")
        command("compare", runs, runs, "--out", tmp_path / "compared")
        for folder in ("report", "compared"):
            check_report(tmp_path / folder)
        page = tmp_path / "report" / "report.html"
        page.write_text("<style>\n:root { --ink: #1c2430; --soft: #5b6675; }</style>")  # as it was until 0.1
        check_report(tmp_path / "report")
        page.write_text("my own work")
        with pytest.raises(ValueError, match=r"whose report\.html is not of an earlier report"):
            check_report(tmp_path / "report")

    def test_a_report_of_other_runs_is_replaced_only_on_request(self, tmp_path, undrawn):
        """The same runs, or the same and more, replace their report; fewer or others are refused, before any work."""
        one, two = (stored(build({"dataset": "noisy-digits", "seed": s}), {"ts": 0.1}) for s in (1, 2))
        shown = tmp_path / "shown"
        check_replaced(shown, marks_of([one]))
        page.write_report([one], shown / "report.html")
        check_replaced(shown, marks_of([one]))
        check_replaced(shown, marks_of([one, two]))
        with pytest.raises(ValueError, match=r"a report of 1 run, 1 of which is not given now;.*add --overwrite"):
            check_replaced(shown, marks_of([two]))
        page.write_report([one, two], shown / "report.html")
        with pytest.raises(ValueError, match=r"a report of 2 runs, 1 of which is not given now"):
            check_replaced(shown, marks_of([one]))
        with pytest.raises(ValueError, match=r"report: got .*Take another --report"):
            check_replaced(shown, {PAPER}, "report")
        page.write_sections(shown / "report.html", page.READING, [], {PAPER})
        check_replaced(shown, {PAPER})
        with pytest.raises(ValueError, match="a report of 'tcil reproduce'"):
            check_replaced(shown, marks_of([one]))
        (shown / "report.html").write_text('<meta name="generator" content="tcil">')
        with pytest.raises(ValueError, match="a report of an earlier version"):
            check_replaced(shown, marks_of([one]))

    def test_the_command_refuses_the_report_of_other_runs(self, tmp_path, undrawn):
        runs = [stored(build({"dataset": "noisy-digits", "seed": s}), {"ts": 0.1}) for s in (1, 2)]
        for run in runs:
            (tmp_path / f"{run.seed}.json").write_text(json.dumps(run.result.record()))
        command("report", tmp_path / "1.json", "--out", tmp_path / "out")
        before = (tmp_path / "out" / "report.html").read_bytes()
        words = ["report", tmp_path / "2.json", "--out", tmp_path / "out", "--keep", tmp_path / "kept"]
        outcome = CliRunner().invoke(app, [*map(str, words)])
        assert outcome.exit_code == 2
        assert "Take another --out, or add --overwrite" in " ".join(outcome.output.split())
        assert (tmp_path / "out" / "report.html").read_bytes() == before
        assert not (tmp_path / "kept").exists()
        command(*words, "--overwrite")
        assert (tmp_path / "out" / "report.html").read_bytes() != before

    def test_compare_replaces_tables_of_others_only_on_request(self, tmp_path, undrawn):
        """Also a report's tables, and a report those of a comparison."""
        for seed in (1, 2, 3):
            run = stored(build({"dataset": "noisy-digits", "seed": seed}), {"ts": 0.1 * seed})
            (tmp_path / f"{seed}.json").write_text(json.dumps(run.result.record()))
        one, two, three, out = *(tmp_path / f"{seed}.json" for seed in (1, 2, 3)), tmp_path / "out"

        def refused(*words):
            before = {file: file.read_bytes() for file in out.iterdir()}
            outcome = CliRunner().invoke(app, [*map(str, words), "--out", str(out)])
            assert outcome.exit_code == 2, outcome.output
            assert {file: file.read_bytes() for file in out.iterdir()} == before
            assert "or add --overwrite to replace it" in " ".join(outcome.output.split())
            return " ".join(outcome.output.split())

        command("compare", one, two, "--out", out)
        command("compare", one, two, "--out", out)
        assert "tables of a comparison of 2 runs, 1 of which is not given now" in refused("compare", one, three)
        assert "2 of which are not given now" in refused("compare", two, one)
        assert "tables of a comparison of 2 runs" in refused("report", one, two)
        command("compare", one, three, "--out", out, "--overwrite")
        (out / "tables.tex").write_text("\\begin{table}")  # as it was until 0.2
        assert "tables of an earlier version" in refused("compare", one, three)
        out = tmp_path / "report"
        command("report", one, two, "--out", out)
        command("report", one, two, three, "--out", out)
        assert "a report of 3 runs" in refused("compare", one, two)
        (out / "tables.tex").write_text("\\begin{table}")
        command("report", one, two, three, "--out", out)
        command("compare", one, two, "--out", out, "--overwrite")
        assert "tables of a comparison" in refused("report", one, two, three)

    def test_page_is_self_contained_and_accessible(self, report):
        whole = (report[1] / "report" / "report.html").read_text()
        page = re.sub(r"<script[^>]*>.*?</script>", "", whole, flags=re.DOTALL)
        outside = re.findall(r"""(?:src|href)=["'](?!#|data:)[^"']*|https?:|url\((?!#)""", page)
        assert outside == []
        assert "default-src &#39;none&#39;" in page or "default-src 'none'" in page
        checker = Checker()
        checker.feed(page)
        assert checker.figures >= 6
        assert checker.unnamed_pictures == 0
        assert checker.tables > 4
        assert checker.tables_without_headers == 0
        ids = re.findall(r'\bid="([^"]+)"', page)
        assert len(ids) == len(set(ids))
        assert set(re.findall(r'href="#([^"]+)"', page)) <= set(ids)

    def test_no_title_twice(self, report):
        page = (report[1] / "report" / "report.html").read_text()
        titles = [re.sub(r"<[^>]*>", "", title) for title in re.findall(r"<h[12][^>]*>.*?</h[12]>", page)]
        assert len(titles) == len(set(titles)) > 3

    def test_the_same_runs_give_the_same_page(self, runs, report, tmp_path):
        command("report", runs, "--out", tmp_path)
        assert (tmp_path / "report.html").read_bytes() == (report[1] / "report" / "report.html").read_bytes()

    def test_every_string_of_a_run_is_escaped(self, runs, tmp_path):
        """Names, titles, settings, the environment and reasons: whatever a folder says, it is text."""
        evil = "<script>alert(1)</script>\"'><svg onload=x>"
        (first, *_) = collect.read_runs([runs])
        record = first.result.record()
        record["settings"] |= {"dataset": evil, "learner": evil, "network": evil, evil: evil}
        record["settings"]["learner_options"] = {evil: evil}
        record["environment"] = {"torch": evil, evil: {evil: [evil]}}
        for task in record["tasks"]:
            rows = task["calibrators"]
            for row in rows.values():
                row["title"] = evil
            rows["ts"] = {"title": evil, "block": evil, "not_applicable": {"reason": "other", "words": evil}}
            rows[evil] = {**rows["vanilla"], "block": evil}
        folder = tmp_path / evil.replace("/", "")
        folder.mkdir()
        (folder / "results.json").write_text(json.dumps(record))
        command("report", folder, "--out", tmp_path / "out")
        page = (tmp_path / "out/report.html").read_text()
        assert "&lt;script&gt;" in page
        assert "alert(1)</script" not in page.lower()
        scripts = re.findall(r"<script([^>]*)>", page.lower())
        assert set(scripts) == {
            "",
            ' type="application/json" class="data"',
            ' type="application/json" id="chart-config"',
        }
        assert scripts.count("") == 2  # Vega and our own; the page's policy lets no other run
        assert "<svg onload" not in page
        assert "\"'><" not in page


class Checker(html.parser.HTMLParser):
    """Counts what accessibility asks for."""

    def __init__(self):
        super().__init__()
        self.figures = self.unnamed_pictures = self.tables = self.tables_without_headers = 0
        self._headers = 0

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if tag == "svg":
            if values.get("aria-hidden") == "true":
                return
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


def test_a_page_does_not_depend_on_the_order_of_the_rows(tmp_path):
    """Rows are in the order of the fits when computed, and in that of their names when read back."""
    silent = {"not_applicable": NoAnswer(reason="needs_reserve")}
    run = stored(build({"dataset": "noisy-digits", "seed": 1}), dict.fromkeys(("ts", "irm", "ets", "mine"), 0.1))
    run = with_rows(run, lambda rows: {name: row.model_copy(update=silent) for name, row in rows.items()})
    turned = with_rows(run, lambda rows: dict(reversed(rows.items())))
    told = [line.partition(":")[0] for line in tables.remarks(collect.Study((run,)))]
    assert told == ["ts", "ets", "irm", "mine"]
    pages = [page.write_report([one], tmp_path / name).read_bytes() for one, name in ((run, "a"), (turned, "b"))]
    assert pages[0] == pages[1]


def test_the_page_of_a_run_is_small(tmp_path):
    written = page.write_report([full_run()], tmp_path / "report.html")
    assert 500_000 < written.stat().st_size < 3 * 2**20


@pytest.mark.processes
def test_drawing_results_imports_no_torch(tmp_path):
    """Neither the page of a run nor that of the paper's artifacts."""
    code = f"""
import sys
from pathlib import Path

from tcil.experiments.process.screen import Screen
from tcil.experiments.reporting.collect import read_runs
from tcil.experiments.reporting.page import write_report
from tcil.experiments.reproduction.artifacts import artifacts_named
from tcil.experiments.reproduction.draw import draw
from tcil.experiments.reproduction.finished import FinishedRuns
from tcil.experiments.reproduction.schedules import editions

runs = read_runs([Path({str(ROOT / "docs/results/full-size")!r})])[:1]
write_report(runs, Path({str(tmp_path / "report.html")!r}))
finished = FinishedRuns(editions("paper"), runs)
draw([*artifacts_named("policies"), *artifacts_named("claims")], finished, Path({str(tmp_path / "paper")!r}), Screen())
sys.exit("torch" in sys.modules)
"""
    outcome = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (outcome.returncode, outcome.stderr) == (0, "")
    assert (tmp_path / "report.html").exists()
    assert (tmp_path / "paper/report.html").exists()
