"""Shared fixtures: real small networks, trained by the example's own loop."""

from __future__ import annotations

import copy
import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest
import torch

os.environ["TCIL_LAYOUT"] = "channels_last"  # else every run would measure which layout is faster
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def digits_example() -> ModuleType:
    """examples/digits.py as a module."""
    import sys

    spec = importlib.util.spec_from_file_location("digits_example", ROOT / "examples" / "digits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["digits_example"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def digits_tasks(digits_example):
    """What is at hand after each of five tasks on real digits."""
    return [
        digits_example.Task(
            copy.deepcopy(task.model).eval(), task.memory, task.valid, task.test, task.new_classes, task.seen
        )
        for task in digits_example.learn()
    ]


@pytest.fixture
def task(digits_tasks):
    """The third task: 6 classes seen, 4 and 5 new; the head is 10 wide. The model is a copy of the test's own."""
    third = digits_tasks[2]
    return type(third)(copy.deepcopy(third.model), third.memory, third.valid, third.test, third.new_classes, third.seen)
