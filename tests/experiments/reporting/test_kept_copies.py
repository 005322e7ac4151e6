"""Compressed copies of finished runs: read like plain ones, kept compressed, refused where they are damaged."""

from __future__ import annotations

import gzip
import json
import shutil

import pytest

from conftest import ROOT
from tcil.experiments.reporting import collect


@pytest.fixture
def copy(tmp_path):
    """One of the project's own copies, in a folder of its own."""
    source = min((ROOT / "docs" / "results" / "runs").glob("*.json.gz"))
    (tmp_path / "kept").mkdir()
    return shutil.copy(source, tmp_path / "kept" / "a.b.json.gz")


def test_a_folder_of_compressed_copies_stays_one(copy):
    before = gzip.decompress(copy.read_bytes())
    assert collect.keep(collect.read_runs([copy.parent]), copy.parent) == [copy]
    assert list(copy.parent.iterdir()) == [copy]
    assert gzip.decompress(copy.read_bytes()) == before


def test_the_same_run_gives_the_same_bytes(copy):
    runs = collect.read_runs([copy])
    first = collect.keep(runs, copy.parent)[0].read_bytes()
    assert collect.keep(runs, copy.parent)[0].read_bytes() == first


def test_elsewhere_copies_are_plain(copy, tmp_path):
    (plain,) = collect.keep(collect.read_runs([copy]), tmp_path / "plain")
    assert plain.name == "a.b.json"
    assert json.loads(plain.read_text()) == json.loads(gzip.decompress(copy.read_bytes()))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda content: content[:-9], "it is damaged"),
        (lambda content: content[:40] + b"\xff" * 40 + content[80:], "it is damaged|Error"),
        (lambda content: b"{}", "Not a gzipped file"),
        (lambda content: gzip.compress(b" " * 2000), "more than 1000 bytes"),
    ],
)
def test_damaged_copies_are_named(copy, monkeypatch, damage, said):
    monkeypatch.setattr(collect, "_MOST_BYTES", 1000 if "more" in said else collect._MOST_BYTES)
    copy.write_bytes(damage(copy.read_bytes()))
    with pytest.raises(ValueError, match=rf"a\.b\.json\.gz, which cannot be read \(.*({said})"):
        collect.read_runs([copy.parent])
