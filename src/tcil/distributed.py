"""Share one fit or one pass over data among several processes, with torch.distributed."""

from tcil.foundation.ranks import sharded

__all__ = ["sharded"]
