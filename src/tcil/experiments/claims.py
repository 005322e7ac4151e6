"""The table of what the paper's text claims: as printed, as our runs say, and its percentages recomputed."""

from __future__ import annotations

from tcil.experiments import paper
from tcil.experiments.checks import CHECKS, Answer
from tcil.experiments.evidence import Evidence
from tcil.experiments.grids import Cell, Grid, Row

COLUMNS = ("claim", "paper", "where", "ours", "seeds", "holds", "counts as holding if")
IN_WORDS = "in words only"


def claims_grid(evidence: Evidence) -> Grid:
    """One row per claim and edition; claims that no run tells stay empty and say so."""
    rows = []
    for key, claim in paper.claims().items():
        if key not in CHECKS:
            continue
        check, printed = CHECKS[key], claim.get("printed", IN_WORDS)
        answers = [(edition.name, check.ask(evidence, edition)) for edition in evidence.editions]
        told = [pair for pair in answers if pair[1] is not None] or [("", None)]
        rows += [_row(claim["text"], printed, title, answer, check.rule) for title, answer in told]
        if "compared" in claim:
            holds, ours = _recomputed(key)
            rows.append(_words(claim["text"], printed, "the paper's own table", ours, "", holds, "as printed, rounded"))
    return Grid("Claims", COLUMNS, tuple(rows), wordy=True)


def _row(text: str, printed: str, where: str, answer: Answer | None, rule: str) -> Row:
    if answer is None:
        return _words(text, printed, where, "not run", "", "-", rule)
    return _words(text, printed, where, answer.ours, str(answer.n), answer.verdict, rule)


def _words(text: str, *cells: str) -> Row:
    return Row(text, tuple(Cell(words=words) for words in cells))


def _recomputed(key: str) -> tuple[str, str]:
    """A printed reduction, worked out from the printed rows it compares: whether it is the same, and what it is."""
    claim = paper.claims()[key]
    start, end = (paper.find(**claim["compared"][side]) for side in ("from", "to"))
    assert start is not None
    assert end is not None
    before, after = start.figures[claim["compared"]["metric"]], end.figures[claim["compared"]["metric"]]
    assert before is not None
    assert after is not None
    reduction = 100 * (1 - after[0] / before[0])
    return "yes" if abs(reduction - claim["values"]["reduction"]) < 0.05 else "no", f"{reduction:.1f} %"
