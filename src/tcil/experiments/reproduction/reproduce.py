"""`tcil reproduce`: plan and run what artifacts of the paper need, reuse finished runs, and draw them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tcil.experiments.config.settings import RunSettings
from tcil.experiments.process import stopping
from tcil.experiments.process.exits import ExitCode, RunFailed
from tcil.experiments.process.screen import Screen
from tcil.experiments.reporting.grids import terminal
from tcil.experiments.reporting.page import Section
from tcil.experiments.reproduction.artifacts import Artifact, Need, all_needs
from tcil.experiments.reproduction.draw import draw
from tcil.experiments.reproduction.finished import FinishedRuns, drawable, read_finished
from tcil.experiments.reproduction.schedules import Edition
from tcil.experiments.runs.analysis import is_current
from tcil.experiments.runs.catalogue import ALL_DATA
from tcil.experiments.runs.complete import check_names, check_options
from tcil.experiments.runs.entries import CALIBRATORS
from tcil.experiments.runs.store import RunFolder, StoredRun
from tcil.experiments.scheduling.cost import Speed
from tcil.experiments.scheduling.executors import Place, Resources
from tcil.experiments.scheduling.job import Job
from tcil.experiments.scheduling.plan import Planned, Standing, plan, read_once
from tcil.experiments.scheduling.sweep import run_jobs
from tcil.foundation.errors import invalid


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
    until: int | None = None,
    backup: Path | None = None,
    job: int | None = None,
    speed: Speed | None = None,
    compiled: bool = False,
) -> list[Section]:
    """Run the missing trainings of the artifacts, then draw them; `only` "plan" or "render" does one part.

    `until` is the number of tasks of every run, regardless of the schedule. `job`: execute only the run with this
    number in the plan, and draw nothing. `speed`: the plan also shows the hours at this speed. If a training fails, the
    others are still run and drawn; then `RunFailed` is raised.
    """
    needs = all_needs(artifacts, editions)
    if until is not None:
        needs = [replace(need, until=until) for need in needs]
    for need in needs:
        check_names(need.settings)
    check_options(None, None, here=resources.here and only != "render")
    if job is not None and not 1 <= job <= len(needs):
        raise invalid("job", f"{job}", f"1 to {len(needs)}, as --dry-run numbers the runs")
    runs, code = read_finished([out, *kept]), ExitCode.DONE
    if only != "render":
        notes = [edition.left_out for edition in editions if edition.left_out]
        numbered = [(n, need) for n, need in enumerate(needs, start=1) if job in (None, n)]
        console.print(terminal(plan(_planned(numbered, runs, out), data, speed, notes)))
    if only == "plan":
        return []
    if only != "render":
        missing = [need for _, need in numbered if not satisfied(need, runs.get(need.settings.key))]
        code = _run(missing, out, data, device, resources, console, backup, compiled)
        runs = read_finished([out, *kept])
        if job is not None:
            if code != ExitCode.DONE:
                raise RunFailed("the training failed, as listed above")
            return []
    finished = FinishedRuns(editions, [run for run in runs.values() if drawable(run)])
    sections = draw(artifacts, finished, report, console)
    if code != ExitCode.DONE:
        raise RunFailed("some trainings failed, as listed above; what they were needed for is left out")
    return sections


def _planned(needs: Sequence[tuple[int, Need]], runs: Mapping[str, StoredRun], out: Path) -> list[Planned]:
    """Every training that is needed, once, with its number and progress.

    What is unfinished goes on from its networks, which are in the folder `out` alone: of kept results there are none.
    """
    planned: dict[str, Planned] = {}

    def tasks_of(settings: RunSettings) -> int:
        return RunFolder(out / settings.name).n_done

    for number, need in needs:
        run = runs.get(need.settings.key)
        asked = 0 if run is None else min(need.until or len(run.tasks), len(run.tasks))
        trained = run is not None and _far_enough(need, run) and tasks_of(need.settings) >= asked
        standing = Standing.FINISHED if satisfied(need, run) else Standing.TRAINED if trained else Standing.MISSING
        planned[need.settings.key] = Planned(need.settings, standing, number, need.until, tasks_of(need.settings))
        if need.full_data:
            second = need.settings.on_all_data()
            twin = runs.get(second.key)
            beside = run is not None and ALL_DATA in run.titles()
            there = beside or (twin is not None and _far_enough(need, twin))
            ready = Standing.FINISHED if there else Standing.MISSING
            planned.setdefault(second.key, Planned(second, ready, number, need.until, tasks_of(second)))
    return list(planned.values())


def _far_enough(need: Need, run: StoredRun) -> bool:
    """Whether a run has reached the last task that is needed."""
    return run.result.until is None or (need.until is not None and len(run.tasks) >= need.until)


def satisfied(need: Need, run: StoredRun | None) -> bool:
    """Whether a finished run has everything that is needed."""
    if run is None or not _far_enough(need, run):
        return False
    if not drawable(run) or (need.analysis and not is_current(run.analysis, run.tasks)):
        return False
    names = run.tasks[-1].calibrators
    wanted = [*need.calibrators, *([ALL_DATA] if need.full_data and need.settings.validation else [])]
    return all(name in names for name in wanted)


def _run(
    needs: Sequence[Need],
    out: Path,
    data: Path | None,
    device: str,
    resources: Resources,
    console: Screen,
    backup: Path | None,
    compiled: bool,
) -> ExitCode:
    """Run all trainings with the executors of a sweep; failed ones are listed and left out."""
    if not needs:
        return ExitCode.DONE
    if resources.place is not Place.RAY:  # Ray nodes may have data that this machine does not have
        for need in needs:
            read_once(need.settings.dataset, data, **need.settings.data_options)
    jobs = [
        Job(
            need.settings,
            out,
            data,
            device,
            (*CALIBRATORS, *need.calibrators),
            full_data=need.full_data,
            analysis=need.analysis,
            until=need.until,
            backup=backup,
            compiled=compiled,
        )
        for need in needs
    ]
    code = run_jobs(jobs, resources, console)
    if code == ExitCode.STOPPED:
        raise stopping.Stopped("stopped; run the same command again to resume")
    return code
