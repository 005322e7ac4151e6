"""One run of a sweep as a job: what a worker receives and what it answers, all as plain JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tcil import __version__
from tcil.experiments.config.settings import RunSettings, own_settings
from tcil.foundation.errors import invalid


@dataclass(frozen=True, eq=False)
class Job:
    """One run, and all that a process needs to know for it.

    `threads`: None leaves them as they are. `home` is where the user's own parts are looked for. `analysis`: also what
    the paper's figures need. `until`: only this number of tasks. `backup`: a folder for copies to resume from.
    `compiled`: compile training steps.
    """

    settings: RunSettings
    out: Path
    data: Path | None = None
    device: str = "cpu"
    calibrators: tuple[str, ...] | None = None
    log: str | None = None
    full_data: bool = True
    threads: int | None = None
    home: Path = Path()
    analysis: bool = False
    until: int | None = None
    backup: Path | None = None
    compiled: bool = False

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.out / self.settings.name

    def to_json(self) -> str:
        """The job as one line."""
        record = {key: str(value) if isinstance(value, Path) else value for key, value in self.__dict__.items()}
        return json.dumps({**record, "settings": self.settings.model_dump(mode="json"), "version": __version__})

    @classmethod
    def from_json(cls, line: str) -> Job:
        """What `to_json` wrote, in a process with the same version of tcil."""
        record = json.loads(line)
        version = record.pop("version")
        if version != __version__:
            raise invalid("tcil", f"version {__version__} on this node", f"{version}, as where the sweep was started")
        record["settings"] = own_settings(record["settings"])  # what the sweep that sent it was told by its user
        record |= {key: Path(record[key]) for key in ("out", "home")}
        record |= {key: record[key] and Path(record[key]) for key in ("data", "backup")}
        record["calibrators"] = record["calibrators"] and tuple(record["calibrators"])
        return cls(**record)


@dataclass(frozen=True)
class Outcome:
    """How a job ended: "done", "failed", "stopped", "in use" (by another process) or "died" (the worker itself)."""

    state: str
    message: str = ""
    remarks: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The outcome as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Outcome:
        """What `to_json` wrote."""
        record = json.loads(line)
        return cls(record["state"], record["message"], tuple(record["remarks"]))
