"""The training loop. It can be resumed after each step, with bitwise identical results.

Under `tcil.distributed.sharded()` the ranks train together: all draw the same batches, each computes its part, and
after the backward pass one all-reduce exchanges the gradients, the BN running statistics and the loss. This is like
DistributedDataParallel, but without a wrapper, because losses call parts of the network directly (a teacher, DER's
frozen extractors, the head).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tcil.foundation import ranks
from tcil.foundation.options import Option
from tcil.foundation.ranks import Ranks
from tcil.incremental.arithmetic import Arithmetic
from tcil.incremental.data.images import Dataset, ImageSet, Pixels
from tcil.incremental.learners.base import Stage
from tcil.incremental.schedule import MOMENTUM


class OptimizerKind(Option):
    """The optimizer; each stage starts a new one."""

    SGD = "sgd", "SGD with momentum 0.9, as in the authors' code"
    ADAM = "adam", "Adam, as in the paper's text"


class TrainingDiverged(RuntimeError):
    """The loss is no longer a finite number."""


@dataclass
class EpochState:
    """The state of training inside a stage: epochs done, and the states of the optimizer and the generator.

    Inside an epoch also the order of its rows, the steps done and the sum of their losses; in fp16 also the scale of
    the loss.
    """

    epoch: int = 0
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    generator: Tensor | None = None
    step: int = 0
    order: Tensor | None = None
    total: Tensor | None = None
    scale: dict[str, Tensor] = field(default_factory=dict)


class Interrupted(Exception):
    """Training was asked to stop and did so after a complete step; `state` is the state to resume from."""

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
    arithmetic: Arithmetic = Arithmetic(),  # noqa: B008 (frozen)
) -> None:
    """Run the epochs of a stage from `state` on; `on_epoch` gets the new state and the epoch's mean loss.

    When `stop` returns True, the current step is finished and `Interrupted` is raised with the state to resume from.
    """
    pixels, together = Pixels(dataset), ranks.current()
    device = dataset.train.images.device
    if stage.observe is not None:
        _observe(stage, pixels, dataset.train, columns, batch_size, generator, state, on_epoch, stop)
        return
    steps = make_optimizer(optimizer, stage.parameters, stage.schedule.lr, stage.schedule.weight_decay)
    restore_optimizer(steps, state.optimizer)
    if state.generator is not None:
        generator.set_state(state.generator)
    scaler, loss_of = arithmetic.scaler(device, state.scale), arithmetic.loss(stage.loss)
    with arithmetic.cast(device):
        inputs_of = _reader(stage, pixels, dataset.train, generator, batch_size)
    for epoch in range(state.epoch, stage.schedule.epochs):
        model.train()
        if state.order is not None:
            order, total, done = state.order, state.total.to(device), state.step  # type: ignore[union-attr]
        else:
            order = stage.rows[torch.randperm(len(stage.rows), generator=generator)]
            total, done = torch.zeros((), device=device), 0
        state = EpochState()
        batches = order.split(batch_size)
        for rows in batches[done:]:
            for group in steps.param_groups:
                group["lr"] = stage.schedule.rate(epoch + done / len(batches))
            part, weight = _share(together, len(rows))
            with arithmetic.cast(device):
                loss = loss_of(*inputs_of(rows, part), columns[rows[part]].to(device))
            steps.zero_grad(set_to_none=True)
            scaler.backward(loss)
            mean_loss, stopping = _exchange(together, model, stage.parameters, loss.detach(), weight, stop())
            scaler.step(steps)
            if stage.after_step is not None:
                with torch.no_grad():
                    stage.after_step()
            total += mean_loss * len(rows)
            done += 1
            if stopping:
                now = optimizer_tensors(steps)
                raise Interrupted(EpochState(epoch, now, generator.get_state(), done, order, total, scaler.state()))
        mean = float(total) / len(order)
        if not math.isfinite(mean):
            raise TrainingDiverged(f"stage {stage.name}, epoch {epoch}: the loss is {mean}; lower lr or check the data")
        if scaler.collapsed:
            raise TrainingDiverged(f"stage {stage.name}, epoch {epoch}: all gradients overflow in fp16; use bf16")
        on_epoch(EpochState(epoch + 1, optimizer_tensors(steps), generator.get_state(), scale=scaler.state()), mean)
    model.eval()


def _observe(
    stage: Stage,
    pixels: Pixels,
    part: ImageSet,
    columns: Tensor,
    batch_size: int,
    generator: torch.Generator,
    state: EpochState,
    on_epoch: Callable[[EpochState, float], None],
    stop: Callable[[], bool],
) -> None:
    """A stage without gradients: each image once, in the order of the rows. Every rank processes all of them."""
    assert stage.observe is not None
    if state.epoch:
        return
    together, batches, nothing = ranks.current(), stage.rows.split(batch_size), torch.zeros(())
    for done, rows in enumerate(batches):
        if done < state.step:
            continue
        with torch.no_grad():
            x = pixels.plain(part, rows)
            stage.observe(x, columns[rows].to(x.device))
        if together.any(stop()):
            raise Interrupted(EpochState(0, {}, generator.get_state(), done + 1, stage.rows, nothing))
    on_epoch(EpochState(1, {}, generator.get_state()), 0.0)


def _share(together: Ranks, n_rows: int) -> tuple[slice, float]:
    """This rank's rows of a batch, and their weight in it. A rank without rows runs two others with weight 0."""
    part = together.part(n_rows)
    count = part.stop - part.start
    return (part, count / n_rows) if count else (slice(0, min(2, n_rows)), 0.0)


