"""The place of `Dataset` and `ImageSet` in version 0.1; both are in `tcil.extending` now."""

from tcil.foundation.deprecation import all_moved

__getattr__ = all_moved(__name__, ("Dataset", "ImageSet"), to="tcil.extending")
