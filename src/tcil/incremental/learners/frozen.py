"""Frozen networks next to the one that is trained: extractors of earlier tasks, and the teacher."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tcil.foundation.folding import folded_copy


class Frozen:
    """Outputs of frozen networks, computed as at inference, without gradients and with folded batch norms.

    The networks are copied at the first batch, when a resumed run has loaded its weights.
    """

    def __init__(self, networks: Iterable[nn.Module]) -> None:
        self._originals = list(networks)
        self._folded: list[nn.Module] = []

    def __call__(self, x: Tensor) -> Tensor:
        """The concatenated outputs."""
        if not self._folded:
            with torch.autocast(x.device.type, enabled=False):  # folding is verified in full precision
                self._folded = [folded_copy(network, x[:2]) for network in self._originals]
        with torch.no_grad():
            return torch.cat([network(x) for network in self._folded], dim=1)
