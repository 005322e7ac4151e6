"""The memory layout of images and weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tcil.foundation.options import Option

if TYPE_CHECKING:
    import torch


class Layout(Option):
    """The memory layout of images and weights."""

    CHANNELS_LAST = "channels_last", "the channels of a pixel are adjacent (NHWC): usually faster"
    CONTIGUOUS = "contiguous", "channel by channel (NCHW)"

    @property
    def form(self) -> torch.memory_format:
        """The layout as a torch.memory_format."""
        import torch

        return torch.channels_last if self is Layout.CHANNELS_LAST else torch.contiguous_format
