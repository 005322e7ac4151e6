"""Fold batch normalisation into the preceding convolution: in evaluation mode, both together are one convolution."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from tcil.foundation.arrays import gap_and_size
from tcil.foundation.threads import in_this_thread

Pair: TypeAlias = tuple[str, str]  # the names of a convolution and of the batch norm that reads it
_Answer = TypeVar("_Answer")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def watch_pairs(model: nn.Module, run: Callable[[], _Answer]) -> tuple[list[Pair], _Answer]:
    """Find convolutions whose output is the input of a batch norm during `run`; also returns the result of `run`.

    Only plain layers in evaluation mode are considered, each registered once, called once and without hooks. Other
    readers of a convolution's output are not detected: compare the network under `swapped` with its own output.
    """
    places = list(model.named_modules(remove_duplicate=False))
    uses = Counter(id(module) for _, module in places)
    plain = {name: module for name, module in places if name and uses[id(module)] == 1 and _is_plain(module)}
    outputs: list[tuple[str, Tensor]] = []
    reads: list[tuple[str, str | None]] = []

    def note_output(name: str) -> Callable[..., None]:
        return lambda module, args, output: outputs.append((name, output))

    def note_input(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...]) -> None:
            reads.append((name, next((conv for conv, output in outputs if args and output is args[0]), None)))

        return note

    handles = [
        module.register_forward_hook(in_this_thread(note_output(name)))
        if isinstance(module, _CONVOLUTIONS)
        else module.register_forward_pre_hook(in_this_thread(note_input(name)))
        for name, module in plain.items()
    ]
    try:
        answer = run()
    finally:
        for handle in handles:
            handle.remove()
    calls = Counter([name for name, _ in outputs] + [name for name, _ in reads])
    return [(conv, norm) for norm, conv in reads if conv and calls[conv] == calls[norm] == 1], answer


def folded_copy(model: nn.Module, sample: Tensor) -> nn.Module:
    """A frozen copy for evaluation, folded if the output for the sample stays the same."""
    plain = copy.deepcopy(model).eval().requires_grad_(False)
    with torch.no_grad():
        pairs, expected = watch_pairs(plain, lambda: plain(sample))
        with swapped(plain, pairs, shared=False):
            try:
                same = close(plain(sample), expected)
            except Exception:  # the network accesses a layer that was replaced
                same = False
            folded = copy.deepcopy(plain) if same else None
    return folded or plain


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two outputs are equal up to rounding."""
    if a.shape != b.shape:
        return False
    gap, size = gap_and_size(a, b)
    return gap <= 1e-4 * (1.0 + size)


def _in_a_backward_pass() -> bool:
    """On a GPU, autograd has threads of its own, in which checkpoints run their layers again: the same as before."""
    return bool(torch._C._current_graph_task_id() != -1)


@contextmanager
def swapped(model: nn.Module, pairs: Sequence[Pair], *, shared: bool = True) -> Iterator[None]:
    """Context in which the model runs with folded convolutions; its layers are restored on exit.

    Where the model may be `shared`, only this thread runs them: another one, which may be serving predictions, runs the
    layers as they were.
    """
    replaced: list[tuple[nn.Module, str, nn.Module]] = []

    def swap(name: str, layer: nn.Module) -> None:
        home, _, last = name.rpartition(".")
        parent, before = model.get_submodule(home), model.get_submodule(name)
        if shared:
            layer.forward = in_this_thread(layer.forward, before, or_if=_in_a_backward_pass)
        replaced.append((parent, last, before))
        parent._modules[last] = layer

    try:
        for conv, norm in pairs:
            folded: Any = fuse_conv_bn_eval(model.get_submodule(conv), model.get_submodule(norm))  # type: ignore[arg-type, type-var]
            swap(conv, folded.requires_grad_(False))
            swap(norm, nn.Identity())
        yield
    finally:
        for parent, last, layer in replaced:
            parent._modules[last] = layer


def _is_plain(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if type(module) not in (*_CONVOLUTIONS, *_NORMS) or module.training or any(hooks) or "forward" in vars(module):
        return False
    if isinstance(module, _NORMS) and module.running_mean is None:
        return False
    return all(p.dtype in (torch.float32, torch.float64) for p in module.parameters())
