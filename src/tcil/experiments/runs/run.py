"""The run loop: task by task, train, update the memory, evaluate once, calibrate with everything, store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from tcil.experiments.config.settings import RunSettings
from tcil.experiments.process.progress import Listener, Progress
from tcil.experiments.process.stopping import Stopped
from tcil.experiments.runs import checkpoints, evaluate
from tcil.experiments.runs.calibrate import calibrate
from tcil.experiments.runs.entries import CALIBRATORS, ON_FEATURES, FinishedTask
from tcil.experiments.runs.evaluate import TaskLogits
from tcil.experiments.runs.identity import check_folder
from tcil.experiments.runs.machine import Machine
from tcil.experiments.runs.records import JsonObject
from tcil.experiments.runs.results import DataNote, RunResult, StoredSettings, TaskResult
from tcil.experiments.runs.store import RunFolder
from tcil.experiments.runs.tasks import check_stages, imbalance, make_stream, task_generator, update_memory
from tcil.foundation import ranks
from tcil.foundation.errors import invalid
from tcil.incremental.arithmetic import Arithmetic, Precision
from tcil.incremental.data.datasets import load_dataset
from tcil.incremental.data.images import Dataset, Pixels
from tcil.incremental.data.memory import Memory
from tcil.incremental.data.stream import Task
from tcil.incremental.learners import Learner, TaskData, make_learner
from tcil.incremental.learners.base import Schedule, Stage
from tcil.incremental.learners.registry import learner_type
from tcil.incremental.networks import ResNet, network_factory
from tcil.incremental.placement import Placement, choose_placement
from tcil.incremental.pretrained.features import OnFile
from tcil.incremental.pretrained.networks import PretrainedFactory
from tcil.incremental.training import EpochState, Interrupted, OptimizerKind, train_stage


class Run:
    """One run in its folder. `execute` does what is missing: if a run is interrupted, the next call resumes it.

    When `stop` returns True, the run finishes its step, saves, and raises `Stopped`. With `until`, it does this number
    of tasks only, exactly as in the whole run, which a later call completes. `backup` is a folder that gets a copy
    after every task, from which the run can resume.

    With a network on a pre-trained backbone, the features of the images are computed first, into the folder `features`
    beside the run's own, where other runs find them; `on_features` is called with the number of files done.
    """

    def __init__(
        self,
        settings: RunSettings,
        folder: Path,
        *,
        data: str | Path | None = None,
        dataset: Dataset | None = None,
        device: str = "cpu",
        compiled: bool = False,
        stop: Callable[[], bool] = lambda: False,
        until: int | None = None,
        backup: Path | None = None,
        on_features: OnFile = lambda done, files: None,
    ) -> None:
        self.settings, self._backup = settings, backup
        self.store = RunFolder(folder)
        self.machine = Machine(self.store, device, compiled=compiled)
        self._arithmetic = Arithmetic(Precision.parse(settings.precision, "precision"), compiled)
        self._arithmetic.check(self.machine.device)
        self._stop = stop
        self._optimizer = OptimizerKind.parse(settings.optimizer, "optimizer")
        self.dataset = (dataset or load_dataset(settings.dataset, data, **settings.data_options)).to(
            self.machine.device
        )
        if settings.crop is not None:
            self.dataset = replace(self.dataset, padding=settings.crop)
        self.images, self._network = self.dataset, network_factory(settings.network)
        named: object = self._network
        if isinstance(named, PretrainedFactory):
            where, told = folder.parent / FEATURES, _until(stop, on_features)
            factory, self.dataset = named.inputs(self.dataset, where, told)
            self._network = cast(Callable[[int], ResNet], factory)
        self._on_features = isinstance(named, PretrainedFactory)
        self.stream = make_stream(settings, self.dataset)
        self.n_tasks, self.n_classes = len(self.stream), self.stream.seen(len(self.stream) - 1)
        if until is not None:
            if until < 1:
                raise invalid("tasks-until", f"{until}", "at least 1")
            self.stream = self.stream.first(until)
        self._learner()  # its options are checked before any work
        check_network(settings.network, self._network, self.dataset.image_shape)

    def execute(
        self, calibrators: Sequence[str] | None = None, listener: Listener = lambda progress: None
    ) -> RunResult:
        """Train, evaluate and calibrate what is missing; return all results. Needs exclusive access to the folder."""
        with self.store.held():
            self._begin()
            self._check_backup()
            with self.threads():
                return self._execute(calibrators or self._all_calibrators(), listener)

    def _all_calibrators(self) -> list[str]:
        """Those of the tables, and those that need features which do not change."""
        return [*CALIBRATORS, *(ON_FEATURES if self._on_features else ())]

    def _execute(self, calibrators: Sequence[str], listener: Listener) -> RunResult:
        """The loop: each task is trained, evaluated once and calibrated with everything, as far as that is missing."""
        done, before = list[TaskResult](), self._results_before()
        results_only = self._results_only()
        for task, memory, learner in self.walk(listener):  # which trains
            result = self.stored_result(task.index, before)
            missing = [name for name in calibrators if result is None or name not in result.calibrators]
            logits = None
            if task.index in results_only:
                self._check_packed(task.index, missing)
            elif result is None or not evaluate.is_evaluated(self.store, task.index):
                logits = self._evaluate(task, memory, learner)
            if result is None or missing:
                listener(Progress(task.index, len(self.stream), "calibrate", 0, 1))
                finished = self.finished(task, memory, learner, done[-1].history if done else {}, logits=logits)
                fresh = self._calibrate(finished, missing)
                result = fresh if result is None else result.renewed(fresh)
                self.store.write_task_result(result)
                self.back_up()
            done.append(result)
            listener(Progress(task.index, len(self.stream), "done", 1, 1))
        if before is not None:  # an earlier call may have done more tasks
            done += before.tasks[len(done) :]
        return self._write_results(done)

    def _results_before(self) -> RunResult | None:
        """The results of an earlier call with these settings: they may be whole where a task's own file is damaged."""
        before = self.store.read_results()
        same = before is not None and before.settings.record() == StoredSettings.of(self.settings).record()
        return before if same else None

    def _calibrate(self, task: FinishedTask, calibrators: Sequence[str]) -> TaskResult:
        """The rows of these calibrators; the time that they take is noted."""
        started = time.perf_counter()
        result = calibrate(task, calibrators, self._check_stop)
        self.machine.note_seconds(task.index, "calibration", time.perf_counter() - started)
        return result

    def _write_results(self, tasks: Sequence[TaskResult]) -> RunResult:
        """Store the results of all tasks together."""
        settings, partial = StoredSettings.of(self.settings), len(tasks) < self.n_tasks
        title = learner_type(self.settings.learner).title
        whole = RunResult.of_tasks(settings, tasks, partial, key=self.settings.key, learner_title=title)
        self.store.write_results(whole)
        self.machine.note_where_missing()
        self.back_up()
        return whole

    def back_up(self) -> None:
        """Update the copy in the backup folder, if there is one."""
        if self._backup is not None and ranks.current().first:
            from tcil.experiments.runs.packing import pack

            pack(self.store.path, self._backup, "backup")

    def _check_backup(self) -> None:
        """Raise before any training if the backup folder cannot take the copy."""
        if self._backup is not None and ranks.current().first:
            from tcil.experiments.runs.packing import check_copy

            check_copy(self.store.path, self._backup, "backup")

    def _results_only(self) -> set[int]:
        """Tasks of which this folder has the results alone, being a copy: it resumes from a later network."""
        packed = self.store.read_packed()
        absent = {task for task in (packed.without if packed is not None else ()) if not self._has_network(task)}
        if absent and max(absent) + 1 < len(self.stream) and not self._has_network(max(absent) + 1):
            given = f"{self.store.path}, a packed copy without a whole network of task {max(absent) + 1}"
            advice = "Copy it again with 'tcil pack', or delete packed.json to train from the first task on."
            raise invalid("run", given, "the network that the copy resumes from", advice)
        return absent

    def _has_network(self, task: int) -> bool:
        return checkpoints.read_network(self.store, task) is not None

    def _check_packed(self, task: int, missing: Sequence[str]) -> None:
        """Refuse to compute rows of a task whose network stayed elsewhere."""
        if missing:
            given = f"{self.store.path}, a packed copy without the network of task {task}, for {', '.join(missing)}"
            advice = "Use the whole run folder, or delete packed.json to train from the first task on."
            raise invalid("run", given, "a folder with that network, or calibrators that have their rows", advice)

    def walk(self, listener: Listener | None = None) -> Iterator[tuple[Task, Memory, Learner]]:
        """Each task with its memory and its network; trains what is not trained yet (refused without a listener)."""
        learner, memory = self._learner(), Memory()
        results_only = self._results_only()
        for task in self.stream:
            spans = tuple(self.stream[i].columns for i in range(task.index + 1))
            data = TaskData(task.index, task.columns, task.train, memory.exemplars, self.stream.columns, spans)
            skipped = listener is not None and task.index in results_only
            trained = None if skipped else checkpoints.read_network(self.store, task.index)
            if skipped or trained is not None:
                learner.begin_task(data)
                learner.end_task(data)
                if trained is not None:  # else a later one is read, which replaces all of it
                    learner.model.load_state_dict(trained)
                learner.model.eval()
            elif listener is not None:
                self._train(learner, data, listener)
                checkpoints.write_network(self.store, task.index, learner)
            else:
                raise evaluate.not_there(self.store, task.index, "model")
            checkpoints.clear(self.store, task.index)
            memory = update_memory(self.settings, self.stream, task, memory)
            yield task, memory, learner

    def _train(self, learner: Learner, data: TaskData, listener: Listener) -> None:
        """Train all stages of a task that are not finished."""
        s = self.settings
        main = Schedule(s.epochs, s.lr, tuple(s.milestones), s.weight_decay, s.lr_shape)
        checkpoint = checkpoints.Checkpoint(self.store, data.index, learner)
        learner.begin_task(data)
        stages = learner.stages(data)
        check_stages(s.learner, stages)
        for number, name in enumerate(stages):
            if number < checkpoint.first_stage:
                continue
            checkpoint.enter(number)
            generator = task_generator(s, data.index, number)
            stage = learner.stage(name, data, main, generator)
            on_epoch = self._saving(checkpoint, data.index, number, stage, listener)
            try:
                train_stage(
                    learner.model,
                    stage,
                    self.dataset,
                    self.stream.columns,
                    batch_size=s.batch_size,
                    optimizer=self._optimizer,
                    generator=generator,
                    state=checkpoint.restore(number),
                    on_epoch=on_epoch,
                    stop=self._stop,
                    arithmetic=self._arithmetic,
                )
            except Interrupted as interrupted:
                checkpoint.save(number, interrupted.state)
                where = f"task {data.index + 1} of {len(self.stream)}"
                raise Stopped(f"stopped in {where} at {interrupted}; run the same command again to resume") from None
        learner.end_task(data)
        learner.model.eval()

    def _saving(
        self, checkpoint: checkpoints.Checkpoint, task: int, number: int, stage: Stage, listener: Listener
    ) -> Callable[[EpochState, float], None]:
        """What follows each epoch of a stage: save, note the time, report progress."""
        last = time.perf_counter()

        def on_epoch(now: EpochState, loss: float) -> None:
            nonlocal last
            checkpoint.save(number, now)
            before, last = last, time.perf_counter()
            self.machine.note_seconds(task, "training", last - before)
            listener(Progress(task, len(self.stream), stage.name, now.epoch, stage.schedule.epochs, loss))

        return on_epoch

    def _evaluate(self, task: Task, memory: Memory, learner: Learner) -> TaskLogits:
        """The logits of a task, stored with the rows that it was made from."""
        evaluate.write_rows(self.store, task, memory)
        logits = evaluate.evaluate(learner.model, self.dataset, self.stream, task, memory)
        logits.write(self.store, task.index)
        return logits

    def finished(
        self,
        task: Task,
        memory: Memory,
        learner: Learner,
        history: Mapping[str, JsonObject],
        valid: Tensor | None = None,
        logits: TaskLogits | None = None,
    ) -> FinishedTask:
        """What the calibrators need, by default from stored logits; `valid` may be another draw from the pool."""
        logits = TaskLogits.read(self.store, task.index) if logits is None else logits
        valid = task.valid if valid is None else valid
        pixels, train, columns = Pixels(self.dataset), self.dataset.train, self.stream.columns
        spare = memory.reserve_rows
        return FinishedTask(
            task.index,
            task.columns,
            tuple(self.stream[i].columns for i in range(task.index + 1)),
            *logits.test,
            *logits.valid(task, valid),
            *logits.memory,
            *logits.reserve,
            model=learner.model,
            memory=(pixels.plain(train, memory.rows), columns[memory.rows]),
            valid=(pixels.plain(train, valid), columns[valid]) if len(valid) else None,
            imbalance=imbalance(self.stream, task, memory, learner),
            history=history,
            reserve=(pixels.plain(train, spare), columns[spare]) if len(spare) else None,
            returned=task.returned,
        )

    def stored_result(self, task: int, whole: RunResult | None) -> TaskResult | None:
        """What a task's own file holds; where that is damaged, what the results of all tasks have of it."""
        stored = self.store.read_task_result(task)
        if stored is None and whole is not None and task < len(whole.tasks) and self.store.has_task_result(task):
            stored = whole.tasks[task]
            self.store.write_task_result(stored)
        return stored

    def _begin(self) -> None:
        """Make the folder, and check that it is this run's."""
        images = self.check_folder()
        self.store.create()
        self.store.write_settings(StoredSettings.of(self.settings))
        self.store.write_data(images)

    def check_folder(self) -> DataNote:
        """Refuse a folder that holds another run, before anything is written; what tells its images from others."""
        images = DataNote.model_validate({**self.dataset.fingerprint(), "inputs": self.dataset.treatment()})
        check_folder(self.store, self.settings, images)
        return images

    @contextmanager
    def threads(self) -> Iterator[None]:
        """Threads and layout that the run began with."""

        def choose() -> Placement:
            return choose_placement(self._network, self.dataset.image_shape, self.settings.batch_size, self._arithmetic)

        with self.machine.placed(choose) as layout:
            if layout is not None:
                self.dataset = replace(self.dataset, layout=layout)
            yield

    def _learner(self) -> Learner:
        s = self.settings
        make, form = self._network, self.dataset.layout.form

        def network(n_classes: int) -> ResNet:
            return make(n_classes).to(memory_format=form)  # type: ignore[call-overload, no-any-return]

        options, device = s.learner_options, self.machine.device
        return make_learner(s.learner, network, self.n_classes, seed=s.seed, options=options, device=device)

    def _check_stop(self) -> None:
        if ranks.current().any(self._stop()):
            raise Stopped("stopped on request; run the same command again to resume")


FEATURES = "features"  # the folder of cached features, beside the folders of runs


def _until(stop: Callable[[], bool], on_features: OnFile) -> OnFile:
    """`on_features` between files, until `stop` returns True."""

    def on_file(done: int, files: int) -> None:
        if stop() and done < files:
            raise Stopped(f"stopped at {done} of {files} files of features; run the same command again to resume")
        on_features(done, files)

    return on_file


def check_network(name: str, make: Callable[[int], nn.Module], shape: tuple[int, ...]) -> None:
    """Whether the network takes images of this shape, and returns a logit for each class."""
    network = make(2).eval()
    try:
        with torch.no_grad():
            logits = network(torch.zeros(1, *shape))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise invalid("network", f"{name!r} ({reason})", f"a network for images of shape {shape}") from None
    if not isinstance(logits, Tensor) or logits.shape != (1, 2):
        shown = f"a tensor of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise invalid("network", f"{name!r}, which returns {shown}", "logits, (1, 2) for one image and two classes")
