"""The table of what the paper's text claims: as printed, as our runs say, and its percentages recomputed."""

from __future__ import annotations

from collections.abc import Mapping

from tcil.experiments import paper
from tcil.experiments.checks import CHECKS, VERDICTS, Answer
from tcil.experiments.evidence import Evidence
from tcil.experiments.grids import Cell, Grid, Row

COLUMNS = ("claim", "paper", "our runs", "ours", "seeds", "holds", "counts as holding if")
IN_WORDS = "in words only"


def claims_grid(evidence: Evidence) -> Grid:
    """One row per claim and edition; claims that no run tells stay empty and say so."""
    rows = []
    notes: dict[int, str] = {}
    for key, claim in paper.claims().items():
        if key not in CHECKS:
            continue
        check, printed = CHECKS[key], f"{claim.get('printed', IN_WORDS)} ({claim['where']})"
        own = paper.footnotes(key)
        notes |= own
        text = claim["text"] + "".join(f" [{number}]" for number in own)
        answers = [(edition.name, check.ask(evidence, edition)) for edition in evidence.editions]
        told = [pair for pair in answers if pair[1] is not None] or [("none", None)]
        rows += [_row(text, printed, title, answer, check.rule) for title, answer in told]
        if "compared" in claim:
            holds, ours = _recomputed(key)
            rows.append(_words(text, printed, "the paper's own table", ours, "", holds, "as printed, rounded"))
    meanings = "; ".join(f"{verdict}: {meaning}" for verdict, meaning in VERDICTS.items())
    lines = [f"Holds: {meanings}. Lines are those of the paper's LaTeX source.", *numbered(notes)]
    return Grid("Claims", COLUMNS, tuple(rows), tuple(lines), wordy=True)


def numbered(notes: Mapping[int, str]) -> list[str]:
    """Footnotes in their order."""
    return [f"[{number}] {notes[number]}" for number in sorted(notes)]


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
