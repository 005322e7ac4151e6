"""The first part of docs/results.md: what was found in ten lines, and each learner beside the paper, computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from research.overview.claims import verdicts
from research.overview.sources import OF_THE_PAPER, TITLES, Source, official, printed, tasks_of
from research.overview.tables import cut_short, unfinished
from research.regime import LEAST_MEMORISED, MARK, is_valid, memorised
from tcil.experiments.reproduction.checks import Agreement
from tcil.experiments.reproduction.schedules import LEARNERS

Cases = Sequence[tuple[Source, str]]
COUNTED = {
    "compact": "the paper's network (ER on CIFAR-100 in ten tasks and on CIFAR-10, one seed)",
    "small": "a small network (CIFAR-100 in ten tasks, four learners, three seeds)",
}
SHOWN = ("vanilla", "ts", "t-cil", "pact", "optimal-ts")


def summary(found: Sequence[Source]) -> Iterator[str]:
    """Lines, computed from the results."""
    yield "## Summary\n"
    told = [f"With {of}: {counts}" for size, of in COUNTED.items() if (counts := _agreements(size))]
    yield (
        f"- **Do the paper's claims hold?** {'. '.join(told)} ([which, and why not](#which-of-the-papers-claims-hold))."
    )
    by_name = {source.name: source for source in found}
    for name in ("CIFAR-100, ResNet-32", "CIFAR-100"):
        if name in by_name:
            yield f"- **T-CIL on {by_name[name].described}**, mean over tasks: {_beside(by_name[name])}."
    cases = [(source, learner) for source, learner in product(found, LEARNERS) if learner in source.by_learner]
    yield f"- **T-CIL** has a lower ECE than every baseline of the paper {_times(_first(cases))}."
    above = [_gap(case, "t-cil", "optimal-ts") for case in cases]
    oracle = [_gap(case, "pact", "optimal-ts") for case in cases]
    yield (
        f"- **PACT** has a lower ECE than T-CIL {_times([_gap(case, 'pact', 't-cil') < 0 for case in cases])}."
        f" Over the oracle temperature T-CIL is {np.mean(above):+.1f}"
        f" points on average and PACT {np.mean(oracle):+.1f} (from {min(oracle):+.1f} to {max(oracle):+.1f}). This is"
        " no independent evidence: PACT was developed on letters, and its constants also on runs of `small`"
        " ([which](#where-these-numbers-come-from)); [PACT's page](pact.md#results) has runs that chose nothing."
    )
    yield f"- **One temperature hides a difference.** {_hidden(cases)}"
    parts = "".join(f"; a part of `{name}`" for name in unfinished())
    parts += f"; the last tasks of {', '.join(stopped)} with the paper's network" if (stopped := cut_short()) else ""
    yield (
        f"- **Not run**: the paper's schedule of 200 epochs{parts}:"
        " [what is missing](#what-was-run-and-what-is-missing)."
    )
    yield (
        "- **More**: [all tables](results-tables.md), the paper's among them; every figure of the paper, by [the"
        " learners of version 0.2.0](results-short.md); [learners compared with their originals](learners.md).\n"
    )


def _agreements(size: str) -> str:
    """How many claims hold by runs that went through all their tasks."""
    every = [verdict for own in verdicts(size).values() for verdict in own]
    counts = Counter(verdict.answer.agreement for verdict in every)
    told = ", ".join(f"{counts[one]} *{one}*" for one in Agreement if counts[one])
    outside = sum(not verdict.in_regime for verdict in every)
    return told + (f" ({outside} of these {len(every)} rest in part on runs of another regime)" if outside else "")


def _times(held: Sequence[bool]) -> str:
    return f"in {sum(held)} of {len(held)} cases (learner, data and network)"


def _beside(source: Source) -> str:
    """T-CIL's ECE by learner, with the paper's."""
    told = []
    for learner, study in source.by_learner.items():
        ours, theirs = source.percent(learner, "t-cil"), printed(study, "t-cil")
        part = "" if study.whole else f" over the {tasks_of(study)}"
        told.append(f"{learner.upper()} {ours:.1f}{part}" + (f" (paper {theirs:.1f})" if theirs is not None else ""))
    return "; ".join(told)


def _first(cases: Cases) -> list[bool]:
    """Whether T-CIL is below all that the paper compares it with and that has an answer."""
    held = []
    for source, learner in cases:
        others = [source.percent(learner, name) for name in OF_THE_PAPER]
        ours = source.percent(learner, "t-cil")
        held.append(ours is not None and all(other is None or ours < other for other in others))
    return held


def _gap(case: tuple[Source, str], one: str, other: str) -> float:
    source, learner = case
    first, second = source.percent(learner, one), source.percent(learner, other)
    assert first is not None
    assert second is not None
    return first - second


def _hidden(cases: Cases) -> str:
    """ECE by predicted group of T-CIL, PACT and the oracle, over all cases."""
    told = []
    for name in ("t-cil", "optimal-ts", "pact"):
        groups = [
            float(np.mean([source.percent(learner, name, f"ece_predicted_{group}") for source, learner in cases]))
            for group in ("old", "new")
        ]
        told.append(f"{TITLES[name]} {groups[0]:.1f} and {groups[1]:.1f}")
    return f"ECE of images predicted as old and as new classes, mean over cases: {', '.join(told)}."


# each learner beside the paper ---------------------------------------------------------------------------------------


def beside_the_paper(found: Sequence[Source]) -> Iterator[str]:
    """A row for each learner on each data."""
    yield "## Each learner beside the paper\n"
    titles = ("acc.", "none", "TS", "T-CIL", "PACT", "oracle")
    yield f"| data | schedule | learner | n | tasks | mem. | {' | '.join(titles)} | floor |"
    yield "|---|---|---|---:|---:|---:|" + "---:|" * (len(titles) + 1)
    authors = [f"{np.mean(official()[name]):.1f}" for name in SHOWN]
    yield f"| CIFAR-100 | the authors' | ER | 1 | 5/10 | | | {' | '.join(authors)} | |"
    for source in found:
        for learner, study in source.by_learner.items():
            cells = [_both(source, learner, "vanilla", "accuracy")] + [_both(source, learner, name) for name in SHOWN]
            floor = source.percent(learner, "t-cil", "noise_floor")
            share = np.mean(memorised(study))
            n_tasks = study.settings.n_tasks if study.whole else f"{study.n_tasks}/{study.settings.n_tasks}"
            data = source.data.partition(",")[0]  # the number of tasks has a column of its own
            yield (
                f"| {data} | {source.schedule} | {learner.upper()} | {len(study.runs)} | {n_tasks} |"
                f" {share:.1f}{'' if is_valid(study) else MARK} | {' | '.join(cells)} | {floor:.1f} |"
            )
    yield (
        "\n*ECE and accuracy (acc.) in %, means over tasks and then n seeds; in brackets the paper's, over all tasks"
        " and five seeds. Schedules: *compact* has the paper's ResNet-32 and was trained in bf16, *small* a small"
        " ResNet, *letters* (a preset) a tiny one; *the authors'* are their published checkpoints. Tasks: *5/10* are"
        " the first five of ten (the authors': every second). None: the network as trained (Vanilla; in the paper"
        " trained on all the data). Mem.: exemplars that are memorised, so predicted correctly, mean over tasks; the"
        f" paper's nearly all are. {MARK}: fewer than {LEAST_MEMORISED} % after some task, so another regime than the"
        " paper's ([table](results-tables.md#is-it-the-papers-regime)). Oracle: Optimal TS, fitted to the test labels."
        " Floor: the ECE of a perfectly calibrated model.*\n"
    )


def _both(source: Source, learner: str, calibrator: str, metric: str = "ece") -> str:
    ours, theirs = source.percent(learner, calibrator, metric), printed(source.by_learner[learner], calibrator, metric)
    if ours is None:
        return ""
    return f"{ours:.1f}" + (f" ({theirs:.1f})" if theirs is not None else "")
