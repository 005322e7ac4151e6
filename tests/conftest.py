"""Shared fixtures: real small networks, trained by the example's own loop."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib.util
import os
import signal
import sys
from pathlib import Path
from types import ModuleType

import pytest

os.environ["TCIL_LAYOUT"] = "channels_last"  # else every run would measure which layout is faster
# A forked process must not collect what earlier tests left, such as sessions of ONNX Runtime: to end one is to join its
# threads, which the fork does not have, and it would wait for ever.
os.register_at_fork(before=gc.freeze, after_in_parent=gc.unfreeze)
# Imports and collection make objects that stay: to look through them again and again took a quarter of that time.
gc.disable()

ROOT = Path(__file__).resolve().parent.parent
TRAINED = {"digits_tasks", "digits", "runs", "make_run"}  # fixtures of what trains networks
SHARED = {"runs", "kept_runs"}
WHOLE_FILES = {
    "test_killed": "processes", "test_ranks": "processes", "test_sweep": "processes",
    "test_resume": "training", "test_run": "training", "test_run_folder_machine": "training", "test_trust": "training",
    "test_packing": "training",
}  # fmt: skip
FUZZ = f"{ROOT / 'tests' / 'fuzz'}{os.sep}"
LONG = {"slow", "processes", "training", "ray", "fuzz"}  # markers of tests that go to whichever worker is free
# Files of which the first to run pays for all: what an export imports, the scripts of pages.
TOGETHER = {
    "test_onnx": "export", "test_modules": "export", "test_wrap": "export", "test_masked_networks": "export",
    "test_charts": "pages", "test_page": "pages", "test_importing": "pages", "test_command_line": "pages",
}  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What `make check` leaves out is told by the fixtures that a test takes, by its file, or by its own marker."""
    for item in items:
        if TRAINED & set(getattr(item, "fixturenames", ())):
            item.add_marker("training")
        for shared in SHARED & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group(shared))  # one worker makes them, once
        if "bf16" in getattr(item, "fixturenames", ()):
            item.add_marker("processes")  # one that may die tells whether this processor can
        if str(item.path).startswith(FUZZ):
            item.add_marker("fuzz")
        if marker := WHOLE_FILES.get(item.path.stem):
            item.add_marker(marker)
        if not LONG & {mark.name for mark in item.iter_markers()} and item.get_closest_marker("xdist_group") is None:
            # One worker has a file: its fixtures are made and what it needs is imported once.
            group = TOGETHER.get(item.path.stem) or f"{item.path.parent.name}-{item.path.stem}"
            item.add_marker(pytest.mark.xdist_group(group))
        _name_group(item)


@pytest.hookimpl(tryfirst=True)  # also in the process that hands out the tests, which collects none itself
def pytest_runtestloop() -> None:
    """From here on garbage is collected, more rarely than usual and without what has been imported."""
    gc.freeze()  # the little garbage of imports too: to look for it takes longer than it is worth
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def _name_group(item: pytest.Item) -> None:
    """What xdist 3.8 does for `--dist loadgroup`, and cannot do with pytest 9.2, whose names of tests it does not know.

    Without it each worker would train the runs of the group that both take tests of.
    """
    groups = sorted(mark.args[0] for mark in item.iter_markers("xdist_group"))
    if groups and hasattr(item, "_id") and getattr(item.config.option, "loadgroup", False):
        item._id = type(item._id).parse(f"{item.nodeid}@{'_'.join(groups)}")


def pytest_configure():
    """Signals as a terminal gives them: under nohup or in the background of a script, two of them would be ignored."""
    for number, usual in {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


@pytest.fixture
def bf16() -> None:
    """For tests that compute in bfloat16: skipped where this processor cannot."""
    from tcil.incremental.arithmetic import Precision, death_by  # not in the process that only hands out the tests

    if death := death_by(Precision.BF16):
        pytest.skip(f"a bfloat16 layer ends with {death} here (ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 may help)")


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    import torch  # not in the process that only hands out the tests

    torch.set_num_threads(int(os.environ.get("TCIL_TEST_THREADS", "1")))


@pytest.fixture(scope="session", autouse=True)
def _one_tree_of_commands():
    """`CliRunner` would build all commands of the app for every call, which took most of its time."""
    import typer.testing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", functools.cache(typer.main.get_command))
        yield


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
def digits():
    """The dataset `digits`."""
    from tcil.incremental.data.datasets import load_dataset

    return load_dataset("digits")


@pytest.fixture(scope="session")
def digits_tasks(digits_example):
    """What is at hand after each of five tasks on real digits.

    The network is trained in float64 and then rounded: rounding differs from one processor to the next, and a training
    amplifies it, so that in float32 every machine would have tests of a network of its own.
    """

    import torch

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


@pytest.fixture(scope="session")
def fitted(digits_tasks):
    """A task, and every calibrator by its name, fitted on it."""
    from every_calibrator import all_calibrators

    return digits_tasks[2], all_calibrators(digits_tasks[2])


@pytest.fixture
def task(digits_tasks):
    """The third task: 6 classes seen, 4 and 5 new; the head is 10 wide. The model is a copy of the test's own."""
    third = digits_tasks[2]
    return type(third)(copy.deepcopy(third.model), third.memory, third.valid, third.test, third.new_classes, third.seen)


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Two learners, two seeds, on noisy digits: the folder of their runs."""
    from stored_runs import DIGITS, command

    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        # It draws a page of each.
        patch.setattr("tcil.experiments.reporting.show.present", lambda run, console, **more: None)
        for learner in ("er", "wa"):
            for seed in (1, 2):
                command("run", *DIGITS, "--learner", learner, "--seeds", seed, "--out", folder)
    return folder


@pytest.fixture(scope="session")
def kept_runs():
    """The runs that docs/results keeps."""
    from tcil.experiments.reporting.collect import read_runs

    return read_runs([ROOT / "docs/results/runs"])


class Paper:
    """Takes whatever is drawn on it, and shows nothing."""

    def __getattr__(self, name):
        return self

    def __call__(self, *words, **more):
        return self

    def __getitem__(self, place):
        return self

    def __iter__(self):
        return iter(())


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures are worked out, but not drawn."""
    from matplotlib.figure import Figure

    from tcil.experiments.reporting import page, plots

    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **more: file.write("<svg></svg>"))
    monkeypatch.setattr(plots, "drawing", lambda *sizes, **more: contextlib.nullcontext((Paper(), Paper())))
    monkeypatch.setattr(plots, "picture", lambda figure, *words: plots.Picture("<svg></svg>", *words))
    monkeypatch.setattr(page, "static_svg", lambda chart, panel: "<svg></svg>")
    monkeypatch.setattr(page, "scripts", lambda: "")
