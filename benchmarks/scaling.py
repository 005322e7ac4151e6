"""How the cost of a T-CIL fit grows: with exemplars, with classes, with the batch size.

    python -m benchmarks.scaling        (two minutes; part of make bench)

writes docs/results/scaling.json, docs/images/scaling.svg and docs/scaling.md. Each case is a process of its
own, so that its peak memory is its own. The network is small (two stages of 8 and 16 channels, 32x32 images), so that
what the library does beside the network shows; both parts are told apart, the network's being every image that passed
it times its bare pass.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tcil
from benchmarks import ROOT, calibration, ledger, scaling_page, synthetic
from tcil.calibration.calibrators import tcil as module
from tcil.calibration.perturbation import ClassMeans, DirectionPolicy, TargetChooser

MEMORY = (500, 1000, 2000, 4000, 8000)
CLASSES = (10, 30, 100, 300, 1000)
BATCHES = (8, 16, 32, 64, 128, 256, 512)
USUAL = {"memory": 2000, "classes": 100, "batch": 64}


def one(memory: int, classes: int, batch: int) -> dict[str, Any]:
    """Time and memory of one fit, and where the time went."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", tcil.CalibrationWarning)
    task = synthetic.task(synthetic.make((8, 16), (1, 1), classes, stem_stride=2), memory, max(2, classes // 10))
    spent = {"solves": 0.0, "means and targets": 0.0}

    def clocked(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[part] += time.process_time() - started

        return run

    module.solve_temperature = clocked("solves", module.solve_temperature)  # type: ignore[attr-defined]
    ClassMeans.add = clocked("means and targets", ClassMeans.add)  # type: ignore[method-assign]
    TargetChooser.__call__ = clocked("means and targets", TargetChooser.__call__)  # type: ignore[method-assign]

    def fit() -> Any:
        return tcil.TCIL(batch_size=batch).fit(task.model, task.memory, task.valid, task.new_classes).result_

    settled = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    counts = calibration.count_images(task.model, fit)
    peak = resident("VmHWM") - settled
    found = []
    for _ in range(2):
        spent.update(dict.fromkeys(spent, 0.0))
        seconds, result = ledger.timed(fit)
        found.append({"seconds": seconds.cpu, "trace": len(result.trace) - 1, **spent})
    passes = calibration.bare_passes(task.model, task.memory[0])
    network = 0.0
    for kind, ways in passes.items():
        quickest = min(seconds.cpu for seconds in ledger.best(ways, 2).values())
        network += counts[kind] * quickest / min(256, memory)
    best = min(found, key=lambda record: record["seconds"])
    return {
        "memory": memory,
        "classes": classes,
        "batch": batch,
        "peak, MB": peak,
        "network": network,
        **counts,
        **best,
    }


def resident(what: str) -> float:
    """A line of /proc/self/status, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(what))) / 1e3


def cases() -> dict[str, list[dict[str, Any]]]:
    series = {"memory": MEMORY, "classes": CLASSES, "batch": BATCHES}
    found: dict[str, list[dict[str, Any]]] = {}
    for name, values in series.items():
        for value in values:
            asked = json.dumps({**USUAL, name: value})
            command = [sys.executable, "-m", "benchmarks.scaling", "--one", asked]
            settings = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, cwd=ROOT, env=settings, check=True, capture_output=True, text=True)
            found.setdefault(name, []).append(json.loads(done.stdout.splitlines()[-1]))
    return found


def line(rows: list[dict[str, Any]], over: str, key: str) -> tuple[float, float]:
    """Least squares: what it costs at nothing, and what each one more adds."""
    slope, start = np.polyfit([row[over] for row in rows], [row[key] for row in rows], 1)
    return float(start), float(slope)


def power(rows: list[dict[str, Any]], over: str, key: str) -> float:
    """The exponent with which it grows, over the larger half."""
    rows = rows[len(rows) // 2 :]
    return float(np.polyfit(np.log([row[over] for row in rows]), np.log([row[key] for row in rows]), 1)[0])


def draw(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    import matplotlib  # here: the cases, whose memory is measured, do without it
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "tcil", "font.size": 9, "svg.fonttype": "none"}):
        names = {"memory": "exemplars (100 classes)", "classes": "classes (2,000 exemplars)", "batch": "batch size"}
        figure = Figure(figsize=(9, 4.6))
        FigureCanvasSVG(figure)  # whose text sizes the layout goes by
        axes = figure.subplots(2, 3, sharex="col")
        for column, (over, rows) in enumerate(found.items()):
            x = [row[over] for row in rows]
            top, bottom = axes[0, column], axes[1, column]
            top.plot(x, [row["seconds"] for row in rows], "o-", color="#3b6ea5", label="whole fit")
            top.plot(x, [row["network"] for row in rows], "--", color="#8d99ae", label="images x bare pass")
            top.plot(x, [row["solves"] for row in rows], "s-", color="#d1495b", markersize=4, label="temperatures")
            bottom.plot(x, [row["peak, MB"] for row in rows], "o-", color="#3b6ea5")
            bottom.set_xlabel(names[over])
            for axis in (top, bottom):
                axis.set_xscale("log")
                axis.set_yscale("log")
                axis.spines[["top", "right"]].set_visible(False)
        axes[0, 0].set_ylabel("seconds")
        axes[1, 0].set_ylabel("peak memory, MB")
        axes[0, 0].legend(frameon=False)
        figure.tight_layout()
        figure.savefig(path, format="svg", metadata={"Date": None})


def at_imagenet_size() -> dict[str, float]:
    """ResNet-18 at ImageNet's size (its stages on 56x56 maps, 512 features) and distances to that many means."""
    torch.set_num_threads(1)
    network = synthetic.make((64, 128, 256, 512), (2, 2, 2, 2), 1000, stem_stride=2)
    images = torch.randn(16, 3, 112, 112)
    found = {"graph, MB an image": graph_size(network, images) / 1e6}
    for kind, ways in calibration.bare_passes(network, images).items():
        usual = {how: run for how, run in ways.items() if how == "channels_last, batch 32"}
        found[f"ms a {kind}"] = 1e3 * min(s.cpu for s in ledger.best(usual, 2).values()) / len(images)
    for classes in (1000, 10_000):
        means, rows = torch.randn(classes, 512, dtype=torch.float64), torch.randn(256, 512)
        choose = TargetChooser(DirectionPolicy.PAPER, means, torch.arange(classes) >= classes // 10, 0)
        seconds = ledger.best({"": partial(choose, rows, torch.arange(256))}, 3)[""]
        found[f"ms a target among {classes}"] = 1e3 * seconds.cpu / len(rows)
    return found


def graph_size(network: Any, images: Any) -> int:
    """Bytes that autograd keeps of one image between a forward and a backward pass, parameters not counted."""
    network.eval().requires_grad_(False)
    kept: dict[int, int] = {}

    def note(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    own = {p.untyped_storage().data_ptr() for p in [*network.parameters(), *network.buffers()]}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        _answer = network(images.clone().requires_grad_())
    return sum(size for place, size in kept.items() if place not in own) // len(images)


def measure() -> list[ledger.Figure]:
    found = cases()
    shown: dict[str, dict[str, Any]] = {
        over: {
            "seconds": line(rows, over, "seconds"), "network": line(rows, over, "network"),
            "solves": line(rows, over, "solves"), "peak, MB": line(rows, over, "peak, MB"),
            "exponent": power(rows, over, "seconds"),
        }
        for over, rows in found.items() if over != "batch"
    }  # fmt: skip
    record = {
        "cases": found,
        "lines": shown,
        "ResNet-18 at ImageNet's size": at_imagenet_size(),
        "machine": ledger.machine(),
    }
    (ROOT / "docs/results/scaling.json").write_text(json.dumps(record, indent=1) + "\n")
    (ROOT / "docs/scaling.md").write_text(scaling_page.page(record))
    draw(found, ROOT / "docs/images/scaling.svg")
    worst = max(row["seconds"] / row["network"] for row in found["memory"])
    quickest = min(found["batch"], key=lambda row: row["seconds"])
    return [
        ledger.Figure("scaling/memory", "time grows with exemplars to the power of", shown["memory"]["exponent"]),
        ledger.Figure("scaling/classes", "time grows with classes to the power of", shown["classes"]["exponent"]),
        ledger.Figure("scaling/floor", "whole fit / (images x bare pass) of a small network, at worst", worst),
        ledger.Figure("scaling/batch", "fastest batch size", quickest["batch"]),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--one", type=json.loads)
    asked = parser.parse_known_args()[0].one
    if asked:
        print(json.dumps(one(**asked)))
    else:
        ledger.present("how the cost of a fit grows", measure)
