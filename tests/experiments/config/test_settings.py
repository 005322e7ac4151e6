"""Settings: keys that stay, and what the environment may say for one more version."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest

from tcil.experiments.config.presets import PRESETS
from tcil.experiments.config.settings import RunSettings, build, expand, key_of, own_settings, stored_key
from tcil.experiments.reproduction.schedules import editions
from tcil.experiments.runs.results import StoredSettings
from tcil.incremental.learners import make_learner
from tcil.incremental.networks import small_cnn
from tcil.incremental.schedule import Schedule

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"dataset": "noisy-digits"}, "2406c4241bc4"),
        ({"preset": "cifar100"}, "343b21a69842"),
        ({"preset": "image-folder"}, "f5755a8ba7ab"),
        ({"preset": "image-folder", "image_side": 64}, "c47ebe61f662"),
        ({"dataset": "noisy-digits", "precision": "fp32"}, "2406c4241bc4"),
    ],
)
def test_keys_are_those_of_stored_runs(values, key):
    """Run folders are named by them: another key would train everything anew."""
    assert build(values).key == key


@pytest.mark.parametrize(
    ("learner", "seed", "key"),
    [
        ("er", 1, "e0ae3a305ab4"),
        ("er", 2, "540c48841771"),
        ("eeil", 1, "a50e56c75b52"),
        ("wa", 1, "7a85fa5d7bde"),
        ("wa", 2, "82edc2c36e0b"),
        ("der", 1, "4de7010294e6"),
    ],
)
def test_stored_runs_are_of_the_preset_of_0_2(learner, seed, key):
    """And are not taken for runs of the present one."""
    assert build({"preset": "cifar100-mini-0.2", "learner": learner, "seed": seed}).key == key
    assert build({"preset": "cifar100-mini", "learner": learner, "seed": seed}).key != key
    (kept,) = (ROOT / "docs/results/runs").glob(f"cifar100-{learner}-seed{seed}-{key}.json.gz")
    stored = own_settings(json.loads(gzip.decompress(kept.read_bytes()))["settings"])
    assert stored.key == key
    assert "restrict_head" not in stored.learner_options


class TestLearnersAsTheOriginals:
    """See docs/learners.md."""

    def test_wa_is_restricted_in_every_preset_but_those_with_stored_runs(self):
        without = {p for p in PRESETS if not build({"preset": p, "learner": "wa"}).learner_options.get("restrict_head")}
        assert without == {"digits", "cifar100-mini-0.2"}

    def test_turned_off_it_is_the_run_from_before_there_was_the_option(self):
        free = {"learner": "wa", "learner_options": {"restrict_head": False, "head": "growing"}}
        assert build({"preset": "cifar100", **free}).learner_options == {"head": "growing"}
        values = {"preset": "cifar100-mini", "learner": "wa", "weight_decay": 2e-4}
        free = build({**values, "learner_options": {"restrict_head": False}})
        assert free.key == "7a85fa5d7bde"  # stored in docs/results/runs

    def test_wa_at_20_tasks(self):
        assert build({"preset": "cifar100", "learner": "wa", "tasks": 20}).learner_options == {"restrict_head": True}

    @pytest.mark.parametrize("edition", editions("short"), ids=lambda edition: edition.name)
    def test_short_schedules_decay_as_much_in_a_task_as_the_papers(self, edition):
        """In a task with a full memory, to two digits of the weight decay."""

        def schedule(s):
            rows = 500 * (s.classes or 100) // s.tasks - s.validation_pool + s.memory
            return Schedule(s.epochs, s.lr, s.milestones, s.weight_decay), math.ceil(rows / s.batch_size)

        paper, batches = schedule(build({"preset": "cifar100"}))
        short, own = schedule(edition.settings("cifar100", "er", 1))
        assert short.weight_decay == float(f"{short.decaying(paper.total_decay(batches), own).weight_decay:.2g}")

    def test_the_short_head_stage_of_der_is_the_papers(self):
        options = build({"preset": "cifar100-mini", "learner": "der"}).learner_options
        assert options == {"finetune_epochs": 30, "finetune_milestones": [15]}


class TestValidationSeed:
    @pytest.mark.parametrize("preset", ["cifar10", "cifar100", "tiny-imagenet", "image-folder", "cifar100-mini"])
    def test_follows_the_seed_unless_it_is_given(self, preset):
        assert build({"preset": preset}).validation_seed == 1
        assert build({"preset": preset, "seed": 5}).validation_seed == 5
        assert build({"preset": preset, "seed": 5, "validation_seed": 1}).validation_seed == 1
        assert [run.validation_seed for run in expand({"preset": preset, "seeds": [2, 3]})] == [2, 3]

    @pytest.mark.parametrize("preset", ["digits", "cifar100-mini-0.2"])
    def test_stays_where_stored_runs_have_it(self, preset):
        assert build({"preset": preset, "seed": 5}).validation_seed == 1
        assert build({"preset": preset, "seed": 5, "validation_seed": "seed"}).validation_seed == 5

    def test_is_stored_as_a_number(self):
        s = build({"preset": "cifar100", "seed": 5})
        assert s.model_dump(mode="json")["validation_seed"] == 5
        with pytest.raises(ValueError, match=r"^validation_seed: got 'sed'"):
            build({"validation_seed": "sed"})


def test_precision_is_part_of_the_key_where_it_is_not_the_default():
    plain, mixed = build({}), build({"precision": "bf16"})
    assert "precision" not in plain.model_dump(mode="json")
    assert mixed.model_dump(mode="json")["precision"] == "bf16"
    assert mixed.key != plain.key
    assert own_settings(mixed.model_dump(mode="json")) == mixed
    assert mixed.on_all_data().precision == "bf16"


class TestImageSide:
    def test_only_where_it_is_given(self):
        plain, large = build({"preset": "image-folder"}), build({"preset": "image-folder", "image_side": 64})
        assert "image_side" not in plain.model_dump(mode="json")
        assert large.model_dump(mode="json")["image_side"] == 64
        for one in (plain, large):
            again = own_settings(one.model_dump(mode="json"))
            assert again == one
            assert stored_key(one.model_dump(mode="json")) == one.key == one.model_copy().key
        assert RunSettings(image_side=64).on_all_data().image_side == 64

    @pytest.mark.parametrize("side", [0, 10_000, "big", 1.5])
    def test_other_values(self, side):
        with pytest.raises(ValueError, match=r"^image_side: got"):
            build({"preset": "image-folder", "image_side": side})


class TestRateShape:
    def test_the_default_is_not_stored(self):
        plain, smooth = build({"preset": "cifar100", "lr_shape": "steps"}), build({"lr_shape": "cosine"})
        assert plain.key == build({"preset": "cifar100"}).key == "343b21a69842"
        assert "lr_shape" not in plain.model_dump(mode="json")
        assert smooth.model_dump(mode="json")["lr_shape"] == "cosine"
        assert smooth.key != build({}).key
        assert own_settings(smooth.model_dump(mode="json")) == smooth
        assert smooth.on_all_data().lr_shape == "cosine"

    def test_other_values(self):
        with pytest.raises(ValueError, match=r"^lr_shape: got 'linear'"):
            build({"lr_shape": "linear"})


def test_seeds_that_follow_the_training_seed_are_one_study():
    def told(**more):
        return StoredSettings.of(build(more)).but_for_seeds()

    own = [told(seed=seed, class_order_seed=seed, validation_seed=seed) for seed in (1, 2)]
    assert own[0] == own[1]
    assert told(seed=1) == told(seed=2) != own[0]
    assert told(seed=1, class_order_seed=2) != told(seed=2, class_order_seed=2, validation_seed=2)


def test_unequal_classes_are_another_run_and_equal_ones_the_same():
    plain, equal, unequal = (
        build({"preset": "letters", **own}) for own in ({}, {"smallest_class": 1}, {"smallest_class": 0.2})
    )
    assert "smallest_class" not in plain.model_dump()
    assert plain.key == equal.key != unequal.key
    with pytest.raises(ValueError, match=r"smallest_class: got 0"):
        build({"preset": "letters", "smallest_class": 0})


@pytest.mark.parametrize(("name", "value"), [("learner", ["er", "der"]), ("dataset", ["digits"]), ("seed", [1, 2])])
def test_several_of_what_is_one_say_where_they_go(name, value):
    with pytest.raises(ValueError, match=rf"^{name}: got \[.*\]; expected one\. Several go under {name}s\.$"):
        expand({name: value})


def test_a_number_where_a_list_belongs_is_told_so():
    with pytest.raises(ValueError, match=r"^milestones: got 10; expected a list, such as \[10, 15\]\.$"):
        build({"milestones": 10})


class TestMilestonesOfStageTwo:
    """They move with the epochs of stage two, as `milestones` do with `epochs`."""

    @pytest.mark.parametrize(
        ("preset", "learner", "epochs", "milestones"),
        [
            ("cifar100", "eeil", 5, [2, 3]),  # from the defaults, 30 with 10 and 20
            ("cifar100", "eeil", 100, [33, 67]),
            ("cifar100", "der", 10, [5]),
            ("cifar100", "bic", 6, [3, 5]),
            ("letters", "eeil", 20, [8, 14]),  # from the preset's, 10 with 4 and 7
            ("letters", "der", 3, [2]),
            ("letters", "eeil", 1, []),
        ],
    )
    def test_in_proportion(self, preset, learner, epochs, milestones):
        given = {"preset": preset, "learner": learner, "learner_options": {"finetune_epochs": epochs}}
        options = build(given).learner_options
        assert options == {"finetune_epochs": epochs, "finetune_milestones": milestones}
        make_learner(learner, small_cnn, 10, seed=1, options=options)  # which accepts them

    def test_at_20_tasks(self):
        given = {"preset": "cifar100", "learner": "eeil", "tasks": 20, "learner_options": {"finetune_epochs": 30}}
        assert build(given).learner_options["finetune_milestones"] == [10, 20]

    @pytest.mark.parametrize(
        ("preset", "learner", "options", "stored"),
        [
            ("cifar100", "eeil", {"finetune_epochs": 30}, {"finetune_epochs": 30}),  # the default
            ("cifar100", "eeil", {"finetune_lr": 0.1}, {"finetune_lr": 0.1}),
            ("cifar100", "der", {"finetune_epochs": 9, "finetune_milestones": [2]}, None),
            ("cifar100", "der", {"finetune_epochs": "9"}, None),  # refused by the learner
            ("cifar100", "wa", {"finetune_epochs": 9}, {"restrict_head": True, "finetune_epochs": 9}),
            ("letters", "der", {"finetune_epochs": 30}, {"finetune_epochs": 30, "finetune_milestones": [15]}),
            ("digits", "own:Learner", {"finetune_epochs": 9}, None),
        ],
    )
    def test_else_options_stay(self, preset, learner, options, stored):
        given = {"preset": preset, "learner": learner, "learner_options": options}
        assert build(given).learner_options == (stored or options)

    def test_stored_ones_outside_the_epochs_can_be_read(self):
        record = build({"learner": "eeil"}).model_dump(mode="json")
        record["learner_options"] = {"finetune_epochs": 5}
        assert own_settings(record).learner_options == {"finetune_epochs": 5}
        assert stored_key(record) == key_of(record)
        assert StoredSettings.of(own_settings(record)).key == key_of(record)


@pytest.mark.parametrize(("number", "same"), [(1.0, 1), (2, 2), (0.5, 0.5), ([1.0, 0.5], [1, 0.5]), ("1.0", "1.0")])
def test_an_option_that_is_whole_is_the_same_run_however_it_is_written(number, same):
    def made(value):
        return build({"preset": "letters", "learner": "der", "learner_options": {"finetune_temperature": value}})

    assert made(number).key == made(same).key
    assert json.dumps(made(number).learner_options["finetune_temperature"]) == json.dumps(same)


def test_a_stored_option_keeps_its_form_and_its_key():
    record = build({"learner": "der"}).model_dump(mode="json") | {"learner_options": {"finetune_temperature": 1.0}}
    assert stored_key(record) == key_of(record)
