"""tcil reproduce: plan and run what artifacts of the paper need, reuse what is there, and draw them."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from tcil.experiments import stopping
from tcil.experiments.analysis import analyse, is_current
from tcil.experiments.artifacts import Artifact, Need, all_needs
from tcil.experiments.calibration import CALIBRATORS
from tcil.experiments.claims import numbered
from tcil.experiments.collect import StoredRun, any_runs, read_runs, studies
from tcil.experiments.commands import run_many
from tcil.experiments.evidence import Evidence
from tcil.experiments.execute import write_tables
from tcil.experiments.executors import Place, Resources
from tcil.experiments.exits import ExitCode
from tcil.experiments.grids import terminal
from tcil.experiments.paper import contradictions
from tcil.experiments.perform import check_names, train
from tcil.experiments.plan import Standing, plan
from tcil.experiments.progress import ProgressDisplay
from tcil.experiments.report import LEAD, Section, study_sections, write_page
from tcil.experiments.run import Run
from tcil.experiments.schedules import Edition
from tcil.experiments.screen import Screen
from tcil.experiments.settings import RunSettings
from tcil.experiments.worker import Job

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
    console: Screen,
    resources: Resources = Resources(),  # noqa: B008 (frozen)
) -> list[Section]:
    """Run what the artifacts need and is not there, then draw them; `only` "plan" or "render" does one of the two."""
    needs = all_needs(artifacts, editions)
    for need in needs:
        check_names(need.settings)
    known = _finished(out, kept)
    if only != "render":
        standings = _standings(needs, known)
        console.print(terminal(plan([one for one, _ in standings], data, [standing for _, standing in standings])))
    if only == "plan":
        return []
    if only != "render":
        missing = [need for need in needs if not _satisfied(need, known.get(need.settings.key))]
        _fulfil_all(missing, out, data, device, resources, console)
        known = _finished(out, kept)
    evidence = Evidence(editions, [run for run in known.values() if run.complete])
    sections = [artifact.render(evidence) for artifact in artifacts]
    grids = [grid for section in sections for grid in section.tables]
    for grid in grids:
        console.print(terminal(grid))
    notes = Section(
        "Where the paper disagrees with itself or with its code",
        ["Lines are those of the paper's LaTeX source.", *numbered(dict(enumerate(contradictions(), start=1)))],
    )
    write_tables(grids, report)
    content = [*sections, notes, *_own_runs(artifacts, evidence)]
    page = write_page(report / "report.html", "T-CIL reproduced", f"{REPRODUCED} {LEAD}", content)
    console.print(f"report {page}\ntables {report / 'tables.md'}, .tex, .csv", soft_wrap=True)
    return sections


def _own_runs(artifacts: Sequence[Artifact], evidence: Evidence) -> list[Section]:
    """Our runs of the main experiments in full, or where there are none, of those that vary a size."""
    wanted = [one for artifact in artifacts for one in artifact.wanted]
    found = {
        run.settings_key: run
        for one in [one for one in wanted if not one.variation] or wanted
        for _, study in evidence.on(one.dataset, one.learner, **one.variation)
        for run in study.runs
    }
    sections = study_sections(studies(found.values()))
    return [replace(section, title=f"Our runs: {section.title}") for section in sections]


def _finished(out: Path, kept: Sequence[Path]) -> dict[str, StoredRun]:
    """Runs that are there, by the hash of their settings; complete ones first, and run folders before kept copies."""
    found: dict[str, StoredRun] = {}
    for place in (out, *kept):
        for run in read_runs([place]) if any_runs(place) else []:
            key = run.settings_key
            if key is not None and (key not in found or (run.complete and not found[key].complete)):
                found[key] = run
    return found


def _standings(needs: Sequence[Need], known: dict[str, StoredRun]) -> list[tuple[RunSettings, Standing]]:
    """Every training that is needed, once, with how far it is."""
    found: dict[str, tuple[RunSettings, Standing]] = {}
    for need in needs:
        run = known.get(need.settings.key)
        ready = _satisfied(need, run)
        standing = Standing.FINISHED if ready else Standing.MISSING if run is None else Standing.TRAINED
        found[need.settings.key] = need.settings, standing
        if need.full_data:
            second = need.settings.on_all_data()
            there = second.key in known or (run is not None and "vanilla-all-data" in run.titles())
            found.setdefault(second.key, (second, Standing.FINISHED if there else Standing.MISSING))
    return list(found.values())


def _satisfied(need: Need, run: StoredRun | None) -> bool:
    """Whether a finished run has all that is needed of it."""
    if run is None or not run.complete or (need.analysis and not is_current(run.analysis, run.tasks)):
        return False
    names = run.tasks[-1]["calibrators"]
    wanted = [*need.calibrators, *(["vanilla-all-data"] if need.full_data and need.settings.validation else [])]
    return all(name in names for name in wanted)


def _fulfil_all(
    needs: Sequence[Need], out: Path, data: Path | None, device: str, resources: Resources, console: Screen
) -> None:
    """All trainings: one after another in this process, or through an executor. What failed is listed and left out."""
    names = [(*CALIBRATORS, *need.calibrators) for need in needs]
    jobs = [
        Job(need.settings, out, data, device, own, full_data=need.full_data, analysis=need.analysis)
        for need, own in zip(needs, names, strict=True)
    ]
    if resources.place is not Place.SERIAL:
        if jobs and run_many(jobs, resources, console) == ExitCode.STOPPED:
            raise stopping.Stopped("stopped; the same command goes on where it was")
        return
    with stopping.on_signals(signal.SIGINT):
        for number, job in enumerate(jobs, start=1):
            console.print(f"training {number} of {len(jobs)}: {job.settings.name}")
            train(
                job.settings, out, data=data, device=device, calibrators=job.calibrators, log=None,
                full_data=job.full_data, display=partial(ProgressDisplay, console),
            )  # fmt: skip
            if job.analysis:
                with ProgressDisplay(console, f"{job.settings.learner} seed {job.settings.seed}") as shown:
                    analyse(Run(job.settings, job.folder, data=data, device=device), shown)
