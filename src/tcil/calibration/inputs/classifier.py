"""A user's trained network as calibrators use it (logits, features, input gradients); it is left unchanged."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tcil.calibration.inputs.features import (
    FeatureSource,
    FeatureSpec,
    check_kind,
    check_rows,
    find_source,
    later_heads,
    select_logits,
    submodule,
    watch,
)
from tcil.foundation import random_state
from tcil.foundation.arrays import at_least_float32, gap_and_size, mask_out
from tcil.foundation.errors import invalid, warn
from tcil.foundation.folding import close, swapped, watch_pairs


def unwrap(model: nn.Module) -> nn.Module:
    """The plain network inside DataParallel, DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = cast(nn.Module, model._orig_mod)
        else:
            return model


@contextlib.contextmanager
def told_of(argument: str, inputs: Tensor) -> Iterator[None]:
    """Add to an error of the model what it was run on."""
    try:
        yield
    except Exception as error:
        note = f"{argument}: the model was run on inputs of shape {tuple(inputs.shape)}, {inputs.dtype}."
        if note not in getattr(error, "__notes__", ()):  # some models raise one object again and again
            error.add_note(note)
        raise


def weights_hash(model: nn.Module) -> str:
    """A digest of the network's parameters and buffers (names, shapes, types, bytes), independent of the device."""
    return _digest(_tensors(model).items())


_MOST_AXES = 64  # of a tensor


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


_BY_ROWS, _BY_COLUMNS = (torch.sparse_csr, torch.sparse_bsr), (torch.sparse_csc, torch.sparse_bsc)
_LAYOUTS = (torch.strided, torch.sparse_coo, *_BY_ROWS, *_BY_COLUMNS)


def _same_values(a: Tensor, b: Tensor) -> bool:
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


