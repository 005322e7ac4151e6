"""Data in every container: the same answer, or a refusal by name; nothing drawn from the user's random states."""

from __future__ import annotations

import itertools
import random
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

import tcil
from fuzz import oracles
from fuzz.cases import cases
from fuzz.networks import CLASSES, NEW, Data, Plain, draw_data
from fuzz.test_models import ARGUMENTS as OF_MODELS

ENTRY = "loaders"
ARGUMENTS = (*OF_MODELS, "unpack")
BATCH = 8
SEEDS = st.integers(0, 20)
Pair = tuple[Tensor, Tensor]


class Duck:
    """A dataset that inherits nothing."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    def __len__(self) -> int:
        return len(self.pair[0])

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.pair[0][index], int(self.pair[1][index])


class Rows(IterableDataset):
    """A dataset that is read from its beginning."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    def __iter__(self) -> Any:
        return iter(zip(*self.pair, strict=True))


class Mapped(Dataset):
    """Rows as a dict."""

    def __init__(self, pair: Pair, keys: tuple[str, str]) -> None:
        self.pair, self.keys = pair, keys

    def __len__(self) -> int:
        return len(self.pair[0])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return dict(zip(self.keys, (part[index] for part in self.pair), strict=True))


def batches(pair: Pair) -> list[Pair]:
    return list(zip(*(part.split(BATCH) for part in pair), strict=True))


def keyed(*keys: str) -> Callable[[Pair], Any]:
    return lambda pair: DataLoader(Mapped(pair, keys), batch_size=BATCH)


# A container, and the `unpack` that it needs. All give the same batches of 8.
CONTAINERS: dict[str, tuple[Callable[[Pair], Any], Any]] = {
    "tensors": (lambda p: p, None),
    "list of tensors": (list, None),
    "arrays": (lambda p: (p[0].numpy(), p[1].numpy()), None),
    "double": (lambda p: (p[0].double(), p[1].int()), None),
    "needing gradients": (lambda p: (p[0].clone().requires_grad_(), p[1]), None),
    "dataset": (lambda p: TensorDataset(*p), None),
    "duck": (Duck, None),
    "loader": (lambda p: DataLoader(TensorDataset(*p), batch_size=BATCH), None),
    "loader with a generator": (
        lambda p: DataLoader(TensorDataset(*p), batch_size=BATCH, generator=torch.Generator()),
        None,
    ),
    "batch sampler": (
        lambda p: DataLoader(
            TensorDataset(*p), batch_sampler=BatchSampler(SequentialSampler(p[0]), BATCH, drop_last=False)
        ),
        None,
    ),
    "rows": (lambda p: DataLoader(Rows(p), batch_size=BATCH), None),
    "list of batches": (batches, None),
    "batches with more": (lambda p: [(x, y, {"path": "here"}) for x, y in batches(p)], None),
    "dict batches": (lambda p: [{"image": x, "label": y, "index": 0} for x, y in batches(p)], None),
    "like a dict": (lambda p: [UserDict(image=x, label=y) for x, y in batches(p)], None),
    "x, y": (keyed("x", "y"), None),
    "images, labels": (keyed("images", "labels"), None),
    "pixel_values, labels": (keyed("pixel_values", "labels"), None),
    "pixel_values, label": (keyed("pixel_values", "label"), None),
    "own keys": (keyed("scan", "finding"), ("scan", "finding")),
    "own function": (lambda p: [(y, x) for x, y in batches(p)], lambda batch: (batch[1], batch[0])),
    "with an index": (lambda p: [(torch.arange(len(y)), x, y) for x, y in batches(p)], (1, 2)),
}


