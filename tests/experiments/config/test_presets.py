"""Settings of a run as presets have them: the paper's numbers, keys, errors, grids."""

from __future__ import annotations

import json

import pytest

from tcil.experiments.config.presets import PRESETS
from tcil.experiments.config.settings import RunSettings, build, expand


class TestSettings:
    def test_presets_carry_the_papers_settings(self):
        sizes = {
            ("er", "cifar10"): 500, ("er", "cifar100"): 500, ("er", "tiny-imagenet"): 100,
            ("eeil", "cifar10"): 300, ("eeil", "cifar100"): 300, ("eeil", "tiny-imagenet"): 200,
            ("wa", "cifar10"): 100, ("wa", "cifar100"): 500, ("wa", "tiny-imagenet"): 100,
            ("der", "cifar10"): 500, ("der", "cifar100"): 1000, ("der", "tiny-imagenet"): 100,
        }  # fmt: skip
        for (learner, dataset), size in sizes.items():
            s = build({"dataset": dataset, "learner": learner})
            assert s.validation == size
            assert (s.epochs, s.milestones, s.lr, s.weight_decay) == (200, (100, 150), 0.1, 2e-4)
        assert [build({"dataset": d}).memory for d in ("cifar10", "cifar100", "tiny-imagenet")] == [200, 2000, 4000]
        assert [build({"dataset": d}).tasks for d in ("cifar10", "cifar100", "tiny-imagenet")] == [5, 10, 10]
        assert [build({"dataset": d}).batch_size for d in ("cifar10", "cifar100", "tiny-imagenet")] == [128, 128, 256]

    def test_every_preset_builds_for_every_learner(self):
        for preset in PRESETS:
            for learner in ("er", "eeil", "wa", "der"):
                assert build({"preset": preset, "learner": learner}).learner == learner

    def test_the_key_is_the_settings(self):
        one, same, other = build({}), build({"dataset": "letters"}), build({"seed": 2})
        assert one.key == same.key != other.key
        assert one.name.startswith("letters-er-seed1-")

    @pytest.mark.parametrize("dataset", ["cifar100", "tiny-imagenet"])
    def test_at_20_tasks(self, dataset):
        for learner in ("er", "eeil", "wa", "der"):
            s = build({"dataset": dataset, "learner": learner, "tasks": 20})
            assert (s.tasks, s.validation, s.validation_pool) == (20, 100, 100)
            assert s.learner_options.get("finetune_epochs") == {"eeil": 100, "der": 100}.get(learner)
        assert build({"dataset": dataset, "tasks": 20, "validation": 300}).validation == 300

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"epoch": 3}, "epoch: got 3; there is no such setting. Did you mean 'epochs'?"),
            ({"lr": -1}, "lr: got -1; Input should be greater than 0"),
            ({"preset": "cifar100mini"}, "preset: got 'cifar100mini'.*Did you mean 'cifar100-mini'"),
            (
                {"validation": 100, "validation_pool": 5},
                r"^validation_pool: got 5; expected at least validation, 100\.$",
            ),
            ({"epochs": 5, "milestones": [7]}, r"^milestones: got \[7\]; expected numbers below epochs, 5\.$"),
            ({"tasks": 0}, r"^tasks: got 0; expected a number of tasks or their sizes, each at least 1\.$"),
            ({"tasks": []}, r"^tasks: got \[\]; expected a number of tasks or their sizes"),
            ({"reserve": 1.5}, r"^reserve: got 1\.5; expected a share below 1 or a whole number of images\.$"),
            ({"validation_pool": 1, "tasks": 0}, r"^validation_pool: got 1;[^\n]*\ntasks: got 0;[^\n]*$"),
        ],
    )
    def test_errors(self, values, message):
        with pytest.raises(ValueError, match=message):
            build(values)

    def test_a_grid(self):
        runs = expand({"seeds": [1, 2], "learners": ["er", "wa"]})
        assert [(r.learner, r.seed) for r in runs] == [("er", 1), ("er", 2), ("wa", 1), ("wa", 2)]

    def test_round_trip(self):
        s = build({"dataset": "noisy-digits", "learner": "der", "tasks": [2, 3, 5]})
        assert RunSettings(**json.loads(json.dumps(s.model_dump(mode="json")))) == s
