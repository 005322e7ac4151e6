"""Bad input gets an error that names the argument, what was given and what was expected, before any work is done."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

import tcil


class Watched(nn.Module):
    """Counts the batches it sees: an error before any work leaves it at zero."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        # A list, since attributes that forward() sets are put back afterwards.
        self.body, self.fc, self.seen = nn.Linear(6, 8), nn.Linear(8, 4), []

    @property
    def batches(self):
        return len(self.seen)

    def forward(self, x):
        self.seen.append(len(x))
        return self.fc(torch.relu(self.body(x)))


X, Y = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 4
XV, YV = torch.randn(20, 6, generator=torch.Generator().manual_seed(1)), 2 + torch.arange(20) % 2
GOOD = {"memory": (X, Y), "valid": (XV, YV), "new_classes": [2, 3]}


def nan_in(x, value=float("nan")):
    x = x.clone()
    x[3, 2] = value
    return x


BEFORE_ANY_WORK = [
    ("empty memory", {"memory": (X[:0], Y[:0])}, r"memory inputs: got shape \(0, 6\); expected at least one example"),
    ("no memory", {"memory": None}, r"memory: got NoneType; expected a pair"),
    ("empty valid", {"valid": (XV[:0], YV[:0])}, r"valid inputs: got shape \(0, 6\); expected at least one example"),
    ("missing valid", {"valid": None}, r"valid: got None.*use FirstTaskTemperatureScaling.*history="),
    ("class without exemplar", {"memory": (X[Y != 1], Y[Y != 1])}, r"memory: got no exemplar of the classes \[1\]"),
    ("listed class without exemplar", {"classes": [0, 1, 2, 3, 9]}, r"memory: got no exemplar of the classes \[9\]"),
    ("new class without exemplar", {"memory": (X[Y != 3], Y[Y != 3])}, r"new_classes: got the labels \[3\] without an"),
    ("negative labels", {"memory": (X, Y - 1)}, r"memory labels: got the label -1; expected labels of 0 or more"),
    ("float labels", {"memory": (X, Y.float())}, r"memory labels: got dtype torch.float32; expected integer"),
    ("bool labels", {"memory": (X, Y > 1)}, r"memory labels: got dtype torch.bool; expected integer"),
    ("one-hot labels", {"memory": (X, nn.functional.one_hot(Y))}, r"memory labels: got shape \(40, 4\).*argmax\(1\)"),
    ("labels outside classes", {"classes": [0, 1, 2]}, r"new_classes: got the labels \[3\]; expected labels among"),
    ("NaN images", {"memory": (nan_in(X), Y)}, r"memory inputs: got NaN or infinity in 1 of 40 examples"),
    ("infinite images", {"valid": (nan_in(XV, float("inf")), YV)}, r"valid inputs: got NaN or infinity in 1 of 20"),
    ("no new class", {"new_classes": []}, r"new_classes: got no class labels"),
    ("new classes missing", {"new_classes": None}, r"new_classes: got None; expected the labels of the newest task"),
    ("unknown new class", {"new_classes": [2, 3, 77]}, r"new_classes: got the labels \[77\] without an exemplar"),
    ("new class as name", {"new_classes": ["cat"]}, r"new_classes: got the entry 'cat'; expected integer"),
    ("new class as number", {"new_classes": 3}, r"new_classes: got 3; expected a list of class labels"),
    ("repeated classes", {"classes": [0, 1, 1, 2, 3]}, r"classes: got repeated labels \[1\]"),
    ("lengths differ", {"memory": (X, Y[:-1])}, r"memory: got 40 inputs and 39 labels; expected as many"),
    ("integer images", {"memory": ((X * 50).byte(), Y)}, r"memory inputs: got dtype torch.uint8.*x.float\(\) / 255"),
    ("images without labels", {"memory": X}, r"memory: got Tensor; expected a pair"),
    ("text", {"memory": "cifar100"}, r"memory: got str; expected a pair"),
    ("dict batches", {"memory": [{"a": X, "b": Y}]}, r"memory: got batches that are dicts with .*'a', 'b'.*unpack="),
    ("bare batches", {"memory": DataLoader(X, batch_size=9)}, r"memory: got batches of type Tensor.*unpack="),
    ("empty loader", {"memory": []}, r"memory: got no examples"),
    ("bad unpack", {"memory": [(X, Y)], "unpack": lambda b: b[0]}, r"unpack: got a function that returns Tensor"),
    ("NaN in a loader", {"memory": DataLoader(TensorDataset(nan_in(X), Y), batch_size=8)}, r"infinity in 1 of 8"),
    ("valid of old classes", {"valid": (XV, YV - 2)}, r"valid: got 20 rows, none of a new class"),
    ("unknown label in valid", {"valid": (XV, YV + 2)}, r"valid labels: got the label 4"),
    ("single class", {"memory": (X, 0 * Y), "valid": (XV, 0 * YV), "new_classes": [0]}, r"memory: got exemplars of a"),
    ("giant label", {"memory": (X, Y.where(Y != 1, 10**9))}, r"memory: got no exemplar of the classes \[1, 4, 5"),
    ("giant new class", {"new_classes": [10**9]}, r"new_classes: got the labels \[1000000000\] without"),
    ("float new class", {"new_classes": [torch.tensor(2.7)]}, r"new_classes: got the entry tensor\(2.7000\)"),
    ("dropped rows", {"memory": DataLoader(TensorDataset(X, Y), batch_size=9, drop_last=True)}, r"drops its last 4"),
    ("columns and classes", {"classes": [0, 1, 2, 3], "columns": [5, 6]}, r"columns: got 2 columns.*expected 4"),
    ("negative columns", {"columns": [-1, 0, 1, 2]}, r"columns: got 4 columns, \[-1, 0, 1, 2\]; expected column num"),
    ("unknown feature layer", {"features": "head"}, r"features: got 'head'; expected the name of a module"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"), [case[1:] for case in BEFORE_ANY_WORK], ids=[c[0] for c in BEFORE_ANY_WORK]
)
def test_refused_before_any_work(change, message):
    model = Watched()
    calibrator = tcil.TCIL()
    with pytest.raises(ValueError, match=message):
        calibrator.fit(model, **{**GOOD, **change})
    assert model.batches == 0
    with pytest.raises(tcil.NotFittedError):
        calibrator.transform(torch.randn(2, 4))


def test_the_good_arguments_are_good():
    """Otherwise the refusals above would prove nothing."""
    with pytest.warns(tcil.CalibrationWarning):
        tcil.TCIL().fit(Watched(), **GOOD)


class TestModel:
    def test_not_a_module(self):
        with pytest.raises(ValueError, match=r"model: got function; expected a torch.nn.Module"):
            tcil.TCIL().fit(lambda x: x, **GOOD)

    def test_labels_beyond_the_head(self):
        with pytest.raises(ValueError, match=r"memory labels: got the label 4.*0 to 3.*classes="):
            tcil.TCIL().fit(Watched(), (X, torch.arange(40) % 8), (XV, YV + 4), [6, 7])

    def test_several_inputs_are_refused_with_advice(self):
        batches = [({"image": X, "mask": X}, torch.arange(40) % 4)]
        with pytest.raises(ValueError, match=r"^memory inputs: got a dict; expected one tensor of inputs\. Wrap"):
            tcil.TCIL().fit(Watched(), batches, (XV, YV), [2, 3])

    @pytest.mark.parametrize(
        "memory",
        [
            [((X, X), torch.arange(40) % 4)],
            [([X, X[:, :2]], torch.arange(40) % 4)],
            ((X, X[:, :1]), torch.arange(40) % 4),
            ({"image": X}, torch.arange(40) % 4),
            [((row, row[:2]), 0) for row in X[:4]],
            [({"image": row}, 0) for row in X[:4]],
        ],
    )
    def test_several_inputs_are_refused_however_they_come(self, memory):
        with pytest.raises(
            ValueError, match=r"^memory inputs: got a (dict|tuple|list).*; expected one tensor of inputs"
        ):
            tcil.TCIL().fit(Watched(), memory, (XV, YV), [2, 3])

    def test_a_batch_that_is_a_list_of_its_inputs_is_no_several_inputs(self):
        with pytest.warns(tcil.CalibrationWarning):
            tcil.TCIL().fit(Watched(), [(list(X), torch.arange(40) % 4)], (XV, YV), [2, 3])

    def test_more_classes_than_columns(self):
        with pytest.raises(ValueError, match=r"classes: got 5 labels; expected at most 4, as the model has"):
            tcil.TCIL().fit(Watched(), (X, torch.arange(40) % 5), (XV, YV), [2, 3], classes=[0, 1, 2, 3, 4])

    def test_probabilities_for_logits(self):
        model = nn.Sequential(nn.Linear(6, 4), nn.Softmax(dim=1))
        with pytest.raises(ValueError, match=r"model: got outputs that are non-negative and sum to 1; expected logits"):
            tcil.TCIL().fit(model, **GOOD)

    @pytest.mark.parametrize(
        ("output", "message"),
        [
            (
                lambda z: torch.softmax(z, dim=1),
                r"model: got outputs that are non-negative and sum to 1; expected logits",
            ),
            (lambda z: {"scores": z}, r"model: got a dict output with the keys \['scores'\]"),
            (lambda z: (z, z), r"model: got an output of type tuple.*small nn.Module"),
            (lambda z: z[:, :, None], r"model: got an output of shape"),
            (lambda z: z[:5], r"model: got 5 rows of logits for"),
            (lambda z: z / 0, r"model: got NaN or infinity among its logits"),
            (lambda z: z.to_sparse(), r"model: got a sparse tensor \(torch.sparse_coo\).*to_dense\(\)"),
            (lambda z: [z[:, :2].to_sparse(), z[:, 2:].to_sparse()], r"model: got a sparse tensor"),
        ],
    )
    def test_odd_outputs(self, output, message):
        class Odd(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.fc = nn.Linear(6, 8), nn.Linear(8, 4)

            def forward(self, x):
                return output(self.fc(torch.relu(self.body(x))))

        with pytest.raises(ValueError, match=message):
            tcil.TCIL().fit(Odd(), **GOOD)

    def test_detached_logits(self, task):
        """Seen at the first gradient, since nothing before needs one."""

        class Detached(nn.Module):
            def __init__(self):
                super().__init__()
                self.network = task.model

            def forward(self, x):
                return self.network(x).detach()

        with pytest.raises(ValueError, match=r"model: got logits without a graph back to the inputs"):
            tcil.TCIL().fit(Detached(), task.memory, task.valid, task.new_classes)

    def test_every_loader_that_drops_examples(self):
        class Stream(IterableDataset):
            def __iter__(self):
                return iter(TensorDataset(X, Y))

        rows = TensorDataset(X, Y)
        some = BatchSampler(SequentialSampler(rows), 9, drop_last=True)
        for loader in (DataLoader(rows, batch_sampler=some), DataLoader(Stream(), batch_size=9, drop_last=True)):
            with pytest.raises(ValueError, match=r"memory: got a DataLoader that drops its last (4|few) examples"):
                tcil.TCIL().fit(Watched(), **{**GOOD, "memory": loader})

    def test_loaders_show_bad_labels_as_they_stream(self):
        valid = DataLoader(TensorDataset(XV, YV + 2), batch_size=8)
        with pytest.raises(ValueError, match=r"valid labels: got the label 4"):
            tcil.TCIL().fit(Watched(), (X, Y), valid, [2, 3])

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_torchscript(self):
        with pytest.raises(ValueError, match=r"model: got a TorchScript module"):
            tcil.TCIL().fit(torch.jit.trace(nn.Linear(6, 4), X), **GOOD)


class TestLogits:
    """The logits-only calibrators and fit_temperature share their checks."""

    fits = (
        tcil.fit_temperature,
        tcil.TemperatureScaling().fit,
        tcil.EnsembleTemperatureScaling().fit,
        tcil.MulticlassIsotonic().fit,
        tcil.FirstTaskTemperatureScaling().fit,
        lambda z, y: tcil.GroupTemperatureScaling().fit(z, y, new_classes=[0]),
    )
    z = 3 * torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    y = torch.arange(10) % 3

    @pytest.mark.parametrize("fit", fits)
    @pytest.mark.parametrize(
        ("logits", "labels", "message"),
        [
            (torch.softmax(z, 1), y, r"logits: got rows that are non-negative and sum to 1; expected logits"),
            (torch.softmax(z, 1).half(), y, r"logits: got rows that are non-negative and sum to 1; expected logits"),
            (nan_in(z), y, r"logits: got NaN or infinity in 1 of 10 rows"),
            (z[:0], y[:0], r"logits: got shape \(0, 3\)"),
            (z[0], y, r"logits: got shape \(3,\)"),
            (z[:, :1], 0 * y, r"logits: got 1 column; expected at least two classes"),
            (z, y[:5], r"labels: got 5 labels; expected 10"),
            (z, y + 1, r"labels: got the label 3; expected labels from 0 to 2"),
            (z, y - 1, r"labels: got the label -1"),
            (z, y.double(), r"labels: got dtype torch.float64"),
            (z, torch.stack([y, y], 1), r"labels: got shape \(10, 2\).*argmax\(1\)"),
            (z, y[:, None], r"labels: got shape \(10, 1\).*squeeze\(1\)"),
            (np.array([["a", "b"]]), y[:1], r"logits: got ndarray of dtype <U1"),
            ([[1.0, 2.0], [1.0]], y[:2], r"logits: got list"),
        ],
    )
    def test_refused(self, fit, logits, labels, message):
        with pytest.raises(ValueError, match=message):
            fit(logits, labels)

    def test_classes(self):
        for fit in (tcil.TemperatureScaling().fit, tcil.fit_temperature):
            with pytest.raises(ValueError, match=r"classes: got 2 labels; expected 3, one for each logit column"):
                fit(self.z, self.y, classes=[0, 1])
        with pytest.raises(ValueError, match=r"labels: got the label 2; expected labels in classes=\[0, 1, 5\]"):
            tcil.TemperatureScaling().fit(self.z, self.y, classes=[0, 1, 5])
        with pytest.raises(ValueError, match=r"new_classes: got the labels \[8\]"):
            tcil.GroupTemperatureScaling().fit(self.z, self.y, new_classes=[8])

    @pytest.mark.filterwarnings("ignore::tcil.CalibrationWarning")
    def test_transform(self):
        scaling = tcil.TemperatureScaling().fit(self.z, self.y)
        with pytest.raises(ValueError, match=r"logits: got 4 columns; expected 3"):
            scaling.transform(torch.randn(2, 4))
        with pytest.raises(ValueError, match=r"expected logits, not probabilities"):
            scaling.transform(scaling.predict_proba(self.z))
        with pytest.raises(ValueError, match=r"NaN or infinity"):
            scaling.transform(nan_in(self.z))

    def test_first_task_needs_something(self):
        with pytest.raises(ValueError, match=r"logits, labels: got none; expected the first task's validation set"):
            tcil.FirstTaskTemperatureScaling().fit()
        first = tcil.FirstTaskTemperatureScaling().fit([[2.0, 0.5], [0.1, 1.0], [0.7, 0.2]], [0, 1, 1])
        with pytest.raises(ValueError, match=r"classes: got None; expected the classes seen so far"):
            tcil.FirstTaskTemperatureScaling().fit(history=first.history_)
        for verdict in ([], {}, None, "nonsense"):
            with pytest.raises(ValueError, match=r"^history: got .*history_ of an earlier FirstTask"):
                tcil.FirstTaskTemperatureScaling().fit(history={**first.history_, "verdict": verdict}, classes=range(2))


class TestOptions:
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (
                lambda: tcil.TCIL(policy="nearest"),
                r"policy: got 'nearest'; expected one of paper, random, closest",
            ),
            (lambda: tcil.TCIL(policy="closes"), r"Did you mean 'closest'\?"),
            (lambda: tcil.TCIL(solver="newton"), r"solver: got 'newton'; expected one of exact, sgd"),
            (lambda: tcil.TCIL(tolerance=0), r"tolerance: got 0; expected a positive number"),
            (lambda: tcil.TCIL(tolerance=2), r"tolerance: got 2.0; expected less than 1"),
            (lambda: tcil.TCIL(batch_size=1.5), r"batch_size: got 1.5; expected a whole number of 1 or more"),
            (lambda: tcil.TemperatureScaling(solver=3), r"solver: got 3"),
            (
                lambda: tcil.PerturbedTemperatureScaling(n_levels=1),
                r"n_levels: got 1; expected a whole number of 2 or more",
            ),
            (lambda: tcil.PerturbedTemperatureScaling(search="simplex"), r"search: got 'simplex'"),
            (lambda: tcil.PerturbedTemperatureScaling(bounded="no"), r"bounded: got 'no'; expected True or False"),
            (lambda: tcil.metrics.expected_calibration_error([[0.5, 0.5]], [0], n_bins=0), r"n_bins: got 0"),
            (lambda: tcil.TCIL(seed=-1), r"seed: got -1"),
            (lambda: tcil.metrics.noise_floor([[0.5, 0.5]], n_draws=0), r"n_draws: got 0"),
            (lambda: tcil.predict_logits(Watched(), (X, Y), batch_size=0), r"batch_size: got 0"),
            (lambda: tcil.metrics.risk_at_coverage([[0.5, 0.5]], [0], coverage=0), r"coverage: got 0"),
        ],
    )
    def test_refused_at_construction(self, make, message):
        with pytest.raises(ValueError, match=message):
            make()

    @pytest.mark.parametrize(
        ("kind", "option", "value"),
        [
            (tcil.TCIL, "tolerance", -1.0),
            (tcil.TCIL, "tolerance", 0.0),
            (tcil.TCIL, "tolerance", 2.0),
            (tcil.TCIL, "batch_size", -5),
            (tcil.TCIL, "seed", "x"),
            (tcil.PACT, "keep_predictions", 3),
            (tcil.PerturbedTemperatureScaling, "n_levels", 10**12),
            (tcil.TemperatureScaling, "solver", 3),
        ],
    )
    def test_assigned_later_is_refused_by_fit(self, kind, option, value):
        calibrator, model = kind(), Watched()
        setattr(calibrator, option, value)
        data = {
            tcil.TemperatureScaling: ([[2.0, 0.5], [0.1, 1.0], [0.7, 0.2]], [0, 1, 1]),
            tcil.PerturbedTemperatureScaling: (model,),
        }.get(kind, (model, *GOOD.values()))
        named = {"valid": GOOD["valid"]} if kind is tcil.PerturbedTemperatureScaling else {}
        with pytest.raises(ValueError, match=f"^{option}: got "):
            calibrator.fit(*data, **named)
        assert model.batches == 0

    def test_assigned_later_is_taken_as_at_construction(self):
        calibrator = tcil.TemperatureScaling()
        calibrator.solver = "sgd"
        calibrator.fit([[2.0, 0.5], [0.1, 1.0], [0.7, 0.2]], [0, 1, 1])
        assert calibrator.solver is tcil.options.Solver.SGD

    def test_unknown_device(self):
        model = Watched()
        with pytest.raises(ValueError, match=r"device: got 'warp'.*; expected a device of this machine"):
            tcil.TCIL(device="warp").fit(model, **GOOD)
        assert model.batches == 0


