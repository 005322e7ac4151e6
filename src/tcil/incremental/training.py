"""The training loop: epochs of a stage, resumable after each, the same to the bit whether interrupted or not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tcil.calibration.options import Option
from tcil.incremental.images import Dataset, ImageSet, Pixels
from tcil.incremental.learners.base import Stage


class OptimizerKind(Option):
    """The optimizer; each stage starts a new one."""

    SGD = "sgd", "SGD with momentum 0.9, as in the authors' code"
    ADAM = "adam", "Adam, as the paper's text says"


class TrainingDiverged(RuntimeError):
    """The loss is no longer a finite number."""


@dataclass
class EpochState:
    """Where training stands inside a stage: epochs done, and what the optimizer and the generator need to go on."""

    epoch: int = 0
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    generator: Tensor | None = None


def train_stage(
    model: nn.Module,
    stage: Stage,
    dataset: Dataset,
    columns: Tensor,
    *,
    batch_size: int,
    optimizer: OptimizerKind,
    generator: torch.Generator,
    state: EpochState,
    on_epoch: Callable[[EpochState, float], None],
) -> None:
    """Run the epochs of a stage from `state` on; `on_epoch` gets the new state and the epoch's mean loss."""
    pixels = Pixels(dataset)
    steps = make_optimizer(optimizer, stage.parameters, stage.schedule.lr, stage.schedule.weight_decay)
    restore_optimizer(steps, state.optimizer)
    if state.generator is not None:
        generator.set_state(state.generator)
    inputs_of = _reader(stage, pixels, dataset.train, generator, batch_size)
    for epoch in range(state.epoch, stage.schedule.epochs):
        for group in steps.param_groups:
            group["lr"] = stage.schedule.rate(epoch)
        model.train()
        total = torch.zeros((), device=dataset.train.images.device)
        order = stage.rows[torch.randperm(len(stage.rows), generator=generator)]
        for rows in order.split(batch_size):
            inputs = inputs_of(rows)
            loss = stage.loss(inputs, columns[rows].to(inputs.device))
            steps.zero_grad(set_to_none=True)
            loss.backward()
            steps.step()
            total += loss.detach() * len(rows)
        mean = float(total) / len(order)
        if not math.isfinite(mean):
            raise TrainingDiverged(f"stage {stage.name}, epoch {epoch}: the loss is {mean}; lower lr or check the data")
        on_epoch(EpochState(epoch + 1, optimizer_tensors(steps), generator.get_state()), mean)
    model.eval()


def _reader(
    stage: Stage, pixels: Pixels, part: ImageSet, generator: torch.Generator, batch_size: int
) -> Callable[[Tensor], Tensor]:
    """What the loss reads of rows: augmented images, or what the stage's frozen part makes of them.

    That is computed once for every image that augmentation can make, where those are fewer than there are epochs.
    """
    embed = stage.embed
    if embed is None:
        return lambda rows: pixels.augmented(part, rows, generator)
    if pixels.n_views > min(2, stage.schedule.epochs):
        return lambda rows: embed(pixels.augmented(part, rows, generator))
    views = [[embed(view) for view in pixels.views(part, rows)] for rows in stage.rows.split(batch_size)]
    kept = torch.cat([torch.stack(batch, dim=1) for batch in views])
    place = torch.full((len(part),), -1)
    place[stage.rows] = torch.arange(len(stage.rows))

    def look_up(rows: Tensor) -> Tensor:
        view = torch.randint(kept.shape[1], rows.shape, generator=generator)
        return kept[place[rows].to(kept.device), view.to(kept.device)]

    return look_up


def make_optimizer(kind: OptimizerKind, parameters: object, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """A new optimizer over the parameters of a stage."""
    if kind is OptimizerKind.SGD:
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=weight_decay)  # type: ignore[arg-type]
    return torch.optim.Adam(parameters, lr=lr, weight_decay=weight_decay)  # type: ignore[arg-type]


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as named tensors, so that it can be stored without pickle."""
    tensors = {}
    for index, entry in optimizer.state_dict()["state"].items():
        for name, value in entry.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{name}"] = value.detach().clone()
    return tensors


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Give back what `optimizer_tensors` took."""
    if not tensors:
        return
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value.clone()
    record = optimizer.state_dict()
    record["state"] = state
    optimizer.load_state_dict(record)
