"""A run stopped after each thing it stored, and started again each time, leaves the same bytes as one never stopped."""

from __future__ import annotations

import pytest

import tcil.experiments.runs.store as store_module
from tcil.experiments.config.settings import build
from tcil.experiments.runs.run import Run

TASKS, EPOCHS, TUNING = 3, 2, 2
CALIBRATORS = ("vanilla", "ts", "t-cil", "first-task-ts")
VARIANTS = {
    "sgd": {},
    "adam": {"optimizer": "adam", "lr": 0.01},
    "growing": {"head": "growing"},
    "cycle": {"shape": "one-cycle"},
}
# What is part of `make test`; the others are in `make test-slow`.
IN_ALL_RUNS = {("er", "sgd"), ("er", "adam"), ("eeil", "sgd"), ("wa", "sgd"), ("der", "sgd"), ("der", "growing")}
# A head that is clamped; kept features and logits of a teacher; a scaled loss; a parameter that comes and goes.
OTHERS = [
    ("wa", {"restrict_head": True}), ("der", {"crop": 0}), ("eeil", {"crop": 0}), ("er", {"precision": "fp16"}),
    ("bic", {"held_out": 0.3}),
]  # fmt: skip


def short(learner, optimizer="sgd", lr=0.1, shape="steps", crop=None, precision="fp32", **options):
    if learner in ("eeil", "der", "bic"):
        options |= {"finetune_epochs": TUNING, "finetune_milestones": [1]}
    return build(
        {
            "dataset": "digits", "learner": learner, "learner_options": options, "optimizer": optimizer, "lr": lr,
            "tasks": TASKS, "epochs": EPOCHS, "milestones": [1], "memory": 40, "lr_shape": shape,
            "crop": crop, "precision": precision,
        }
    )  # fmt: skip


def places(learner):
    """Where a run has just stored something: (task, stage, epochs done), and (task, "done", 1) with the results."""
    for task in range(TASKS):
        yield from ((task, "train", epoch) for epoch in range(1, EPOCHS + 1))
        if task > 0 and learner in ("eeil", "der", "bic"):
            yield from ((task, "finetune", epoch) for epoch in range(1, TUNING + 1))
        yield task, "done", 1


def contents(folder):
    """All that the run left, but for the environment, which has times."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "environment.json")
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


class Stopped(Exception):
    pass


def restart_until_it_ends(settings, folder, dataset, listener, stops, at_most):
    """Start the run again after each stop; stop trying after more than `at_most`."""
    while len(stops) <= at_most:
        try:
            return Run(settings, folder, dataset=dataset).execute(CALIBRATORS, listener)
        except Stopped:
            continue
    return None


def assert_same_files(cut, whole):
    assert sorted(cut) == sorted(whole)
    assert [name for name in whole if cut[name] != whole[name]] == []


@pytest.mark.parametrize(
    ("learner", "variant"),
    [
        *(
            pytest.param(learner, VARIANTS[name], marks=[pytest.mark.slow] * ((learner, name) not in IN_ALL_RUNS))
            for learner in ("er", "eeil", "wa", "der")
            for name in VARIANTS
        ),
        *OTHERS,
    ],
)
def test_resuming_gives_the_same_bytes(learner, variant, digits, tmp_path):
    """Stopped after every epoch of every stage and after every task, and started again each time."""
    settings = short(learner, **variant)
    expected, stops = list(places(learner)), []

    def stop(progress):
        place = (progress.task, progress.phase, progress.done)
        stored = progress.loss is not None or progress.phase == "done"
        if not stored or (progress.phase == "done" and place in stops):  # finished tasks report again that they are
            return
        stops.append(place)  # an epoch that was stored and is trained again would stand here twice
        raise Stopped

    Run(settings, tmp_path / "whole", dataset=digits).execute(CALIBRATORS)
    results = restart_until_it_ends(settings, tmp_path / "cut", digits, stop, stops, len(expected))
    assert stops == expected
    assert len(stops) == {"er": 9, "wa": 9, "eeil": 13, "der": 13, "bic": 13}[learner]
    tuned = [task for task, stage, _ in stops if stage == "finetune"]
    assert tuned == ([1, 1, 2, 2] if learner in ("eeil", "der", "bic") else [])
    assert results is not None
    assert_same_files(contents(tmp_path / "cut"), contents(tmp_path / "whole"))


def test_a_calibrator_that_joins_later_leaves_the_history_of_the_others(digits, tmp_path):
    """PACT remembers earlier tasks: what it knew after two must not be replaced by what it knew after one."""
    settings = short("er")
    whole = Run(settings, tmp_path / "whole", dataset=digits).execute(["ts", "pact"])
    Run(settings, tmp_path / "joined", dataset=digits, until=2).execute(["pact"])
    joined = Run(settings, tmp_path / "joined", dataset=digits).execute(["ts", "pact"])
    assert len({task.history["pact"]["model"] for task in whole.tasks}) == TASKS
    for one, other in zip(whole.tasks, joined.tasks, strict=True):
        assert other.history == one.history
        assert other.calibrators == one.calibrators


def test_stopped_after_every_file(digits, tmp_path, monkeypatch):
    """Also where nothing is reported: a stage file beside the last stage's epoch, a network beside both, and so on."""
    settings, folder = short("der"), tmp_path / "cut"
    Run(settings, tmp_path / "whole", dataset=digits).execute(CALIBRATORS)
    ending = ["model.safetensors", "indices.safetensors", "logits.safetensors", "results.json"]
    epochs, tuning = ["epoch.safetensors"] * EPOCHS, ["epoch.safetensors"] * TUNING
    files = [epochs + ending, *[[*epochs, "stage.safetensors", *tuning, *ending]] * (TASKS - 1)]
    expected = [f"task-{task:02d}/{name}" for task, names in enumerate(files) for name in names]
    expected = ["settings.json", "data.json", *expected, "results.json"]
    stops, write = [], store_module.replace_file

    def write_and_stop(path, content):
        write(path, content)
        place = (str(path.relative_to(folder)), content)
        if path.name != "environment.json" and place not in stops:
            stops.append(place)
            raise Stopped

    monkeypatch.setattr(store_module, "replace_file", write_and_stop)
    results = restart_until_it_ends(settings, folder, digits, lambda progress: None, stops, len(expected))
    assert [name for name, _ in stops] == expected
    assert results is not None
    assert_same_files(contents(folder), contents(tmp_path / "whole"))
