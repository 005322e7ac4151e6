"""Claims about the size of the memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tcil.experiments.reporting.collect import Study
from tcil.experiments.reporting.statistics import paired_difference
from tcil.experiments.reproduction import paper
from tcil.experiments.reproduction.checks.answers import Answer, check
from tcil.experiments.reproduction.checks.studies import BOTH, expected, n_seeds, varied
from tcil.experiments.reproduction.finished import FinishedRuns
from tcil.experiments.reproduction.schedules import Edition, Variation


def _memories(finished: FinishedRuns, edition: Edition, dataset: str) -> list[Study]:
    """The studies of the sizes that were run, in increasing order, with the same seeds."""
    variations = [Variation(memory=size, validation=100) for size in paper.MEMORY_SIZES[dataset]]
    return varied(finished, edition, dataset, variations)


def _validated_on(studies: Sequence[Study]) -> str:
    """The size of the validation set, as text; it is the paper's smallest, so it is shown next to T-CIL's error."""
    return f" ({studies[0].settings.validation} images for validation)"


@check("memory_sizes", "lower at every size; undecided where a paired 95 % interval includes zero")
def _lower_at_every_size(finished: FinishedRuns, edition: Edition) -> Answer | None:
    shown, certain, used, lower = [], True, [], True
    for dataset in BOTH:
        for study in _memories(finished, edition, dataset):
            ours, plain = (
                [float("nan") if v is None else v for v in study.means(name, "ece")] for name in ("t-cil", "vanilla")
            )
            difference = paired_difference(plain, ours)
            shown.append(f"{study.settings.memory}: {100 * np.mean(ours):.1f} against {100 * np.mean(plain):.1f}")
            certain = certain and difference.excludes_zero
            lower = lower and difference.mean < 0
            used.append(study)
    if not used:
        return None
    all_run = len(used) == sum(len(paper.MEMORY_SIZES[dataset]) for dataset in BOTH)
    told = f"T-CIL against vanilla, memory {'; '.join(shown)}{_validated_on(used)}"
    return Answer(told, lower, n_seeds(used), all_run, decided=certain)


@check("memory_500_beats_2000", "T-CIL's ECE with the smallest memory below vanilla's with the largest")
def _small_memory(finished: FinishedRuns, edition: Edition) -> Answer | None:
    studies = _memories(finished, edition, "cifar100")
    if len(studies) < 2:
        return None
    ours, vanilla = expected(studies[0], "t-cil"), expected(studies[-1], "vanilla")
    sizes = [study.settings.memory for study in studies]
    shown = f"T-CIL with {sizes[0]}: {ours:.2f}; vanilla with {sizes[-1]}: {vanilla:.2f}{_validated_on(studies)}"
    return Answer(shown, ours < vanilla, n_seeds(studies), len(studies) == len(paper.MEMORY_SIZES["cifar100"]))


@check("smaller_memory_is_worse", "with every smaller size less accuracy, and a higher ECE of vanilla and of T-CIL")
def _smaller_is_worse(finished: FinishedRuns, edition: Edition) -> Answer | None:
    shown, holds, used = [], True, []
    for dataset in BOTH:
        studies = _memories(finished, edition, dataset)
        if len(studies) < 2:
            continue
        used += studies
        sizes = ", ".join(str(study.settings.memory) for study in studies)
        parts = []
        for calibrator, metric, title in (
            ("vanilla", "accuracy", "accuracy"), ("vanilla", "ece", "vanilla ECE"), ("t-cil", "ece", "T-CIL's ECE"),
        ):  # fmt: skip
            values = [expected(study, calibrator, metric) for study in studies]
            parts.append(f"{title} {', '.join(f'{value:.1f}' for value in values)}")
            steps = np.diff(values) * (1 if metric == "accuracy" else -1)
            holds = holds and bool((steps > 0).all())
        shown.append(f"memory {sizes}: {'; '.join(parts)}{_validated_on(studies)}")
    all_run = len(used) == sum(len(paper.MEMORY_SIZES[dataset]) for dataset in BOTH)
    return Answer("; ".join(shown), holds, n_seeds(used), all_run) if used else None
