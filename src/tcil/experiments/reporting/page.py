"""One self-contained HTML page for any set of runs: findings, tables, pictures, settings. It needs no network."""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
from markupsafe import Markup

from tcil.experiments.reporting.charts import CONFIG, Chart, embedded, scripts, static_svg
from tcil.experiments.reporting.collect import Study, brief, shown, studies
from tcil.experiments.reporting.figures import (
    claimed_and_achieved,
    error_by_class,
    error_by_task,
    errors_by_group,
    errors_by_study,
    reliability,
    risk_by_coverage,
    search_trace,
    temperature_by_task,
)
from tcil.experiments.reporting.findings import sentences
from tcil.experiments.reporting.grids import TABLES_OF, Grid, html
from tcil.experiments.reporting.tables import COLUMNS, OVERVIEW, by_task, decisions, overview, overview_of, side_by_side
from tcil.experiments.runs.records import JsonObject
from tcil.experiments.runs.store import StoredRun
from tcil.foundation.errors import invalid
from tcil.foundation.files import open_regular, replace_file

if TYPE_CHECKING:  # with matplotlib, which only the paper's pictures need
    from tcil.experiments.reporting.plots import Picture

LEAD = (
    "All figures are percentages. They are means over tasks unless a table lists the tasks, which are counted from 0."
    " Every calibrator is fitted on the same networks; only 'Vanilla, all data' comes from a second training, without a"
    " validation set. Rows in italics are not ranked: they use data that the others do not have, or other options."
)
TERMS = {
    "ECE": "Expected calibration error in ten bins: how far confidence is from accuracy. Lower is better.",
    "ECE old, ECE new": "The ECE of images predicted as old classes, and of those predicted as new ones.",
    "AECE": "The same error with ten bins of equal size.",
    "To oracle": "How many points a calibrator's ECE is above that of Optimal TS.",
    "Optimal TS": "The oracle: one temperature fitted on the test set itself, which no calibrator may use.",
    "Noise floor": "The ECE that a perfectly calibrated model would have by chance on this number of test images.",
}


@dataclass(frozen=True)
class Section:
    """A part of a page: text, tables and pictures, what is folded away, and parts of its own.

    `beside` is a picture that stands beside the first table.
    """

    title: str
    lines: Sequence[str] = ()
    grids: Sequence[Grid] = ()
    pictures: Sequence[Picture | Chart] = ()
    more: Mapping[str, Sequence[Grid]] = field(default_factory=dict)
    facts: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    sentences: Sequence[str] = ()
    beside: Picture | Chart | None = None
    terms: Mapping[str, str] = field(default_factory=dict)
    parts: Sequence[Section] = ()

    @property
    def tables(self) -> list[Grid]:
        """All tables: its own, what its pictures show, and what is folded away."""
        values = [picture.values for picture in self.pictures if picture.values is not None]
        return [*self.grids, *values, *(grid for grids in self.more.values() for grid in grids)]

    @property
    def charts(self) -> bool:
        """Whether some picture of it, or of its parts, needs scripts."""
        own = any(isinstance(picture, Chart) for picture in (*self.pictures, self.beside))
        return own or any(part.charts for part in self.parts)


READING = Section("How to read this page", [LEAD], terms=TERMS)


@dataclass(frozen=True)
class Placed:
    """A section where links find it."""

    section: Section
    anchor: str
    parts: Sequence[Placed]


def write_report(runs: Sequence[StoredRun], path: Path) -> Path:
    """Render all that is known of these runs: what was learned, then every table and picture.

    The same runs give the same file.
    """
    groups = studies(shown(runs))
    if len(groups) == 1:
        front = study_section(groups[0])
        sections, front = front.parts, replace(front, parts=())
    else:
        count = sum(len(group.runs) for group in groups)
        datasets = ", ".join(sorted({group.settings.dataset for group in groups}))
        front = Section(
            f"{count} runs on {datasets}",
            [f"{len(groups)} studies; runs that differ in their seeds only are one study. Mean over tasks."],
            [overview_of(groups)],
            sentences=sentences(groups),
            beside=errors_by_study(groups),
        )
        others = [side_by_side(groups, key) for key in OVERVIEW if key != "ece"]
        sections = [Section("Studies side by side", grids=others), *study_sections(groups)]
    return write_sections(path, front, [*sections, READING], marks_of(runs))


def marks_of(runs: Sequence[StoredRun]) -> frozenset[str]:
    """A short name of each run, which the page carries: a report of other runs replaces it only on request."""
    names = (run.settings.without() + run.origin for run in runs)
    return frozenset(hashlib.sha256(name.encode()).hexdigest()[:12] for name in names)


