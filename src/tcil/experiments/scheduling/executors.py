"""Where the runs of a sweep are done: in this process, on local processes, or on Ray."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any, Protocol

from tcil.experiments.scheduling import status
from tcil.experiments.scheduling.job import Job, Outcome
from tcil.experiments.scheduling.worker import answer_unless_cancelled, work
from tcil.foundation.errors import invalid
from tcil.foundation.options import Option

LOOPBACK = "127.0.0.1"
LOST_AFTER = 10.0  # seconds for which the head of a Ray cluster may refuse connections: it may be restarted
HUNG_AFTER = 600.0  # seconds without a sign of life, after which a run is ended and tried again


class Place(Option):
    """Where runs are done."""

    SERIAL = "serial", "one after another in this process"
    PROCESSES = "processes", "on processes of this machine, several at once"
    RAY = "ray", "on a Ray cluster, or on Ray on this machine"


@dataclass(frozen=True)
class Resources:
    """Where runs are done and what each may use; `cpus` None is one, or in this process what it has."""

    on: Place | str = Place.SERIAL
    ray_address: str | None = None
    cpus: float | None = None
    gpus: float = 0.0
    at_once: int | None = None
    hung_after: float = HUNG_AFTER

    def __post_init__(self) -> None:
        place = Place.parse(self.on, "on")
        if self.ray_address is not None and place is not Place.RAY:
            raise invalid("ray-address", repr(self.ray_address), "none without --on ray")
        for name, value in {"cpus-per-run": self.cpus or 1.0, "gpus-per-run": self.gpus}.items():
            if not 0 <= value <= 1e6:
                raise invalid(name, f"{value:g}", "a number from 0 to 1,000,000")
        if self.at_once is not None and self.at_once > 1e6:
            raise invalid("at-once", f"{self.at_once:g}", "at most 1,000,000")
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise invalid("gpus-per-run", f"{self.gpus:g}", "a whole number, or a fraction of one GPU")
        least = 3 * status.BEAT
        if not (self.hung_after == 0 or self.hung_after >= least):
            raise invalid("hung-after", f"{self.hung_after:g}", f"0, or at least {least:g} seconds")

    @property
    def place(self) -> Place:
        """Where runs are done."""
        return Place(self.on)

    @property
    def here(self) -> bool:
        """Whether all runs are done on this machine."""
        return self.place is not Place.RAY

    @property
    def threads(self) -> int | None:
        """Threads of each run; None leaves them as they are."""
        return None if self.cpus is None and self.place is Place.SERIAL else threads_of(self.cpus or 1)


class ExecutorLost(RuntimeError):
    """The executor lost its cluster: it can start nothing more, and running jobs no longer answer."""


class Executor(Protocol):
    """Starts jobs and tells which have ended, and how. A worker's death is an outcome, not an error."""

    @property
    def slots(self) -> int:
        """How many jobs it can do at once, now."""
        ...

    def start(self, job: Job) -> None:
        """Begin a job."""
        ...

    def ended(self, seconds: float) -> list[tuple[Job, Outcome]]:
        """Jobs that have ended; waits at most `seconds` for one."""
        ...

    def stop(self) -> None:
        """Ask the running jobs to finish their step, save and end."""
        ...

    def kill(self, job: Job, reason: str) -> None:
        """End a running job at once, since it hangs; `ended` then tells that its worker died, and why."""
        ...

    def close(self) -> None:
        """End what was started."""
        ...


class Serial:
    """In this process, one after another."""

    slots = 1

    def __init__(self) -> None:
        self._waiting: list[Job] = []

    def start(self, job: Job) -> None:
        """Begin a job: it is done when its end is asked for."""
        self._waiting.append(job)

    def ended(self, seconds: float) -> list[tuple[Job, Outcome]]:
        """The job, done now."""
        return [(job, work(job)) for job in (self._waiting.pop(0),)] if self._waiting else []

    def stop(self) -> None:
        """Nothing to tell: the signal came to the process that does the job."""

    def kill(self, job: Job, reason: str) -> None:
        """Nothing runs but while its end is waited for."""

    def close(self) -> None:
        """Nothing was started."""