@cases(test=30, fuzz=700)
@given(st.sampled_from(sorted(CONTAINERS)), st.sampled_from(["t-cil", "pact", "perturb-ts", "logits"]), SEEDS)
@example("loader", "t-cil", 0)
def test_the_container_does_not_matter(name, kind, seed):
    make, unpack = CONTAINERS[name]
    model, data = Plain(seed), draw_data(seed)
    plain = oracles.answered(oracles.attempt(ENTRY, lambda: fitted(kind, model, data.memory, data.valid), ARGUMENTS))
    held = Data(make(data.memory), make(data.valid))
    with oracles.nothing_changed(model, held.memory, held.valid, *data.memory, *data.valid):
        call = lambda: fitted(kind, model, held.memory, held.valid, unpack)  # noqa: E731
        answer = oracles.answered(oracles.attempt(ENTRY, call, ARGUMENTS))
    oracles.near(answer, plain, relative=1e-5)


def fitted(kind: str, model: Any, memory: Any, valid: Any, unpack: Any = None) -> np.ndarray:
    """The numbers that a calibrator finds, or the logits."""
    if kind == "logits":
        logits, labels = tcil.predict_logits(model, memory, batch_size=BATCH, unpack=unpack)
        return np.column_stack([np.asarray(logits), np.asarray(labels)])
    if kind == "t-cil":
        calibrator = tcil.TCIL(tolerance=0.02, batch_size=BATCH).fit(model, memory, valid, NEW, unpack=unpack)
        return np.array([calibrator.temperature_, calibrator.result_.magnitude])
    if kind == "pact":
        pact = tcil.PACT(tolerance=0.02, batch_size=BATCH)
        pact.fit(model, memory, valid, NEW, imbalance=5, unpack=unpack)
        return np.array([pact.temperature_, pact.bias_])
    perturbed = tcil.PerturbedTemperatureScaling(n_levels=2, batch_size=BATCH)
    perturbed.fit(model, valid=memory, classes=range(CLASSES), unpack=unpack)
    return np.array([level.accuracy for level in perturbed.result_.levels])


class Wandering(Dataset):
    """Another draw at every look: a random crop left in, by any of the three generators."""

    def __init__(self, pair: Pair, source: str) -> None:
        self.pair, self.source = pair, source

    def __len__(self) -> int:
        return len(self.pair[0])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        draws = {
            "torch": lambda: float(torch.rand(())),
            "numpy": lambda: float(np.random.rand()),  # noqa: NPY002 - as users' transforms do
            "python": random.random,
        }
        return self.pair[0][index] + draws[self.source](), self.pair[1][index]


def spoiled(value: float) -> Callable[[Pair], Any]:
    def spoil(pair: Pair) -> Any:
        x = pair[0].clone()
        x[-1, 0] = value
        return DataLoader(TensorDataset(x, pair[1]), batch_size=BATCH)

    return spoil


