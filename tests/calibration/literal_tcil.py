"""Literal, slow T-CIL: Algorithms 1 to 3 of the paper, one sample at a time, as a test oracle.

Written from the paper alone, sharing no code with the library. Line numbers in comments are
those of the paper's algorithm boxes (in Algorithm 1, line 1 is the box's comment line).
The caller guarantees that the model is in eval mode. Class labels are 0..n_classes-1.

Batches of one and larger batches round differently in float32, so the sign of a gradient entry
that is zero up to rounding may differ from a batched implementation's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

Batch = Callable[[torch.Tensor], torch.Tensor]
Pairs = Sequence[tuple[torch.Tensor, Any]]

GRID_DECADES = 8  # the grid covers T / spread in [1e-8, 1e8]
GRID_PER_DECADE = 20
MAX_WIDENINGS = 1000


def _rows(logits: Any) -> list[list[float]]:
    """Logits (tensor, array or nested lists) as float64 Python numbers."""
    if isinstance(logits, torch.Tensor):
        logits = logits.detach().cpu().double().numpy()
    array = np.asarray(logits, dtype=np.float64)
    if array.ndim != 2 or array.size == 0 or not np.isfinite(array).all():
        raise ValueError("logits must be a non-empty, finite (N, K) table")
    return [[float(v) for v in row] for row in array]


def _loss(margins: list[list[float]], temperature: float) -> float:
    """Mean cross-entropy at T; margins[i][c] = z_ic - z_iy, so CE_i = log sum_c exp(margin / T)."""
    terms = []
    for row in margins:
        top = max(row)
        total = math.fsum(math.exp((m - top) / temperature) for m in row)
        terms.append(top / temperature + math.log(total))
    return math.fsum(terms) / len(terms)


def _slope(margins: list[list[float]], temperature: float) -> float:
    """Derivative of the mean cross-entropy in b = 1/T: mean of E_softmax[z] - z_y; grows with b."""
    terms = []
    for row in margins:
        top = max(row)
        weights = [math.exp((m - top) / temperature) for m in row]
        total = math.fsum(weights)
        terms.append(math.fsum(w * m for w, m in zip(weights, row)) / total)
    return math.fsum(terms) / len(terms)


def temp_opt(logits: Any, labels: Any) -> float:
    """TempOpt (Algorithm 3): the T > 0 that minimises the mean cross-entropy of logits / T.

    0.0 if every label logit is its row's maximum (this test comes first, so it also takes
    constant rows); inf if the mean label logit is not above the mean logit.

    The minimum is located on a dense grid of T by the loss itself, then bisected by the sign of
    the derivative: comparing loss values cannot resolve T to better than about 1e-8.
    """
    z = _rows(logits)
    y = [int(label) for label in labels]
    if len(y) != len(z) or any(not 0 <= label < len(row) for row, label in zip(z, y)):
        raise ValueError("need one label in 0..K-1 for every row of logits")

    if all(row[label] == max(row) for row, label in zip(z, y)):
        return 0.0
    # fsum is correctly rounded, so the sign of N K (mean z_y - mean z) is exact.
    parts = []
    for row, label in zip(z, y):
        for value in row:
            parts += [row[label], -value]
    if math.fsum(parts) <= 0.0:
        return math.inf

    # Lines 1-4: "update T to minimise CE until it converges".
    margins = [[value - row[label] for value in row] for row, label in zip(z, y)]
    spread = max(abs(m) for row in margins for m in row)
    step = math.log(10.0) / GRID_PER_DECADE
    ticks = range(-GRID_DECADES * GRID_PER_DECADE, GRID_DECADES * GRID_PER_DECADE + 1)
    grid = [math.log(spread) + step * tick for tick in ticks]  # values of log T
    losses = [_loss(margins, math.exp(log_t)) for log_t in grid]
    best = losses.index(min(losses))

    # The loss falls with T below the minimum (slope in b positive) and rises above it (negative).
    low, high = grid[best] - step, grid[best] + step
    for _ in range(MAX_WIDENINGS):
        if _slope(margins, math.exp(low)) > 0.0:
            break
        low -= step
    for _ in range(MAX_WIDENINGS):
        if _slope(margins, math.exp(high)) < 0.0:
            break
        high += step
    if not _slope(margins, math.exp(low)) > 0.0 > _slope(margins, math.exp(high)):
        raise ArithmeticError("the minimum of the cross-entropy could not be bracketed")
    for _ in range(100):
        middle = (low + high) / 2.0
        if _slope(margins, math.exp(middle)) > 0.0:
            low = middle
        else:
            high = middle
    temperature = math.exp((low + high) / 2.0)

    # The derivative must not have led away from the minimum that the loss values show.
    if _loss(margins, temperature) > min(losses) + 1e-12 * (1.0 + abs(min(losses))):
        raise ArithmeticError("the bisected temperature is worse than a grid point")
    return temperature


def target_class(feature: Any, label: Any, class_means: Any, new_classes: Collection[int]) -> int:
    """Target y' of one exemplar: farthest other mean if its class is new, nearest if it is old.

    class_means: mapping from class to mean, or a table with one row for each class. A tie goes to
    the class that comes first.
    """
    label = int(label)
    is_new = label in {int(c) for c in new_classes}
    means = class_means.items() if isinstance(class_means, Mapping) else enumerate(class_means)
    x = [float(v) for v in feature]
    best_class: int | None = None
    best_distance = 0.0
    for c, mean in means:
        if int(c) == label:
            continue
        mu = [float(v) for v in mean]
        if len(mu) != len(x):
            raise ValueError("feature and class mean differ in length")
        distance = math.sqrt(math.fsum((a - b) ** 2 for a, b in zip(x, mu)))
        if best_class is None or (is_new and distance > best_distance) or (not is_new and distance < best_distance):
            best_class, best_distance = int(c), distance
    if best_class is None:
        raise ValueError("no class other than the exemplar's own has a mean")
    return best_class


def perturb(model: Batch, x: torch.Tensor, target: int, n_classes: int, magnitude: float) -> torch.Tensor:
    """x - magnitude * sign(d CE(x, target) / dx) for one image x (no batch axis), unclipped."""
    with torch.enable_grad():
        image = x.detach().clone().unsqueeze(0).requires_grad_(True)
        logits = model(image)[:, :n_classes]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor([int(target)], device=logits.device))
        (gradient,) = torch.autograd.grad(loss, image)
    return x.detach() - magnitude * torch.sign(gradient[0])


def _feature(features: Batch, x: torch.Tensor) -> list[float]:
    """Feature vector of one image, as float64 numbers."""
    with torch.no_grad():
        return [float(v) for v in features(x.unsqueeze(0))[0].double()]


def _fit(model: Batch, pairs: Pairs, n_classes: int) -> float:
    """TempOpt on a set of (x, y) pairs, the logits computed one image at a time."""
    logits, labels = [], []
    for x, y in pairs:
        with torch.no_grad():
            row = model(x.unsqueeze(0))[0, :n_classes]
        logits.append([float(v) for v in row.double()])
        labels.append(int(y))
    return temp_opt(logits, labels)


def mag_search(
    model: Batch,
    features: Batch,
    new_exemplars: Pairs,
    target_temperature: float,
    class_means: Any,
    new_classes: Collection[int],
    n_classes: int,
    tolerance: float,
) -> float:
    """MagSearch (Algorithm 2): bisect the magnitude; T is 0 (all correct) or inf as in temp_opt."""
    new = {int(c) for c in new_classes}
    low, high = 0.0, 1.0  # line 1
    while high - low > tolerance:  # line 2
        eps = (low + high) / 2.0  # line 3
        perturbed = []  # line 4
        for x, y in new_exemplars:  # line 5
            if int(y) not in new:
                raise ValueError("MagSearch takes exemplars of new classes only")
            target = target_class(_feature(features, x), y, class_means, new)  # line 6 (farthest)
            x_adv = perturb(model, x, target, n_classes, eps)  # line 7
            perturbed.append((x_adv, y))  # line 8
        temperature = _fit(model, perturbed, n_classes)  # line 9
        if temperature < target_temperature:  # line 10
            low = eps  # line 11
        else:  # line 12
            high = eps  # line 13
    return (low + high) / 2.0  # output


def t_cil(
    model: Batch,
    features: Batch,
    memory: Pairs,
    valid: Pairs,
    new_classes: Collection[int],
    n_classes: int,
    tolerance: float = 1e-3,
) -> dict[str, Any]:
    """T-CIL (Algorithm 1): temperature, magnitude, target_temperature and targets (memory order)."""
    new = {int(c) for c in new_classes}

    target_temperature = _fit(model, valid, n_classes)  # line 2

    class_means: dict[int, list[float]] = {}  # line 3; a class without exemplars has no mean
    for c in range(n_classes):
        members = [_feature(features, x) for x, y in memory if int(y) == c]
        if members:
            class_means[c] = [math.fsum(column) / len(members) for column in zip(*members)]

    new_exemplars = [(x, y) for x, y in memory if int(y) in new]  # line 4

    magnitude = mag_search(  # line 5
        model,
        features,
        new_exemplars,
        target_temperature,
        class_means,
        new,
        n_classes,
        tolerance,
    )

    perturbed = []  # line 6
    targets = []
    for x, y in memory:  # line 7
        target = target_class(_feature(features, x), y, class_means, new)  # line 8
        x_adv = perturb(model, x, target, n_classes, magnitude)  # line 9
        perturbed.append((x_adv, y))  # line 10
        targets.append(target)

    temperature = _fit(model, perturbed, n_classes)  # line 11
    return {
        "temperature": temperature,
        "magnitude": magnitude,
        "target_temperature": target_temperature,
        "targets": targets,
    }