def marks_of_comparison(left: Sequence[StoredRun], right: Sequence[StoredRun]) -> frozenset[str]:
    """The same for the tables of a comparison, in which it matters on which side a run is."""
    sides = {"a": left, "b": right}
    return frozenset(f"{_COMPARED}{side}-{mark}" for side, runs in sides.items() for mark in marks_of(runs))


def write_sections(path: Path, front: Section, sections: Sequence[Section], marks: Collection[str]) -> Path:
    """Render sections as one file, with what comes first on top; every string is escaped, nothing is loaded.

    `marks` say of which runs the page is; `check_replaced` compares them with those of the next report.
    """
    own = {name: resources.files(__package__).joinpath(name).read_text() for name in ("page.css", "page.js")}
    template = resources.files(__package__).joinpath("page.html.jinja").read_text()
    page = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template)
    interactive = front.charts or any(section.charts for section in sections)
    vega = scripts() if interactive else ""
    pictures, figures = itertools.count(), itertools.count()
    content = page.render(
        marks=" ".join(sorted(marks)),
        front=front,
        tree=_placed(sections, set()),
        style=Markup(own["page.css"]),  # our own file  # nosec B704
        script=Markup(own["page.js"]),  # our own file  # nosec B704
        vega=Markup(vega),  # scripts of a package; their strings cannot end the element  # nosec B704
        allowed=" ".join(_hash(text) for text in (own["page.js"], vega) if text),
        interactive=interactive,
        config=CONFIG,
        html=html,
        embedded=embedded,
        count=lambda: next(figures),
        svg=lambda picture: inline_svg(picture.svg, picture.words, next(pictures)),
        static=lambda chart, panel: inline_svg(
            static_svg(chart, panel), f"{panel.title}. {chart.words}" if panel.title else chart.words, next(pictures)
        ),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content.lstrip().encode())
    return path


