"""Round three of the PACT study, on development worlds: variants of PACT and PACT-R (docs/pact-protocol.md).

    python -m research.round_three measure RUN...    # every variant, into docs/results/pact/development-three/
    python -m research.round_three tables            # pooled ECE / ECE by group, for every learner and world
    python -m research.round_three folds RUN...      # DER's head refitted out of fold (lead 3)

Every variant changes one thing of PACT. None has a constant that was fitted, but the threshold of "jump".
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch import Tensor

from research import pact as study
from research.beyond import Known
from research.pact import Method, begun, believed, between, log_spread, reserve_of
from tcil.calibration.calibrators.pact import PACTEvidence, PACTFilter
from tcil.calibration.calibrators.pact.filter import Belief
from tcil.foundation.files import replace_file

STORED = study.STORED / "development-three"
_PRIOR_COUNT = 4.0  # innovations that the claimed width is worth before any was seen


# T by the spread of the logits, where PACT can tell ----------------------------------------------------------------


def all_spread(known: Known) -> tuple[float | None, float | None]:
    """The log spread of all exemplars' logits, to compare with the task before and with the next."""
    now = log_spread(known.task.memory_logits)
    return now, now


def alike_spread(known: Known) -> tuple[float | None, float | None]:
    """The same over exemplars and columns of old classes alone: what the task before had, and nothing else."""
    logits, columns = known.task.memory_logits, known.task.memory_columns
    old = known.old
    return (log_spread(logits[columns < old][:, :old]) if old > 1 else None), log_spread(logits)


Spread = Callable[[Known], tuple[float | None, float | None]]
Move = Callable[[PACTFilter, float], None]


def whole(state: PACTFilter, step: float) -> None:
    """Log T moves by the change of the log spread (round two)."""
    state.log_t.move(step, 0.0)


def jump(threshold: float) -> Move:
    """By the change where it is larger than this, else not at all."""

    def move(state: PACTFilter, step: float) -> None:
        if abs(step) > threshold:
            state.log_t.move(step, 0.0)

    return move


def step_of(known: Known, spread: Spread) -> float | None:
    """The change of the log spread since the task before; keeps what the next task compares with."""
    now, kept = spread(known)
    before = known.memory.get("spread")
    known.memory["spread"] = kept
    return None if now is None or before is None else now - before


def moved(move: Move | None = None, spread: Spread = all_spread, *, reserve: bool = False) -> Method:
    """PACT or PACT-R whose log T moves with the spread of the logits."""

    def method(known: Known) -> Tensor:
        state = begun(known)
        step = step_of(known, spread)
        if move is not None and step is not None and known.memory.get("pact") is not None:
            move(state, step)
        state.weigh(known.evidence)
        known.memory["pact"] = state.memo() if state.informed else None
        return told(known, state, reserve)

    return method


def told(known: Known, state: PACTFilter, reserve: bool) -> Tensor:
    """The answer of a state, with or without the reserve."""
    now = state.as_evidence("all")
    if reserve and known.old and (found := state.with_reserve(known.evidence, reserve_of(known))):
        now = found[1]
    return believed(known, now, state.surprises)


@dataclass
class Witness(Belief):
    """A belief that keeps how likely what it saw was."""

    log_evidence: float = 0.0

    def see(self, value: float, error: float) -> None:
        wide = self.variance + error**2
        self.log_evidence += -0.5 * (value - self.mean) ** 2 / wide - 0.5 * math.log(wide)
        super().see(value, error)


def two_filters(spread: Spread = all_spread, *, reserve: bool = False) -> Method:
    """One filter whose log T stays and one whose log T moves with the spread, weighed by what they foretold so far."""

    def method(known: Known) -> Tensor:
        step, memos = step_of(known, spread), known.memory.setdefault("memos", [None, None])
        weights = known.memory.setdefault("weights", [0.0, 0.0])
        answers, surprises = list[PACTEvidence](), list[float]()
        for place, share in enumerate((0.0, 1.0)):
            known.memory["pact"] = memos[place]
            state = begun(known)
            if step is not None and memos[place] is not None:
                state.log_t.move(share * step, 0.0)
            state.log_t = Witness(state.log_t.mean, state.log_t.variance)
            state.weigh(known.evidence)
            if step is not None:
                weights[place] += state.log_t.log_evidence
            memos[place] = state.memo() if state.informed else None
            now = state.as_evidence("all")
            if reserve and known.old and (found := state.with_reserve(known.evidence, reserve_of(known))):
                now = found[1]
            answers.append(now)
            surprises += state.surprises
        share = 1 / (1 + math.exp(min(max(weights[0] - weights[1], -50.0), 50.0)))
        known.memory["share"] = share
        return believed(known, mixed(answers, share), surprises)

    return method


