"""Held-out images and calibrated learners of PyCIL: on stand-ins of the recorded interface, and on a real checkout."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tcil
from conftest import ROOT
from integrations import record_signatures
from integrations.conftest import seed_everything
from integrations.test_signatures import RECORD
from tcil.integrations import pycil

MEAN, STD = 0.5, 0.25


class Dummy(torch.utils.data.Dataset):
    """As PyCIL's: raw images in, (index, image, label) out."""

    def __init__(self, images, labels):
        assert images.dtype == np.uint8
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = (torch.from_numpy(self.images[index]).permute(2, 0, 1).float() / 255 - MEAN) / STD
        return index, image, self.labels[index]


class DataManager:
    """The part of PyCIL's that is used: six classes in three tasks, in an order of their own."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self._class_order = [4, 2, 5, 0, 1, 3]
        self._train_targets = np.arange(240) % 6  # mapped: the first task has the classes 0 and 1
        means = rng.integers(60, 200, (6, 4, 4, 3))
        noise = 60 * rng.standard_normal((240, 4, 4, 3))
        self._train_data = np.clip(means[self._train_targets] + noise, 0, 255).astype(np.uint8)

    def get_task_size(self, task):
        return 2

    def get_dataset(self, indices, source, mode, appendent=None, ret_data=False, m_rate=None):
        assert (list(indices), source, mode) == ([], "train", "test")
        return Dummy(*appendent)


class Network(nn.Module):
    """As PyCIL's: a dict with the logits, and a head that grows."""

    def __init__(self):
        super().__init__()
        self.convnet, self.fc = nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.ReLU()), None

    def forward(self, x):
        features = self.convnet(x)
        return {"features": features, "logits": self.fc(features)}


class Learner:
    """Attributes and methods of PyCIL's BaseLearner, with a loop of its own."""

    def __init__(self, memory_size=24):
        self._cur_task, self._known_classes, self._total_classes = -1, 0, 0
        self._network, self._memory_size, self._memory_per_class, self._fixed_memory = None, memory_size, None, False
        self._data_memory, self._targets_memory = np.array([]), np.array([])

    def _get_memory(self):
        return None if len(self._data_memory) == 0 else (self._data_memory, self._targets_memory)

    def after_task(self):
        self._known_classes = self._total_classes

    def incremental_train(self, data_manager):
        self._cur_task += 1
        self._total_classes = self._known_classes + data_manager.get_task_size(self._cur_task)
        self._network = self._network or Network()
        old, self._network.fc = self._network.fc, nn.Linear(16, self._total_classes)
        if old is not None:
            self._network.fc.weight.data[: self._known_classes] = old.weight.data
        own = data_manager._train_targets >= self._known_classes
        own &= data_manager._train_targets < self._total_classes
        images, targets = data_manager._train_data[own], data_manager._train_targets[own]
        if self._get_memory() is not None:
            images, targets = (
                np.concatenate([images, self._data_memory]),
                np.concatenate([targets, self._targets_memory]),
            )
        rows = list(Dummy(images, targets))
        x, y = torch.stack([row[1] for row in rows]), torch.tensor([int(row[2]) for row in rows])
        optimizer = torch.optim.Adam(self._network.parameters(), lr=0.01)
        for _ in range(40):
            optimizer.zero_grad()
            nn.functional.cross_entropy(self._network(x)["logits"], y).backward()
            optimizer.step()
        each = self._memory_size // self._total_classes
        kept = np.concatenate([np.flatnonzero(targets == label)[:each] for label in range(self._total_classes)])
        self._data_memory, self._targets_memory = images[kept], targets[kept]


def test_the_stand_ins_have_the_recorded_interface():
    kinds = {"utils/data_manager.py:DataManager": DataManager(), "models/base.py:BaseLearner": Learner()}
    for name, parameters in RECORD["pycil"]["signatures"].items():
        kind, _, method = name.rpartition(".")
        assert ["self", *inspect.signature(getattr(kinds[kind], method)).parameters] == parameters, name
    for kind, attributes in RECORD["pycil"]["attributes"].items():
        assert attributes == record_signatures.ATTRIBUTES[kind]
        assert all(hasattr(kinds[kind], attribute) for attribute in attributes)


