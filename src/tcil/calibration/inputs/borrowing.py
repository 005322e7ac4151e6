"""Borrowing a user's network: alone, in evaluation mode, without parameter gradients, and restored afterwards."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tcil.calibration.inputs.weights import same_values

_REGISTERED = ("_parameters", "_buffers", "_modules")
_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_locks_lock = threading.Lock()


@contextlib.contextmanager
def alone(model: nn.Module) -> Iterator[None]:
    """Make other threads wait that want to borrow this model, or one that shares modules with it."""
    with _locks_lock:
        locks = {id(lock): lock for lock in (_locks.setdefault(part, threading.RLock()) for part in model.modules())}
    with contextlib.ExitStack() as stack:
        for _, lock in sorted(locks.items()):  # always in the same order, to avoid deadlocks
            stack.enter_context(lock)
        yield


class BorrowedWeights:
    """Copies of the parameters and buffers of a model, to compare it with."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        named = list(itertools.chain(model.named_parameters(), model.named_buffers()))
        # Copies, since version counters do not record writes through .data.
        self.copies = [(name, tensor, tensor.detach().clone()) for name, tensor in named]
        self.known_same = False

    def changed(self) -> list[str]:
        """The names of tensors that differ from their copies."""
        now = dict(itertools.chain(self._model.named_parameters(), self._model.named_buffers()))
        names = [name for name, _, value in self.copies if name in now and not self._same(now[name].detach(), value)]
        self.known_same = not names and all(now.get(name) is tensor for name, tensor, _ in self.copies)
        return names

    @staticmethod
    def _same(tensor: Tensor, value: Tensor) -> bool:
        if tensor.layout != value.layout or tensor.shape != value.shape or tensor.dtype != value.dtype:
            return False
        return same_values(tensor, value.to(tensor.device))


@contextlib.contextmanager
def borrowed(model: nn.Module) -> Iterator[BorrowedWeights]:
    """Evaluation mode and no parameter gradients; the model is restored on exit.

    This includes attributes that forward() sets, parameters and buffers that it changes, and modules that it creates.
    """
    modes = [(module, module.training) for module in model.modules()]
    # TorchScript modules inside the model store their parts elsewhere.
    plain = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    held = [(vars(module), *(getattr(module, kind) for kind in _REGISTERED)) for module in plain]
    before = [[dict(entries) for entries in parts] for parts in held]
    trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    weights = BorrowedWeights(model)
    try:
        # Not model.eval(): modules that override eval(), such as LoRA layers, would merge their weights.
        for module, _ in modes:
            module.training = False
        for parameter, _ in trainable:
            parameter.requires_grad_(False)
        yield weights
    finally:
        for parts, kept_parts in zip(held, before, strict=True):
            for entries, kept in zip(parts, kept_parts, strict=True):
                _restore(entries, kept)
        for module, mode in modes:
            module.training = mode
        for parameter, flag in trainable:
            with torch.inference_mode(parameter.is_inference()):
                parameter.requires_grad_(flag)
        for _, tensor, value in weights.copies if not weights.known_same else ():
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                if tensor.shape != value.shape:
                    tensor.data = value
                elif same_values(tensor, value):
                    continue
                elif tensor.layout == torch.strided and 0 in tensor.stride():  # expanded: its entries share memory
                    tensor.data = value
                else:
                    tensor.copy_(value)


def _restore(entries: dict[str, Any], before: dict[str, Any]) -> None:
    """Restore the entries of a dictionary and their order."""
    if list(entries) != list(before) or any(entries[key] is not before[key] for key in before):
        entries.clear()
        entries.update(before)
