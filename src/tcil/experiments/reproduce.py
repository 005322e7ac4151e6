"""tcil reproduce: plan and run what artifacts of the paper need, reuse what is there, and draw them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from tcil.experiments.analysis import analyse
from tcil.experiments.artifacts import Artifact, Need, all_needs
from tcil.experiments.calibration import CALIBRATORS
from tcil.experiments.collect import StoredRun, any_runs, read_runs
from tcil.experiments.evidence import Evidence
from tcil.experiments.execute import train, write_tables
from tcil.experiments.grids import terminal
from tcil.experiments.paper import contradictions
from tcil.experiments.plan import plan
from tcil.experiments.progress import ProgressDisplay
from tcil.experiments.report import Section, write_page
from tcil.experiments.run import Run
from tcil.experiments.schedules import Edition

REPRODUCED = (
    "Every table, figure and claim of the paper beside our runs of it, in percent, means over tasks. Each table says on"
    " what schedule ours was run; cells that were not run say so, and nothing is filled in."
)


def reproduce(
    artifacts: Sequence[Artifact],
    editions: Sequence[Edition],
    out: Path,
    report: Path,
    *,
    data: Path | None,
    device: str,
    kept: Sequence[Path],
    only: str,
    console: Console,
) -> list[Section]:
    """Run what the artifacts need and is not there, then draw them; `only` "plan" or "render" does one of the two."""
    needs = all_needs(artifacts, editions)
    known = _finished(out, kept)
    done = [_satisfied(need, known.get(need.settings.key)) for need in needs]
    both = [(need.settings, ready) for need, ready in zip(needs, done, strict=True)]
    both += [(need.settings.on_all_data(), ready) for need, ready in zip(needs, done, strict=True) if need.full_data]
    console.print(terminal(plan([one for one, _ in both], data, [ready for _, ready in both])))
    if only == "plan":
        return []
    if only != "render":
        for number, (need, ready) in enumerate(zip(needs, done, strict=True), start=1):
            if not ready:
                console.print(f"training {number} of {len(needs)}: {need.settings.name}", highlight=False)
                _fulfil(need, out, data, device, console)
        known = _finished(out, kept)
    evidence = Evidence(editions, list(known.values()))
    sections = [artifact.render(evidence) for artifact in artifacts]
    grids = [grid for section in sections for grid in section.grids]
    for grid in grids:
        console.print(terminal(grid))
    notes = Section("Where the paper disagrees with itself or with its code", contradictions())
    write_tables(grids, report)
    page = write_page(report / "report.html", "T-CIL reproduced", REPRODUCED, [*sections, notes])
    console.print(f"report {page}\ntables {report / 'tables.md'}, .tex, .csv", highlight=False, soft_wrap=True)
    return sections


def _finished(out: Path, kept: Sequence[Path]) -> dict[str, StoredRun]:
    """Runs that are there, by the hash of their settings; run folders before kept copies."""
    found: dict[str, StoredRun] = {}
    for place in (out, *kept):
        for run in read_runs([place]) if any_runs(place) else []:
            if run.settings_key is not None and run.complete:
                found.setdefault(run.settings_key, run)
    return found


def _satisfied(need: Need, run: StoredRun | None) -> bool:
    """Whether a finished run has all that is needed of it."""
    if run is None or not run.complete or (need.analysis and not run.analysis):
        return False
    names = run.tasks[-1]["calibrators"]
    wanted = [*need.calibrators, *(["vanilla-all-data"] if need.full_data and need.settings.validation else [])]
    return all(name in names for name in wanted)


def _fulfil(need: Need, out: Path, data: Path | None, device: str, console: Console) -> None:
    names = [*CALIBRATORS, *need.calibrators]
    train(
        need.settings, out, data=data, device=device, calibrators=names, log=None, full_data=need.full_data,
        display=partial(ProgressDisplay, console),
    )  # fmt: skip
    if need.analysis:
        analyse(Run(need.settings, out / need.settings.name, data=data, device=device))
