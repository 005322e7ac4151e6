"""The suite on machines that cannot do everything: a test that kills its process is named, and nothing waits for it."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from conftest import ROOT
from tcil.experiments.scheduling import cost
from tcil.incremental import arithmetic
from tcil.incremental.arithmetic import Arithmetic, Precision, death_by

pytestmark = pytest.mark.processes

CRASHING = """
    import os, signal, time
    import pytest

    @pytest.mark.parametrize("number", range(12))
    def test_fine(number):
        time.sleep(0.01)

    def test_kills_its_process():
        os.kill(os.getpid(), signal.SIGILL)

"""
LATER = """
    @pytest.mark.parametrize("number", range({after}))
    def test_later(number):
        time.sleep(0.01)
"""
# Groups as those of the project: a file of quick tests goes to one worker.
GROUPED = f"""
    import importlib.util

    spec = importlib.util.spec_from_file_location("house", {str(ROOT / "tests" / "conftest.py")!r})
    house = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(house)
    pytest_collection_modifyitems = house.pytest_collection_modifyitems
"""


@pytest.mark.parametrize(("after", "grouped"), [(0, False), (500, False), (30, True)])
def test_a_worker_that_dies_ends_the_run_and_is_named(tmp_path: Path, after: int, grouped: bool) -> None:
    """With the project's own options. Without --max-worker-restart=0 such a run waited for ever at 99 %."""
    tests = CRASHING + (LATER.format(after=after) if after else "")  # an empty set is an error
    (tmp_path / "test_crash.py").write_text(textwrap.dedent(tests))
    if grouped:
        (tmp_path / "conftest.py").write_text(textwrap.dedent(GROUPED))
    words = ["-n", "2", "--dist", "loadgroup", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    words += ["-o", "filterwarnings="]  # one of them would import torch in every process
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "--rootdir", str(tmp_path), "test_crash.py"],
        cwd=tmp_path, env=outside, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 1, ended.stdout
    group = f"@{tmp_path.name}-test_crash" if grouped else ""
    assert f"crashed while running 'test_crash.py::test_kills_its_process{group}'" in ended.stdout
    assert "1 failed" in ended.stdout.splitlines()[-1]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGKILL"])
def test_a_probe_that_something_else_ends_tells_nothing_of_the_processor(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ended = subprocess.CompletedProcess([], -getattr(signal, name))
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: ended)
    assert death_by.__wrapped__(Precision.BF16) == ""


def test_the_probe_tells_a_processor_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    died = subprocess.CompletedProcess([], -4)
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: died)
    assert death_by.__wrapped__(Precision.BF16) == "SIGILL"
    monkeypatch.setattr(arithmetic, "death_by", death_by.__wrapped__)
    with pytest.raises(ValueError, match=r"precision: got 'bf16', in which a layer ends the process with SIGILL"):
        Arithmetic(Precision.BF16).check(torch.device("cpu"))
    Arithmetic().check(torch.device("cpu"))
    monkeypatch.setattr(cost, "death_by", death_by.__wrapped__)
    assert math.isnan(cost.seconds_per_image.__wrapped__("small_cnn", 8, (1, 8, 8), "bf16"))
    died.returncode = 0
    assert death_by.__wrapped__(Precision.BF16) == ""