def mixed(answers: Sequence[PACTEvidence], share: float) -> PACTEvidence:
    """Mean and error of a mixture of two."""

    def moments(first: float, first_error: float, second: float, second_error: float) -> tuple[float, float]:
        mean = (1 - share) * first + share * second
        square = (1 - share) * (first_error**2 + first**2) + share * (second_error**2 + second**2)
        return mean, math.sqrt(square - mean**2)

    one, two = answers
    assert one.log_temperature is not None
    assert two.log_temperature is not None
    log_t = moments(
        one.log_temperature, one.log_temperature_error or 0.0, two.log_temperature, two.log_temperature_error or 0.0
    )
    bias: tuple[float | None, float | None] = (None, None)
    if one.bias is not None and two.bias is not None:
        bias = moments(one.bias, one.bias_error or 0.0, two.bias, two.bias_error or 0.0)
    return PACTEvidence("all", *log_t, *bias)


# posterior averaging (lead 5) --------------------------------------------------------------------------------------


def averaged(*, corrected: bool, reserve: bool = False) -> Method:
    """E[q] over the belief; its width by the claimed errors, or corrected by the innovations of the run so far."""

    def method(known: Known) -> Tensor:
        told_by = moved(reserve=reserve)(known)
        now: PACTEvidence = known.memory["belief"]
        seen = known.memory.setdefault("innovations", [])
        seen += known.memory["surprises"]
        if not known.old:
            return told_by
        factor = 1.0
        if corrected:
            factor = math.sqrt((_PRIOR_COUNT + float(np.square(seen).sum())) / (_PRIOR_COUNT + len(seen)))
        wide = PACTEvidence(
            "all",
            now.log_temperature,
            factor * (now.log_temperature_error or 0.0),
            now.bias,
            factor * (now.bias_error or 0.0),
        )
        known.memory["belief"] = wide
        return study.averaged(known, wide)

    return method


# out-of-fold refits of DER's head (lead 3) -------------------------------------------------------------------------


def folds(folder: Path, n_folds: int = 5) -> list[str]:
    """DER's head refitted on frozen features of the exemplars without a fold of them, as in its second stage."""
    about, tasks = study.walk(folder)
    lines = []
    for task, _ in tasks:
        if not task.new_columns.start or task.model is None or task.memory is None:
            continue
        images, columns = task.memory
        with torch.no_grad():
            features = torch.cat([task.model.features(part) for part in images.split(200)])  # type: ignore[operator]
        inside, outside = torch.zeros(len(columns), len(task.seen)), torch.zeros(len(columns), len(task.seen))
        place = torch.randperm(len(columns), generator=torch.Generator().manual_seed(0)) % n_folds
        for fold in range(n_folds):
            head = refit(features[place != fold], columns[place != fold], len(task.seen))
            with torch.no_grad():
                outside[place == fold] = head(features[place == fold])
        head = refit(features, columns, len(task.seen))
        with torch.no_grad():
            inside = head(features)
        old, test_old = columns < task.new_columns.start, task.test_columns < task.new_columns.start
        right = [
            100 * float((z[rows].argmax(1) == y[rows]).double().mean())
            for z, y, rows in (
                (inside, columns, old), (outside, columns, old), (task.test_logits, task.test_columns, test_old)
            )
        ]  # fmt: skip
        lines.append(
            f"{about['run']} task {task.index + 1}: old exemplars correct in {right[0]:.0f} %"
            f" in fold, {right[1]:.0f} % out of fold; old test images in {right[2]:.0f} %"
        )
    return lines


