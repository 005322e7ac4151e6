"""`tcil download` against a server on this machine: resume, checksum, and archives that try to escape."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tcil.incremental.data.datasets.download import Release, download


def tar_of(entries):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        for name, data in entries.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return content.getvalue()


@pytest.fixture
def server():
    """Serves `files`; cuts an answer short after `limit` bytes; notes the ranges that were asked for."""

    class Handler(BaseHTTPRequestHandler):
        files, limit, ranges = {}, None, []

        def do_GET(self):
            content = self.files[self.path]
            asked = self.headers.get("Range")
            self.ranges.append(asked)
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
            if start >= len(content):
                self.send_error(416)
                return
            part = content[start:]
            self.send_response(206 if asked else 200)
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            self.wfile.write(part[: self.limit])

        def log_message(self, *args):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()  # polls for its end
    Handler.base = f"http://127.0.0.1:{http.server_port}"
    yield Handler
    http.shutdown()
    http.server_close()


def release(server, content, name="data.tar.gz", folder="data"):
    server.files[f"/{name}"] = content
    return {"it": Release(f"{server.base}/{name}", hashlib.md5(content).hexdigest(), folder)}


def test_fetch_and_unpack(server, tmp_path):
    content = tar_of({"data/train": b"x" * 5000, "data/test": b"y"})
    reports = []
    target = download("it", tmp_path, releases=release(server, content), report=lambda *pair: reports.append(pair))
    assert (target / "train").read_bytes() == b"x" * 5000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data"]
    assert reports[-1] == (len(content), len(content))
    server.files.clear()
    assert download("it", tmp_path, releases={"it": Release("http://127.0.0.1:1/x", "", "data")}) == target


def test_resumes_where_it_stopped(server, tmp_path):
    content = tar_of({"data/train": bytes(range(256)) * 400})
    known = release(server, content)
    server.limit = len(content) // 2
    with pytest.raises(ValueError, match="Run the command again to resume"):
        download("it", tmp_path, releases=known)
    assert not (tmp_path / "data").exists()
    server.limit = None
    download("it", tmp_path, releases=known)
    assert server.ranges[-1] == f"bytes={len(content) // 2}-"
    assert (tmp_path / "data" / "train").read_bytes() == bytes(range(256)) * 400


def test_wrong_checksum(server, tmp_path):
    known = release(server, tar_of({"data/train": b"x"}))
    server.files["/data.tar.gz"] = tar_of({"data/train": b"evil"})
    with pytest.raises(ValueError, match="with the checksum"):
        download("it", tmp_path, releases=known)
    assert not list(tmp_path.iterdir())


def test_an_archive_that_is_there_is_checked(server, tmp_path):
    """One of others is named and left alone; the release's own is unpacked, and stays."""
    content = tar_of({"data/train": b"x"})
    known, archive = release(server, content), tmp_path / "data.tar.gz"
    archive.write_bytes(tar_of({"data/train": b"evil"}))
    with pytest.raises(ValueError, match=r"data: got .*data\.tar\.gz with the checksum .* Move it away") as caught:
        download("it", tmp_path, releases=known)
    assert known["it"].md5 in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["data.tar.gz"]
    archive.write_bytes(content)
    assert (download("it", tmp_path, releases=known) / "train").read_bytes() == b"x"
    assert archive.read_bytes() == content
    assert server.ranges == []


def test_a_part_that_is_a_link(server, tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "data.tar.gz.part").symlink_to(tmp_path / "mine")
    with pytest.raises(ValueError, match=r"data\.tar\.gz\.part, a link; expected a regular file"):
        download("it", tmp_path / "in", releases=release(server, tar_of({"data/train": b"x"})))
    assert (tmp_path / "mine").read_text() == "mine"


def test_what_a_killed_command_left_does_not_stop_the_next(server, tmp_path):
    """In a container the next process has the same id; what is not such a folder stays."""
    left = [tmp_path / f".data.{os.getpid()}.part", tmp_path / ".data.x1y2.part"]
    for folder in left:
        (folder / "data").mkdir(parents=True)
        (folder / "data" / "train").write_bytes(b"half")
    (tmp_path / "mine").mkdir()
    (tmp_path / ".data.link.part").symlink_to(tmp_path / "mine")
    (tmp_path / ".other.1.part").mkdir()
    target = download("it", tmp_path, releases=release(server, tar_of({"data/train": b"x"})))
    assert (target / "train").read_bytes() == b"x"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".data.link.part", ".other.1.part", "data", "mine"]


def test_archives_cannot_write_outside(server, tmp_path):
    inside = tmp_path / "in"
    with pytest.raises(ValueError, match="entries inside their folder"):
        download("it", inside, releases=release(server, tar_of({"../escaped": b"x"})))
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as bundle:
        bundle.writestr("../escaped", "x")
    with pytest.raises(ValueError, match="entries inside their folder"):
        download("it", inside, releases=release(server, content.getvalue(), name="data.zip"))
    assert not (tmp_path / "escaped").exists()


@pytest.mark.parametrize("kind", ["absolute", "symbolic link", "hard link", "device", "link and file"])
def test_archives_cannot_reach_outside_in_other_ways(server, tmp_path, kind):
    """Not by an absolute name, nor by a link that points out of the folder, nor through such a link."""
    inside, outside = tmp_path / "in", tmp_path / "outside"
    outside.mkdir()
    secret = outside / "secret"
    secret.write_text("before")
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        entry = tarfile.TarInfo("data/entry")
        if kind == "absolute":
            entry.name = str(outside / "escaped")
        elif kind == "hard link":
            entry.type, entry.linkname = tarfile.LNKTYPE, str(secret)
        elif kind == "device":
            entry.type = tarfile.CHRTYPE
        else:
            entry.type, entry.linkname = tarfile.SYMTYPE, str(outside)
        tar.addfile(entry, io.BytesIO())
        if kind == "link and file":
            through = tarfile.TarInfo("data/entry/secret")
            through.size = 5
            tar.addfile(through, io.BytesIO(b"after"))
        tar.addfile(tarfile.TarInfo("data/plain"), io.BytesIO())
    known = release(server, content.getvalue())
    if kind == "absolute":  # the leading slash is taken off, and it lands inside
        download("it", inside, releases=known)
    else:
        with pytest.raises(ValueError, match="entries inside their folder"):
            download("it", inside, releases=known)
        assert not (inside / "data").exists()
    assert secret.read_text() == "before"
    assert [path.name for path in outside.iterdir()] == ["secret"]


def test_a_zip_link_is_a_plain_file(server, tmp_path):
    """zipfile makes no links: what says it is one becomes a file with the target's name in it."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as bundle:
        link = zipfile.ZipInfo("data/link")
        link.external_attr = 0o120777 << 16
        bundle.writestr(link, str(tmp_path / "outside"))
    target = download("it", tmp_path / "in", releases=release(server, content.getvalue(), name="data.zip"))
    assert not (target / "link").is_symlink()
    assert (target / "link").read_text() == str(tmp_path / "outside")


def test_no_network(tmp_path):
    known = {"it": Release("http://127.0.0.1:1/data.tar.gz", "", "data")}
    with pytest.raises(ValueError, match="a reachable address"):
        download("it", tmp_path, releases=known)
    with pytest.raises(ValueError, match="dataset: got 'digits'; expected one of cifar10"):
        download("digits", tmp_path)
