"""The table of the claims in the paper's text: as printed, in our runs, and with percentages recomputed."""

from __future__ import annotations

from collections.abc import Mapping

from tcil.experiments.reporting.grids import Cell, Grid, Row
from tcil.experiments.reproduction import paper
from tcil.experiments.reproduction.checks import CHECKS, Agreement, Answer
from tcil.experiments.reproduction.finished import FinishedRuns

COLUMNS = ("claim", "paper", "our runs", "ours", "seeds", "holds", "counts as holding if")
IN_WORDS = "in words only"


def claims_grid(finished: FinishedRuns) -> Grid:
    """One row per claim and edition, from complete runs; claims without runs are marked as not run."""
    rows, finished = [], finished.whole()
    notes: dict[int, str] = {}
    for name, claim in paper.claims().items():
        if name not in CHECKS:
            continue
        check, printed = CHECKS[name], f"{claim.printed or IN_WORDS} ({claim.where})"
        footnotes = paper.footnotes(name)
        notes |= footnotes
        text = claim.text + "".join(f" [{number}]" for number in footnotes)
        answers = [(edition.name, check.ask(finished, edition)) for edition in finished.editions]
        available = [pair for pair in answers if pair[1] is not None] or [("none", None)]
        rows += [_row(text, printed, title, answer, check.rule) for title, answer in available]
        if claim.compared is not None:
            reduction = claim.compared.reduction
            agrees = Agreement.YES if abs(reduction - claim.reduction) < 0.05 else Agreement.NO
            words = (f"{reduction:.1f} %", "", agrees, "as printed, rounded")
            rows.append(_words(text, printed, "the paper's own table", *words))
    meanings = "; ".join(f"{agreement}: {agreement.meaning}" for agreement in Agreement)
    lines = [f"Holds: {meanings}. Lines are those of the paper's LaTeX source.", *numbered(notes)]
    return Grid("Claims", COLUMNS, tuple(rows), tuple(lines), wordy=True)


def numbered(notes: Mapping[int, str]) -> list[str]:
    """Footnotes in numerical order."""
    return [f"[{number}] {notes[number]}" for number in sorted(notes)]


def _row(text: str, printed: str, where: str, answer: Answer | None, rule: str) -> Row:
    if answer is None:
        return _words(text, printed, where, "not run", "", Agreement.NOT_RUN, rule)
    return _words(text, printed, where, answer.ours, str(answer.n), answer.agreement, rule)


def _words(text: str, *cells: str) -> Row:
    return Row(text, tuple(Cell(words=words) for words in cells))