def test_held_out_images_are_gone_from_training():
    manager = DataManager()
    before = {row.tobytes() for row in manager._train_data}
    held = pycil.hold_out(manager, per_class=10)
    assert np.bincount(held.targets).tolist() == [10] * 6
    assert np.bincount(manager._train_targets).tolist() == [30] * 6
    kept, out = ({row.tobytes() for row in rows} for rows in (manager._train_data, held.images))
    assert kept | out == before
    assert not kept & out
    again = pycil.hold_out(DataManager(), per_class=10)
    assert np.array_equal(again.images, held.images)
    other = pycil.hold_out(DataManager(), per_class=10, seed=1)
    assert not np.array_equal(other.images, held.images)


@pytest.mark.training
@pytest.mark.filterwarnings("ignore::tcil.CalibrationWarning")
def test_the_same_temperature_as_without_pycil():
    seed_everything()
    manager, learner, pact, own = DataManager(), Learner(), tcil.PACT(), tcil.PACT()
    held = pycil.hold_out(manager, per_class=10)
    for task in range(3):
        learner.incremental_train(manager)
        learner.after_task()
        before = learner._data_memory.copy()
        assert pycil.calibrate(learner, manager, held, pact) is pact
        assert np.array_equal(learner._data_memory, before)
        new = [2 * task, 2 * task + 1]
        rows = np.isin(held.targets, new)
        pairs = [
            (((torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255) - MEAN) / STD, torch.from_numpy(targets))
            for images, targets in (
                (learner._data_memory, learner._targets_memory),
                (held.images[rows], held.targets[rows]),
            )
        ]
        ratio = None if task == 0 else 30 / (24 // (2 * task))
        own.partial_fit(learner._network, *pairs, new, classes=range(2 * task + 2), imbalance=ratio)
        assert pact.temperature_ == pytest.approx(own.temperature_, abs=1e-6)
        assert pact.bias_ == pytest.approx(own.bias_, abs=1e-6)
        assert pact.result_.imbalance == (ratio or 1.0)
    assert pycil.dataset_labels(manager, pact) == (4, 2, 5, 0, 1, 3)
    assert pact.wrap(learner._network).eval()(pairs[0][0]).shape == (24, 6)


@pytest.mark.training
def test_calibrators_of_logits_need_no_memory():
    seed_everything()
    manager, learner = DataManager(), Learner()
    held = pycil.hold_out(manager, per_class=10)
    learner.incremental_train(manager)
    learner.after_task()
    learner._data_memory = np.array([])
    scaling = pycil.calibrate(learner, manager, held, tcil.EnsembleTemperatureScaling())
    assert scaling.classes_ == (0, 1)
    with pytest.raises(ValueError, match="one without exemplars"):
        pycil.calibrate(learner, manager, held, tcil.TCIL())


class TestRefusals:
    def test_before_after_task(self):
        learner, manager = Learner(), DataManager()
        held = pycil.hold_out(manager, per_class=5)
        with pytest.raises(ValueError, match="has not learned a task"):
            pycil.calibrate(learner, manager, held, tcil.TCIL())
        learner.incremental_train(manager)
        with pytest.raises(ValueError, match=r"Call learner.after_task\(\) first"):
            pycil.calibrate(learner, manager, held, tcil.TCIL())

    def test_other_things(self):
        with pytest.raises(ValueError, match="data_manager: got int"):
            pycil.hold_out(3, per_class=1)
        with pytest.raises(ValueError, match="per_class: got 40, with 40 training images"):
            pycil.hold_out(DataManager(), per_class=40)
        with pytest.raises(ValueError, match="learner: got int"):
            pycil.calibrate(3, DataManager(), None, tcil.TCIL())
        with pytest.raises(ValueError, match="calibrator: got str"):
            pycil.calibrate(Learner(), DataManager(), None, "TCIL")


@pytest.mark.processes
@pytest.mark.slow
def test_the_script_runs_in_a_checkout():
    """WA of the real PyCIL, with its alignment, on digits."""
    folder = os.environ.get("TCIL_PYCIL")
    if not folder:
        pytest.skip("TCIL_PYCIL names no checkout of PyCIL: its own learners are not run")
    paths = os.pathsep.join([str(Path(folder).resolve()), str(ROOT / "examples" / "integrations")])
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples" / "integrations" / "pycil_learner.py")]
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    labels, _, temperature = ended.stdout.strip().splitlines()[-1].rpartition(" ")
    assert labels == "(3, 1, 4, 0)"
    assert float(temperature) > 0
