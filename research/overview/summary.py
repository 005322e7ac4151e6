"""The first table of docs/results.md and the lines below it, computed from the results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from research.overview.sources import OF_THE_PAPER, TITLES, Source, named, official
from tcil.experiments.reproduction.schedules import LEARNERS


def summary(found: Sequence[Source]) -> Iterator[str]:
    """A table and five lines, computed from the results."""
    yield "## Summary\n"
    names = ("vanilla", "ts", "t-cil", "pact", "optimal-ts")
    yield "| ECE, % | learners (seeds) | " + " | ".join(TITLES[name] for name in names) + " | noise floor |"
    yield "|---|---|" + "---:|" * (len(names) + 1)
    authors = [float(np.mean(values)) for values in (official()[name] for name in names)]
    cells = " | ".join(f"{value:.1f}" for value in authors)
    yield f"| CIFAR-100, the authors' checkpoints (ResNet-32, tasks 0, 2, 4, 6, 8) | ER (1) | {cells} | |"
    for source in found:
        learners = ", ".join(f"{named(name, study)} ({len(study.runs)})" for name, study in source.by_learner.items())
        values = [*(source.mean(name) for name in names), source.mean("t-cil", "noise_floor")]
        cells = " | ".join("" if value is None else f"{value:.1f}" for value in values)
        yield f"| {source.described} | {learners} | {cells} |"
    yield (
        "\n*Means over tasks, then seeds, then learners. The noise floor is the score of a perfectly calibrated"
        " model.*\n"
    )
    cases = list(product(found, LEARNERS))
    cases = [(source, learner) for source, learner in cases if learner in source.by_learner]
    yield f"- **T-CIL** has a lower ECE than every baseline of the paper {_times(_first(cases))}."
    against = [_gap(source, learner, "pact", "t-cil") for source, learner in cases]
    oracle = [_gap(source, learner, "pact", "optimal-ts") for source, learner in cases]
    above = [_gap(source, learner, "t-cil", "optimal-ts") for source, learner in cases]
    yield (
        f"- **PACT** has a lower ECE than T-CIL {_times([gap < 0 for gap in against])}."
        f" Over the oracle temperature, T-CIL is {np.mean(above):+.1f} points on average and PACT"
        f" {np.mean(oracle):+.1f} (from {min(oracle):+.1f} to {max(oracle):+.1f})."
    )
    yield f"- **One temperature hides a difference.** {_hidden(cases)}"
    yield (
        "- **Not run**: the paper's schedule of 200 epochs, and a part of the schedules `compact` (its network with 30"
        " epochs) and `small`: [what is missing](#what-was-run-and-what-is-missing)."
    )
    yield (
        "- **Details**: [the schedule `short-0.2` in full](results-short.md), with every table, figure and claim of the"
        " paper; [learners compared with their originals](learners.md).\n"
    )


def _times(held: Sequence[bool]) -> str:
    return f"in {sum(held)} of {len(held)} cases (learner and data)"


def _first(cases: Sequence[tuple[Source, str]]) -> list[bool]:
    """Whether T-CIL is below all that the paper compares it with and that has an answer."""
    held = []
    for source, learner in cases:
        others = [source.percent(learner, name) for name in OF_THE_PAPER]
        ours = source.percent(learner, "t-cil")
        held.append(ours is not None and all(other is None or ours < other for other in others))
    return held


def _gap(source: Source, learner: str, one: str, other: str) -> float:
    first, second = source.percent(learner, one), source.percent(learner, other)
    assert first is not None
    assert second is not None
    return first - second


def _hidden(cases: Sequence[tuple[Source, str]]) -> str:
    """ECE by predicted group of T-CIL, PACT and the oracle, over all cases."""
    told = []
    for name in ("t-cil", "optimal-ts", "pact"):
        groups = [
            float(np.mean([source.percent(learner, name, f"ece_predicted_{group}") for source, learner in cases]))
            for group in ("old", "new")
        ]
        told.append(f"{TITLES[name]} {groups[0]:.1f} and {groups[1]:.1f}")
    return f"ECE of images predicted as old and as new classes, mean over cases: {', '.join(told)}."
