"""Commands where packages of the extras are missing."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from command_lines import BLOCKER, command, results
from conftest import ROOT
from tcil.experiments.process import exits
from tcil.experiments.process.exits import ExitCode

EXTRAS = exits._EXTRAS["bench"]


class TestInstallation:
    def test_extras_are_those_of_the_project(self):
        text = (ROOT / "pyproject.toml").read_text()
        listed = re.findall(r'"([a-z0-9-]+)>', text.partition("bench = [")[2].partition("]")[0])
        modules = {"pillow": "PIL", "scikit-learn": "sklearn", "vl-convert-python": "vl_convert"}
        assert {modules.get(name, name) for name in listed} == set(EXTRAS) - {"markupsafe"}  # jinja2 brings that

    @pytest.mark.parametrize(
        ("package", "words"),
        [
            ("pydantic", ["plan"]),
            ("pydantic", ["settings"]),
            ("matplotlib", ["reproduce", "list"]),
            ("vl_convert", ["report", "."]),
            ("jinja2", ["report", "."]),
            ("markupsafe", ["run", "--dry-run"]),
            ("sklearn", ["run", "--dataset", "noisy-digits", "--set", "epochs=1"]),
            ("PIL", ["run", "--dataset", "image-folder", "--data", "images"]),
        ],
    )
    def test_one_package_is_missing(self, tmp_path, monkeypatch, package, words):
        (tmp_path / "results.json").write_text(json.dumps(results()))
        for part in ("train", "test"):
            for name in "ab":
                (tmp_path / "images" / part / name).mkdir(parents=True)
                (tmp_path / "images" / part / name / "1.png").write_bytes(b"")
        monkeypatch.chdir(tmp_path)
        # Modules of tcil that were imported already would not ask for the package again.
        ours = [n for n in sys.modules if n.startswith("tcil.experiments.") and not n.endswith((".exits", ".stopping"))]
        for name in ours if package not in ("sklearn", "PIL") else ():
            monkeypatch.delitem(sys.modules, name)
            monkeypatch.delattr(sys.modules["tcil.experiments"], name.rpartition(".")[2], raising=False)
        for name in [n for n in sys.modules if n.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)

        class Missing:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == package:
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
        assert f"without {package}; expected the extra tcil[bench]. pip install 'tcil[bench]'" in command(*words)

    @pytest.mark.processes
    @pytest.mark.parametrize("names", [{"typer"}, {"rich"}, set(EXTRAS)], ids=["typer", "rich", "all"])
    def test_a_base_install(self, tmp_path, names):
        words = ["tcil", "run"] if len(names) > 1 else ["tcil", "--version"]
        code = (
            BLOCKER.format(names=names)
            + f"sys.argv = {words}\nimport runpy; runpy.run_module('tcil', run_name='__main__')"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == ExitCode.REFUSED
        assert "pip install 'tcil[bench]'" in done.stderr
        assert "Traceback" not in done.stderr
        assert not list(tmp_path.iterdir())
