"""The weights of a network: whether they can be used, a digest of them, and of those that some columns depend on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tcil.calibration.inputs.features import FeatureSource, later_heads
from tcil.foundation.errors import invalid

_MOST_AXES = 64  # of a tensor
_BY_ROWS, _BY_COLUMNS = (torch.sparse_csr, torch.sparse_bsr), (torch.sparse_csc, torch.sparse_bsc)
_LAYOUTS = (torch.strided, torch.sparse_coo, *_BY_ROWS, *_BY_COLUMNS)


def unwrap(model: nn.Module) -> nn.Module:
    """The plain network inside DataParallel, DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = cast(nn.Module, model._orig_mod)
        else:
            return model


def weights_hash(model: nn.Module) -> str:
    """A digest of the network's parameters and buffers (names, shapes, types, bytes), independent of the device."""
    return _digest(_tensors(model).items())


@dataclass(frozen=True)
class HeadTensor:
    """A tensor of the head with an entry for each of `width` logit columns along `axis`, starting at column `first`.

    `apart`: each column depends on its own entries only, so that the entries of unused columns do not matter.
    """

    name: str
    axis: int
    first: int
    width: int
    apart: bool

    def __post_init__(self) -> None:
        if not (0 <= self.axis < _MOST_AXES and self.first >= 0 and self.width > 0):
            raise ValueError(
                f"a head with the axis {self.axis}, the first column {self.first} and {self.width} columns"
            )

    def used(self, value: Tensor, columns: Sequence[int]) -> Tensor:
        """The entries that the given logit columns depend on."""
        if self.axis >= value.ndim:
            raise ValueError(f"{self.name} without an axis {self.axis}")
        width = min(self.width, value.shape[self.axis])
        needed = [column - self.first for column in columns] if self.apart else range(width)
        places = [place for place in needed if 0 <= place < width]
        return value.index_select(self.axis, torch.tensor(places, dtype=torch.long, device=value.device))


@dataclass(frozen=True)
class UsedWeights:
    """A digest of the weights that some logit columns depend on: the body, and these columns of the head.

    The digest does not change if the head grows, by columns or by further heads in the list of modules `grows`.
    """

    digest: str
    head: tuple[HeadTensor, ...]
    heads: tuple[str, ...]
    grows: str | None

    @classmethod
    def of(cls, model: nn.Module, source: FeatureSource | None, columns: Sequence[int]) -> UsedWeights | str:
        """The weights that these columns of the model depend on; the hash of all weights if the head is unknown."""
        plain = unwrap(model)
        if source is None or not source.parts:
            return weights_hash(plain)
        head, tensors, first = list[HeadTensor](), _tensors(plain), 0
        for name, width in source.parts:
            apart = type(plain.get_submodule(name)) is nn.Linear
            for key, value in tensors.items():
                if value.ndim and key.startswith(f"{name}." if name else "") and width in value.shape:
                    tied = [other for other in tensors if other != key and _same_memory(tensors[other], value)]
                    axis = value.shape.index(width)
                    head += [HeadTensor(k, axis, first, width, apart and not tied) for k in (key, *tied)]
            first += width
        used = cls("", tuple(head), tuple(name for name, _ in source.parts), source.grows)
        return replace(used, digest=used._digest_of(plain, columns))

    def match(self, model: nn.Module, columns: Sequence[int]) -> bool:
        """Whether these columns of the model depend on the same weights."""
        return self._digest_of(unwrap(model), columns) == self.digest

    def _digest_of(self, model: nn.Module, columns: Sequence[int]) -> str:
        by_name = {tensor.name: tensor for tensor in self.head}
        tensors = _tensors(model)
        try:
            later = self._further_heads(model)
            used = {name: by_name[name].used(tensors[name], columns) for name in by_name if name in tensors}
        except (AttributeError, ValueError):  # another network
            return ""
        return _digest(
            (name, used.get(name, value))
            for name, value in tensors.items()
            if not any(name.startswith(f"{head}.") for head in later)
        )

    def _further_heads(self, model: nn.Module) -> list[str]:
        """The modules added to the list of heads that are heads too: like the last known one, except for the width.

        Any other module in the list may process the logits, like a bias correction. If there are as many features as
        logits, a module that looks like a head may do so too.
        """
        if self.grows is None:
            return []
        last = f"{self.heads[-1]}."
        axes = {tensor.name.removeprefix(last): tensor.axis for tensor in self.head if tensor.name.startswith(last)}
        n_logits = max((tensor.first + tensor.width for tensor in self.head), default=0)
        last_head, further = model.get_submodule(self.heads[-1]), list[str]()
        for name in later_heads(model, self.grows, self.heads):
            module = model.get_submodule(name)
            widths, same = _compared(_tensors(last_head), _tensors(module), axes)
            if type(module) is not type(last_head) or widths is None or len(widths) != 1 or n_logits in same:
                break
            n_logits += widths.pop()
            further.append(name)
        return further


