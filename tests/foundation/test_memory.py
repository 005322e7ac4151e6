"""How much memory is said to be available."""

from __future__ import annotations

from pathlib import Path

from tcil.foundation.memory import available_memory


def test_the_container_limits_what_the_machine_has(tmp_path):
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    assert available_memory(meminfo, cgroup) is None
    meminfo.write_text(
        "MemTotal: 4000 kB\nMemFree: 10 kB\nMemAvailable: 3000 kB\nSwapFree: 500 kB\nHugePages_Total: 0\n"
    )
    assert available_memory(meminfo, cgroup) == 3500 * 1024
    cgroup.mkdir()
    (cgroup / "memory.max").write_text("max\n")
    assert available_memory(meminfo, cgroup) == 3500 * 1024
    (cgroup / "memory.max").write_text("1000000\n")
    (cgroup / "memory.current").write_text("700000\n")
    stat = "anon 400000\nactive_file 150000\ninactive_file 40000\nslab_reclaimable 10000\n"
    (cgroup / "memory.stat").write_text(stat)
    assert available_memory(meminfo, cgroup) == 500_000
    (cgroup / "memory.current").write_text("1300000\n")
    assert available_memory(meminfo, cgroup) == 0
    meminfo.write_text("nonsense\n")
    (cgroup / "memory.max").write_text("nonsense\n")
    assert available_memory(meminfo, cgroup) is None


def test_this_machine():
    assert (available_memory() is None) == (not Path("/proc/meminfo").exists())
