"""Calibrating changes nothing that is drawn later: every random state is left as it was."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, TensorDataset

import tcil
from tcil.foundation.random_state import preserved

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(40, 6, generator=GENERATOR), torch.arange(40) % 4
XV, YV = torch.randn(24, 6, generator=GENERATOR), 2 + torch.arange(24) % 2
LOGITS, LABELS = 3 * torch.randn(30, 3, generator=GENERATOR), torch.arange(30) % 3


def draw_everywhere() -> None:
    torch.rand(1)
    np.random.rand()  # noqa: NPY002
    random.random()


def states() -> list[object]:
    kind, keys, position, *rest = np.random.get_state()  # noqa: NPY002
    return [torch.get_rng_state().tolist(), kind, keys.tolist(), position, rest, random.getstate()]


class Drawing(nn.Module):
    """Draws in forward, as a module that the user keeps in training mode does; its logits do not depend on it."""

    def __init__(self, fail_at: int = 10**9) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.body, self.fc = nn.Linear(6, 8), nn.Linear(8, 4)
        self.batches, self.fail_at = 0, fail_at

    def forward(self, x):
        draw_everywhere()
        self.batches += 1
        if self.batches >= self.fail_at:
            raise RuntimeError("out of memory, say")
        return self.fc(torch.relu(self.body(x)))


class DrawingRows(Dataset):
    """Draws for every row, to no effect."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, row):
        draw_everywhere()
        return self.x[row], int(self.y[row])


def drawing_unpack(batch):
    draw_everywhere()
    return batch[0], batch[1]


def loader(x, y, **options):
    return DataLoader(TensorDataset(x, y), batch_size=9, **options)


def fit_t_cil(model, memory, valid, **options):
    tcil.TCIL().fit(model, memory, valid, [2, 3], **options)


def fit_pact(model, memory, valid, **options):
    tcil.PACT().fit(model, memory, valid, [2, 3], imbalance=5.0, **options)


def fit_perturbed(model, memory, valid, **options):
    tcil.PerturbedTemperatureScaling().fit(model, valid=valid, **options)


def predict(model, memory, valid, **options):
    tcil.predict_logits(model, valid, **options)


def evidence(model, memory, valid, **options):
    tcil.TCIL().evidence(model, memory, valid, [2, 3], **options)


ENTRIES = [fit_t_cil, fit_pact, fit_perturbed, predict, evidence]
DATA = {
    "loaders": (loader(X, Y), loader(XV, YV)),
    "datasets": (TensorDataset(X, Y), TensorDataset(XV, YV)),
    "rows that draw": (DrawingRows(X, Y), DrawingRows(XV, YV)),
    "loaders of rows that draw": (
        DataLoader(DrawingRows(X, Y), batch_size=9),
        DataLoader(DrawingRows(XV, YV), batch_size=9),
    ),
}


@pytest.mark.filterwarnings("ignore::tcil.CalibrationWarning")
@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
@pytest.mark.parametrize("entry", ENTRIES)
def test_global_states_are_left(entry, data):
    before = states()
    entry(Drawing(), *data, unpack=drawing_unpack)
    assert states() == before


@pytest.mark.filterwarnings("ignore::tcil.CalibrationWarning")
@pytest.mark.parametrize("entry", ENTRIES)
def test_also_after_an_error(entry):
    before = states()
    with pytest.raises(RuntimeError, match="out of memory, say") as error:
        entry(Drawing(fail_at=3), *DATA["loaders"])
    assert states() == before
    assert error.traceback  # still holds the frames, so nothing was left to garbage collection


@pytest.mark.parametrize("entry", ENTRIES)
def test_also_when_the_data_are_refused(entry):
    class Raising(DrawingRows):
        def __getitem__(self, row):
            if row == 20:
                raise OSError("no such image")
            return super().__getitem__(row)

    before = states()
    bad = DataLoader(Raising(X, Y), batch_size=9), DataLoader(Raising(XV, YV), batch_size=9)
    with pytest.raises(OSError, match="no such image"):
        entry(Drawing(), *bad)
    assert states() == before


@pytest.mark.filterwarnings("ignore::tcil.CalibrationWarning")
def test_features_that_draw():
    model, before = Drawing(), states()

    def extract(x):
        draw_everywhere()
        return torch.relu(model.body(x))

    fit_t_cil(model, *DATA["loaders"], features=(extract, model.fc))
    assert states() == before


