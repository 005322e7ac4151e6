"""Data as users hold them: every container gives the same answer, and what cannot be used is told."""

from __future__ import annotations

import itertools
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import tcil
from tcil.calibration.inputs.examples import ExampleStream

K, SHAPE = 4, (3, 2, 2)
GENERATOR = torch.Generator().manual_seed(0)
CENTRES = 0.5 * torch.randn(K, 12, generator=GENERATOR)


def drawn(labels, noise=1.0):
    flat = CENTRES[labels] + noise * torch.randn(len(labels), 12, generator=GENERATOR)
    return flat.reshape(-1, *SHAPE), labels


MEMORY, VALID = drawn(torch.arange(48) % K, noise=0.5), drawn(2 + torch.arange(60) % 2)


class Network(nn.Module):
    """The posterior of the classes above, over-confident; counts its batches."""

    def __init__(self):
        super().__init__()
        self.fc, self.batches = nn.Linear(12, K), 0
        with torch.no_grad():
            self.fc.weight.copy_(3 * CENTRES)
            self.fc.bias.copy_(-1.5 * CENTRES.square().sum(dim=1))

    def forward(self, x):
        self.batches += 1
        return self.fc(x.flatten(1))


class Rows:
    """Examples by index, and no more: not a torch Dataset."""

    def __init__(self, x, y, form=lambda x, y, row: (x, int(y))):
        self.x, self.y, self.form = x, y, form

    def __len__(self):
        return len(self.y)

    def __getitem__(self, row):
        if not 0 <= row < len(self.y):
            raise IndexError(row)
        return self.form(self.x[row], self.y[row], row)


class Table(Rows):
    """As Hugging Face's datasets: rows by index, by iteration and by column name."""

    def __init__(self, x, y, inputs="pixel_values", label="label"):
        super().__init__(x, y, lambda x, y, row: {inputs: x.tolist(), label: int(y), "file": f"{row}.png", "box": None})

    def __getitem__(self, row):
        return [self[i] for i in range(len(self))] if isinstance(row, str) else super().__getitem__(row)

    def __iter__(self):
        return (self[row] for row in range(len(self)))


