"""The calibrators of the tables: their names in order, and what they are. Readers of results need no more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tcil.experiments.runs.results import RANKED, WITH_OPTIONS

ORACLE_BLOCK, OLD_DATA = "oracle", "with old-task validation data"
AS_TRAINED = "vanilla"  # the row of the network as trained
ORACLE = "optimal-ts"  # the row of the best temperature
ALL_DATA = "vanilla-all-data"  # Vanilla of a second run, without a validation set
ALL_DATA_TITLE = "Vanilla, all data"


@dataclass(frozen=True)
class Description:
    """A calibrator's title, what it is, and in which block of a table it stands."""

    title: str
    meaning: str
    block: str = RANKED


CATALOGUE = {
    "vanilla": Description("Vanilla", "the network as trained"),
    "ts": Description("TS", "temperature scaling on the new task's validation set"),
    "ets": Description("ETS", "ensemble temperature scaling"),
    "irm": Description("IRM", "multi-class isotonic regression"),
    "perturb-ts": Description("PerturbTS", "temperature scaling under input noise"),
    "t-cil": Description("T-CIL", "temperature scaling on adversarially perturbed exemplars"),
    "pact": Description("PACT", "a temperature for old and one for new classes, and a bias between them (ours)"),
    "first-task-ts": Description("First-task TS", "the first task's temperature, kept for all tasks"),
    "exemplar-ts": Description(
        "Exemplar TS", "temperature scaling on unperturbed exemplars (T near 0: why T-CIL perturbs them)"
    ),
    "statistics-ts": Description(
        "Statistics TS", "temperature scaling with old classes drawn from statistics of frozen features"
    ),
    ORACLE: Description("Optimal TS", "temperature scaling on the test set: the oracle", ORACLE_BLOCK),
    "optimal-group-ts": Description(
        "Optimal group TS", "one temperature per predicted group, old or new, on the test set", ORACLE_BLOCK
    ),
    "reserve-ts": Description("Reserve TS", "temperature scaling with a reserve of old-task data", OLD_DATA),
    "reserve-group-ts": Description(
        "Reserve group TS",
        "one temperature per predicted group, old or new, with a reserve of old-task data",
        OLD_DATA,
    ),
    "pact-r": Description("PACT-R", "PACT with a reserve of old-task data (ours)", OLD_DATA),
}


_MIXED_CASE = {"bic": "BiC", "ranpac": "RanPAC"}  # of our learners; the names of the others are abbreviations


def learner_title(name: str) -> str:
    """What tables call a learner by its name in the settings; runs store the title of a user's own.

    >>> learner_title("er"), learner_title("bic"), learner_title("my_package.learners:MyLearner")
    ('ER', 'BiC', 'MyLearner')
    """
    short = name.rpartition(":")[2]
    return _MIXED_CASE.get(short, short.upper() if short.isalpha() and short.islower() else short)


class Heading(NamedTuple):
    """How a row of a table is called, and in which block it stands."""

    title: str
    block: str


def in_order(headings: Mapping[str, Heading]) -> dict[str, Heading]:
    """Ranked rows first, then the same with other options, then the rest; each in the order of the catalogue."""
    order = [ALL_DATA, *CATALOGUE]

    def place(name: str) -> tuple[int, int, str]:
        base = name.partition("[")[0]
        rank = {RANKED: 0, WITH_OPTIONS: 1}.get(headings[name].block, 2)
        return rank, order.index(base) if base in order else len(order), name

    return {name: headings[name] for name in sorted(headings, key=place)}
