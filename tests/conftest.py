"""Shared fixtures: real small networks, trained by the example's own loop."""

from __future__ import annotations

import copy
import functools
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

os.environ["TCIL_LAYOUT"] = "channels_last"  # else every run would measure which layout is faster
ROOT = Path(__file__).resolve().parent.parent
TRAINED = {"digits_tasks", "digits", "runs", "make_run"}  # fixtures of what trains networks
WHOLE_FILES = {
    "test_killed": "processes", "test_ranks": "processes", "test_sweep": "processes",
    "test_resume": "training", "test_run": "training", "test_trust": "training",
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What `make check` leaves out is told by the fixtures that a test takes, by its file, or by its own marker."""
    for item in items:
        if TRAINED & set(getattr(item, "fixturenames", ())):
            item.add_marker("training")
        if "runs" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("runs"))  # one worker trains them, once
        if marker := WHOLE_FILES.get(item.path.stem):
            item.add_marker(marker)


@functools.cache
def death_by_bf16() -> str:
    """How a process ends that runs a bfloat16 layer here; empty where it lives.

    Some virtual machines show AMX flags but trap its instructions, which oneDNN then uses: the process is killed.
    """
    code = "import torch; torch.nn.Linear(64, 64).bfloat16()(torch.ones(64, 64).bfloat16())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode
    return signal.Signals(-ended).name if ended < 0 else "an error" if ended else ""


@pytest.fixture
def bf16() -> None:
    """For tests that compute in bfloat16: skipped where this processor cannot."""
    if death := death_by_bf16():
        pytest.skip(f"a bfloat16 layer ends with {death} here (ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 may help)")


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    torch.set_num_threads(int(os.environ.get("TCIL_TEST_THREADS", "1")))


@pytest.fixture(scope="session")
def digits_example() -> ModuleType:
    """examples/digits.py as a module."""
    spec = importlib.util.spec_from_file_location("digits_example", ROOT / "examples" / "digits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["digits_example"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def digits_tasks(digits_example):
    """What is at hand after each of five tasks on real digits.

    The network is trained in float64 and then rounded: rounding differs from one processor to the next, and a training
    amplifies it, so that in float32 every machine would have tests of a network of its own.
    """

    def rounded(examples):
        return examples[0].float(), examples[1]

    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return [
            digits_example.Task(
                copy.deepcopy(task.model).float().eval(),
                *(rounded(part) for part in (task.memory, task.valid, task.test)),
                task.new_classes,
                task.seen,
            )
            for task in digits_example.learn(seed=2, epochs=15)
        ]
    finally:
        torch.set_default_dtype(usual)


@pytest.fixture
def task(digits_tasks):
    """The third task: 6 classes seen, 4 and 5 new; the head is 10 wide. The model is a copy of the test's own."""
    third = digits_tasks[2]
    return type(third)(copy.deepcopy(third.model), third.memory, third.valid, third.test, third.new_classes, third.seen)