class Stream:
    """Batches in any number, without a length."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches())


def batches_of(x, y, size=64):
    return list(zip(x.split(size), y.split(size), strict=True))


def triples(x, y):
    return DataLoader(TensorDataset(torch.arange(len(y)), x, y), batch_size=64)


# Each makes a container of inputs and labels, with the unpack that it needs.
CONTAINERS = {
    "tensors": (lambda x, y: (x, y), None),
    "list of two tensors": (lambda x, y: [x, y], None),
    "arrays": (lambda x, y: (x.numpy(), y.numpy()), None),
    "dataset": (TensorDataset, None),
    "loader": (lambda x, y: DataLoader(TensorDataset(x, y), batch_size=64), None),
    "iterable dataset": (lambda x, y: _Iterable(x, y), None),
    "list of pairs": (lambda x, y: [(a, int(b)) for a, b in zip(x, y, strict=True)], None),
    "list of pairs of arrays": (lambda x, y: [(a.numpy(), b.numpy()) for a, b in zip(x, y, strict=True)], None),
    "tuple of dicts": (lambda x, y: tuple({"img": a, "label": b} for a, b in zip(x, y, strict=True)), None),
    "rows by index": (Rows, None),
    "rows with an index": (lambda x, y: Rows(x, y, lambda x, y, row: (row, x, int(y))), (1, 2)),
    "rows for a function": (lambda x, y: Rows(x, y, lambda x, y, row: (x, int(y), str(row))), lambda b: (b[0], b[1])),
    "table of python lists": (Table, None),
    "list of batches": (batches_of, None),
    "batches by index": (lambda x, y: Rows(*[[p[i] for p in batches_of(x, y)] for i in (0, 1)], lambda x, y, r: (x, y)),
                         None),
    "loader of triples": (triples, (1, 2)),
    "loader of triples, from the end": (triples, (-2, -1)),
    "loader of triples, a list of numpy integers": (triples, [np.int64(1), np.int32(2)]),
    "loader of triples, by function": (triples, lambda batch: batch[1:]),
    "dicts by keys": (lambda x, y: [{"picture": x, "digit": y, "label": -y}], ("picture", "digit")),
    "endless but for a limit": (lambda x, y: Stream(lambda: batches_of(x, y)), None),
}  # fmt: skip


class _Iterable(IterableDataset):
    def __init__(self, x, y):
        self.rows = list(zip(x, y, strict=True))

    def __iter__(self):
        return iter(self.rows)


@pytest.fixture(scope="module")
def of_tensors():
    """What pairs of tensors give."""
    return tcil.TCIL().fit(Network(), MEMORY, VALID, [2, 3]).result_, tcil.predict_logits(Network(), VALID)


@pytest.mark.parametrize(("make", "unpack"), CONTAINERS.values(), ids=CONTAINERS)
def test_every_container_gives_the_same_answer(make, unpack, of_tensors):
    plain, (want, labels) = of_tensors
    held = tcil.TCIL().fit(Network(), make(*MEMORY), make(*VALID), [2, 3], unpack=unpack).result_
    assert held == plain
    got = tcil.predict_logits(Network(), make(*VALID), unpack=unpack, batch_size=256)
    assert torch.equal(torch.as_tensor(got[1]), labels)
    assert torch.allclose(torch.as_tensor(got[0]), want, atol=1e-5)


def test_other_calibrators_take_them_too():
    rows = Rows(*MEMORY), Rows(*VALID)
    for fit in (
        lambda memory, valid: tcil.PACT().fit(Network(), memory, valid, [2, 3], imbalance=3.0).result_,
        lambda memory, valid: tcil.PerturbedTemperatureScaling(batch_size=64).fit(Network(), valid=valid).result_,
    ):
        assert fit(*rows) == fit(MEMORY, VALID)


@pytest.mark.parametrize(
    ("inputs", "label"),
    [("pixel_values", "label"), ("pixel_values", "labels"), ("img", "label"), ("image", "labels"), ("x", "y"),
     ("img", "fine_label"), ("images", "targets"), ("inputs", "labels"), ("input", "target")],
)  # fmt: skip
def test_usual_keys(inputs, label):
    x, y = VALID
    want = tcil.predict_logits(Network(), VALID)[0]
    for data in ([{inputs: x, label: y, "id": y}], Table(x, y, inputs, label)):
        assert torch.allclose(tcil.predict_logits(Network(), data)[0], want, atol=1e-5)


class TestUnpack:
    X, Y = VALID

    @pytest.mark.parametrize(
        ("unpack", "message"),
        [
            ((1, 5), r"unpack: got \(1, 5\); expected two positions from 0 to 2 in the batches of data"),
            ((-4, 2), r"unpack: got \(-4, 2\); expected two positions from 0 to 2"),
            (("image", "label"), r"unpack: got \('image', 'label'\); expected two positions .* which are tuples"),
        ],
    )
    def test_wrong_for_tuples(self, unpack, message):
        for data in (triples(self.X, self.Y), Rows(self.X, self.Y, lambda x, y, row: (row, x, int(y)))):
            model = Network()
            with pytest.raises(ValueError, match=message):
                tcil.predict_logits(model, data, unpack=unpack)
            assert model.batches == 0

    @pytest.mark.parametrize("unpack", [(0, 1), ("image", "class"), ("img", "label")])
    def test_wrong_for_dicts(self, unpack):
        with pytest.raises(ValueError, match=r"unpack: got .*; expected two of the keys \['image', 'label'\]"):
            tcil.predict_logits(Network(), [{"image": self.X, "label": self.Y}], unpack=unpack)

    def test_wrong_for_anything_else(self):
        with pytest.raises(ValueError, match=r"unpack: got \(0, 1\); expected a function .* of type Tensor"):
            tcil.predict_logits(Network(), DataLoader(self.X, batch_size=9), unpack=(0, 1))

    @pytest.mark.parametrize(
        "unpack", ["xy", 1, (1,), (1, 2, 3), (0, "label"), (1, 1), ("x", "x"), (True, False), (0.0, 1.0), {0, 1}, ()]
    )
    def test_wrong_type_is_refused_before_anything_is_read(self, unpack):
        def fail():
            pytest.fail("read")

        for data in (Stream(fail), VALID):
            for call in (
                lambda data: tcil.predict_logits(Network(), data, unpack=unpack),
                lambda data: tcil.TCIL().fit(Network(), data, VALID, [2, 3], unpack=unpack),
                lambda data: tcil.PACT().fit(Network(), data, VALID, [2, 3], unpack=unpack),
                lambda data: tcil.PerturbedTemperatureScaling().fit(Network(), valid=data, unpack=unpack),
            ):
                with pytest.raises(ValueError, match=r"unpack: got .*; expected two keys such as"):
                    call(data)

    @pytest.mark.parametrize("length", [60, 1])
    def test_index_first_is_recognised(self, length):
        """PyCIL's (index, inputs, labels)."""
        x, y = self.X[:length], self.Y[:length]
        for data in (triples(x, y), TensorDataset(torch.arange(length), x, y), Rows(x, y, lambda *r: (r[2], *r[:2]))):
            with pytest.raises(ValueError, match=r"data: .*look like \(index, inputs, labels\).*unpack=\(1, 2\)"):
                tcil.predict_logits(Network(), data)

    def test_labels_first_are_recognised(self):
        with pytest.raises(ValueError, match=r"data: .*look like \(labels, inputs\).*unpack=\(1, 0\)"):
            tcil.predict_logits(Network(), [(self.Y, self.X)])
        got = tcil.predict_logits(Network(), [(self.Y, self.X)], unpack=(1, 0))
        assert torch.equal(got[1], self.Y)

    def test_several_keys_are_not_guessed(self):
        raw = {"image": self.X * 255, "pixel_values": self.X, "label": self.Y}
        with pytest.raises(
            ValueError, match=r"single pair of \(image or pixel_values\).*unpack=\('pixel_values', 'lab"
        ):
            tcil.predict_logits(Network(), [raw])
        tcil.predict_logits(Network(), [raw], unpack=("pixel_values", "label"))

    def test_two_lists_are_no_pair(self):
        """They are read as two examples, which fails; the error says so."""
        message = r"^data: got a pair of lists of 60 entries each.* read as two examples; expected a pair .*asarray"
        model = Network()
        for inputs in (list(self.X), tuple(self.X.numpy()), self.X.tolist(), self.X[:, 0, 0, 0].tolist()):
            for labels in (self.Y.tolist(), list(self.Y), tuple(self.Y.numpy())):
                with pytest.raises(ValueError, match=message):
                    tcil.predict_logits(model, (inputs, labels))
        tokens = torch.arange(180).reshape(60, 3)  # the first could be the inputs and labels of a batch
        with pytest.raises(ValueError, match=message):
            tcil.predict_logits(model, (list(tokens), self.Y.tolist()))
        assert model.batches == 0

    def test_two_batches_of_three_parts_are_batches(self):
        batches = [(self.X[:30], self.Y[:30], torch.arange(30)), (self.X[30:], self.Y[30:], torch.arange(30))]
        assert torch.equal(tcil.predict_logits(Network(), batches)[1], self.Y)

    def test_three_tensors_are_no_pair(self):
        with pytest.raises(ValueError, match=r"data: got a tuple of 3 arrays; expected a pair"):
            tcil.predict_logits(Network(), (self.Y, self.X, self.Y))


