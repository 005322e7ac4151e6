"""Claims about accuracy and the cost of a validation set."""

from __future__ import annotations

import itertools

from tcil.experiments.reporting.collect import same_seeds
from tcil.experiments.reproduction import paper
from tcil.experiments.reproduction.checks.answers import Answer, Ask, check
from tcil.experiments.reproduction.checks.studies import (
    EVERY,
    RESERVED,
    expected,
    mean_of,
    n_seeds,
    studies_run,
    varied,
    where,
)
from tcil.experiments.reproduction.finished import FinishedRuns
from tcil.experiments.reproduction.schedules import LEARNERS, MAIN, Edition, Variation
from tcil.experiments.runs.catalogue import ALL_DATA


@check("accuracy_hardly_changes", "within 2 points with every learner and dataset")
def _accuracy_hardly_changes(finished: FinishedRuns, edition: Edition) -> Answer | None:
    changes, studies = {}, []
    for pair, study in studies_run(finished, edition, EVERY).items():
        both = study.having(ALL_DATA)
        plain, calibrated = (mean_of(both, name, "accuracy") if both else None for name in (ALL_DATA, "t-cil"))
        if both is not None and plain is not None and calibrated is not None:
            changes[pair] = calibrated - plain
            studies.append(both)
    if not changes:
        return None
    shown = ", ".join(f"{where(*pair)} {change:+.2f}" for pair, change in changes.items())
    holds = all(abs(change) < 2 for change in changes.values())
    return Answer(f"{shown} points", holds, n_seeds(studies), len(changes) == len(EVERY) * len(LEARNERS))


@check("reserve_costs_accuracy", "lower with the reserve")
def _reserve(finished: FinishedRuns, edition: Edition) -> Answer | None:
    studies = varied(finished, edition, "cifar100", (MAIN, RESERVED))
    if len(studies) < 2:
        return None
    plain, reserved = (expected(study, "vanilla", "accuracy") for study in studies)
    return Answer(f"{reserved:.2f} % with the reserve, {plain:.2f} % without", reserved < plain, n_seeds(studies))


@check("reserve_gain_is_like_eeil", "at least half of EEIL's gain, at most twice")
def _reserve_like_eeil(finished: FinishedRuns, edition: Edition) -> Answer | None:
    wanted = (("er", MAIN), ("er", RESERVED), ("eeil", MAIN))
    all_three = [finished.study(edition, "cifar100", learner, variation) for learner, variation in wanted]
    studies = same_seeds([study for study in all_three if study is not None])
    if len(studies) < 3:
        return None
    plain, reserved, eeil = (expected(study, "vanilla", "accuracy") for study in studies)
    gain, theirs = plain - reserved, eeil - plain
    shown = f"{gain:+.2f} points by not reserving, {theirs:+.2f} by EEIL"
    return Answer(shown, 0.5 * theirs <= gain <= 2 * theirs, n_seeds(studies))


def _falls_with_validation_size(metric: str, least_is_enough: bool) -> Ask:
    """Whether T-CIL's metric falls with every larger validation set, and beats TS with the smallest one."""

    def ask(finished: FinishedRuns, edition: Edition) -> Answer | None:
        variations = [Variation(validation=size) for size in paper.VALIDATION_SIZES]
        studies = varied(finished, edition, "cifar100", variations)
        if len(studies) < 2:
            return None
        values = [expected(study, "t-cil", metric) for study in studies]
        shown = ", ".join(f"{s.settings.validation}: {v:.2f}" for s, v in zip(studies, values, strict=True))
        holds = all(late < early for early, late in itertools.pairwise(values))
        if least_is_enough:
            baseline = expected(studies[0], "ts", metric)
            shown += f"; TS with the least {baseline:.2f}"
            holds = holds and values[0] < baseline
        return Answer(shown, holds, n_seeds(studies), len(studies) == len(paper.VALIDATION_SIZES))

    return ask


check("ece_falls_with_validation_size", "less with every larger size, and below TS with the least")(
    _falls_with_validation_size("ece", least_is_enough=True)
)
check("accuracy_falls_with_validation_size", "less with every larger size")(
    _falls_with_validation_size("accuracy", least_is_enough=False)
)
