"""Every calibrator on the authors' checkpoints: the table of docs/results and the README's reliability diagram.

    TCIL_DATA=DIR python -m research.checkpoints
    TCIL_DATA=DIR python -m research.checkpoints --sgd 10

The first writes docs/results/official-checkpoints.json and docs/images/reliability.svg, and prints the table; the
second docs/results/official-sgd.json: T-CIL with the authors' SGD instead of the exact solver, over ten seeds of it.
"""

from __future__ import annotations

import argparse
import json
import platform
from functools import cache, partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

import tcil
from research import ROOT, official
from tcil.calibration.exemplars import open_exemplars
from tcil.calibration.perturbation import search_magnitude
from tcil.calibration.perturbed_exemplars import PerturbedExemplars
from tcil.calibration.temperature import Solver, solve_temperature

SHOWN = 8  # the task of the reliability diagram


def calibrated(
    task: official.OfficialTask, logits: torch.Tensor, labels: torch.Tensor, history: dict[str, Any]
) -> dict[str, Any]:
    """Name to (probabilities of the test set or None for n/a, temperature or None); `history` is taken and left."""
    classes = range(task.seen)
    valid = tcil.predict_logits(task.model, task.valid, classes=classes)
    pact = tcil.PACT().fit(
        task.model, task.memory, task.valid, task.new_classes, imbalance=task.imbalance, history=history.get("pact")
    )
    history["pact"] = pact.history_
    fitted: dict[str, tcil.extending.Calibrator] = {
        "TS": tcil.TemperatureScaling().fit(*valid),
        "ETS": tcil.EnsembleTemperatureScaling().fit(*valid),
        "IRM": tcil.MulticlassIsotonic().fit(*valid),
        "PerturbTS": tcil.PerturbedTemperatureScaling().fit(task.model, valid=task.valid, classes=classes),
        "T-CIL": tcil.TCIL().fit(task.model, task.memory, task.valid, task.new_classes),
        "PACT": pact,
        "Optimal TS (oracle)": tcil.TemperatureScaling().fit(logits, labels),
        "Optimal group TS (oracle)": tcil.GroupTemperatureScaling().fit(
            logits, labels, new_classes=task.new_classes, classes=classes
        ),
    }
    rows: dict[str, Any] = {"Vanilla": (torch.softmax(logits.double(), dim=1), 1.0)}
    for name, calibrator in fitted.items():
        try:
            rows[name] = calibrator.predict_proba(logits), getattr(calibrator, "temperature_", None)
        except tcil.NotReachableError:
            rows[name] = None, None
    return rows


def scores(probs: torch.Tensor, labels: torch.Tensor, new_classes: range) -> dict[str, float | None]:
    groups = tcil.metrics.predicted_groups(probs, new_classes)
    estimate = tcil.metrics.calibration_estimate(probs, labels, groups=groups)
    ece = tcil.metrics.expected_calibration_error(probs, labels, groups=groups)
    figures = {
        "accuracy": tcil.metrics.accuracy(probs, labels),
        "ece": ece,
        "ece_low": estimate.low,
        "ece_high": estimate.high,
        "noise_floor": estimate.noise_floor,
        "aece": tcil.metrics.adaptive_calibration_error(probs, labels),
        "ece_predicted_old": ece.by_group.get("old"),
        "ece_predicted_new": ece.by_group.get("new"),
        "nll": tcil.metrics.negative_log_likelihood(probs, labels),
        "aurc": tcil.metrics.area_under_risk_coverage(probs, labels),
    }
    return {key: None if value is None else round(float(value), 6) for key, value in figures.items()}


@matplotlib.rc_context({"svg.hashsalt": "tcil", "font.size": 10, "svg.fonttype": "none"})
def diagram(panels: dict[str, tuple[torch.Tensor, torch.Tensor]], path: Path) -> None:
    """Reliability diagrams side by side, with how often each confidence occurs."""
    figure = Figure(figsize=(3.3 * len(panels), 4.3))
    FigureCanvasSVG(figure)  # whose text sizes the layout goes by
    axes = figure.subplots(2, len(panels), sharex=True, sharey="row", height_ratios=[3, 1])
    for column, (name, (probs, labels)) in enumerate(panels.items()):
        bins = tcil.metrics.reliability_bins(probs, labels)
        ece = tcil.metrics.expected_calibration_error(probs, labels)
        top, bottom = axes[0, column], axes[1, column]
        centre, width = (bins.lower + bins.upper) / 2, bins.upper - bins.lower
        seen = bins.weight > 0.002  # a bin of a handful of images says nothing
        accuracy, confidence = bins.accuracy[seen], bins.confidence[seen]
        top.bar(centre[seen], accuracy, width[seen] * 0.92, color="#3b6ea5", label="accuracy")
        over, under = np.maximum(confidence - accuracy, 0), np.maximum(accuracy - confidence, 0)
        top.bar(
            centre[seen], over, width[seen] * 0.92, bottom=accuracy, color="#d1495b", alpha=0.75, label="over-confident"
        )
        top.bar(
            centre[seen], under, width[seen] * 0.92, bottom=accuracy - under, color="#edae49", label="under-confident"
        )
        top.plot([0, 1], [0, 1], color="black", linewidth=1, linestyle="--")
        top.set_title(f"{name}\nECE {100 * ece:.1f} %")
        bottom.bar(centre, bins.weight, width * 0.92, color="#8d99ae")
        bottom.set_xlabel("confidence")
        for axis in (top, bottom):
            axis.spines[["top", "right"]].set_visible(False)
            axis.set_xlim(0, 1)
        top.set_ylim(0, 1)
    axes[0, 0].set_ylabel("accuracy")
    axes[1, 0].set_ylabel("share")
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="lower center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, format="svg", metadata={"Date": None})


