"""Every byte of every file counts: any bit flipped, any end cut off is noticed; files without a checksum are read."""

from __future__ import annotations

import json
import random
import re

import pytest
import torch
from safetensors.torch import save

from tcil.experiments.config.settings import build
from tcil.experiments.reporting.collect import read_runs
from tcil.experiments.runs.reasons import NoAnswer
from tcil.experiments.runs.run import Run
from tcil.experiments.runs.store import DamagedFileWarning, RunFolder
from tcil.foundation.checksums import Damaged, open_json, open_tensors, seal_json, seal_tensors

RECORD = {"b": [1.5, None, "ä"], "a": {"sha256": "0" * 64}, "threads": 2}
TENSORS = {"model.fc.weight": torch.arange(12.0).view(3, 4), "order": torch.arange(5)}
SEALED = [
    (seal_json(RECORD), open_json),
    (seal_json({}), open_json),
    (seal_tensors(TENSORS, {"step": "3"}), open_tensors),
]


def refused(content, read):
    try:
        read(bytes(content))
    except Damaged:
        return True
    return False


@pytest.mark.parametrize(("content", "read"), SEALED, ids=["json", "empty", "tensors"])
def test_any_flipped_bit_and_any_cut_is_noticed(content, read):
    read(content)
    for place in range(len(content)):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[place] ^= 1 << bit
            assert refused(damaged, read), (place, bit)
        assert refused(content[:place], read), place
    assert refused(content + b" ", read)


@pytest.mark.parametrize(("content", "read"), SEALED, ids=["json", "empty", "tensors"])
def test_zeros_and_noise_are_noticed(content, read):
    draw = random.Random(0)
    for _ in range(200):
        start = draw.randrange(len(content))
        length = draw.randint(1, len(content) - start)
        for filler in (bytes(length), draw.randbytes(length)):
            damaged = content[:start] + filler + content[start + length :]
            assert damaged == content or refused(damaged, read)


def test_the_same_content_gives_the_same_bytes():
    note = {"stage": "1", "epoch": "2", "step": "3"}
    assert len({seal_tensors(TENSORS, note) for _ in range(20)}) == 1
    assert open_tensors(seal_tensors(TENSORS, note))[1] == note
    assert open_json(seal_json(RECORD)) == RECORD
    assert json.loads(seal_json(RECORD))["threads"] == 2  # any JSON reader will do


def test_files_from_before_there_were_checksums():
    old = (json.dumps(RECORD, indent=1, sort_keys=True) + "\n").encode()
    assert open_json(old) == RECORD
    assert open_json(b'{"threads": 3}') == {"threads": 3}
    assert open_json(json.dumps({"sha256": "a" * 64, "train": 3}, indent=1).encode())["train"] == 3
    tensors, note = open_tensors(save(TENSORS, metadata={"stage": "1", "epoch": "2"}))
    assert note == {"stage": "1", "epoch": "2"}
    assert torch.equal(tensors["order"], TENSORS["order"])
    assert open_tensors(save(TENSORS))[1] == {}


def short(**changes):
    return build({"dataset": "digits", "epochs": 1, "tasks": 2, "memory": 30, **changes})


def as_before(record):
    """A record as the first version wrote it."""
    if isinstance(record, list):
        return [as_before(entry) for entry in record]
    if not isinstance(record, dict):
        return record
    if "not_applicable" in record:
        return {**record, "not_applicable": NoAnswer(**record["not_applicable"]).sentence}
    return {name: as_before(value) for name, value in record.items() if name != "version"}


def test_a_folder_from_before_goes_on_without_training(digits, tmp_path, recwarn):
    names = ["vanilla", "ts", "reserve-ts"]
    whole = Run(short(), tmp_path, dataset=digits).execute(names)
    for path in tmp_path.rglob("*.json"):
        path.write_text(json.dumps(as_before(open_json(path.read_bytes())), indent=1, sort_keys=True) + "\n")
    assert "needs --reserve" in (tmp_path / "task-00" / "results.json").read_text()
    for path in tmp_path.rglob("*.safetensors"):
        path.write_bytes(save(open_tensors(path.read_bytes())[0]))
    heard = []
    assert Run(short(), tmp_path, dataset=digits).execute(names, heard.append) == whole
    assert {progress.phase for progress in heard} == {"done"}
    assert not [warning for warning in recwarn if warning.category is DamagedFileWarning]
    assert read_runs([tmp_path])[0].tasks == whole.tasks


