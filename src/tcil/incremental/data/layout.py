"""In which order images and weights lie in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tcil.foundation.options import Option

if TYPE_CHECKING:
    import torch


class Layout(Option):
    """In which order images and weights lie in memory."""

    CHANNELS_LAST = "channels_last", "the channels of a pixel side by side: mostly the faster one"
    CONTIGUOUS = "contiguous", "channel by channel (NCHW)"

    @property
    def form(self) -> torch.memory_format:
        """As torch names it."""
        import torch

        return torch.channels_last if self is Layout.CHANNELS_LAST else torch.contiguous_format
