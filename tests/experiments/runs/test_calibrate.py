"""All calibrators on one finished task: rows of those that answer, reasons of those that do not."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, replace

import pytest
import torch

import tcil
from tcil.experiments.process.exits import RunFailed
from tcil.experiments.runs.calibrate import calibrate
from tcil.experiments.runs.entries import CALIBRATORS, Entry, FinishedTask, check_calibrators, entry_of
from tcil.experiments.runs.reasons import NotApplicableReason


def finished_task():
    logits, none = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(0, dtype=torch.long)
    rows = logits, torch.arange(40) % 4
    return FinishedTask(1, range(2, 4), (range(2), range(2, 4)), *rows, *rows, logits[:0], none, logits[:0], none)


def test_the_reason_is_the_calibrators_own(monkeypatch):
    """Whether it is the first, or comes after one that was fitted."""

    def unreachable(task):
        raise tcil.NotReachableError("there is no such temperature")

    monkeypatch.setitem(CALIBRATORS, "mine", Entry("Mine", "never answers", unreachable))
    for names in (["mine"], ["ts", "mine"]):
        answer = calibrate(finished_task(), names).calibrators["mine"].not_applicable
        assert (answer.reason, answer.words) == (NotApplicableReason.OTHER, "there is no such temperature")


def fit_ts(task):
    return tcil.TemperatureScaling().fit(task.valid_logits, task.valid_columns)


@dataclass(frozen=True)
class Odd:
    verdict: str = "fine"


class Unusual(tcil.TemperatureScaling):
    result_type = Odd

    def fit(self, logits, labels):
        return self._fitted(self._map(2.0), range(logits.shape[1]), Odd())


class TestOwnCalibrators:
    """What a calibrator of the user's own does wrong is told with its name, and changes nothing of the others."""

    @pytest.fixture
    def own(self, monkeypatch):
        """Register entries of a user's module `mine`."""
        module = types.ModuleType("mine")
        monkeypatch.setitem(sys.modules, "mine", module)

        def add(name, fit, title=None):
            setattr(module, name, Entry(name.title() if title is None else title, "", fit))
            return f"mine:{name}"

        return add

    def test_it_cannot_change_what_others_are_fitted_on(self, own):
        network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        task = replace(finished_task(), model=network, valid=(torch.randn(8, 4), torch.arange(8) % 4))
        before = {name: value.clone() for name, value in network.state_dict().items()}
        alone = calibrate(task, ["vanilla", "ts"]).calibrators

        def careless(task):
            calibrator = fit_ts(task)
            task.model.train()(task.valid[0])
            for tensor in (task.test_logits, task.valid_logits, task.valid[0], task.model[0].weight.data):
                tensor.zero_()
            return calibrator

        rows = calibrate(task, [own("careless", careless), "vanilla", "ts"]).calibrators
        assert {name: rows[name] for name in alone} == alone
        assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
        assert network.training

    @pytest.mark.parametrize(
        ("error", "told"),
        [
            (ValueError("not a number"), "calibrator mine:wrong: not a number"),
            (KeyError("weights"), "calibrator mine:wrong: KeyError: 'weights'"),
            (RuntimeError("my bug"), "calibrator mine:wrong: RuntimeError: my bug"),
        ],
    )
    def test_its_errors_have_its_name(self, own, error, told):
        def fails(task):
            raise error

        with pytest.raises(RunFailed) as failed:
            calibrate(finished_task(), [own("wrong", fails)])
        assert str(failed.value) == told
        assert failed.value.__cause__ is error

    def test_results_whose_fields_have_another_meaning(self, own):
        name = own("odd", lambda task: Unusual().fit(task.valid_logits, task.valid_columns))
        with pytest.raises(RunFailed, match=r"^calibrator mine:odd: result\.verdict: verdict: got 'fine'; "):
            calibrate(finished_task(), [name])

    def test_features_cannot_be_a_row(self, own):
        class WithFeatures(tcil.extending.TemperatureMap):
            needs_features = True

        class Deep(tcil.TemperatureScaling):
            map_type = WithFeatures

            def fit(self, logits, labels):
                fitted = tcil.fit_temperature(logits, labels)
                return self._fitted(WithFeatures(torch.tensor(2.0).double()), range(logits.shape[1]), fitted)

        name = own("deep", lambda task: Deep().fit(task.valid_logits, task.valid_columns))
        with pytest.raises(RunFailed, match="mine:deep: fit: got Deep, which needs features; expected"):
            calibrate(finished_task(), [name])

    @pytest.mark.parametrize(
        ("titles", "message"),
        [
            (
                ["Same", "Same"],
                "calibrators: got mine:b with the title 'Same', which mine:a has; expected a title of its",
            ),
            (["T-CIL", "B"], "calibrators: got mine:a with the title 'T-CIL', which t-cil has"),
            ([" ", "B"], "calibrators: got mine:a with the title ' '; expected"),
            (
                ["Vanilla, all data", "B"],
                "calibrators: got mine:a with the title 'Vanilla, all data', which vanilla-all",
            ),
        ],
    )
    def test_titles_are_different(self, own, titles, message):
        names = [own(name, fit_ts, title) for name, title in zip("ab", titles, strict=True)]
        with pytest.raises(ValueError, match=message):
            check_calibrators(names)
        check_calibrators([own("c", fit_ts), "ts", "t-cil[policy=random]"])

    def test_a_class_is_no_entry(self, monkeypatch):
        module = types.ModuleType("mine")
        module.Unusual = Unusual
        monkeypatch.setitem(sys.modules, "mine", module)
        with pytest.raises(ValueError, match=r"calibrator: got 'mine:Unusual'; expected an Entry.*Entry\('Mine'"):
            entry_of("mine:Unusual")

    def test_it_cannot_change_what_it_remembered(self, own):
        """A history is stored after each task; the next task must not change that of the one before."""

        class Counting(tcil.TemperatureScaling):
            def fit(self, task):
                history = task.remembered or {"seen": []}
                history["seen"].append(task.index)
                fitted = tcil.fit_temperature(task.valid_logits, task.valid_columns)
                return self._fitted(self._map(fitted.temperature), range(4), fitted, history=history)

        name = own("counting", lambda task: Counting().fit(task))
        first = calibrate(finished_task(), [name])
        second = calibrate(replace(finished_task(), history=first.history), [name])
        assert first.history[name] == {"seen": [1]}
        assert second.history[name] == {"seen": [1, 1]}

    def test_its_interval_gets_copies_too(self, own, monkeypatch):
        name = own("wide", fit_ts)
        entry = replace(entry_of(name), interval=lambda task, fitted: (float(task.test_logits.zero_().sum()) + 1, 2.0))
        monkeypatch.setattr(sys.modules["mine"], "wide", entry)
        task = finished_task()
        before = task.test_logits.clone()
        assert calibrate(task, [name]).calibrators[name].temperature_interval == (1.0, 2.0)
        assert torch.equal(task.test_logits, before)

    def test_a_network_that_cannot_be_copied_is_restored(self, own):
        class Locked(torch.nn.Linear):
            def __deepcopy__(self, memo):
                raise RuntimeError("no copies")

        network = Locked(4, 4)
        before = network.weight.detach().clone()

        def careless(task):
            task.model.weight.data.zero_()
            return fit_ts(task)

        calibrate(replace(finished_task(), model=network), [own("careless", careless)])
        assert torch.equal(network.weight, before)
        assert network.training
        assert network.weight.requires_grad

    def test_an_error_in_a_factory_names_it(self, monkeypatch):
        def factory():
            raise TypeError("inside")

        module = types.ModuleType("mine")
        module.factory = factory
        monkeypatch.setitem(sys.modules, "mine", module)
        with pytest.raises(
            ValueError, match=r"calibrator: got 'mine:factory', which failed \(.*inside.*\); expected an En"
        ):
            entry_of("mine:factory")


def test_without_exemplars_pact_with_a_reserve_has_no_answer_as_pact_has_none():
    task = finished_task()
    images = torch.randn(20, 8), torch.arange(20) % 2
    nothing = images[0][:0], images[1][:0]
    bare = replace(
        task,
        model=torch.nn.Linear(8, 4),
        memory=nothing,
        valid=(images[0], images[1] + 2),
        imbalance=5.0,
        reserve=images,
    )
    rows = calibrate(bare, ["pact", "pact-r"]).calibrators
    assert {name: row.not_applicable.reason for name, row in rows.items()} == dict.fromkeys(
        ("pact", "pact-r"), NotApplicableReason.NEEDS_MEMORY
    )
