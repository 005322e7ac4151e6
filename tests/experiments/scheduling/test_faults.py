"""A few faults of each kind that benchmarks/faults injects; and each check fails without what it checks."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import types

import pytest
from safetensors.torch import load

import tcil.experiments.process.stopping as stopping
import tcil.experiments.runs.identity as identity
import tcil.experiments.runs.locks as locks
import tcil.experiments.runs.store as store
import tcil.experiments.scheduling.executors as executors
import tcil.experiments.scheduling.sweep as sweep
import tcil.foundation.files as storage
import tcil.incremental.training as training
from benchmarks.faults import disks, nodes, processes, runs
from benchmarks.faults.checks import Lost
from benchmarks.faults.lab import Lab
from benchmarks.faults.seams import put, start_workers_by
from benchmarks.faults.series import SEED

pytestmark = [pytest.mark.timeout(600), pytest.mark.processes]


def on_ray(test):
    """One cluster for all of them."""
    return pytest.mark.slow(pytest.mark.ray(pytest.mark.xdist_group("ray")(test)))


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    print(f"seed {SEED}")
    return Lab(tmp_path_factory.mktemp("lab"), random.Random(SEED), at_once=1)  # small: all of it must be quick


@pytest.fixture(scope="module")
def cluster():
    with nodes.RayCluster().joined() as joined:
        yield joined


def at_least_one(inject):
    """Some moments fall after the end; then it is drawn again."""
    assert any(inject() for _ in range(6))


def again_and_again(inject):
    """Until it does harm, which not every moment does."""
    for _ in range(20):
        inject()


# protections, taken out -----------------------------------------------------------------------------------------


def no_retries():
    put(sweep, "sweep", functools.partial(sweep.sweep, retries=0))


def deaf_workers():
    """Workers that do not notice that the sweep is gone."""
    code = "import sys, tcil.experiments.scheduling.worker as w; w._listen = lambda q: [q.put(x) for x in sys.stdin];"
    code += " w.write_page = lambda run: None; w.main()"
    start_workers_by("-c", code)


def no_rename():
    def write(path, content):
        try:
            path.write_bytes(content)
        except OSError as error:
            raise OSError(error.errno, f"could not be written ({error.strerror})", str(path)) from error

    put(store, "replace_file", write)


def no_checksums():
    def plain_json(content, name):
        record = json.loads(content)
        record.pop("checksum", None)
        return record

    def plain_tensors(content, name):
        size = int.from_bytes(content[:8], "little")
        words = json.loads(content[8 : 8 + size])["__metadata__"]["note"].split(" ")
        return load(content), dict(word.split("=", 1) for word in words)

    put(store, "open_json", plain_json)
    put(store, "open_tensors", plain_tensors)


def no_flush():
    put(os, "fsync", lambda file: None)


def no_flush_of_folders():
    put(storage, "sync_folder", lambda path: None)


def no_watch():
    put(sweep.Watch, "hung", lambda self, running: [])


def any_format():
    put(identity, "check_format", lambda found, where: None)


def no_lock():
    put(locks.FolderLock, "held", lambda self, waiting=None: contextlib.nullcontext())


def no_handlers():
    put(stopping, "on_signals", lambda *more: contextlib.nullcontext())


def no_look_at_the_loss():
    put(training, "math", types.SimpleNamespace(isfinite=lambda value: True))


# the faults -----------------------------------------------------------------------------------------------------


def test_a_worker_is_killed(lab):
    at_least_one(lambda: processes.killed_worker(lab))


@pytest.mark.slow
def test_a_killed_worker_is_the_end_without_retries(lab):
    with pytest.raises(Lost, match="did not get over it"):
        at_least_one(lambda: processes.killed_worker(lab, no_retries))


@pytest.mark.slow
def test_the_driver_is_killed(lab):
    at_least_one(lambda: processes.killed_driver(lab))


@pytest.mark.slow
def test_workers_would_outlive_their_driver(lab):
    with pytest.raises(Lost, match="workers went on though the sweep was dead"):
        at_least_one(lambda: processes.killed_driver(lab, deaf_workers))


@on_ray
def test_a_sweep_on_ray_is_stopped(lab, cluster):
    where = ("--on", "ray", "--ray-address", cluster.address)
    at_least_one(lambda: processes.signalled_sweep(lab, signal.SIGTERM, *where))


@on_ray
def test_a_ray_node_is_killed(lab, cluster):
    at_least_one(lambda: nodes.killed_node(lab, cluster))


@on_ray
def test_a_killed_ray_node_is_the_end_without_retries(lab, cluster):
    with pytest.raises(Lost, match="did not get over it"):
        at_least_one(lambda: nodes.killed_node(lab, cluster, no_retries))


@on_ray
def test_the_head_of_ray_is_lost(lab):
    def impatient():
        put(executors, "LOST_AFTER", 3.0)

    with nodes.RayCluster().joined() as own:  # it does not outlive its head
        at_least_one(lambda: nodes.lost_head(lab, own, impatient))


def test_a_write_fails(lab):
    for _ in range(2):
        assert disks.failed_write(lab) == 1


@pytest.mark.slow
def test_a_failed_write_destroys_without_the_rename(lab):
    with pytest.raises(Lost, match="is not as it was before"):
        disks.failed_write(lab, no_rename)


def test_the_disk_is_full(lab):
    assert disks.full_disk(lab) == 1


def test_the_disk_is_full_where_nothing_can_be_mounted(lab):
    assert disks.full_disk(lab, mounting=False) == 1


@pytest.mark.slow
def test_a_full_disk_destroys_without_the_rename(lab):
    with pytest.raises(Lost, match="is damaged"):
        again_and_again(lambda: disks.full_disk(lab, no_rename))


def test_the_power_fails(lab):
    for _ in range(3):
        at_least_one(lambda: disks.power_cut(lab))


@pytest.mark.parametrize("patch", [no_flush, no_flush_of_folders])
@pytest.mark.slow
def test_a_power_cut_takes_what_was_not_flushed(lab, patch):
    with pytest.raises(Lost, match=r"is lost in the power cut|is damaged"):
        again_and_again(lambda: disks.power_cut(lab, patch))


def test_two_versions_on_one_folder(lab):
    assert runs.two_versions(lab) == 1


@pytest.mark.slow
def test_another_format_is_overwritten_unless_it_is_looked_at(lab):
    with pytest.raises(Lost):
        runs.two_versions(lab, any_format)


@pytest.mark.parametrize(
    "stroke",
    [
        pytest.param("memory refused to torch", marks=pytest.mark.slow),
        pytest.param("killed for its memory", marks=pytest.mark.slow),
        "halted",
    ],
)
@pytest.mark.slow
def test_a_worker_without_memory_or_hung(lab, stroke):
    assert processes.struck_worker(lab, stroke) == 1


@pytest.mark.slow
def test_a_worker_without_memory_is_the_end_without_retries(lab):
    with pytest.raises(Lost, match="did not get over it"):
        processes.struck_worker(lab, "memory refused to Python", no_retries)


@pytest.mark.slow
def test_a_hung_worker_hangs_the_sweep_unless_watched(lab):
    with pytest.raises(Lost, match="it hangs"):
        processes.struck_worker(lab, "waiting for ever", no_watch, patience=20)


def test_a_file_is_damaged(lab):
    for _ in range(3):
        assert runs.damaged_file(lab) == 1


@pytest.mark.slow
def test_a_damaged_file_is_used_without_checksums(lab):
    with pytest.raises(Lost):
        again_and_again(lambda: runs.damaged_file(lab, no_checksums))


def test_two_sweeps_on_one_folder(lab):
    assert runs.two_sweeps(lab) == 1


@pytest.mark.slow
def test_two_sweeps_do_everything_twice_without_the_lock(lab):
    with pytest.raises(Lost, match=r"steps instead of|one of two sweeps"):
        runs.two_sweeps(lab, no_lock)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGUSR1, signal.SIGHUP))]
)
def test_a_signal_stops_a_run_after_its_step(lab, number):
    at_least_one(lambda: processes.signalled(lab, number))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_just_kills_without_the_handler(lab, number):
    with pytest.raises(Lost, match=f"{number.name} gave the exit code -{int(number)}"):
        at_least_one(lambda: processes.signalled(lab, number, no_handlers))


@pytest.mark.slow
def test_a_sweep_passes_signals_on(lab):
    at_least_one(lambda: processes.signalled_sweep(lab, signal.SIGTERM, *lab.processes))


def test_a_loss_of_nan_stops_that_run_only(lab):
    assert runs.not_a_number(lab) == 1


@pytest.mark.slow
def test_a_loss_of_nan_has_no_verdict_unless_looked_at(lab):
    with pytest.raises(Lost):
        runs.not_a_number(lab, no_look_at_the_loss)
