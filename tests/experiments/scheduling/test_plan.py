"""What a set of runs will cost, where data are missing and where a dataset is at fault."""

from __future__ import annotations

import pytest

from tcil.experiments.config.settings import build
from tcil.experiments.scheduling import cost
from tcil.experiments.scheduling.cost import Speed, passes_as_released
from tcil.experiments.scheduling.plan import Planned, Standing, plan
from tcil.incremental import arithmetic

OWN = """
from tcil.incremental.data.datasets import load_dataset

def missing(folder):
    return load_dataset("cifar100")

def wrong(folder):
    raise ValueError("data: got nothing that this function likes")
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_plans.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))


def cells(name):
    (row,) = plan([Planned(build({"dataset": name, "preset": "digits"}))], None).rows
    return [cell.words for cell in row.cells]


def test_missing_data_of_ones_own_leave_the_cost_unknown(own):
    assert cells("own_plans:missing")[1:] == ["to run", "", "data missing", "unknown"]


def test_missing_data_that_are_known_count_as_released():
    """With the image passes of the data themselves, and a note that says so."""
    missing = build({"preset": "cifar100-mini"})
    grid = plan([Planned(missing, until=2)], None, Speed("the moon", {missing.network: 10.0}, "guessed"))
    assert grid.rows[0].cells[2].words == "2 of 5"
    assert grid.rows[0].cells[3].words == f"{passes_as_released(missing).first(2).total:,.0f}"
    assert any(note.startswith("Data are missing, so that images are counted as released") for note in grid.notes)
    assert any(note.startswith("On the moon: about") for note in grid.notes)
    with pytest.raises(ValueError, match=r"network: got 'small_cnn' .* a network for images of shape \(3, 32, 32\)"):
        cells("cifar100")


@pytest.mark.parametrize(
    ("more", "named"),
    [({"classes": 500}, "classes"), ({"validation_pool": 60_000}, "validation"), ({"tasks": [60, 60]}, "tasks")],
)
def test_settings_that_cannot_run_have_no_cost_where_data_are_missing_either(more, named):
    with pytest.raises(ValueError, match=f"{named}.*: got"):
        plan([Planned(build({"preset": "cifar100", **more}))], None)


def test_a_precision_that_this_processor_lacks_leaves_the_hours_of_another_machine(monkeypatch):
    """The network may train there; here it has no time."""
    monkeypatch.setattr(arithmetic, "death_by", lambda precision: "SIGILL" if precision == "bf16" else "")
    monkeypatch.setattr(cost, "death_by", arithmetic.death_by)
    cost.seconds_per_image.cache_clear()
    for settings in (build({"preset": "cifar100-mini", "precision": "bf16"}), build({"precision": "bf16"})):
        speed = Speed("the moon", {settings.network: 10.0}, "guessed")
        grid = plan([Planned(settings)], None, speed)
        assert grid.rows[0].cells[4].words == "unknown"
        passes = grid.rows[0].cells[3].words
        assert grid.notes[0].startswith(
            f"1 training, {passes} image passes; this machine's processor does not train in"
        )
        assert any(note.startswith("On the moon: about") for note in grid.notes)
    cost.seconds_per_image.cache_clear()


def test_why_given_data_cannot_be_read_is_told(tmp_path):
    for name in ("oak", "elm"):
        (tmp_path / "train" / name).mkdir(parents=True)
        (tmp_path / "train" / name / "a.png").write_bytes(b"no image")
    (tmp_path / "test").mkdir()
    grid = plan([Planned(build({"preset": "image-folder"}))], tmp_path)
    assert grid.rows[0].cells[3].words == "no data"
    assert "a.png" in grid.notes[0]
    assert "tcil download" not in grid.notes[0]


def test_any_other_error_is_told(own):
    """Whatever its text looks like."""
    with pytest.raises(ValueError, match="nothing that this function likes"):
        cells("own_plans:wrong")


def test_first_tasks_what_is_done_and_another_machine():
    settings = build({"dataset": "digits", "epochs": 2, "tasks": 5, "memory": 60})
    trainings = [Planned(settings, job=7, until=3, done=1), Planned(settings, Standing.FINISHED)]
    speed = Speed("the moon", {settings.network: 10.0}, "guessed")
    grid = plan(trainings, None, speed, ["Something is left out."])
    first, second = ([cell.words for cell in row.cells] for row in grid.rows)
    assert grid.rows[0].label.startswith("7 digits-er")
    assert first[2] == "3 of 5, 1 done"
    passes = int(first[3].replace(",", ""))
    assert 0 < passes < 2 * 1800
    assert first[5] == f"{passes // 10 // 60} min {passes // 10 % 60} s"
    assert second[1:] == ["finished", "", "", "", ""]
    assert grid.columns[-1] == "on the moon"
    assert any(note.startswith("On the moon: about") and "(guessed)" in note for note in grid.notes)
    assert grid.notes[-1] == "Something is left out."


def test_no_time_on_another_machine_where_data_are_missing(own):
    """It would be that of no training: 0 seconds."""
    settings = build({"dataset": "own_plans:missing", "preset": "digits"})
    grid = plan([Planned(settings)], None, Speed("the moon", {settings.network: 10.0}, "guessed"))
    assert not any(note.startswith("On the moon") for note in grid.notes)
