"""`tcil datasets`, `learners`, `networks`, `calibrators` and `settings`: list the available choices."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from tcil.experiments.cli import output


def datasets() -> None:
    """List the datasets."""
    from tcil.incremental.data.datasets import DATASETS

    _list("dataset", {name: entry.meaning for name, entry in DATASETS.items()})


def learners() -> None:
    """List the learners."""
    from tcil.incremental.learners import LEARNERS

    _list("learner", {name: kind.meaning for name, kind in LEARNERS.items()})


def networks() -> None:
    """List the networks."""
    from tcil.foundation.extensions import PRETRAINED
    from tcil.incremental.networks import NETWORKS
    from tcil.incremental.pretrained.backbones import BACKBONES, TIMM

    builtin = {name: (factory.__doc__ or "").partition(":")[0] for name, factory in NETWORKS.items()}
    builtin |= {f"{PRETRAINED}{name}": (make.__doc__ or "").rstrip(".") for name, make in BACKBONES.items()}
    builtin[f"{PRETRAINED}{TIMM}NAME"] = "A head on frozen features of the timm model of that name"
    _list("network", builtin)


def calibrators() -> None:
    """List the calibrators."""
    from tcil.experiments.runs.entries import CALIBRATORS, ON_FEATURES

    _list("calibrator", {name: entry.meaning for name, entry in {**CALIBRATORS, **ON_FEATURES}.items()})


def settings() -> None:
    """List the settings with their defaults for 'tcil run', and the presets."""
    from tcil.experiments.config.presets import PRESETS
    from tcil.experiments.config.settings import RunSettings, build

    plain = build({})
    table = Table("setting", "default", "meaning", box=None)
    for name, field in RunSettings.model_fields.items():
        table.add_row(name, str(getattr(plain, name)), field.description or "")
    output.console.print(table)
    output.console.print(f"presets: {', '.join(PRESETS)}; a study file may also list seeds, learners and datasets")


def _list(kind: str, builtin: Mapping[str, str]) -> None:
    from tcil.foundation.extensions import installed

    rows = {**builtin, **{name: f"from an installed package: {point.value}" for name, point in installed(kind).items()}}
    table = Table(show_header=False, box=None)
    for name, meaning in rows.items():
        table.add_row(name, meaning)
    output.console.print(table)
    output.console.print("or one of your own: package.module:name")
