"""The tables of docs/pact.md, from what is kept."""

from __future__ import annotations

from research import ROOT
from research.pact import draws, imbalance, rounds, sizes, small, spread
from research.pact.measuring import stored
from research.pact.tables import summary
from tcil.foundation.files import replace_file


def sections() -> dict[str, list[str]]:
    """The tables of docs/pact.md, by name."""
    return {
        "spread": spread.table(),
        "round-six": rounds.tables(rounds.SIX, rounds.stored(rounds.SIX)),
        "final": summary(stored("final", complete=True), short=True),
        "sizes": sizes.table(sizes.stored()),
        "small": small.tables(small.stored()),
        "imbalance": imbalance.table(stored("imbalance")),
        "draws": draws.table(stored("draws")),
    }


def write() -> None:
    """Write the tables of docs/pact.md from what is kept."""
    path = ROOT / "docs/pact.md"
    text = path.read_text()
    for name, lines in sections().items():
        start, end = f"<!-- tables: {name} -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(start)
        text = before + start + "\n" + "\n".join(lines) + "\n\n" + end + rest.split(end)[1]
    replace_file(path, text.encode())
