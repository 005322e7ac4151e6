"""A user's trained network as calibrators use it (logits, features, input gradients); it is left unchanged."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn

from tcil.calibration.inputs.borrowing import alone, borrowed
from tcil.calibration.inputs.features import (
    FeatureSource,
    FeatureSpec,
    check_kind,
    check_rows,
    find_source,
    select_logits,
    submodule,
    watch,
)
from tcil.calibration.inputs.weights import refuse_unready, unwrap
from tcil.foundation import random_state
from tcil.foundation.arrays import at_least_float32, gap_and_size, mask_out
from tcil.foundation.errors import invalid, warn
from tcil.foundation.folding import close, swapped, watch_pairs


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
        with alone(self.model):  # another thread may be moving it
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
            stack.enter_context(alone(self.model))
            self._weights = stack.enter_context(borrowed(self.model))
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
