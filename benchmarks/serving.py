"""What calibration adds to a forward pass, in float64 and in float32 as for serving.

    python -m benchmarks.serving --out docs/results/serving.json          (a few minutes)

The network is a ResNet-32 in evaluation mode with 100 classes on images of CIFAR's size, one thread. The cost of a
calibration is what `wrap` adds to the network's forward pass, measured on the network's own logits, and given as a
share of that forward pass. Times are processor time, the minimum of many interleaved rounds. A single image is the
worst case: calls of operators then take longer than the computation.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import tcil
from benchmarks import ledger
from tcil.networks import resnet32

CLASSES, BATCHES, ROUNDS, GOAL = 100, (1, 8, 128), 60, 0.01
COMMAND = "python -m benchmarks.serving --out docs/results/serving.json"


class Given(nn.Module):
    """A network, with a weight, that returns logits computed before, so that only the calibration is timed."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits, self.weight = logits, nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits


def calibrators() -> dict[str, tcil.extending.Calibrator]:
    """One of each map, fitted on overlapping classes; the exemplars of PACT are a linear network's."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(2000) % CLASSES
    logits = 4 * torch.eye(CLASSES)[labels] + 1.5 * torch.randn(2000, CLASSES, generator=generator)
    passing = nn.Linear(CLASSES, CLASSES, bias=False)
    passing.weight.data = torch.eye(CLASSES)
    new = range(90, 100)
    valid = logits[labels >= 90], labels[labels >= 90]
    return {
        "TemperatureScaling": tcil.TemperatureScaling().fit(logits, labels),
        "GroupTemperatureScaling": tcil.GroupTemperatureScaling().fit(logits, labels, new),
        "EnsembleTemperatureScaling": tcil.EnsembleTemperatureScaling().fit(logits, labels),
        "MulticlassIsotonic": tcil.MulticlassIsotonic().fit(logits, labels),
        "PACT": tcil.PACT().fit(passing, (logits[:500], labels[:500]), valid, new, imbalance=20.0),
    }


def many(run: Callable[[], Any], times: int) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(times):
            run()

    return repeated


def measure(rounds: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = resnet32(CLASSES).eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    fitted, rows = calibrators(), []
    for batch in BATCHES:
        x = torch.randn(batch, 3, 32, 32).contiguous(memory_format=torch.channels_last)
        with torch.inference_mode():
            given = Given(4 * network(x))
            wrapped = {
                (name, kind): calibrator.wrap(given, force=True, dtype=dtype).eval()
                for name, calibrator in fitted.items()
                for kind, dtype in (("float64", torch.float64), ("float32", torch.float32))
            }
            times = 20
            contestants: dict[Any, Callable[[], Any]] = {
                key: many(partial(model, x), times) for key, model in wrapped.items()
            }
            contestants["forward"] = partial(network, x)
            contestants["given"] = many(partial(given, x), times)
            found = ledger.best(contestants, rounds)
        forward = found["forward"].cpu
        for name, kind in wrapped:
            cost = (found[name, kind].cpu - found["given"].cpu) / times
            rows.append(
                {
                    "calibrator": name,
                    "dtype": kind,
                    "batch": batch,
                    "microseconds": round(1e6 * cost, 1),
                    "forward_milliseconds": round(1e3 * forward, 2),
                    "share": round(cost / forward, 5),
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table(title=f"what calibration adds to ResNet-32's forward pass (goal: below {100 * GOAL:g} %)")
    for name in ("calibrator", "type", "batch", "microseconds", "forward, ms", "share, %"):
        shown.add_column(
            name, justify="right" if name in ("batch", "microseconds", "forward, ms", "share, %") else "left"
        )
    for row in rows:
        cells = (row["calibrator"], row["dtype"], str(row["batch"]), f"{row['microseconds']:.0f}")
        shown.add_row(*cells, f"{row['forward_milliseconds']:.1f}", f"{100 * row['share']:.2f}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    rows = measure(options.rounds)
    Console(width=120).print(table(rows))
    if options.out:
        record = {"command": COMMAND, "machine": ledger.machine(), "classes": CLASSES, "goal": GOAL, "rows": rows}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
