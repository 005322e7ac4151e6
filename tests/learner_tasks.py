"""Tasks of the digits, and learners trained on them."""

from __future__ import annotations

import torch

from tcil.incremental.data.images import Pixels
from tcil.incremental.learners import TaskData, make_learner
from tcil.incremental.learners.base import Schedule
from tcil.incremental.networks import small_cnn
from tcil.incremental.training import EpochState, OptimizerKind, train_stage

MAIN = Schedule(epochs=2, lr=0.05, milestones=(1,), weight_decay=2e-4)


def task_data(digits, index, size=2, share=6):
    """Task `index` of the digits, with `share` exemplars of each old class."""
    labels = digits.train.labels
    columns = range(index * size, (index + 1) * size)
    rows = {c: (labels == c).nonzero().squeeze(1) for c in range(columns.stop)}
    spans = tuple(range(i * size, (i + 1) * size) for i in range(index + 1))
    exemplars = {c: rows[c][:share] for c in range(columns.start)}
    return TaskData(index, columns, torch.cat([rows[c][10:40] for c in columns]), exemplars, labels, spans)


def run_task(learner, digits, data, schedule=MAIN, seed=0):
    generator = torch.Generator().manual_seed(seed)
    learner.begin_task(data)
    for name in learner.stages(data):
        stage = learner.stage(name, data, schedule, generator)
        train_stage(
            learner.model,
            stage,
            digits,
            data.column_of_row,
            batch_size=32,
            optimizer=OptimizerKind.SGD,
            generator=generator,
            state=EpochState(),
            on_epoch=lambda state, loss: None,
        )
    learner.end_task(data)


def batch(digits, data, n=24):
    rows = data.all_rows[torch.linspace(0, len(data.all_rows) - 1, n).long()]
    return Pixels(digits).plain(digits.train, rows), data.column_of_row[rows]


def loss_of(stage, x, y):
    """The stage's loss of a batch, as the training loop calls it: with the outputs of what runs beside the network."""
    return stage.loss(x, y) if stage.beside is None else stage.loss(x, stage.beside(x), y)


def two_tasks(name, digits, **options):
    learner = make_learner(name, small_cnn, 10, seed=3, options=options)
    run_task(learner, digits, task_data(digits, 0))
    return learner, task_data(digits, 1)
