"""`tcil import`: logits alone, what is left in the run folder, and damaged sources."""

from __future__ import annotations

import json
import os
import pickle
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tcil.experiments.cli.app import app
from tcil.experiments.runs.importing import import_run
from tcil.experiments.runs.store import RunFolder
from tcil.incremental.data.datasets import load_dataset
from tcil.incremental.networks import small_cnn

TASKS = [[7, 3], [5, 1]]
NAMES = ["vanilla", "ts"]


def arrays(seen, new, **more):
    """Logits that know their labels a little, seven columns wide."""
    rng = np.random.default_rng(len(seen))
    found = {}
    for name, (labels, count) in {"test": (seen, 60), "valid": (new, 40), **more}.items():
        own = np.resize(labels, count)
        logits = rng.normal(size=(count, 7)).astype(np.float32)
        logits[np.arange(count), [seen.index(label) for label in own]] += 2
        found |= {f"{name}_logits": logits, f"{name}_labels": own}
    return found


def change(source, index=1, **changes):
    """Arrays of a task put in place of others; None takes one away."""
    path = source / f"task-{index:02d}.npz"
    with np.load(path) as file:
        kept = {**file, **changes}
    np.savez(path, **{name: value for name, value in kept.items() if value is not None})


def describe(source, **changes):
    (source / "tasks.json").write_text(json.dumps({"tasks": TASKS, **changes}))


@pytest.fixture
def source(tmp_path):
    """Two tasks of test and validation logits, without a memory."""
    folder = tmp_path / "source"
    folder.mkdir()
    describe(folder)
    np.savez(folder / "task-00.npz", **arrays(TASKS[0], TASKS[0]))
    np.savez(folder / "task-01.npz", **arrays(TASKS[0] + TASKS[1], TASKS[1]))
    return folder


@pytest.fixture
def with_networks(source):
    """The same with checkpoints of untrained networks."""
    describe(source, network="small_cnn", dataset="digits")
    for index in range(2):
        save_file(small_cnn(10).state_dict(), source / f"task-{index:02d}.safetensors")
    return source


class TestWithoutMemory:
    def test_every_calibrator(self, source, tmp_path):
        outcome = CliRunner().invoke(app, ["import", str(source), "--out", str(tmp_path / "out")])
        assert outcome.exit_code == 0, outcome.output
        for task in RunFolder(tmp_path / "out" / "imported-source").read_results().tasks:
            rows = task.calibrators
            for name in ("exemplar-ts", "t-cil", "perturb-ts"):
                assert rows[name].not_applicable.reason.startswith("needs_")
            for name in ("vanilla", "ts", "ets", "irm", "optimal-ts"):
                assert rows[name].answered
                assert 0 <= rows[name].ece <= 1
            assert task.memory.count == 0
        assert (tmp_path / "out" / "imported-source" / "report.html").exists()

    def test_null_is_nothing(self, source, tmp_path):
        describe(source, network=None, dataset=None, learner=None, seed=None)
        settings = import_run(source, tmp_path / "in", data=None, calibrators=NAMES).settings
        assert (settings.dataset, settings.learner, settings.seed) == ("imported", "imported", 0)


class TestRunFolder:
    def test_logits_and_results_of_each_task(self, source, tmp_path):
        seen = TASKS[0] + TASKS[1]
        full = arrays(seen, TASKS[1], memory=(TASKS[0], 12), reserve=(TASKS[0], 6))
        np.savez(source / "task-01.npz", **full)
        whole = import_run(source, tmp_path / "in", data=None, calibrators=NAMES)
        for index, n_seen in enumerate((2, 4)):
            folder = tmp_path / "in" / f"task-{index:02d}"
            assert RunFolder(folder.parent).read_task_result(index) == whole.tasks[index]
            stored = load_file(folder / "logits.safetensors")
            parts = ("test", "pool", "memory", "reserve")
            assert set(stored) == {f"{part}_{kind}" for part in parts for kind in ("logits", "columns")}
            assert {stored[f"{part}_logits"].shape[1] for part in parts} == {n_seen}
        for part, given in {"test": "test", "pool": "valid", "memory": "memory", "reserve": "reserve"}.items():
            assert stored[f"{part}_logits"].numpy() == pytest.approx(full[f"{given}_logits"][:, :4])
            assert [seen[c] for c in stored[f"{part}_columns"]] == full[f"{given}_labels"].tolist()

    def test_an_import_that_came_first_is_kept(self, source, tmp_path, monkeypatch):
        """It wrote between the first check of the folder and its lock."""
        other = tmp_path / "other"
        shutil.copytree(source, other)
        full = arrays(TASKS[0] + TASKS[1], TASKS[1])
        np.savez(other / "task-01.npz", **{**full, "test_logits": full["test_logits"] + 1})
        held = RunFolder.held

        def late(store):
            monkeypatch.setattr(RunFolder, "held", held)
            import_run(other, tmp_path / "in", data=None, calibrators=NAMES)
            return held(store)

        monkeypatch.setattr(RunFolder, "held", late)
        with pytest.raises(ValueError, match=r"out: got .* which holds another run"):
            import_run(source, tmp_path / "in", data=None, calibrators=["vanilla"])
        kept = RunFolder(tmp_path / "in").read_task_result(1)
        assert set(kept.calibrators) == set(NAMES)

    def test_empty_memory_is_stored_empty(self, source, tmp_path):
        import_run(source, tmp_path / "in", data=None, calibrators=NAMES)
        stored = load_file(tmp_path / "in" / "task-01" / "logits.safetensors")
        assert stored["memory_logits"].shape == (0, 4)
        assert stored["reserve_columns"].shape == (0,)


