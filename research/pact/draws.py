"""Several validation sets and reserves of one network: the command `python -m research.pact draws`.

Each network has a large held-out pool. Validation sets of one size are disjoint parts of it, and so are the reserves
(two more images of each class for each draw). Draw i takes the i-th part in every task, and has a history of its own.
So draws differ in these images only; network, memory, class order and test set are the same. The records in `draws`
are of round three (seed 122); those of the present form are in `draws-eight`.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tcil
from research.beyond import Known, oracle
from research.pact import measuring
from research.pact.methods import METHODS, PRESENT
from research.pact.worlds import RESERVED
from tcil.experiments.config.settings import RunSettings, build
from tcil.experiments.runs.evaluate import TaskLogits
from tcil.experiments.runs.run import Run
from tcil.foundation.files import replace_file
from tcil.incremental.data.images import Pixels
from tcil.incremental.data.stream import Task

LEARNERS = ("er", "wa")
SEED = 182
DRAWS = {80: 20, 320: 5}  # validation images of a task, and how many disjoint sets of them
NEW = 4  # classes per task
FOR_VALIDATION = 400  # images of a class in the pool; the rest of it is for reserves
POOL = FOR_VALIDATION + RESERVED * max(DRAWS.values())
OURS = ("PACT", "PACT-R")
COMPARED = ("TS", "T-CIL", *OURS)
REFERENCES = ("Vanilla", "Optimal TS", "Optimal T and bias")  # the same for all draws
FOLDER = "draws-eight"


def settings_of(learner: str) -> RunSettings:
    """As the preset, with more held-out images; as many for training as in the other studies."""
    return build(
        {
            "preset": "letters", "learner": learner, "seed": SEED, "class_order_seed": SEED, "data_seed": SEED,
            "validation": 80, "validation_pool": NEW * POOL, "train_per_class": 200 + POOL, "test_per_class": 320,
            "reserve": RESERVED,
        }
    )  # fmt: skip


def run(out: Path) -> None:
    """Train and measure what is missing; then print the table."""
    kept = measuring.STORED / FOLDER
    kept.mkdir(parents=True, exist_ok=True)
    for learner in LEARNERS:
        settings = settings_of(learner)
        path = kept / f"{settings.name}.json"
        if not path.exists():
            Run(settings, out / settings.name).execute(["vanilla"])
            replace_file(path, (json.dumps(measure(settings, out / settings.name)) + "\n").encode())
    print("\n".join(table(measuring.stored(FOLDER))))


def parts(run: Run, task: Task, start: int, stop: int) -> Tensor:
    """These images of each class of a task, by their place in its pool."""
    own = run.stream.columns[task.pool]
    return torch.cat([task.pool[own == column][start:stop] for column in task.columns])


def measure(settings: RunSettings, folder: Path) -> dict[str, Any]:
    """ECEs and beliefs of every draw on every task with old classes, and the oracle, which all draws share."""
    run = Run(settings, folder)
    draws = [(size, draw) for size, count in DRAWS.items() for draw in range(count)]
    memories: dict[Any, dict[str, Any]] = {(*draw, name): {} for draw in draws for name in COMPARED}
    rows: dict[Any, list[list[float]]] = {key: [] for key in memories}
    oracles = list[tuple[float, float]]()
    references: dict[str, list[list[float]]] = {name: [] for name in REFERENCES}
    pixels, train = Pixels(run.dataset), run.dataset.train
    with run.threads(), warnings.catch_warnings():
        warnings.simplefilter("ignore", tcil.CalibrationWarning)
        for task, memory, learner in run.walk():
            logits = TaskLogits.read(run.store, task.index)
            for place, (size, draw) in enumerate(draws):
                valid = parts(run, task, draw * size // NEW, (draw + 1) * size // NEW)
                finished = run.finished(task, memory, learner, {}, valid, logits)
                if task.index:
                    start = FOR_VALIDATION + RESERVED * draw
                    spare = torch.cat([parts(run, run.stream[i], start, start + RESERVED) for i in range(task.index)])
                    held = (pixels.plain(train, spare), run.stream.columns[spare])
                    found, columns = tcil.predict_logits(learner.model, held, classes=finished.seen)
                    finished = replace(finished, reserve_logits=found, reserve_columns=columns, reserve=held)
                evidence = tcil.TCIL().evidence(
                    learner.model, finished.memory, finished.valid, finished.new_columns, classes=finished.seen
                )
                if task.index and not place:
                    known = Known(finished, evidence, {}, {})
                    oracles.append(oracle(known))
                    for name in REFERENCES:
                        score = measuring.scores(METHODS[name][1](known), known)
                        references[name].append([score["pooled"], score["group"]])
                for name in COMPARED:
                    own = memories[size, draw, name]
                    known = Known(finished, evidence, {}, {}, own)
                    if not known.old and name not in OURS:
                        continue
                    answer = PRESENT[name](known) if name in OURS else METHODS[name][1](known)
                    if known.old:
                        score = measuring.scores(answer, known)
                        belief = own.get("belief")
                        believed = (
                            [belief.log_temperature, belief.log_temperature_error, belief.bias, belief.bias_error]
                            if belief
                            else []
                        )
                        truth = oracle(known, own["contrast"]) if belief else ()
                        rows[size, draw, name].append([score["pooled"], score["group"], *believed, *truth])
    return {
        "about": {"learner": settings.learner, "dataset": settings.dataset, "seed": SEED, "run": folder.name},
        "columns": [
            "pooled ECE, %",
            "by group, %",
            "log T",
            "its claimed error",
            "b",
            "its claimed error",
            "the oracle's log T with this contrast",
            "its b",
        ],
        "oracle": oracles,
        "references": references,
        "draws": [
            {"validation": size, "draw": draw, "scores": {name: rows[size, draw, name] for name in COMPARED}}
            for size, draw in draws
        ],
    }


def of_method(record: dict[str, Any], size: int, name: str) -> np.ndarray[Any, Any]:
    """What was found, by draw, task and column."""
    return np.array([draw["scores"][name] for draw in record["draws"] if draw["validation"] == size])


def errors(record: dict[str, Any], size: int, name: str, which: int) -> tuple[float, float, float]:
    """Of log T (0) or b (1), root mean squares over tasks: error, its sd over draws (which is in it), and the claim."""
    values = of_method(record, size, name)
    truth = values[:, :, 6 + which] if values.shape[2] > 6 else np.array(record["oracle"])[:, which]
    error = values[:, :, 2 + 2 * which] - truth
    claim = values[:, :, 3 + 2 * which]
    mean_squares = np.mean(error**2), np.mean(error.var(axis=0, ddof=1)), np.mean(claim**2)
    return tuple(math.sqrt(value) for value in mean_squares)  # type: ignore[return-value]


def table(records: Sequence[dict[str, Any]]) -> list[str]:
    """One row for each learner and size: pooled ECEs with their sd over draws, and what PACT's errors are made of."""
    if not records:
        return ["(none yet)"]
    lines = [
        "| learner | validation images | draws | " + " | ".join(COMPARED) + " | Optimal TS | PACT, log T | b |"
        " PACT-R, log T | b |",
        "|" + "---|" * (len(COMPARED) + 8),
    ]
    for record in sorted(records, key=lambda r: LEARNERS.index(r["about"]["learner"])):
        for size, count in DRAWS.items():
            pooled = [of_method(record, size, name)[:, :, 0].mean(axis=1) for name in COMPARED]
            cells = [f"{values.mean():.2f} ± {values.std(ddof=1):.2f}" for values in pooled]
            cells.append(f"{np.mean([row[0] for row in record['references']['Optimal TS']]):.2f}")
            for name in OURS:
                for which in (0, 1):
                    cells.append("{:.3f} / {:.3f} / {:.3f}".format(*errors(record, size, name, which)))
            lines.append(f"| {record['about']['learner'].upper()} | {size} | {count} | {' | '.join(cells)} |")
    return lines