class TestIntegers:
    class Embedding(nn.Module):
        def __init__(self):
            super().__init__()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                self.tokens, self.fc = nn.Embedding(50, 8), nn.Linear(8, 3)

        def forward(self, ids):
            return self.fc(self.tokens(ids).mean(dim=1))

    IDS, LABELS = torch.arange(120).reshape(20, 6) % 50, torch.arange(20) % 3

    def test_token_ids(self):
        model = self.Embedding()
        with torch.no_grad():
            want = model(self.IDS)
        for data in (
            (self.IDS, self.LABELS),
            (self.IDS.int(), self.LABELS),
            (self.IDS.numpy(), self.LABELS.numpy()),
            TensorDataset(self.IDS, self.LABELS),
            [
                {"input_ids": ids.tolist(), "label": int(label)}
                for ids, label in zip(self.IDS, self.LABELS, strict=True)
            ],
        ):
            assert torch.equal(torch.as_tensor(tcil.predict_logits(model, data)[0]), want)
        assert tcil.predict_logits(model.bfloat16(), (self.IDS, self.LABELS))[0].dtype == torch.float32

    def test_batches_of_several_lengths(self):
        batches = [(self.IDS[:10, :4], self.LABELS[:10]), (self.IDS[10:], self.LABELS[10:])]
        assert tcil.predict_logits(self.Embedding(), batches)[0].shape == (20, 3)

    @pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.bool])
    def test_calibrators_that_perturb_say_why_not(self, kind):
        ids = self.IDS.to(kind)
        hint = r"inputs: got dtype torch.*; expected floating-point .*Token ids .*predict_logits.*TemperatureScaling"
        with pytest.raises(ValueError, match="memory " + hint):
            tcil.TCIL().fit(self.Embedding(), (ids, self.LABELS), (ids, self.LABELS), [2])
        with pytest.raises(ValueError, match="valid " + hint):
            tcil.PerturbedTemperatureScaling().fit(self.Embedding(), valid=(ids, self.LABELS))

    def test_bytes_are_pixels(self):
        pixels = (VALID[0] * 20 + 100).byte(), VALID[1]
        with pytest.raises(ValueError, match=r"valid inputs: got dtype torch.uint8.*x.float\(\) / 255") as error:
            tcil.PerturbedTemperatureScaling().fit(Network(), valid=pixels)
        assert "Token" not in str(error.value)
        with pytest.raises(ValueError, match=r"data inputs: got dtype torch.uint8, with which the model fails .*/ 255"):
            tcil.predict_logits(Network(), pixels)

        class Normalising(Network):
            def forward(self, x):
                return super().forward((x.float() - 100) / 20)

        want = tcil.predict_logits(Network(), ((pixels[0].float() - 100) / 20, pixels[1]))[0]
        assert torch.allclose(tcil.predict_logits(Normalising(), pixels)[0], want, atol=1e-5)

    def test_complex_inputs(self):
        with pytest.raises(ValueError, match=r"data inputs: got dtype torch.complex64"):
            tcil.predict_logits(Network(), (VALID[0].to(torch.complex64), VALID[1]))

    def test_errors_of_a_loader_are_its_own(self):
        class Raising(Rows):
            def __getitem__(self, row):
                if row == 15:
                    raise RuntimeError("a broken file")
                return super().__getitem__(row)

        with pytest.raises(RuntimeError, match=r"^a broken file$"):
            tcil.predict_logits(self.Embedding(), Raising(self.IDS, self.LABELS), batch_size=8)