class TestIntoAFolderThatIsThere:
    """The same import adds to it; a folder of another run stays as it is."""

    def files(self, folder):
        found = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
        return {str(path): path.read_bytes() for path in found}

    def refused(self, source, folder):
        before = self.files(folder)
        with pytest.raises(ValueError, match=r"out: got .* which holds another run; expected a folder that is free"):
            import_run(source, folder, data=None, calibrators=NAMES)
        assert self.files(folder) == before

    def test_rows_are_added(self, source, tmp_path):
        import_run(source, tmp_path / "in", data=None, calibrators=["vanilla"])
        whole = import_run(source, tmp_path / "in", data=None, calibrators=["ts"])
        assert [set(task.calibrators) for task in whole.tasks] == [{"vanilla", "ts"}] * 2
        assert RunFolder(tmp_path / "in").read_results() == whole

    @pytest.mark.parametrize("old", [False, True])
    def test_other_logits(self, source, tmp_path, old):
        """Of the same name and with the same tasks.json; also where a former version left no data.json."""
        import_run(source, tmp_path / "in", data=None, calibrators=NAMES)
        if old:
            (tmp_path / "in" / "data.json").unlink()
            import_run(source, tmp_path / "in", data=None, calibrators=NAMES)
            (tmp_path / "in" / "data.json").unlink()
        with np.load(source / "task-01.npz") as file:
            change(source, test_logits=file["test_logits"] + 1)
        self.refused(source, tmp_path / "in")

    def test_other_settings(self, source, tmp_path):
        import_run(source, tmp_path / "in", data=None, calibrators=NAMES)
        describe(source, learner="another")
        self.refused(source, tmp_path / "in")

    def test_a_training(self, source, tmp_path):
        RunFolder(tmp_path / "in").create()
        RunFolder(tmp_path / "in").write_json("settings.json", {"dataset": "digits", "learner": "er"})
        self.refused(source, tmp_path / "in")

    def test_a_link_in_it(self, source, tmp_path):
        (tmp_path / "in").mkdir()
        (tmp_path / "mine").mkdir()
        (tmp_path / "in" / "task-00").symlink_to(tmp_path / "mine")
        with pytest.raises(ValueError, match="task-00, a link to"):
            import_run(source, tmp_path / "in", data=None, calibrators=NAMES)
        assert not list((tmp_path / "mine").iterdir())


class Evil:
    def __reduce__(self):
        return os.mkdir, ("owned",)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


