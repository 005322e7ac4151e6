"""What the modules build on is as recorded from the real frameworks; shown also where these are not installed."""

from __future__ import annotations

import ast
import json
import os
import sys
from pathlib import Path

import pytest

import tcil
from integrations import record_signatures
from integrations.conftest import need

RECORD = json.loads(record_signatures.RECORD.read_text())
SOURCE = Path(tcil.__file__).parent / "integrations"
OURS = {"avalanche": "CalibrationPlugin", "lightning": "CalibrationCallback"}


def methods_of(framework: str) -> dict[str, ast.arguments]:
    tree = ast.parse((SOURCE / f"{framework}.py").read_text())
    (own,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == OURS[framework]]
    return {node.name: node.args for node in own.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("framework", list(OURS))
def test_hooks_take_what_they_are_called_with(framework):
    _, base, hooks, _ = record_signatures.INSTALLED[framework]
    ours = methods_of(framework)
    for hook in hooks.split():
        given = [name for name in RECORD[framework]["signatures"][f"{base}.{hook}"] if name not in ("args", "kwargs")]
        own = ours[hook]
        taken = [argument.arg for argument in own.args]
        assert taken[: len(given)] == given, hook
        if framework == "avalanche":  # which passes on whatever `train` and `eval` were given
            assert own.vararg is not None, hook
            assert own.kwarg is not None, hook


@pytest.mark.parametrize("framework", list(OURS))
def test_no_other_hook_is_defined(framework):
    """A hook of another name would never be called."""
    _, _, hooks, _ = record_signatures.INSTALLED[framework]
    prefixes = ("before_", "after_", "on_")
    assert {name for name in methods_of(framework) if name.startswith(prefixes)} == set(hooks.split())


@pytest.mark.parametrize("framework", list(record_signatures.INSTALLED))
def test_the_record_is_that_of_the_installed_version(framework):
    need(framework)
    assert record_signatures.of_installed(framework) == RECORD[framework]


def test_the_record_is_that_of_the_checkout_of_pycil():
    folder = os.environ.get("TCIL_PYCIL")
    if not folder:
        pytest.skip("TCIL_PYCIL names no checkout: only recorded signatures are checked")
    assert record_signatures.of_pycil(Path(folder)) == RECORD["pycil"]


@pytest.mark.parametrize("framework", ["avalanche", "lightning", "onnx", "transformers"])
def test_a_missing_framework_is_told_with_its_extra(framework, monkeypatch):
    monkeypatch.delitem(sys.modules, f"tcil.integrations.{framework}", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == framework] + [framework]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"pip install -c constraints.txt '\.\[{framework}\]'"):
        __import__(f"tcil.integrations.{framework}")
    sys.modules.pop(f"tcil.integrations.{framework}", None)


def test_nothing_is_imported_before_it_is_used():
    outside = [path for path in Path(tcil.__file__).parent.rglob("*.py") if path.parent != SOURCE]
    assert len(outside) > 100
    for path in outside:
        if "integrations" not in (text := path.read_text()):
            continue  # nothing to parse
        nodes = list(ast.walk(ast.parse(text)))
        modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        modules += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        assert not any(name.startswith("tcil.integrations") for name in modules), path
    own = ast.parse((SOURCE / "__init__.py").read_text())
    assert not [node for node in own.body if isinstance(node, (ast.Import, ast.ImportFrom))]
