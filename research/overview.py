"""docs/results.md: what was found here, one picture for each question, and the main tables.

    make results        (or: python -m research.overview)

reads docs/results/compact, small, letters and runs (copies left by `tcil report RUNS --keep DIR`) and
docs/results/official-checkpoints.json, and writes docs/results.md and docs/images/overview/*.svg. Nothing is trained.
docs/results-short.md (`python -m research.results`) has the details of the schedule `short-0.2`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from research import ROOT
from tcil.experiments.config.settings import RunSettings
from tcil.experiments.reporting.collect import Study, any_runs, read_runs, shown, studies
from tcil.experiments.reporting.grids import markdown
from tcil.experiments.reporting.palette import colour
from tcil.experiments.reporting.plots import MARKERS, Picture, drawing, picture
from tcil.experiments.reporting.tables import percent_of, side_by_side
from tcil.experiments.reproduction.artifacts import ARTIFACTS, Need, all_needs
from tcil.experiments.reproduction.finished import FinishedRuns
from tcil.experiments.reproduction.schedules import LEARNERS, editions
from tcil.experiments.runs.store import StoredRun
from tcil.foundation.files import replace_file

RESULTS, IMAGES, PAGE = ROOT / "docs/results", ROOT / "docs/images/overview", ROOT / "docs/results.md"
OFFICIAL = {"vanilla": "Vanilla", "ts": "TS", "t-cil": "T-CIL", "pact": "PACT", "optimal-ts": "Optimal TS (oracle)"}
TITLES = {
    "vanilla": "Vanilla", "ts": "TS", "ets": "ETS", "irm": "IRM", "t-cil": "T-CIL", "pact": "PACT (ours)",
    "optimal-ts": "Optimal TS (oracle)",
}  # fmt: skip
OF_THE_PAPER = ("vanilla", "ts", "ets", "irm", "perturb-ts")  # what T-CIL is compared with there
COLUMNS = 4  # panels of a row, where sources and the authors' checkpoints stand side by side
TABLES = ("ece", "ece_predicted_old", "ece_predicted_new", "accuracy")

HEAD = """# Results on CIFAR, Tiny-ImageNet and letters

What the calibrators do on networks that this project has trained, beside the authors' networks and the paper's numbers.
*Optimal TS* is the oracle: one temperature fitted to the test labels. PACT is ours, the other calibrators are the
paper's. [Where these numbers come from](#where-these-numbers-come-from) says which of them PACT was developed on.
"""

ORIGIN = """## Where these numbers come from

Written by `make results` from the JSON files under `docs/results/`. Nothing on this page is typed in by hand except the
words around the numbers. All runs were made by this project on two shared CPU cores. Unless a table says otherwise,
numbers are means over tasks, and then over seeds. The runs on 20 classes of CIFAR-100 are those of version 0.2.0: their
learners ([what has changed](learners.md)) and their PACT are of that version.