def test_perturb_ts_checks_its_validation_set():
    with pytest.raises(ValueError, match=r"valid: got None.*use FirstTaskTemperatureScaling"):
        tcil.PerturbedTemperatureScaling().fit(Watched(), None)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'valid'"):
        tcil.PerturbedTemperatureScaling().fit(Watched())
    with pytest.raises(ValueError, match=r"valid labels: got the label 8"):
        tcil.PerturbedTemperatureScaling().fit(Watched(), valid=(XV, YV + 6))
    with pytest.raises(ValueError, match=r"classes: got 6 labels; expected 2 to 4"):
        tcil.PerturbedTemperatureScaling().fit(Watched(), valid=(XV, YV), classes=range(6))


class TestContainers:
    """What has no order names no columns; what is no list of numbers in memory is no array."""

    z = 3 * torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    y = z.argmax(1).where(torch.arange(10) > 4, torch.arange(10) % 3)
    unordered = ({5, 3, 9}, frozenset({5, 3, 9}), dict.fromkeys([5, 3, 9]).keys())

    @pytest.mark.parametrize("names", unordered, ids=lambda names: type(names).__name__)
    def test_sets_do_not_name_columns(self, names):
        probs, labels = torch.softmax(self.z, 1), torch.tensor([5, 3, 9])[self.y]
        pair, pick = (
            (X[:, :4], Y % 3),
            {"match": r"(classes|columns): got (set|frozenset|dict_keys), which has no order"},
        )
        memo = tcil.FirstTaskTemperatureScaling().fit(self.z, self.y).history_
        for call in (
            lambda: tcil.fit_temperature(self.z, labels, classes=names),
            lambda: tcil.TemperatureScaling().fit(self.z, labels, classes=names),
            lambda: tcil.EnsembleTemperatureScaling().fit(self.z, labels, classes=names),
            lambda: tcil.FirstTaskTemperatureScaling().fit(classes=names, history=memo),
            lambda: tcil.metrics.accuracy(probs, labels, classes=names),
            lambda: tcil.metrics.predicted_groups(probs, [5], classes=names),
            lambda: tcil.predict_logits(nn.Linear(4, 3), pair, classes=names),
            lambda: tcil.predict_logits(nn.Linear(4, 10), pair, columns=names),
            lambda: tcil.TCIL().fit(Watched(), **{**GOOD, "columns": names}),
            lambda: tcil.PerturbedTemperatureScaling().fit(Watched(), valid=(XV, YV), classes=names),
        ):
            with pytest.raises(ValueError, **pick):
                call()

    @pytest.mark.filterwarnings("ignore::tcil.CalibrationWarning")
    def test_new_classes_may_be_a_set(self):
        one, other = (tcil.TCIL().fit(Watched(), **{**GOOD, "new_classes": new}) for new in ([2, 3], {3, 2}))
        assert one.temperature_ == other.temperature_
        groups = [tcil.GroupTemperatureScaling().fit(self.z, self.y, new_classes=new) for new in ([1, 2], {2, 1})]
        assert groups[0].temperatures_ == groups[1].temperatures_

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            ([True, False, 2], "classes: got the entry True; expected integer class labels, not True or False"),
            (np.array([True, False]), "classes: got the entry True"),
            ([0.0, 1.0, 2.0], r"classes: got the entry 0\.0"),
            ("012", "classes: got str '012'; expected a list"),
            (b"\x00\x01\x02", "classes: got bytes"),
            ({0: "cat", 1: "dog", 2: "cow"}, "classes: got dict"),
            ([0, 1, 2**64], "classes: got an entry of 65 bits; expected integer class labels within int64"),
            ([0, 1, 10**400], "classes: got an entry of 1329 bits"),
            (np.array([0, 1, 2**63], dtype=np.uint64), "classes: got an entry of 64 bits"),
            (np.ma.masked_array([0, 1, 2], mask=[0, 1, 0]), "classes: got a masked array"),
            (torch.arange(3).to_sparse(), "classes: got a sparse tensor"),
        ],
    )
    def test_what_names_no_columns(self, names, message):
        with pytest.raises(ValueError, match=message):
            tcil.fit_temperature(self.z, self.y, classes=names)

    def test_iterators_have_an_order(self):
        want = tcil.fit_temperature(self.z, self.y)
        for names in ((i for i in range(3)), iter([0, 1, 2]), range(3), np.arange(3), torch.arange(3)):
            assert tcil.fit_temperature(self.z, self.y, classes=names) == want

    @pytest.mark.parametrize(
        ("logits", "message"),
        [
            (z.to_sparse(), "got a sparse tensor"),
            (z.to("meta"), "got a tensor on the meta device"),
            (z + 1j, "got dtype torch.complex64"),
            (np.ma.masked_array(z.numpy(), mask=z.numpy() > 2), "got a masked array"),
            ([np.ma.masked_array(row, mask=row > 0) for row in z.numpy()], "got a masked array"),
            ([[10**30, 0, 1]] * 10, "got list of dtype object"),
        ],
    )
    def test_what_is_no_array(self, logits, message):
        with pytest.raises(ValueError, match=f"logits: {message}"):
            tcil.fit_temperature(logits, self.y)
        with pytest.raises(ValueError, match=f"logits: {message}"):
            tcil.MulticlassIsotonic().fit(self.z, self.y).transform(logits)

    @pytest.mark.parametrize(
        ("labels", "message"),
        [
            ([2**64] * 10, "got list of dtype object"),
            ([2**63] * 10, "got the label 9223372036854775808; expected labels up to 9223372036854775807"),
            (np.full(10, 2**63, dtype=np.uint64), "got the label 9223372036854775808"),
            (np.ma.masked_array(np.zeros(10, dtype=int), mask=np.arange(10) == 1), "got a masked array"),
            (torch.zeros(10, dtype=torch.long, device="meta"), "got a tensor on the meta device"),
            (y + 0j, "got dtype torch.complex64"),
        ],
    )
    def test_what_are_no_labels(self, labels, message):
        with pytest.raises(ValueError, match=f"labels: {message}"):
            tcil.fit_temperature(self.z, labels)

    def test_every_container_of_the_same_numbers(self):
        want = tcil.fit_temperature(self.z.double(), self.y)
        z, y = self.z.double().numpy(), self.y.numpy()
        for logits in (z.astype(np.longdouble), np.asfortranarray(z), z[::-1][::-1], z.astype(">f8"), z.tolist(),
                       np.ma.masked_array(z), self.z.double().requires_grad_(), list(self.z.double())):  # fmt: skip
            assert tcil.fit_temperature(logits, y) == want
        for labels in (
            y.astype(np.uint64),
            y.astype(np.ulonglong),
            y.astype(np.int8),
            self.y.to(torch.uint8),
            y.tolist(),
        ):
            assert tcil.fit_temperature(z, labels) == want

    def test_reversed_views_of_one_row(self):
        """numpy calls them contiguous, although torch does not accept their negative strides."""
        scaling = tcil.TemperatureScaling().fit(self.z, self.y)
        row, probs = self.z[:1].numpy(), np.array([[0.9, 0.1]])
        for odd in (row[::-1], np.lib.stride_tricks.as_strided(row, strides=(-12, 4))):
            assert np.array_equal(scaling.predict_proba(odd), scaling.predict_proba(row))
        assert tcil.metrics.accuracy(probs[::-1], [0]) == tcil.metrics.accuracy(probs, np.array([0])[::-1]) == 1

    def test_whole_numbers_keep_their_last_digit(self):
        scores = torch.tensor([[2**24 + 1, 2**24, 0], [0, 2**24, 2**24 + 1]])
        scaling = tcil.TemperatureScaling().fit(self.z, self.y)
        assert scaling.predict_proba(scores).argmax(1).tolist() == [0, 2]

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: tcil.TemperatureScaling(seed=2**70), "seed: got a number of 71 bits"),
            (lambda: tcil.TCIL(tolerance=10**400), "tolerance: got a number beyond float64"),
            (lambda: tcil.fit_temperature([[1.0, 2.0]], [0], seed=2**70), "seed: got a number of 71 bits"),
        ],
    )
    def test_numbers_beyond_64_bits(self, make, message):
        with pytest.raises(ValueError, match=message):
            make()


