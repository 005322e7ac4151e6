"""Files that are replaced as a whole."""

from __future__ import annotations

import os

import pytest

from tcil.foundation.files import NotRegularError, open_regular, replace_file, replacing


def test_a_file_that_is_filled_by_its_name_replaces_the_other_when_it_is_complete(tmp_path):
    path = tmp_path / "a.bin"
    replace_file(path, b"before")
    with replacing(path) as partial:
        partial.write_bytes(b"after")
        assert path.read_bytes() == b"before"
    assert path.read_bytes() == b"after"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_it_may_be_read_by_others_as_if_it_had_been_written_directly(tmp_path):
    """Also where whoever fills it replaces it by a file of their own, as safetensors does."""
    own = tmp_path / "own"
    with replacing(tmp_path / "a.bin") as partial:
        own.write_bytes(b"x")
        own.chmod(0o600)
        os.replace(own, partial)
    (tmp_path / "plain").write_bytes(b"x")
    assert (tmp_path / "a.bin").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_nothing_is_left_or_lost_where_filling_it_fails(tmp_path):
    path = tmp_path / "a.bin"
    replace_file(path, b"before")

    def fill_half():
        with replacing(path) as partial:
            partial.write_bytes(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        fill_half()
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["a.bin"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotRegularError, match="a pipe or a device"):
        open_regular(tmp_path / "pipe")