**PACT was developed on runs of this page** (13 of the 20 on letters, and those of 20 classes): [the page on
PACT](pact.md) has runs that were not looked at. Not all runs have PACT in [its present form](pact.md#results);
[the others](pact-history.md#which-page-shows-which-form) have an earlier one.

- PACT in its present form, the authors' checkpoints: all.
"""


@dataclass(frozen=True)
class Source:
    """Runs of several learners on the same data."""

    name: str
    network: str
    what: str
    command: str
    by_learner: Mapping[str, Study]

    @property
    def described(self) -> str:
        """The data, the network and the stream in words."""
        what = self.what if self.network in self.name else f"{self.network}, {self.what}"
        return f"{self.name} ({what})"

    def percent(self, learner: str, calibrator: str, metric: str = "ece") -> float | None:
        """A mean over tasks and seeds, in percent."""
        cell = percent_of(self.by_learner[learner], calibrator, metric)
        return None if cell.spread is None else cell.spread.mean

    def mean(self, calibrator: str, metric: str = "ece") -> float | None:
        """The same over all learners, which count equally; None where one has no such number."""
        values = [self.percent(learner, calibrator, metric) for learner in self.by_learner]
        return None if None in values else float(np.mean([value for value in values if value is not None]))


def main() -> None:
    """Write the page and its pictures."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    IMAGES.mkdir(parents=True, exist_ok=True)
    found = sources()
    parts = [HEAD, *summary(found), *questions(found), ORIGIN.rstrip(), *forms(), *tables(found), *coverage()]
    replace_file(PAGE, ("\n".join(parts).rstrip() + "\n").encode())
    print(PAGE.relative_to(ROOT))


def sources() -> list[Source]:
    """What was run: the schedules `compact` and `small`, letters, and 20 classes of CIFAR-100 as in version 0.2.0."""
    kept = {"compact": "compact", "small": "small", "short-0.2": "runs"}
    runs = {schedule: FinishedRuns(editions(schedule), _runs(RESULTS / folder)) for schedule, folder in kept.items()}

    def of(schedule: str, edition: int, dataset: str) -> dict[str, Study]:
        known = runs[schedule]
        found = {learner: known.study(known.editions[edition], dataset, learner) for learner in LEARNERS}
        return {learner: study for learner, study in found.items() if study is not None}

    by_name = {study.settings.learner: study for study in studies(shown(_runs(RESULTS / "letters")))}
    letters = {learner: by_name[learner] for learner in LEARNERS if learner in by_name}
    command = "tcil reproduce all --schedule {} --data DIR".format
    drawn = "tcil run --preset letters --learner LEARNER --seeds 2,3,4,5,6 --no-full-data"
    ten, twenty = "10 tasks of 10 classes, memory 2,000", "10 tasks of 20, memory 4,000"
    two, four = "5 tasks of 2, memory 200", "5 tasks of 4, memory 400"
    part = f"{four}, learners and PACT of version 0.2.0"
    all_of_them = [
        Source("CIFAR-100, ResNet-32", "ResNet-32", ten, command("compact"), of("compact", 0, "cifar100")),
        Source("CIFAR-100", "small ResNet", ten, command("small"), of("small", 0, "cifar100")),
        Source("Tiny-ImageNet", "small ResNet", twenty, command("small"), of("small", 1, "tiny-imagenet")),
        Source("CIFAR-10", "small ResNet", two, command("small"), of("small", 1, "cifar10")),
        Source("letters", "tiny ResNet", four, drawn, letters),
        Source("20 classes of CIFAR-100", "small ResNet", part, command("short-0.2"), of("short-0.2", 0, "cifar100")),
    ]
    return [source for source in all_of_them if source.by_learner]


def _runs(folder: Path) -> list[StoredRun]:
    return read_runs([folder]) if any_runs(folder) else []


def forms() -> Iterator[str]:
    """Which runs of this page have PACT in its present form, with a temperature of their own for new classes."""
    for name, folder in {"letters": "letters", "the schedule `small`": "small", "`compact`": "compact"}.items():
        runs = _runs(RESULTS / folder)
        present = [run for run in runs if _has_contrast(run)]
        told = (
            ", ".join(f"{run.learner.upper()} on {run.settings.dataset}, seed {run.seed}" for run in present)
            or "no run"
        )
        which = "all runs" if len(present) == len(runs) else told
        which += f" ({len(present)} of {len(runs)})"
        yield f"- PACT in its present form, {name}: {which}."
    yield ""


def _has_contrast(run: StoredRun) -> bool:
    """Whether PACT has two temperatures after the second task."""
    row = run.result.tasks[1].calibrators.get("pact") if len(run.result.tasks) > 1 else None
    if row is None:
        return False
    old, new = (getattr(row.result, name, None) for name in ("temperature", "new_temperature"))
    return new is not None and new != old


# the summary -------------------------------------------------------------------------------------------------


def _named(learner: str, study: Study) -> str:
    """The learner, and how far its runs went if they are not complete."""
    until = study.runs[0].result.until
    return learner.upper() + (f" (first {until} tasks)" if until is not None else "")


def summary(found: Sequence[Source]) -> Iterator[str]:
    """A table and five lines, computed from the results."""
    yield "## Summary\n"
    names = ("vanilla", "ts", "t-cil", "pact", "optimal-ts")
    yield "| ECE, % | learners (seeds) | " + " | ".join(TITLES[name] for name in names) + " | noise floor |"
    yield "|---|---|" + "---:|" * (len(names) + 1)
    official = [float(np.mean(values)) for values in (_official()[name] for name in names)]
    cells = " | ".join(f"{value:.1f}" for value in official)
    yield f"| CIFAR-100, the authors' checkpoints (ResNet-32, tasks 0, 2, 4, 6, 8) | ER (1) | {cells} | |"
    for source in found:
        learners = ", ".join(f"{_named(name, study)} ({len(study.runs)})" for name, study in source.by_learner.items())
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


def _official() -> dict[str, list[float]]:
    """ECE by task on the authors' checkpoints, in percent."""
    record = json.loads((RESULTS / "official-checkpoints.json").read_text())["results"]
    return {name: [100 * task["ece"] for task in record[title].values()] for name, title in OFFICIAL.items()}


# one picture for each question ---------------------------------------------------------------------------------


def questions(found: Sequence[Source]) -> Iterator[str]:
    """The pictures, each under the question that it answers."""
    yield "## Which calibrator is nearest to the oracle?\n"
    yield _saved(nearness(found), "nearness")
    yield "## Does it last from task to task?\n"
    for number, source in enumerate(_main(found)):
        yield _saved(over_tasks(source), f"tasks-{number}")
    yield "## What does one temperature hide?\n"
    yield _saved(hidden(found), "hidden")
    yield "## Is T-CIL's temperature the right one?\n"
    yield _saved(temperatures(found), "temperatures")


def _main(found: Sequence[Source]) -> list[Source]:
    """What is shown task by task and calibrator by calibrator: all of CIFAR-100, and letters."""
    return [source for source in found if source.name in ("CIFAR-100, ResNet-32", "CIFAR-100", "letters")]


def _panels(axes: Any, count: int) -> list[Axes]:
    """The first axes of a grid, row by row; the others are taken away."""
    every = list(axes.flat)
    for spare in every[count:]:
        spare.remove()
    return every[:count]


def nearness(found: Sequence[Source]) -> Picture:
    """ECE by calibrator, a panel for each source, a mark for each learner."""
    names, words = list(reversed(TITLES)), []
    with drawing(2, COLUMNS, width=10, height=5.6) as (figure, axes):
        panels = _panels(axes, len(found) + 1)
        for number, (axis, source) in enumerate(zip(panels, found, strict=False)):
            for learner in source.by_learner:
                values = [source.percent(learner, name) for name in names]
                rows = [row for row, value in enumerate(values) if value is not None]
                marks = [value for value in values if value is not None]
                mark = MARKERS[LEARNERS.index(learner)]  # the same in every panel
                _marks(axis, marks, rows, [names[row] for row in rows], mark, learner.upper())
                told = ", ".join(f"{names[row]} {values[row]:.1f}" for row in rows)
                words.append(f"{source.name}, {learner.upper()}: {told}")
            _panel(axis, source.name, names, first=number % COLUMNS == 0)
        last, record = panels[-1], _official()
        own = [name for name in names if name in record]
        marks = [float(np.mean(record[name])) for name in own]
        _marks(last, marks, [names.index(name) for name in own], own, MARKERS[0], "ER")
        _panel(last, "authors' checkpoints", names, first=False)
        for axis in panels:  # one scale, so that panels can be compared
            axis.set_xlim(0, max(panel.get_xlim()[1] for panel in panels))
        words.append("authors' checkpoints, ER: " + ", ".join(f"{n} {v:.1f}" for n, v in zip(own, marks, strict=True)))
        _legend(figure, panels)
        caption = (
            "ECE by calibrator, mean over tasks and seeds; a mark for each learner. Calibrators of the paper and PACT"
            " see no unseen images of old classes, the oracle sees the test labels."
        )
        return picture(figure, caption, "ECE, %. " + "; ".join(words))


def _legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """One legend for all panels, below them; what several panels have counts once."""
    handles = [axis.get_legend_handles_labels() for axis in panels]
    by_label = {label: handle for pair in handles for handle, label in zip(*pair, strict=True)}
    order = [name.upper() for name in LEARNERS]
    labels = sorted(by_label, key=lambda label: order.index(label) if label in order else len(order))
    figure.legend([by_label[label] for label in labels], labels, loc="outside lower center", ncols=4, frameon=False)


def _marks(axis: Axes, x: Sequence[float], y: Sequence[int], names: Sequence[str], mark: str, label: str) -> None:
    axis.scatter(x, y, c=[colour(name) for name in names], marker=mark, s=34, alpha=0.85, linewidths=0)
    axis.scatter([], [], c="#444444", marker=mark, label=label)


def _panel(axis: Axes, title: str, names: Sequence[str], first: bool) -> None:
    axis.set(title=title, xlabel="ECE, %")
    axis.set_yticks(range(len(names)), [TITLES[name] for name in names] if first else [""] * len(names))
    axis.set_ylim(-0.6, len(names) - 0.4)
    axis.set_xlim(left=0)


def over_tasks(source: Source) -> Picture:
    """ECE after each task, a panel for each learner."""
    names, words = [name for name in TITLES if name not in ("ets", "irm")], []
    with drawing(1, len(source.by_learner), width=10, height=2.9) as (figure, axes):
        for axis, (learner, study) in zip(axes[0], source.by_learner.items(), strict=True):
            for index, name in enumerate(names):
                rows = [[value or np.nan for value in run.values(name, "ece")] for run in study.runs]
                mean = 100 * np.array(rows, dtype=float).mean(axis=0)
                axis.plot(
                    mean, color=colour(name), marker=MARKERS[index], markersize=3.5, label=TITLES[name],
                    linestyle="--" if name == "optimal-ts" else "-",
                )  # fmt: skip
                told = ", ".join(f"{value:.1f}" for value in mean)
                words.append(f"{learner.upper()}, {TITLES[name]}: {told}")
            axis.set(title=f"{learner.upper()}", xlabel="after task", xticks=range(study.n_tasks))
            axis.set_ylim(bottom=0)
        axes[0][0].set_ylabel("ECE, %")
        figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
        caption = f"ECE after each task, mean over seeds: {source.described}."
        return picture(figure, caption, "ECE after each task, %. " + "; ".join(words))


def hidden(found: Sequence[Source]) -> Picture:
    """ECE of images predicted as old and as new classes: a line between them for each learner and calibrator."""
    names, words = ("pact", "optimal-ts", "t-cil"), []
    with drawing(2, 3, width=10, height=6.6) as (figure, axes):
        panels = _panels(axes, len(found))
        for axis, source in zip(panels, found, strict=True):
            labels = []
            for place, (name, learner) in enumerate(product(names, reversed(list(source.by_learner)))):
                old, new = (source.percent(learner, name, f"ece_predicted_{group}") for group in ("old", "new"))
                labels.append(f"{TITLES[name].split(' (')[0]}, {learner.upper()}")
                if old is None or new is None:
                    continue
                axis.plot([old, new], [place, place], color="#bbbbbb", linewidth=1.5, zorder=1)
                axis.scatter([old], [place], color="#4c9fd8", s=30, zorder=2, label="" if place else "predicted old")
                axis.scatter(
                    [new], [place], color="#f2a154", s=30, zorder=2, marker="D", label="" if place else "predicted new"
                )
                words.append(f"{source.name}, {labels[-1]}: {old:.1f} and {new:.1f}")
            axis.set_yticks(range(len(labels)), labels, fontsize=7)
            axis.set(title=source.name, xlabel="ECE, %")
            axis.set_xlim(left=0)
        _legend(figure, panels)
        caption = (
            "ECE of images predicted as old classes and as new classes, mean over tasks and seeds. One temperature,"
            " even the oracle's, leaves one of the two far from 0 with most learners; PACT has a bias between them."
        )
        return picture(figure, caption, "ECE predicted old and predicted new, %. " + "; ".join(words))


def temperatures(found: Sequence[Source]) -> Picture:
    """T-CIL's temperature over the optimal one, by task."""
    words = []
    with drawing(2, 3, width=10, height=5.2) as (figure, axes):
        panels = _panels(axes, len(found))
        for axis, source in zip(panels, found, strict=True):
            axis.axhline(1, color="#444444", linewidth=0.8)
            for learner, study in source.by_learner.items():
                place = LEARNERS.index(learner)  # the same mark and colour in every panel
                ours, optimal = (
                    np.array([run.values(name, "temperature") for run in study.runs], dtype=float).mean(axis=0)
                    for name in ("t-cil", "optimal-ts")
                )
                axis.plot(ours / optimal, color=f"C{place}", marker=MARKERS[place], markersize=4, label=learner.upper())
                told = ", ".join(f"{ratio:.2f}" for ratio in ours / optimal)
                words.append(f"{source.name}, {learner.upper()}: {told}")
            axis.set(title=source.name, xlabel="after task")
            axis.set_xticks(range(max(study.n_tasks for study in source.by_learner.values())))
        for first in panels[::3]:
            first.set_ylabel("T of T-CIL / optimal T")
        _legend(figure, panels)
        caption = "T-CIL's temperature over the optimal one, after each task, mean over seeds. Above 1: too high."
        return picture(figure, caption, "T-CIL's temperature over the optimal one. " + "; ".join(words))


def _saved(drawn: Picture, name: str) -> str:
    replace_file(IMAGES / f"{name}.svg", drawn.svg.encode())
    return f"![{drawn.words}](images/overview/{name}.svg)\n\n*{drawn.caption}*\n"


# tables ------------------------------------------------------------------------------------------------------------


def tables(found: Sequence[Source]) -> Iterator[str]:
    """Every calibrator in the main sources, and `compact` and `small` beside the paper."""
    for source in _main(found):
        yield f"## {source.name[0].upper()}{source.name[1:]}: all calibrators\n"
        yield f"{source.described}: `{source.command}`\n"
        memorised = ", ".join(
            f"{_named(learner, study)} {100 * share:.1f}"
            for learner, study in source.by_learner.items()
            if (share := study.memorised) is not None
        )
        yield f"Exemplars memorised, mean over tasks, %: {memorised}.\n"
        for metric in TABLES:
            yield markdown(side_by_side(list(source.by_learner.values()), metric))
    ours = FinishedRuns(
        [*editions("compact"), *editions("small")], [*_runs(RESULTS / "compact"), *_runs(RESULTS / "small")]
    )
    yield "## Beside the paper\n"
    yield (
        "The paper's tables with the schedules `compact` (the paper's ResNet-32) and `small` (a small ResNet), both"
        " with 30 epochs without crops. `n` is the number of seeds.\n"
    )
    for name in ("baselines", "compatibility", "tasks20"):
        section = ARTIFACTS[name].render(ours)
        yield f"### {section.title}\n"
        yield from (f"{line}\n" for line in section.lines)
        yield from (markdown(grid) for grid in section.grids if "not run" not in grid.title)


# what was run ------------------------------------------------------------------------------------------------------


def coverage() -> Iterator[str]:
    """The runs of the two CPU schedules: how far each went and how long it trained, and how to run the others."""
    yield "## What was run, and what is missing\n"
    yield (
        "Trained on one thread of two shared cores, hours of wall time. The paper's own schedule (200 epochs, five"
        " seeds) was not run: `tcil reproduce all --schedule paper --dry-run` has its plan.\n"
    )
    for schedule in ("small", "compact"):
        needs = all_needs(list(ARTIFACTS.values()), editions(schedule))
        runs = {run.path.name.partition(".")[0]: run for run in _runs(RESULTS / schedule)}
        found = [runs.get(need.settings.name) for need in needs]
        hours = sum(map(_hours, filter(None, found)))
        whole = sum(_is_whole(need, run) for need, run in zip(needs, found, strict=True))
        yield f"**`{schedule}`**: {whole} of {len(needs)} runs, {hours:.1f} hours.\n"
        yield "| job | run | tasks done | hours |\n|---:|---|---|---:|"
        for number, (need, run) in enumerate(zip(needs, found, strict=True), start=1):
            done = f"{len(run.tasks)} of {_asked(need)}" if run is not None else "missing"
            time = f"{_hours(run):.1f}" if run is not None else ""
            yield f"| {number} | {_told(need)} | {done} | {time} |"
        missing = [n for n, pair in enumerate(zip(needs, found, strict=True), start=1) if not _is_whole(*pair)]
        if missing:
            yield (
                f"\nThe missing ones: `tcil reproduce all --schedule {schedule} --data DIR --out RUNS --kept"
                f" docs/results/{schedule} --job N` for N = {', '.join(map(str, missing))}; without"
                " `--job`, all of them."
            )
        yield ""


def _n_tasks(settings: RunSettings) -> int:
    return settings.tasks if isinstance(settings.tasks, int) else len(settings.tasks)


def _asked(need: Need) -> int:
    """How many tasks the schedule asks for."""
    return need.until or _n_tasks(need.settings)


def _told(need: Need) -> str:
    settings = need.settings
    return f"{settings.learner.upper()} on {settings.dataset}, {_n_tasks(settings)} tasks, seed {settings.seed}"


def _is_whole(need: Need, run: StoredRun | None) -> bool:
    return run is not None and len(run.tasks) >= _asked(need)


def _hours(run: StoredRun) -> float:
    return sum(task.get("training", 0.0) for task in run.environment.seconds.values()) / 3600


if __name__ == "__main__":
    main()