class Worker:
    """A process that does one job after another; its environment is set before it imports torch."""

    # -P: without the modules of the current folder, which would come before all that is installed
    command: tuple[str, ...] = (sys.executable, "-P", "-m", "tcil.experiments.scheduling.worker")

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the worker)
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **environment},
        )
        self.job: Job | None = None
        self.killed = ""  # why, if the sweep did

    @property
    def output(self) -> IO[str]:
        """Where its answers come from."""
        assert self.process.stdout is not None
        return self.process.stdout

    def begin(self, job: Job) -> None:
        """Hand over a job."""
        assert self.process.stdin is not None
        self.job = job
        with contextlib.suppress(BrokenPipeError):  # it died meanwhile, which its output tells as well
            print(job.to_json(), file=self.process.stdin, flush=True)

    def outcome(self) -> Outcome:
        """How the job ended; to be asked when there is something to read."""
        line = self.output.readline()
        if line:
            return Outcome.from_json(line)
        code = self.process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        if self.killed:
            return Outcome("died", self.killed)
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        how += " (out of memory, perhaps)" if code == -signal.SIGKILL else ""
        return Outcome("died", f"the worker ended by {how}" + (f": {said[-1]}" if said and code > 0 else ""))

    def close(self) -> None:
        """Let it end: it does so when its input ends."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.output.close()
        self._errors.close()


class Processes:
    """Local processes, each with its share of threads and, where asked for, of the GPUs."""

    def __init__(self, environments: list[dict[str, str]]) -> None:
        self._idle = list(environments)  # of the workers that could be started
        self._ready: list[Worker] = []
        self._busy: set[Worker] = set()
        self._outputs = selectors.DefaultSelector()
        self.slots = len(environments)

    def start(self, job: Job) -> None:
        """Begin a job, on a worker that is there or on a new one."""
        if self._ready:
            worker = self._ready.pop()
        else:
            worker = Worker(self._idle.pop(0))
            self._outputs.register(worker.output, selectors.EVENT_READ, worker)
        self._busy.add(worker)
        worker.begin(job)

    def ended(self, seconds: float) -> list[tuple[Job, Outcome]]:
        """Jobs that have ended; waits at most `seconds` for one."""
        found = []
        for key, _ in self._outputs.select(seconds):
            worker: Worker = key.data
            outcome = worker.outcome()
            if worker in self._busy and worker.job is not None:  # else it died while it had nothing to do
                found.append((worker.job, outcome))
            self._busy.discard(worker)
            if outcome.state == "died":
                self._outputs.unregister(worker.output)
                self._ready = [other for other in self._ready if other is not worker]
                self._idle.append(worker.environment)
                worker.process.kill()  # one without memory may still be there, and unable to end
                worker.close()
            else:
                self._ready.append(worker)
        return found

    def stop(self) -> None:
        """Ask the running jobs to finish their step, save and end."""
        for worker in self._busy:
            worker.process.send_signal(signal.SIGTERM)

    def kill(self, job: Job, reason: str) -> None:
        """End the worker of a job at once; SIGKILL also ends a process that was halted."""
        for worker in self._busy:
            if worker.job is job:
                worker.killed = reason
                worker.process.kill()

    def close(self) -> None:
        """Let all workers end."""
        for worker in (*self._ready, *self._busy):
            worker.close()
        self._outputs.close()


class Ray:
    """A Ray cluster: each job is a task with its CPUs and GPUs; Ray finds the node.

    Without an address Ray is started on this machine, bound to the loopback address and without its dashboard, and
    ends with the sweep. Ray's own transport uses pickle among its processes: see docs/scale-out.md before opening it.
    """

    def __init__(self, address: str | None, cpus: float, gpus: float) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        own = address is None
        if own:
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # without it Ray listens on every address
        try:
            import ray
        except ImportError:
            raise invalid(
                "on", "ray, which is not installed", "the extra tcil[ray]", "pip install 'tcil[ray]'"
            ) from None
        self._ray: Any = ray
        self._needs = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if own:
            options |= {"include_dashboard": False, "_node_ip_address": LOOPBACK}
        try:
            with contextlib.chdir(sys.prefix):  # Ray puts the current folder before all that is installed
                ray.init(address=address or "local", **options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise invalid("ray-address", f"{address!r} ({reason})", "auto, or HOST:PORT of a running cluster") from None
        if own and any(node["NodeManagerAddress"] != LOOPBACK for node in self._ray.nodes()):
            ray.shutdown()
            raise RuntimeError(f"Ray did not bind to {LOOPBACK}: start a cluster yourself and name it by --ray-address")
        self._task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0)(answer_unless_cancelled)
        self._jobs: dict[Any, Job] = {}
        self._killed: dict[Any, str] = {}
        self._head: str = ray.get_runtime_context().gcs_address
        self._answered = time.monotonic()
        if not self.slots:
            most = max((node["Resources"].get("CPU", 0) for node in self._ray.nodes() if node["Alive"]), default=0)
            given = f"{cpus:g} CPUs and {gpus:g} GPUs"
            raise invalid("cpus-per-run", given, f"what a node of the cluster has; the largest has {most:g} CPUs")

    @property
    def slots(self) -> int:
        """How many jobs fit on the nodes that are alive now."""
        fits = 0
        if not self._head_answers():
            return fits
        for node in self._ray.nodes():
            if node["Alive"]:
                has = node["Resources"]
                fits += int(min(has.get(kind, 0) / need for kind, need in self._needs.items()))
        return fits

    def start(self, job: Job) -> None:
        """Hand a job to Ray."""
        self._jobs[self._task.remote(job.to_json())] = job

    def ended(self, seconds: float) -> list[tuple[Job, Outcome]]:
        """Jobs that have ended; waits at most `seconds` for one."""
        if not self._head_answers() and time.monotonic() - self._answered > LOST_AFTER:
            raise ExecutorLost(f"the Ray cluster is lost: its head at {self._head} no longer answers")
        if not self._jobs:
            time.sleep(seconds)
            return []
        ready, _ = self._ray.wait(list(self._jobs), timeout=seconds)
        return [(self._jobs.pop(reference), self._outcome(reference)) for reference in ready]

    def _head_answers(self) -> bool:
        """Whether the head takes connections. Without it most of Ray's calls block, and then end this process."""
        host, _, port = self._head.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
        except OSError:
            return False
        self._answered = time.monotonic()
        return True

    def _outcome(self, reference: Any) -> Outcome:
        errors = self._ray.exceptions
        try:
            return Outcome.from_json(self._ray.get(reference))
        except errors.TaskCancelledError:
            reason = self._killed.pop(reference, "")
            return Outcome("died", reason) if reason else Outcome("stopped", "stopped on request")
        except errors.RayTaskError as error:
            return Outcome("failed", str(error).strip().splitlines()[-1])
        except errors.RayError as error:
            how = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            return Outcome("died", self._killed.pop(reference, how))

    def stop(self) -> None:
        """Ask the running jobs to finish their step, save and end."""
        for reference in self._jobs:
            self._ray.cancel(reference, force=False)

    def kill(self, job: Job, reason: str) -> None:
        """End the process of a job at once."""
        for reference, own in self._jobs.items():
            if own is job:
                self._killed[reference] = reason
                self._ray.cancel(reference, force=True)

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        self._ray.shutdown()


