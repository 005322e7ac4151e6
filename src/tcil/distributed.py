"""Several processes that share one fit or one pass over data, by torch.distributed."""

from tcil.foundation.ranks import sharded

__all__ = ["sharded"]
