"""Image passes by hand, speeds, and the time left of all runs together."""

from __future__ import annotations

import pytest
import torch

from tcil.experiments.config.settings import build
from tcil.experiments.scheduling import cost
from tcil.experiments.scheduling.cost import (
    A100,
    Outlook,
    Passes,
    count_passes,
    given_speed,
    passes_as_released,
)
from tcil.experiments.scheduling.job import Job
from tcil.experiments.scheduling.status import Status
from tcil.extending import ER, TaskData
from tcil.incremental.learners import LEARNERS, make_learner
from tcil.incremental.networks import small_cnn

SMALL = {
    "preset": "cifar100", "tasks": 2, "classes": 20, "memory": 200, "epochs": 10, "validation": 100,
    "validation_pool": 100,
}  # fmt: skip


def test_a_busy_machine_does_not_make_runs_look_long(monkeypatch):
    """There a step of several threads takes many times as long; the time of one processor stays what it is."""
    monkeypatch.setattr(cost, "step_seconds", lambda *args: 1e6)
    assert cost.seconds_per_image.__wrapped__("small_cnn", 8, (1, 8, 8)) < 100


def test_the_number_of_threads_is_left_as_it_is():
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        cost.seconds_per_image.__wrapped__("small_cnn", 8, (1, 8, 8))
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


class Twice(ER):
    @classmethod
    def passes(cls, size, options):
        return {**super().passes(size, options), "again": 7.0}


def passes(learner, **more):
    settings = build({**SMALL, "learner": learner, **more})
    return [dict(task) for task in count_passes(settings, [10, 10], [4900, 4900]).tasks]


class TestPasses:
    def test_by_hand(self):
        """Task 1 has 4,900 new rows and 200 exemplars, 20 of each class; balanced data have 400 rows."""
        assert passes("er") == [{"train": 49_000}, {"train": 51_000}]
        assert passes("wa")[1] == {"train": pytest.approx(51_000 * 4 / 3)}
        assert passes("eeil")[1] == pytest.approx({"train": 51_000 * 4 / 3, "finetune": 30 * 400 * 4 / 3})

    def test_frozen_extractors(self):
        """With crops in every epoch; without, each image and its mirror image once."""
        assert passes("der")[1] == pytest.approx({"train": 51_000 * 4 / 3, "finetune": 30 * 400 * 2 / 3})
        kept = passes("der", crop=0)[1]
        assert kept == pytest.approx({"train": 51_000 + 2 * 5_100 / 3, "finetune": 2 * 400 * 2 / 3})

    @pytest.mark.parametrize(
        ("more", "views"),
        [({}, 10), ({"crop": 0}, 2), ({"dataset": "letters"}, 1), ({"dataset": "letters", "crop": 2}, 10)],
    )
    def test_a_teacher_sees_each_view_once_where_nothing_is_cropped(self, more, views):
        """CIFAR-100 is cropped and mirrored unless told otherwise, letters are neither."""
        assert passes("wa", **more)[1] == {"train": pytest.approx(51_000 + views * 5_100 / 3)}

    def test_online_and_without_gradients(self):
        """Online, each new image once with an exemplar beside it; class means only look at each new image."""
        online = passes("er", learner_options={"online": True})
        assert online == [{"train": 4_900}, {"train": 9_800}]
        for learner in ("ncm", "ranpac"):
            assert passes(learner, memory=0) == [{"train": pytest.approx(4_900 / 3)}] * 2

    def test_bias_correction(self):
        """A tenth is held out of stage one; stage two runs the network on a tenth of the balanced data."""
        expected = {"train": 0.9 * 51_000 * 4 / 3, "finetune": 0.1 * 60 * 400 / 3}
        assert passes("bic") == [{"train": 49_000}, pytest.approx(expected)]

    @pytest.mark.parametrize("learner", LEARNERS)
    def test_every_stage_of_a_learner_is_counted(self, learner):
        """The names of what is counted are those of the stages that it trains: progress is told by them."""
        rows = torch.arange(40)
        first = TaskData(0, range(2), rows[:20], {}, rows % 4, (range(2),))
        kept = {column: rows[:20][rows[:20] % 4 == column] for column in range(2)}
        later = TaskData(1, range(2, 4), rows[20:], kept, rows % 4, (range(2), range(2, 4)))
        made = make_learner(learner, small_cnn, 4, seed=1)
        counted = passes(learner, **({"memory": 0} if not made.rehearses else {}))
        made.begin_task(first)
        assert made.stages(first) == tuple(counted[0])
        assert set(made.stages(later)) == set(counted[1])

    def test_a_users_own_learner_says_what_it_costs(self):
        assert passes(f"{__name__}:Twice") == [{"train": 49_000, "again": 7}, {"train": 51_000, "again": 7}]
        with pytest.raises(ValueError, match="option of learner er: got 'onlin'"):
            passes("er", learner_options={"onlin": True})

    def test_as_released_is_as_counted(self):
        settings = build(SMALL)
        assert passes_as_released(settings) == count_passes(settings, [10, 10], [4900, 4900])
        drawn = build({"preset": "letters", "train_per_class": 60, "validation": 20, "validation_pool": 20})
        assert passes_as_released(drawn) == count_passes(drawn, [4] * 5, [220] * 5)
        assert len(passes_as_released(build({"dataset": "image-folder", "tasks": [2, 3]})).tasks) == 2

    def test_parts(self):
        one = Passes(({"train": 10.0}, {"train": 20.0, "finetune": 5.0}))
        assert (one.total, one.first(1).total, one.first(None).total, one.after(1)) == (35, 10, 35, 25)
        assert [one.before(*place) for place in ((0, "train", 0.5), (1, "train", 0.5), (1, "finetune", 1))] == [
            5,
            20,
            35,
        ]
        assert one.before(1, "calibrate", 0) == 35


