"""Modules whose framework may be missing: their doctests where it is there, else a skip that names the extra."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import re
import tomllib

import pytest

from conftest import ROOT

FRAMEWORKS = ("avalanche", "lightning", "onnx", "transformers")  # each a module, an extra and a package


# An export takes two seconds: `make check` has one already, in test_onnx.py.
EXPORTS = {"onnx": [pytest.mark.training, pytest.mark.xdist_group("export")]}


@pytest.mark.parametrize("framework", [pytest.param(name, marks=EXPORTS.get(name, ())) for name in FRAMEWORKS])
def test_doctests(framework):
    name = f"tcil.integrations.{framework}"
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        # Nothing but a missing package of the extra excuses a module: whatever else fails on import is an error.
        package = (error.name or "tcil").partition(".")[0]
        install = f"pip install -c constraints.txt '.[{framework}]'"  # there is no release to install from
        if importlib.util.find_spec(package) is not None or install not in str(error):
            raise
        pytest.skip(f"needs the extra {framework} (make test-integrations)")
    found = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert found.failed == 0
    assert found.attempted > 0


def test_no_other_module_is_left_out():
    """What pytest does not collect is what is tested above, each with an extra of its name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    options = project["tool"]["pytest"]["ini_options"]["addopts"]
    assert re.findall(r"--ignore\S*", options) == [
        f"--ignore-glob=*/tcil/integrations/{framework}.py" for framework in FRAMEWORKS
    ]
    assert "--doctest-ignore-import-errors" not in options
    assert set(FRAMEWORKS) <= set(project["project"]["optional-dependencies"])
