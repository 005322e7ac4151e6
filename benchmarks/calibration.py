"""What a T-CIL fit costs, beside the procedure taken literally and beside the floor.

    TCIL_DATA=DIR python -m benchmarks.calibration        (five minutes; part of make bench)

After task 8 of CIFAR-100 on the authors' checkpoint (1,980 exemplars, 220 new, ResNet-32, one thread); where TCIL_DATA
is not set, on a synthetic task of the same size. All contestants take turns in one run; ratios are of processor time,
which others on the machine disturb least, and the times by the clock stand beside them. The floor is every image that
the fit passes through the model, counted by a hook on it, times the bare forward pass (or forward and input gradient)
of the same network in its best layout and batch.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import tcil
from benchmarks import ledger, literal, synthetic
from research import official
from tcil.foundation.folding import folded_copy

LAYOUTS = {"NCHW": torch.contiguous_format, "channels_last": torch.channels_last}


def count_images(model: nn.Module, run: Callable[[], Any]) -> dict[str, int]:
    """How many images went through the model, and how many of those with a graph behind them."""
    seen = {"forward": 0, "gradient": 0}

    def note(_: nn.Module, __: Any, output: Tensor) -> None:
        seen["gradient" if output.requires_grad else "forward"] += len(output)

    handle = model.register_forward_hook(note)
    try:
        run()
    finally:
        handle.remove()
    return seen


def forward(model: nn.Module, images: Tensor, batch: int) -> None:
    with torch.no_grad():
        for some in images.split(batch):
            model(some)


def gradient(model: nn.Module, images: Tensor, batch: int) -> None:
    for some in images.split(batch):
        x = some.detach().requires_grad_()
        torch.autograd.grad(model(x).sum(), x)


def bare_passes(model: nn.Module, images: Tensor) -> dict[str, dict[str, Callable[[], None]]]:
    """Forward and gradient passes over a few images, by layout and batch: eval mode, frozen parameters, no extras."""
    model = copy.deepcopy(model).eval().requires_grad_(False)
    passes: dict[str, dict[str, Callable[[], None]]] = {"forward": {}, "gradient": {}}
    for layout, form in LAYOUTS.items():
        some = images[:256].contiguous(memory_format=form)
        for batch in (32, 64, 128):
            for kind, run in (("forward", forward), ("gradient", gradient)):
                passes[kind][f"{layout}, batch {batch}"] = partial(run, model, some, batch)
    return passes


def load() -> tuple[str, Any]:
    folder = official.data_folder()
    if folder is not None:
        task = official.load(folder, 8)
        return "authors' checkpoint", replace(task, memory=(task.memory[0].contiguous(), task.memory[1]))
    network = synthetic.make((16, 32, 64), (5, 5, 5), 90)
    return "synthetic network of the same size (TCIL_DATA is not set)", synthetic.task(network, 1980, 10)


def measure() -> list[ledger.Figure]:
    warnings.simplefilter("ignore", tcil.CalibrationWarning)
    torch.set_num_threads(1)
    name, task = load()
    last = replace(task, memory=(task.memory[0].contiguous(memory_format=torch.channels_last), task.memory[1]))

    def fit(**options: Any) -> Any:
        return tcil.TCIL(**options).fit(task.model, task.memory, task.valid, task.new_classes).result_

    passes = bare_passes(task.model, task.memory[0])
    # Also those of the folded network, which the fit runs: how near it comes to its own passes.
    folded = bare_passes(folded_copy(task.model, task.memory[0][:2]), task.memory[0])
    passes |= {f"folded {kind}": by_way for kind, by_way in folded.items()}
    flat = {(kind, how): run for kind, by_way in passes.items() for how, run in by_way.items()}
    ours: list[tuple[ledger.Seconds, Any]] = []
    bare, taken, answers = [], {}, {}
    others: dict[str, Callable[[], Any]] = {
        "literal": partial(literal.literal, task),
        "exact NCHW": partial(literal.straightforward, task),
        "exact channels_last": partial(literal.straightforward, last),
        "bisection": partial(fit, search="bisection"),
    }
    for other, run in others.items():  # ours in between, each time with the bare passes beside it
        if other != "exact channels_last":
            bare.append(ledger.best(flat, 1))
            counts = count_images(task.model, lambda: ours.append(ledger.timed(fit)))
        taken[other], answers[other] = ledger.timed(run)
    # The others have one run each, so ours is the middle one of its three, not the best.
    middle, answers["ours"] = sorted((seconds for seconds, _ in ours), key=lambda s: s.cpu)[1], ours[-1][1]
    floors, ways = {"": 0.0, "folded ": 0.0}, {}
    details: dict[str, float] = dict(counts)
    for kind, by_way in passes.items():
        cost = {how: min(one[kind, how].cpu for one in bare) / 256 for how in by_way}
        ways[kind] = min(cost, key=cost.__getitem__)
        plain = kind.removeprefix("folded ")
        floors[kind.removesuffix(plain)] += counts[plain] * cost[ways[kind]]
        details[f"ms a {kind}"] = round(1e3 * cost[ways[kind]], 3)
    own, paper = answers["ours"], answers["bisection"]
    times = {"ours": middle, **taken}
    seconds = {f"{who}, s": f"{t.cpu:.1f} cpu {t.wall:.1f} clock" for who, t in times.items()}
    found = {f"T {who}": round(answer.temperature, 5) for who, answer in answers.items()}
    inside = abs(own.magnitude - paper.magnitude) <= 0.5 / 1024

    def ratio(who: str) -> float:
        return times[who].cpu / middle.cpu

    return [
        ledger.Figure("calibration/literal", f"literal / ours, {name}", ratio("literal"), 12.0, details=seconds),
        ledger.Figure("calibration/exact", "exact, signs once, NCHW / ours", ratio("exact NCHW")),
        ledger.Figure("calibration/exact-last", "the same in channels_last / ours", ratio("exact channels_last")),
        ledger.Figure("calibration/bisection", "ours by bisection / ours", ratio("bisection")),
        ledger.Figure(
            "calibration/floor", "ours / (images x bare pass)", middle.cpu / floors[""], at_most=1.3,
            details={**details, **{f"best {kind}": how for kind, how in ways.items()}},
        ),
        ledger.Figure(
            "calibration/folded-floor", "ours / (images x bare pass, folded)", middle.cpu / floors["folded "]
        ),
        ledger.Figure(
            "calibration/temperature", "T off ours with the bisection, %",
            100 * abs(own.temperature / paper.temperature - 1), at_most=0.5, details=found,
        ),
        ledger.Figure(
            "calibration/bracket", "magnitude in the bisection's last bracket (1 = yes)", float(inside), 1.0,
            details={"passes of the search": len(own.trace) - 1, "of the bisection": len(paper.trace) - 1},
        ),
    ]  # fmt: skip


if __name__ == "__main__":
    ledger.present("a T-CIL fit after task 8 of CIFAR-100, one thread", measure)
