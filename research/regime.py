"""Whether runs are of the paper's kind: exemplars memorised, and networks over-confident."""

from __future__ import annotations

from collections.abc import Iterable

from tcil.experiments.reporting.collect import Study
from tcil.experiments.reporting.grids import Cell, Grid, Row
from tcil.experiments.reporting.tables import percent_of

LEAST_MEMORISED, LEAST_VANILLA = 95, 10  # percent
MARK = "†"  # behind what rests on runs of another regime
RULE = (
    f"A study is valid as evidence if, after every task, at least {LEAST_MEMORISED} % of the exemplars are memorised;"
    f" with ER vanilla ECE must also be at least {LEAST_VANILLA} on average (the paper's own WA is below that). Where"
    " it fails, the numbers are of another regime than the paper's."
)


def memorised(study: Study) -> list[float]:
    """The share of exemplars that are memorised after each task of each seed, in percent."""
    memories = [task.memory for run in study.runs for task in run.tasks]
    return [100 * memory.accuracy for memory in memories if memory is not None and memory.accuracy is not None]


def is_valid(study: Study) -> bool:
    """Whether a study is of the paper's regime, by the rule."""
    vanilla = percent_of(study, "vanilla", "ece").spread
    assert vanilla is not None
    confident = study.settings.learner != "er" or vanilla.mean >= LEAST_VANILLA
    return min(memorised(study)) >= LEAST_MEMORISED and confident


def regime(studies: Iterable[tuple[str, Study]]) -> Grid:
    """A row for each study, under its name."""
    rows = []
    for name, study in studies:
        shares = memorised(study)
        shown = (
            Cell(words=f"{min(shares):.1f} to {max(shares):.1f}"),
            percent_of(study, "vanilla", "ece"),
            percent_of(study, "vanilla", "accuracy"),
            Cell(words="yes" if is_valid(study) else "no"),
        )
        rows.append(Row(name, shown))
    columns = ("learner", "exemplars memorised, %", "vanilla ECE, %", "accuracy, %", "valid")
    return Grid("As trained, with a validation set held out", columns, tuple(rows))
