"""The pictures of docs/decisions.md, from the results beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from research import ROOT
from research.decisions.worlds import World
from tcil.decisions import ModelBasedThreshold
from tcil.experiments.reporting.palette import colour
from tcil.experiments.runs.catalogue import CATALOGUE

RESULTS, IMAGES = ROOT / "docs/results/decisions", ROOT / "docs/images"
STYLE: dict[Any, Any] = {"svg.hashsalt": "tcil", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
MARKS = "osD^v"


@matplotlib.rc_context(STYLE)
def run(cache: Path) -> None:
    """Draw all of them."""
    claims(json.loads((RESULTS / "value-checkpoints.json").read_text()))
    redraws(json.loads((RESULTS / "redraws.json").read_text()))
    worlds = sorted(cache.glob("official-task*.npz"))
    if worlds:
        sensitivity(World.load(worlds[-1]))


def claims(record: dict[str, Any]) -> None:
    """Claimed and achieved risk, and how many images are accepted, by predicted group."""
    figure = Figure(figsize=(7.6, 5.4), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True, sharey="row")
    for column, group in enumerate(("old", "new")):
        top, below = axes[0, column], axes[1, column]
        top.plot([0, 20], [0, 20], color="#999999", linestyle=":", linewidth=1)
        for mark, (name, by_world) in zip(MARKS, record["claims"].items(), strict=False):
            for axis, key in ((top, "achieved"), (below, "coverage")):
                values = [by_world["mean"][f"risks/model_based/{group}/{risk}/{key}"] for risk in (0.05, 0.1, 0.2)]
                shown = [np.nan if value is None else 100 * value for value in values]
                axis.plot([5, 10, 20], shown, color=colour(name), marker=mark, label=CATALOGUE[name].title)
        top.set_title(f"predicted {group}")
        below.set(xlabel="claimed risk, %", xticks=[5, 10, 20])
    axes[0, 0].set_ylabel("achieved risk, %")
    axes[1, 0].set_ylabel("accepted, %")
    for axis in axes.flat:
        axis.set_ylim(bottom=0)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    _save(figure, "decisions-claims")


def redraws(record: dict[str, Any]) -> None:
    """Broken promises of thresholds, and coverage of sets, with the memory as calibration set in red."""
    figure = Figure(figsize=(7.6, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    made = [study for study in record["risks"] if study["exists"] > 0]
    for study in made:
        broken = study["draw"]["source"] == "memory"
        share = 100 * study["failures"] / study["redraws"]
        left.plot(
            100 * study["options"]["risk"] + (0.5 if broken else 0), share, "x" if broken else "o", markersize=5,
            color="#d62728" if broken else "#1f77b4", alpha=0.7,
        )  # fmt: skip
    left.axhline(10, color="#444444", linestyle=":", linewidth=1)
    left.set(xlabel="promised risk, %", ylabel="draws that broke the promise, %", ylim=(-3, 103))
    left.text(left.get_xlim()[1], 12, "allowed: 10 %", ha="right", color="#444444")
    for study in record["sets"]:
        broken = study["draw"]["source"] == "memory"
        for group in study["most"]:
            right.plot(
                100 * study["promised"], 100 * study["coverage"][group], "x" if broken else "o", markersize=5,
                color="#d62728" if broken else "#1f77b4", alpha=0.7,
            )  # fmt: skip
    right.plot([78, 97], [78, 97], color="#444444", linestyle=":", linewidth=1)
    right.set(xlabel="promised coverage, %", ylabel="mean coverage, %", ylim=(0, 103))
    left.plot([], [], "o", color="#1f77b4", label="images never trained on")
    left.plot([], [], "x", color="#d62728", label="the memory as calibration set")
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    _save(figure, "decisions-redraws")


def sensitivity(world: World) -> None:
    """What is accepted at 10 % risk if the confidences may be off by gamma; dots: the bias that there is."""
    figure = Figure(figsize=(7.6, 3.0), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    gammas = tuple(np.linspace(0, 0.1, 41).tolist())
    said_new = {name: world.new[probs.argmax(1)] for name, probs in world.probs.items()}
    for axis, group in zip(axes, ("old", "new"), strict=True):
        for name, probs in world.probs.items():
            rule = ModelBasedThreshold(risk=0.1, groups="predicted", gammas=gammas).fit(probs, world.new_classes)
            found = rule.result_.thresholds[group == "new"]
            curve = [(100 * step.gamma, 100 * step.coverage) for step in found.curve]
            axis.plot(*zip(*curve, strict=True), color=colour(name), label=CATALOGUE[name].title)
            inside = (said_new[name] == (group == "new")) & (probs.max(1) >= found.threshold)
            if inside.any():
                wrong = probs.argmax(1)[inside] != world.columns[inside]
                bias = float(wrong.mean() - (1 - probs.max(1)[inside]).mean())
                axis.plot(min(max(100 * bias, 0), 10), 100 * found.coverage, "o", color=colour(name), clip_on=False)
        axis.set(title=f"predicted {group}", xlabel="gamma: confidence too high by, points", xlim=(0, 10))
        axis.set_ylim(0, 100)
    axes[0].set_ylabel("accepted at 10 % risk, %")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    _save(figure, "decisions-sensitivity")


def _save(figure: Figure, name: str) -> None:
    figure.savefig(IMAGES / f"{name}.svg", format="svg", metadata={"Date": None})
    print(IMAGES / f"{name}.svg")
