"""The error for a framework that is not installed."""

from __future__ import annotations


def missing_extra(extra: str, reason: Exception) -> ImportError:
    """The error of a module whose framework cannot be imported; it names the extra to install.

    >>> str(missing_extra("lightning", ModuleNotFoundError("No module named 'lightning'")))
    "tcil.integrations.lightning: No module named 'lightning'. To install it, in a clone of tcil:
    pip install -c constraints.txt '.[lightning]'"
    """
    told = str(reason).strip().partition("\n")[0].rstrip(".") or type(reason).__name__
    return ImportError(
        f"tcil.integrations.{extra}: {told}. To install it, in a clone of tcil: "
        f"pip install -c constraints.txt '.[{extra}]'",
        name=getattr(reason, "name", None),
    )
