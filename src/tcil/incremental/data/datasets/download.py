"""Download datasets: resumes interrupted downloads, verifies checksums, and unpacks only into the given folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tcil.foundation.errors import invalid
from tcil.incremental.data.datasets.files import check_md5


@dataclass(frozen=True)
class Release:
    """The URL of a dataset's archive, its checksum, and the folder that it unpacks to."""

    url: str
    md5: str
    folder: str


RELEASES = {
    "cifar10": Release(
        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        "c58f30108f718f92721af3b95e74349a",
        "cifar-10-batches-py",
    ),
    "cifar100": Release(
        "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        "eb9058c3a382ffc7106e4002c42a8d85",
        "cifar-100-python",
    ),
    "tiny-imagenet": Release(
        "http://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de", "tiny-imagenet-200"
    ),
}


def download(
    name: str,
    folder: Path,
    *,
    releases: dict[str, Release] = RELEASES,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Download and unpack a dataset into `folder`, unless it is already there.

    If the archive is already in the folder and has the right checksum, it is unpacked and kept.
    """
    if name not in releases:
        raise invalid("dataset", repr(name), "one of " + ", ".join(releases), "Other datasets cannot be downloaded.")
    release = releases[name]
    target = folder / release.folder
    if target.is_dir():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise invalid("data", f"{folder} ({error.strerror})", "a folder, or a path that can be created") from None
    if target.exists():
        raise invalid("data", f"{target}, which is not a folder", "a folder, or nothing at this path", "Move it away.")
    archive = folder / Path(release.url).name
    partial = archive.with_name(archive.name + ".part")
    given = archive.exists()
    if given:
        check_md5(archive, release.md5, "Nothing was unpacked. Move it away and run the command again to download it.")
    else:
        if partial.is_symlink():
            raise invalid("data", f"{partial}, a link", "a regular file, or none", "Delete the link.")
        _fetch(release.url, partial, report)
        with partial.open("rb") as file:
            digest = hashlib.file_digest(file, "md5").hexdigest()
        if digest != release.md5:
            partial.unlink()
            got = f"{release.url} with the checksum {digest}"
            raise invalid("download", got, release.md5, "Run the command again.")
        os.replace(partial, archive)
    _unpack(archive, folder, release.folder)
    if not given:
        archive.unlink()
    return target


def _fetch(url: str, partial: Path, report: Callable[[int, int], None]) -> None:
    """Download to a partial file; an interrupted download is resumed."""
    start = partial.stat().st_size if partial.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # URLs from RELEASES only  # nosec B310
            resumed = answer.status == 206
            total = int(answer.headers.get("Content-Length", 0)) + (start if resumed else 0)
            with partial.open("ab" if resumed else "wb") as file:
                done = start if resumed else 0
                while chunk := answer.read(1 << 20):
                    file.write(chunk)
                    done += len(chunk)
                    report(done, total)
        if total and done < total:
            raise invalid(
                "download", f"{done} of {total} bytes of {url}", "all of them", "Run the command again to resume."
            )
    except urllib.error.HTTPError as error:
        if error.code == 416 and start:  # nothing left to download
            return
        raise invalid("download", f"{url} ({error})", "a reachable address") from None
    except OSError as error:
        advice = "Run the command again to resume, or download the file on another machine."
        raise invalid("download", f"{url} ({error})", "a reachable address", advice) from None


def _unpack(archive: Path, folder: Path, name: str) -> None:
    """Unpack into a temporary folder, then rename it, so that an interruption leaves no partial dataset.

    Temporary folders of commands that were killed are removed first.
    """
    for left in folder.glob(f".{name}.*.part"):
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left)
    room = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".part", dir=folder))
    try:
        _extract(archive, room)
        os.replace(room / name, folder / name)
    finally:
        shutil.rmtree(room)


def _extract(archive: Path, room: Path) -> None:
    """Extract the archive; raises before anything is written if an entry would be outside `room`."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as bundle:
            for entry in bundle.namelist():
                if not (room / entry).resolve().is_relative_to(room.resolve()):
                    raise invalid("download", f"{archive} with the entry {entry!r}", "entries inside their folder")
            bundle.extractall(room)  # every entry was checked above  # nosec B202
        return
    with tarfile.open(archive) as tar:
        try:
            tar.extractall(room, filter="data")
        except tarfile.FilterError as error:
            raise invalid("download", f"{archive} ({error})", "entries inside their folder") from None