def test_speeds():
    assert A100.seconds("resnet32", 20_000) == 2
    assert given_speed(["resnet32=100", "resnet18=10"]).seconds("resnet18", 100) == 10
    for wrong in ("resnet32", "resnet32=fast", "resnet32=0", "resnet32=inf"):
        with pytest.raises(ValueError, match=r"^images-per-second: got .* expected NETWORK=NUMBER"):
            given_speed([wrong])
    with pytest.raises(ValueError, match="network: got 'resnet31'"):
        given_speed(["resnet31=5"])


def test_a_precision_without_a_measured_speed_still_has_a_share_that_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr(cost, "seconds_per_image", lambda *kind: float("nan"))
    jobs = [Job(build({**SMALL, "network": name}), tmp_path, None) for name in ("resnet32", "small_resnet")]
    share, left = Outlook(jobs).left(dict.fromkeys(jobs, ("queued", None)))
    assert (share, left) == (0.0, None)


def test_time_left_of_all_runs(tmp_path):
    """Two equal runs, of which the first is measured from its first progress on; what was found done is no measure."""
    time = [0.0]
    first, second = (Job(build({**SMALL, "seed": seed}), tmp_path, full_data=False) for seed in (1, 2))
    outlook = Outlook([first, second], now=lambda: time[0])
    states = {first: ("queued", None), second: ("queued", None)}

    def at(seconds, epochs, of=1000):
        time[0] = seconds
        states[first] = ("running", Status("running", 0, 2, "train", epochs, of))
        return outlook.left(states)

    assert outlook.left(states) == (0.0, None)
    assert at(200.0, 0) == (0.0, None)  # the process has started
    done, left = at(300.0, 100)
    assert (done, left) == (pytest.approx(490 / 20_000), None)  # 100 s, with the time to read the data
    done, left = at(350.0, 600)
    assert done == pytest.approx(2_940 / 20_000)
    assert left == pytest.approx(50 * (20_000 - 2_940) / (2_940 - 490))
    assert at(380.0, 600)[1] == left  # nothing is new
    states[second] = ("running", None)
    assert outlook.left(states)[1] == pytest.approx(left / 2)  # two at once
    time[0] = 600.0
    over = {first: ("done", None), second: ("queued", None)}
    assert outlook.left(over) == (0.5, pytest.approx(400))  # 400 s from its start
    assert outlook.left({first: ("done", None), second: ("failed", None)}) == (1.0, 0.0)
    for job in (first, second):
        (job.folder / "task-00").mkdir(parents=True)
        (job.folder / "task-00" / "results.json").write_text("{}")
    later = Outlook([first, second], now=lambda: time[0])
    share, left = later.left({first: ("queued", None), second: ("queued", None)})
    assert (share, left) == (pytest.approx(49_000 / 100_000), None)


def test_time_left_of_a_run_that_resumes_inside_a_task(tmp_path):
    """Epochs that an earlier process trained are done at once, and tell no speed."""
    time, job = [0.0], Job(build(SMALL), tmp_path, full_data=False)
    outlook = Outlook([job], now=lambda: time[0])

    def at(seconds, task, epochs, phase="train"):
        time[0] = seconds
        outlook.left({job: ("running", Status("running", task, 2, phase, epochs, 1000))})
        return outlook.left_of(job)

    assert at(0.0, 0, 0) is None
    assert at(10.0, 0, 800) is None  # found
    assert at(110.0, 0, 900) == pytest.approx(100 * (10_000 - 4_410) / 490)
    assert at(210.0, 0, 0, "calibrate") == pytest.approx(200 * (10_000 - 4_900) / 980)
    assert at(300.0, 1, 0, "analyse") is None  # what that costs is not known


def test_no_time_left_is_told_from_too_little(tmp_path):
    """A first epoch under load took a hundred times as long as those after it."""
    time = [0.0]
    jobs = [Job(build({**SMALL, "seed": seed}), tmp_path, full_data=False) for seed in range(10)]
    outlook = Outlook(jobs, now=lambda: time[0])

    def at(seconds, epochs):
        time[0] = seconds
        now = Status("running", 0, 2, "train", epochs, 100)
        return outlook.left({job: ("running" if job is jobs[0] else "queued", now) for job in jobs})[1]

    assert at(0.0, 0) is None
    assert at(1000.0, 1) is None  # one epoch, after imports and data
    assert at(1005.0, 2) is None  # 5 s of training
    assert at(1020.0, 4) is None  # 20 s, but three epochs of 2,000
    assert at(1200.0, 40) == pytest.approx(200 * (100_000 - 1_960) / 1_911)
