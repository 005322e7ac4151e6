"""Run folders and import folders that were damaged or edited: no traceback, nothing outside touched, nothing lost."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fuzz import oracles
from fuzz.cases import cases
from fuzz.commands import PATIENT, nothing_outside, run, workshop
from fuzz.files import BYTES, CANARY, JSON, Mutation, content_of, fresh_copy, mutations
from fuzz.strategies import BAD_LABELS, JUNK, ODD, UNUSABLE

pytestmark = PATIENT
TRAINING = ["run", "--dataset", "noisy-digits", "--set", "epochs=1", "--set", "tasks=2", "--set", "classes=4",
            "--set", "memory=20", "--set", "validation=20", "--calibrators", "vanilla,ts",
            "--no-full-data"]  # fmt: skip
TENSORS = ("logits", "indices", "model")
WHOLE = ("settings.json", "results.json", "environment.json", "data.json")
FILES = [
    *WHOLE,
    *(f"task-0{task}/{name}" for task in (0, 1) for name in ("results.json", *(f"{t}.safetensors" for t in TENSORS))),
]
TASKS = [[7, 3], [5, 1]]


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A workshop with `made`, a trained run, and `source`, a folder to import."""
    with workshop(tmp_path_factory.mktemp("folders") / "room") as folder:
        outcome = run([*TRAINING, "--out", "first"])
        assert outcome.exit_code == 0, outcome.output
        (made,) = Path("first").iterdir()
        shutil.move(made, folder / "made")
        (folder / "name").write_text(made.name)
        source = folder / "source"
        source.mkdir()
        record = {"tasks": TASKS, "dataset": "mine", "learner": "theirs", "seed": 3}
        (source / "tasks.json").write_text(json.dumps(record))
        for index in (0, 1):
            np.savez(source / f"task-0{index}.npz", **arrays(index))
        yield folder


def arrays(index: int) -> dict[str, np.ndarray]:
    """Logits of a task that know their labels a little."""
    rng = np.random.default_rng(index)
    order = [label for task in TASKS for label in task]
    labels = {"test": order[: 2 * index + 2], "valid": TASKS[index], "memory": order[: 2 * index + 2]}
    found = {}
    for name, own in labels.items():
        y = np.resize(own, 20)
        found[f"{name}_labels"] = y
        found[f"{name}_logits"] = rng.normal(size=(20, 4)) + 2 * np.eye(4)[[order.index(label) for label in y]]
    return found


def copy(room: Path) -> Path:
    """The trained run as it was, under the name that `tcil run` gave it."""
    return fresh_copy(room / "made", room / "runs" / (room / "name").read_text())


@cases(test=8, fuzz=700, shrink=False)
@given(mutations(FILES), st.sampled_from(["report", "compare", "keep"]))
@example(Mutation("results.json", "replace", 0.0, []), "report")
@example(Mutation("results.json", "deep", 0.0), "compare")
def test_reading(room, mutation, what):
    """Reports and comparisons of a run that was damaged."""
    folder = copy(room)
    mutation.apply(folder)
    before = content_of(folder)
    command = {
        "report": ["report", str(folder), "--out", "shown"],
        "compare": ["compare", str(folder), str(room / "made"), "--out", "shown"],
        "keep": ["report", str(folder), "--out", "shown", "--keep", "kept"],
    }[what]
    shutil.rmtree("shown", ignore_errors=True)
    shutil.rmtree("kept", ignore_errors=True)
    with nothing_outside(room):
        if oracles.command("run folders", run(command)):
            assert list(Path("shown").iterdir())
    assert content_of(folder) == before, "reading a run changed it"


@cases(test=5, fuzz=500, shrink=False)
@given(mutations(FILES))
@example(Mutation("settings.json", "replace", 0.2, f"{CANARY}:touch"))
def test_calibrating_anew(room, mutation):
    folder = copy(room)
    mutation.apply(folder)
    with nothing_outside(room):
        oracles.command("run folders", run(["calibrate", str(folder), "--calibrators", "ts"]))


@cases(test=4, fuzz=300, shrink=False)
@given(mutations(FILES))
def test_resuming(room, mutation):
    """The same command does what is missing. Damage (not a sealed edit) never changes the results."""
    folder = copy(room)
    wanted = (folder / "results.json").read_bytes()
    mutation.apply(folder)
    with nothing_outside(room):
        done = oracles.command("run folders", run([*TRAINING, "--out", "runs"]))
    if done and mutation.kind in BYTES and mutation.kind != "swap":
        assert (folder / "results.json").read_bytes() == wanted, f"other results after {mutation}"


LINKS = ["results.json", "settings.json", ".lock", "task-01", "task-01/results.json", "report.html", "environment.json"]


