"""Share work among processes with torch.distributed; in a single process, nothing here has an effect.

Sharing is opt-in: in an initialised process group, each rank works alone until it enters
`with tcil.distributed.sharded():`. Every rank then holds the same data and the same model, computes every size-th
batch (`size` ranks), and receives all rows in order. Batches are never split, so the numbers are those of one process.
Only tensors are exchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tcil.foundation.errors import invalid

if TYPE_CHECKING:  # reading run folders in a single process does not need torch
    from torch import Tensor

_Batch = TypeVar("_Batch")


@dataclass(frozen=True)
class Dealt(Generic[_Batch]):
    """A batch of a shared pass, as seen by one rank.

    `here`: this rank computes the batch, because it is its own or the first one, from which every rank learns the
    shape of the outputs. `own`: this rank counts the batch in sums over all ranks.
    """

    batch: _Batch
    here: bool
    own: bool


@dataclass(frozen=True)
class Ranks:
    """This process among those that share the work.

    >>> Ranks().owns(3), Ranks().part(10), Ranks(rank=1, size=3).part(10)
    (True, slice(0, 10, None), slice(4, 7, None))
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files and prints."""
        return self.rank == 0

    def owns(self, batch: int) -> bool:
        """Whether this rank computes the batch with this number."""
        return batch % self.size == self.rank

    def deal(self, batches: Iterable[_Batch], done: int = 0) -> Iterator[Dealt[_Batch]]:
        """All batches of a pass in order, marked as this rank's or not; `done` batches of the pass came before.

        Pass the outputs for the batches that are `here` to `gathered`.
        """
        for number, batch in enumerate(batches, start=done):
            own = self.owns(number)
            yield Dealt(batch, own or number == 0, own)

    def part(self, n_rows: int) -> slice:
        """This rank's rows of a batch that all ranks train on; the first ranks take a remaining row each."""
        small, more = divmod(n_rows, self.size)
        start = self.rank * small + min(self.rank, more)
        return slice(start, start + small + (self.rank < more))

    def total(self, values: Tensor) -> Tensor:
        """The sum over all ranks, bitwise identical on each."""
        if self.size == 1:
            return values
        from torch import distributed as dist

        wire = self._wire(values.clone())
        dist.all_reduce(wire, group=self.group)
        return wire.to(values.device)

    def any(self, flag: bool) -> bool:
        """Whether it is True on one of the ranks at least."""
        if self.size == 1:
            return flag
        import torch

        return bool(self.total(torch.tensor(float(flag))) > 0)

    def gathered(self, own: list[Tensor], lengths: Sequence[int]) -> Tensor:
        """The rows of all batches in order, from this rank's outputs (consumed) and the length of every batch.

        Every rank needs the shape of the outputs, so the first batch is computed on each, but counted once.
        """
        joined = _joined(own)
        if self.size == 1:
            return joined
        import torch
        from torch import distributed as dist

        rows = joined[0 if self.first else lengths[0] :]
        counts = [sum(lengths[rank :: self.size]) for rank in range(self.size)]
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(self._wire(padded)) for _ in counts]
        dist.all_gather(parts, self._wire(padded), group=self.group)
        streams = [
            iter(part[:count].to(rows.device).split(list(lengths[rank :: self.size])))
            for rank, (part, count) in enumerate(zip(parts, counts, strict=True))
        ]
        return torch.cat([next(streams[number % self.size]) for number in range(len(lengths))])

    def wait(self) -> None:
        """Wait until all ranks get here."""
        if self.size > 1:
            import torch

            self.total(torch.zeros(1))

    @contextmanager
    def first_alone(self) -> Iterator[bool]:
        """Context that yields True on the first rank; the others wait until it starts and until it is done."""
        self.wait()
        yield self.first
        self.wait()

    def _wire(self, values: Tensor) -> Tensor:
        """The tensor on a device from which the backend can send: NCCL sends from the GPU."""
        from torch import distributed as dist

        return values.cuda() if dist.get_backend(self.group) == "nccl" else values.cpu()


def _joined(parts: list[Tensor]) -> Tensor:
    """Concatenate the parts; each is freed once it is copied, to limit memory use."""
    whole, done = parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:]), 0
    while parts:
        part = parts.pop(0)
        whole[done : done + len(part)] = part
        done += len(part)
    return whole


_current: ContextVar[Ranks | None] = ContextVar("tcil_ranks", default=None)


def current() -> Ranks:
    """The ranks that share the current work; only this process outside of `sharded`."""
    return _current.get() or Ranks()


@contextmanager
def sharded(group: Any = None) -> Iterator[None]:
    """Context manager that shares fits and passes over data among the ranks of an initialised process group.

    Every rank must make the same calls with the same model and the same data. Each rank runs its part of the batches,
    and all get the same result as a single process would. If torch.distributed is not initialised, nothing is shared.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        The ranks that share the work, including this one. Default: all.

    Examples
    --------
    >>> import torch, tcil
    >>> with tcil.distributed.sharded():
    ...     logits, labels = tcil.predict_logits(torch.nn.Linear(4, 3), (torch.randn(10, 4), torch.arange(10) % 3))
    >>> logits.shape
    torch.Size([10, 3])
    """
    from torch import distributed as dist

    ranks = Ranks()
    if dist.is_available() and dist.is_initialized():
        ranks = Ranks(dist.get_rank(group), dist.get_world_size(group), group)
        if ranks.rank < 0:
            raise invalid("group", "a process group without this rank", "one that this rank belongs to")
    elif group is not None:
        raise invalid("group", repr(group), "None where torch.distributed is not initialised")
    token = _current.set(ranks)
    try:
        yield
    finally:
        _current.reset(token)
