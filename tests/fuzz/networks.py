"""Small networks of every make that users have, with weights that know four classes a little; and their data."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

CLASSES, WIDTH = 4, 5
NEW = [2, 3]


@dataclass(frozen=True, eq=False)
class Data:
    """Exemplars of all classes, and a validation set of the new ones."""

    memory: tuple[Tensor, Tensor]
    valid: tuple[Tensor, Tensor]


def centres(seed: int) -> Tensor:
    return 2 * torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(seed))


def draw_data(seed: int, rows: int = 24) -> Data:
    """Images around the centres of their classes."""
    generator = torch.Generator().manual_seed(seed + 1)

    def around(labels: Tensor) -> tuple[Tensor, Tensor]:
        return centres(seed)[labels] + 2 * torch.randn(len(labels), WIDTH, generator=generator), labels

    return Data(around(torch.arange(rows) % CLASSES), around(2 + torch.arange(rows) % 2))


class Plain(nn.Module):
    """A body and a head."""

    def __init__(self, seed: int, head: int = CLASSES) -> None:
        super().__init__()
        # Made from tensors: a layer of torch's own would draw from the global generator.
        self.body, self.fc = nn.utils.skip_init(nn.Linear, WIDTH, WIDTH), nn.utils.skip_init(nn.Linear, WIDTH, head)
        with torch.no_grad():
            self.body.weight.copy_(torch.eye(WIDTH))
            self.body.bias.fill_(4.0)
            self.fc.weight.zero_()[:CLASSES] = centres(seed)
            self.fc.bias.zero_()[:CLASSES] = -centres(seed).square().sum(dim=1) / 2 - 4 * centres(seed).sum(dim=1)

    def logits(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.body(x)))

    def forward(self, x: Tensor) -> Any:
        return self.logits(x)


def variant(forward: Callable[[Plain, Tensor], Any], **options: Any) -> Callable[[int], nn.Module]:
    """The plain network with another forward."""

    def make(seed: int) -> nn.Module:
        kind = type("Variant", (Plain,), {"forward": forward})
        return kind(seed, **options)

    return make


def changed(change: Callable[[Plain], nn.Module]) -> Callable[[int], nn.Module]:
    """The plain network, changed."""
    return lambda seed: change(Plain(seed))


def _half_frozen(model: Plain) -> nn.Module:
    model.body.requires_grad_(False)
    model.train()
    model.fc.eval()
    return model


def _with_gradients(model: Plain) -> nn.Module:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


def _masked(value: float) -> Callable[[Plain, Tensor], Tensor]:
    def forward(self: Plain, x: Tensor) -> Tensor:
        logits = self.logits(x)
        outside = torch.arange(logits.shape[1], device=logits.device) >= CLASSES
        return logits.masked_fill(outside, value)

    return forward


def _lowered(self: Plain, x: Tensor) -> Tensor:
    logits = self.logits(x)
    return logits - 1e4 * (torch.arange(logits.shape[1], device=logits.device) >= CLASSES)


def _autocast(self: Plain, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        return self.logits(x)


def _in_place(self: Plain, x: Tensor) -> Tensor:
    x = x.mul_(1.0)
    return self.fc(self.body(x).relu_())


def _spatial(self: Plain, x: Tensor) -> Tensor:
    return self.logits(x.flatten(1))


# Networks with an answer.
USUAL: dict[str, Callable[[int], nn.Module]] = {
    "plain": Plain,
    "in training": changed(lambda m: m.train()),
    "half frozen": changed(_half_frozen),
    "with gradients": changed(_with_gradients),
    "double": changed(lambda m: m.double()),
    "sequence": changed(lambda m: nn.Sequential(m.body, nn.ReLU(), nn.Dropout(0.5), m.fc)),
    "parallel": changed(lambda m: nn.DataParallel(m) if not torch.cuda.is_available() else m),
    "dict": variant(lambda self, x: {"logits": self.logits(x)}),
    "object": variant(lambda self, x: types.SimpleNamespace(logits=self.logits(x), loss=None)),
    "in place": variant(_in_place),
    "wider head": lambda seed: Plain(seed, head=CLASSES + 3),
    "batch norm": changed(lambda m: nn.Sequential(m.body, nn.BatchNorm1d(WIDTH), nn.ReLU(), m.fc)),
}
# Networks that may be refused or read; either way they stay as they are.
STRANGE: dict[str, Callable[[int], nn.Module]] = {
    "autocast": variant(_autocast),
    "half": changed(lambda m: m.half()),
    "masked by -inf": variant(_masked(float("-inf")), head=CLASSES + 2),
    "masked by finfo.min": variant(_masked(torch.finfo(torch.float32).min), head=CLASSES + 2),
    "masked by -1e4": variant(_masked(-1e4), head=CLASSES + 2),
    "masked by -1e4 + z": variant(_lowered, head=CLASSES + 2),
    "log-softmax": variant(lambda self, x: torch.log_softmax(self.logits(x), dim=1)),
    "softmax": variant(lambda self, x: torch.softmax(self.logits(x), dim=1)),
    "scaled": variant(lambda self, x: 3 * self.logits(x)),
    "mean of two": variant(lambda self, x: (self.logits(x) + self.fc(self.body(x))) / 2),
    "tuple": variant(lambda self, x: (self.logits(x), x)),
    "nothing": variant(lambda self, x: None),
    "dict without logits": variant(lambda self, x: {"scores": self.logits(x)}),
    "flat": variant(lambda self, x: self.logits(x).flatten()),
    "too few rows": variant(lambda self, x: self.logits(x)[:-1]),
    "integers": variant(lambda self, x: self.logits(x).long()),
    "detached": variant(lambda self, x: self.logits(x).detach()),
    "no gradients": variant(torch.no_grad()(lambda self, x: self.logits(x))),
    "NaN": variant(lambda self, x: self.logits(x) * float("nan")),
    "infinite": variant(lambda self, x: self.logits(x) + float("inf")),
    "huge": variant(lambda self, x: self.logits(x) * 1e36),
    "constant": variant(lambda self, x: 0 * self.logits(x)),
    "two classes": lambda seed: Plain(seed, head=CLASSES).fc,
    "narrow head": changed(lambda m: nn.Sequential(m.body, nn.Linear(WIDTH, 2, dtype=torch.float32))),
    "no weights": changed(lambda m: nn.Identity()),
    "on meta": changed(lambda m: m.to("meta")),
    "complex": variant(lambda self, x: self.logits(x) + 1j),
    "function": lambda seed: Plain(seed).logits,  # type: ignore[dict-item]
    "class": lambda seed: Plain,  # type: ignore[dict-item]
    "none": lambda seed: None,  # type: ignore[dict-item]
}
