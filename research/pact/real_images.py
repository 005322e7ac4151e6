"""Round ten, real images with six learners: `python -m research.pact tenth RUNS`, with RUNS from `train RUNS C1 C2 C3`.

Three worlds of `cifar100-mini`, each with classes, a split and a validation set of its own. Like round nine it is a
confirmation: nothing was chosen on them.
"""

from __future__ import annotations

from pathlib import Path

from research.pact import confirmation, leads, measuring, small
from research.pact.confirmation import FORMS, by_learner, by_metric, claimed, differences, parts_of_cifar100
from research.pact.tables import harms, world_of
from research.pact.worlds import TENTH

FOLDER = confirmation.ROUND_TEN
BENNETT = "PACT-R, Bennett"
MEASURED = {**confirmation.MEASURED, BENNETT: leads.BENNETT}


def run(out: Path) -> None:
    """Measure worlds that every learner is trained on and that have no record yet, and print the tables."""
    measuring.store_worlds(FOLDER, TENTH, out, MEASURED, (*confirmation.OURS, BENNETT))
    print("\n".join(tables()))
    confirmation.draw()


def tables() -> list[str]:
    """Round ten by learner and by metric, its goals and harm, and intervals over its worlds."""
    own = parts_of_cifar100()
    if not own:
        return ["(none yet)"]
    lines = [*by_learner(own), "", *by_metric(own), ""]
    lines += [*small.goals(f"{len(own)} runs of round ten", own, (*FORMS, BENNETT)), "", *harms(own, FORMS), ""]
    return lines + ([*differences(own), ""] if len({world_of(r) for r in own}) > 1 else []) + claimed(own)
