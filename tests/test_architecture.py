"""The house: layers with imports pointing down only, light start, documented and runnable public names."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tcil
from conftest import ROOT
from tcil.extending import Calibrator

SOURCE = ROOT / "src" / "tcil"
# From the bottom up. The package root and the public lists of names stand on top of everything.
LAYERS = ["foundation", "metrics", "calibration", "decisions", "incremental", "experiments"]
BRIDGES = "integrations"  # beside experiments: uses the three layers below `incremental`, and nothing uses it
PUBLIC = ("decisions", "distributed", "extending", "metrics", "networks", "options", "results")
RESTRICTED = SOURCE / "incremental" / "data" / "datasets" / "files.py"  # the one unpickler
# What measures and what explores, outside the package.
BESIDE = sorted(path.relative_to(ROOT) for name in ("benchmarks", "research") for path in (ROOT / name).rglob("*.py"))
INSIDE = {"experiments": ["config", "process", "runs", "reporting", "scheduling", "reproduction", "cli"]}


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imports_of(path: Path) -> frozenset[str]:
    names = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


def dotted_names(path: Path) -> set[str]:
    """Names of two parts that a file uses or calls."""
    attributes = [node for node in nodes_of(path) if isinstance(node, ast.Attribute)]
    return {f"{node.value.id}.{node.attr}" for node in attributes if isinstance(node.value, ast.Name)}


@pytest.mark.parametrize("layer", [name for name in LAYERS if (SOURCE / name).exists()])
def test_imports_point_down(layer):
    above = [*LAYERS[LAYERS.index(layer) + 1 :], BRIDGES]
    above += sorted(set(PUBLIC) - set(LAYERS))
    for path in (SOURCE / layer).rglob("*.py"):
        for name in imports_of(path):
            assert not any(f"{name}.".startswith(f"tcil.{other}.") for other in above), f"{path.name} imports {name}"


def test_integrations_stand_beside_experiments():
    """They use tensors in, tensors out: no dataset, learner or run; and each framework only in its own module."""
    frameworks = {"avalanche", "lightning", "onnx", "transformers"}
    allowed = {"torch", "numpy", "tcil"} | set(sys.stdlib_module_names)
    for path in (SOURCE / BRIDGES).rglob("*.py"):
        for name in imports_of(path):
            assert not name.startswith(("tcil.incremental", "tcil.experiments")), f"{path.name} imports {name}"
            first = name.split(".")[0]
            own = {path.stem} & frameworks | ({"onnxruntime", "onnxscript"} if path.stem == "onnx" else set())
            assert first in allowed | own, f"{path.name} imports {name}"


@pytest.mark.parametrize(("layer", "part"), [(layer, part) for layer, parts in INSIDE.items() for part in parts])
def test_imports_inside_a_layer_point_down(layer, part):
    order = INSIDE[layer]
    above = order[order.index(part) + 1 :]
    paths = list((SOURCE / layer / part).rglob("*.py"))
    assert paths
    for path in paths:
        for name in imports_of(path):
            assert not any(name.startswith(f"tcil.{layer}.{other}") for other in above), f"{path} imports {name}"


def test_every_part_of_a_layer_has_its_place():
    for layer, order in INSIDE.items():
        there = {path.name for path in (SOURCE / layer).iterdir() if path.is_dir() and path.name != "__pycache__"}
        assert there == set(order)


def test_calibration_needs_torch_numpy_scipy_only():
    # typing_extensions for type checkers alone: they bring it along.
    allowed = {"torch", "numpy", "scipy", "safetensors", "tcil", "typing_extensions"} | set(sys.stdlib_module_names)
    layers = ("foundation", "metrics", "calibration", "decisions")
    below = [path for layer in layers for path in (SOURCE / layer).rglob("*.py")]
    for path in below:
        for name in imports_of(path):
            assert name.split(".")[0] in allowed, f"{path.name} imports {name}"


def test_every_module_is_in_a_layer():
    loose = {path.name for path in SOURCE.glob("*.py")}
    assert loose == {"__init__.py", "__main__.py"} | {f"{name}.py" for name in PUBLIC if name not in LAYERS}
    folders = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= {*LAYERS, BRIDGES}
    assert not list(SOURCE.rglob("util*"))


def test_nothing_untrusted_is_unpickled():
    """CIFAR's own files go through the restricted unpickler, weights through weights_only; nothing else is pickle."""
    for path in SOURCE.rglob("*.py"):
        assert path == RESTRICTED or not imports_of(path) & {"pickle", "cloudpickle", "shelve", "marshal"}, path
        for node in nodes_of(path):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called in ("torch.load", "np.load"):
                given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if called == "torch.load":
                assert given.get("weights_only") == "True", path
            if called == "np.load":
                assert given.get("allow_pickle") == "False", path
            assert "_object" not in called.rpartition(".")[2], f"{path}: {called} sends pickles"
            assert called not in ("eval", "exec"), path


