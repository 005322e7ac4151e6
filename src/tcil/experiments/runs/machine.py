"""On what a run is computed: its device, threads and layout, and how long its parts take, noted in environment.json."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tcil import __version__
from tcil.experiments.config.settings import FORMAT
from tcil.experiments.runs.results import Environment
from tcil.experiments.runs.store import RunFolder, task_name
from tcil.foundation import ranks
from tcil.foundation.errors import invalid
from tcil.incremental.data.layout import Layout
from tcil.incremental.placement import Placement


def usable_device(name: str) -> torch.device:
    """The device of that name, if it is there."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()  # the meta device has no numbers
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise invalid("device", f"{name!r} ({reason})", "cpu, or a cuda or mps device that is there") from None
    return device


def check_device_name(name: str) -> None:
    """Raise if no machine has a device of that name: for plans, which may be made for another machine."""
    try:
        torch.device(name)
    except RuntimeError:
        raise invalid("device", repr(name), "cpu, cuda or mps, or one of several, such as cuda:0") from None


def check_device(name: str) -> None:
    """Raise if a device is not there; for the parent of workers, which should take no memory of a GPU."""
    with contextlib.suppress(RuntimeError):
        device = torch.device(name)
        if device.type == "cuda" and torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count():
            return
    usable_device(name)


def environment(device: torch.device, *, compiled: bool = False) -> Environment:
    """What the numbers are computed with."""
    import numpy
    import scipy

    alone = Environment(
        format=FORMAT,
        tcil=__version__,
        torch=str(torch.__version__),
        numpy=numpy.__version__,
        scipy=scipy.__version__,
        python=platform.python_version(),
        machine=platform.machine(),
        threads=torch.get_num_threads(),
        cores=os.cpu_count(),
        device=str(device),
        cuda=torch.version.cuda,
    )
    size = ranks.current().size
    unusual = ({"ranks": size} if size > 1 else {}) | ({"compiled": True} if compiled else {})
    return alone.model_copy(update=unusual)


class Machine:
    """The device of a run, and the threads and layout that it began with.

    Whether training steps are compiled is noted like the device: it changes how sums are rounded, not what is computed.
    (Precision changes more than that, and is a setting.)
    """

    def __init__(self, store: RunFolder, device: str, *, compiled: bool = False) -> None:
        self.device = usable_device(device)
        self.compiled = compiled
        self._store = store
        self._placed = Environment()  # what it says of threads and layout; nothing on a GPU

    @contextmanager
    def placed(self, choose: Callable[[], Placement]) -> Iterator[Layout | None]:
        """Threads and layout that the run began with: sums depend on them, and a resumed run must go on as it was.

        A run that begins now takes what `choose` finds, which is noted at once.
        """
        before = torch.get_num_threads()
        try:
            yield self._place(choose) if self.device.type == "cpu" else None
        finally:
            torch.set_num_threads(before)

    def _place(self, choose: Callable[[], Placement]) -> Layout:
        began = self._store.read_environment()
        if began is not None and began.threads is not None:
            self._placed = began
        else:
            self._placed = Environment.model_validate(choose().record())
        assert self._placed.threads is not None
        torch.set_num_threads(self._placed.threads)
        if began is None:
            self._note(Environment(seconds={}))
        return self._placed.layout

    def note_seconds(self, task: int, what: str, seconds: float) -> None:
        """With what and how long something was computed; with the environment, not with the results."""
        known = self._store.read_environment() or Environment()
        self._note(known.timed(task_name(task), what, seconds))

    def note_where_missing(self) -> None:
        """Where the note is damaged, and nothing was computed that would have renewed it."""
        if self._store.read_environment() is None:
            self._store.write_environment(environment(self.device, compiled=self.compiled))

    def _note(self, timed: Environment) -> None:
        now = environment(self.device, compiled=self.compiled).placed_as(self._placed)
        self._store.write_environment(now.model_copy(update={"seconds": timed.seconds}))
