"""The run loop: task by task, train, update the memory, evaluate once, calibrate with everything, store."""

from __future__ import annotations

import itertools
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tcil
from tcil.calibration import ranks
from tcil.calibration.errors import invalid
from tcil.experiments.calibration import CALIBRATORS, FinishedTask, calibrate, merged
from tcil.experiments.settings import RunSettings, key_of, stored_key
from tcil.experiments.stopping import Stopped
from tcil.experiments.store import OtherVersionWarning, RunFolder, check_format, environment
from tcil.incremental.datasets import load_dataset
from tcil.incremental.images import Dataset, Pixels
from tcil.incremental.learners import Learner, TaskData, make_learner
from tcil.incremental.learners.base import Schedule
from tcil.incremental.memory import Memory, UniformMemory
from tcil.incremental.networks import ResNet, network_factory
from tcil.incremental.placement import Layout, choose_placement
from tcil.incremental.stream import Task, TaskStream, class_order, equal_sizes
from tcil.incremental.training import EpochState, Interrupted, OptimizerKind, train_stage


@dataclass(frozen=True)
class Progress:
    """Where a run stands, for whoever shows it."""

    task: int
    n_tasks: int
    phase: str
    done: int
    total: int
    loss: float | None = None


FINISHED = ("indices", "logits", "model")  # files of a task that was trained and evaluated
PLACED = ("layout", "threads", "images_per_second")  # in environment.json
Listener = Callable[[Progress], None]


