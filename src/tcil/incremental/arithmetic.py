"""Precision and compilation of training steps, mainly for GPUs.

Only training steps are affected: evaluation and calibration always run the network uncompiled and in fp32. Weights and
the optimizer stay in fp32 too, so that checkpoints have the same format in every precision.
"""

from __future__ import annotations

import signal
import subprocess  # nosec B404
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tcil.foundation.errors import invalid
from tcil.foundation.options import Option


class Precision(Option):
    """The precision of training steps; evaluation and calibration are always in fp32."""

    FP32 = "fp32", "everything in float32"
    BF16 = "bf16", "autocast to bfloat16: the range of float32, with fewer digits"
    FP16 = "fp16", "autocast to float16, with a scaled loss; steps whose gradients overflow are skipped"


_TYPES = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


class Scaler:
    """Scales the loss in fp16, so that small gradients do not vanish; in other precisions it only runs the optimizer.

    A step whose gradients are not finite is skipped, and the scale is halved.
    """

    def __init__(self, device: torch.device, enabled: bool, state: dict[str, Tensor]) -> None:
        self._scaler = torch.amp.GradScaler(device.type, enabled=enabled)
        if enabled and state:
            current = self._scaler.state_dict()
            growth = int(state["growth_tracker"])
            self._scaler.load_state_dict({**current, "scale": float(state["scale"]), "_growth_tracker": growth})

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the scaled loss."""
        scaled: Tensor = self._scaler.scale(loss)
        scaled.backward()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Run one optimizer step on the unscaled gradients."""
        self._scaler.step(optimizer)
        self._scaler.update()

    @property
    def collapsed(self) -> bool:
        """Whether the scale fell below 1: seventeen steps in a row were skipped, and the next would be too."""
        return bool(self._scaler.is_enabled() and self._scaler.get_scale() < 1.0)

    def state(self) -> dict[str, Tensor]:
        """The state that a resumed run needs; empty without scaling."""
        current = self._scaler.state_dict()
        if not current:
            return {}
        return {"scale": torch.tensor(current["scale"]), "growth_tracker": torch.tensor(current["_growth_tracker"])}


@dataclass(frozen=True)
class Arithmetic:
    """The precision of training steps, and whether their loss is compiled."""

    precision: Precision = Precision.FP32
    compiled: bool = False

    def check(self, device: torch.device) -> None:
        """Raise if this device does not support it."""
        if self.precision in _TYPES:
            _check_autocast(self.precision, device)
        if self.compiled:
            _check_compiler(device.type)

    def cast(self, device: torch.device) -> AbstractContextManager[object]:
        """Context in which operations run in this precision."""
        dtype = _TYPES.get(self.precision)
        return nullcontext() if dtype is None else torch.autocast(device.type, dtype)

    def scaler(self, device: torch.device, state: dict[str, Tensor]) -> Scaler:
        """A scaler with this state."""
        return Scaler(device, self.precision is Precision.FP16, state)

    def loss(self, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The loss of a stage, compiled or not.

        Only this function is compiled. The network that it calls stays a plain module, since teachers are copied from
        it, checkpoints use its names, and calibration uses it. Each stage has its own loss, so the compiler is reset;
        otherwise torch would stop compiling after eight stages.
        """
        if not self.compiled:
            return loss
        torch.compiler.reset()
        compiled: Callable[..., Tensor] = torch.compile(loss)
        return compiled


def _check_autocast(precision: Precision, device: torch.device) -> None:
    """Raise if the device does not support autocast to this type; torch would only warn and use float32."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.autocast(device.type, _TYPES[precision])
    except (UserWarning, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise invalid("precision", f"{str(precision)!r} on {device} ({reason})", "fp32 on this device") from None
    if device.type == "cpu" and (death := death_by(precision)):
        given = f"{str(precision)!r}, in which a layer ends the process with {death} on this processor"
        raise invalid("precision", given, "fp32, or ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment")


_CRASHES = {"SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGABRT"}


@cache
def death_by(precision: Precision) -> str:
    """How a process ends that runs a layer in this precision on the CPU; empty where it lives.

    Some virtual machines show AMX flags but trap its instructions, which oneDNN then uses: the process is killed. A
    process that something else ends (Ctrl-C, a full memory) tells nothing of the processor.
    """
    if precision not in _TYPES:
        return ""
    kind = str(_TYPES[precision])
    code = f"import torch; torch.nn.Linear(64, 64).to({kind})(torch.ones(64, 64, dtype={kind}))"
    command = [sys.executable, "-P", "-c", code]
    ended = subprocess.run(command, capture_output=True, check=False, start_new_session=True).returncode  # nosec B603
    if ended >= 0:
        return "an error" if ended else ""
    name = signal.Signals(-ended).name
    return name if name in _CRASHES else ""


@cache
def _check_compiler(device: str) -> None:
    """Compile a small function, so that a missing compiler is reported before any work."""
    try:
        torch.compile(_double)(torch.ones(2, device=device))
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise invalid(
            "compile", f"{device} ({reason})", "a machine where torch.compile works", "Leave out --compile."
        ) from None


def _double(x: Tensor) -> Tensor:
    return 2 * x
