"""The files of a task that is being trained, from which an interrupted training resumes.

stage.safetensors holds the network at the start of a later stage, epoch.safetensors all that training needs after the
last finished epoch, or the step at which a signal stopped it.
"""

from __future__ import annotations

from torch import Tensor

from tcil.experiments.runs.store import RunFolder, task_name
from tcil.incremental.learners import Learner
from tcil.incremental.training import EpochState


class Checkpoint:
    """Of one task, for the network of its learner."""

    def __init__(self, store: RunFolder, task: int, learner: Learner) -> None:
        at = store.task(task).name
        self._store, self._learner = store, learner
        self._stage, self._epoch = f"{at}/stage.safetensors", f"{at}/epoch.safetensors"
        self._started = store.read_tensors(self._stage)
        self.first_stage = int(self._started[1]["stage"]) if self._started else 0

    def enter(self, stage: int) -> None:
        """At the start of a stage: stages start from the network that the one before left, a resumed one from its
        stored copy."""
        if stage == 0:
            return
        if self._started is not None and stage == self.first_stage:
            self._learner.model.load_state_dict(self._started[0])
        else:
            self._store.write_tensors(self._stage, self._learner.model.state_dict(), {"stage": str(stage)})
            self._store.remove(self._epoch)

    def restore(self, stage: int) -> EpochState:
        """Where the stage stands, its network restored to that; the beginning where nothing is stored."""
        stored = self._store.read_tensors(self._epoch)
        if stored is None or int(stored[1]["stage"]) != stage:
            return EpochState()
        tensors, note = stored

        def part(prefix: str) -> dict[str, Tensor]:
            return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

        self._learner.model.load_state_dict(part("model."))
        inside = (int(note.get("step", 0)), tensors.get("order"), tensors.get("total"))
        return EpochState(int(note["epoch"]), part("optimizer."), tensors["generator"], *inside, part("scale."))

    def save(self, stage: int, now: EpochState) -> None:
        """All that training needs to go on from here."""
        assert now.generator is not None
        tensors = {f"model.{k}": v for k, v in self._learner.model.state_dict().items()}
        tensors |= {f"optimizer.{k}": v for k, v in now.optimizer.items()}
        tensors |= {f"scale.{k}": v for k, v in now.scale.items()}
        tensors["generator"] = now.generator
        note = {"stage": str(stage), "epoch": str(now.epoch)}
        if now.order is not None and now.total is not None:
            tensors |= {"order": now.order, "total": now.total}
            note["step"] = str(now.step)
        self._store.write_tensors(self._epoch, tensors, note)


def write_network(store: RunFolder, task: int, learner: Learner) -> None:
    """Store the network of a task that is trained."""
    store.write_tensors(network_name(task), learner.model.state_dict())


def read_network(store: RunFolder, task: int) -> dict[str, Tensor] | None:
    """The network of a task, if it was trained to the end."""
    stored = store.read_tensors(network_name(task))
    return None if stored is None else stored[0]


def clear(store: RunFolder, task: int) -> None:
    """Remove what only a task in training needs."""
    for name in unfinished(task):
        store.remove(name)


def network_name(task: int) -> str:
    """The file of a task's network, in the run folder."""
    return f"{task_name(task)}/model.safetensors"


def unfinished(task: int) -> tuple[str, ...]:
    """The files that only a task in training has, in the run folder."""
    return tuple(f"{task_name(task)}/{name}.safetensors" for name in ("epoch", "stage"))
