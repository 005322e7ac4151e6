"""A head that has grown is the same model for the classes it had; anything else that changed is another model."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch
from torch import nn

import tcil
from tcil.calibration.inputs.weights import weights_hash

D, K = 6, 4


class Linear(nn.Module):
    def __init__(self, width=K):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(D, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.fc = nn.Linear(8, width)

    def forward(self, x):
        return self.fc(self.backbone(x))

    def grow(self):
        old, self.fc = self.fc, nn.Linear(8, self.fc.out_features + 2)
        with torch.no_grad():
            self.fc.weight[: old.out_features] = old.weight
            self.fc.bias[: old.out_features] = old.bias


class Wide(Linear):
    """A fixed head with columns for classes to come."""

    def __init__(self):
        super().__init__(10)


class Square(nn.Module):
    """As many features as classes."""

    def __init__(self):
        super().__init__()
        self.backbone, self.fc = nn.Sequential(nn.Linear(D, K), nn.ReLU()), nn.Linear(K, K)

    def forward(self, x):
        return self.fc(self.backbone(x))

    def grow(self):
        old, self.fc = self.fc, nn.Linear(K, K + 2)
        with torch.no_grad():
            self.fc.weight[:K] = old.weight
            self.fc.bias[:K] = old.bias


class Cosine(Linear):
    class Head(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight, self.sigma = nn.Parameter(torch.randn(width, 8)), nn.Parameter(torch.tensor(4.0))

        def forward(self, f):
            return self.sigma * nn.functional.linear(nn.functional.normalize(f), nn.functional.normalize(self.weight))

    def __init__(self):
        super().__init__()
        self.fc = self.Head(K)

    def grow(self):
        self.fc.weight = nn.Parameter(torch.cat([self.fc.weight.detach(), torch.randn(2, 8)]))


class Transposed(Cosine):
    class Head(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, width))

        def forward(self, f):
            return f @ self.weight

    def grow(self):
        self.fc.weight = nn.Parameter(torch.cat([self.fc.weight.detach(), torch.randn(8, 2)], dim=1))


class Heads(nn.Module):
    """One head for each task, put side by side."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(D, 8), nn.ReLU())
        self.heads = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 2)])

    def forward(self, x):
        f = self.backbone(x)
        return torch.cat([head(f) for head in self.heads], dim=1)

    def grow(self):
        self.heads.append(nn.Linear(8, 2))


class HeadList(Heads):
    def forward(self, x):
        f = self.backbone(x)
        return [head(f) for head in self.heads]


class NamedHeads(Heads):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({"first": nn.Linear(8, 2), "second": nn.Linear(8, 2)})

    def forward(self, x):
        f = self.backbone(x)
        return torch.cat([head(f) for head in self.heads.values()], dim=1)

    def grow(self):
        self.heads["third"] = nn.Linear(8, 2)


class HeadsInAModule(Heads):
    class Side(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 2)])

        def forward(self, f):
            return torch.cat([part(f) for part in self.parts], dim=1)

    def __init__(self):
        super().__init__()
        self.heads = self.Side()

    def forward(self, x):
        return self.heads(self.backbone(x))

    def grow(self):
        self.heads.parts.append(nn.Linear(8, 2))


class Tied(Linear):
    """The head's weight is known by a second name."""

    def __init__(self):
        super().__init__()
        self.prototypes = self.fc.weight

    def grow(self):
        super().grow()
        self.prototypes = self.fc.weight


KINDS = [Linear, Wide, Square, Cosine, Transposed, Heads, HeadList, NamedHeads, HeadsInAModule, Tied]


def data():
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(60) % K
    x = torch.randn(60, D, generator=generator) + torch.eye(K, D)[y]
    return (x, y), (x[y >= 2] + 0.3, y[y >= 2])


def fitted(model, method="tcil", **options):
    memory, valid = data()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tcil.CalibrationWarning)
        if method == "noise":
            return tcil.PerturbedTemperatureScaling(search="nelder-mead").fit(model, valid=valid, **options)
        return tcil.TCIL().fit(model, memory, valid, [2, 3], **options)


def make(kind):
    torch.manual_seed(0)
    return kind().eval()


