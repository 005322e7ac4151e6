"""T-CIL: what a fit takes, datasets and loaders, labels and columns, and that it leaves them as they are."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from tcil_fits import fit
from torch.utils.data import DataLoader, Dataset, TensorDataset

import tcil


class TestInputs:
    """Every way to hand over the same examples gives the same answer."""

    def forms(self, task):
        images, labels = task.memory
        shuffled = TensorDataset(images, labels)

        class Dicts(Dataset):
            def __len__(self):
                return len(labels)

            def __getitem__(self, i):
                return {"picture": images[i], "digit": labels[i], "id": i}

        return {
            "numpy": (images.numpy(), labels.numpy()),
            "int32 labels": (images, labels.int()),
            "dataset": shuffled,
            "loader": DataLoader(shuffled, batch_size=7),
            "list of batches": [(images[:20], labels[:20]), (images[20:], labels[20:])],
            "list of two dicts": [{"x": images[:20], "y": labels[:20]}, {"x": images[20:], "y": labels[20:]}],
            "triples": DataLoader(TensorDataset(images, labels, torch.arange(len(labels))), batch_size=9),
            "dicts by keys": (DataLoader(Dicts(), batch_size=8), ("picture", "digit")),
            "dicts by function": (DataLoader(Dicts(), batch_size=8), lambda b: (b["picture"], b["digit"])),
            "float64": (images.double(), labels),
        }

    @pytest.mark.parametrize(
        "form",
        [
            "numpy", "int32 labels", "dataset", "loader", "list of batches", "list of two dicts", "triples",
            "dicts by keys", "dicts by function", "float64",
        ],
    )  # fmt: skip
    def test_same_answer(self, task, form):
        plain = fit(task).result_
        memory, unpack = self.forms(task)[form], None
        if form.startswith("dicts"):
            memory, unpack = memory
            valid = [{"picture": task.valid[0], "digit": task.valid[1]}]
            other = fit(task, memory=memory, valid=valid, unpack=unpack).result_
        else:
            other = fit(task, memory=memory).result_
        assert other.magnitude == plain.magnitude
        assert other.temperature == pytest.approx(plain.temperature, rel=1e-5)
        assert other.verdicts == plain.verdicts

    @pytest.mark.parametrize("batch_size", [1, 5, 64])
    def test_batch_size_does_not_matter(self, task, batch_size):
        assert fit(task, batch_size=batch_size).temperature_ == pytest.approx(fit(task).temperature_, rel=1e-5)

    def test_valid_may_be_a_loader(self, task):
        loader = DataLoader(TensorDataset(*task.valid), batch_size=11)
        assert fit(task, valid=loader).temperature_ == pytest.approx(fit(task).temperature_, rel=1e-6)

    def test_loaders_are_streamed(self, task):
        """No more than a few batches are alive at once, whatever the length of the memory."""
        images, labels = task.memory
        alive = weakref.WeakSet()
        most = [0]

        class Batch(torch.Tensor):
            pass

        class Loader:
            def __iter__(self):
                for _ in range(12):
                    batch = images.clone().as_subclass(Batch)
                    alive.add(batch)
                    gc.collect()
                    most[0] = max(most[0], len(alive))
                    yield batch, labels.clone()

        gc.freeze()  # what other tests left is not looked through at every batch
        try:
            result = fit(task, memory=Loader()).result_
        finally:
            gc.unfreeze()
        assert result.n_exemplars == 12 * len(labels)
        assert most[0] <= 3

    def test_shuffled_loader_is_refused_at_once(self, task):
        loader = DataLoader(TensorDataset(*task.memory), batch_size=8, shuffle=True)
        with pytest.raises(ValueError, match=r"memory: got a DataLoader with shuffle=True.*shuffle=False"):
            fit(task, memory=loader)

    def test_random_transforms_are_refused(self, task):
        class Augmented(Dataset):
            def __len__(self):
                return len(task.memory[1])

            def __getitem__(self, i):
                return task.memory[0][i] + 0.1 * torch.randn(1, 8, 8), task.memory[1][i]

        with pytest.raises(ValueError, match="second pass differs from its first"):
            fit(task, memory=DataLoader(Augmented(), batch_size=8))

    def test_late_differences_are_refused_too(self, task):
        """The first batch is the same every time; only the third changes."""
        images, labels = task.memory
        passes = [0]

        class Loader:
            def __iter__(self):
                passes[0] += 1
                yield images[:10], labels[:10]
                yield images[10:20], labels[10:20]
                late = images[20:].clone()
                late[0, 0, 0, 0] += passes[0]
                yield late, labels[20:]

        with pytest.raises(ValueError, match="memory: got a loader whose second pass differs"):
            fit(task, memory=Loader())

    def test_one_shot_generators_are_refused(self, task):
        with pytest.raises(ValueError, match="a one-shot generator"):
            fit(task, memory=((x[None], y[None]) for x, y in zip(*task.memory, strict=True)))


def test_a_dataset_does_not_move_the_global_generator(task):
    torch.manual_seed(0)
    state = torch.get_rng_state()
    fit(task, memory=TensorDataset(*task.memory))
    assert torch.equal(torch.get_rng_state(), state)


class TestLabels:
    def test_other_label_spaces(self, task):
        """Class ids need not be in task order, nor small."""
        names = [50, 7, 300, 11, 2, 9]
        rename = torch.tensor(names)
        plain = fit(task)
        named = fit(
            task,
            memory=(task.memory[0], rename[task.memory[1]]),
            valid=(task.valid[0], rename[task.valid[1]]),
            new_classes={names[c] for c in task.new_classes},
            classes=names,
        )
        assert named.temperature_ == pytest.approx(plain.temperature_, rel=1e-9)
        assert named.classes_ == tuple(names)
        assert plain.classes_ == tuple(range(6))

    def test_fixed_head_with_a_column_for_every_label(self, task):
        """Classes seen are 7, 2, 9, 0, 4 and 5 of a ten-way head: `columns` says where they are."""
        seen = [7, 2, 9, 0, 4, 5]
        model = tcil.networks.small_cnn(n_classes=10)
        weights = {k: v.clone() for k, v in task.model.state_dict().items()}
        rest = [c for c in range(10) if c not in seen]
        for key in ("fc.weight", "fc.bias"):
            weights[key][seen] = task.model.state_dict()[key][:6]
            weights[key][rest] = 0.0
        model.load_state_dict(weights)
        rename = torch.tensor(seen)
        memory, valid = ((x, rename[y]) for x, y in (task.memory, task.valid))
        new = [seen[c] for c in task.new_classes]
        calibrator = tcil.TCIL().fit(model.eval(), memory, valid, new, columns=seen)
        plain = fit(task)
        assert calibrator.classes_ == calibrator.columns_ == tuple(seen)
        assert plain.columns_ is None
        assert calibrator.temperature_ == pytest.approx(plain.temperature_, rel=1e-5)
        wrapped = calibrator.wrap(model)(task.test[0][:9])
        assert torch.allclose(wrapped, plain.wrap(task.model)(task.test[0][:9]), atol=1e-4)
        logits, labels = tcil.predict_logits(model, valid, columns=seen)
        assert torch.equal(tcil.predict_logits(model, valid, calibrator=calibrator)[0], logits)
        with pytest.raises(ValueError, match="calibrator: got a calibrator beside classes; expected one of the two"):
            tcil.predict_logits(model, valid, calibrator=calibrator, classes=seen)
        with pytest.raises(tcil.NotFittedError):
            tcil.predict_logits(model, valid, calibrator=tcil.TCIL())
        other = copy.deepcopy(model)
        with torch.no_grad():
            next(other.parameters()).add_(1.0)
        with pytest.raises(
            tcil.WeightsMismatchError, match=r"or pass its classes_ and columns_ as classes= and columns="
        ):
            tcil.predict_logits(other, valid, calibrator=calibrator)
        with pytest.raises(ValueError, match="calibrator: got RiskThreshold; expected a fitted calibrator"):
            tcil.predict_logits(model, valid, calibrator=tcil.decisions.RiskThreshold())
        assert torch.allclose(logits, tcil.predict_logits(task.model, task.valid, classes=range(6))[0], atol=1e-4)
        accuracy = tcil.metrics.accuracy(calibrator.predict_proba(logits), labels, classes=calibrator.classes_)
        assert accuracy == tcil.metrics.accuracy(plain.predict_proba(logits), task.valid[1])
        with pytest.raises(ValueError, match=r"columns: got column 12; expected columns from 0 to 9"):
            tcil.predict_logits(model, valid, columns=[*seen[:-1], 12], classes=seen)

    @pytest.mark.filterwarnings("ignore::tcil.CalibrationWarning")
    def test_wrong_columns_are_noticed(self, task):
        shuffled = (task.memory[1] + 3) % 6
        with pytest.warns(tcil.CalibrationWarning, match="no better than by chance: do classes= and columns= fit"):
            result = fit(task, memory=(task.memory[0], shuffled)).result_
        assert "exemplars_at_chance" in result.verdicts

    def test_new_class_without_validation_rows(self, task):
        rows = task.valid[1] == 4
        with pytest.warns(tcil.CalibrationWarning, match="some new class has no validation row"):
            result = fit(task, valid=(task.valid[0][rows], task.valid[1][rows])).result_
        assert "classes_not_in_valid" in result.verdicts

    def test_wider_head_is_sliced_and_other_widths_refused(self, task):
        calibrator = fit(task)
        assert task.model.fc.out_features == 10
        assert len(calibrator.classes_) == 6
        with pytest.raises(ValueError, match=r"logits: got 10 columns; expected 6"):
            calibrator.transform(torch.randn(3, 10))
        sliced = fit_narrow(task)
        assert sliced.temperature_ == pytest.approx(calibrator.temperature_, rel=1e-5)

    def test_first_task_has_no_old_classes(self, task):
        """All classes new: all targets are the farthest, and one stream of new exemplars is all there is."""
        result = fit(task, valid=task.test, new_classes=range(6)).result_
        assert result.n_new_exemplars == result.n_exemplars == len(task.memory[1])
        farthest = fit(task, valid=task.test, new_classes=range(6), policy="farthest").result_
        assert farthest.temperature == result.temperature

    def test_old_rows_in_valid_are_reported_and_not_used(self, task):
        old = task.test[0][task.test[1] < 4][:15], task.test[1][task.test[1] < 4][:15]
        mixed = torch.cat([old[0], task.valid[0]]), torch.cat([old[1], task.valid[1]])
        with pytest.warns(tcil.CalibrationWarning, match=r"validation rows of old classes.*15 rows"):
            result = fit(task, valid=mixed).result_
        assert (result.n_valid_ignored, result.n_valid) == (15, len(task.valid[1]))
        assert "old_rows_in_valid" in result.verdicts
        assert result.temperature == pytest.approx(fit(task).temperature_, rel=1e-9)


def fit_narrow(task):
    model = tcil.networks.small_cnn(n_classes=6)
    weights = task.model.state_dict()
    weights["fc.weight"], weights["fc.bias"] = weights["fc.weight"][:6], weights["fc.bias"][:6]
    model.load_state_dict(weights)
    return tcil.TCIL().fit(model, task.memory, task.valid, task.new_classes)
