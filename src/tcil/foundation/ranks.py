"""Several processes that share one job, by torch.distributed; alone, everything here does nothing.

Nothing is shared by surprise: in an initialised process group each rank works alone, as ever, until it asks to share by
`with tcil.distributed.sharded():`. Every rank then holds the same data and the same model, computes every so-many-th
batch, and gets all rows in their order: batches are never cut, so that the numbers are those of one process. Only
tensors travel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tcil.foundation.errors import invalid

if TYPE_CHECKING:  # one process that reads run folders needs no torch
    from torch import Tensor

_Batch = TypeVar("_Batch")


@dataclass(frozen=True)
class Dealt(Generic[_Batch]):
    """A batch of a pass that the ranks share, as one of them sees it.

    `here`: computed by this rank, since it is its own, or the first, which shows every rank what answers look like.
    `own`: counted by this rank in what is summed over all of them.
    """

    batch: _Batch
    here: bool
    own: bool


@dataclass(frozen=True)
class Ranks:
    """This process among those that share the job.

    >>> Ranks().owns(3), Ranks().part(10), Ranks(rank=1, size=3).part(10)
    (True, slice(0, 10, None), slice(4, 7, None))
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes and speaks for all."""
        return self.rank == 0

    def owns(self, batch: int) -> bool:
        """Whether the batch of this number is computed here."""
        return batch % self.size == self.rank

    def deal(self, batches: Iterable[_Batch], done: int = 0) -> Iterator[Dealt[_Batch]]:
        """All batches of a pass in their order, `done` of which came before these, and which of them are this rank's.

        What this rank computes of those that are `here` goes into `gathered`.
        """
        for number, batch in enumerate(batches, start=done):
            own = self.owns(number)
            yield Dealt(batch, own or number == 0, own)

    def part(self, n_rows: int) -> slice:
        """This rank's rows of a batch that all ranks train on together; the first ranks take one more each."""
        small, more = divmod(n_rows, self.size)
        start = self.rank * small + min(self.rank, more)
        return slice(start, start + small + (self.rank < more))

    def total(self, values: Tensor) -> Tensor:
        """The sum over all ranks, the same to the bit on each."""
        if self.size == 1:
            return values
        from torch import distributed as dist

        wire = self._wire(values.clone())
        dist.all_reduce(wire, group=self.group)
        return wire.to(values.device)

    def gathered(self, own: list[Tensor], lengths: Sequence[int]) -> Tensor:
        """The rows of all batches in their order, given those of this rank's (used up) and the length of every batch.

        Every rank must know what a batch looks like: the first one is computed everywhere, and not counted twice.
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
        """Until all ranks are here."""
        if self.size > 1:
            import torch

            self.total(torch.zeros(1))

    @contextmanager
    def first_alone(self) -> Iterator[bool]:
        """Tells the first rank to do something while the others wait, before it begins and until it is done."""
        self.wait()
        yield self.first
        self.wait()

    def _wire(self, values: Tensor) -> Tensor:
        """The tensor where the backend can send it from: NCCL sends from the GPU."""
        from torch import distributed as dist

        return values.cuda() if dist.get_backend(self.group) == "nccl" else values.cpu()


def _joined(parts: list[Tensor]) -> Tensor:
    """The parts in one tensor; each is let go once it is copied, so that they do not take twice the memory."""
    whole, done = parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:]), 0
    while parts:
        part = parts.pop(0)
        whole[done : done + len(part)] = part
        done += len(part)
    return whole


_current: ContextVar[Ranks | None] = ContextVar("tcil_ranks", default=None)


def current() -> Ranks:
    """The ranks that share what is computed now; this process alone outside of `sharded`."""
    return _current.get() or Ranks()


@contextmanager
def sharded(group: Any = None) -> Iterator[None]:
    """Inside, fits and passes over data are shared among the ranks of an initialised process group (default: all).

    Every rank makes the same calls with the same model and the same data, each runs its part of the batches, and all
    get the same result, which is that of one process. Without torch.distributed nothing is shared.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        The ranks that share the work; this rank must be one of them. Default: all.

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