class SeenModel(TypedDict):
    """What a fit stores about the network."""

    head_width: int | None
    columns: tuple[int, ...] | None
    source: FeatureSource | None
    model_hash: UsedWeights | str | None


def _compared(
    one: Mapping[str, Tensor], other: Mapping[str, Tensor], axes: Mapping[str, int]
) -> tuple[set[int] | None, set[int]]:
    """Sizes of the other tensors along these axes (None if the other sizes differ), and the sizes that both share."""
    widths, same = set[int](), set[int]()
    if one.keys() != other.keys():
        return None, same
    for name, value in one.items():
        ours, theirs = list(value.shape), list(other[name].shape)
        if name in axes and len(ours) == len(theirs):
            del ours[axes[name]]
            widths.add(theirs.pop(axes[name]))
        if ours != theirs:
            return None, same
        same.update(ours)
    return widths, same


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    tensors = {name: value for name, value in unwrap(model).state_dict().items() if isinstance(value, Tensor)}
    refuse_unready(tensors)
    return dict(sorted(tensors.items()))


def _same_memory(a: Tensor, b: Tensor) -> bool:
    dense = a.layout == b.layout == torch.strided  # only these have a data pointer
    return dense and a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, value in tensors:
        digest.update(f"{name} {tuple(value.shape)} {value.dtype};".encode())
        for part in _strided(value):
            flat = part.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _strided(value: Tensor) -> list[Tensor]:
    """The tensor, or the parts of a sparse tensor."""
    if value.layout == torch.strided:
        return [value]
    if value.layout == torch.sparse_coo:
        value = value.detach().coalesce()
        return [value.indices(), value.values()]
    if value.layout in _BY_ROWS:
        return [value.crow_indices(), value.col_indices(), value.values()]
    return [value.ccol_indices(), value.row_indices(), value.values()]


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of the same layout are equal, including NaN."""
    pairs = list(zip(_strided(a), _strided(b), strict=True))
    return all(
        x.shape == y.shape and (torch.equal(x, y) or bool(((x == y) | ((x != x) & (y != y))).all())) for x, y in pairs
    )


def refuse_unready(tensors: Mapping[str, Tensor]) -> None:
    """Raise for weights without values (meta device, uninitialised lazy modules) or in unsupported layouts."""
    for name, value in tensors.items():
        if is_lazy(value):
            advice = "Run one batch through the model first."
            raise invalid("model", f"{name!r} of a lazy module, without a shape yet", "initialised weights", advice)
        if value.device.type == "meta":
            advice = "Load its weights on a real device first, for instance with model.to_empty(device='cpu')."
            raise invalid("model", f"{name!r} on the meta device, which holds no values", "trained weights", advice)
        if value.layout not in _LAYOUTS:
            raise invalid("model", f"{name!r} in the layout {value.layout}", "dense or sparse tensors")
