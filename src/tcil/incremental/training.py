"""The training loop: epochs of a stage, resumable after each step, the same to the bit whether interrupted or not.

Under `tcil.sharded()` the ranks train together: all draw the same batches, each takes its part, and after the backward
pass one message carries the gradients, the BN running statistics and the loss of every rank. That is what
DistributedDataParallel does, without its wrapper: losses here call the network in their own ways (a teacher beside it,
DER's frozen extractors, a head alone), which a wrapped forward would not see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tcil.calibration import ranks
from tcil.calibration.options import Option
from tcil.calibration.ranks import Ranks
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
    """Where training stands inside a stage: epochs done, and what the optimizer and the generator need to go on.

    Inside an epoch also the order of its rows, the steps done and the sum of their losses.
    """

    epoch: int = 0
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    generator: Tensor | None = None
    step: int = 0
    order: Tensor | None = None
    total: Tensor | None = None


class Interrupted(Exception):
    """Training was asked to stop, and did after a whole step; `state` is where."""

    def __init__(self, state: EpochState) -> None:
        super().__init__(f"epoch {state.epoch}, step {state.step}")
        self.state = state


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
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Run the epochs of a stage from `state` on; `on_epoch` gets the new state and the epoch's mean loss.

    Once `stop` says so, the step is finished and `Interrupted` raised, with the state to go on from.
    """
    pixels, together = Pixels(dataset), ranks.current()
    device = dataset.train.images.device
    steps = make_optimizer(optimizer, stage.parameters, stage.schedule.lr, stage.schedule.weight_decay)
    restore_optimizer(steps, state.optimizer)
    if state.generator is not None:
        generator.set_state(state.generator)
    inputs_of = _reader(stage, pixels, dataset.train, generator, batch_size)
    for epoch in range(state.epoch, stage.schedule.epochs):
        for group in steps.param_groups:
            group["lr"] = stage.schedule.rate(epoch)
        model.train()
        if state.order is not None:
            order, total, done = state.order, state.total.to(device), state.step  # type: ignore[union-attr]
        else:
            order = stage.rows[torch.randperm(len(stage.rows), generator=generator)]
            total, done = torch.zeros((), device=device), 0
        state = EpochState()
        for rows in order.split(batch_size)[done:]:
            part, weight = _share(together, len(rows))
            inputs = inputs_of(rows, part)
            loss = stage.loss(inputs, columns[rows[part]].to(inputs.device))
            steps.zero_grad(set_to_none=True)
            loss.backward()
            mean_loss, stopping = _exchange(together, model, stage.parameters, loss.detach(), weight, stop())
            steps.step()
            total += mean_loss * len(rows)
            done += 1
            if stopping:
                now = optimizer_tensors(steps)
                raise Interrupted(EpochState(epoch, now, generator.get_state(), done, order, total))
        mean = float(total) / len(order)
        if not math.isfinite(mean):
            raise TrainingDiverged(f"stage {stage.name}, epoch {epoch}: the loss is {mean}; lower lr or check the data")
        on_epoch(EpochState(epoch + 1, optimizer_tensors(steps), generator.get_state()), mean)
    model.eval()


def _share(together: Ranks, n_rows: int) -> tuple[slice, float]:
    """This rank's rows of a batch, and what they weigh in it. One without any runs two of another's, which count 0."""
    part = together.part(n_rows)
    count = part.stop - part.start
    return (part, count / n_rows) if count else (slice(0, min(2, n_rows)), 0.0)


def _exchange(
    together: Ranks, model: nn.Module, parameters: Sequence[nn.Parameter], loss: Tensor, weight: float, stop: bool
) -> tuple[Tensor, bool]:
    """Gradients and BN running statistics become their means over ranks, weighted by rows; so does the loss, returned
    with whether any rank was asked to stop."""
    if together.size == 1:
        return loss, stop
    shared = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.training and module.running_mean is not None:
            shared += [module.running_mean, module.running_var]  # type: ignore[list-item]
    message = [value.flatten() * weight for value in (*shared, loss)]
    total = together.total(torch.cat([*message, loss.new_tensor([float(stop)])]))
    *values, mean_loss, stops = total.split([*(value.numel() for value in shared), 1, 1])
    for value, mean in zip(shared, values, strict=True):
        value.copy_(mean.view_as(value))
    return mean_loss.squeeze(0), bool(stops > 0)


def _reader(
    stage: Stage, pixels: Pixels, part: ImageSet, generator: torch.Generator, batch_size: int
) -> Callable[[Tensor, slice], Tensor]:
    """What the loss reads of a part of the rows: augmented images, or what the stage's frozen part makes of them.

    That is computed once for every image that augmentation can make, where those are fewer than there are epochs.
    """
    embed = stage.embed
    if embed is None:
        return lambda rows, keep: pixels.augmented(part, rows, generator, keep)
    if pixels.n_views > min(2, stage.schedule.epochs):
        return lambda rows, keep: embed(pixels.augmented(part, rows, generator, keep))
    views = [[embed(view) for view in pixels.views(part, rows)] for rows in stage.rows.split(batch_size)]
    kept = torch.cat([torch.stack(batch, dim=1) for batch in views])
    place = torch.full((len(part),), -1)
    place[stage.rows] = torch.arange(len(stage.rows))

    def look_up(rows: Tensor, keep: slice) -> Tensor:
        view = torch.randint(kept.shape[1], rows.shape, generator=generator)[keep]
        return kept[place[rows[keep]].to(kept.device), view.to(kept.device)]

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
