"""The habits of scikit-learn: options, clones, signatures, no fitted attribute before fit, fits in steps."""

from __future__ import annotations

import copy
import inspect
import json
import math

import pytest
import torch
from sklearn import exceptions as sklearn_exceptions
from sklearn.base import clone
from sklearn.utils.validation import check_is_fitted
from torch import nn

import tcil
from tcil.extending import Calibrator
from tcil.options import DirectionPolicy

KINDS = [getattr(tcil, name) for name in tcil.__all__ if isinstance(getattr(tcil, name), type(Calibrator))]
LOGITS = 5 * torch.eye(3)[torch.tensor([0, 1, 2, 0])]
LABELS = torch.tensor([0, 1, 2, 2])
every_calibrator = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def test_there_are_nine():
    assert len(KINDS) == 9


@every_calibrator
class TestOptions:
    def test_defaults(self, kind):
        assert repr(kind()) == f"{kind.__name__}()"
        assert kind(**kind().get_params()).get_params(deep=False) == kind().get_params()

    def test_nothing_fitted_before_fit(self, kind):
        calibrator = kind()
        fitted = [name for name in dir(calibrator) if name.endswith("_") and not name.startswith("_")]
        assert {"classes_", "result_", "history_"} <= set(fitted)
        assert [name for name in fitted if hasattr(calibrator, name)] == []

    def test_clones(self, kind):
        changed = kind(**{name: value for name, value in OTHER.items() if name in kind().get_params()})
        assert changed.get_params() != kind().get_params() or not kind().get_params()
        for other in (changed.clone(), clone(changed), copy.copy(changed)):
            assert type(other) is kind
            assert other is not changed
            assert other.get_params() == changed.get_params()
            assert repr(other) == repr(changed)

    def test_refused_options_change_nothing(self, kind):
        calibrator = kind()
        with pytest.raises(ValueError, match=f"option of {kind.__name__}: got 'colour'"):
            calibrator.set_params(colour=3)
        if "seed" in calibrator.get_params():
            with pytest.raises(ValueError, match="seed: got -1"):
                calibrator.set_params(seed=-1)
        assert repr(calibrator) == f"{kind.__name__}()"


OTHER = {"seed": 7, "tolerance": 0.01, "batch_size": 5, "solver": "sgd", "device": torch.device("cpu")}


class TestScikitLearn:
    """Its functions know our estimators; nothing of it is imported here (tests/test_architecture.py)."""

    RULES = (tcil.decisions.RiskThreshold(risk=0.1), tcil.decisions.ConformalSets())

    @every_calibrator
    def test_not_fitted(self, kind):
        with pytest.raises(sklearn_exceptions.NotFittedError, match=f"This {kind.__name__} instance is not fitted"):
            check_is_fitted(kind())

    def test_fitted(self):
        scaling = tcil.TemperatureScaling().fit(LOGITS, LABELS)
        check_is_fitted(scaling)
        check_is_fitted(scaling, "temperature_")
        with pytest.raises(sklearn_exceptions.NotFittedError):
            check_is_fitted(clone(scaling))
        with pytest.raises(sklearn_exceptions.NotFittedError):
            check_is_fitted(scaling, "colour_")

    @pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
    def test_decision_rules(self, rule):
        assert repr(clone(rule)) == repr(rule)
        with pytest.raises(sklearn_exceptions.NotFittedError):
            check_is_fitted(rule)


def test_repr_shows_what_was_changed():
    assert repr(tcil.TCIL(policy="random", seed=3, tolerance=1e-3)) == "TCIL(policy='random', seed=3)"
    assert repr(tcil.TCIL(device="cpu")) == "TCIL(device='cpu')"


def test_of_several_options_none_is_changed_if_one_is_refused():
    calibrator = tcil.TCIL()
    with pytest.raises(ValueError, match="seed: got -1"):
        calibrator.set_params(batch_size=7, seed=-1)
    assert calibrator.batch_size == 64


