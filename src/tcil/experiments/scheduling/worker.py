"""What does the jobs of a sweep, one after another: in this process, in one of its own, or on a node of Ray.

`python -m tcil.experiments.scheduling.worker` takes jobs as lines on its input and answers each with a line on its
output. When its input ends, the sweep that started it is over or dead: it finishes its step, saves and ends.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from tcil.experiments.process import stopping
from tcil.experiments.process.exits import RunFailed, last_line, note_error
from tcil.experiments.runs.complete import complete_run
from tcil.experiments.runs.locks import FolderInUse
from tcil.experiments.runs.run import Run
from tcil.experiments.runs.store import RunFolder, RunFolderWarning, StoredRun
from tcil.experiments.scheduling.job import Job, Outcome
from tcil.experiments.scheduling.status import StatusWriter
from tcil.foundation.extensions import modules_in


def work(job: Job) -> Outcome:
    """Do the run, or what is left of it. Whatever goes wrong is an outcome; the full text is in RUN/error.txt."""
    writer = StatusWriter(job.folder)
    with _remarks() as remarks, _threads(job.threads):

        def ended(state: str, message: str = "") -> Outcome:
            return Outcome(state, message, tuple(remarks))

        try:
            with RunFolder(job.folder).held():
                try:
                    with writer.beating():
                        _train(job, writer)
                    writer.end("done")
                    return ended("done")
                except stopping.Stopped as reason:
                    writer.end("stopped", str(reason))
                    return ended("stopped", str(reason))
                except Exception as error:
                    message = last_line(error)
                    if isinstance(error, ValueError) and not writer.begun and _finished(job):
                        writer.end("done")  # it was refused, such as for other images; what is there is as it was
                    else:
                        writer.end("failed", message)
                        note_error(job.folder)
                    return ended(_state(error), message)
        except FolderInUse as reason:
            return ended("in use", str(reason))
        except Exception as error:  # no folder can be made, or no memory is left to note the first error
            return ended(_state(error), last_line(error))


def _finished(job: Job) -> bool:
    """Whether the folder holds the results of all tasks."""
    results = RunFolder(job.folder).read_results()
    return results is not None and results.until is None


def _state(error: Exception) -> str:
    """Where memory ran out, a new process may have it later. torch's error for the CPU has no type of its own."""
    cause = error.__cause__ if isinstance(error, RunFailed) else error
    no_memory = isinstance(cause, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(cause)
    return "died" if no_memory else "failed"


def _train(job: Job, writer: StatusWriter) -> None:
    with modules_in(job.home):
        stored = complete_run(
            job.settings,
            job.out,
            data=job.data,
            device=job.device,
            calibrators=job.calibrators,
            log=job.log,
            full_data=job.full_data,
            display=writer.titled,
            until=job.until,
            backup=job.backup,
            compiled=job.compiled,
        )
        if job.analysis:
            from tcil.experiments.runs.analysis import analyse

            run = Run(job.settings, job.folder, data=job.data, device=job.device, until=job.until)
            analyse(run, writer.titled(""))
    write_page(stored)
    (job.folder / "error.txt").unlink(missing_ok=True)


def write_page(run: StoredRun) -> None:
    """The run's page, unless there is one of these results."""
    page, results = run.path / "report.html", run.path / "results.json"
    if not page.exists() or page.stat().st_mtime < results.stat().st_mtime:
        from tcil.experiments.reporting.page import write_report  # with all that draws; a worker starts without it

        write_report([run], page)


@contextlib.contextmanager
def _remarks() -> Iterator[list[str]]:
    """What is said of the run folder meanwhile, such as of damaged files, each once."""
    texts: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", RunFolderWarning)
        show = warnings.showwarning

        def note(message: Warning | str, category: type[Warning], *rest: Any) -> None:
            if not issubclass(category, RunFolderWarning):
                show(message, category, *rest)
            elif str(message) not in texts:
                texts.append(str(message))

        warnings.showwarning = note  # type: ignore[assignment]
        yield texts


@contextlib.contextmanager
def _threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def answer(line: str) -> str:
    """The outcome of a job, both as JSON: what travels between processes."""
    try:
        outcome = work(Job.from_json(line))
    except ValueError as error:
        outcome = Outcome("failed", last_line(error))
    return outcome.to_json()


def answer_unless_cancelled(line: str) -> str:
    """The same in a Ray task, where being cancelled (which comes as SIGINT) is a request to stop."""
    with stopping.on_signals(signal.SIGINT):
        return answer(line)


def main() -> None:
    """Work until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anything prints goes with the errors
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the sweep tells its workers
    lines: queue.Queue[str] = queue.Queue()
    with stopping.on_signals():
        threading.Thread(target=_listen, args=(lines,), daemon=True).start()
        while line := lines.get():
            print(answer(line), file=answers, flush=True)


def _listen(lines: queue.Queue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    stopping.request(signal.SIGTERM)
    lines.put("")


if __name__ == "__main__":
    main()
