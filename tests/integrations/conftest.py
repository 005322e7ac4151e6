"""Frameworks that are tested where they are installed."""

from __future__ import annotations

import importlib
import importlib.util
import random

import numpy as np
import pytest
import torch

from integrations import torchvision_schemas  # noqa: F401  # several frameworks import torchvision


def need(framework: str):
    """The framework, or a skip that says what is not shown here."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: only recorded signatures are checked (make test-integrations)")
    return importlib.import_module(framework)


def seed_everything(seed: int = 0) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  # what frameworks draw from
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
