"""Four overlapping classes of points, and small networks trained on them: for tests of what users hand over."""

from __future__ import annotations

import copy
import functools

import torch
from torch import nn

import tcil

N, D, K = 48, 12, 4


def draw_blobs():
    """Four overlapping classes in twelve dimensions: 0 and 1 old, 2 and 3 new."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(K, D, generator=generator)

    def draw(labels):
        return centres[labels] + torch.randn(len(labels), D, generator=generator), labels

    return draw(torch.arange(N) % K), draw(2 + torch.arange(200) % 2)


class Body(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(D, 16), nn.ReLU())


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.fc = Body(), nn.Linear(16, K)

    def forward(self, x):
        return self.fc(self.backbone(x))


class SplitInForward(nn.Module):
    """Split heads put together in the model's own forward."""

    def __init__(self):
        super().__init__()
        self.backbone, self.heads = Body(), nn.ModuleList([nn.Linear(16, 2), nn.Linear(16, 2)])

    def forward(self, x):
        f = self.backbone(x)
        return torch.cat([head(f) for head in self.heads], dim=1)


class HeadList(SplitInForward):
    def forward(self, x):
        f = self.backbone(x)
        return [head(f) for head in self.heads]


class HeadTuple(SplitInForward):
    def forward(self, x):
        f = self.backbone(x)
        return tuple(head(f) for head in self.heads)


class HeadListInside(SplitInForward):
    def forward(self, x):
        f = self.backbone(x)
        return {"logits": [head(f) for head in self.heads]}


def joined(out):
    """The logits in whatever a model returns."""
    out = out["logits"] if isinstance(out, dict) else getattr(out, "logits", out)
    return torch.cat(tuple(out), dim=1) if isinstance(out, (list, tuple)) else out


def trained(kind, blobs, steps=80):
    """A copy of the test's own. The blobs are those of `draw_blobs`; a process trains each kind once."""
    assert torch.equal(blobs[0][0], draw_blobs()[0][0])
    model, state = _trained(kind, steps)
    torch.set_rng_state(state)  # as after the training
    return copy.deepcopy(model)


@functools.cache
def _trained(kind, steps):
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    (x, y), _ = draw_blobs()
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(joined(model(x)), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model, torch.get_rng_state()


def fit(model, blobs, **options):
    memory, valid = blobs
    return tcil.TCIL().fit(model, memory, valid, [2, 3], **options)


def state_of(model):
    plain = (int, float, str, type(None))
    return (
        [{k: v if isinstance(v, plain) else id(v) for k, v in vars(module).items()} for module in model.modules()],
        [(name, b.device, b.dtype, b.data_ptr(), str(b.tolist())) for name, b in model.named_buffers()],
        [(name, module.training) for name, module in model.named_modules()],
        [(name, p.requires_grad, p.grad, p.device, p.data_ptr(), p._version) for name, p in model.named_parameters()],
        [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()],
    )
