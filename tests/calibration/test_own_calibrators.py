"""Calibrators of the user's own: what would be wrong silently later is refused where it is made."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from every_calibrator import ByNorm, NormMap
from torch import Tensor, nn

import tcil
from tcil.extending import CalibrationMap, Calibrator, TemperatureMap, predict_features


@dataclass(frozen=True)
class Told:
    n_samples: int


class ByTwo(Calibrator[Told]):
    map_type, result_type = TemperatureMap, Told

    def fit(self, logits, labels=None, classes=None, result=None):
        mapping = TemperatureMap(torch.tensor(2.0, dtype=torch.float64))
        names = range(logits.shape[1]) if classes is None else classes
        return self._fitted(mapping, names, Told(len(logits)) if result is None else result)


class Powered(CalibrationMap):
    def __init__(self, t: Tensor, power: float = 1.0) -> None:
        super().__init__()
        self.set_state(t=t)
        self.power = power

    def forward(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
        return torch.log_softmax(logits.double() / self.t**self.power, dim=1)


class Learned(CalibrationMap):
    def __init__(self) -> None:
        super().__init__()
        self.t = nn.Parameter(torch.ones(1))


class Renamed(Powered):
    def __init__(self, start: Tensor) -> None:
        super().__init__(start)


class Unnormalised(TemperatureMap):
    def forward(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
        return logits.double() / self.temperature


class Narrow(TemperatureMap):
    def forward(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
        return super().forward(logits, features)[:, :1]


class Given(Calibrator[Told]):
    map_type, result_type = Powered, Told

    def fit(self, mapping):
        return self._fitted(mapping, range(4), Told(1))


T = torch.tensor(2.0, dtype=torch.float64)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (lambda: Powered(T, power=2.0), "mapping: got Powered, which gives other probabilities when made from its buf"),
        (lambda: Learned(), "mapping: got Learned with the parameters t; expected buffers alone"),
        (
            lambda: Renamed(T),
            r"mapping: got Renamed, which cannot be made from its buffers \(.*'t'\); expected one who",
        ),
        (lambda: Unnormalised(T), "mapping: got Unnormalised, whose probabilities do not sum to 1; expected log-prob"),
        (lambda: Narrow(T), r"mapping: got Narrow, which returns \(4, 1\); expected log-probabilities, \(4, 4\)"),
        (lambda: nn.Identity(), "mapping: got Identity; expected a tcil.extending.CalibrationMap"),
    ],
)
def test_maps_that_wrap_and_load_could_not_make_again(mapping, message):
    calibrator = Given()
    with pytest.raises(ValueError, match=message):
        calibrator.fit(mapping())
    with pytest.raises(tcil.NotFittedError):
        calibrator.classes_  # noqa: B018


@pytest.mark.parametrize("classes", [np.arange(4), torch.arange(4), [7, 5, 6, 4]])
def test_labels_of_any_kind_are_saved(tmp_path, classes):
    calibrator = ByTwo().fit(torch.zeros(3, 4), classes=classes)
    loaded = tcil.load(calibrator.save(tmp_path / "c.json"))
    assert type(loaded) is ByTwo
    assert loaded.classes_ == tuple(int(label) for label in classes)


def test_repeated_labels_are_refused_in_fit():
    with pytest.raises(ValueError, match=r"classes: got repeated labels \[5\]; expected each class label once"):
        ByTwo().fit(torch.zeros(3, 4), classes=(5, 5, 6, 7))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (Told(np.float32(1)), "result: got Object of type float32 is not JSON serializable; expected plain numbers"),
        (Told(torch.ones(1)), "result: got Object of type Tensor is not JSON serializable; expected plain numbers"),
        (3.5, r"calibrator: got a ByTwo whose file could not be loaded \(.*\); expected a fit that ByTwo.map_type"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(tmp_path, result, message):
    calibrator = ByTwo().fit(torch.zeros(3, 4), result=result)
    with pytest.raises(ValueError, match=message):
        calibrator.save(tmp_path / "c.json")
    assert not list(tmp_path.iterdir())


def test_a_map_of_another_class_is_not_saved(tmp_path):
    """Its buffers may have the same names, so that load would make another function of them."""

    class Sharper(TemperatureMap):
        def forward(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
            return torch.log_softmax(2 * logits.double() / self.temperature, dim=1)

    class Other(Given):
        map_type = TemperatureMap

    calibrator = Other().fit(Sharper(T))
    with pytest.raises(
        ValueError, match=r"Other\.map_type: got TemperatureMap, where the fitted map is a Sharper; expec"
    ):
        calibrator.save(tmp_path / "c.json")
    assert not list(tmp_path.iterdir())


def test_a_map_that_changes_its_logits():
    class Greedy(TemperatureMap):
        def forward(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
            logits[:, 0] = -1.0
            return super().forward(logits, features)

    class Careful(TemperatureMap):
        def forward(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
            z = logits.double()
            z /= self.temperature
            return torch.log_softmax(z, dim=1)

    with pytest.raises(ValueError, match="mapping: got Greedy, which changes the logits that it is given"):
        Given().fit(Greedy(T))
    assert Given().fit(Careful(T)).classes_ == (0, 1, 2, 3)


def test_options_that_json_does_not_bring_back(tmp_path):
    @dataclass(eq=False, kw_only=True)
    class Picky(ByTwo):
        told: object = None

        def __post_init__(self):
            super().__post_init__()
            if not isinstance(self.told, Told | None):
                raise ValueError("told must be a Told")

    with pytest.raises(ValueError, match=r"a Picky whose file could not be loaded \(told must be a Told\)"):
        Picky(told=Told(3)).fit(torch.zeros(3, 4)).save(tmp_path / "c.json")


def test_options_as_scikit_learn_has_them(tmp_path):
    from sklearn.base import BaseEstimator

    class Sk(BaseEstimator, ByTwo):
        def __init__(self, alpha=1.0):
            self.alpha = alpha

    path = Sk(alpha=3.0).fit(torch.zeros(3, 4)).save(tmp_path / "c.json")
    assert tcil.load(path).alpha == 3.0


def test_partial_fit_of_a_class_that_forgets_the_base_class():
    class Plain(ByTwo):
        def __init__(self):
            self.note = "no super().__init__()"

    assert Plain().partial_fit(torch.zeros(3, 4)).classes_ == (0, 1, 2, 3)


@pytest.mark.parametrize("module", [["a"], {"b": 1}, 3])
def test_a_module_that_is_no_name(tmp_path, module):
    from tcil.foundation.checksums import open_json, seal_json

    path = ByTwo().fit(torch.zeros(3, 4)).save(tmp_path / "c.json")
    path.write_bytes(seal_json(open_json(path.read_bytes()) | {"module": module}))
    assert type(tcil.load(path)) is ByTwo


def test_options_outside_the_fields_are_refused():
    with pytest.raises(TypeError, match=r"Scaled: got an __init__ with the options l2; expected fields of a dataclass"):

        class Scaled(Calibrator[Told]):
            def __init__(self, l2=0.01):
                self.l2 = l2


def test_an_init_that_forgets_the_base_class_says_what_is_missing():
    class Plain(ByTwo):
        def __init__(self):
            self.note = "no super().__init__()"

    with pytest.raises(tcil.NotFittedError, match="Plain is not fitted yet"):
        Plain().predict_proba(torch.zeros(1, 4))


def test_options_of_a_class_that_has_changed(tmp_path):
    @dataclass(eq=False, kw_only=True)
    class Changed(ByTwo):
        l2: float = 0.1

    path = Changed().fit(torch.zeros(3, 4)).save(tmp_path / "c.json")

    @dataclass(eq=False, kw_only=True)
    class Changed(ByTwo):
        strength: float = 0.1

    with pytest.raises(ValueError, match=r"with the options l2; expected those of the class as it is now \(strength\)"):
        tcil.load(path)


class TestNames:
    """A file names a class and its module, so that one of the same name is not taken for it."""

    @pytest.fixture
    def namesake(self):
        known = tcil.extending.Calibrator._known
        before = {name: dict(kinds) for name, kinds in known.items()}

        class TemperatureScaling(ByTwo):
            pass

        yield TemperatureScaling
        known.clear()
        known.update(before)

    def test_each_is_loaded_as_itself(self, tmp_path, namesake):
        logits, labels = 3 * torch.eye(4).repeat(3, 1), torch.tensor([0, 1, 2, 3] * 2 + [1, 2, 3, 0])
        own = namesake().fit(logits).save(tmp_path / "own.json")
        built_in = tcil.TemperatureScaling().fit(logits, labels).save(tmp_path / "tcil.json")
        assert type(tcil.load(own)) is namesake
        assert type(tcil.load(built_in)) is tcil.TemperatureScaling

    def test_a_file_without_a_module_is_of_tcil(self, tmp_path, namesake):
        from tcil.foundation.checksums import open_json, seal_json

        path = (
            tcil.TemperatureScaling().fit(3 * torch.eye(3).repeat(2, 1), [0, 1, 2, 1, 2, 0]).save(tmp_path / "c.json")
        )
        record = open_json(path.read_bytes())
        del record["module"]
        path.write_bytes(seal_json(record))
        assert type(tcil.load(path)) is tcil.TemperatureScaling

    def test_an_own_class_that_is_not_defined_is_named(self, tmp_path, namesake):
        path = namesake().fit(torch.zeros(3, 4)).save(tmp_path / "c.json")
        del tcil.extending.Calibrator._known["TemperatureScaling"][namesake.__module__]
        with pytest.raises(ValueError, match=r"Import the module that defines it first \('test_own_calibrators'\)"):
            tcil.load(path)

    def test_the_module_is_in_the_file(self, tmp_path):
        path = ByTwo().fit(torch.zeros(3, 4)).save(tmp_path / "c.json")
        assert json.loads(path.read_text())["module"] == ByTwo.__module__


class TestFeatures:
    @pytest.fixture
    def network(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5))

    def test_wrap_save_and_load_with_public_names(self, network, tmp_path):
        x, y = torch.randn(20, 4), 3 + torch.arange(20) % 3
        calibrator = ByNorm().fit(network, (x, y), classes=[3, 4, 5], columns=[0, 2, 4])
        loaded = tcil.load(calibrator.save(tmp_path / "c.json"), model=network)
        with torch.no_grad():
            features = network[:2](x)
            wanted = calibrator.transform(network(x)[:, [0, 2, 4]], features)
            assert torch.allclose(loaded.wrap(network)(x), wanted, atol=1e-6)
            network[2].weight[0, 0] += 1
        with pytest.raises(tcil.WeightsMismatchError):
            loaded.wrap(network)

    def test_batches_and_loaders_give_the_same_rows(self, network):
        x, y = torch.randn(20, 4), torch.arange(20) % 5
        whole = predict_features(network, (x, y))
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=6)
        for other in (predict_features(network, (x, y), batch_size=7), predict_features(network, loader)):
            torch.testing.assert_close(other.logits, whole.logits)
            torch.testing.assert_close(other.features, whole.features)
            assert torch.equal(other.label_columns, whole.label_columns)
        assert torch.allclose(whole.logits, tcil.predict_logits(network, (x, y))[0])

    def test_without_what_was_seen_it_cannot_be_wrapped(self, network):
        class Blind(ByNorm):
            def fit(self, model, valid):
                rows = predict_features(model, valid)
                return self._fitted(NormMap(T), rows.classes, Told(1))

        calibrator = Blind().fit(network, (torch.randn(6, 4), torch.arange(6) % 5))
        with pytest.raises(ValueError, match=r"calibrator: got one that does not know its features.*predict_features"):
            calibrator.wrap(network)