class TestLoaders:
    X, Y = VALID

    def test_endless(self):
        batch = self.X[:4], self.Y[:4]
        endless = Stream(lambda: itertools.repeat(batch))
        for argument, call in (
            ("data", lambda: tcil.predict_logits(Network(), endless, max_batches=50)),
            ("valid", lambda: tcil.PerturbedTemperatureScaling().fit(Network(), valid=endless, max_batches=50)),
            ("valid", lambda: tcil.TCIL().fit(Network(), MEMORY, endless, [2, 3], max_batches=50)),
            ("memory", lambda: tcil.PACT().fit(Network(), endless, VALID, [2, 3], imbalance=2.0, max_batches=50)),
        ):
            with pytest.raises(ValueError, match=rf"{argument}: got a loader of more than 50 batches.*max_batches"):
                call()

    def test_endless_by_default(self):
        stream = ExampleStream(Stream(lambda: itertools.repeat((self.X[:1], self.Y[:1]))), "data", batch_size=64)
        read = itertools.count()
        with pytest.raises(ValueError, match=r"data: got a loader of more than 10000 batches .*a larger max_batches"):
            deque((next(read) for _ in stream), maxlen=0)
        assert next(read) == 10_000

    def test_endless_and_large(self, monkeypatch):
        """New exemplars are kept: a few large batches fill the memory long before there are many."""
        x, y = MEMORY
        monkeypatch.setattr("tcil.calibration.inputs.examples._MOST_KEPT", 10 * x[y >= 2].nbytes)
        read = itertools.count()
        endless = Stream(lambda: ((x, y) for _ in iter(lambda: next(read), None)))
        with pytest.raises(ValueError, match=r"memory: got a loader of more than .* GiB of inputs to keep .*__len__"):
            tcil.TCIL().fit(Network(), endless, VALID, [2, 3])
        assert next(read) < 20
        ten = Stream(lambda: itertools.repeat((x, y), 10))
        assert tcil.TCIL().fit(Network(), ten, VALID, [2, 3]).result_.n_exemplars == 480
        with_length = [(x, y)] * 11
        assert tcil.TCIL().fit(Network(), with_length, VALID, [2, 3]).result_.n_exemplars == 528

    def test_large_for_this_machine(self, monkeypatch):
        """Also with a length: new exemplars are kept, and joined in a second copy."""
        x, y = MEMORY
        size, read = x[y >= 2].nbytes, itertools.count()
        machine = {"bytes": 21 * size, "looks": 0}

        def available():
            machine["looks"] += 1
            return machine["bytes"] - size * (next(read_so_far) + 1)

        def endless():
            for _ in range(100_000):
                next(read)
                yield x, y

        class Long(Stream):
            def __len__(self):
                return 100_000

        monkeypatch.setattr("tcil.calibration.inputs.examples.available_memory", available)
        monkeypatch.setattr("tcil.calibration.inputs.examples._LOOK_EVERY", size)
        for loader in (Stream(endless), Long(endless)):
            read_so_far = itertools.count()
            before = next(read)
            with pytest.raises(
                ValueError,
                match=r"memory: got a loader with .* GiB of inputs of new classes so far, and .* GiB of memory",
            ):
                tcil.TCIL().fit(Network(), loader, VALID, [2, 3])
            assert next(read) - before < 20
        read_so_far, machine["looks"] = itertools.count(), 0
        assert tcil.TCIL().fit(Network(), [(x, y)] * 9, VALID, [2, 3]).result_.n_exemplars == 432
        assert machine["looks"] == 9
        monkeypatch.setattr("tcil.calibration.inputs.examples._LOOK_EVERY", 1 << 26)
        machine["looks"] = 0
        tcil.TCIL().fit(Network(), [(x, y)] * 9, VALID, [2, 3])
        assert machine["looks"] == 0  # nothing is asked for memories of the usual size
        monkeypatch.setattr("tcil.calibration.inputs.examples.available_memory", lambda: None)
        monkeypatch.setattr("tcil.calibration.inputs.examples._LOOK_EVERY", size)
        tcil.TCIL().fit(Network(), [(x, y)] * 9, VALID, [2, 3])

    def test_what_is_not_kept_has_no_such_limit(self, monkeypatch):
        monkeypatch.setattr("tcil.calibration.inputs.examples._MOST_KEPT", 1)
        batches = Stream(lambda: batches_of(self.X, self.Y, 10))
        assert len(tcil.predict_logits(Network(), batches)[1]) == 60
        tcil.TCIL().fit(Network(), MEMORY, batches, [2, 3])

    def test_endless_datasets(self):
        class Endless(IterableDataset):
            def __iter__(self):
                return itertools.repeat((VALID[0][0], 2))

        for data in (Endless(), DataLoader(Endless(), batch_size=2)):
            with pytest.raises(ValueError, match="of more than 7 batches"):
                tcil.predict_logits(Network(), data, max_batches=7)

    def test_the_limit_itself_is_no_error(self):
        batches = batches_of(self.X, self.Y, 10)
        assert len(tcil.predict_logits(Network(), Stream(lambda: batches), max_batches=6)[1]) == 60
        with pytest.raises(ValueError, match="of more than 5 batches"):
            tcil.predict_logits(Network(), Stream(lambda: batches), max_batches=5)

    def test_a_loader_with_a_length_has_no_limit(self):
        for data in (batches_of(self.X, self.Y, 10), DataLoader(TensorDataset(self.X, self.Y), batch_size=10)):
            assert len(tcil.predict_logits(Network(), data, max_batches=2)[1]) == 60

    @pytest.mark.parametrize("limit", [0, -1, 2.5, None, True])
    def test_the_limit_is_checked(self, limit):
        with pytest.raises(ValueError, match=r"max_batches: got .*; expected a whole number of 1 or more"):
            tcil.predict_logits(Network(), VALID, max_batches=limit)

    @pytest.mark.parametrize(
        "empty", [[], (), Stream(list), DataLoader(TensorDataset(X[:0], Y[:0])), TensorDataset(X[:0], Y[:0])]
    )
    def test_nothing(self, empty):
        with pytest.raises(ValueError, match="data: got no examples; expected at least one"):
            tcil.predict_logits(Network(), empty)

    def test_no_rows(self):
        with pytest.raises(ValueError, match="data: got no examples; expected at least one"):
            tcil.predict_logits(Network(), Rows(self.X[:0], self.Y[:0]))

    def test_a_dataset_without_a_length(self):
        class Lengthless(Dataset):
            def __getitem__(self, row):
                return VALID[0][row], 2

        with pytest.raises(ValueError, match="data: got Lengthless without a __len__; expected"):
            tcil.predict_logits(Network(), Lengthless())
        with pytest.raises(ValueError, match="data: got type; expected"):
            tcil.predict_logits(Network(), Rows)

    def test_empty_batches(self):
        with pytest.raises(ValueError, match=r"data inputs: got shape \(0, 3, 2, 2\); expected at least one example"):
            tcil.predict_logits(Network(), [(self.X, self.Y), (self.X[:0], self.Y[:0])])

    def test_an_iterator_behind_a_loader(self):
        """Each pass goes on where the last one ended; equal batches must not hide it."""
        for batches in (batches_of(self.X, self.Y, 10), [(self.X[:4], self.Y[:4])] * 4):
            shared = iter(batches)
            with pytest.raises(ValueError, match="data: got a one-shot Stream"):
                tcil.predict_logits(Network(), Stream(lambda shared=shared: shared))

    def test_a_first_batch_that_changes_later(self):
        """The two looks at it before the pass bring another one than the pass."""
        passes = itertools.count()

        def batches():
            yield self.X + (next(passes) > 1), self.Y

        with pytest.raises(ValueError, match="data: got a loader whose second pass differs"):
            tcil.predict_logits(Network(), Stream(batches))

    def test_examples_one_by_one(self):
        rows = Rows(self.X, self.Y)
        for data in (Stream(lambda: (rows[i] for i in range(9))), DataLoader(rows, batch_size=None)):
            with pytest.raises(ValueError, match=r"data: got single examples instead of batches.*batch_size=64"):
                tcil.predict_logits(Network(), data)

    def test_examples_of_several_shapes(self):
        mixed = [(torch.zeros(3, 2, 2), 2), (torch.zeros(3, 2, 3), 2)]
        with pytest.raises(ValueError, match=r"data inputs: got examples of the shapes \(3, 2, 2\) and \(3, 2, 3\)"):
            tcil.predict_logits(Network(), mixed)

    def test_exemplars_of_several_shapes(self):
        class Pooled(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = nn.Linear(3, K)

            def forward(self, x):
                return self.fc(x.mean(dim=(2, 3)))

        x, y = MEMORY
        mixed = [(x[:24], y[:24]), (nn.functional.pad(x[24:], (1, 1)), y[24:])]
        assert len(tcil.predict_logits(Pooled(), mixed)[1]) == 48  # no harm here
        with pytest.raises(ValueError, match=r"memory inputs: got examples of the shapes \(3, 2, 2\) and \(3, 2, 4\)"):
            tcil.TCIL().fit(Pooled(), mixed, VALID, [2, 3])

    def test_labels_by_name(self):
        with pytest.raises(ValueError, match=r"data labels: got str; expected"):
            tcil.predict_logits(Network(), [(self.X[0], "cat"), (self.X[1], "dog")])

    def test_a_mapping_is_no_loader(self):
        with pytest.raises(ValueError, match=r"data: got dict; expected a pair"):
            tcil.predict_logits(Network(), {"x": self.X, "y": self.Y})

    def test_a_fit_that_fails_midway_leaves_no_calibrator(self):
        def broken():
            yield self.X[:30], self.Y[:30]
            raise ConnectionError("storage is gone")

        calibrator = tcil.TCIL()
        with pytest.raises(ConnectionError, match="storage is gone"):
            calibrator.fit(Network(), MEMORY, Stream(broken), [2, 3])
        with pytest.raises(tcil.NotFittedError):
            _ = calibrator.temperature_


@pytest.mark.parametrize("length", [-1, "three", RuntimeError("not known yet")], ids=repr)
def test_a_length_that_cannot_be_had_is_none(length):
    batch = torch.randn(6, 2), torch.arange(6) % 2

    class Loader:
        def __iter__(self):
            return iter([batch])

        def __len__(self):
            if isinstance(length, Exception):
                raise length
            return length

    logits, labels = tcil.predict_logits(nn.Linear(2, 2), Loader())
    assert (logits.shape, labels.tolist()) == ((6, 2), batch[1].tolist())


def test_a_loader_may_reuse_its_buffers():
    """Batches of a loader that fills the same memory again, as preallocating loaders do."""
    x, y = torch.randn(100, 8, generator=torch.Generator().manual_seed(0)), torch.arange(100) // 25
    images, labels = np.empty((25, 8), np.float32), np.empty(25, np.int64)

    def filled(rows):
        for place, (image, label) in enumerate(rows):
            images[place], labels[place] = image, label
        return images, labels

    loader = DataLoader(TensorDataset(x, y), 25, collate_fn=filled)
    assert torch.equal(tcil.predict_logits(nn.Linear(8, 4), loader)[1], y)


class TestTheSecondOfThreeParts:
    """(image, task, label): where the task cannot be the label, the error says how to name the third part."""

    ADVICE = r"second of 3 parts of each batch; .* unpack=\(0, 2\)\.$"

    @staticmethod
    def with_task(examples, task):
        x, y = examples
        return DataLoader(TensorDataset(x, torch.full_like(y, task), y), batch_size=16)

    @pytest.mark.parametrize("task", [0, 2, 3, 9])
    def test_as_memory(self, task):
        memory = self.with_task(MEMORY, task)
        for call in (
            lambda **how: tcil.TCIL().fit(Network(), memory, VALID, [2, 3], **how),
            lambda **how: tcil.PACT().fit(Network(), memory, VALID, [2, 3], imbalance=2.0, classes=range(4), **how),
        ):
            with pytest.raises(ValueError, match=self.ADVICE):
                call()

    @pytest.mark.parametrize("task", [0, 1, 9])
    def test_as_validation_data(self, task):
        valid = self.with_task(VALID, task)
        with pytest.raises(ValueError, match=self.ADVICE):
            tcil.TCIL().fit(Network(), MEMORY, valid, [2, 3])

    def test_as_data(self):
        data = self.with_task(VALID, 9)
        for call in (
            lambda: tcil.predict_logits(Network(), data),
            lambda: tcil.predict_logits(Network(), data, classes=range(4)),
            lambda: tcil.PerturbedTemperatureScaling().fit(Network(), valid=data),
            lambda: tcil.predict_logits(Network(), data.dataset),
        ):
            with pytest.raises(ValueError, match=self.ADVICE):
                call()
        assert torch.equal(tcil.predict_logits(Network(), data, unpack=(0, 2))[1], VALID[1])

    def test_pairs_are_not_doubted(self):
        with pytest.raises(ValueError, match=r"pass them as classes=\[\.\.\.\]\.$"):
            tcil.predict_logits(Network(), (VALID[0], VALID[1] + 9))
