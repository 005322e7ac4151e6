"""Lets torchvision be imported beside a build of torch that it was not made for. For tests only.

It fails there because its compiled operators are missing. Once each has a schema, transforms, datasets and models
work; the operators themselves do not. `make test-integrations` puts this file beside torchvision, with a .pth file that
imports it at the start of every process; nothing is declared until torchvision is imported.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from typing import Any

OPERATORS = (
    "nms qnms roi_align _roi_align_backward ps_roi_align _ps_roi_align_backward roi_pool _roi_pool_backward ps_roi_pool"
    " _ps_roi_pool_backward qroi_align deform_conv2d _deform_conv2d_backward"
)


class Declaring(MetaPathFinder):
    """Finds nothing, but declares the operators just before torchvision is looked for."""

    held: Any = None  # schemas last as long as this

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        if name == "torchvision" and self.held is None:
            import torch

            Declaring.held = torch.library.Library("torchvision", "FRAGMENT")
            for operator in OPERATORS.split():
                with contextlib.suppress(RuntimeError):  # declared already
                    self.held.define(f"{operator}(Tensor x) -> Tensor")


if not any(type(finder).__name__ == "Declaring" for finder in sys.meta_path):
    sys.meta_path.insert(0, Declaring())
