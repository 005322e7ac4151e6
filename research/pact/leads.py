"""Leads that were left, tried on the networks of F17 and F18 after round nine: `python -m research.pact leads RUNS`.

PACT's answer averaged over what it believes; a reserve of which every image counts once, with its own sampling error,
or that enters by whether predictions are correct; and the exemplars' logits as they would be had the last layer not
been trained on them.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from research.beyond import Known, adjusted
from research.pact import measuring
from research.pact.methods import BASES, EIGHTH, METHODS, Labelled, Method, reserve_of, sides, tracked
from research.pact.tables import each_learner, mean, of_learner, ratio_errors, rms
from research.pact.worlds import LEARNERS, NINTH, final_settings
from tcil.calibration.calibrators.pact import PACTEvidence, PACTFilter
from tcil.calibration.calibrators.pact import evidence as pieces
from tcil.extending import predict_features
from tcil.foundation.files import replace_file

FOLDER = "leads-nine"
WORLDS = NINTH[:2]
RIDGE = 0.01  # of the mean square of a row of features
Posterior = Callable[[Labelled, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # mode and covariance of (log T, b)


def own_error(rows: Labelled, is_new: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """The reserve's most likely (log T, b), and its sampling error where the number of images of a class is fixed.

    Every image counts once; q is that of a sample with as many images of each class as there are. Joined with the
    belief as two observations.
    """
    z, y = rows[0].double(), rows[1]
    counts = torch.bincount(y, minlength=z.shape[1]).double()
    z_offset, is_old = counts.clamp(min=1e-20).log(), (~is_new).double()

    def each(point: Tensor) -> Tensor:
        q = torch.log_softmax(z * torch.exp(-point[0]) + point[1] * is_old + z_offset, dim=1)
        return -q.gather(1, y[:, None]).squeeze(1)

    weak = torch.tensor([1.0, 1 / 16], dtype=torch.float64)  # against a separable reserve
    point = _least(lambda p: each(p).sum() + 0.5 * (weak * (p - mean).square()).sum(), mean)
    scores = torch.autograd.functional.jacobian(each, point)
    for column in y.unique():
        own, n = y == column, int((y == column).sum())
        scores[own] = (scores[own] - scores[own].mean(0)) * math.sqrt(n / max(n - 1, 1))
    bread = torch.linalg.inv(torch.autograd.functional.hessian(lambda p: each(p).sum(), point))
    covariance = bread @ (scores.T @ scores) @ bread
    both = torch.linalg.inv(torch.linalg.inv(covariance) + (1 / variance).diag())
    return both @ (torch.linalg.solve(covariance, point) + mean / variance), both


def by_correctness(rows: Labelled, is_new: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """As PACT-R, but by the likelihood that predictions are correct, which is what ECE is about."""
    z, y = rows[0].double(), rows[1]
    counts, is_old = torch.bincount(y, minlength=z.shape[1]).double(), (~is_new).double()
    scarcer = min(float(counts[own].mean()) for own in (is_new, ~is_new))
    weight, top = scarcer / counts[y], z.argmax(1)
    right = (top == y).double()

    def loss(point: Tensor) -> Tensor:
        q = torch.log_softmax(z * torch.exp(-point[0]) + point[1] * is_old, dim=1)
        told = q.gather(1, top[:, None]).squeeze(1).clamp(max=-1e-6)
        likely = right * told + (1 - right) * torch.log1p(-told.exp())
        return -(weight * likely).sum() + 0.5 * ((point - mean).square() / variance).sum()

    point = _least(loss, mean)
    return point, torch.linalg.inv(torch.autograd.functional.hessian(loss, point))


def _least(loss: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    def value(x: np.ndarray[Any, Any]) -> tuple[float, np.ndarray[Any, Any]]:
        point = torch.tensor(x, requires_grad=True)
        found = loss(point)
        (gradient,) = torch.autograd.grad(found, point)
        return float(found.detach()), gradient.numpy()

    return torch.tensor(minimize(value, start.numpy(), jac=True, method="BFGS").x)


def by_sides(rows: Labelled, is_new: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Bennett's acceptance ratio: validation set and reserve tell b by their odds of old against new classes."""
    side = is_new[rows[1]]
    kept, valid = ((rows[0][own], rows[1][own]) for own in (~side, side))
    return sides(kept, valid, is_new, mean, variance)


def with_reserve(posterior: Posterior, without: str = "") -> Method:
    """PACT, with a reserve that enters in another way; of what it stands for, the belief is `without` the last piece.

    The next task still gets that piece: a reserve is not passed on.
    """

    def method(known: Known) -> Tensor:
        memo, evidence = known.memory.get("pact"), known.evidence
        log_imbalance = known.log_imbalance if known.old else None
        state = PACTFilter.of(memo, log_imbalance, evidence.result.target, EIGHTH, evidence.spread)
        believed: tuple[Tensor, Tensor] | None = None
        for take in state.in_order():
            if take.__name__ == without and state.bias is not None:
                believed = _believed(state)
            take(evidence)
        known.memory["pact"] = state.memo() if state.informed else None
        known.memory["surprises"], known.memory["contrast"] = list(state.surprises), state.contrast.mean
        now = state.as_evidence("all")
        if state.bias is not None:
            kept, valid = (
                pieces.evened(rows, evidence.is_new, state.contrast.mean, math.exp(state.log_t.mean))
                for rows in (reserve_of(known), evidence.valid)
            )
            rows = torch.cat([kept[0], valid[0]]), torch.cat([kept[1], valid[1]])
            point, covariance = posterior(rows, evidence.is_new, *(believed or _believed(state)))
            errors = covariance.diagonal().clamp(min=1e-8).sqrt()
            now = PACTEvidence("all", float(point[0]), float(errors[0]), float(point[1]), float(errors[1]))
        known.memory["belief"] = now
        assert now.log_temperature is not None
        return adjusted(known, now.log_temperature, now.bias or 0.0, contrast=state.contrast.mean)

    return method


