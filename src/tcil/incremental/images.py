"""Deprecated location of `Dataset` and `ImageSet` (version 0.1); both are now in `tcil.extending`."""

from tcil.foundation.deprecation import all_moved

__getattr__ = all_moved(__name__, ("Dataset", "ImageSet"), to="tcil.extending")
