"""Networks for class-incremental learning (the public names of `tcil.incremental.networks`)."""

from tcil.incremental.networks import *  # noqa: F403
from tcil.incremental.networks import __all__ as __all__
