"""What one thread does to a network that other threads use at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def in_this_thread(
    mine: Callable[..., Any],
    theirs: Callable[..., Any] | None = None,
    or_if: Callable[[], bool] = lambda: False,
) -> Callable[..., Any]:
    """A function that calls `mine` in the thread that made it, and `theirs` in all others; None does nothing there.

    Others in which `or_if()` holds count as this one.

    >>> import threading
    >>> both = in_this_thread(lambda: print("mine"), lambda: print("theirs"))
    >>> both()
    mine
    >>> (other := threading.Thread(target=both)).start(); other.join()
    theirs
    """
    maker = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == maker or or_if():
            return mine(*args, **kwargs)
        return None if theirs is None else theirs(*args, **kwargs)

    return call