def test_a_default_device_without_numbers():
    logits, labels = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
    model, data = torch.nn.Linear(3, 3), (logits, labels)
    probs = torch.softmax(logits, 1)
    with torch.device("meta"):
        for call in (
            lambda: tcil.fit_temperature(logits, labels),
            lambda: tcil.predict_logits(model, data),
            lambda: tcil.TCIL().fit(model, data, data, [2]),
            lambda: tcil.metrics.expected_calibration_error(probs, labels),
        ):
            with pytest.raises(
                ValueError, match=r"^torch\.set_default_device: got 'meta'.*set_default_device\('cpu'\)"
            ):
                call()


@pytest.mark.parametrize("which", ["memory", "valid"])
def test_an_error_of_the_model_says_what_it_was_run_on(which):
    given = {"memory": (torch.randn(8, 5), torch.arange(8) % 4), "valid": (torch.randn(6, 5), 2 + torch.arange(6) % 2)}
    inputs, labels = given[which]
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        tcil.TCIL().fit(torch.nn.Linear(5, 4), **(given | {which: (inputs[:, :3], labels)}), new_classes=[2, 3])
    assert any(f"{which}: the model was run on inputs of shape (" in note for note in caught.value.__notes__)


def test_names_of_classes_are_told_from_other_labels():
    model, x = nn.Linear(4, 3), torch.randn(6, 4)
    for labels in (np.array(["cat", "dog"] * 3), np.array(["cat", "dog"] * 3, dtype=object)):
        with pytest.raises(ValueError, match=r"data labels: got ndarray of dtype .* Map names of classes to whole"):
            tcil.predict_logits(model, (x, labels))
    with pytest.raises(ValueError, match=r"data labels: got str; .* Map names of classes to whole numbers"):
        tcil.predict_logits(model, [(row, "cat") for row in x])
    with pytest.raises(ValueError, match=r"probs: got .* of dtype complex128; expected a tensor or .* of numbers\.$"):
        tcil.metrics.accuracy(np.ones((2, 2), dtype=complex), [0, 1])
