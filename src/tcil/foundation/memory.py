"""How much memory this process may still use."""

from __future__ import annotations

import contextlib
from pathlib import Path

_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def available_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Bytes of memory that are available without ending another process; None where the system does not say.

    On Linux: memory and swap that are free or can be freed, within the limit of the container (cgroup v2, at its root).
    """
    found = []
    with contextlib.suppress(OSError, ValueError, LookupError):
        lines = (line.split() for line in meminfo.read_text().splitlines())
        kibibytes = {words[0]: int(words[1]) for words in lines if len(words) > 1}
        found.append(1024 * (kibibytes["MemAvailable:"] + kibibytes.get("SwapFree:", 0)))
    with contextlib.suppress(OSError, ValueError, LookupError):
        limit = int((cgroup / "memory.max").read_text())  # "max" without a limit
        parts = (line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        sizes = {name: int(size) for name, size in parts}
        freeable = sum(sizes.get(name, 0) for name in ("active_file", "inactive_file", "slab_reclaimable"))
        found.append(max(0, limit - int((cgroup / "memory.current").read_text()) + freeable))
    return min(found, default=None)
