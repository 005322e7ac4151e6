"""Whether a folder holds this run, and not another."""

from __future__ import annotations

import re
import warnings

import tcil
from tcil.experiments.config.settings import RunSettings, key_of
from tcil.experiments.runs.results import DataNote
from tcil.experiments.runs.store import OtherVersionWarning, RunFolder, check_format
from tcil.foundation.errors import invalid


def check_folder(store: RunFolder, settings: RunSettings, images: DataNote) -> None:
    """Refuse a folder that holds another run, before anything is written."""
    _check_version(store)
    own, whole = store.read_settings(), store.read_results()
    # Each may have been edited alone.
    keys = [one.key for one in (own, whole.settings if whole is not None else None) if one is not None]
    named = re.search(r"-seed\d+-([0-9a-f]{12})$", store.path.resolve().name)
    if named and not (own is not None and key_of(own.record()) == named[1]):  # an earlier version may have had fewer
        keys.append(named[1])
    if any(key != settings.key for key in keys):
        raise invalid("run", f"{store.path}, which holds a run with other settings", "an empty folder or the same run")
    known = store.read_data()
    if known is not None and not known.agrees(images):
        raise invalid(
            "data",
            f"other images than those of {store.path}, or the same ones normalised or augmented differently",
            "the images that the run began with",
            "Take another --out, or delete it.",
        )


def _check_version(store: RunFolder) -> None:
    """Refuse a folder of another format; warn where another version of tcil began the run."""
    began = store.read_environment()
    check_format(began, store.path)
    version = began.tcil if began is not None else None
    if version not in (None, tcil.__version__) and not store.has_results:
        text = f"{store.path} was started with tcil {version} and is resumed with {tcil.__version__}"
        warnings.warn(f"{text}: its numbers may differ from those of one version alone", OtherVersionWarning, 2)