def _hash(script: str) -> str:
    """What allows this very script, and no other, to run on the page."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _placed(sections: Sequence[Section], taken: set[str], before: str = "") -> list[Placed]:
    """The sections with anchors, each once on the page."""
    placed = []
    for section in sections:
        words = re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-") or "part"
        anchor = name = f"{before}{words}"
        for number in itertools.count(2):
            if anchor not in taken:
                break
            anchor = f"{name}-{number}"
        taken.add(anchor)
        placed.append(Placed(section, anchor, _placed(section.parts, taken, f"{anchor}-")))
    return placed


PAPER = "paper"  # what a page of 'tcil reproduce' is of
_COMPARED = "compare-"  # begins the marks of a comparison
_TABLES = ("tables.tex", "tables.csv", "tables.md")
_MARKS = {"report.html": b'<meta name="generator" content="tcil">', "tables.csv": b"table,line,block,row,"}
_MARK_UNTIL_0_1 = b":root { --ink: #1c2430; --soft: #5b6675;"  # of pages that name no generator


def check_report(folder: Path, argument: str = "out") -> None:
    """Refuse a folder where a report would overwrite files that no report has left; before any work."""
    ours = {name for name, mark in _MARKS.items() if (folder / name).is_file() and _begins(folder / name, mark)}
    for name in ("report.html", "tables.csv", "tables.md", "tables.tex"):
        kin = "report.html" if name == "report.html" else "tables.csv"  # tables are written together
        if (folder / name).exists() and kin not in ours:
            given = f"{folder}, whose {name} is not of an earlier report"
            raise invalid(argument, given, "a folder for the report alone", "Nothing was written. Take another.")


def check_replaced(folder: Path, marks: Collection[str], argument: str = "out") -> None:
    """Refuse a folder with a report or tables of something that those with these marks would not show.

    The same runs again, or the same and more, replace their earlier report.
    """
    page, tables = folder / "report.html", [folder / name for name in _TABLES if (folder / name).is_file()]
    found = {}
    if page.is_file():
        found["a report"] = _marks_in(page, rb'<meta name="tcil-report" content="([^"]*)">')
    if tables:
        named = _marks_in(folder / _TABLES[0], rb"\A" + TABLES_OF.encode() + rb"([^\n]*)\n")
        if named is not None or not found:  # those of an earlier version are of the page beside them
            found["tables"] = named
    for what, before in found.items():
        if before is not None and before <= set(marks):
            continue
        whose = "of an earlier version, without the names of the runs" if before is None else _other(before, marks)
        advice = f"Nothing was written. Take another --{argument}, or add --overwrite to replace it."
        raise invalid(argument, f"{folder}, which holds {what} {whose}", "a folder without those of other runs", advice)


def _marks_in(file: Path, pattern: bytes) -> set[str] | None:
    """The marks that a file carries; None if it carries none."""
    found = re.search(pattern, _start(file, 2**20)) if file.is_file() else None
    return None if found is None else set(found[1].decode("ascii", "replace").split())


def _other(before: Collection[str], marks: Collection[str]) -> str:
    """Of what a report is, beside one with these marks."""
    if PAPER in before:
        return "of 'tcil reproduce'"
    missing, runs = len(set(before) - set(marks)), "1 run" if len(before) == 1 else f"{len(before)} runs"
    compared = any(mark.startswith(_COMPARED) for mark in before)
    return (
        f"of {'a comparison of ' * compared}{runs}, {missing} of which {'is' if missing == 1 else 'are'} not given now"
    )


def _begins(file: Path, mark: bytes) -> bool:
    start = _start(file, 4096)
    return mark in start or _MARK_UNTIL_0_1 in start


def _start(file: Path, count: int) -> bytes:
    with open_regular(file) as opened:
        return opened.read(count)


def inline_svg(svg: str, words: str, number: int) -> Markup:
    """A picture as part of the page, with its words for those who do not see it."""
    unique = f"p{number}-"
    # What only a file of its own needs goes; ids are made unique, since several pictures share a page.
    bare = re.sub(r'<metadata>.*?</metadata>|\s+(xmlns(:\w+)?|role|aria-\w+)="[^"]*"', "", svg, flags=re.DOTALL)
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{unique}", bare)
    label = Markup('<svg role="img" aria-label="{}"').format(words)
    return Markup(body.replace("<svg", str(label), 1))  # a library's own SVG, the words escaped  # nosec B704


def study_sections(groups: Sequence[Study]) -> list[Section]:
    """A part for each study."""
    return [study_section(study) for study in groups]


def study_section(study: Study) -> Section:
    """Everything on runs that differ in their seeds only: what was learned first, then its parts."""
    environments = [environment for run in study.runs if (environment := run.environment.record())]
    facts = {"Settings": _facts(study.settings.record())}
    if environments:
        facts["Environment"] = _facts(environments[0])
    more = {"All figures by task": [_untitled(study, by_task(study, key)) for key in COLUMNS]}
    if rules := decisions(study):
        more["Decisions: promised and achieved"] = [_untitled(study, grid) for grid in rules]
    parts = [
        _part("Task by task", error_by_task(study), temperature_by_task(study)),
        _part("Reliability diagrams", reliability(study)),
        _part("Classes, and T-CIL's search", error_by_class(study), search_trace(study)),
        _part("Decisions", risk_by_coverage(study), claimed_and_achieved(study)),
        Section("Details", more=more, facts=facts),
    ]
    return Section(
        study.title,
        [_about(study)],
        [overview(study)],
        sentences=sentences([study]),
        beside=errors_by_group(study),
        parts=[part for part in parts if part is not None],
    )


def _part(title: str, *charts: Chart | None) -> Section | None:
    pictures = [chart for chart in charts if chart is not None]
    return Section(title, pictures=pictures) if pictures else None


def _untitled(study: Study, grid: Grid) -> Grid:
    """A study's table without the study's name, which stands above it."""
    title = grid.title.removeprefix(f"{study.title}: ")
    return replace(grid, title=title[:1].upper() + title[1:])


def _about(study: Study) -> str:
    """What was run, in a line."""
    settings, n = study.settings, len(study.runs)
    seeds = ", ".join(str(run.seed) for run in study.runs)
    said = [f"{study.runs[0].tasks[-1].seen} classes in {study.tasks_told}", f"seed{'s' if n > 1 else ''} {seeds}"]
    if settings.network:
        said.append(f"network {settings.network}")
    sizes = {"epochs": "{} epochs", "memory": "memory of {} exemplars", "validation": "{} validation images per task"}
    said += [words.format(size) for name, words in sizes.items() if (size := getattr(settings, name)) is not None]
    memories = [task.memory for run in study.runs for task in run.tasks]
    right = [memory.accuracy for memory in memories if memory is not None and memory.accuracy is not None]
    if right:
        low, high = f"{100 * min(right):.1f}", f"{100 * max(right):.1f}"
        said.append(f"{low if low == high else f'{low} to {high}'} % of the exemplars predicted correctly")
    return f"{'; '.join(said)}."


def _facts(record: JsonObject) -> Sequence[tuple[str, str]]:
    return [(name, brief(value)) for name, value in sorted(record.items())]
