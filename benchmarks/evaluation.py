"""What metrics cost beside the forward pass they are computed from.

    python -m benchmarks.evaluation        (a minute; part of make bench)

One pass of 10,000 images of CIFAR's size through ResNet-32 with 100 classes, on one thread; then every metric that does
not resample, each from the same probabilities.
"""

from __future__ import annotations

from functools import partial

import torch

import tcil
from benchmarks import ledger
from tcil import metrics

METRICS = (
    metrics.accuracy,
    metrics.negative_log_likelihood,
    metrics.brier_score,
    metrics.brier_parts,
    metrics.expected_calibration_error,
    metrics.adaptive_calibration_error,
    metrics.classwise_calibration_error,
    metrics.confidence_gap,
    metrics.reliability_bins,
    metrics.area_under_risk_coverage,
    metrics.risk_at_coverage,
)


def measure() -> list[ledger.Figure]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = tcil.networks.resnet32(100).eval()
    images, labels = torch.randn(10_000, 3, 32, 32), torch.randint(100, (10_000,))
    forward, _ = ledger.timed(lambda: tcil.predict_logits(network, (images, labels)))
    # An untrained network's own logits are all alike; these are spread as a trained one's.
    logits = 4 * torch.randn(10_000, 100)
    logits[torch.arange(10_000), labels] += 6
    probs = torch.softmax(logits.double(), dim=1)
    times = ledger.best({metric.__name__: partial(metric, probs, labels) for metric in METRICS}, 5)
    total = sum(seconds.cpu for seconds in times.values())
    slowest = dict(sorted(times.items(), key=lambda item: -item[1].cpu)[:3])
    details = {"pass, s": round(forward.cpu, 2), "metrics, s": round(total, 3)}
    details |= {f"{name}, ms": round(1e3 * seconds.cpu, 1) for name, seconds in slowest.items()}
    return [
        ledger.Figure(
            "evaluation/metrics", "all metrics on 10,000 x 100 / the forward pass, %", 100 * total / forward.cpu,
            at_most=2.0, details=details,
        )
    ]  # fmt: skip


if __name__ == "__main__":
    ledger.present("evaluation", measure)