class TestBadSources:
    """A clear error that names the file, before anything is computed or written."""

    def refused(self, source, tmp_path, message, calibrators=NAMES):
        with pytest.raises(ValueError, match=message) as caught:
            import_run(source, tmp_path / "in", data=None, calibrators=calibrators)
        assert "; expected " in str(caught.value)
        assert not (tmp_path / "in").exists()

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"network": "small_cnn"}, r"tasks\.json with a network but no dataset"),
            ({"network": 5}, r"network in .*tasks\.json: got 5; expected text"),
            ({"network": "small_cnn", "dataset": ["digits"]}, r"dataset in .*tasks\.json: got \['digits'\]"),
            ({"network": "small_cn", "dataset": "digits"}, r"network: got 'small_cn'.*Did you mean 'small_cnn'"),
            ({"learner": {}}, r"learner in .*tasks\.json: got \{\}; expected text"),
            ({"seed": "one"}, r"seed in .*tasks\.json: got 'one'; expected a whole number"),
            ({"seed": True}, r"seed in .*tasks\.json: got True"),
            ({"lr": float("nan")}, r"tasks\.json \(.*JSON compliant"),
            ({"tasks": "ab"}, r"tasks\.json without a list of tasks"),
            ({"tasks": [0, 1]}, r"tasks\[0\] in .*tasks\.json: got 0; expected a list of integer"),
            ({"tasks": [[0, 1], ["2", 3]]}, r"tasks\[1\] in .*tasks\.json: got \['2', 3\]"),
            ({"tasks": [[0, 1], [True, 3]]}, r"tasks\[1\] in .*tasks\.json: got \[True, 3\]"),
            ({"tasks": [[0, 10**30]]}, r"tasks\[0\] in .*tasks\.json: got \[0, 10"),
            ({"tasks": [[0, 1], []]}, r"tasks\[1\] in .*tasks\.json: got no class"),
            ({"tasks": [[0, 1], [1]]}, r"tasks in .*tasks\.json: got repeated labels"),
            ({"tasks": [[0], [1]]}, r"tasks\[0\] in .*tasks\.json: got one class"),
        ],
    )
    def test_tasks(self, source, tmp_path, changes, message):
        describe(source, **changes)
        self.refused(source, tmp_path, message)

    @pytest.mark.parametrize("content", [b"", b"junk", b"PK\x03\x04junk", b"\x93NUMPY"])
    def test_junk_arrays(self, source, tmp_path, content):
        (source / "task-01.npz").write_bytes(content)
        self.refused(source, tmp_path, r"source: got .*task-01\.npz, which cannot be read .*an \.npz file")

    @pytest.mark.parametrize("name", ["tasks.json", "task-01.npz"])
    @pytest.mark.parametrize("device", [None, "/dev/zero"])
    def test_pipes_and_devices(self, source, tmp_path, name, device):
        (source / name).unlink()
        (source / name).symlink_to(device) if device else os.mkfifo(source / name)
        self.refused(source, tmp_path, rf"source: got .*{name}.*It is a pipe or a device")

    @pytest.mark.parametrize("ending", [".safetensors", ".pt"])
    def test_weights_in_a_pipe(self, with_networks, tmp_path, ending):
        (with_networks / "task-01.safetensors").unlink()
        os.mkfifo(with_networks / f"task-01{ending}")
        self.refused(with_networks, tmp_path, rf"source: got .*task-01\{ending}, which cannot be read")

    def test_cut_arrays(self, source, tmp_path):
        cut(source / "task-01.npz")
        self.refused(source, tmp_path, r"source: got .*task-01\.npz, which cannot be read \(BadZipFile")

    def test_one_array_instead_of_several(self, source, tmp_path):
        with (source / "task-01.npz").open("wb") as file:
            np.save(file, np.zeros((3, 4)))
        self.refused(source, tmp_path, r"source: got .*task-01\.npz, which cannot be read .*an \.npz file")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"test_logits": None}, r"task-01\.npz without test_logits"),
            ({"valid_labels": None}, r"valid_labels in .*task-01\.npz: got NoneType"),
            ({"test_logits": np.zeros(60)}, r"test_logits in .*task-01\.npz: got shape \(60,\)"),
            ({"test_logits": np.ones((60, 3))}, r"test_logits in .*task-01\.npz: got 3 columns; expected at least 4"),
            ({"test_labels": np.full(60, 99)}, r"test_labels in .*task-01\.npz: got the label 99"),
            ({"memory_logits": np.array([["a", "b"]])}, r"memory_logits in .*task-01\.npz: got .* dtype <U1"),
        ],
    )
    def test_arrays(self, source, tmp_path, changes, message):
        change(source, **changes)
        self.refused(source, tmp_path, message)

    def test_validation_images_of_earlier_tasks(self, source, tmp_path):
        """Else TS and the other baselines, which are ranked, would be fitted on data that no method has."""
        seen = TASKS[0] + TASKS[1]
        np.savez(source / "task-01.npz", **arrays(seen, seen))
        message = r"valid_labels in .*task-01\.npz: got 20 of 40 of classes of earlier tasks; expected .*\[5, 1\] alone"
        self.refused(source, tmp_path, message)

    def test_rows_of_earlier_tasks(self, with_networks, tmp_path):
        labels = load_dataset("digits").train.labels
        rows = torch.cat([(labels == label).nonzero()[:3, 0] for label in (7, 5)]).numpy()
        change(with_networks, valid_rows=rows)
        self.refused(with_networks, tmp_path, r"valid_rows in .*task-01\.npz: got 3 of 6 of classes of earlier tasks")

    @pytest.mark.parametrize("rows", [np.array([-1]), np.array([10**6]), np.array([0.5])])
    def test_rows(self, with_networks, tmp_path, rows):
        change(with_networks, memory_rows=rows)
        self.refused(with_networks, tmp_path, r"memory_rows in .*task-01\.npz: got")

    @pytest.mark.parametrize("ending", [".safetensors", ".pt"])
    @pytest.mark.parametrize("content", [b"", b"junk", b"\x80\x02junk", b"\xff" * 40, b"PK\x03\x04junk"])
    def test_junk_weights(self, with_networks, tmp_path, ending, content):
        (with_networks / "task-01.safetensors").unlink()
        (with_networks / f"task-01{ending}").write_bytes(content)
        self.refused(with_networks, tmp_path, rf"source: got .*task-01\{ending}, which cannot be read .*small_cnn")

    def test_cut_weights(self, with_networks, tmp_path):
        cut(with_networks / "task-01.safetensors")
        self.refused(with_networks, tmp_path, r"source: got .*task-01\.safetensors, which cannot be read")

    @pytest.mark.parametrize(
        ("weights", "message"),
        [
            ([1, 2], r"task-01\.pt, which holds something else; expected the state dict"),
            ({"state_dict": {}}, r"task-01\.pt, which holds something else"),
            ({"fc.bias": torch.zeros(3)}, r"task-01\.pt with a head of 3 columns; expected at least 4"),
            ({"fc.bias": torch.zeros(4)}, r"task-01\.pt, which does not fit small_cnn"),
        ],
    )
    def test_other_weights(self, with_networks, tmp_path, weights, message):
        (with_networks / "task-01.safetensors").unlink()
        torch.save(weights, with_networks / "task-01.pt")
        self.refused(with_networks, tmp_path, message)

    def test_nothing_is_unpickled(self, with_networks, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (with_networks / "task-01.safetensors").unlink()
        for content in (pickle.dumps(Evil(), protocol=2), pickle.dumps({"fc.bias": Evil()}, protocol=2)):
            (with_networks / "task-01.pt").write_bytes(content)
            self.refused(with_networks, tmp_path, r"task-01\.pt, which cannot be read \(UnpicklingError\)")
        torch.save({"fc.bias": Evil()}, with_networks / "task-01.pt")
        self.refused(with_networks, tmp_path, r"task-01\.pt, which cannot be read \(UnpicklingError\)")
        change(with_networks, test_logits=np.array([Evil()], dtype=object))
        self.refused(with_networks, tmp_path, r"task-01\.npz, which cannot be read")
        (with_networks / "task-01.npz").write_bytes(pickle.dumps(Evil()))
        self.refused(with_networks, tmp_path, r"task-01\.npz, which cannot be read")
        assert not (tmp_path / "owned").exists()

    def test_calibrators_come_first(self, source, tmp_path):
        (source / "task-00.npz").unlink()
        self.refused(source, tmp_path, "calibrator: got 'tz'", ["ts", "tz"])


@pytest.mark.parametrize("field", ['"reserve": "x"', '"classes": "s"', '"seed": 1000000000000000000000000000000'])
def test_fields_that_no_report_could_read_are_refused_before_any_work(source, tmp_path, field):
    text = (source / "tasks.json").read_text().rstrip()
    (source / "tasks.json").write_text(text[:-1] + f", {field}" + "}")
    with pytest.raises(ValueError, match=r"tasks\.json"):
        import_run(source, tmp_path / "in", data=None, calibrators=NAMES)
    assert not (tmp_path / "in").exists()


def test_a_masked_label_is_refused_before_any_work(source, tmp_path):
    """The first label is 7, whose column is the first."""
    logits = arrays(TASKS[0] + TASKS[1], TASKS[1])["test_logits"]
    logits[0, 0] = -np.inf
    change(source, test_logits=logits)
    with pytest.raises(ValueError, match=r"test_labels in .*task-01\.npz"):
        import_run(source, tmp_path / "in", data=None, calibrators=NAMES)
    assert not (tmp_path / "in").exists()


def test_a_name_that_stands_twice_in_the_tasks(source, tmp_path):
    """JSON readers take the last one; which of the two is meant nobody knows."""
    (source / "tasks.json").write_text('{"tasks": [[7, 3], [5, 1]], "seed": 1, "seed": 2}')
    outcome = CliRunner().invoke(app, ["import", str(source), "--out", str(tmp_path / "runs")])
    assert outcome.exit_code == 2
    assert "the key 'seed' occurs twice" in outcome.output
    assert not (tmp_path / "runs").exists()
