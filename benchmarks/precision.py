"""Speed of the training loop in bf16 and fp16 on this processor, beside fp32.

    python -m benchmarks.precision --out docs/results/precision.json        (two minutes)

Processors with instructions for bfloat16 (AMX or AVX-512 BF16 of x86, BF16 of ARM) train faster in it; others are
slower than in fp32, and so may fp16 be. Images a second by processor time, one thread, batches of 64 random images of
CIFAR's size, crops and flips, the best of several turns taken side by side.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import ledger
from benchmarks.training import dataset, loop
from tcil.incremental.arithmetic import Arithmetic, Precision
from tcil.incremental.data.layout import Layout
from tcil.incremental.networks import ResNet, resnet32, small_resnet

Networks = Mapping[str, tuple[Callable[[int], ResNet], int]]
NETWORKS: Networks = {"ResNet-32": (resnet32, 2), "small ResNet": (small_resnet, 8)}  # with batches of a turn
BATCH, ROUNDS = 64, 6


def measure(rounds: int = ROUNDS, networks: Networks = NETWORKS) -> dict[str, dict[str, float]]:
    """Images a second in each precision, and the ratios to fp32, by network."""
    found = dict[str, dict[str, float]]()
    for precision in Precision:
        Arithmetic(precision).check(torch.device("cpu"))
    for name, (factory, steps) in networks.items():
        layout = Layout.CHANNELS_LAST
        data = dataset(layout, steps, BATCH)
        model = factory(10).to(memory_format=layout.form)  # type: ignore[call-overload]
        contestants = {
            str(precision): partial(loop, model, data, arithmetic=Arithmetic(precision), batch=BATCH)
            for precision in Precision
        }
        seconds = {kind: times.cpu for kind, times in ledger.best(contestants, rounds).items()}
        found[name] = {f"{kind}_images_per_second": round(BATCH * steps / s, 1) for kind, s in seconds.items()}
        for kind in ("bf16", "fp16"):
            found[name][f"{kind}_over_fp32"] = round(seconds["fp32"] / seconds[kind], 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the speeds")
    options = parser.parse_args()
    record: dict[str, Any] = {
        "command": "python -m benchmarks.precision",
        "machine": ledger.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "flags": [flag for flag in ("amx_bf16", "avx512_bf16", "avx512_fp16", "bf16") if ledger.has_flag(flag)],
        "networks": measure(),
    }
    print(json.dumps(record, indent=1))
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