def checked_device(device: str | int | torch.device) -> torch.device:
    """The device, after a check that tensors can be moved to it and back."""
    such = "'cuda' or 'cuda:1'" if torch.cuda.is_available() else "'cpu'"
    expected = f"a device of this machine, such as {such}"
    advice = "Leave device= out to use the model's device."
    try:
        checked = torch.device(device)
        if checked.type == "meta":
            raise invalid("device", "'meta', which holds no values", expected, advice)
        torch.zeros(1, device=checked).cpu()
    except (RuntimeError, TypeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = str(error).splitlines()[0][:100] if str(error) else type(error).__name__
        raise invalid("device", f"{device!r} ({reason})", expected, advice) from None
    return checked


# Differences of logits that rounding does not explain, relative to the largest logit: on a CPU in full precision, else.
_NOT_ROUNDING, _NOT_ROUNDING_HALF = 1e-3, 0.05
_HALF = {torch.float16, torch.bfloat16}


class Classifier:
    """Context in which a model is in evaluation mode and without parameter gradients; it is restored on exit.

    The features are the input of the head. The head is found on the first batch: it is the module that returns the
    logits. Inputs are in channels_last, which is much faster for convolutions, unless the model fails with it or
    returns other values; then they are contiguous. A warning says if the user's inputs are neither, and if `forward`
    changes weights and the logits with them.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        features: FeatureSpec | None = None,
        device: str | int | torch.device | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise invalid("model", type(model).__name__, "a torch.nn.Module that returns logits")
        if isinstance(model, torch.jit.ScriptModule):
            raise invalid(
                "model", "a TorchScript module", "the nn.Module it was made from", "Calibrate before scripting."
            )
        self.model = unwrap(model)
        self._spec = features
        if isinstance(features, str):
            submodule(self.model, features)
        elif (
            features is not None
            and not callable(features)
            and not (isinstance(features, tuple) and len(features) == 2 and all(callable(part) for part in features))
        ):
            raise invalid("features", repr(features), "a module name, a function, or a pair (extract, head)")
        self._source: FeatureSource | None = None
        self.head: FeatureSource | None = None  # the modules that return the logits, if they were found
        with _alone(self.model):  # another thread may be moving it
            named = dict([*self.model.named_parameters(), *self.model.named_buffers()])
            homes = [tensor.device for tensor in named.values()]
        refuse_unready(named)
        self._homes = set(homes)
        home = homes[0] if homes else torch.device("cpu")
        self.device = home if device is None else checked_device(device)
        if device is not None and len(self._homes) > 1 and self._homes != {self.device}:
            spread = ", ".join(sorted(map(str, self._homes)))
            raise invalid("device", str(device), "None for a model on several devices", f"It is on {spread}.")
        self._home = home
        self._channels_last = True
        self._layout_chosen = False
        self._first: tuple[Tensor, Tensor] | None = None  # two inputs and their logits in the first pass
        self._failed = False
        self.width: int | None = None

    def __enter__(self) -> Self:
        self._exit = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(_alone(self.model))
            self._weights = stack.enter_context(_borrowed(self.model))
            stack.callback(self._warn_of_drift)  # when the model is back on its device, with its own layers
            if self._homes and self._homes != {self.device}:
                stack.callback(self.model.to, self._home)
                self.model.to(self.device)
            self._exit = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._failed = kind is not None
        self._exit.close()

    @property
    def source(self) -> FeatureSource:
        """Where the features are taken from; available after the first batch."""
        assert self._source is not None
        return self._source

    def place(self, inputs: Tensor) -> Tensor:
        """Inputs on the model's device and in its fastest layout, in at least float32."""
        if not self._layout_chosen:
            self._layout_chosen = True
            self._choose_layout(inputs)
        layout = torch.channels_last if inputs.ndim == 4 and self._channels_last else torch.contiguous_format
        # A copy, so that a network with in-place operations cannot change the user's data.
        return inputs.to(self.device).clone(memory_format=layout)

    def fold(self, sample: Tensor) -> None:
        """Fold batch norms into convolutions from now on, if the outputs for the sample stay the same."""

        def run() -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                return self.logits_and_features(self.place(sample))

        pairs, expected = watch_pairs(self.model, run)
        with contextlib.ExitStack() as stack:
            stack.enter_context(swapped(self.model, pairs))
            try:
                same = bool(pairs) and all(close(*both) for both in zip(run(), expected, strict=True))
            except Exception:  # the network accesses a layer that was replaced
                same = False
            if same:
                self._exit.push(stack.pop_all())

    def logits(self, inputs: Tensor) -> Tensor:
        """Logits of placed inputs, in at least float32, -inf where masked; differentiable if gradients are enabled."""

        def run(x: Tensor) -> Tensor:
            if self.width is not None:
                return select_logits(self.model(x))
            seen = watch(self.model, x)
            self.head = seen.source(self.model) if seen.head else None
            return seen.logits

        return self._run(inputs, run)

    def logits_and_features(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and flat features of placed inputs, from one forward pass."""
        features: list[Tensor] = []

        def run(x: Tensor) -> Tensor:
            features.clear()
            if self._source is None:
                self._source, logits, batch_features = find_source(self.model, self._spec, x)
            else:
                logits, batch_features = self._source.run(self.model, x)
            features.append(batch_features)
            return logits

        logits = self._run(inputs, run)
        return logits, at_least_float32(features[0].detach()).flatten(1)

    def input_gradient(
        self, inputs: Tensor, choose: Callable[[Tensor, Tensor], Tensor], pick: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """The gradient of CE(x, target) with respect to x, over the logits that `pick` selects.

        `choose` returns each sample's target class from its features, so that one forward pass is enough. It also gets
        a mask of the masked classes, which cannot be targets.
        """
        with torch.enable_grad(), _gradient_errors():
            x = self.place(inputs).detach().requires_grad_()
            logits, features = self.logits_and_features(x.clone())
            if not logits.requires_grad:
                raise _no_gradient("logits without a graph back to the inputs")
            picked = pick(logits)
            targets = choose(features, picked.detach() == -torch.inf).to(logits.device)
            loss = nn.functional.cross_entropy(picked, targets, reduction="sum")
            (gradient,) = torch.autograd.grad(loss, x, allow_unused=True)
        if gradient is None:
            raise _no_gradient("logits without a graph back to the inputs")
        return gradient

    def _run(self, inputs: Tensor, forward: Callable[[Tensor], Tensor]) -> Tensor:
        x = as_taken(self.model, inputs)
        few = x[:2].detach().clone() if self._first is None else x[:0]  # before the model can change them
        try:
            logits = forward(x)
        except RuntimeError:
            # Models that reshape with .view() fail with channels_last; any other error is raised again below.
            if self.width is not None or not (self._channels_last and x.ndim == 4):
                raise
            self._channels_last = False
            logits = forward(x.clone(memory_format=torch.contiguous_format))
        if self.width is None:
            check_kind(logits)
        check_rows(logits, inputs)
        self.width = logits.shape[1]
        if self._first is None:
            self._first = few, logits[:2].detach().clone()
        return mask_out(at_least_float32(logits))

    def _choose_layout(self, inputs: Tensor) -> None:
        """Leave channels_last if the model depends on the memory of its inputs; warn if their own layout is another.

        Only the two images are tried whose memory differs most between the layouts: of a blank image it does not.
        """
        lies_otherwise = _lies_otherwise(inputs)
        if len(inputs) == 0 or not (lies_otherwise or not inputs.is_contiguous()):
            return
        few = inputs[:2]
        if lies_otherwise and len(inputs) > 2:
            moved = inputs.detach().permute(0, 2, 3, 1).flatten(1) != inputs.detach().flatten(1)
            place = min(int(moved.sum(dim=1).argmax()), len(inputs) - 2)
            few = inputs[place : place + 2]
        plain = self._tried(few, torch.contiguous_format)
        other = self._tried(few, torch.channels_last) if lies_otherwise else None
        self._channels_last = not self._differ(plain, other)
        as_given = other if inputs.ndim == 4 and inputs.is_contiguous(memory_format=torch.channels_last) else None
        if not inputs.is_contiguous():
            as_given = as_given if as_given is not None else self._tried(few, torch.preserve_format)
            if self._differ(plain, as_given):
                warn(
                    "model: its logits depend on how the inputs lie in memory (as_strided, data_ptr). Here they are"
                    " computed from contiguous inputs; those given are not contiguous, so your own call may return"
                    " other logits. Pass inputs.contiguous().",
                )

    def _differ(self, one: Tensor | None, other: Tensor | None) -> bool:
        """Whether two results of the model for the same images differ by more than rounding."""
        if one is None or other is None:  # errors are reported when the whole batch is run
            return False
        if one.shape != other.shape or not torch.equal(one.isnan(), other.isnan()):
            return True
        half = {one.dtype, other.dtype} & _HALF or {one.device.type, other.device.type} != {"cpu"}
        one, other = (part.cpu().nan_to_num(neginf=-torch.inf) for part in (one, other))
        gap, size = gap_and_size(one, other)
        return gap > (_NOT_ROUNDING_HALF if half else _NOT_ROUNDING) * size

    def _tried(self, few: Tensor, layout: torch.memory_format) -> Tensor | None:
        """The logits of a few inputs in a layout; None if the model fails."""
        x = as_taken(self.model, few.detach().to(self.device).clone(memory_format=layout))
        try:
            with torch.no_grad(), random_state.preserved():
                return select_logits(self.model(x))
        except Exception:
            return None

    def _warn_of_drift(self) -> None:
        """Warn if forward() has changed weights and the logits with them; the model is restored in any case."""
        if self._failed or self._first is None or not (names := self._weights.changed()):
            return
        inputs, before = self._first
        self.device = self._home
        after = self._tried(inputs, torch.preserve_format)
        if self._differ(before, after):
            shown = ", ".join(map(repr, names[:3])) + (" and others" if len(names) > 3 else "")
            warn(
                f"model: forward() changes {shown}, and the logits with them. The model was restored, but its logits"
                " depend on how often it is called, and so does this result.",
            )


def _no_gradient(given: str, advice: str = "Is there a torch.no_grad() or .detach() in its forward?") -> ValueError:
    return invalid("model", given, "a differentiable model", advice)


@contextlib.contextmanager
def _gradient_errors() -> Iterator[None]:
    """Turn torch's errors about models without input gradients into ones that say what to do."""
    try:
        yield
    except RuntimeError as error:
        message = str(error).partition("\n")[0]
        if "with .grad()" in message:
            raise _no_gradient("reentrant checkpoints in its forward", "Pass use_reentrant=False to them.") from error
        if "Inference tensors" in message:
            advice = "Create the model and load its weights outside torch.inference_mode()."
            raise _no_gradient("weights that were created in torch.inference_mode()", advice) from error
        raise


def _lies_otherwise(inputs: Tensor) -> bool:
    """Whether these inputs have another order in memory with channels_last."""
    return inputs.ndim == 4 and inputs.shape[1] > 1 and inputs.shape[2] * inputs.shape[3] > 1


def as_taken(model: nn.Module, inputs: Tensor) -> Tensor:
    """Floating-point inputs in the precision of the model's weights; other inputs unchanged."""
    if not inputs.is_floating_point():
        return inputs
    tensors = itertools.chain(model.parameters(), model.buffers())
    return inputs.to(next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32))


_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_locks_lock = threading.Lock()


@contextlib.contextmanager
def _alone(model: nn.Module) -> Iterator[None]:
    """Make other threads wait that want to borrow this model, or one that shares modules with it."""
    with _locks_lock:
        locks = {id(lock): lock for lock in (_locks.setdefault(part, threading.RLock()) for part in model.modules())}
    with contextlib.ExitStack() as stack:
        for _, lock in sorted(locks.items()):  # always in the same order, to avoid deadlocks
            stack.enter_context(lock)
        yield


class _Weights:
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
        return _same_values(tensor, value.to(tensor.device))


@contextlib.contextmanager
def _borrowed(model: nn.Module) -> Iterator[_Weights]:
    """Evaluation mode and no parameter gradients; the model is restored on exit.

    This includes attributes that forward() sets, parameters and buffers that it changes, and modules that it creates.
    """
    modes = [(module, module.training) for module in model.modules()]
    # TorchScript modules inside the model store their parts elsewhere.
    plain = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    held = [(vars(module), *(getattr(module, kind) for kind in _REGISTERED)) for module in plain]
    before = [[dict(entries) for entries in parts] for parts in held]
    trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    weights = _Weights(model)
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
                elif _same_values(tensor, value):
                    continue
                elif tensor.layout == torch.strided and 0 in tensor.stride():  # expanded: its entries share memory
                    tensor.data = value
                else:
                    tensor.copy_(value)


_REGISTERED = ("_parameters", "_buffers", "_modules")


def _restore(entries: dict[str, Any], before: dict[str, Any]) -> None:
    """Restore the entries of a dictionary and their order."""
    if list(entries) != list(before) or any(entries[key] is not before[key] for key in before):
        entries.clear()
        entries.update(before)