def test_an_old_run_stopped_inside_a_task_goes_on(digits, tmp_path):
    """Its epoch file has no checksum and two entries in its header."""
    names, settings = ["vanilla"], short(epochs=3, milestones=[2])
    whole = Run(settings, tmp_path / "whole", dataset=digits).execute(names)

    class Stop(Exception):
        pass

    def stop(progress):
        if progress.done == 2:
            raise Stop

    with pytest.raises(Stop):
        Run(settings, tmp_path / "cut", dataset=digits).execute(names, stop)
    path = tmp_path / "cut/task-00/epoch.safetensors"
    tensors, note = open_tensors(path.read_bytes())
    path.write_bytes(save(tensors, metadata=note))
    heard = []
    assert Run(settings, tmp_path / "cut", dataset=digits).execute(names, heard.append) == whole
    assert [p.done for p in heard if p.task == 0 and p.phase == "train"] == [3]


@pytest.mark.parametrize("name", ["results.json", "task-00/results.json", "settings.json", "data.json"])
def test_damaged_records_are_named_and_written_anew(name, digits, tmp_path):
    Run(short(), tmp_path, dataset=digits).execute(["vanilla", "ts"])
    before = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(before[:-9])
    heard = []
    with pytest.warns(DamagedFileWarning, match=f"{name} is damaged"):
        Run(short(), tmp_path, dataset=digits).execute(["vanilla", "ts"], heard.append)
    assert (tmp_path / name).read_bytes() == before
    assert {progress.phase for progress in heard} == {"done"}  # nothing had to be trained or calibrated for it


@pytest.mark.parametrize("name", ["task-00/logits.safetensors", "task-01/indices.safetensors"])
def test_damaged_logits_are_computed_anew(name, digits, tmp_path):
    Run(short(), tmp_path, dataset=digits).execute(["vanilla", "ts"])
    before = bytearray((tmp_path / name).read_bytes())
    (tmp_path / name).write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    with pytest.warns(DamagedFileWarning, match=f"{name} is damaged"):
        Run(short(), tmp_path, dataset=digits).execute(["vanilla", "ts"])
    assert (tmp_path / name).read_bytes() == before


def test_a_damaged_network_is_trained_anew_from_the_one_before(digits, tmp_path):
    Run(short(), tmp_path, dataset=digits).execute(["vanilla"])
    path = tmp_path / "task-01/model.safetensors"
    before = path.read_bytes()
    path.write_bytes(before[: len(before) // 2])
    heard = []
    with pytest.warns(DamagedFileWarning, match=r"model\.safetensors is damaged"):
        Run(short(), tmp_path, dataset=digits).execute(["vanilla"], heard.append)
    assert path.read_bytes() == before
    assert [progress.task for progress in heard if progress.phase == "train"] == [1]


def test_what_stands_beside_the_results_may_be_damaged(digits, tmp_path):
    Run(short(), tmp_path, dataset=digits).execute(["vanilla"])
    (tmp_path / "analysis.json").write_bytes(b"{")
    content = (tmp_path / "environment.json").read_bytes()
    (tmp_path / "environment.json").write_bytes(re.sub(rb'"threads": \d+', b'"threads": 77', content))
    with pytest.warns(DamagedFileWarning) as said:
        (run,) = read_runs([tmp_path])
    assert (run.result.environment, run.analysis) == (None, None)
    assert {str(warning.message).partition(" is damaged")[0] for warning in said} == {
        str(tmp_path / "analysis.json"), str(tmp_path / "environment.json"),
    }  # fmt: skip
    with pytest.warns(DamagedFileWarning):
        Run(short(), tmp_path, dataset=digits).execute(["vanilla"])
    assert open_json((tmp_path / "environment.json").read_bytes())["threads"] == open_json(content)["threads"] != 77


def test_tables_are_not_drawn_from_damaged_results(digits, tmp_path):
    Run(short(), tmp_path, dataset=digits).execute(["vanilla"])
    content = bytearray((tmp_path / "results.json").read_bytes())
    place = content.index(b'"ece": 0.') + 9  # a digit: still JSON, still plausible
    content[place] = ord("1") if content[place] != ord("1") else ord("2")
    (tmp_path / "results.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"results\.json, which cannot be read .*checksum does not match"):
        read_runs([tmp_path])


def test_a_file_that_is_the_same_is_left_alone(tmp_path):
    store = RunFolder(tmp_path)
    store.write_json("a.json", {"a": 1})
    first = (tmp_path / "a.json").stat()
    store.write_json("a.json", {"a": 1})
    assert (tmp_path / "a.json").stat().st_ino == first.st_ino
    store.write_json("a.json", {"a": 2})
    assert (tmp_path / "a.json").stat().st_ino != first.st_ino
