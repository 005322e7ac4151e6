"""Command lines: whatever is typed, a documented exit code and one paragraph. Nothing is trained or fetched."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import tcil.experiments.cli.run
import tcil.experiments.reproduction.reproduce
import tcil.experiments.scheduling.sweep
from fuzz import oracles
from fuzz.cases import cases
from fuzz.commands import run, workshop

ENTRY = "command lines"
WORDS = st.one_of(
    st.sampled_from(
        ["", "-", "--", "0", "-1", "1", "1,2", "1,,2", "1e9", "nan", "x", "er", "digits", "cifar100", "ts"]
    ),
    st.sampled_from(
        ["ts[solver=sgd]", "ts[solver=x]", "ts[", "ts[a]", "t-cil[tolerance=]", "ts,ts", "[/b]", "[red]", "x[/]"]
    ),
    st.sampled_from(
        ["math:sqrt", "no.such:thing", "a:", ":b", "a:b:c", "json:nothing", "cpu", "cuda", "meta", "csv", "here"]
    ),
    st.sampled_from(
        ["missing", "file.txt", "here/there", "99999999999999999999", "1" * 400, "ü", "\u202e", "a\nb", "%", "$x"]
    ),
    st.text(st.characters(blacklist_characters="\x00", blacklist_categories=["Cs"]), max_size=6),
)
SETTINGS = st.one_of(
    st.sampled_from(["learner_options=5", "preset=[]", "network=math:sqrt", "epochs=1e400", "a",
                     "epochs=99999999999999999999", "=", "=1", "a.b.c=1", "learner_options.head=growing",
                     "learner_options.head.x=1", "seed=-1",
                     "tasks=[]", "tasks=[1,2]", "tasks={}", "dataset=5", "learner=null", "lr=NaN", "lr=Infinity",
                     "lr=-1", "milestones=5", "seeds=[]", "seeds=5", "seeds=[null]", "learners=x", "classes=1",
                     "preset=no",
                     "validation=true", "memory=1.5", "optimizer=x", "reserve=1.5", "preset={}", "dataset=[/b]"]),
    st.tuples(WORDS, WORDS).map("=".join),
)  # fmt: skip
OPTIONS = {
    "run": ["--preset", "--dataset", "--learner", "--seeds", "--data", "--out", "--reserve", "--calibrators",
            "--device", "--log", "--job", "--on", "--cpus-per-run", "--gpus-per-run", "--at-once", "--ray-address"],
    "plan": ["--preset", "--dataset", "--learner", "--seeds", "--out", "--reserve", "--data", "--calibrators"],
    "calibrate": ["--data", "--calibrators", "--redraw"],
    "import": ["--out", "--data", "--calibrators"],
    "report": ["--out", "--keep"],
    "compare": ["--out"],
    "reproduce": ["--schedule", "--data", "--out", "--report", "--kept", "--seeds", "--device", "--on", "--at-once"],
    "download": ["--data"],
    "datasets": [], "learners": [], "calibrators": [], "settings": [], "networks": [], "nonsense": [],
}  # fmt: skip
OPTIONS["sweep"] = [option for option in OPTIONS["run"] if option != "--job"]
ARTIFACTS = ["list", "all", "claims", "grid", "policies", "epsilon-gap"]


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a file and an empty folder; what would take long only says that it was asked."""
    patch = pytest.MonkeyPatch()
    patch.setattr(tcil.experiments.cli.run, "run_here", _nothing)
    patch.setattr(tcil.experiments.scheduling.sweep, "run_jobs", _nothing)
    patch.setattr(tcil.experiments.reproduction.reproduce, "run_jobs", _nothing)
    patch.setattr(urllib.request, "urlopen", _no_network)
    with workshop(tmp_path_factory.mktemp("lines") / "room") as folder:
        (folder / "file.txt").write_text("nothing\n")
        (folder / "here").mkdir()
        yield folder
    patch.undo()


def _nothing(*args: Any, **kwargs: Any) -> int:
    return 0


def _no_network(*args: Any, **kwargs: Any) -> Any:
    raise OSError("no network in tests")


@st.composite
def lines(draw: st.DrawFn) -> list[str]:
    """A command with arguments and options that may or may not be its own."""
    command = draw(st.sampled_from(sorted(OPTIONS)))
    words = [command]
    if command == "reproduce":
        words += [draw(st.one_of(st.sampled_from(ARTIFACTS), WORDS)), draw(st.sampled_from(["--dry-run", "--render"]))]
        words += ["--report", "shown"]
    elif command == "download":
        words += [draw(WORDS.filter(lambda word: word not in ("cifar10", "cifar100", "tiny-imagenet")))]
    elif command in ("run", "plan", "sweep"):
        words += draw(st.lists(st.sampled_from(["file.txt", "missing.toml", "here"]), max_size=1))
        for _ in range(draw(st.integers(0, 2))):
            words += ["--set", draw(SETTINGS)]
    else:
        words += draw(st.lists(WORDS, max_size=2))
    for option in draw(st.lists(st.sampled_from(OPTIONS[command] or ["--help", "--no"]), max_size=3)):
        words += [option, draw(WORDS)]
    return words


@cases(test=80, fuzz=2500)
@given(lines())
@example(["run", "--dry-run", "--set", "learner_options=5"])
@example(["plan", "--set", "preset=[]"])
@example(["run", "--dry-run", "--set", "network=math:sqrt"])
@example(["download", "cifar100", "--data", "file.txt"])
@example(["report", "[/b]"])
@example(["plan", "--set", "epochs=99999999999999999999"])
@example(["plan", "--learner", "nonsense"])
@example(["reproduce", "nonsense", "--dry-run"])
@example(["plan", "--set", "a=" + "[" * 100_000])
@example(["reproduce", "grid", "--dry-run", "--seeds", "99999999999999999999"])
def test_any_line(room, words):
    outcome = run(words)
    oracles.command(ENTRY, outcome)
    assert (room / "file.txt").read_text() == "nothing\n"


@cases(test=10, fuzz=500)
@given(st.lists(WORDS, max_size=4))
def test_any_words(room, words):
    oracles.command(ENTRY, run(words))
