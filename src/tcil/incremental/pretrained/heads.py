"""Heads on frozen features."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class CosineHead(nn.Linear):
    """A head whose logits are cosines between the features and the weights of each class, times a learned scale.

    Parameters
    ----------
    in_features, out_features : int
        Number of features and of classes.
    scale : float
        Initial scale.

    Examples
    --------
    >>> import torch
    >>> from tcil.incremental.pretrained.heads import CosineHead
    >>> head = CosineHead(4, 3, scale=10.0)
    >>> x = torch.randn(2, 4)
    >>> torch.allclose(head(x), head(5 * x)), bool((head(x).abs() <= 10.0).all())
    (True, True)
    """

    def __init__(self, in_features: int, out_features: int, scale: float = 16.0) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, x: Tensor) -> Tensor:
        """Logits, (N, classes)."""
        unit, rows = nn.functional.normalize(x, dim=1), nn.functional.normalize(self.weight, dim=1)
        return self.scale * unit @ rows.T

    def grown(self, n_classes: int) -> CosineHead:
        """A head with more classes that keeps the old rows and the scale."""
        grown = CosineHead(self.in_features, n_classes).to(self.weight.device)
        with torch.no_grad():
            grown.weight[: self.out_features] = self.weight
            grown.scale.copy_(self.scale)
        return grown
