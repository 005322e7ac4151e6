"""The measured tables of docs/learners.md: the learners on cifar100-mini, and DER on letters, by what was changed.

    python -m research.learners

reads docs/results/learners, runs and letters (left by `tcil report RUNS --keep DIR`), and writes the tables between the
markers of docs/learners.md. Nothing is trained.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

from research import ROOT
from tcil.experiments.config.settings import build
from tcil.experiments.reporting.collect import Study, read_runs
from tcil.experiments.reporting.tables import percent_of
from tcil.experiments.reproduction import paper
from tcil.experiments.runs.catalogue import ALL_DATA
from tcil.foundation.files import replace_file

PAGE, BEGIN, END = ROOT / "docs/learners.md", "<!-- measured: python -m research.learners -->\n", "<!-- end -->\n"
SEEDS = (1, 2, 3)
OLD, NEW = {"preset": "cifar100-mini-0.2"}, {"preset": "cifar100-mini"}
FREE = {"learner_options": {"restrict_head": False}}
BRIEF = {"learner_options": {"finetune_epochs": 10, "finetune_milestones": [5]}}
FIXED, GROWING = ({"learner_options": {"head": head}} for head in ("fixed", "growing"))
LONGER = {"classes": 40, "tasks": 10, "memory": 800}
MANY_STEPS = {"learner_options": {"finetune_epochs": 120, "finetune_milestones": [60]}}
TUNED = {"learner_options": {"finetune_epochs": 30, "finetune_milestones": [10, 20]}}

# Learner, what the row is, and the settings that it may have been run with.
ROWS: tuple[tuple[str, str, tuple[dict[str, Any], ...]], ...] = (
    ("er", "version 0.2.0", (OLD,)),
    ("er", "paper's decay", (NEW,)),
    ("eeil", "version 0.2.0", (OLD,)),
    ("eeil", "paper's decay", (NEW,)),
    ("wa", "version 0.2.0", (OLD,)),
    ("wa", "paper's decay", ({**NEW, **FREE},)),
    ("wa", "paper's decay, restricted head", (NEW,)),
    ("wa", "half the paper's decay, restricted head", ({**NEW, "weight_decay": 1e-3},)),
    ("der", "version 0.2.0", (OLD,)),
    ("der", "paper's decay", ({**NEW, **BRIEF},)),
    ("der", "paper's decay, 30 epochs of stage two", (NEW, {**NEW, **FIXED})),
    ("der", "the same, growing head", ({**NEW, **GROWING},)),
    ("der", "the same, stage two of 120 epochs", ({**NEW, **MANY_STEPS},)),
    ("er", "paper's decay, 40 classes in 10 tasks", ({**NEW, **LONGER},)),
    ("eeil", "paper's decay, 40 classes in 10 tasks", ({**NEW, **LONGER},)),
    ("eeil", "the same, stage two of 30 epochs", ({**NEW, **LONGER, **TUNED},)),
)


# DER on letters, where its logits are divided in stage two and where they are not.
DIVISIONS = {"divided by 5 (the default)": {}, "not divided": {"learner_options": {"finetune_temperature": 1}}}
DIVIDED_SEEDS, SHOWN = (2, 3, 4), ("vanilla", "t-cil", "pact", "optimal-ts")


def main() -> None:
    """Write the tables into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    table = "\n".join([*lines(), "", *divided()]) + "\n"
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    replace_file(PAGE, f"{before}{BEGIN}\n{table}\n{END}{after}".encode())
    print(table)


def lines() -> Iterator[str]:
    """The table: a row for each variant that was run, and the paper's own rows."""
    runs = {run.settings.key: run for run in read_runs([ROOT / "docs/results/runs", ROOT / "docs/results/learners"])}
    yield "| learner | variant | seeds | accuracy, % | vanilla ECE, % | T-CIL ECE, % | exemplars memorised, % |"
    yield "|---|---|---|---|---|---|---|"
    for learner in ("er", "eeil", "wa", "der"):
        for own, variant, settings in ROWS:
            keys = [build({**one, "learner": own, "seed": seed}).key for seed in SEEDS for one in settings]
            found = tuple(runs[key] for key in keys if key in runs)
            if own == learner and found:
                yield _line(Study(found), variant)
        rows = [paper.find("grid", dataset="cifar100", learner=learner, calibrator=c) for c in (ALL_DATA, "t-cil")]
        vanilla, tcil = (row.metrics for row in rows if row is not None)
        printed = (vanilla["accuracy"], vanilla["ece"], tcil["ece"])
        figures = " | ".join(f"{pair[0]:.2f} ± {pair[1]:.2f}" if pair else "" for pair in printed)
        yield f"| {learner.upper()} | the paper, CIFAR-100 in 10 tasks | five | {figures} | |"


def divided() -> Iterator[str]:
    """A table of DER on letters: what the division of its logits in stage two changes."""
    runs = {run.settings.key: run for run in read_runs([ROOT / "docs/results/letters", ROOT / "docs/results/learners"])}
    yield f"DER on letters, seeds {', '.join(map(str, DIVIDED_SEEDS))}:\n"
    yield "| logits in stage two | accuracy, % | vanilla ECE, % | T-CIL | PACT | Optimal TS |"
    yield "|---|---|---|---|---|---|"
    for name, change in DIVISIONS.items():
        own = {"preset": "letters", "learner": "der", **change}
        study = Study(tuple(runs[build({**own, "seed": seed}).key] for seed in DIVIDED_SEEDS))
        figures = [percent_of(study, "vanilla", "accuracy"), *(percent_of(study, one, "ece") for one in SHOWN)]
        yield f"| {name} | {' | '.join(figure.text() for figure in figures)} |"


def _line(study: Study, variant: str) -> str:
    seeds = ", ".join(str(run.seed) for run in study.runs)
    figures = [percent_of(study, "vanilla", "accuracy").text(), percent_of(study, "vanilla", "ece").text()]
    figures.append(percent_of(study, "t-cil", "ece").text() if study.having("t-cil") else "not run")
    memories = [task.memory for run in study.runs for task in run.tasks]
    known = [100 * memory.accuracy for memory in memories if memory is not None and memory.accuracy is not None]
    figures.append(f"{np.mean(known):.1f}, least {min(known):.1f}")
    return f"| {study.settings.learner.upper()} | {variant} | {seeds} | {' | '.join(figures)} |"


if __name__ == "__main__":
    main()
