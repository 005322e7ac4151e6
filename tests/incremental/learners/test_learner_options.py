"""Options of learners: their types and ranges."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tcil.foundation.errors import invalid
from tcil.incremental.learners import LEARNERS, LearnerOptions, make_learner
from tcil.incremental.networks import small_cnn


@dataclass(frozen=True)
class OwnOptions(LearnerOptions):
    flag: bool = False
    count: int = 0
    weights: tuple[float, ...] = (0.5, 1)
    steps: tuple[int, ...] = ()
    limit: float = float("inf")
    name: str = "plain"
    more: tuple[str, ...] | None = None

    def __post_init__(self):
        if self.count > 8:
            raise invalid("count", f"{self.count}", "at most 8")


class TestOptions:
    def learner(self, monkeypatch, **options):
        own = type("Own", (LEARNERS["er"],), {"options_type": OwnOptions})
        monkeypatch.setitem(LEARNERS, "own", own)
        return make_learner("own", small_cnn, 10, seed=1, options=options).options

    def test_defaults_are_legal(self, monkeypatch):
        assert self.learner(monkeypatch) == OwnOptions()

    @pytest.mark.parametrize(
        "given",
        [
            {"flag": True},
            {"flag": False},
            {"count": 0},
            {"count": -1},
            {"weights": [0.1, 2]},
            {"weights": ()},
            {"steps": [3, 0.5]},
            {"limit": 2},
            {"name": "other"},
            {"more": ["x"]},
            {"head": "growing"},
        ],
    )
    def test_values_of_the_defaults_type(self, monkeypatch, given):
        ((name, value),) = given.items()
        assert getattr(self.learner(monkeypatch, **given), name) == value

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"flag": 1}, "option flag of learner own: got 1; expected true or false"),
            ({"count": True}, "option count of learner own: got True; expected a whole number"),
            ({"count": 1.0}, "option count of learner own: got 1.0; expected a whole number"),
            ({"count": 2**31}, "option count of learner own: got 2147483648; expected a whole number of at most"),
            ({"count": 9}, "count: got 9; expected at most 8"),  # by the learner
            ({"weights": 0.5}, "option weights of learner own: got 0.5; expected a list, each a number"),
            ({"weights": ["a"]}, "option weights of learner own"),
            ({"limit": float("nan")}, "option limit of learner own"),
            ({"name": 3}, "option name of learner own: got 3; expected text"),
            ({"head": "groing"}, "head: got 'groing'.*Did you mean 'growing'"),
        ],
    )
    def test_others_are_refused(self, monkeypatch, given, message):
        with pytest.raises(ValueError, match=message):
            self.learner(monkeypatch, **given)

    @pytest.mark.parametrize(
        ("name", "given", "message"),
        [
            ("der", {"finetune_epochs": 0}, "option finetune_epochs: got 0; expected at least 1"),
            ("eeil", {"finetune_lr": -0.1}, "option finetune_lr: got -0.1; expected at least 0"),
            ("eeil", {"distillation": "bc"}, "distillation: got 'bc'.*Did you mean 'bce'"),
            ("wa", {"distillation_temperature": -1}, "option distillation_temperature: got -1"),
            ("wa", {"distillation_temperature": 0}, "distillation_temperature: got 0; expected greater than 0"),
            ("bic", {"distillation_temperature": 0}, "distillation_temperature: got 0; expected greater than 0"),
            ("eeil", {"distillation_temperature": 0}, "distillation_temperature: got 0; expected greater than 0"),
            ("der", {"finetune_temperature": 0}, "finetune_temperature: got 0; expected greater than 0"),
        ],
    )
    def test_ranges_of_ours(self, name, given, message):
        with pytest.raises(ValueError, match=message):
            make_learner(name, small_cnn, 10, seed=1, options=given)


class TestMilestonesOfStageTwo:
    @pytest.mark.parametrize("name", ["eeil", "der", "bic"])
    @pytest.mark.parametrize("given", [{"finetune_epochs": 5}, *({"finetune_milestones": [m]} for m in (-3, 0, 60))])
    def test_outside_its_epochs_are_refused(self, name, given):
        with pytest.raises(
            ValueError, match=r"option finetune_milestones: got \[.*\]; expected numbers above 0 and below"
        ):
            make_learner(name, small_cnn, 10, seed=1, options=given)

    @pytest.mark.parametrize("name", ["eeil", "der", "bic"])
    def test_within_them_divide_the_rate(self, name):
        given = {"finetune_epochs": 5, "finetune_milestones": [2, 4]}
        options = make_learner(name, small_cnn, 10, seed=1, options=given).options
        schedule = options.finetuning(weight_decay=0.25)
        assert (schedule.epochs, schedule.lr, schedule.weight_decay) == (5, options.finetune_lr, 0.25)
        rates = [schedule.rate(epoch) / schedule.lr for epoch in range(5)]
        assert rates == pytest.approx([1, 1, 0.1, 0.1, 0.01])