def test_options_are_parsed_when_they_are_set():
    calibrator = tcil.TCIL()
    assert calibrator.set_params(policy="random") is calibrator
    assert calibrator.policy is DirectionPolicy.RANDOM
    assert calibrator.get_params()["policy"] is DirectionPolicy.RANDOM


def test_a_clone_is_not_fitted_and_options_hold_from_the_next_fit():
    scaling = tcil.TemperatureScaling(seed=4).fit(LOGITS, LABELS)
    before = scaling.temperature_
    assert not hasattr(scaling.clone(), "temperature_")
    assert not hasattr(clone(scaling), "temperature_")
    assert scaling.set_params(seed=5).temperature_ == before


def test_a_users_own_calibrator_has_the_same_repr():
    from dataclasses import dataclass

    @dataclass(eq=False, kw_only=True)
    class Own(tcil.TemperatureScaling):
        strength: float = 1.0

    try:
        assert repr(Own(strength=2.0)) == "Own(strength=2.0)"
        assert repr(clone(Own(strength=2.0, seed=1))) == "Own(seed=1, strength=2.0)"
    finally:
        Calibrator._known.pop("Own")


class TestSignatures:
    """The same argument has the same position and kind everywhere, and what is needed has no default."""

    POSITIONS = (
        ("logits", "labels", "new_classes"),
        ("model", "memory", "valid", "new_classes"),
        ("model", "valid", "new_classes"),
    )
    KEYWORDS = frozenset({"classes", "columns", "features", "unpack", "max_batches", "imbalance", "history", "reserve"})

    @every_calibrator
    def test_positions_and_kinds(self, kind):
        parameters = [p for p in inspect.signature(kind.fit).parameters.values() if p.name != "self"]
        places = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        assert any(places == known[: len(places)] for known in self.POSITIONS)
        assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} <= self.KEYWORDS
        assert {p.kind for p in parameters} <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
        assert "classes" in {p.name for p in parameters}
        for p in parameters:
            needed = p.kind is p.POSITIONAL_OR_KEYWORD
            if kind is tcil.FirstTaskTemperatureScaling and needed:
                continue  # later tasks need no data: its overloads say which arguments go together
            assert (p.default is p.empty) == needed, p

    def test_defaults_agree(self):
        defaults: dict[str, set[object]] = {}
        for kind in KINDS:
            for p in inspect.signature(kind.fit).parameters.values():
                if p.kind is p.KEYWORD_ONLY:
                    defaults.setdefault(p.name, set()).add(p.default)
        assert {name for name, values in defaults.items() if len(values) > 1} == set()

    def test_what_is_missing_is_named(self):
        with pytest.raises(TypeError, match="'valid' and 'new_classes'"):
            tcil.TCIL().fit(nn.Linear(2, 2), LOGITS)
        with pytest.raises(TypeError, match="'new_classes'"):
            tcil.GroupTemperatureScaling().fit(LOGITS, LABELS)