def _exchange(
    together: Ranks, model: nn.Module, parameters: Sequence[nn.Parameter], loss: Tensor, weight: float, stop: bool
) -> tuple[Tensor, bool]:
    """Average gradients, BN running statistics and the loss over ranks, weighted by rows.

    Returns the mean loss and whether any rank was asked to stop.
    """
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


_MOST_KEPT = 2**30  # bytes of features that are kept; a fixed number, so that all machines behave the same


def _reader(
    stage: Stage, pixels: Pixels, part: ImageSet, generator: torch.Generator, batch_size: int
) -> Callable[[Tensor, slice], tuple[Tensor, ...]]:
    """A function that returns the inputs of the loss: augmented images, their frozen features, or both.

    The frozen features are computed once for all epochs if `_kept` returns them.
    """
    embed, beside = stage.embed, stage.beside
    if frozen := embed or beside:
        # A network is folded if that leaves its answer to the first batch as it is: on every rank, and after every
        # resume, the same images.
        frozen(pixels.plain(part, stage.rows[:2]))
    kept = _kept(stage, pixels, part, batch_size)
    place = torch.full((len(part),), -1)
    place[stage.rows] = torch.arange(len(stage.rows))

    def images(rows: Tensor, keep: slice) -> tuple[Tensor, ...]:
        return (pixels.augmented(part, rows, generator, keep),)

    def embedded(rows: Tensor, keep: slice) -> tuple[Tensor, ...]:
        assert embed is not None
        return (embed(pixels.augmented(part, rows, generator, keep)),)

    def embedded_before(rows: Tensor, keep: slice) -> tuple[Tensor, ...]:
        assert kept is not None
        view = torch.randint(kept.shape[1], rows.shape, generator=generator)[keep]
        return (kept[place[rows[keep]].to(kept.device), view.to(kept.device)],)

    def both(rows: Tensor, keep: slice) -> tuple[Tensor, ...]:
        assert beside is not None
        x = pixels.augmented(part, rows, generator, keep)
        return x, beside(x)

    def both_before(rows: Tensor, keep: slice) -> tuple[Tensor, ...]:
        assert kept is not None
        x, view = pixels.drawn(part, rows, generator, keep)
        return x, kept[place[rows[keep]].to(kept.device), view]

    if embed is not None:
        return embedded if kept is None else embedded_before
    if beside is not None:
        return both if kept is None else both_before
    return images


def _kept(stage: Stage, pixels: Pixels, part: ImageSet, batch_size: int) -> Tensor | None:
    """The frozen features of all views of the stage's rows, (rows, views, features); ranks share the work.

    None if the stage has no frozen part, if augmentation produces more views than there are epochs or more than two, or
    if the features would take more than 1 GiB. CIFAR-100's tenth task needs 2 views x 7,000 images x 576 x 4 bytes =
    32 MB.
    """
    frozen, together = stage.embed or stage.beside, ranks.current()
    if frozen is None or pixels.n_views > min(2, stage.schedule.epochs):
        return None
    batches, features = stage.rows.split(batch_size), list[Tensor]()
    for dealt in together.deal(batches):
        if dealt.here:
            features.append(torch.stack([frozen(view) for view in pixels.views(part, dealt.batch)], dim=1))
        if features[0][0].nbytes * len(stage.rows) > _MOST_KEPT:  # of the first batch, which every rank has
            return None
    return together.gathered(features, [len(batch) for batch in batches])


def make_optimizer(kind: OptimizerKind, parameters: object, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """A new optimizer over the parameters of a stage."""
    if kind is OptimizerKind.SGD:
        return torch.optim.SGD(parameters, lr=lr, momentum=MOMENTUM, weight_decay=weight_decay)  # type: ignore[arg-type]
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
    """Load the state that `optimizer_tensors` returned."""
    if not tensors:
        return
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value.clone()
    record = optimizer.state_dict()
    record["state"] = state
    optimizer.load_state_dict(record)
