"""A run folder: everything written by atomic rename, read without pickle.

RUN/settings.json        what defines the run
RUN/environment.json     versions, threads, seconds by task: what does not belong to the results
RUN/results.json         all tasks together, once the last is done
RUN/task-03/
    indices.safetensors  rows of the training set: train, valid, pool, reserve, memory
    model.safetensors    the network at the end of the task
    logits.safetensors   test, pool, memory and reserve logits with their columns
    results.json         every calibrator's figures, and the history for the next task
    stage.safetensors    while training: the network and generator at the start of the stage
    epoch.safetensors    while training: after the last finished epoch
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from tcil.calibration.errors import invalid
from tcil.calibration.storage import replace_file


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self) -> None:
        """Make the folder, and clear what a killed process left half-written."""
        self.path.mkdir(parents=True, exist_ok=True)
        for leftover in self.path.rglob(".*.part"):
            leftover.unlink(missing_ok=True)

    def task(self, index: int) -> Path:
        """The folder of a task."""
        folder = self.path / f"task-{index:02d}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def write_json(self, name: str, record: Any) -> None:
        """Store a record; the same record gives the same bytes."""
        content = json.dumps(record, indent=1, sort_keys=True, allow_nan=False) + "\n"
        replace_file(self.path / name, content.encode())

    def read_json(self, name: str) -> Any | None:
        """A stored record, or None where there is none."""
        path = self.path / name
        if not path.exists():
            return None
        try:
            return json.loads(path.read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise invalid(
                "run", f"{path}, which is damaged ({error})", "a JSON file", "Delete it to compute it anew."
            ) from None

    def write_tensors(self, name: str, tensors: dict[str, Tensor], note: dict[str, str] | None = None) -> None:
        """Store named tensors, with a note in the header."""
        content = save({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, metadata=note)
        replace_file(self.path / name, content)

    def read_tensors(self, name: str) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        """Stored tensors and their note, or None where there are none."""
        path = self.path / name
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                note = file.metadata() or {}
            return load_file(path), note
        except (SafetensorError, OSError) as error:
            raise invalid(
                "run", f"{path}, which is damaged ({error})", "a safetensors file", "Delete it to compute it anew."
            ) from None

    def remove(self, name: str) -> None:
        """Delete a file if it is there."""
        (self.path / name).unlink(missing_ok=True)


def environment(device: torch.device) -> dict[str, Any]:
    """What the numbers were computed with."""
    import platform

    import numpy
    import scipy

    from tcil import __version__

    return {
        "tcil": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "device": str(device),
        "cuda": torch.version.cuda,
    }
