"""What DER's tenth task costs beside its first, with the features of frozen extractors kept and computed anew.

    python -m benchmarks.expanding --out docs/results/expanding.json        (five minutes)

Ten tasks; 80 new images in each and 36 exemplars in the tenth, nearly the proportions of CIFAR-100 with 2,000
exemplars. Images are 32 x 32, random, flipped and not cropped. A task is both of DER's stages, by processor time on one
thread, the best of several turns taken side by side. The fewer the epochs, the more the features that are computed once
weigh: the paper trains 200, `cifar100-mini` 30.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import ledger
from benchmarks.training import MEAN, STD
from tcil.incremental.data.images import Dataset, ImageSet
from tcil.incremental.data.layout import Layout
from tcil.incremental.learners import Learner, TaskData, make_learner
from tcil.incremental.learners.base import Schedule, Stage
from tcil.incremental.networks import ResNet, resnet32, small_resnet
from tcil.incremental.training import EpochState, OptimizerKind, train_stage

TASKS, CLASSES, NEW, SHARE, BATCH, TUNING = 10, 2, 40, 2, 40, 10
NETWORKS: dict[str, tuple[Callable[[int], ResNet], int, int]] = {  # with epochs and turns
    "ResNet-32": (resnet32, 10, 1),
    "small ResNet": (small_resnet, 30, 2),
}
GOAL = 3.0


def images() -> Dataset:
    n = TASKS * CLASSES
    pixels = torch.randint(0, 256, (n * NEW, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    part = ImageSet(pixels, torch.arange(n * NEW) % n)
    return Dataset("random", part, part, tuple(map(str, range(n))), MEAN, STD, padding=0)


def task_data(data: Dataset, index: int) -> TaskData:
    labels = data.train.labels
    spans = tuple(range(i * CLASSES, (i + 1) * CLASSES) for i in range(index + 1))
    rows = {c: (labels == c).nonzero().squeeze(1) for c in range(spans[-1].stop)}
    exemplars = {c: rows[c][:SHARE] for c in range(spans[-1].start)}
    return TaskData(index, spans[-1], torch.cat([rows[c] for c in spans[-1]]), exemplars, labels, spans)


def anew(stage: Stage) -> Stage:
    """The stage as it was before features were kept: frozen extractors run in every step."""
    beside = stage.beside
    if beside is None:
        return stage
    return replace(stage, beside=None, loss=lambda x, y: stage.loss(x, beside(x), y))


def train(learner: Learner, data: Dataset, task: TaskData, epochs: int, change: Callable[[Stage], Stage]) -> None:
    """Both stages of a task that has begun; the network is left as it was."""
    start = copy.deepcopy(learner.model.state_dict())
    for name in learner.stages(task):
        generator = torch.Generator().manual_seed(0)
        stage = change(learner.stage(name, task, Schedule(epochs, 0.01, (), 2e-4), generator))
        train_stage(
            learner.model, stage, data, data.train.labels, batch_size=BATCH, optimizer=OptimizerKind.SGD,
            generator=generator, state=EpochState(), on_epoch=lambda state, loss: None,
        )  # fmt: skip
    learner.model.load_state_dict(start)


def measure(factory: Callable[[int], ResNet], epochs: int, rounds: int, tasks: int = TASKS) -> dict[str, float]:
    """Seconds of the first task and of the last, and their ratios."""
    torch.set_num_threads(1)
    data = images()

    def network(n_classes: int) -> ResNet:
        made: ResNet = factory(n_classes).to(memory_format=Layout.CHANNELS_LAST.form)  # type: ignore[call-overload]
        return made

    def at_task(index: int) -> tuple[Learner, TaskData]:
        options: dict[str, Any] = {"finetune_epochs": TUNING, "finetune_milestones": ()}
        learner = make_learner("der", network, data.n_classes, seed=1, options=options)
        for before in range(index + 1):
            if before:
                learner.end_task(task_data(data, before - 1))
            learner.begin_task(task_data(data, before))
        return learner, task_data(data, index)

    first, last = at_task(0), at_task(tasks - 1)
    contestants = {
        "first": lambda: train(first[0], data, first[1], epochs, lambda stage: stage),
        "kept": lambda: train(last[0], data, last[1], epochs, lambda stage: stage),
        "anew": lambda: train(last[0], data, last[1], epochs, anew),
    }
    train(first[0], data, first[1], 1, lambda stage: stage)  # warm up
    seconds = {name: times.cpu for name, times in ledger.best(contestants, rounds).items()}
    return {
        "epochs": epochs,
        **{f"{name}_seconds": round(value, 2) for name, value in seconds.items()},
        "kept_over_first": round(seconds["kept"] / seconds["first"], 2),
        "anew_over_first": round(seconds["anew"] / seconds["first"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the times")
    options = parser.parse_args()
    record: dict[str, Any] = {
        "command": "python -m benchmarks.expanding",
        "machine": ledger.machine(),
        "tasks": TASKS,
        "images": {"first": CLASSES * NEW, "last": CLASSES * NEW + (TASKS - 1) * CLASSES * SHARE},
        "tuning_epochs": TUNING,
        "goal": GOAL,
        "networks": {name: measure(*how) for name, how in NETWORKS.items()},
    }
    print(json.dumps(record, indent=1))
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
