"""A fit of T-CIL on a task, with what a test changes."""

from __future__ import annotations

import tcil


def fit(task, **options):
    arguments = {"memory": task.memory, "valid": task.valid, "new_classes": task.new_classes}
    extra = {
        k: options.pop(k) for k in ("memory", "valid", "new_classes", "classes", "features", "unpack") if k in options
    }
    return tcil.TCIL(**options).fit(task.model, **{**arguments, **extra})