@pytest.mark.filterwarnings("ignore::tcil.CalibrationWarning")
def test_later_training_sees_the_same_batches():
    def order():
        return [batch[1].tolist() for batch in loader(X, Y, shuffle=True)]

    torch.manual_seed(7)
    want = order()
    torch.manual_seed(7)
    fit_t_cil(Drawing(), *DATA["loaders"])
    predict(Drawing(), *DATA["loaders"])
    assert order() == want


@pytest.mark.filterwarnings("ignore::tcil.CalibrationWarning")
@pytest.mark.parametrize("entry", ENTRIES)
def test_generators_of_loaders_are_left(entry):
    own, valid_own = torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)
    before = own.get_state(), valid_own.get_state()
    entry(Drawing(), loader(X, Y, generator=own), loader(XV, YV, generator=valid_own))
    assert torch.equal(own.get_state(), before[0])
    assert torch.equal(valid_own.get_state(), before[1])


def test_generators_of_samplers_are_left_too():
    """Refused, since no two passes are the same; the sampler's generator is where it was all the same."""
    own = torch.Generator().manual_seed(3)
    before = own.get_state()
    shuffled = loader(XV, YV, sampler=SubsetRandomSampler(range(24), generator=own))
    with pytest.raises(ValueError, match="second pass differs"):
        tcil.predict_logits(Drawing(), shuffled)
    assert torch.equal(own.get_state(), before)


@pytest.mark.processes
def test_persistent_workers():
    """They still bring the same batches, and draw their seed in the user's first pass, not in ours."""

    def workers():
        return loader(XV, YV, num_workers=1, persistent_workers=True)

    def after_a_pass(own):
        torch.manual_seed(7)
        assert [len(batch[1]) for batch in own] == [9, 9, 6]
        return torch.rand(1).item()

    mine = workers()
    before = states()
    logits, labels = tcil.predict_logits(Drawing(), mine)
    assert states() == before
    plain = tcil.predict_logits(Drawing(), (XV, YV), batch_size=9)
    assert torch.equal(logits, plain[0])
    assert torch.equal(labels, plain[1])
    assert after_a_pass(mine) == after_a_pass(workers())


LOGIT_CALIBRATORS = {
    "TS": lambda: tcil.TemperatureScaling().fit(LOGITS, LABELS),
    "TS by SGD": lambda: tcil.TemperatureScaling(solver="sgd").fit(LOGITS, LABELS),
    "ETS": lambda: tcil.EnsembleTemperatureScaling().fit(LOGITS, LABELS),
    "IRM": lambda: tcil.MulticlassIsotonic().fit(LOGITS, LABELS),
    "first task": lambda: tcil.FirstTaskTemperatureScaling().fit(LOGITS, LABELS),
    "groups": lambda: tcil.GroupTemperatureScaling().fit(LOGITS, LABELS, new_classes=[2]),
}


@pytest.mark.filterwarnings("ignore::tcil.CalibrationWarning")
@pytest.mark.parametrize("fit", LOGIT_CALIBRATORS.values(), ids=LOGIT_CALIBRATORS)
def test_everything_else_draws_nothing(fit, tmp_path):
    network = nn.Linear(6, 3)
    before = states()
    calibrator = fit()
    calibrator.transform(LOGITS)
    probabilities = calibrator.predict_proba(LOGITS)
    again = tcil.load(calibrator.save(tmp_path / "calibrator.json", model=network), model=network)
    again.wrap(network)(X)
    tcil.metrics.noise_floor(probabilities, n_draws=20)
    assert states() == before


class TestCuda:
    """The two branches for CUDA, without a GPU."""

    def test_not_initialised_by_asking(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: pytest.fail("would initialise CUDA"))
        with preserved():
            pass

    def test_states_of_all_devices(self, monkeypatch):
        device_states = [torch.zeros(4), torch.ones(4)]
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [state.clone() for state in device_states])
        monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda states: device_states.__setitem__(slice(2), states))
        with preserved():
            device_states[1] = torch.full((4,), 9.0)
        assert [state.sum().item() for state in device_states] == [0.0, 4.0]

    def test_initialised_in_the_meantime(self, monkeypatch):
        """A fit with device="cuda" starts CUDA: afterwards its generators are where they began."""
        device = torch.Generator().manual_seed(5)
        before, ready = device.get_state(), [False]
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: ready[0])
        monkeypatch.setattr(torch.cuda, "default_generators", (device,))
        with preserved():
            ready[0] = True
            torch.rand(3, generator=device)
        assert torch.equal(device.get_state(), before)
