"""The random state of the process and of the user's loaders, which calibration must leave unchanged."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import torch
from torch.utils.data import DataLoader


@contextmanager
def preserved(*loaders: object) -> Iterator[None]:
    """Restore every global random state and the generators of these loaders on exit, also after an error.

    The global states are those of torch (CPU, CUDA and MPS), numpy's legacy functions and `random`. Creating an
    iterator of a DataLoader draws from one of them; datasets, models and user functions may too. Draws that other
    threads make in the meantime are also undone.

    >>> import torch
    >>> from tcil.foundation.random_state import preserved
    >>> before = torch.get_rng_state()
    >>> with preserved():
    ...     _ = torch.randn(3)
    >>> torch.equal(torch.get_rng_state(), before)
    True
    """
    with ExitStack() as stack:
        stack.callback(partial(torch.set_rng_state, torch.get_rng_state()))
        stack.callback(partial(np.random.set_state, np.random.get_state(legacy=False)))  # noqa: NPY002
        stack.callback(partial(random.setstate, random.getstate()))
        stack.callback(_restore_cuda())
        if torch.backends.mps.is_available():
            stack.callback(partial(torch.mps.set_rng_state, torch.mps.get_rng_state()))
        for generator in _generators(loaders):
            stack.callback(partial(generator.set_state, generator.get_state()))
        for loader in loaders:
            # Persistent workers are seeded in the first pass. If that is ours, the user's first pass draws no seed.
            if isinstance(loader, DataLoader) and loader.persistent_workers and loader._iterator is None:
                stack.callback(partial(setattr, loader, "_iterator", None))
        yield


def _restore_cuda() -> Callable[[], None]:
    """A function that restores the CUDA generators; does not initialise CUDA."""
    if torch.cuda.is_initialized():
        return partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())

    def rewind() -> None:
        if torch.cuda.is_initialized():  # it was initialised inside the block: each generator started at its seed
            for generator in torch.cuda.default_generators:
                generator.manual_seed(generator.initial_seed())

    return rewind


def _generators(loaders: tuple[object, ...]) -> list[torch.Generator]:
    """The generators that DataLoaders and their samplers were given."""
    generators = list[torch.Generator]()
    for loader in loaders:
        batches = getattr(loader, "batch_sampler", None)
        for holder in (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)):
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator) and not any(generator is other for other in generators):
                generators.append(generator)
    return generators
