"""The script for each framework: short, and executed where the framework is installed."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys

import pytest

from conftest import ROOT

FOLDER = ROOT / "examples" / "integrations"
SCRIPTS = {
    "avalanche_plugin": ("avalanche", r"\{'ECE_Stream': 0\.\d+, .*'ECE_PredictedOld_Stream': 0\.\d+\}"),
    "lightning_callback": ("lightning", r"\{'calibration/ece': 0\.\d+, .*predicted_old': 0\.\d+\}"),
    "transformers_text": ("transformers", r"ECE (0\.\d+) before, (0\.\d+) after"),
    "onnx_export": ("onnxruntime", r"agrees +yes"),
    "pycil_learner": (None, None),  # tests/integrations/test_pycil.py runs it in a checkout
}
MOST_LINES = 15


def user_lines(name: str) -> int:
    """Lines of code that a user writes: without imports, the docstring, comments and blank lines."""
    source = (FOLDER / f"{name}.py").read_text()
    lines = source.splitlines()
    left_out = set()
    for node in ast.parse(source).body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if docstring or isinstance(node, (ast.Import, ast.ImportFrom)):
            left_out |= set(range(node.lineno, node.end_lineno + 1))
    kept = [line for number, line in enumerate(lines, 1) if number not in left_out]
    return len([line for line in kept if line.strip() and not line.strip().startswith(("#", ")"))])


@pytest.mark.parametrize("name", list(SCRIPTS))
def test_a_script_is_short(name):
    assert user_lines(name) <= MOST_LINES


def test_the_docs_show_the_scripts_as_they_are():
    page = (ROOT / "docs" / "integrations.md").read_text()
    for name in SCRIPTS:
        assert f"examples/integrations/{name}.py" in page, name
    blocks = re.findall(r"```python\n# examples/integrations/(\w+)\.py\n(.*?)```", page, flags=re.DOTALL)
    assert {name for name, _ in blocks} == set(SCRIPTS)
    for name, block in blocks:
        _, _, code = (FOLDER / f"{name}.py").read_text().partition('"""\n\n')
        assert block.strip() == code.strip(), name


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", [name for name in SCRIPTS if SCRIPTS[name][0]])
def test_a_script_runs(name, tmp_path):
    framework, expected = SCRIPTS[name]
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: its script is not run (make test-integrations)")
    settings = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "integrations"), "PYTHONWARNINGS": "ignore"}
    start = "import sys, torchvision_schemas, runpy, torch; torch.manual_seed(0); sys.argv = sys.argv[1:];"
    command = [sys.executable, "-c", f"{start} sys.path.insert(0, {str(FOLDER)!r}); runpy.run_path(sys.argv[0])"]
    arguments = [str(FOLDER / f"{name}.py"), *([str(tmp_path / "model.onnx")] if name == "onnx_export" else [])]
    ended = subprocess.run(
        [*command, *arguments], cwd=tmp_path, env=settings, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = re.search(expected, ended.stdout)
    assert found, ended.stdout[-500:]
    if name == "transformers_text":
        before, after = map(float, found.groups())
        assert after < before
