"""One self-contained HTML page for any set of runs: tables, pictures, settings. It needs no network."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup
from pydantic import JsonValue

from tcil.experiments.reporting import plots
from tcil.experiments.reporting.collect import Study, shown, studies
from tcil.experiments.reporting.grids import Grid, html
from tcil.experiments.reporting.plots import Picture
from tcil.experiments.reporting.tables import COLUMNS, OVERVIEW, by_task, side_by_side, summary
from tcil.experiments.runs.records import JsonObject
from tcil.experiments.runs.store import StoredRun
from tcil.foundation.errors import invalid
from tcil.foundation.files import open_regular, replace_file

CURVES = (
    "vanilla", "ts", "ets", "irm", "perturb-ts", "t-cil", "pact", "first-task-ts", "reserve-ts", "pact-r", "optimal-ts",
)  # fmt: skip
TEMPERATURES = ("ts", "first-task-ts", "t-cil", "optimal-ts")
BEFORE_AFTER = ("vanilla", "ts", "t-cil", "pact", "optimal-ts")
LEAD = (
    "Figures are percentages, means over tasks (counted from 0) unless they stand by task. Every calibrator is fitted"
    " on the very same networks; only 'Vanilla, all data' is a second training, without a validation set. Rows in"
    " italics are not ranked: they see data that the others do not, or have other options. ECE old and ECE new are"
    " those of images predicted as old and new classes. The floor is what a perfectly calibrated model would score by"
    " chance."
)


@dataclass(frozen=True)
class Section:
    """A part of a page."""

    title: str
    lines: Sequence[str] = ()
    grids: Sequence[Grid] = ()
    pictures: Sequence[Picture] = ()
    more: dict[str, Sequence[Grid]] = field(default_factory=dict)
    facts: dict[str, Sequence[tuple[str, str]]] = field(default_factory=dict)

    @property
    def tables(self) -> list[Grid]:
        """All tables: its own, what its pictures show, and what is folded away."""
        values = [picture.values for picture in self.pictures if picture.values is not None]
        return [*self.grids, *values, *(grid for grids in self.more.values() for grid in grids)]

    @property
    def anchor(self) -> str:
        """The name by which links find it."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


def write_report(runs: Sequence[StoredRun], path: Path, title: str | None = None) -> Path:
    """Render all that is known of these runs."""
    groups = studies(shown(runs))
    sections = study_sections(groups)
    if len(groups) > 1:
        overview = [side_by_side(groups, key) for key in OVERVIEW]
        sections.insert(0, Section("Side by side", grids=overview))
    if title is None:
        title = groups[0].title if len(groups) == 1 else f"{sum(len(group.runs) for group in groups)} runs"
    return write_sections(path, title, LEAD, sections)


def write_sections(path: Path, title: str, lead: str, sections: Sequence[Section]) -> Path:
    """Render sections as one file; every string is escaped."""
    template = resources.files(__package__).joinpath("page.html.jinja").read_text()
    page = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(template)
    numbers = itertools.count()
    content = page.render(
        title=title, lead=lead, sections=sections, html=html, svg=lambda picture: inline_svg(picture, next(numbers))
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content.encode())
    return path


_MARKS = {"report.html": b'<meta name="generator" content="tcil">', "tables.csv": b"table,line,block,row,"}
_MARK_UNTIL_0_1 = b":root { --ink: #1c2430; --soft: #5b6675;"  # of pages that name no generator


def check_report(folder: Path, argument: str = "out") -> None:
    """Refuse a folder where a report would overwrite files that an earlier one did not leave; before any work."""
    ours = {name for name, mark in _MARKS.items() if (folder / name).is_file() and _begins(folder / name, mark)}
    for name in ("report.html", "tables.csv", "tables.md", "tables.tex"):
        kin = "report.html" if name == "report.html" else "tables.csv"  # tables are written together
        if (folder / name).exists() and kin not in ours:
            given = f"{folder}, whose {name} is not of an earlier report"
            raise invalid(argument, given, "a folder for the report alone", "Nothing was written. Take another.")


def _begins(file: Path, mark: bytes) -> bool:
    with open_regular(file) as opened:
        start = opened.read(4096)
    return mark in start or _MARK_UNTIL_0_1 in start


def inline_svg(picture: Picture, number: int) -> Markup:
    """The picture as part of the page, with its words for those who do not see it."""
    unique = f"p{number}-"
    # What only a file of its own needs goes; ids are made unique, since several pictures share a page.
    bare = re.sub(r"<metadata>.*?</metadata>|\s+xmlns(:\w+)?=\"[^\"]*\"", "", picture.svg, flags=re.DOTALL)
    body = re.sub(r'(id="|href="#|url\(#)', rf"\1{unique}", bare)
    label = Markup('<svg role="img" aria-label="{}"').format(picture.words)
    return Markup(body.replace("<svg", str(label), 1))  # matplotlib's own SVG, the words escaped  # nosec B704


def study_sections(groups: Sequence[Study]) -> list[Section]:
    """A part for each study."""
    return [_study_section(study) for study in groups]


def _study_section(study: Study) -> Section:
    """Everything on runs that differ in their seeds only."""
    n = len(study.runs)
    seeds = ", ".join(str(run.seed) for run in study.runs)
    memories = [task.memory for run in study.runs for task in run.tasks]
    right = [memory.accuracy for memory in memories if memory is not None and memory.accuracy is not None]
    lines = [
        f"{study.tasks_told.capitalize()}, {study.runs[0].tasks[-1].seen} classes; seed{'s' if n > 1 else ''} {seeds}."
    ]
    settings = study.settings
    given = {"memory": settings.memory, "validation": settings.validation, "epochs": settings.epochs}
    sizes = [f"{name} {size}" for name, size in given.items() if settings.has(name)]
    lines += [f"{', '.join(sizes).capitalize()}."] if sizes else []
    if right:
        lines.append(f"Accuracy on the exemplars: {100 * min(right):.1f} to {100 * max(right):.1f} %.")
    pictures: list[Picture | None] = [
        plots.by_task_curves(study, "ece", "ECE, %", CURVES),
        plots.by_task_curves(study, "temperature", "temperature", TEMPERATURES, scale=1),
        plots.reliability(study, BEFORE_AFTER),
        plots.predicted_groups(study, (*CURVES, "optimal-group-ts")),
        plots.per_class(study, ("vanilla", "t-cil", "pact")),
        plots.search_trace(study),
    ]
    environments = [environment for run in study.runs if (environment := run.environment.record())]
    facts = {"Settings": _facts(settings.record())}
    if environments:
        facts["Environment"] = _facts(environments[0])
    return Section(
        study.title,
        lines,
        [summary(study)],
        [picture for picture in pictures if picture is not None],
        {"All figures by task": [by_task(study, key) for key in COLUMNS]},
        facts,
    )


def _facts(record: JsonObject) -> Sequence[tuple[str, str]]:
    return [(name, _plain(value)) for name, value in sorted(record.items())]


def _plain(value: JsonValue) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