def _believed(state: PACTFilter) -> tuple[Tensor, Tensor]:
    """Means and variances of log T and b, where there are old classes."""
    assert state.bias is not None
    mean = torch.tensor([state.log_t.mean, state.bias.mean], dtype=torch.float64)
    return mean, torch.tensor([state.log_t.variance, state.bias.variance], dtype=torch.float64)


BENNETT = with_reserve(by_sides, without="label_shift")
_NOW = ("PACT, centred", "PACT-R, centred")
OURS = {
    **{name: METHODS[name][1] for name in _NOW},
    "PACT, posterior average": tracked(constants=EIGHTH, spread="level", average=True),
    "PACT-R, sampling error alone": with_reserve(own_error),
    "PACT-R, by correctness": with_reserve(by_correctness),
}
TITLES = {"PACT-R, sampling error alone": "PACT-R, every image once, with its own error"}
MEASURED = {**{name: METHODS[name][1] for name in (*BASES, "Optimal TS", "Optimal group TS")}, **OURS}


def run(out: Path) -> None:
    """Measure what has no record yet, and print the tables."""
    folders = [out / final_settings(world, learner).name for world in WORLDS for learner in LEARNERS]
    measuring.store(FOLDER, folders, MEASURED, tuple(OURS))
    for folder in folders:
        path = measuring.STORED / FOLDER / f"{folder.name}.json"
        record = json.loads(path.read_text())
        if "left out" not in record:
            replace_file(path, (json.dumps({**record, "left out": left_out(folder)}) + "\n").encode())
    print("\n".join(tables()))


def left_out(folder: Path) -> list[list[float]]:
    """Of each task with old classes: accuracy on old exemplars left out and on old test images; the same of new ones.

    A ridge regression of the classes on the features of all exemplars; what it would say of one without it is known in
    closed form.
    """
    found = list[list[float]]()
    for task, _ in measuring.walk(folder)[1]:
        old = task.new_columns.start
        if not old:
            continue
        assert task.model is not None
        assert task.memory is not None
        rows = predict_features(task.model, task.memory, classes=task.seen)
        x = rows.features.double()
        x = torch.cat([x - x.mean(0), torch.ones(len(x), 1, dtype=torch.float64)], dim=1)
        y = torch.nn.functional.one_hot(rows.label_columns, len(task.seen)).double()
        penalty = RIDGE * float(x.square().sum(1).mean()) * torch.eye(x.shape[1], dtype=torch.float64)
        hat = x @ torch.linalg.solve(x.T @ x + penalty, x.T)
        without = y - (y - hat @ y) / (1 - hat.diagonal()[:, None])
        pairs = ((without, rows.label_columns), (task.test_logits, task.test_columns))
        hits = [(logits.argmax(1) == columns).double() for logits, columns in pairs]
        sides = [columns < old for _, columns in pairs]
        found.append([float(h[side == is_old].mean()) for is_old in (True, False)
                      for h, side in zip(hits, sides, strict=True)])  # fmt: skip
    return found


def tables() -> list[str]:
    """Both tables of what is kept."""
    records = measuring.stored(FOLDER)
    if not records:
        return ["(none yet)"]
    shown = {name: TITLES.get(name, name.replace(", centred", "")) for name in OURS}
    lines = [f"**Leads, {len(records)} runs of {', '.join(WORLDS)}**", "", *compared(records, shown)]
    titles = (
        "old exemplars, ridge head without them", "old test images, the network",
        "new exemplars, ridge head without them", "new test images, the network",
    )  # fmt: skip
    lines += ["", "| accuracy, % | " + " | ".join(titles) + " |", "|---|" + "---:|" * 4]
    for learner in LEARNERS:
        if own := of_learner(records, learner):
            shares = np.mean(list(itertools.chain.from_iterable(record["left out"] for record in own)), axis=0)
            lines.append(f"| {learner.upper()} | " + " | ".join(f"{100 * share:.1f}" for share in shares) + " |")
    return lines


def compared(records: Sequence[dict[str, Any]], titles: Mapping[str, str]) -> list[str]:
    """A row for each form that has a belief."""
    rms_of = "RMS of error / claimed over all tasks, log T"
    head = f"| method | pooled ECE less Optimal TS | ECE by group | NLL | {rms_of} | b |"
    lines = [head, "|---|" + "---:|" * 5]
    for name, title in titles.items():
        pooled, group, nll = (_mean(records, name, key) for key in ("pooled", "group", "nll"))
        pooled -= _mean(records, "Optimal TS", "pooled")
        errors = [rms(ratio_errors(records, name, which)) for which in (0, 1)]
        lines.append(f"| {title} | {pooled:+.2f} | {group:.2f} | {nll:.3f} | {errors[0]:.2f} | {errors[1]:.2f} |")
    return lines


def _mean(records: Sequence[dict[str, Any]], name: str, key: str) -> float:
    return each_learner(records, lambda own: mean(own, name, key))[0]
