"""README and pages: code runs, commands exist, links lead somewhere, numbers are the stored ones."""

from __future__ import annotations

import functools
import itertools
import json
import pkgutil
import re
import runpy
import shlex
import sys
import tomllib
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest

import tcil
from conftest import ROOT

DOCS = ROOT / "docs"
BUILT = (DOCS / "gallery", DOCS / "api" / "generated")  # by `make docs`
PAGES = sorted(
    page for page in [ROOT / "README.md", *DOCS.rglob("*.md")] if not any(folder in page.parents for folder in BUILT)
)
FENCE = re.compile(r"^(?P<fence>`{3,}|:{3,})(?P<info>[^\n]*)\n(?P<body>.*?)^(?P=fence)[ ]*$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
ENVIRONMENT = r"(?:[A-Z_]+=\S+ )*"  # before a command
QUICK_EXAMPLES = {
    "plot_1_plain_loop", "plot_2_reliability_by_group", "plot_3_tcil_step_by_step", "plot_4_pact_evidence",
}  # fmt: skip
EXAMPLES = sorted((ROOT / "examples" / "gallery").glob("plot_*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks_of(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in these languages; "" is a block without one."""
    found = FENCE.finditer(page.read_text())
    return [match["body"] for match in found if match["fence"][0] == "`" and match["info"].strip() in languages]


def without_blocks(page: Path) -> str:
    return re.sub(r"`[^`\n]*`", "", prose_of(page))


def prose_of(page: Path) -> str:
    """A page without its fenced blocks of code."""
    return FENCE.sub(lambda m: "" if m["fence"][0] == "`" else m["body"], page.read_text())


def inline_code_of(page: Path) -> list[str]:
    """What stands between backticks in the text of a page, each on one line."""
    return [" ".join(found.split()) for found in INLINE.findall(prose_of(page))]


WITH_PYTHON = [page for page in PAGES if blocks_of(page, "python")]
# Pages that need more than the variables of the quickstart: other packages, a class that the reader has.
SKETCHES = {"decisions", "integrations", "pretrained", "photos", "pact", "pact-protocol"}
RUNNING = [page for page in WITH_PYTHON if page.stem not in SKETCHES and page.parent.name != "recipes"]


class TestCode:
    @pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
    def test_python_names_what_there_is(self, page):
        for block in blocks_of(page, "python"):
            compile(block, name_of(page), "exec")
            for name in re.findall(r"\btcil\.([A-Za-z]\w*)", block):
                assert hasattr(tcil, name) or find_spec(f"tcil.{name}"), name

    def test_names_in_the_text_are_there(self):
        """`tcil.module.name` between backticks is a public module, a name of one, or a group of entry points."""
        groups = {f"tcil.{kind}" for kind in ("backbones", "calibrators", "datasets", "learners", "networks")}
        for page in PAGES:
            for name in inline_code_of(page):
                if not re.fullmatch(r"tcil(\.\w+)+(\(.*\))?", name) or (found := name.partition("(")[0]) in groups:
                    continue
                if module := re.match(r"tcil\.integrations\.(\w+)\.?(\w*)", found):  # not imported: needs its framework
                    source = (ROOT / "src" / "tcil" / "integrations" / f"{module[1]}.py").read_text()
                    assert f'"{module[2]}"' in source or not module[2], (page, name)
                else:
                    assert pkgutil.resolve_name(found), (page, name)

    def test_files_in_the_text_are_there(self):
        """Paths between backticks are of the repository, or in CONTRIBUTING.md of the package."""
        folders = "tests|docs|examples|benchmarks|research|src|experiments|calibration|incremental|metrics|foundation"
        for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
            for path in inline_code_of(page):
                if re.fullmatch(rf"({folders})/[\w/.-]+(::\w+)?", path) and "NAME" not in path:
                    file = path.partition("::")[0]
                    assert any((root / file).exists() for root in (ROOT, ROOT / "src" / "tcil")), (page, path)

    @pytest.mark.parametrize("page", RUNNING, ids=name_of)
    def test_python_runs(self, page, task, tmp_path, monkeypatch):
        """Every Python block of a page, in order, with the variables that a user would have."""
        import torch

        space = {
            "tcil": tcil,
            "torch": torch,
            "model": task.model,
            "memory": task.memory,
            "valid": task.valid,
            "x_mem": task.memory[0],
            "y_mem": task.memory[1],
            "x_val": task.valid[0],
            "y_val": task.valid[1],
            "x": task.test[0][:8],
            "x_test": task.test[0],
            "y_test": task.test[1],
            "new_classes": task.new_classes,
            "kept_x": list(task.test[0][:8].split(2)),
            "kept_y": list(task.test[1][:8].split(2)),
        }
        monkeypatch.chdir(tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tcil.CalibrationWarning)
            for block in blocks_of(page, "python"):
                exec(compile(block, name_of(page), "exec"), space)

    @pytest.mark.parametrize("page", [p for p in PAGES if blocks_of(p, "toml")], ids=name_of)
    def test_study_files_are_settings(self, page):
        from tcil.experiments.config.settings import RunSettings

        lists = {"preset", "learners", "seeds", "datasets", "project"}
        for block in blocks_of(page, "toml"):
            assert tomllib.loads(block).keys() <= lists | RunSettings.model_fields.keys()

    def test_presets_in_the_table_are_those_of_the_command_line(self):
        from tcil.experiments.config.presets import PRESETS
        from tcil.experiments.config.settings import expand

        text = (DOCS / "benchmark.md").read_text().split("## Presets")[1].split("## Data")[0]
        rows = [
            [cell.strip(" `") for cell in line.strip("|").split("|")] for line in text.splitlines() if "| `" in line
        ]
        runs = {name: expand({"preset": name}, set())[0] for name in PRESETS}
        assert {row[0]: row[2:] for row in rows} == {
            name: [run.network, str(run.tasks), f"{run.memory:,}", str(run.validation), str(run.epochs)]
            for name, run in runs.items()
        }

    def test_own_parts_of_the_guide_run(self, tmp_path, monkeypatch):
        """The file that the guide builds up, block by block, in a run that uses all of it."""
        from command_lines import command

        (tmp_path / "my_parts.py").write_text("\n".join(blocks_of(DOCS / "guides" / "extend.md", "python")))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("tcil.experiments.reporting.show.present", lambda run, console, **more: None)
        parts = "--dataset my_parts:squares --learner my_parts:Mine --set network=my_parts:wide --set tasks=2"
        few = "--set epochs=1 --set memory=20 --set validation=20 --set validation_pool=20 --no-full-data --out runs"
        command("run", *parts.split(), *few.split(), "--calibrators", "vanilla,my_parts:halving", code=0)
        (stored,) = Path("runs").glob("*/results.json")
        assert "my_parts:halving" in json.loads(stored.read_text())["tasks"][0]["calibrators"]


def command_lines() -> list[tuple[str, str]]:
    """Every command of every page: of fenced and indented blocks, continued lines joined, and between backticks.

    Without comments. `tcil a | b` lists commands: it is two.
    """
    found = dict[tuple[str, str], None]()
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        blocks = "\n".join(blocks_of(page, "", "bash", "console")).replace("\\\n", " ").splitlines()
        indented = re.findall(r"^    +(\S.*)$", prose_of(page), flags=re.MULTILINE)
        for line in [*blocks, *indented, *inline_code_of(page)]:
            words = re.sub(rf"^{ENVIRONMENT}(torchrun [^|]* -m (?=tcil ))?", "", line.strip())
            if listed := re.match(r"tcil (\w+(?: \| \w+)+)(?: +#.*)?$", words):
                found |= {(name_of(page), f"tcil {name}"): None for name in listed[1].split(" | ")}
            elif re.match(r"(tcil|make|python|pip) ", words) and words != "python -m":
                found[name_of(page), re.sub(r" \\?\| .*", "", words)] = None
    return list(found)


@functools.cache
def commands_of_tcil() -> dict[str, set[str]]:
    """The options of every command of the command line."""
    from typer.main import get_command

    from tcil.experiments.cli.app import app

    return {
        name: {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for name, command in get_command(app).commands.items()
    }


@functools.cache
def names_of_options() -> dict[str, set[str]]:
    """What an option can be given by name."""
    from tcil.experiments.config.presets import PRESETS
    from tcil.experiments.config.settings import RunSettings
    from tcil.experiments.reproduction.schedules import SCHEDULES
    from tcil.experiments.runs.catalogue import CATALOGUE
    from tcil.incremental.learners.registry import LEARNERS

    return {
        "--preset": set(PRESETS),
        "--schedule": set(SCHEDULES),
        "--learner": set(LEARNERS),
        "--calibrators": set(CATALOGUE),
        "--set": set(RunSettings.model_fields),
    }


class TestCommands:
    @pytest.mark.parametrize(("page", "line"), command_lines())
    def test_exists(self, page, line):
        program, *words = line.split() if line.startswith("make ") else shlex.split(line, comments=True)
        getattr(self, program)([word for word in words if word != "&"])

    @staticmethod
    def tcil(words: list[str]) -> None:
        """Known to the command line, with its options and what they name; nothing is started."""
        if words[0].startswith("-"):
            return  # --help and the like, of the group itself
        assert {word for word in words[1:] if word.startswith("--")} <= commands_of_tcil()[words[0]] | {"--help"}
        for option, value in itertools.pairwise(words):
            if option not in names_of_options():
                continue
            told = re.sub({"--set": r"[=.].*", "--calibrators": r"\[.*?\]"}.get(option, "$^"), "", value)
            for name in told.split(","):
                if ":" not in name and not name.isupper() and name != "...":  # the reader's own code, a placeholder
                    assert name in names_of_options()[option], name

    def test_an_option_that_is_not_there_is_found(self):
        for line in ("run --presets x", "run --set epoch=3", "run --learner err", "sweep --calibrators ts,tcil", "fly"):
            with pytest.raises((AssertionError, KeyError)):
                self.tcil(line.split())

    @staticmethod
    def make(words: list[str]) -> None:
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
        assert words[0] in targets

    @staticmethod
    def python(words: list[str]) -> None:
        if words[0] == "-m":
            path = ROOT / words[1].replace(".", "/")
            if not path.name.isupper():  # a placeholder
                assert path.with_suffix(".py").exists() or (path / "__main__.py").exists() or words[1] == "tcil"
        elif words[0] == "-c":
            compile(words[1], "-c", "exec")
        else:
            assert (ROOT / words[0]).exists()

    @staticmethod
    def pip(words: list[str]) -> None:
        assert words[0] == "install"
        if not words[1].startswith("tcil[") and words[1] != "timm":  # what others may install without a clone of this
            assert words[1:3] == ["-c", "constraints.txt"]
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        named = re.findall(r"\[([\w,]+)\]", " ".join(words))
        assert {name for group in named for name in group.split(",")} <= extras.keys()


def anchors_of(page: Path) -> set[str]:
    """The anchors of headings, as GitHub and MyST make them."""
    text = page.read_text()
    for included in re.findall(r"```{include} (\S+)", text):
        text += (page.parent / included).read_text()
    headings = re.findall(r"^#+ +(.+?)\s*$", text, flags=re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", re.sub(r"[`*]|\]\([^)]*\)", "", heading.lower())) for heading in headings)
    return {word.strip().replace(" ", "-") for word in words}


class TestLinks:
    @pytest.mark.parametrize(
        "page", [*PAGES, *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md"))], ids=name_of
    )
    def test_lead_somewhere(self, page):
        for target in re.findall(r"\]\(([^)\s]+)\)", without_blocks(page)):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            assert there.exists(), target
            if anchor:
                assert anchor in anchors_of(there), target

    def test_pictures_have_words(self):
        """An alternative text of more than a word or two."""
        for page in PAGES:
            for words in re.findall(r"!\[([^\]]*)\]\(", without_blocks(page)):
                assert len(words.split()) >= 3, (page, words)

    def test_every_page_has_a_place_in_a_table_of_contents(self):
        """Pages that are written later stand among `all other pages` of the appendix."""
        named = {DOCS / "index.md"}
        for page in PAGES:
            for block in blocks_of(page, "{toctree}"):
                for line in block.splitlines():
                    entry = re.sub(r".*<(.*)>$", r"\1", line.removeprefix("optional ").strip())
                    folder = DOCS if entry.startswith("/") else page.parent
                    named |= set(folder.glob(f"{entry.lstrip('/')}.md"))
        assert {page for page in PAGES if page.parent not in (ROOT, DOCS)} <= named

    def test_the_readme_is_read_in_two_minutes(self):
        """At most 900 words of text and tables, without code, the targets of links and the rules of tables."""
        text = re.sub(
            r"\]\([^)]*\)|^\|[-:|]+\|$", "", FENCE.sub("", (ROOT / "README.md").read_text()), flags=re.MULTILINE
        )
        assert len(re.findall(r"[^\s|]+", text)) <= 900

    def test_long_pages_begin_with_a_summary(self):
        """More than three screens of 45 lines: before the first section there is a paragraph, not only a table."""
        for page in PAGES:
            text = page.read_text()
            if len([line for line in text.splitlines() if line.strip()]) > 135 and page != DOCS / "api" / "index.md":
                opening = FENCE.sub("", text.partition("\n## ")[0]).split("\n\n")[1:]
                assert any(len(part) > 100 and part[0] not in "|!<" for part in opening), page


class TestReference:
    @pytest.mark.parametrize(
        "module",
        ["tcil", "tcil.metrics", "tcil.results", "tcil.options", "tcil.decisions", "tcil.networks", "tcil.extending"],
    )
    def test_has_every_public_name(self, module):
        text = (DOCS / "api" / "index.md").read_text()
        parts = re.split(r"^\.\. currentmodule:: (\S+)$", text, flags=re.MULTILINE)
        listed = [
            name
            for part, entries in zip(parts[1::2], parts[2::2], strict=True)
            if part == module
            for name in re.findall(r"^   (\w+)$", entries, flags=re.MULTILINE)
        ]
        sections = {"__version__", "metrics", "networks"}  # modules have sections of their own
        public = set(pkgutil.resolve_name(module).__all__) - sections
        assert not public - set(listed), f"add to docs/api/index.md, under {module}"
        assert not set(listed) - public, f"remove from docs/api/index.md, under {module}"

    def test_learners_has_every_learner(self):
        from tcil.incremental.learners.registry import LEARNERS

        words = set(re.findall(r"\w+", (DOCS / "learners.md").read_text().lower()))
        assert not LEARNERS.keys() - words, "describe them in docs/learners.md"

    def test_every_column_of_the_tables_is_explained(self):
        from tcil.experiments.reporting.tables import COLUMNS, MEANING

        assert COLUMNS.keys() == MEANING.keys(), "COLUMNS and MEANING of reporting/tables.py"

    def test_troubleshooting_has_every_verdict(self):
        text = (DOCS / "start" / "troubleshooting.md").read_text()
        assert {verdict.value for verdict in tcil.options.Verdict} - {"ok"} <= set(re.findall(r"`(\w+)`", text))


class TestNumbers:
    @pytest.mark.parametrize("page", ["README.md", "docs/results/index.md"])
    def test_of_the_authors_checkpoints(self, page):
        """The table of measured ECEs is what research/checkpoints.py wrote."""
        results = json.loads((DOCS / "results" / "official-checkpoints.json").read_text())["results"]
        text = (ROOT / page).read_text()
        (header,) = re.findall(r"^\| method \| (.*) \|$", text, flags=re.MULTILINE)
        keys = {
            "all images": "ece",
            "mean": "ece",
            "noise floor": "noise_floor",
            "predicted old": "ece_predicted_old",
            "predicted new": "ece_predicted_new",
        }
        assert {"noise floor", "predicted old", "predicted new"} < set(header.split(" | "))
        for name, by_task in results.items():
            (row,) = re.findall(rf"^\| \**{re.escape(name)}\** \| (.*) \|$", text, flags=re.MULTILINE)
            for column, cell in zip(header.split(" | "), row.split(" | "), strict=True):
                task = column.removeprefix("task ")
                if task in by_task:
                    values = [by_task[task]["ece"]]
                else:
                    values = [found[keys[column]] for found in by_task.values() if found[keys[column]] is not None]
                assert cell == f"{100 * sum(values) / len(values):.2f}", (name, column)

    def test_of_the_readme_s_picture(self):
        results = json.loads((DOCS / "results" / "official-checkpoints.json").read_text())["results"]
        vanilla, scaled, t_cil, pact = (
            f"{100 * results[name]['8']['ece']:.1f} %" for name in ("Vanilla", "TS", "T-CIL", "PACT")
        )
        text = " ".join((ROOT / "README.md").read_text().split())
        assert f"from {vanilla} as trained to {scaled} with temperature scaling on new-task data" in text
        assert f"{t_cil} with T-CIL and {pact} with PACT" in text

    def test_of_how_many_test_images_tell(self):
        text = " ".join((DOCS / "guides/compare-fairly.md").read_text().split())
        found = json.loads((DOCS / "results" / "power.json").read_text())["share_with_a_difference"]
        large, small = ([f"{100 * share:.0f} %" for share in found[f"ECE {e} % to 0"].values()] for e in (15, 4))
        assert f"from 15 % to 0 is found in {large[0]} of cases with 300 images and {large[1]} with 2,000" in text
        assert f"from 4 % to 0 in {small[0].removesuffix(' %')} and {small[1]}." in text
        assert f"in at most {100 * max(found['equally good'].values()):.0f} % of cases" in text

    def test_of_the_overview_of_results(self):
        text = " ".join((DOCS / "results" / "index.md").read_text().split())
        official = json.loads((DOCS / "results" / "official-checkpoints.json").read_text())["results"]

        def mean(name, key="ece"):
            values = [row[key] for row in official[name].values() if row[key] is not None]
            return f"{100 * sum(values) / len(values):.1f}"

        groups = f"by predicted group {mean('PACT', 'ece_predicted_old')} and {mean('PACT', 'ece_predicted_new')}."
        told = f"checkpoints {mean('PACT')} ({mean('T-CIL')}; {mean('Optimal TS (oracle)')}), {groups}"
        assert told in text
        faults, fuzz = (json.loads((DOCS / "results" / name).read_text()) for name in ("faults.json", "fuzz.json"))
        assert f"{faults['in_all']} injected faults, nothing lost" in text
        assert faults["lost"] == 0
        assert f"{fuzz['cases']:,} random and hostile inputs" in text
        speed = re.search(r"literal / ours, authors' checkpoint \| ([\d.]+)", (DOCS / "speed.md").read_text())
        assert f"{float(speed[1]):.1f} times as fast as the literal procedure" in text
        tables = (DOCS / "results-short.md").read_text()  # written from the stored runs
        before, after = (
            re.search(rf"^\| {name} \| ([\d.]+) ±", tables, re.MULTILINE)[1] for name in ("Vanilla", "T-CIL")
        )
        assert f"brings ECE from {float(before):.1f} to {float(after):.1f} %" in text


@pytest.fixture
def in_this_process(monkeypatch):
    """Examples that start `python -m tcil` do it here, and no page is drawn: it would be most of their time."""
    import subprocess

    from command_lines import command

    def run(words, **options):
        assert words[1:3] == ["-m", "tcil"]
        command(*words[3:], code=0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("tcil.experiments.reporting.show.present", lambda run, console, **more: None)


@pytest.mark.training
@pytest.mark.xdist_group("gallery")
class TestGallery:
    """The examples, with networks that are hardly trained: `make docs` runs them as they are."""

    def test_there_are_eight(self):
        assert len(EXAMPLES) >= 8

    @pytest.mark.parametrize(
        "example",
        [
            pytest.param(path, marks=[pytest.mark.slow] * (path.stem not in QUICK_EXAMPLES), id=path.stem)
            for path in EXAMPLES
        ],
    )
    def test_runs(self, example, monkeypatch, in_this_process, tmp_path_factory):
        import matplotlib

        matplotlib.use("agg")
        import matplotlib.pyplot as plt
        import torch

        monkeypatch.setenv("TCIL_GALLERY_EPOCHS", "2")
        monkeypatch.setenv("TCIL_GALLERY_CACHE", str(tmp_path_factory.getbasetemp() / "gallery"))
        monkeypatch.syspath_prepend(str(example.parent))
        monkeypatch.delitem(sys.modules, "letters_tasks", raising=False)
        threads, state = torch.get_num_threads(), torch.get_rng_state()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                runpy.run_path(str(example), run_name="__main__")
            assert plt.get_fignums()
            assert all(figure.axes for figure in map(plt.figure, plt.get_fignums()))
        finally:
            plt.close("all")
            torch.set_num_threads(threads)
            torch.set_rng_state(state)
            sys.modules.pop("letters_tasks", None)


def test_site_needs_no_network():
    """What the site is configured with asks for no inventory, script or font from elsewhere."""
    text = (DOCS / "conf.py").read_text()
    assert "intersphinx" not in text
    assert "http" not in text


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(not (find_spec("sphinx") and find_spec("sphinx_gallery")), reason="needs the extra docs")
def test_site_builds(tmp_path):
    """Without a warning, without running the examples; every local file and anchor that a page names is there."""
    import subprocess
    from html.parser import HTMLParser
    from urllib.parse import unquote

    words = ["-b", "html", "-W", "--keep-going", "-q", "-D", "plot_gallery=0", "-d", tmp_path / "doctrees"]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *map(str, words), str(DOCS), str(tmp_path / "site")],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr

    class Page(HTMLParser):
        def __init__(self, path):
            super().__init__()
            self.targets, self.anchors = [], set()
            self.feed(path.read_text())

        def handle_starttag(self, tag, attrs):
            found = dict(attrs)
            self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
            self.targets += [found[name] for name in ("href", "src") if found.get(name)]

    pages = {path: Page(path) for path in (tmp_path / "site").rglob("*.html") if "_static" not in path.parts}
    assert len(pages) > 80
    for path, page in pages.items():
        for target in page.targets:
            if re.match(r"[a-z]+:|//", target):
                continue
            file, _, anchor = target.partition("#")
            there = (path.parent / unquote(file.partition("?")[0])).resolve() if file else path
            assert there.exists(), (path.name, target)
            if anchor and there in pages:
                assert unquote(anchor) in pages[there].anchors, (path.name, target)