def test_no_state_of_the_process_is_changed():
    """No other current folder, no entry in sys.path, no backend of matplotlib: whoever imports tcil keeps their own."""
    for path in SOURCE.rglob("*.py"):
        if path == SOURCE / "__main__.py":  # only of the process that `python -m tcil` has started
            continue
        used = dotted_names(path)
        assert not used & {"os.chdir", "matplotlib.use", "plt.switch_backend"}, path
        assert "matplotlib.pyplot" not in imports_of(path), path
        assert "sys.path" not in used, path


def private_names(tree: ast.AST) -> set[str]:
    """What a file takes of others that begins with an underscore: imported, as an attribute, or named in a string."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            parts = [part for alias in node.names for part in alias.name.split(".")]
            parts += (getattr(node, "module", "") or "").split(".")
            found |= {part for part in parts if is_private(part)}
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            if ast.unparse(node.value) not in ("self", "cls", "super()"):
                found.add(ast.unparse(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(re.findall(r"\w\.(_[a-z]\w*)", node.value))  # code for another process
        elif isinstance(node, ast.Call):
            given = [word.value for word in node.args if isinstance(word, ast.Constant)]
            found |= {word for word in given if isinstance(word, str) and is_private(word)}
    return found - {"os._exit"}  # which the standard library documents


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_private_names_are_seen():
    taken = "import a._b\nfrom _c import d\nfrom e import _f\ng._h = 1\nput(i, '_j')\nrun('import k; k._l()')\n"
    own = "self._m = __n__\n_o(f'p{q}_r')\n"
    assert private_names(ast.parse(taken + own)) == {"_b", "_c", "_f", "g._h", "_j", "_l"}


@pytest.mark.parametrize("path", BESIDE, ids=str)
def test_what_measures_and_explores_takes_public_names_only(path):
    assert private_names(ast.parse((ROOT / path).read_text())) == set()


@pytest.mark.parametrize("path", BESIDE, ids=str)
def test_what_measures_and_explores_leaves_the_process_as_it_is(path):
    """No edits of where modules are found, of the current folder, or of the backend that draws."""
    assert not dotted_names(ROOT / path) & {"sys.path", "os.chdir", "matplotlib.use"}


@pytest.mark.processes
@pytest.mark.parametrize("use", ["tcil.__version__", "tcil.CalibrationWarning", "dir(tcil)", "tcil.extending.Option"])
def test_importing_tcil_does_not_import_torch(use):
    code = f"import sys, tcil; {use}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_lazy_names_are_the_declared_ones():
    assert len(tcil.__all__) <= 19  # a new calibrator is one more: raise it by one, and by no more
    for name in tcil.__all__:
        assert getattr(tcil, name) is not None
    assert set(dir(tcil)) == {*tcil.__all__, *PUBLIC}
    for module in PUBLIC:
        assert getattr(tcil, module).__name__ == f"tcil.{module}"
        for name in getattr(tcil, module).__all__:
            assert getattr(getattr(tcil, module), name) is not None
    with pytest.raises(AttributeError, match=r"no attribute 'TCL'$"):
        _ = tcil.TCL


def test_a_name_that_has_moved_is_found_by_its_error():
    for name, public in tcil._MOVED.items():
        with pytest.raises(AttributeError, match=f"no attribute '{name}': it is {public} since version 0.2"):
            getattr(tcil, name)
        module, _, new = public.removeprefix("tcil.").partition(".")
        assert new in getattr(tcil, module).__all__


def public_objects():
    for name in sorted(set(tcil.__all__) - {"__version__", *PUBLIC}):
        yield f"tcil.{name}", getattr(tcil, name)
    for module in (getattr(tcil, name) for name in PUBLIC):
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


def sections(thing):
    """The numpydoc sections of a docstring, by title, and the names that each lists."""
    lines, found, title = inspect.getdoc(thing).splitlines(), {}, ""
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if after and set(after) == {"-"}:
            title, found[line] = line, set()
        elif title and line[:1].strip() and " : " in line:
            found[title] |= {name.strip("* ") for name in line.partition(" : ")[0].split(",")}
        elif title and line.startswith("*"):
            found[title] |= {name.strip("* ") for name in line.split(",")}
    return found


def undocumented(function):
    """Parameters of a function that its docstring has no line for, and sections that it lacks."""
    own = sections(function)
    wanted = {name for name in inspect.signature(function).parameters if name not in ("self", "cls")}
    missing = wanted - own.get("Parameters", set())
    if inspect.signature(function).return_annotation not in ("None", "Iterator[None]") and "Returns" not in own:
        missing.add("Returns")
    return missing


@pytest.mark.parametrize(("name", "thing"), list(public_objects()), ids=[name for name, _ in public_objects()])
def test_public_names_have_numpydoc_sections(name, thing):
    assert "Examples" in sections(thing), name
    if not inspect.isclass(thing):
        assert undocumented(thing) == set(), name
    elif dataclasses.is_dataclass(thing):
        listed = sections(thing)
        named = listed.get("Parameters", set()) | listed.get("Attributes", set())
        assert {field.name for field in dataclasses.fields(thing)} <= named, name
    if inspect.isclass(thing) and issubclass(thing, Calibrator):
        for method in ("fit", "partial_fit", "transform", "predict_proba", "wrap", "save", "load", "set_params"):
            if hasattr(thing, method):
                assert undocumented(getattr(thing, method)) == set(), f"{name}.{method}"


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_version_is_told_once():
    """The code has it; the package reads it from there, and what must repeat it says the same."""
    assert project()["project"]["dynamic"] == ["version"]
    assert ROOT / project()["tool"]["hatch"]["version"]["path"] == SOURCE / "__init__.py"
    newest, *older = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    released = older[0] if newest == "Unreleased" else newest
    assert f"version: {released}\n" in (ROOT / "CITATION.cff").read_text()
    if newest == "Unreleased":  # a reader can tell what is installed from the release before it
        number, _, development = tcil.__version__.partition(".dev")
        assert development.isdigit()
        assert tuple(map(int, number.split("."))) > tuple(map(int, released.split(".")))
    else:
        assert tcil.__version__ == released


def test_changelog_has_dates_and_the_usual_categories():
    categories = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    _, *versions = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    for version in versions:
        assert re.match(r"Unreleased\n|\d+\.\d+\.\d+ - 20\d\d-\d\d-\d\d\n", version), version[:30]
        found = re.findall(r"^### (.*)$", version, flags=re.MULTILINE)
        assert found == sorted(set(found), key=categories.index), version[:30]


def test_lowest_versions_are_tested_ones():
    """Each lower bound is what `make test-lowest` installs; of tools that it leaves out, what constraints.txt has."""
    pinned, lowest = (
        dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / name).read_text(), flags=re.MULTILINE))
        for name in ("constraints.txt", "constraints-lowest.txt")
    )
    extras = project()["project"]["optional-dependencies"]
    runtime = [*project()["project"]["dependencies"], *extras["bench"]]
    for line in [*runtime, *extras["ray"], *extras["dev"]]:
        if line.startswith("tcil["):
            continue
        name, bound = re.match(r"([\w-]+)>=([\d.]+)", line).groups()
        if name in lowest or line in runtime:
            assert re.fullmatch(rf"{re.escape(bound)}(\.0)*", lowest[name]), line
        else:
            assert f"{pinned[name]}.".startswith(f"{bound}."), line


def test_scale_out_numbers_are_those_of_the_stored_runs():
    import json

    text = " ".join(" ".join((ROOT / "docs" / f"{page}.md").read_text().split()) for page in ("faults", "scale-out"))
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
    folders = [ROOT / name for name in ("src", "tests", "research", "benchmarks", "examples", "docs")]
    inside = [path for folder in folders for ending in ("py", "md", "ipynb") for path in folder.rglob(f"*.{ending}")]
    assert len(inside) > 400
    for path in [*inside, *ROOT.glob("*.md"), ROOT / "Makefile"]:
        assert needle not in path.read_text(), path