@pytest.mark.parametrize("method", ["tcil", "noise"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_grown_head_is_the_same_model(kind, method, tmp_path):
    model = make(kind)
    calibrator, x = fitted(model, method), data()[0][0]
    with torch.no_grad():
        before = calibrator.wrap(model)(x)
        path = calibrator.save(tmp_path / "c.json")
        model.grow()
        for grown in (model, nn.DataParallel(model)):
            again = calibrator.wrap(grown, wider_head=True)(x)
            assert torch.allclose(again, before, atol=1e-5)
        loaded = tcil.load(path, model=model)
        assert torch.allclose(loaded.wrap(model, wider_head=True)(x), before, atol=1e-5)
        loaded = tcil.load(calibrator.save(path, model=model), model=model)
        loaded.check_weights(model)
        # The classes that came have no calibrated probability: to leave them out has to be said.
        with pytest.raises(ValueError, match=r"got \d+ logits; expected .*wider_head=True"):
            calibrator.wrap(model)(x)


@pytest.mark.parametrize("grown", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_any_other_change_is_noticed(kind, grown):
    model = make(kind)
    calibrator = fitted(model)
    own = {name: value.shape for name, value in model.state_dict().items()}
    if grown:
        model.grow()
    weights = copy.deepcopy(model.state_dict())
    for name in own:
        value = model.state_dict()[name]
        for place in {0, -1} if value.ndim else {None}:
            where = (0,) * (value.ndim - 1) + (place,) if value.ndim else ()
            if grown and value.ndim and value.shape != own[name]:
                where = tuple(0 for _ in range(value.ndim))  # a column that was there
            with torch.no_grad():
                value[where] += 1
            if kind is Wide and name == "fc.bias" and place == -1 and not grown:
                calibrator.check_weights(model)  # of a class to come
            else:
                with pytest.raises(tcil.WeightsMismatchError):
                    calibrator.check_weights(model)
            model.load_state_dict(weights)
    calibrator.check_weights(model)


def test_columns_of_a_wide_head():
    """Only the columns in use count, wherever they are."""
    model = make(Wide)
    weights = copy.deepcopy(model.state_dict())
    (x, y), (xv, yv) = data()
    columns = torch.tensor([7, 2, 9, 0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tcil.CalibrationWarning)
        calibrator = tcil.TCIL().fit(model, (x, columns[y]), (xv, columns[yv]), [9, 0], columns=columns)
    for column in range(10):
        with torch.no_grad():
            model.fc.weight[column] += 1
        if column in columns:
            with pytest.raises(tcil.WeightsMismatchError):
                calibrator.check_weights(model)
        else:
            calibrator.check_weights(model)
        model.load_state_dict(weights)


def test_a_head_that_shrank_or_lost_a_part_is_another_model():
    model = make(Linear)
    calibrator = fitted(model)
    model.fc.weight, model.fc.bias = nn.Parameter(model.fc.weight[:3]), nn.Parameter(model.fc.bias[:3])
    with pytest.raises(tcil.WeightsMismatchError):
        calibrator.check_weights(model)
    model = make(Heads)
    calibrator = fitted(model)
    for change in (
        lambda m: m.heads.pop(1),
        lambda m: m.heads.insert(0, nn.Linear(8, 2)),
        lambda m: delattr(m, "heads"),
    ):
        other = copy.deepcopy(model)
        change(other)
        with pytest.raises(tcil.WeightsMismatchError):
            calibrator.check_weights(other)
    with pytest.raises(tcil.WeightsMismatchError):
        calibrator.check_weights(nn.Linear(D, K))


def test_a_new_part_of_the_body_is_another_model():
    model = make(Heads)
    calibrator = fitted(model)
    model.adapter = nn.Linear(8, 8)
    with pytest.raises(tcil.WeightsMismatchError):
        calibrator.check_weights(model)


class LayersAndHeads(Heads):
    """Layers and heads in one list: what comes after the heads may be anything."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Identity()
        self.heads = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 2), nn.Linear(D, 8)])

    def forward(self, x):
        f = self.heads[2](x)
        return torch.cat([head(f) for head in self.heads[:2]], dim=1)


def test_layers_that_share_the_heads_list_count():
    model = make(LayersAndHeads)
    calibrator = fitted(model)
    with torch.no_grad():
        model.heads[2].weight[0, 0] += 1
    with pytest.raises(tcil.WeightsMismatchError):
        calibrator.check_weights(model)


class Stages(nn.Module):
    """A list in which the head is followed by what works on its logits."""

    def __init__(self, features=8):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(D, features), nn.ReLU())
        self.stages = nn.ModuleDict({"fc": nn.Linear(features, K)})

    def forward(self, x):
        x = self.backbone(x)
        for stage in self.stages.values():
            x = stage(x)
        return x


@pytest.mark.parametrize("features", [8, K])  # the second: a correction has the shape of a head
def test_what_works_on_the_logits_is_no_further_head(features, tmp_path):
    torch.manual_seed(0)
    model = Stages(features).eval()
    calibrator = fitted(model)
    path = calibrator.save(tmp_path / "c.json")
    calibrator.check_weights(model)
    model.stages["correction"] = nn.Linear(K, K)
    with pytest.raises(tcil.WeightsMismatchError):
        calibrator.wrap(model)
    with pytest.raises(tcil.WeightsMismatchError):
        tcil.load(path, model=model)


def test_where_the_head_is_not_known_all_weights_count():
    model = make(Linear)
    calibrator = fitted(model, features=lambda x: model.backbone(x))
    calibrator.check_weights(model)
    model.grow()
    with pytest.raises(tcil.WeightsMismatchError):
        calibrator.check_weights(model)


def test_files_with_the_hash_of_all_weights_are_read(tmp_path):
    model = make(Linear)
    path = fitted(model).save(tmp_path / "c.json")
    record = {**json.loads(path.read_text()), "format_version": 1, "model_hash": weights_hash(model)}
    del record["checksum"]
    path.write_text(json.dumps(record, indent=2))
    calibrator = tcil.load(path, model=model)
    again = tcil.load(calibrator.save(path), model=model)
    model.grow()
    for old in (calibrator, again):
        with pytest.raises(tcil.WeightsMismatchError):
            old.check_weights(model)


def test_features_named_by_their_module():
    model = make(Linear)
    calibrator = fitted(model, features="backbone")
    model.grow()
    calibrator.check_weights(model)


def test_pact_knows_a_network_that_it_was_fitted_on():
    model, (memory, valid) = make(Linear), data()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tcil.CalibrationWarning)
        pact = tcil.PACT().fit(model, memory, valid, [2, 3], imbalance=2.0)
    if pact.history_ is not None:
        with pytest.raises(ValueError, match="this very network"):
            tcil.PACT().fit(model, memory, valid, [2, 3], imbalance=2.0, history=pact.history_)