def refit(features: Tensor, columns: Tensor, n_classes: int) -> torch.nn.Linear:
    """DER's second stage with its settings in the preset: 30 epochs, SGD, lr 0.1 then 0.01, logits / 5."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = torch.nn.Linear(features.shape[1], n_classes)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    generator = torch.Generator().manual_seed(0)
    for epoch in range(30):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 if epoch < 15 else 0.01
        for rows in torch.randperm(len(columns), generator=generator).split(32):
            loss = torch.nn.functional.cross_entropy(head(features[rows]) / 5, columns[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return head


# measuring ---------------------------------------------------------------------------------------------------------

VARIANTS: dict[str, Method] = {
    "PACT": moved(),
    "PACT, spread: whole": moved(whole),
    "PACT, spread: between": moved(between),
    "PACT, spread: jump 0.3": moved(jump(0.3)),
    "PACT, spread: jump 0.5": moved(jump(0.5)),
    "PACT, spread: two filters": two_filters(),
    "PACT, alike: whole": moved(whole, alike_spread),
    "PACT, alike: between": moved(between, alike_spread),
    "PACT, alike: jump 0.3": moved(jump(0.3), alike_spread),
    "PACT, alike: jump 0.5": moved(jump(0.5), alike_spread),
    "PACT, alike: two filters": two_filters(alike_spread),
    "PACT, average": averaged(corrected=False),
    "PACT, average, corrected width": averaged(corrected=True),
    "PACT-R": moved(reserve=True),
    "PACT-R, spread: whole": moved(whole, reserve=True),
    "PACT-R, spread: between": moved(between, reserve=True),
    "PACT-R, spread: jump 0.5": moved(jump(0.5), reserve=True),
    "PACT-R, spread: two filters": two_filters(reserve=True),
    "PACT-R, alike: between": moved(between, alike_spread, reserve=True),
    "PACT-R, alike: two filters": two_filters(alike_spread, reserve=True),
    "PACT-R, average, corrected width": averaged(corrected=True, reserve=True),
    "PACT-R, Bennett": study.bennett,
}
OTHERS = ("Vanilla", "TS", "T-CIL", "Optimal TS", "Optimal group TS", "Optimal T and bias")


def measure(folders: Sequence[Path], walked: Callable[..., Any] = study.walk) -> None:
    STORED.mkdir(parents=True, exist_ok=True)
    methods = {name: study.METHODS[name][1] for name in OTHERS} | VARIANTS
    for folder in track(list(folders), description="round three"):
        record = study.measure(folder, methods, tuple(VARIANTS), walked)
        replace_file(STORED / f"{folder.name}.json", (json.dumps(record) + "\n").encode())


def tables() -> list[str]:
    """Pooled ECE / ECE by group by learner, their means by world, and harm above 1 and 3 over all tasks."""
    records = [json.loads(path.read_text()) for path in sorted(STORED.glob("*.json"))]
    seeds, names = sorted({r["about"]["seed"] for r in records}), study.learners(records)
    heads = ["all", *(f"seed {seed}" for seed in seeds), *(name.upper() for name in names), "harm > 1, > 3"]
    heads += ["RMS log T, b"]
    lines = ["| method | " + " | ".join(heads) + " |", "|" + "---|" * (len(heads) + 1)]
    for method in [*OTHERS, *VARIANTS]:
        parts = [records, *([r for r in records if r["about"]["seed"] == seed] for seed in seeds)]
        cells = [
            "{:.2f} / {:.2f}".format(*(study.each_learner(p, lambda r, k=k: study.mean(r, method, k))[0] for k in KEYS))  # type: ignore[misc]  # noqa: B023
            for p in parts
        ]
        cells += [
            "{:.2f} / {:.2f}".format(*(study.mean(study.of_learner(records, name), method, key) for key in KEYS))
            for name in names
        ]
        if method in VARIANTS:
            states = [s for record in records for s in record["states"] if "harm" in s]
            harm = [s["harm"][method][0] for s in states if s["harm"][method][1] > 0]
            cells.append(f"{sum(h > 1 for h in harm)}, {sum(h > 3 for h in harm)} of {len(states)}")
            cells.append(", ".join(f"{study.rms(study.ratio_errors(records, method, k)):.2f}" for k in (0, 1)))
        else:
            cells += ["", ""]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return lines


KEYS = ("pooled", "group")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("measure", "folds"):
        commands.add_parser(name).add_argument("runs", type=Path, nargs="+")
    commands.add_parser("tables")
    given = parser.parse_args()
    if given.command == "measure":
        measure(given.runs)
    if given.command == "folds":
        print("\n".join(line for folder in given.runs for line in folds(folder)))
    else:
        print("\n".join(tables()))


if __name__ == "__main__":
    main()