def environments(cpus: float, gpus: float, at_once: int | None, names: Sequence[str]) -> list[dict[str, str]]:
    """The variables of as many local workers as fit on this machine: threads for each, and its GPUs out of `names`.

    >>> [e["CUDA_VISIBLE_DEVICES"] for e in environments(1, 0.5, 4, names=["2", "3"])]
    ['2', '2', '3', '3']
    """
    threads = str(threads_of(cpus))
    variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    count = at_once or max(1, int((os.cpu_count() or 1) / cpus))
    if not gpus:
        return [variables] * count
    width, share = max(1, int(gpus)), int(1 / gpus) if gpus < 1 else 1  # GPUs of a worker, workers of a GPU
    sets = [",".join(names[i : i + width]) for i in range(0, len(names) - width + 1, width)]
    if not sets:
        raise invalid("gpus-per-run", f"{gpus:g}", f"at most {len(names)}, as this machine has")
    return [{**variables, "CUDA_VISIBLE_DEVICES": own} for own in sets for _ in range(share)][:count]


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, by the names that others know them by."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def threads_of(cpus: float) -> int:
    """Threads for this number of CPUs: a fraction still needs one."""
    return max(1, int(cpus))


def make_executor(resources: Resources) -> Executor:
    """The executor of a place."""
    place, cpus = resources.place, resources.cpus or 1.0
    if place is Place.RAY:
        return Ray(resources.ray_address, cpus, resources.gpus)
    if place is Place.SERIAL:
        return Serial()
    return Processes(environments(cpus, resources.gpus, resources.at_once, visible_gpus() if resources.gpus else []))
