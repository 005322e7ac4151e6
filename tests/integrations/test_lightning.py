"""The callback inside Lightning's Trainer."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

import tcil
from integrations.conftest import need, seed_everything

pytestmark = [pytest.mark.training, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def lightning():
    return need("lightning")


def module_of(lightning, returns_logits=True):
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 6))

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, index):
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def test_step(self, batch, index):
            return {"logits": self(batch[0])} if returns_logits else None

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.2)

    seed_everything()
    return Module()


def trainer_of(lightning, *callbacks):
    return lightning.Trainer(
        max_epochs=4,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )


def callback_of(*args, **kwargs):
    from tcil.integrations.lightning import CalibrationCallback

    return CalibrationCallback(*args, **kwargs)


@pytest.mark.parametrize("returns_logits", [True, False])
def test_the_same_temperature_and_errors_as_without_lightning(lightning, blob_tasks, returns_logits):
    module, pact, own, memory, tests = module_of(lightning, returns_logits), tcil.PACT(), tcil.PACT(), [], []
    for task, (train, valid, test) in enumerate(blob_tasks):
        new = [2 * task, 2 * task + 1]
        data = ConcatDataset([*memory, TensorDataset(*train)])
        memory.append(TensorDataset(train[0][:10], train[1][:10]))
        tests.append(TensorDataset(*test))
        kept = tuple(torch.cat(part) for part in zip(*(subset.tensors for subset in memory), strict=True))
        callback = callback_of(pact, new_classes=new, valid=valid, memory=lambda kept=kept: kept)
        trainer = trainer_of(lightning, callback)
        trainer.fit(module, DataLoader(data, 16, shuffle=True))
        presented = {label: 4 * 60 if label in new else 4 * 5 for label in range(max(new) + 1)}
        assert callback.presented == presented
        own.partial_fit(module, kept, valid, new, imbalance=presented)
        assert pact.temperature_ == pytest.approx(own.temperature_, abs=1e-6)
        assert pact.bias_ == pytest.approx(own.bias_, abs=1e-6)
        (scores,) = trainer.test(module, DataLoader(ConcatDataset(tests), 50), verbose=False)
    x, y = (torch.cat(part) for part in zip(*(subset.tensors for subset in tests), strict=True))
    probs = own.predict_proba(module(x).detach())
    ece = tcil.metrics.expected_calibration_error(probs, y, groups=tcil.metrics.predicted_groups(probs, [4, 5]))
    assert scores["calibration/ece"] == pytest.approx(float(ece), abs=1e-6)
    assert scores["calibration/ece_predicted_old"] == pytest.approx(ece.by_group["old"], abs=1e-6)
    assert scores["calibration/ece_predicted_new"] == pytest.approx(ece.by_group["new"], abs=1e-6)
    plain = tcil.metrics.expected_calibration_error(torch.softmax(module(x).detach().double(), 1), y)
    assert scores["calibration/ece_uncalibrated"] == pytest.approx(float(plain), abs=1e-6)


def test_dict_batches_and_a_calibrator_of_logits(lightning, blob_tasks):
    module = module_of(lightning)
    module.training_step = lambda batch, batch_idx: nn.functional.cross_entropy(module(batch["image"]), batch["label"])
    (x, y), valid, _ = blob_tasks[0]
    callback = callback_of(tcil.TemperatureScaling(), new_classes=[0, 1], valid=valid)
    data = [{"image": image, "label": label} for image, label in zip(x, y, strict=True)]
    trainer_of(lightning, callback).fit(module, DataLoader(data, 16))
    logits, labels = tcil.predict_logits(module, valid, classes=[0, 1])
    assert callback.calibrator.temperature_ == pytest.approx(tcil.fit_temperature(logits, labels).temperature)


def test_exemplars_that_training_never_shows(lightning, blob_tasks):
    module = module_of(lightning)
    train, valid, _ = blob_tasks[1]
    memory = tuple(torch.cat(pair) for pair in zip(blob_tasks[0][0], train, strict=True))
    callback = callback_of(tcil.PACT(), new_classes=[2, 3], valid=valid, memory=memory)
    with pytest.raises(ValueError, match="without a single image of an old class"):
        trainer_of(lightning, callback).fit(module, DataLoader(TensorDataset(*train), 16))


def soft(labels):
    """Labels as mixup gives them."""
    return 0.7 * nn.functional.one_hot(labels, 6) + 0.3 * nn.functional.one_hot(labels.flip(0), 6)


def ignoring(labels):
    """A label of -1 in every batch, which the loss leaves out."""
    return torch.where(torch.arange(len(labels)) % 5 == 0, -1, labels)


def trained_on(lightning, blob_tasks, change, seen=lambda batch_idx: True, **more):
    """A training on the second task and its memory, whose labels are changed on their way into the loss."""
    module = module_of(lightning)
    x, y = (torch.cat(pair) for pair in zip(blob_tasks[0][0], blob_tasks[1][0], strict=True))
    callback = callback_of(tcil.PACT(), new_classes=[2, 3], valid=blob_tasks[1][1], memory=(x, y), **more)
    loss = nn.CrossEntropyLoss(ignore_index=-1)
    module.training_step = lambda batch, batch_idx: loss(module(batch[0]), batch[1])
    rows = [part.split(24) for part in (x, y)]
    batches = [(a, change(b) if seen(i) else b) for i, (a, b) in enumerate(zip(*rows, strict=True))]
    trainer_of(lightning, callback).fit(module, DataLoader(batches, batch_size=None))
    return callback, batches


def test_labels_that_training_ignores_are_not_counted(lightning, blob_tasks):
    callback, batches = trained_on(lightning, blob_tasks, ignoring)
    labels = torch.cat([batch[1] for batch in batches])
    assert callback.presented == {label: 4 * int((labels == label).sum()) for label in range(4)}
    assert callback.calibrator.temperature_ > 0


def test_batches_of_soft_labels_do_not_end_a_training(lightning, blob_tasks):
    callback, batches = trained_on(lightning, blob_tasks, soft, seen=lambda index: index % 2)
    hard = torch.cat([labels for _, labels in batches if labels.ndim == 1])
    assert callback.presented == {label: 4 * int((hard == label).sum()) for label in range(4)}
    with pytest.raises(ValueError, match=r"imbalance: got None, and training batches without labels.*unpack="):
        trained_on(lightning, blob_tasks, soft)
    assert trained_on(lightning, blob_tasks, soft, imbalance=1.0)[0].calibrator.temperature_ > 0


def test_labels_are_read_without_a_look_at_the_inputs(lightning, blob_tasks, monkeypatch):
    """Neither checks nor checksums of the images: they took half a second for a large batch."""
    from tcil.integrations import lightning as own

    (train, valid, test), _, _ = blob_tasks
    callback = callback_of(tcil.PACT(), new_classes=[0, 1], valid=valid, memory=train)

    def refuse(*args):
        raise AssertionError("the inputs were read")

    monkeypatch.setattr(own.ExampleStream, "_checked", refuse)
    for x, y in (train, test):
        broken = torch.full_like(x, torch.nan), y
        callback.on_train_batch_end(None, None, None, broken, 0)
        callback.on_test_batch_end(None, None, {"logits": torch.zeros(len(x), 6)}, broken, 0)
    assert callback.presented == {0: 160, 1: 160}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"calibrator": 1}, "calibrator: got int"),
        ({"memory": None}, "the exemplars that TCIL perturbs"),
        ({"classes": [0, 1]}, "labels among classes"),
        ({"columns": [0]}, "columns: got 1 columns"),
        ({"imbalance": 0}, "imbalance: got 0"),
        ({"unpack": "image"}, "unpack: got 'image'"),
    ],
)
def test_odd_arguments_are_refused(lightning, arguments, message):
    usual = {"calibrator": tcil.TCIL(), "new_classes": [2, 3], "valid": None, "memory": ()}
    with pytest.raises(ValueError, match=message):
        callback_of(**{**usual, **arguments})
