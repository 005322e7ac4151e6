"""The tables of docs/pact.md, docs/pact-tables.md and docs/pact-history.md, from what is kept."""

from __future__ import annotations

from research import ROOT
from research.pact import (
    confirmation,
    draws,
    imbalance,
    leads,
    real_images,
    residuals,
    rounds,
    sizes,
    small,
    spread,
    verdicts,
)
from research.pact.measuring import stored
from research.pact.tables import summary
from tcil.foundation.files import replace_file

PAGES = {
    "docs/pact.md": ("overview", "by-method", "goals", "verdicts", "leads-nine"),
    "docs/pact-tables.md": (
        "harm", "round-ten", "round-nine", "real-images", "round-eight", "spread", "sizes-eight", "imbalance-eight",
        "draws-eight", "residuals",
    ),
    "docs/pact-history.md": (
        "one-temperature", "round-seven", "round-six", "final", "small", "sizes", "imbalance", "draws",
    ),
}  # fmt: skip


def sections() -> dict[str, list[str]]:
    """The tables of all pages, by name."""
    return {
        "overview": confirmation.overview(),
        "by-method": confirmation.by_learner(confirmation.fresh()),
        "goals": confirmation.goals(),
        "harm": confirmation.harm_by_learner(),
        confirmation.FOLDER: confirmation.tables(),
        real_images.FOLDER: real_images.tables(),
        "real-images": confirmation.real_tables(),
        leads.FOLDER: leads.tables(),
        "spread": spread.table(),
        "round-eight": rounds.tables(rounds.EIGHT, rounds.stored(rounds.EIGHT)),
        "one-temperature": rounds.one_temperature(),
        "round-seven": rounds.tables(rounds.SEVEN, rounds.stored(rounds.SEVEN)),
        "verdicts": verdicts.table(),
        "residuals": residuals.table(),
        "round-six": rounds.tables(rounds.SIX, rounds.stored(rounds.SIX)),
        "final": summary(stored("final", complete=True), short=True),
        "small": small.tables(small.stored()),
        **{name: sizes.table(sizes.stored(name)) for name in ("sizes", sizes.FOLDER)},
        **{name: imbalance.table(stored(name)) for name in ("imbalance", imbalance.FOLDER)},
        **{name: draws.table(stored(name)) for name in ("draws", draws.FOLDER)},
    }


def write() -> None:
    """Write the tables of all pages from what is kept."""
    drawn = sections()
    for page, names in PAGES.items():
        path = ROOT / page
        text = path.read_text()
        for name in names:
            start, end = f"<!-- tables: {name} -->\n", f"<!-- end of {name} -->"
            before, rest = text.split(start)
            text = before + start + "\n" + "\n".join(drawn[name]) + "\n\n" + end + rest.split(end)[1]
        replace_file(path, text.encode())
