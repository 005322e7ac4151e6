"""Tables as Markdown, LaTeX, CSV and HTML."""

from __future__ import annotations

import csv
import dataclasses
import io
import re

import pytest

from tcil.experiments.reporting import grids
from tcil.experiments.reporting.grids import Cell, Grid, Row
from tcil.experiments.reporting.statistics import Spread


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
        assert '</tbody><tbody><tr class="apart">' in page
        assert '<td data-value="5">' in page
        assert "<strong>5.00 ± 1.00</strong>" in page
