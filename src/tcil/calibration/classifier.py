"""A user's trained network as the calibrators see it: logits, features and input gradients; handed back untouched."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self, cast

import torch
from torch import Tensor, nn

from tcil.calibration.arrays import at_least_float32
from tcil.calibration.errors import invalid
from tcil.calibration.features import (
    FeatureSource,
    FeatureSpec,
    check_kind,
    check_rows,
    find_source,
    select_logits,
    submodule,
)
from tcil.calibration.folding import close, swapped, watch_pairs


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
    """A digest of the network's parameters and buffers: names, shapes, types and bytes, whatever the device."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(unwrap(model).state_dict().items()):
        if isinstance(value, Tensor):
            digest.update(f"{name} {tuple(value.shape)} {value.dtype};".encode())
            flat = value.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


class Classifier:
    """A borrowed model, in evaluation mode and without parameter gradients, between `with` and its end.

    The features are what the head reads; the head is found on the first batch by watching which module emits the
    logits. Inputs are run in channels_last, which is much faster for convolutions, unless the model cannot take it.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        features: FeatureSpec | None = None,
        device: str | torch.device | None = None,
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
        tensors = [*self.model.parameters(), *self.model.buffers()]
        self._homes = {tensor.device for tensor in tensors}
        home = tensors[0].device if tensors else torch.device("cpu")
        self.device = home if device is None else torch.device(device)
        if device is not None and len(self._homes) > 1 and self._homes != {self.device}:
            spread = ", ".join(sorted(map(str, self._homes)))
            raise invalid("device", str(device), "no device for a model spread over several", f"It lives on {spread}.")
        self._home = home
        self._dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
        self._channels_last = True
        self.width: int | None = None

    def __enter__(self) -> Self:
        self._exit = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(_borrowed(self.model))
            if self._homes and self._homes != {self.device}:
                stack.callback(self.model.to, self._home)
                self.model.to(self.device)
            self._exit = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    @property
    def source(self) -> FeatureSource:
        """Where the features were found; known after the first batch."""
        assert self._source is not None
        return self._source

    def place(self, inputs: Tensor) -> Tensor:
        """Inputs on the model's device and in its fastest layout, in at least float32."""
        layout = torch.channels_last if inputs.ndim == 4 and self._channels_last else torch.contiguous_format
        # A copy of its own: a network that works in place must not reach the user's data.
        return inputs.to(self.device).clone(memory_format=layout)

    def fold(self, sample: Tensor) -> None:
        """From here on run with batch norms folded into convolutions, if the answers to the sample stay the same."""

        def run() -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                return self.logits_and_features(self.place(sample))

        pairs, own = watch_pairs(self.model, run)
        with contextlib.ExitStack() as stack:
            stack.enter_context(swapped(self.model, pairs))
            try:
                same = bool(pairs) and all(close(*both) for both in zip(run(), own, strict=True))
            except Exception:  # the network reaches into a layer that is not there any more
                same = False
            if same:
                self._exit.push(stack.pop_all())

    def logits(self, inputs: Tensor) -> Tensor:
        """Logits of placed inputs, in at least float32; differentiable where gradients are enabled."""
        return self._run(inputs, lambda x: select_logits(self.model(x)))

    def logits_and_features(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and flat features of placed inputs, from one forward pass."""
        features: list[Tensor] = []

        def run(x: Tensor) -> Tensor:
            features.clear()
            if self._source is None:
                self._source, logits, found = find_source(self.model, self._spec, x)
            else:
                logits, found = self._source.run(self.model, x)
            features.append(found)
            return logits

        logits = self._run(inputs, run)
        return logits, at_least_float32(features[0].detach()).flatten(1)

    def input_gradient(
        self, inputs: Tensor, choose: Callable[[Tensor], Tensor], pick: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """The gradient of CE(x, target) with respect to x, over the logits that `pick` takes.

        `choose` finds each sample's target class by its features, so that one forward pass serves both.
        """
        with torch.enable_grad():
            x = self.place(inputs).detach().requires_grad_()
            logits, features = self.logits_and_features(x.clone())
            if not logits.requires_grad:
                raise invalid(
                    "model",
                    "logits without a graph back to the inputs",
                    "a differentiable model",
                    "Is there a torch.no_grad() or .detach() in its forward?",
                )
            targets = choose(features).to(logits.device)
            loss = nn.functional.cross_entropy(pick(logits), targets, reduction="sum")
            (gradient,) = torch.autograd.grad(loss, x)
        return gradient

    def _run(self, inputs: Tensor, forward: Callable[[Tensor], Tensor]) -> Tensor:
        x = inputs if inputs.dtype == self._dtype else inputs.to(self._dtype)
        try:
            logits = forward(x)
        except RuntimeError:
            # Models that reshape with .view() cannot take channels_last; anything else fails again below.
            if self.width is not None or not (self._channels_last and x.ndim == 4):
                raise
            self._channels_last = False
            logits = forward(x.clone(memory_format=torch.contiguous_format))
        if self.width is None:
            check_kind(logits)
        check_rows(logits, inputs)
        self.width = logits.shape[1]
        return at_least_float32(logits)


@contextlib.contextmanager
def _borrowed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no parameter gradients, undone to the letter afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        model.eval()
        for parameter, _ in trainable:
            parameter.requires_grad_(False)
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, flag in trainable:
            parameter.requires_grad_(flag)