def sgd_spread(folder: Path, n_seeds: int) -> None:
    """T-CIL's answer with the authors' SGD, seed by seed: what `TCIL(solver="sgd", seed=seed)` gives.

    The directions do not depend on the seed, nor do the logits at a magnitude: both are computed once.
    """
    found: dict[str, dict[str, list[float]]] = {"ece": {}, "temperature": {}, "magnitude": {}}
    for index in track(official.CHECKPOINTS, description="checkpoints"):
        task = official.load(folder, index)
        logits, labels = tcil.predict_logits(task.model, task.test, classes=range(task.seen))
        valid = tcil.predict_logits(task.model, task.valid, classes=range(task.seen))
        with open_exemplars(task.model, task.memory, task.new_classes, classes=range(task.seen)) as exemplars:
            pushed = PerturbedExemplars(exemplars, keep=True)
            new_at = cache(lambda magnitude: pushed.logits(magnitude, new_only=True))  # noqa: B023
            for seed in range(n_seeds):
                solve = partial(solve_temperature, solver=Solver.SGD, seed=seed)
                search = search_magnitude(
                    lambda magnitude: solve(new_at(magnitude), exemplars.new_columns),  # noqa: B023
                    solve(new_at(0.0), exemplars.new_columns),
                    solve(*valid).limit,
                    tolerance=1e-3,
                    input_scale=1.0,
                )
                temperature = solve(pushed.logits(search.magnitude), pushed.columns).temperature
                probs = torch.softmax(logits.double() / temperature, dim=1)
                ece = tcil.metrics.expected_calibration_error(probs, labels)
                entry = {"ece": ece, "temperature": temperature, "magnitude": search.magnitude}
                for key, value in entry.items():
                    found[key].setdefault(str(index), []).append(round(float(value), 6))
    record = {"command": f"TCIL_DATA=DIR python -m research.checkpoints --sgd {n_seeds}", **found}
    (ROOT / "docs/results/official-sgd.json").write_text(json.dumps(record, indent=1) + "\n")
    for name, values in found["ece"].items():
        print(f"task {name}: ECE {100 * np.mean(values):.2f} +- {100 * np.std(values):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sgd", type=int, metavar="SEEDS", help="T-CIL with the authors' SGD, over so many seeds")
    n_seeds = parser.parse_args().sgd
    folder = official.data_folder()
    if folder is None:
        raise SystemExit("TCIL_DATA must name a folder with cifar-100-python/ and official-er-cifar100/")
    if n_seeds is not None:
        sgd_spread(folder, n_seeds)
        return
    console = Console(width=120)
    results: dict[str, dict[str, Any]] = {}
    history: dict[str, Any] = {}
    for index in track(official.CHECKPOINTS, description="checkpoints", console=console):
        task = official.load(folder, index)
        logits, labels = tcil.predict_logits(task.model, task.test, classes=range(task.seen))
        rows = calibrated(task, logits, labels, history)
        for name, (probs, temperature) in rows.items():
            entry = None if probs is None else {**scores(probs, labels, task.new_classes), "temperature": temperature}
            results.setdefault(name, {})[str(index)] = entry
        if index == SHOWN:
            panels = {"as trained": "Vanilla", "TS on the new task": "TS", "T-CIL": "T-CIL", "PACT": "PACT"}
            diagram(
                {title: (rows[name][0], labels) for title, name in panels.items()}, ROOT / "docs/images/reliability.svg"
            )
    record = {
        "command": "TCIL_DATA=DIR python -m research.checkpoints",
        "what": "authors' ER checkpoints, CIFAR-100, seed 1, validation size 100; test set of all classes seen",
        "versions": {"tcil": tcil.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "results": results,
    }
    (ROOT / "docs/results/official-checkpoints.json").write_text(json.dumps(record, indent=1) + "\n")
    table = Table(title="ECE (%) after each task of the authors' ER networks")
    table.add_column("method")
    for index in official.CHECKPOINTS:
        table.add_column(f"task {index}", justify="right")
    for title in ("mean", "noise floor", "pred. old", "pred. new"):
        table.add_column(title, justify="right")
    for name, by_task in results.items():
        known = list(by_task.values())
        if any(entry is None for entry in known):
            cells = ["n/a" if entry is None else f"{100 * entry['ece']:.2f}" for entry in known]
            table.add_row(name, *cells, "n/a", "n/a", "n/a", "n/a")
            continue

        def mean(key: str, entries: list[Any] = known) -> str:
            values = [entry[key] for entry in entries if entry[key] is not None]
            return f"{100 * sum(values) / len(values):.2f}"

        cells = [f"{100 * entry['ece']:.2f}" for entry in known]
        table.add_row(
            name, *cells, mean("ece"), mean("noise_floor"), mean("ece_predicted_old"), mean("ece_predicted_new")
        )
    console.print(table)


if __name__ == "__main__":
    main()
