"""Frozen results that print well: aligned lines in a terminal, a table in a notebook."""

from __future__ import annotations

import dataclasses
import html
import numbers
from collections.abc import Mapping
from typing import Any, ClassVar

_LONGEST_LIST = 6  # longer lists of numbers are shown by their length
_LONGEST_REPR = 60
_MOST_PARTS = 2  # records inside another that are shown by their fields; of more, the number


class Record:
    """A dataclass whose `str` has one aligned line per field; notebooks show the same as a table.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Search(Record):
    ...     temperature: float
    ...     reachable: bool
    ...     bracket: tuple[float, float]
    >>> print(Search(2.23606797749979, True, (0.0, 1.0)))
    Search
      temperature  2.236
      reachable    yes
      bracket      0, 1
    """

    def rows(self) -> list[tuple[str, str]]:
        """The names and values to show, as text; a `message` of its own first."""
        shown = list[tuple[str, str]]()
        named = {field.name for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        if "message" not in named and isinstance(message := getattr(self, "message", None), str):
            shown.append(("message", message))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            name, value = field.name.replace("_", " "), getattr(self, field.name)
            if isinstance(value, Mapping):
                shown += [(f"{name}: {key}", as_text(part)) for key, part in value.items()]
            elif isinstance(value, tuple) and 0 < len(value) <= _MOST_PARTS and _all_records(value):
                shown += [(name, part.in_full()) for part in value]
            elif isinstance(value, tuple) and any(isinstance(part, str) and ", " in part for part in value):
                shown += [(name, as_text(part)) for part in value]
            else:
                shown.append((name, as_text(value)))
        return shown

    def in_short(self) -> str:
        """One line, for a record inside another: its first field and its verdict."""
        fields = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        wanted = [name for name in fields if name == fields[0] or name in ("verdict", "verdicts")]
        return ", ".join(f"{name.replace('_', ' ')} {as_text(getattr(self, name))}" for name in wanted)

    def in_full(self) -> str:
        """One line with all fields, but for those that hold several records."""
        fields = [(field.name.replace("_", " "), getattr(self, field.name)) for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        return ", ".join(f"{name} {as_text(value)}" for name, value in fields if not _all_records(value))

    def __str__(self) -> str:
        rows = self.rows()
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join([type(self).__name__, *(f"  {name:<{width}}  {text}".rstrip() for name, text in rows)])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(text)}</td></tr>"
            for name, text in self.rows()
        )
        return f"<table><caption>{html.escape(type(self).__name__)}</caption>{rows}</table>"


class Table(Record):
    """A record whose fields `columns` are arrays or tuples of one length; prints as a table with a line per entry."""

    columns: ClassVar[tuple[str, ...]]

    def _cells(self) -> list[list[str]]:
        values = [getattr(self, name) for name in self.columns]
        numbers_ = zip(*(value.tolist() if hasattr(value, "tolist") else value for value in values), strict=True)
        return [list(self.columns), *([as_text(value) for value in row] for row in numbers_)]

    def __str__(self) -> str:
        cells = self._cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in cells]
        return "\n".join([type(self).__name__, *(f"  {line}" for line in lines)])

    def _repr_html_(self) -> str:
        head, *body = self._cells()
        rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in body)
        names = "".join(f"<th>{html.escape(name)}</th>" for name in head)
        return f"<table><caption>{html.escape(type(self).__name__)}</caption><tr>{names}</tr>{rows}</table>"


def _all_records(value: Any) -> bool:
    """Whether it is a list of records, which has no short text."""
    return isinstance(value, tuple | list) and bool(value) and all(isinstance(part, Record) for part in value)


def as_text(value: Any) -> str:
    """A short text for a value.

    >>> as_text(None), as_text(False), as_text(0.123456), as_text((1.0, 2.0)), as_text(range(100))
    ('none', 'no', '0.1235', '1, 2', '100 entries')
    """
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, numbers.Real):
        return f"{float(value):.4g}"
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Record):
        return value.in_short()
    if isinstance(value, (tuple, list, range)):
        if _all_records(value):
            return f"{len(value)} x {type(value[0]).__name__}"
        if len(value) <= _LONGEST_LIST or isinstance(value[0], str):
            return ", ".join(map(as_text, value))
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{type(value).__name__} of shape {tuple(shape)}"
    if hasattr(value, "__len__"):
        return f"{len(value)} entries"
    return repr(value) if len(repr(value)) <= _LONGEST_REPR else type(value).__name__
