"""docs/scaling.md from what benchmarks/scaling.py measured; every number in it is computed here from that record."""

from __future__ import annotations

from typing import Any

NEW, VALID, STEPS, FEATURES = 10, 1000, 5, 512  # one exemplar in ten is new; five steps of search

PAGE = """# How the cost of a T-CIL fit grows

**In short:** the time of a fit grows linearly with the number of exemplars and hardly with the number of classes.

`python -m benchmarks.scaling` (part of `make bench`) writes this page from `docs/results/scaling.json`: {processor},
one thread, processor time; load {load} on the machine. The network is small on purpose (8 and 16 channels,
32x32 images, 16 features), so that the library's own share of the time is visible. With a real network it is
negligible.

![Time and peak memory](images/scaling.svg)

**Exemplars** (100 classes, batch 64): {start:.2f} s + {each:.3f} ms an exemplar, of which the network takes
{network:.3f} ms (images x its bare pass); exponent {power:.2f}: linear. Peak memory beyond the exemplars
themselves: {kilobytes:.1f} KB an exemplar (an image has 12.3 KB; one in ten is new and kept, with its direction).

{memory}

**Classes** (2,000 exemplars, batch 64): the number of images does not depend on the classes. The temperatures
cost {solve:.3f} ms per class more, the whole fit {fit:.3f} ms; exponent {class_power:.2f} over the larger half.

{classes}

**Batch size** (2,000 exemplars, 100 classes): below 32 the overhead of each call dominates; from 32 on, larger
batches save less time and take more memory. The default is 64, where the gradient pass of ResNet-32 is fastest.

{batch}

## ImageNet-1k with 20,000 exemplars

ResNet-18 at 224x224, ten tasks of 100 classes, so 2,000 new exemplars; five steps of search. Its passes were
measured on the stages that make up nearly all of it (56x56 maps and below).

{imagenet}

## 10,000 classes

The same network and 20,000 exemplars, ten times the classes.

{many}

## In pieces

Distances to class means, the temperature's float64 rows and the check of the inputs are worked on in chunks; the
logits of the perturbed exemplars are written into one float32 table, the only thing held that grows with exemplars
times classes. `tests/calibration/test_tcil.py` (`TestInChunks`) shows that chunks of any size give the same answer.
Exemplars from a loader are never held, but for the new ones (`benchmarks/streaming.py`).
"""

COLUMNS = {
    "forward": "images forward",
    "gradient": "with gradient",
    "seconds": "fit, s",
    "network": "images x bare pass, s",
    "solves": "temperatures, s",
    "means and targets": "means and targets, s",
    "peak, MB": "peak memory, MB",
}


def page(record: dict[str, Any]) -> str:
    memory, classes = record["lines"]["memory"], record["lines"]["classes"]
    return PAGE.format(
        processor=record["machine"]["processor"],
        load=record["machine"]["load"],
        start=memory["seconds"][0],
        each=1e3 * memory["seconds"][1],
        network=1e3 * memory["network"][1],
        power=memory["exponent"],
        kilobytes=1e3 * memory["peak, MB"][1],
        solve=1e3 * classes["solves"][1],
        fit=1e3 * classes["seconds"][1],
        class_power=classes["exponent"],
        imagenet=extrapolated(record, 20_000, 1000),
        many=extrapolated(record, 20_000, 10_000),
        **{over: table(over, rows) for over, rows in record["cases"].items()},
    )


def table(over: str, rows: list[dict[str, Any]]) -> str:
    lines = ["| " + " | ".join([over, *COLUMNS.values()]) + " |", "|" + "---:|" * (1 + len(COLUMNS))]
    for row in rows:
        cells = (row[key] for key in (over, *COLUMNS))
        lines.append("| " + " | ".join(f"{x:,.3f}" if isinstance(x, float) else f"{x:,}" for x in cells) + " |")
    return "\n".join(lines)


def extrapolated(record: dict[str, Any], exemplars: int, classes: int, size: int = 224) -> str:
    """The arithmetic for a larger case."""
    big = record["ResNet-18 at ImageNet's size"]
    new = exemplars // NEW
    forward, gradient = 2 * exemplars + (STEPS + 1) * new + VALID, exemplars
    one_forward, one_gradient = big["ms a forward"], big["ms a gradient"]
    network = (forward * one_forward + gradient * one_gradient) / 1e3
    solved = exemplars + (STEPS + 2) * new + VALID
    # Seconds a class, measured on 2,000 exemplars, for each row that is solved there.
    each = record["lines"]["classes"]["solves"][1] / (2000 + (STEPS + 2) * 200 + 100)
    solves, target = solved * classes * each, big[f"ms a target among {classes}"]
    targets = exemplars * target / 1e3
    megabytes = {
        "logits of the perturbed exemplars": exemplars * classes * 4 / 1e6,
        "new exemplars and their directions": 2 * new * 3 * size * size * 4 / 1e6,
        "graph of a batch of 64": 64 * big["graph, MB an image"],
        "class means and sums": 2 * classes * FEATURES * 8 / 1e6,
        "chunks (2 Mi elements in float64, four at a time)": 4 * 2**21 * 8 / 1e6,
    }
    whole = exemplars * classes * 8 / 1e6
    lines = [
        f"Images: 2 x {exemplars:,} + {STEPS + 1} x {new:,} new + {VALID:,} validation = {forward:,} forward;"
        f" {gradient:,} with gradient.",
        f"Network: {forward:,} x {one_forward:.1f} ms + {gradient:,} x {one_gradient:.1f} ms = {network:,.0f} s"
        f" ({network / 60:.0f} minutes) on one thread.",
        f"Temperatures: {solved:,} rows x {classes:,} classes x {1e9 * each:.0f} ns = {solves:.1f} s.",
        f"Targets: {exemplars:,} x {target:.2f} ms = {targets:.1f} s.",
        f"So the library's own part is {100 * (solves + targets) / network:.1f} % of the network's.",
        "Memory: " + ", ".join(f"{name} {value:,.0f} MB" for name, value in megabytes.items()) + ";"
        f" together {sum(megabytes.values()) / 1e3:.1f} GB beside the model and the exemplars themselves.",
        f"Not held: distances of all exemplars to all means ({whole:,.0f} MB in float64), and all logits in float64"
        f" ({whole:,.0f} MB).",
    ]  # fmt: skip
    return "\n".join(f"- {line}" for line in lines)
