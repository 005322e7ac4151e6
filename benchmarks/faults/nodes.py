"""What happens to nodes of a Ray cluster, on one of this machine's own. Each fault returns how many it injected."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.faults.checks import at_work, family, kill, require, until
from benchmarks.faults.lab import Lab, Patch, nothing


class RayCluster:
    """Two Ray nodes on loopback addresses, each in processes of its own."""

    def __init__(self) -> None:
        self.ray = str(Path(sys.executable).parent / "ray")
        # A token of this cluster's own: Ray's ports take no orders without it.
        self.environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.environment |= {"OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "token"}
        self.folder = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp")
        with socket.create_server(("127.0.0.2", 0)) as free:
            self.port = free.getsockname()[1]
        self.address = f"127.0.0.2:{self.port}"
        words = ["--head", f"--port={self.port}", "--include-dashboard=false", f"--temp-dir={self.folder.name}"]
        self.head = self._start("127.0.0.2", *words)
        self.start_second()

    def _start(self, ip: str, *words: str) -> subprocess.Popen[bytes]:
        own = [f"--node-ip-address={ip}", "--num-cpus=1", "--object-store-memory=80000000", "--block"]
        return subprocess.Popen(
            [self.ray, "start", *own, *words],
            env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def start_second(self) -> None:
        self.second = self._start("127.0.0.3", f"--address={self.address}")

    def kill_head(self) -> None:
        kill(family(self.head.pid))
        self.head.wait()

    def kill_second(self) -> None:
        kill(family(self.second.pid))
        self.second.wait()

    @contextlib.contextmanager
    def joined(self) -> Iterator[RayCluster]:
        """Inside, commands started from here know the cluster's token."""
        before = dict(os.environ)
        os.environ.update(self.environment)
        try:
            yield self
        finally:
            os.environ.clear()
            os.environ.update(before)
            for node in (self.second, self.head):
                kill(family(node.pid))
                node.wait()
            with contextlib.suppress(OSError):
                self.folder.cleanup()


class Nodes:
    """A Ray cluster, started when a fault first needs one, and anew after its head is gone."""

    def __init__(self) -> None:
        self._life = contextlib.ExitStack()
        self._cluster: RayCluster | None = None

    def get(self) -> RayCluster:
        if self._cluster is None or self._cluster.head.poll() is not None:
            self.close()
            self._cluster = self._life.enter_context(RayCluster().joined())
        return self._cluster

    def close(self) -> None:
        """End the cluster, so that it takes no time from faults that need none."""
        self._life.close()
        self._cluster = None


def killed_node(lab: Lab, cluster: RayCluster, patch: Patch = nothing) -> int:
    """SIGKILL of all processes of a Ray node at once: its runs go on elsewhere."""
    out = lab.fresh()
    where = ("--on", "ray", "--ray-address", cluster.address)
    sweep = lab.start(out, *where, patch=patch)
    node = cluster.second

    def there() -> list[int]:
        return sorted(set(at_work(out)) & set(family(node.pid)))

    until(lambda: there() or not sweep.running(), "a run on the second node")
    time.sleep(lab.moment(0.3))
    if not there():
        sweep.wait()
        return 0
    cluster.kill_second()
    code, said = sweep.wait()
    cluster.start_second()
    require(code == 0, f"the sweep did not get over it: exit code {code}: {said[-1500:]}")
    lab.compare(out)
    lab.settle(out)
    return 1


def lost_head(lab: Lab, cluster: RayCluster, patch: Patch = nothing) -> int:
    """SIGKILL of Ray's head with all its processes: the sweep ends and says why; the same command resumes."""
    out = lab.fresh()
    sweep = lab.start(out, "--on", "ray", "--ray-address", cluster.address, patch=patch)
    until(lambda: at_work(out) or not sweep.running(), "a worker at work")
    time.sleep(lab.moment(0.3))
    if not sweep.running():
        sweep.wait()
        return 0
    cluster.kill_head()
    started = time.monotonic()
    code, said = sweep.wait()
    cluster.kill_second()
    if code == 0:
        return 0
    require(code == 75 and "the Ray cluster is lost" in said, f"no clear end: exit code {code}: {said[-800:]}")
    require(time.monotonic() - started < 45, "it took long to notice")
    lab.settle(out)
    return 1
