"""Frameworks that are tested where they are installed.

torchvision, which several of them import, has no build for every torch: it still imports once its operators have a
schema each. That is enough for tests of what does not call them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

HERE = Path(__file__).parent
OPERATORS = (
    "nms qnms roi_align _roi_align_backward ps_roi_align _ps_roi_align_backward roi_pool _roi_pool_backward ps_roi_pool"
    " _ps_roi_pool_backward qroi_align deform_conv2d _deform_conv2d_backward"
)
_schemas = []  # they last as long as this holds them


def import_torchvision() -> None:
    """Import torchvision beside a torch that it was not built for."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        _schemas.append(torch.library.Library("torchvision", "FRAGMENT"))
        for name in OPERATORS.split():
            with contextlib.suppress(RuntimeError):  # declared already
                _schemas[0].define(f"{name}(Tensor x) -> Tensor")
        importlib.import_module("torchvision")


def need(framework: str):
    """The framework, or a skip that says what is not shown here."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: only recorded signatures are checked (make test-integrations)")
    import_torchvision()
    return importlib.import_module(framework)


def seed_everything(seed: int = 0) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture
def blob_tasks():
    """Three tasks of two classes each, in eight dimensions: training, validation and test tensors of each."""
    generator = torch.Generator().manual_seed(0)
    centres = 1.3 * torch.randn(6, 8, generator=generator)

    def draw(task: int, per_class: int):
        labels = torch.tensor([2 * task, 2 * task + 1]).repeat(per_class)
        return centres[labels] + torch.randn(len(labels), 8, generator=generator), labels

    return [tuple(draw(task, n) for n in (60, 30, 100)) for task in range(3)]