class Stream:
    """Three tasks of two classes: Gaussian blobs, and an over-confident network over the classes seen after each."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.centres = torch.randn(6, 8, generator=self.generator)

    def draw(self, labels, noise):
        return self.centres[labels] + noise * torch.randn(len(labels), 8, generator=self.generator), labels

    def tasks(self):
        for task in range(3):
            seen, new = 2 * task + 2, [2 * task, 2 * task + 1]
            model = nn.Linear(8, seen)
            with torch.no_grad():
                model.weight.copy_(2.5 * self.centres[:seen])
                model.bias.copy_(2.5 * (torch.log(torch.ones(seen)) - self.centres[:seen].square().sum(1) / 2))
                model.bias[new] += 2.5 * math.log(4.0)
            memory = self.draw(torch.arange(20 * seen) % seen, 0.3)
            valid = self.draw(2 * task + torch.arange(120) % 2, 1.0)
            yield {
                "model": model, "memory": memory, "valid": valid, "new_classes": new,
                "imbalance": 4.0 if task else None,
            }  # fmt: skip


@pytest.fixture(scope="module")
def tasks():
    return list(Stream().tasks())


class TestPartialFit:
    @pytest.mark.filterwarnings("ignore::tcil.CalibrationWarning")
    def test_the_same_as_an_explicit_history(self, tasks):
        beside, history = tcil.PACT(), None
        for task in tasks:
            alone = tcil.PACT().fit(**task, history=history)
            history = json.loads(json.dumps(alone.history_))
            assert beside.partial_fit(**task) is beside
            assert beside.result_ == alone.result_
            assert beside.history_ == alone.history_
            assert beside.classes_ == alone.classes_
        assert beside.result_.evidence[0].source == "history"
        assert beside.result_ != tcil.PACT().fit(**tasks[-1]).result_

    @pytest.mark.filterwarnings("ignore::tcil.CalibrationWarning")
    @pytest.mark.parametrize("version", [1, 2])
    def test_saved_and_loaded_in_the_middle(self, tasks, tmp_path, version):
        whole = tcil.PACT()
        for task in tasks:
            whole.partial_fit(**task)
        path = tmp_path / "pact.json"
        for task in tasks:
            part = (tcil.load(path) if path.exists() else tcil.PACT()).partial_fit(**task)
            part.save(path)
            if version == 1:  # as files were before there were checksums
                record = json.loads(path.read_text())
                record.pop("checksum", None)
                path.write_text(json.dumps({**record, "format_version": 1}))
        again = tcil.load(path)
        assert again.result_ == whole.result_
        assert again.history_ == whole.history_

    @pytest.mark.filterwarnings("ignore::tcil.CalibrationWarning")
    def test_fit_starts_anew(self, tasks):
        calibrator = tcil.PACT().partial_fit(**tasks[0]).partial_fit(**tasks[1])
        assert calibrator.fit(**tasks[2]).result_ == tcil.PACT().fit(**tasks[2]).result_
        assert not hasattr(calibrator.clone(), "history_")

    @pytest.mark.filterwarnings("ignore::tcil.CalibrationWarning")
    def test_a_failed_fit_changes_nothing(self, tasks):
        calibrator = tcil.PACT().partial_fit(**tasks[0])
        before = calibrator.history_, calibrator.result_
        with pytest.raises(ValueError, match="imbalance: got None"):
            calibrator.partial_fit(**{**tasks[1], "imbalance": None})
        assert (calibrator.history_, calibrator.result_) == before
        with pytest.raises(ValueError, match="that of a fit of this very network"):
            calibrator.fit(**tasks[0], history=calibrator.history_)
        assert (calibrator.history_, calibrator.result_) == before

    def test_first_task(self):
        later = 3 * torch.randn(20, 6, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 6
        calibrator = tcil.FirstTaskTemperatureScaling().partial_fit(LOGITS, LABELS)
        first = tcil.FirstTaskTemperatureScaling().fit(LOGITS, LABELS)
        explicit = tcil.FirstTaskTemperatureScaling().fit(*later, history=first.history_)
        calibrator.partial_fit(*later)
        assert calibrator.temperature_ == explicit.temperature_ == first.temperature_
        assert calibrator.classes_ == explicit.classes_ == tuple(range(6))
        assert calibrator.history_ == explicit.history_
        assert len(calibrator.partial_fit(classes=range(8)).classes_) == 8

    @pytest.mark.parametrize(
        "kind", [tcil.TemperatureScaling, tcil.EnsembleTemperatureScaling, tcil.MulticlassIsotonic]
    )
    def test_harmless_for_those_that_learn_nothing_from_earlier_tasks(self, kind):
        other = torch.tensor([2, 1, 0, 0])
        calibrator = kind().partial_fit(LOGITS, LABELS).partial_fit(LOGITS, other)
        assert calibrator.history_ is None
        assert calibrator.result_ == kind().fit(LOGITS, other).result_

    def test_takes_no_history(self):
        with pytest.raises(ValueError, match="history: got an argument of partial_fit"):
            tcil.FirstTaskTemperatureScaling().partial_fit(LOGITS, LABELS, history=None)
