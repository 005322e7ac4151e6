"""A table of results as data, and the same table for the terminal, Markdown, LaTeX, CSV and HTML."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from markupsafe import Markup, escape
from rich.table import Table
from rich.text import Text

from tcil.experiments.reporting.statistics import Spread
from tcil.foundation.files import replace_file


@dataclass(frozen=True)
class Cell:
    """One value of a table.

    Attributes
    ----------
    spread : Spread or None
        The number, mostly a mean over seeds.
    words : str
        What stands there where there is no number, such as "n/a".
    bold : bool
        Whether it is set in bold: the best of its column.
    digits : int
        Decimal places.
    signed : bool
        Whether a plus sign is shown.
    note : str
        What is said of the number, in brackets behind it.
    """

    spread: Spread | None = None
    words: str = ""
    bold: bool = False
    digits: int = 2
    signed: bool = False
    note: str = ""

    def text(self, plus_minus: str = "±") -> str:
        """The value, with its deviation where there are several seeds."""
        if self.spread is None:
            return self.words
        sign = "+" if self.signed else ""
        shown = f"{self.spread.mean:{sign}.{self.digits}f}"
        shown += f" {plus_minus} {self.spread.std:.{self.digits}f}" if self.spread.n > 1 else ""
        return f"{shown} ({self.note})" if self.note else shown


@dataclass(frozen=True)
class Row:
    """A line of a table; a rule goes between blocks, and what stands `apart` is not ranked with the others."""

    label: str
    cells: tuple[Cell, ...]
    block: str = ""
    apart: bool = False


@dataclass(frozen=True)
class Grid:
    """A table: a title, columns, rows, and notes below; `wordy` where the cells are words, not numbers.

    On the terminal and on pages, blocks that have one of the `headings` stand below it.

    >>> from tcil.experiments.reporting.grids import Cell, Grid, Row, markdown
    >>> from tcil.experiments.reporting.statistics import Spread
    >>> grid = Grid("Two seeds", ("method", "ECE"), (Row("TS", (Cell(Spread.of([4.0, 6.0])),)),))
    >>> print(markdown(grid))
    **Two seeds**
    <BLANKLINE>
    | method | ECE |
    |---|---:|
    | TS | 5.00 ± 1.00 |
    <BLANKLINE>
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = field(default=())
    wordy: bool = False
    headings: Mapping[str, str] = field(default_factory=dict)

    @property
    def blocks(self) -> list[tuple[str, list[Row]]]:
        """The rows of each block, below its heading; runs of rows, so that nothing changes its place."""
        groups = itertools.groupby(self.rows, key=lambda row: row.block)
        return [(self.headings.get(block, ""), list(rows)) for block, rows in groups]


def terminal(grid: Grid) -> Table:
    """For the terminal."""
    table = Table(title=grid.title, caption="\n".join(grid.notes) or None, caption_justify="left")
    for index, name in enumerate(grid.columns):
        table.add_column(Text(name), justify="right" if index and not grid.wordy else "left")
    for heading, rows in grid.blocks:
        table.add_section()
        if heading:
            table.add_row(Text(heading, style="italic"))
        for row in rows:
            cells = [Text(cell.text(), style="bold" if cell.bold else "") for cell in row.cells]
            table.add_row(Text(row.label), *cells)
    return table


def markdown(grid: Grid) -> str:
    """For a Markdown file."""

    def safe(text: str) -> str:
        return text.replace("*", "\\*").replace("|", "\\|")

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    lines = [
        f"**{safe(grid.title)}**",
        "",
        line([safe(name) for name in grid.columns]),
        "|---|" + ("---|" if grid.wordy else "---:|") * (len(grid.columns) - 1),
    ]
    for row in grid.rows:
        cells = [f"**{safe(cell.text())}**" if cell.bold else safe(cell.text()) for cell in row.cells]
        lines.append(line([f"*{safe(row.label)}*" if row.apart else safe(row.label), *cells]))
    notes = [line for note in grid.notes for line in ("", safe(note))]
    return "\n".join([*lines, *notes, ""])


LONGEST = 40  # rows of a table that fits a page
_LATEX = {"&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}", "~": r"\~{}",
          "^": r"\^{}", "\\": r"\textbackslash{}", "Δ": r"$\Delta$", "ε": r"$\varepsilon$", "±": r"$\pm$",
          "|": r"\textbar{}", "<": r"\textless{}", ">": r"\textgreater{}"}  # fmt: skip


