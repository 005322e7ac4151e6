"""How many test images tell whether calibration helped: `tcil.metrics.compare_calibration` on simulated networks.

    python -m research.power        (two minutes of one core)

writes docs/results/power.json. The calibrated network has random logits over ten classes and labels drawn from its own
probabilities. The other one has the same logits times a factor, with which its ECE is the one named: over-confident.
"Equally good" are two networks that are over-confident by the same factor, each with noise of its own on its logits.
"""

from __future__ import annotations

import argparse
import json

import torch
from torch import Tensor

from research import ROOT
from tcil import metrics

CLASSES, SPREAD, DRAWS = 10, 1.5, 150
COUNTS, ERRORS = (300, 2000), (0.15, 0.04)
MANY = 200_000  # images from which the factor of an ECE is found


def main() -> None:
    """Simulate, print and store how often a difference is found."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    titles = [*(f"ECE {100 * error:.0f} % to 0" for error in ERRORS), "equally good"]
    cases: dict[str, dict[str, float]] = {title: {} for title in titles}
    factors = {error: factor_of(error) for error in ERRORS}
    for count in COUNTS:
        for error, found in zip(ERRORS, cases.values(), strict=False):
            found[str(count)] = share(count, factors[error])
        cases["equally good"][str(count)] = share(count, factors[ERRORS[0]], equal=True)
    record = {"command": "python -m research.power", "draws": DRAWS, "share_with_a_difference": cases}
    (ROOT / "docs/results/power.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


def simulated(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Logits, and labels drawn from their own softmax."""
    logits = SPREAD * torch.randn(count, CLASSES, generator=generator, dtype=torch.float64)
    return logits, torch.multinomial(logits.softmax(dim=1), 1, generator=generator).squeeze(1)


def factor_of(error: float) -> float:
    """The factor on the logits with which the network has this ECE."""
    logits, labels = simulated(MANY, torch.Generator().manual_seed(0))
    low, high = 1.0, 10.0
    for _ in range(20):
        middle = (low + high) / 2
        above = metrics.expected_calibration_error((middle * logits).softmax(dim=1), labels) > error
        low, high = (low, middle) if above else (middle, high)
    return (low + high) / 2


def share(count: int, factor: float, *, equal: bool = False) -> float:
    """How often a difference is found, over the draws."""
    found = 0
    for draw in range(DRAWS):
        generator = torch.Generator().manual_seed(1 + draw)
        logits, labels = simulated(count, generator)
        noise = [0.3 * torch.randn(logits.shape, generator=generator, dtype=torch.float64) for _ in range(2)]
        before, after = (factor * (logits + own) for own in noise) if equal else (factor * logits, logits)
        verdict = metrics.compare_calibration(before.softmax(dim=1), after.softmax(dim=1), labels, seed=draw).verdict
        found += verdict != "not told"
    return round(found / DRAWS, 3)


if __name__ == "__main__":
    main()