class Run:
    """One run in its folder. `execute` does what is not done yet; killed at any moment, it goes on where it was.

    Once `stop` says so, it finishes its step, saves, and raises `Stopped`.
    """

    def __init__(
        self,
        settings: RunSettings,
        folder: Path,
        *,
        data: str | Path | None = None,
        dataset: Dataset | None = None,
        device: str = "cpu",
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.settings = settings
        self.store = RunFolder(folder)
        self._stop = stop
        self.device = usable_device(device)
        self._optimizer = OptimizerKind.parse(settings.optimizer, "optimizer")
        self.dataset = (dataset or load_dataset(settings.dataset, data)).to(self.device)
        if settings.crop is not None:
            self.dataset = replace(self.dataset, padding=settings.crop)
        self.stream = make_stream(settings, self.dataset)
        self.n_classes = self.stream.seen(len(self.stream) - 1)
        self.pixels = Pixels(self.dataset)
        self.placed: dict[str, Any] = {}
        column_of = torch.full((self.dataset.n_classes,), -1)
        column_of[torch.tensor(self.stream.order)] = torch.arange(self.n_classes)
        self.test_columns = column_of[self.dataset.test.labels]
        self._learner()  # its options are checked before any work
        check_network(settings.network, self.dataset)

    def execute(
        self, calibrators: Sequence[str] | None = None, listener: Listener = lambda progress: None
    ) -> dict[str, Any]:
        """Train, evaluate and calibrate whatever is missing; return all results. Alone in the folder, or not at all."""
        with self.store.held():
            self._begin()
            with self.threads():
                return self._execute(calibrators, listener)

    def _begin(self) -> None:
        """Make the folder, and see that it is this run's."""
        content = self.check_folder()
        self.store.create()
        self.store.write_json("settings.json", self.settings.model_dump(mode="json"))
        self.store.write_json("data.json", content)

    def check_folder(self) -> dict[str, Any]:
        """Refuse a folder that holds another run, before anything is written; the fingerprint of its images."""
        store = self.store
        self._check_version()
        own, whole = store.read_json("settings.json"), store.read_json("results.json")
        beside = whole.get("settings") if isinstance(whole, dict) else None  # each may have been edited alone
        keys = [stored_key(settings) for settings in (own, beside) if settings is not None]
        named = re.search(r"-seed\d+-([0-9a-f]{12})$", store.path.resolve().name)
        if named and not (isinstance(own, dict) and key_of(own) == named[1]):  # an earlier version may have had fewer
            keys.append(named[1])
        if any(key != self.settings.key for key in keys):
            raise invalid(
                "run", f"{store.path}, which holds a run with other settings", "an empty folder or the same run"
            )
        content = self.dataset.fingerprint()
        if store.read_json("data.json") not in (None, content):
            raise invalid(
                "data",
                f"other images than those of {store.path}",
                "the images that the run began with",
                "Take another --out, or delete it.",
            )
        return content

    def check_finished(self) -> None:
        """Refuse a run with a task that is not finished, or that was made of other rows than these settings say."""
        for task in self.stream:
            found = {name: self._stored(task, name) for name in FINISHED}
            for name, own in {"train": task.train, "valid": task.valid, "pool": task.pool}.items():
                rows = found["indices"].get(name)
                if rows is None or not torch.equal(rows, own):
                    given = f"{self.store.path}, whose task {task.index} has other images than its settings say"
                    raise invalid("run", given, "the settings and images that it was trained with")

    def _stored(self, task: Task, name: str) -> dict[str, Tensor]:
        """What a finished task has stored under this name."""
        stored = self.store.read_tensors(f"{_at(task)}/{name}.safetensors")
        if stored is None:
            raise invalid("run", f"{self.store.path} without {name} of task {task.index}", "a finished run")
        return stored[0]

    def _check_version(self) -> None:
        """Refuse a folder of another format; say so where a run that another version began goes on."""
        began = self.store.read_json("environment.json")
        check_format(began, self.store.path)
        version = began.get("tcil") if isinstance(began, dict) else None
        if version not in (None, tcil.__version__) and not (self.store.path / "results.json").exists():
            text = f"{self.store.path} was begun with tcil {version} and goes on with {tcil.__version__}"
            warnings.warn(f"{text}: its numbers may differ from those of one version alone", OtherVersionWarning, 2)

    def _execute(self, calibrators: Sequence[str] | None, listener: Listener) -> dict[str, Any]:
        store, results = self.store, list[dict[str, Any]]()
        before = store.read_json("results.json")  # a task's own file may be damaged where this one is whole
        if before is not None and before["settings"] != self.settings.model_dump(mode="json"):
            before = None
        for task, memory, learner in self.walk(listener):
            own = f"{_at(task)}/results.json"
            stored = self.stored_results(task, before)
            known = stored["calibrators"] if stored else {}
            missing = [name for name in calibrators or CALIBRATORS if name not in known]
            if stored is None or not self._evaluated(task):
                self._evaluate(task, memory, learner)
            if stored is None or missing:
                listener(Progress(task.index, len(self.stream), "calibrate", 0, 1))
                history = results[-1]["history"] if results else {}
                started = time.perf_counter()
                fresh = calibrate(self.finished(task, memory, learner, history), missing, self._check_stop)
                self._note_seconds(_at(task), "calibration", time.perf_counter() - started)
                stored = merged(stored, fresh)
                store.write_json(own, stored)
            results.append(stored)
            listener(Progress(task.index, len(self.stream), "done", 1, 1))
        whole = {"settings": self.settings.model_dump(mode="json"), "key": self.settings.key, "tasks": results}
        store.write_json("results.json", whole)
        if store.read_json("environment.json") is None:  # damaged, and nothing was computed that would have noted it
            store.write_json("environment.json", environment(self.device))
        return whole

    def stored_results(self, task: Task, whole: dict[str, Any] | None) -> dict[str, Any] | None:
        """What a task's own file holds; where that is damaged, what the results of all tasks have of it."""
        own = f"{_at(task)}/results.json"
        stored: dict[str, Any] | None = self.store.read_json(own)
        if stored is None and whole is not None and (self.store.path / own).exists():
            stored = whole["tasks"][task.index]
            self.store.write_json(own, whole["tasks"][task.index])
        return stored

    @contextmanager
    def threads(self) -> Iterator[None]:
        """Threads and layout that the run began with: sums depend on them, and a resumed run must go on as it was."""
        before = torch.get_num_threads()
        self._place()
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _place(self) -> None:
        """Threads and layout of this run: those it began with, else by a short measurement that is noted at once."""
        if self.device.type != "cpu":
            return
        began = self.store.read_json("environment.json") or {}
        if "threads" in began:
            layout = Layout.parse(began.get("layout", "channels_last"), "layout")
            self.placed = {key: began[key] for key in PLACED if key in began}
        else:
            chosen = choose_placement(
                network_factory(self.settings.network), self.dataset.image_shape, self.settings.batch_size
            )
            layout, self.placed = chosen.layout, chosen.record()
        torch.set_num_threads(self.placed["threads"])
        self.dataset = replace(self.dataset, layout=layout)
        self.pixels = Pixels(self.dataset)
        if not began:
            self.store.write_json("environment.json", {**environment(self.device), **self.placed, "seconds": {}})

    def walk(self, listener: Listener | None = None) -> Iterator[tuple[Task, Memory, Learner]]:
        """Each task with its memory and its network, trained now where it was not yet (refused without a listener)."""
        learner, memory = self._learner(), Memory()
        for task in self.stream:
            data = self._task_data(task, memory)
            trained = self.store.read_tensors(f"{_at(task)}/model.safetensors")
            if trained is not None:
                learner.begin_task(data)
                learner.end_task(data)
                learner.model.load_state_dict(trained[0])
                learner.model.eval()
            elif listener is not None:
                self._train(learner, data, listener)
                self.store.write_tensors(f"{_at(task)}/model.safetensors", learner.model.state_dict())
            else:
                raise invalid("run", f"{self.store.path} without a network of task {task.index}", "a finished run")
            for temporary in ("epoch", "stage"):
                self.store.remove(f"{_at(task)}/{temporary}.safetensors")
            memory = self._update_memory(task, memory)
            yield task, memory, learner

    def _note_seconds(self, at: str, what: str, seconds: float) -> None:
        """With what and how long something was computed; with the environment, not with the results."""
        known = (self.store.read_json("environment.json") or {}).get("seconds", {})
        known.setdefault(at, {})[what] = round(known.get(at, {}).get(what, 0.0) + seconds, 3)
        self.store.write_json("environment.json", {**environment(self.device), **self.placed, "seconds": known})

    # one task ------------------------------------------------------------------------------------------------

    def _learner(self) -> Learner:
        s = self.settings
        make, form = network_factory(s.network), self.dataset.layout.form

        def network(n_classes: int) -> ResNet:
            return make(n_classes).to(memory_format=form)  # type: ignore[call-overload, no-any-return]

        return make_learner(
            s.learner, network, self.n_classes, seed=s.seed, options=s.learner_options, device=self.device
        )

    def _generator(self, task: int, purpose: int) -> torch.Generator:
        """Every task and purpose has a stream of its own: nothing depends on what was drawn before."""
        return torch.Generator().manual_seed((self.settings.seed * 1000 + task) * 10 + purpose)

    def _task_data(self, task: Task, memory: Memory) -> TaskData:
        spans = tuple(self.stream[i].columns for i in range(task.index + 1))
        return TaskData(task.index, task.columns, task.train, memory.exemplars, self.stream.columns, spans)

    def _train(self, learner: Learner, data: TaskData, listener: Listener) -> None:
        s, store = self.settings, self.store
        at = store.task(data.index).name
        main = Schedule(s.epochs, s.lr, tuple(s.milestones), s.weight_decay)
        learner.begin_task(data)
        names = learner.stages(data)
        started = store.read_tensors(f"{at}/stage.safetensors")
        first = int(started[1]["stage"]) if started else 0
        for number in range(first, len(names)):
            generator = self._generator(data.index, number)
            if number > 0:
                # Stages start from the network that the one before left; a resumed one from its stored copy.
                if started is not None and number == first:
                    learner.model.load_state_dict(started[0])
                else:
                    store.write_tensors(f"{at}/stage.safetensors", learner.model.state_dict(), {"stage": str(number)})
                    store.remove(f"{at}/epoch.safetensors")
            stage = learner.stage(names[number], data, main, generator)
            state = EpochState()
            resumed = store.read_tensors(f"{at}/epoch.safetensors")
            if resumed is not None and int(resumed[1]["stage"]) == number:
                state = self._restore(learner, *resumed)

            clock = [time.perf_counter()]

            def on_epoch(
                now: EpochState, loss: float, number: int = number, stage: Any = stage, clock: list[float] = clock
            ) -> None:
                self._save_epoch(at, number, learner, now)
                self._note_seconds(at, "training", time.perf_counter() - clock[0])
                clock[0] = time.perf_counter()
                listener(Progress(data.index, len(self.stream), stage.name, now.epoch, stage.schedule.epochs, loss))

            try:
                train_stage(
                    learner.model,
                    stage,
                    self.dataset,
                    self.stream.columns,
                    batch_size=s.batch_size,
                    optimizer=self._optimizer,
                    generator=generator,
                    state=state,
                    on_epoch=on_epoch,
                    stop=self._stop,
                )
            except Interrupted as interrupted:
                self._save_epoch(at, number, learner, interrupted.state)
                raise Stopped(f"stopped in task {data.index} at {interrupted}") from None
        learner.end_task(data)
        learner.model.eval()

    def _save_epoch(self, at: str, stage: int, learner: Learner, now: EpochState) -> None:
        """All that training needs to go on from here."""
        assert now.generator is not None
        tensors = {f"model.{k}": v for k, v in learner.model.state_dict().items()}
        tensors |= {f"optimizer.{k}": v for k, v in now.optimizer.items()}
        tensors["generator"] = now.generator
        note = {"stage": str(stage), "epoch": str(now.epoch)}
        if now.order is not None and now.total is not None:
            tensors |= {"order": now.order, "total": now.total}
            note["step"] = str(now.step)
        self.store.write_tensors(f"{at}/epoch.safetensors", tensors, note)

    @staticmethod
    def _restore(learner: Learner, tensors: dict[str, Tensor], note: dict[str, str]) -> EpochState:
        def part(prefix: str) -> dict[str, Tensor]:
            return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

        learner.model.load_state_dict(part("model."))
        inside = (int(note.get("step", 0)), tensors.get("order"), tensors.get("total"))
        return EpochState(int(note["epoch"]), part("optimizer."), tensors["generator"], *inside)

    def _update_memory(self, task: Task, memory: Memory) -> Memory:
        """The paper's memory; with a reserve, that share of it is held-out rows instead of exemplars."""
        s, own = self.settings, self.stream.columns
        new = {c: task.train[own[task.train] == c] for c in task.columns}
        seen = task.columns.stop
        kept, held = share_of(s, seen)
        policy = UniformMemory(kept * seen)
        exemplars = policy.update(memory.exemplars, new, self._generator(task.index, 8))
        reserve = {}
        if held:
            fresh = {c: task.reserve[own[task.reserve] == c] for c in task.columns}
            reserve = UniformMemory(held * seen).update(memory.reserve, fresh, self._generator(task.index, 9))
        check_indices(self.stream, task.index, exemplars, reserve)
        return Memory(exemplars, reserve)

    def _check_stop(self) -> None:
        if ranks.current().total(torch.tensor(float(self._stop()))) > 0:
            raise Stopped("stopped on request; the same command goes on where it was")

    def _evaluated(self, task: Task) -> bool:
        """Whether what `_evaluate` stores is there, and whole."""
        names = ("indices", "logits")
        return all(self.store.read_tensors(f"{_at(task)}/{name}.safetensors") is not None for name in names)

    def _evaluate(self, task: Task, memory: Memory, learner: Learner) -> None:
        """One forward pass over everything that calibrators and metrics read; stored with the rows it was made from."""
        own, seen = self.stream.columns, range(task.columns.stop)
        rows = {"train": task.train, "valid": task.valid, "pool": task.pool, "memory": memory.rows}
        rows["reserve"] = memory.reserve_rows
        self.store.write_tensors(f"{_at(task)}/indices.safetensors", rows)
        test_rows = ((self.test_columns >= 0) & (self.test_columns < seen.stop)).nonzero().squeeze(1)
        parts = {"test": self._logits(learner, self.dataset.test, test_rows, self.test_columns, seen)}
        for name in ("pool", "memory", "reserve"):
            parts[name] = self._logits(learner, self.dataset.train, rows[name], own, seen)
        tensors = {}
        for name, (logits, columns) in parts.items():
            tensors[f"{name}_logits"], tensors[f"{name}_columns"] = logits, columns
        self.store.write_tensors(f"{_at(task)}/logits.safetensors", tensors)

    def finished(
        self, task: Task, memory: Memory, learner: Learner, history: dict[str, Any], valid: Tensor | None = None
    ) -> FinishedTask:
        """What the calibrators need, from what `_evaluate` stored; `valid` may be another draw from the pool."""
        tensors = self._stored(task, "logits")
        valid = task.valid if valid is None else valid
        place = torch.full((len(self.stream.columns),), -1)
        place[task.pool] = torch.arange(len(task.pool))
        own = self.stream.columns
        return FinishedTask(
            index=task.index,
            new_columns=task.columns,
            task_columns=tuple(self.stream[i].columns for i in range(task.index + 1)),
            test_logits=tensors["test_logits"],
            test_columns=tensors["test_columns"],
            valid_logits=tensors["pool_logits"][place[valid]],
            valid_columns=tensors["pool_columns"][place[valid]],
            memory_logits=tensors["memory_logits"],
            memory_columns=tensors["memory_columns"],
            reserve_logits=tensors["reserve_logits"],
            reserve_columns=tensors["reserve_columns"],
            model=learner.model,
            memory=(self.pixels.plain(self.dataset.train, memory.rows), own[memory.rows]),
            valid=(self.pixels.plain(self.dataset.train, valid), own[valid]) if len(valid) else None,
            imbalance=self._imbalance(task),
            history=history,
        )

    def _imbalance(self, task: Task) -> float | None:
        """Training images of a new class for each exemplar of an old one, on average."""
        old = task.columns.start
        if old == 0:
            return None
        before = [self.stream[i] for i in range(task.index)]
        kept, _ = share_of(self.settings, old)
        exemplars = sum(
            min(kept, len(earlier.train) / len(earlier.columns)) * len(earlier.columns) for earlier in before
        )
        return (len(task.train) / len(task.columns)) / (exemplars / old)

    def redraw(self, task: Task, generator: torch.Generator) -> Tensor:
        """Another validation set of the same size out of the held-out pool."""
        own = self.stream.columns[task.pool]
        share = len(task.valid) // len(task.columns)
        chosen = []
        for column in task.columns:
            rows = task.pool[own == column]
            chosen.append(rows[torch.randperm(len(rows), generator=generator)[:share]])
        return torch.cat(chosen)

    def _logits(self, learner: Learner, part: Any, rows: Tensor, columns: Tensor, seen: range) -> tuple[Tensor, Tensor]:
        if not len(rows):
            return torch.zeros(0, len(seen)), torch.zeros(0, dtype=torch.long)
        batches = [(self.pixels.plain(part, some), columns[some]) for some in rows.split(500)]
        return tcil.predict_logits(learner.model, batches, classes=seen)


def usable_device(name: str) -> torch.device:
    """The device of that name, if it is there."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise invalid("device", f"{name!r} ({reason})", "cpu, or a cuda or mps device that is there") from None
    return device


def check_network(name: str, dataset: Dataset) -> None:
    """Whether the network takes the images of the dataset."""
    network = network_factory(name)(2).eval()
    try:
        with torch.no_grad():
            network(torch.zeros(1, *dataset.image_shape))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise invalid(
            "network", f"{name!r} ({reason})", f"a network for images of shape {dataset.image_shape}"
        ) from None


def make_stream(settings: RunSettings, dataset: Dataset) -> TaskStream:
    """The task stream that the settings describe."""
    order = class_order(dataset.n_classes, settings.class_order_seed)
    if settings.classes is not None and settings.classes > len(order):
        raise invalid("classes", f"{settings.classes}", f"at most {len(order)}, all of {dataset.name}")
    order = order[: settings.classes or len(order)]
    sizes = equal_sizes(len(order), settings.tasks) if isinstance(settings.tasks, int) else list(settings.tasks)
    if sizes[0] < 2:
        raise invalid("tasks", f"{sizes}", "at least two classes in the first task: with one there is nothing to tell")
    if sum(sizes) > settings.memory or share_of(settings, sum(sizes))[0] < 1:
        raise invalid("memory", f"{settings.memory}", f"at least one exemplar for each of {sum(sizes)} classes")
    if settings.validation and settings.validation < max(sizes):
        raise invalid(
            "validation", f"{settings.validation}", f"at least one image for each of {max(sizes)} new classes"
        )
    seen = list(itertools.accumulate(sizes))
    return TaskStream(
        dataset.train.labels,
        order=order,
        sizes=sizes,
        valid_per_class=[settings.validation // size for size in sizes],
        pool_per_class=[settings.validation_pool // size for size in sizes],
        seed=settings.validation_seed,
        reserve_per_class=[share_of(settings, count)[1] for count in seen],
    )


def share_of(settings: RunSettings, seen: int) -> tuple[int, int]:
    """Exemplars and reserved images of each class, when so many classes have been seen."""
    share = settings.memory // seen
    held = max(1, round(settings.reserve * share)) if settings.reserve else 0
    return share - held, held


def check_indices(stream: TaskStream, index: int, exemplars: dict[int, Tensor], reserve: dict[int, Tensor]) -> None:
    """What must hold of every split, checked on the rows themselves."""
    tasks = [stream[i] for i in range(index + 1)]
    trained = set(torch.cat([task.train for task in tasks]).tolist())
    held = set(torch.cat([torch.cat([task.pool, task.reserve]) for task in tasks]).tolist())
    kept = {int(row) for rows in exemplars.values() for row in rows}
    reserved = {int(row) for rows in reserve.values() for row in rows}
    if trained & held or not kept <= trained or not reserved <= held or kept & held:
        raise RuntimeError(f"task {index}: training, validation and memory rows are not apart")
    if set(stream.columns[stream[index].valid].tolist()) - set(stream[index].columns):
        raise RuntimeError(f"task {index}: validation rows of old classes")


def _at(task: Task) -> str:
    return f"task-{task.index:02d}"
