"""Whether runs are of the paper's kind: exemplars memorised, and networks over-confident."""

from __future__ import annotations

from collections.abc import Iterable

from tcil.experiments.reporting.collect import Study
from tcil.experiments.reporting.grids import Cell, Grid, Row
from tcil.experiments.reporting.tables import percent_of

LEAST_MEMORISED, LEAST_VANILLA = 95, 10  # percent
RULE = (
    f"A study is valid as evidence if, after every task, at least {LEAST_MEMORISED} % of the exemplars are memorised;"
    f" with ER vanilla ECE must also be at least {LEAST_VANILLA} on average (the paper's own WA is below that). Where"
    " it fails, the numbers are of another regime than the paper's."
)


def regime(studies: Iterable[tuple[str, Study]]) -> Grid:
    """A row for each study, under its name."""
    rows = []
    for name, study in studies:
        memories = [task.memory for run in study.runs for task in run.tasks]
        right = [100 * memory.accuracy for memory in memories if memory is not None and memory.accuracy is not None]
        vanilla = percent_of(study, "vanilla", "ece")
        assert vanilla.spread is not None
        confident = study.settings.learner != "er" or vanilla.spread.mean >= LEAST_VANILLA
        valid = "yes" if min(right) >= LEAST_MEMORISED and confident else "no"
        shown = (Cell(words=f"{min(right):.1f} to {max(right):.1f}"), vanilla, percent_of(study, "vanilla", "accuracy"))
        rows.append(Row(name, (*shown, Cell(words=valid))))
    columns = ("learner", "exemplars memorised, %", "vanilla ECE, %", "accuracy, %", "valid")
    return Grid("As trained, with a validation set held out", columns, tuple(rows))