def latex(grid: Grid) -> str:
    """For a paper; needs booktabs, and longtable for tables of words and of many rows, which go over pages."""

    def safe(text: str) -> str:
        return "".join(_LATEX.get(character, character) for character in text)

    def shown(cell: Cell) -> str:
        text = safe(cell.text("@")).replace(" @ ", r"\,$\pm$\,")
        return rf"\textbf{{{text}}}" if cell.bold else text

    caption = rf"\caption{{{safe(grid.title)}}}"
    widths = "l" + "r" * (len(grid.columns) - 1)
    if grid.wordy:
        widths = "".join(f"p{{\\dimexpr {share:.3f}\\linewidth-2\\tabcolsep\\relax}}" for share in _shares(grid))
    long = grid.wordy or len(grid.rows) > LONGEST
    if long:
        lines = [r"{\footnotesize", rf"\begin{{longtable}}{{{widths}}}", caption + r" \\"]
        end, close = r"\end{longtable}", "}"
    else:
        lines = [r"\begin{table}", r"\centering", caption, rf"\begin{{tabular}}{{{widths}}}"]
        end, close = r"\end{tabular}", r"\end{table}"
    lines += [r"\toprule", " & ".join(safe(name) for name in grid.columns) + r" \\", r"\midrule"]
    lines += [r"\endhead"] if long else []
    block = grid.rows[0].block if grid.rows else ""
    for row in grid.rows:
        if row.block != block:
            lines.append(r"\midrule")
            block = row.block
        lines.append(" & ".join([safe(row.label), *(shown(cell) for cell in row.cells)]) + r" \\")
        lines += [r"\addlinespace"] if grid.wordy else []
    lines += [r"\bottomrule", end]
    lines += [rf"\par\footnotesize {safe(note)}" for note in grid.notes]
    return "\n".join([*lines, close, ""])


def _shares(grid: Grid) -> list[float]:
    """Of the width of a page, what each column of words gets: as the root of its longest cell."""
    texts = [(row.label, *(cell.text() for cell in row.cells)) for row in grid.rows]
    longest = [max(map(len, column)) for column in zip(grid.columns, *texts, strict=True)]
    roots = [length**0.5 for length in longest]
    return [root / sum(roots) for root in roots]


def comma_separated(grids: Sequence[Grid]) -> str:
    """For a spreadsheet or a data frame: one line per cell of all tables, with mean, deviation and number of seeds."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["table", "line", "block", "row", "column", "value", "std", "n", "bold", "note"])
    for grid in grids:
        for number, row in enumerate(grid.rows, start=1):
            for name, cell in zip(grid.columns[1:], row.cells, strict=True):
                s = cell.spread
                value = cell.words if s is None else f"{s.mean:.6g}"
                std = f"{s.std:.6g}" if s is not None and s.n > 1 else ""
                count = s.n if s is not None and s.n else ""
                about = [grid.title, number, row.block, row.label, name]
                writer.writerow([*about, value, std, count, "yes" if cell.bold else "", cell.note])
    return file.getvalue()


TABLES_OF = "% tcil tables of"  # begins the first line of tables.tex, a comment


def write_tables(grids: Sequence[Grid], out: Path, marks: Collection[str]) -> None:
    """The same tables as Markdown, LaTeX and CSV.

    `marks` say of which runs they are, in the first line of the LaTeX file; `page.check_replaced` reads them.
    """
    out.mkdir(parents=True, exist_ok=True)
    replace_file(out / "tables.md", "\n".join(map(markdown, grids)).encode())
    replace_file(out / "tables.tex", "\n".join([" ".join([TABLES_OF, *sorted(marks)]), *map(latex, grids)]).encode())
    replace_file(out / "tables.csv", comma_separated(grids).encode())


def html(grid: Grid) -> Markup:
    """For a page; every string is escaped. Cells with a number carry it, so that columns can be sorted."""
    kind = Markup(' class="wordy"') if grid.wordy else ""
    parts = [Markup("<table{}><caption><span>{}</span></caption><thead><tr>").format(kind, grid.title)]
    parts += [Markup('<th scope="col">{}</th>').format(name) for name in grid.columns]
    parts.append(Markup("</tr></thead>"))
    for heading, rows in grid.blocks:
        parts.append(Markup("<tbody>"))
        if heading:
            line = Markup('<tr class="heading"><th scope="rowgroup" colspan="{}"><span>{}</span></th></tr>')
            parts.append(line.format(len(grid.columns), heading))
        for row in rows:
            parts.append(Markup('<tr class="apart">') if row.apart else Markup("<tr>"))
            parts.append(Markup('<th scope="row">{}</th>').format(row.label))
            parts += [_data_cell(cell) for cell in row.cells]
            parts.append(Markup("</tr>"))
        parts.append(Markup("</tbody>"))
    parts.append(Markup("</table>"))
    parts += [Markup('<p class="note">{}</p>').format(note) for note in grid.notes]
    return Markup("").join(parts)


def _data_cell(cell: Cell) -> Markup:
    text = escape(cell.text())
    shown = Markup("<strong>{}</strong>").format(text) if cell.bold else text
    value = "" if cell.spread is None else Markup(' data-value="{}"').format(f"{cell.spread.mean:.6g}")
    return Markup("<td{}>{}</td>").format(value, shown)