# No answer to these could be right.
UNUSABLE: dict[str, Callable[[Pair], Any]] = {
    "shuffled": lambda p: DataLoader(TensorDataset(*p), batch_size=BATCH, shuffle=True),
    "dropped": lambda p: DataLoader(TensorDataset(*p), batch_size=7, drop_last=True),
    "wandering by torch": lambda p: Wandering(p, "torch"),
    "wandering by numpy": lambda p: DataLoader(Wandering(p, "numpy"), batch_size=BATCH),
    "wandering by python": lambda p: DataLoader(Wandering(p, "python"), batch_size=BATCH),
    "iterator": lambda p: iter(batches(p)),
    "generator": lambda p: (batch for batch in batches(p)),
    "NaN in the last batch": spoiled(float("nan")),
    "infinity in the last batch": spoiled(float("inf")),
    "complex": lambda p: (p[0] + 1j, p[1]),
    "masked": lambda p: (np.ma.array(p[0].numpy(), mask=p[0].numpy() > 0), p[1]),
    "float labels": lambda p: (p[0], p[1].float()),
    "one-hot labels": lambda p: (p[0], torch.eye(CLASSES)[p[1]]),
    "labels first": lambda p: (p[1], p[0]),
    "lengths differ": lambda p: (p[0], p[1][:-1]),
    "no rows": lambda p: (p[0][:0], p[1][:0]),
    "no batch": lambda p: [],
    "no labels": lambda p: DataLoader(p[0], batch_size=BATCH),
    "only inputs": lambda p: p[0],
    "unknown keys": lambda p: [{"a": x, "b": y} for x, y in batches(p)],
    "an index first": lambda p: [(torch.arange(len(y)), x, y) for x, y in batches(p)],
    "text": lambda p: "cifar100",
    "None": lambda p: None,
    "number": lambda p: 5,
    "dict": lambda p: {"x": p[0], "y": p[1]},
    "set": lambda p: {1, 2},
    "pair of text": lambda p: ("x", "y"),
    "meta": lambda p: (p[0].to("meta"), p[1]),
    "sparse": lambda p: (p[0].to_sparse(), p[1]),
    "negative label": lambda p: (p[0], p[1].where(p[1] != 2, -100)),
    "huge label": lambda p: (p[0], p[1].where(p[1] != 2, 2**62)),
    "objects": lambda p: (np.array([None] * len(p[0])), p[1]),
    "function": lambda p: lambda: p,
    "class": lambda p: TensorDataset,
}
# These may be read or refused.
ODD: dict[str, Callable[[Pair], Any]] = {
    "half": lambda p: (p[0].half(), p[1]),
    "whole numbers": lambda p: (p[0].long(), p[1]),
    "bytes": lambda p: (p[0].abs().byte(), p[1]),
    "lists": lambda p: (p[0].tolist(), p[1].tolist()),
    "batches of lists": lambda p: [(x.tolist(), y.tolist()) for x, y in batches(p)],
    "list of pairs": lambda p: list(zip(*p, strict=True)),
    "two batches": lambda p: [(x[:12], y[:12]) for x, y in (p, p)],
    "one batch": lambda p: [p],
    "rows of one": lambda p: DataLoader(TensorDataset(*p), batch_size=1),
    "no batching": lambda p: DataLoader(TensorDataset(*p), batch_size=None),
    "long double": lambda p: (p[0].numpy().astype(np.longdouble), p[1].numpy()),
    "huge": lambda p: (p[0] * 1e37, p[1]),
    "zeros": lambda p: (0 * p[0], p[1]),
    "images": lambda p: (p[0][:, :, None, None], p[1]),
    "narrow": lambda p: (p[0][:, :2], p[1]),
    "flat": lambda p: (p[0][:, 0], p[1]),
    "unsigned labels": lambda p: (p[0].numpy(), p[1].numpy().astype(np.uint64)),
    "zip": lambda p: zip(*p, strict=True),
    "chain": lambda p: itertools.chain(batches(p)),
    "one class": lambda p: (p[0], 0 * p[1] + 2),
}
# Inputs that the model itself cannot take are its own business: torch's error tells more than ours could.
THE_MODELS_OWN = ("images", "narrow", "flat", "list of pairs", "no batching")


@cases(test=60, fuzz=1200)
@given(
    st.sampled_from(sorted(UNUSABLE) + sorted(ODD)),
    st.sampled_from(["memory", "valid"]),
    st.sampled_from(["t-cil", "pact", "perturb-ts", "logits"]),
)
@example("wandering by torch", "memory", "t-cil")
def test_hostile_data(oddity, argument, kind):
    assume(argument == "memory" or kind in ("t-cil", "pact"))
    model, data = Plain(3), draw_data(3)
    held = {"memory": data.memory, "valid": data.valid}
    held[argument] = (UNUSABLE | ODD)[oddity](held[argument])
    with oracles.nothing_changed(model, *data.memory, *data.valid):
        try:
            answer = oracles.attempt(ENTRY, lambda: fitted(kind, model, **held), ARGUMENTS)
        except RuntimeError:
            if oddity not in THE_MODELS_OWN:
                raise
            return
    if oddity in UNUSABLE:
        oracles.refused(answer)
    if answer is not None:
        assert np.isfinite(answer).all(), answer
