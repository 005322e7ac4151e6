"""The place of `Entry` in version 0.1; it is in `tcil.extending` now, with what belongs to it."""

from tcil.foundation.deprecation import all_moved

__getattr__ = all_moved(__name__, ("Entry", "FinishedTask", "NotApplicable"), to="tcil.extending")
