"""PACT in worlds of other sizes, with the frozen method: the command `python -m research.pact sizes`.

Each setting changes one thing of the preset `letters` (20 tasks: of `letters-large`), or is another small dataset. The
world with index i has the seed 170 + i, which also draws its class order, images and validation set. Nothing is tuned
on these runs. The records in `sizes` are of rounds one to three, with seeds from 110 on; those of the present form are
in `sizes-eight`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from research import ROOT
from research.pact import measuring, rounds
from research.pact.methods import METHODS
from research.pact.tables import mean, of_learner, ratio_errors, rms
from research.pact.worlds import RESERVED
from tcil.experiments.config.settings import RunSettings, build
from tcil.experiments.runs.run import Run
from tcil.foundation.files import replace_file

SETTINGS: dict[str, dict[str, Any]] = {
    "memory of 5 per class": {"memory": 100},
    "memory of 50 per class": {"memory": 1000},
    "2 tasks of 10 classes": {"tasks": 2},
    "10 tasks of 2 classes": {"tasks": 10},
    "20 validation images": {"validation": 20, "validation_pool": 20, "train_per_class": 205},
    "500 validation images": {"validation": 500, "validation_pool": 500, "train_per_class": 325},
    "unequal classes (5 to 1)": {"smallest_class": 0.2},
    "as the preset": {},
    "label smoothing 0.1": {"learner_options": {"label_smoothing": 0.1}},
    "20 tasks of 2 classes": {"preset": "letters-large", "tasks": 20},
    "noisy digits, 5 tasks of 2": {"preset": "digits"},
    "mixup 0.2": {"learner_options": {"mixup": 0.2}},
}
# Controls: the same seed with and without them.
SAME_WORLD = {"label smoothing 0.1": "as the preset", "mixup 0.2": "as the preset"}
LEARNERS = ("er", "der", "wa", "eeil")
# ER alone has these options; 20 tasks are long.
ONLY = {"label smoothing 0.1": ("er",), "mixup 0.2": ("er",), "20 tasks of 2 classes": ("er", "wa")}
FIRST_SEED = 170
FOLDER = "sizes-eight"
MEASURED = rounds.EIGHT.measured
IMAGE = ROOT / "docs/images/pact-sizes.svg"
SHOWN = {
    "Vanilla": ("x", "#777777"), "TS": ("v", "#b8860b"), "T-CIL": ("s", "#2a9d8f"), "PACT": ("o", "#1f4e9c"),
    "PACT-R": ("D", "#d1495b"), "Optimal TS": ("|", "#000000"),
}  # fmt: skip


def settings_of(name: str, learner: str) -> RunSettings:
    """The settings of a run, by the rule above."""
    seed = FIRST_SEED + list(SETTINGS).index(SAME_WORLD.get(name, name))
    common = {"learner": learner, "seed": seed, "class_order_seed": seed, "reserve": RESERVED}
    drawn = {"preset": "letters", "data_seed": seed, "test_per_class": 320}  # of images that are drawn
    own = SETTINGS[name]
    return build({**common, **own} if own.get("preset") == "digits" else {**common, **drawn, **own})


def chosen() -> list[tuple[str, str]]:
    """All settings with their learners, in the order of training: one learner after the other."""
    return [(name, learner) for learner in LEARNERS for name in SETTINGS if learner in ONLY.get(name, LEARNERS)]


def run(out: Path) -> None:
    """Train and measure what is missing, run by run; then print the table and draw the picture."""
    kept = measuring.STORED / FOLDER
    kept.mkdir(parents=True, exist_ok=True)
    methods = {name: METHODS[name][1] for name in (*rounds.BASES, *MEASURED, *rounds.WITH_RESERVE, *rounds.ORACLES)}
    for name, learner in chosen():
        settings = settings_of(name, learner)
        path = kept / f"{settings.name}.json"
        if path.exists():
            continue
        Run(settings, out / settings.name).execute(["vanilla"])
        record = measuring.measure(out / settings.name, methods, MEASURED)
        record["about"]["setting"] = name
        replace_file(path, (json.dumps(record) + "\n").encode())
        print(f"{name}, {learner}: done", flush=True)
    records = stored(FOLDER)
    print("\n".join(table(records)))
    draw(records)


def stored(folder: str) -> list[dict[str, Any]]:
    """What was measured, of the present form or of an earlier one, in the order of the settings."""
    records = rounds.stored(rounds.EIGHT, folder) if folder == FOLDER else measuring.stored(folder)
    order = chosen()
    return sorted(records, key=lambda record: order.index((record["about"]["setting"], record["about"]["learner"])))


def table(records: Sequence[dict[str, Any]]) -> list[str]:
    """One row for each run: pooled ECE / ECE by predicted group, and what PACT says of its own error."""
    if not records:
        return ["(none yet)"]
    lines = [
        "| setting | learner | " + " | ".join(SHOWN) + " | largest harm of PACT | RMS of error / claimed, log T, b |",
        "|" + "---|" * (len(SHOWN) + 4),
    ]
    for record in records:
        cells = [f"{mean([record], m, 'pooled'):.2f} / {mean([record], m, 'group'):.2f}" for m in SHOWN]
        harm = max(state["harm"]["PACT"][0] for state in record["states"] if "harm" in state)
        errors = ", ".join(f"{rms(ratio_errors([record], 'PACT', which)):.2f}" for which in (0, 1))
        about = record["about"]
        lines.append(
            f"| {about['setting']} | {about['learner'].upper()} | {' | '.join(cells)} | {harm:+.1f} | {errors} |"
        )
    return lines


@matplotlib.rc_context({"svg.hashsalt": "tcil", "font.size": 9, "svg.fonttype": "none"})
def draw(records: Sequence[dict[str, Any]]) -> None:
    """Pooled ECE by setting, one panel for each learner that has runs."""
    learners = [learner for learner in LEARNERS if of_learner(records, learner)]
    rows = -(-len(learners) // 2)
    figure = Figure(figsize=(9.4, 0.6 + 3.4 * rows), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots(rows, 2, sharex=True, sharey=True, squeeze=False).flat
    for left_over in axes[len(learners) :]:
        left_over.set_visible(False)
    panels = axes[: len(learners)]
    names = [name for name in SETTINGS if any(record["about"]["setting"] == name for record in records)]
    for axis, learner in zip(panels, learners, strict=True):
        for method, (mark, colour) in SHOWN.items():
            own = of_learner(records, learner)
            x = [mean([record], method, "pooled") for record in own]
            y = [len(names) - names.index(record["about"]["setting"]) for record in own]
            size = 110 if mark == "|" else 34
            axis.scatter(x, y, s=size, marker=mark, color=colour, label=method, zorder=3 if method == "PACT" else 2)
        axis.set_title(learner.upper())
        axis.set_xscale("log")
        axis.set_xticks([1, 2, 3, 5, 10, 20, 40], ["1", "2", "3", "5", "10", "20", "40"])
        axis.minorticks_off()
        axis.set_yticks(range(1, len(names) + 1), names[::-1])
        if axis.get_subplotspec().is_last_row():
            axis.set_xlabel("pooled ECE, % (log scale)")
        axis.set_ylim(0.5, len(names) + 0.5)
        axis.set_axisbelow(True)
        axis.grid(axis="y", color="#dddddd", linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
    handles, titles = panels[0].get_legend_handles_labels()
    figure.legend(handles, titles, loc="outside lower center", ncols=len(SHOWN), frameon=False)
    figure.savefig(IMAGE, format="svg", metadata={"Date": None})
