"""The house: three layers with imports pointing down only, light start, documented and runnable public names."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tcil

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "tcil"
# From the bottom up. The package root and the two public aliases stand on top of everything.
LAYERS = ["calibration", "incremental", "experiments"]


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("layer", [name for name in LAYERS if (SOURCE / name).exists()])
def test_imports_point_down(layer):
    above = LAYERS[LAYERS.index(layer) + 1 :]
    for path in (SOURCE / layer).rglob("*.py"):
        for name in imports_of(path):
            assert not any(name.startswith(f"tcil.{other}") for other in above), f"{path.name} imports {name}"


def test_calibration_needs_torch_numpy_scipy_only():
    allowed = {"torch", "numpy", "scipy", "safetensors", "tcil"} | set(sys.stdlib_module_names)
    for path in (SOURCE / "calibration").rglob("*.py"):
        for name in imports_of(path):
            assert name.split(".")[0] in allowed, f"{path.name} imports {name}"


def test_every_module_is_in_a_layer():
    loose = {path.name for path in SOURCE.glob("*.py")}
    assert loose == {"__init__.py", "__main__.py", "metrics.py", "networks.py"}
    assert {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"} <= set(LAYERS)
    assert not list(SOURCE.rglob("util*"))


def test_nothing_untrusted_is_unpickled():
    """CIFAR's own files go through the restricted unpickler, weights through weights_only; nothing else is pickle."""
    for path in SOURCE.rglob("*.py"):
        assert path.name == "files.py" or not imports_of(path) & {"pickle", "cloudpickle", "shelve", "marshal"}, path
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called, given = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
            if called == "torch.load":
                assert given.get("weights_only") == "True", path
            if called == "np.load":
                assert given.get("allow_pickle") == "False", path
            assert "_object" not in called.rpartition(".")[2], f"{path}: {called} sends pickles"
            assert called not in ("eval", "exec"), path


def test_importing_tcil_does_not_import_torch():
    code = "import sys, tcil; tcil.__version__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_lazy_names_are_the_declared_ones():
    for name in tcil.__all__:
        assert getattr(tcil, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'TCL'"):
        _ = tcil.TCL


def public_objects():
    for name in sorted(set(tcil.__all__) - {"__version__", "metrics", "networks"}):
        yield f"tcil.{name}", getattr(tcil, name)
    for module in (tcil.metrics, tcil.networks):
        for name in module.__all__:
            yield f"{module.__name__}.{name}", getattr(module, name)


@pytest.mark.parametrize(("name", "thing"), list(public_objects()), ids=[name for name, _ in public_objects()])
def test_public_names_are_documented_with_an_example(name, thing):
    assert thing.__doc__, name
    assert ">>>" in thing.__doc__, f"{name} has no runnable example (doctests run them)"
    if inspect.isclass(thing):
        for member, value in vars(thing).items():
            if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                assert inspect.getdoc(getattr(thing, member)), f"{name}.{member}"


def test_version_is_told_once():
    text = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{tcil.__version__}"' in text
    assert f"## {tcil.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {tcil.__version__}" in (ROOT / "CITATION.cff").read_text()


def test_readme_examples_run(task):
    """Every Python block of the README, in order, with the variables that a user would have."""
    import torch

    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert blocks
    space = {
        "model": task.model,
        "x_mem": task.memory[0],
        "y_mem": task.memory[1],
        "x_val": task.valid[0],
        "y_val": task.valid[1],
        "x": task.test[0][:8],
        "x_test": task.test[0],
        "y_test": task.test[1],
        "new_classes": task.new_classes,
        "torch": torch,
    }
    import os
    import tempfile

    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for block in blocks:
                exec(compile(block, "README.md", "exec"), space)
        finally:
            os.chdir(here)


def test_readme_numbers_are_those_of_the_stored_run():
    """The table of measured ECEs is what benchmarks/checkpoints.py wrote."""
    import json

    results = json.loads((ROOT / "docs" / "results" / "official-checkpoints.json").read_text())["results"]
    readme = (ROOT / "README.md").read_text()
    for name, by_task in results.items():
        (row,) = re.findall(rf"^\| \**{re.escape(name)}\** \| (.*) \|$", readme, flags=re.MULTILINE)
        cells = row.split(" | ")
        assert cells[:5] == ["n/a" if e is None else f"{100 * e['ece']:.2f}" for e in by_task.values()]
        if None not in by_task.values():
            for cell, key in zip(
                cells[5:], ("ece", "noise_floor", "ece_predicted_old", "ece_predicted_new"), strict=True
            ):
                values = [e[key] for e in by_task.values() if e[key] is not None]
                assert cell == f"{100 * sum(values) / len(values):.2f}"


def test_scale_out_numbers_are_those_of_the_stored_runs():
    import json

    text = " ".join((ROOT / "docs" / "scale-out.md").read_text().split())
    faults, sweep = (
        json.loads((ROOT / "docs" / "results" / name).read_text()) for name in ("faults.json", "sweep.json")
    )
    assert f"({faults['seed']})" in text
    assert faults["in_all"] == sum(faults["faults"].values()) >= 200
    assert f"{faults['in_all']} faults, nothing lost" in text
    for name, count in faults["faults"].items():
        assert f"| {name} | {count} |" in text
    serial, processes, ray = (sweep["seconds"][place][0] for place in ("serial", "processes", "ray"))
    assert f"{serial} s, {processes} s and {ray} s" in text
    assert f"a speed-up of {sweep['speed_up']['processes']} and {sweep['speed_up']['ray']}" in text


def test_no_paths_of_this_machine():
    """Nothing in the tree names where it was built."""
    needle = "/" + "work/"
    for path in [*SOURCE.rglob("*.py"), *(ROOT / "tests").glob("*.py"), ROOT / "README.md", ROOT / "Makefile"]:
        assert needle not in path.read_text(), path
