"""Round ten, real images with six learners: `python -m research.pact tenth RUNS`, with RUNS from `train RUNS C1 C2 C3`.

Three worlds of `cifar100-mini`, each with classes, a split and a validation set of its own. Like round nine it is a
confirmation: nothing was chosen on them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor

import tcil
from research.beyond import Known
from research.pact import confirmation, leads, measuring, rounds, small
from research.pact.confirmation import BENNETT, FORMS, by_learner, by_metric, claimed, differences, parts_of_cifar100
from research.pact.methods import EIGHTH, Labelled, Method, averaged_by_innovations, believed, reserve_of, tracked
from research.pact.tables import harms, world_of
from research.pact.worlds import TENTH
from tcil.calibration.calibrators.pact import PACTFilter

FOLDER = confirmation.ROUND_TEN


def last_validation(known: Known) -> Labelled:
    """The last task's validation images, kept for one task more, as the network answers them now."""
    assert known.task.model is not None
    return tcil.predict_logits(known.task.model, known.memory["validation"], classes=known.task.seen)


def with_last_validation(known: Known) -> Tensor:
    """PACT-R with these in place of images of every old class: a reserve of constant size."""
    found = tracked(constants=EIGHTH, spread="level", reserve=True, kept=last_validation)(known)
    known.memory["validation"] = known.task.valid
    return found


def before_evidence(known: Known) -> Tensor:
    """What PACT believes before any evidence: T a fixed share of the spread, b half of log(imbalance)."""
    log_imbalance = known.log_imbalance if known.old else None
    state = PACTFilter.of(None, log_imbalance, known.evidence.result.target, EIGHTH, known.evidence.spread)
    return believed(known, state.as_evidence("all"), [0.0])


WITHOUT_OFFSET = replace(EIGHTH, surrogate_offset=1e-3, offset_drift=1e-4, surrogate_bias_error=0.7)
LEADS: dict[str, Method] = {
    BENNETT: leads.BENNETT,
    "PACT-R, one image of each class": tracked(
        constants=EIGHTH, spread="level", reserve=True, kept=lambda known: reserve_of(known, 1)
    ),
    "PACT-R, the last task's validation images": with_last_validation,
    "PACT, without the surrogate's offset": tracked(constants=WITHOUT_OFFSET, spread="level"),
    "PACT, posterior average by its surprises": averaged_by_innovations,
    "PACT before any evidence": before_evidence,
}
MEASURED = {**confirmation.MEASURED, **LEADS}


def run(out: Path) -> None:
    """Measure worlds that every learner is trained on and that have no record yet, and print the tables."""
    measuring.store_worlds(FOLDER, TENTH, out, MEASURED, (*confirmation.OURS, *LEADS))
    print("\n".join(tables()))
    confirmation.draw()


def tables() -> list[str]:
    """Round ten by learner and by metric, its goals and harm, and intervals over its worlds."""
    own = parts_of_cifar100()
    if not own:
        return ["(none yet)"]
    lines = [*by_learner(own), "", *by_metric(own), "", *rounds.accuracies(own), ""]
    lines += [*leads.compared(own, {name: name for name in (*FORMS, *LEADS)}), ""]
    lines += [*small.goals(f"{len(own)} runs of round ten", own, (*FORMS, BENNETT)), "", *harms(own, FORMS), ""]
    return lines + ([*differences(own), ""] if len({world_of(r) for r in own}) > 1 else []) + claimed(own)