@cases(test=4, fuzz=60, shrink=False)
@given(st.sampled_from(LINKS), st.sampled_from(["run", "calibrate", "report"]))
@example(".lock", "calibrate")
@example("task-01", "run")
def test_links_lead_nowhere(room, name, what):
    """Where a file or a task's folder is a link to something outside, that is not written."""
    folder = copy(room)
    if (folder / name).is_dir():
        shutil.rmtree(folder / name)
        (folder / name).symlink_to(room / "outside" / "task")
    else:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(room / "outside" / "precious.txt")
    command = {"run": [*TRAINING, "--out", "runs"], "calibrate": ["calibrate", str(folder), "--calibrators", "ts"],
               "report": ["report", str(folder), "--out", "shown"]}[what]  # fmt: skip
    with nothing_outside(room):
        oracles.command("run folders", run(command))


# --- folders to import ------------------------------------------------------------------------------------------

SOURCES = ["tasks.json", "task-00.npz", "task-01.npz"]
EDITED = st.one_of(
    mutations(SOURCES),
    mutations(["tasks.json"], JSON),
    st.sampled_from(["dataset", "network", "learner"]).map(lambda key: Mutation(key, "name", 0.0, f"{CANARY}:touch")),
)


def imported(source: Path, out: Path) -> bool:
    shutil.rmtree(out, ignore_errors=True)
    before = content_of(source)
    done = oracles.command(
        "import folders", run(["import", str(source), "--out", str(out), "--calibrators", "vanilla,ts"])
    )
    assert content_of(source) == before
    if not done:
        assert not out.exists() or not content_of(out), "refused, but something was written"
    return done


@cases(test=6, fuzz=900, shrink=False)
@given(EDITED)
@example(Mutation("tasks.json", "deep", 0.0))
@example(Mutation("dataset", "name", 0.0, f"{CANARY}:touch"))
@example(Mutation("tasks.json", "replace", 0.8996621370315552, "\ud800"))  # failed in the page, when all was written
def test_importing(room, mutation):
    source = fresh_copy(room / "source", room / "sources" / "theirs")
    if mutation.kind == "name":
        record = json.loads((source / "tasks.json").read_text())
        record |= {"network": "small_cnn", mutation.file: mutation.value}
        (source / "tasks.json").write_text(json.dumps(record))
    else:
        mutation.apply(source)
    with nothing_outside(room):
        imported(source, room / "imports")


NAMES = [f"{part}_{kind}" for part in ("test", "valid", "memory") for kind in ("logits", "labels")]


@cases(test=6, fuzz=500, shrink=False)
@given(
    st.sampled_from(NAMES),
    st.one_of(st.sampled_from(sorted(UNUSABLE) + sorted(ODD)), st.sampled_from(sorted(BAD_LABELS)), JUNK),
)
def test_importing_odd_arrays(room, name, oddity):
    source = fresh_copy(room / "source", room / "sources" / "theirs")
    content = arrays(1)
    change = (
        (BAD_LABELS if name.endswith("labels") else UNUSABLE | ODD).get(oddity) if isinstance(oddity, str) else None
    )
    value = change(content[name]) if change is not None else oddity
    try:
        np.savez(source / "task-01.npz", **{**content, name: np.asarray(value)})
    except (ValueError, TypeError, RuntimeError, OverflowError, AttributeError, pickle.PicklingError):
        return  # no array, or none that numpy can write
    usable = change is None or oddity not in UNUSABLE
    with nothing_outside(room):
        done = imported(source, room / "imports")
    if done and not usable and oddity not in ("masked array",):  # .npz files know no masks
        raise AssertionError(f"{name} with {oddity} was imported")


@cases(test=4, fuzz=120, shrink=False)
@given(
    st.sampled_from(
        ["[/b]", "[red]x", "runs[old]", "ü ñ", "a b", "-x", "x" * 200, "$HOME", "%s", "it's", "a\nb", "[bold]"]
    )
)
@example("[/b]")
def test_names_of_folders(room, name):
    """Whatever a folder is called, what is said of it is its name."""
    target = room / "odd" / name.replace("/", "|") if "/" not in name else room / "odd" / Path(name)
    shutil.rmtree(room / "odd", ignore_errors=True)
    target.parent.mkdir(parents=True)
    fresh_copy(room / "source", target)
    out = room / "odd" / "out" / name
    outcome = run(["import", str(target), "--out", str(out), "--calibrators", "vanilla,ts"])
    assert oracles.command("import folders", outcome), outcome.output
    assert str(out) in outcome.output.replace("\n", "") or "\n" in name, outcome.output[-300:]
    missing = str(room / "odd" / "missing" / name)
    outcome = run(["report", missing])
    assert not oracles.command("run folders", outcome)
    assert missing.replace("\n", "") in outcome.stderr.replace("\n", "").replace("error: ", ""), outcome.stderr
