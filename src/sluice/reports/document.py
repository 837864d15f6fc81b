"""One description of a report, and what renders it: lines of text, or plain values for JSON.

A report describes itself once, as sections: lines, lines that stand out, and tables. ``str()``, the command line and
notebooks show the same lines, which escape what is not printable: names and values come from files.

A table that is wider than a terminal is folded between words. If that is not enough, the widest columns leave the table
and follow each row as ``header: text``; the first column precedes it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import Struct

from sluice._units import counted
from sluice.reports.printable import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table
    from rich.text import Text

__all__ = [
    "Grid",
    "Report",
    "Section",
    "Strong",
    "cast_lines",
    "checkpoint_title",
    "lines_of",
    "plain",
    "plain_fields",
]

#: Rows of a table that lists what a report found.
ROWS_SHOWN = 40

#: Widest column that is padded: one name of 4,096 characters must not push every other row to the right.
_PADDED_COLUMNS = 100

#: Columns between two columns of a table, and before rows whose first cell has a line of its own.
_GAP = "  "

#: Words that are never folded: text without spaces, sizes with their units, and shapes.
_WORD = re.compile(r"(?:\[[^\]]*\]|\d[\d.,]* [KMGT]?i?B\b|\S)+")


class Strong(str):
    """A line that stands out, such as a title or a verdict."""

    __slots__ = ()


class Grid(Struct, frozen=True):
    """Rows under headers."""

    #: Titles of the columns; ``>`` in front right-aligns a column of numbers.
    headers: tuple[str, ...]
    #: Cells as text, row by row.
    rows: Sequence[Sequence[str]]
    #: Number of rows that were left out at the end.
    omitted: int = 0
    #: Where the omitted rows are, such as ``"--all shows all"``.
    elsewhere: str = "to_json() and --json have all"
    #: Position of the row that stands out, or None.
    strong: int | None = None

    @classmethod
    def first(cls, headers: tuple[str, ...], rows: Iterable[Sequence[str]], total: int) -> Grid:
        """Return the first ``ROWS_SHOWN`` of ``total`` rows; the others are never made."""
        shown = list(islice(rows, ROWS_SHOWN))
        return cls(headers, shown, total - len(shown))

    def lines(self, width: int | None = None) -> Iterator[str]:
        """Yield headers and rows as columns, folded to a width if there is one."""
        headers = [header.removeprefix(">") for header in self.headers]
        right = [header.startswith(">") for header in self.headers]
        rows = [headers, *([printable(cell) for cell in row] for row in self.rows)]
        whole = [min(_PADDED_COLUMNS, max(map(_columns, column))) for column in zip(*rows, strict=True)]
        fits = width is None or _total(whole) <= width
        layout = None if fits else _fold(rows, whole, width or 0)
        strong = {0, None if self.strong is None else self.strong + 1}
        for position, row in enumerate(rows):
            lines: Iterable[str] = (
                [_joined(row, whole, right)] if layout is None else layout.lines(rows, position, right)
            )
            yield from map(Strong, lines) if position in strong else lines
        yield from self.rest()

    def rest(self) -> Iterator[str]:
        """Yield a line that counts the omitted rows, if there are any."""
        if self.omitted:
            yield f"and {self.omitted:,} more; {self.elsewhere}"

    def rich(self) -> Table:
        """Return a rich table of the rows."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for header in self.headers:
            number = header.startswith(">")
            table.add_column(header.removeprefix(">"), justify="right" if number else "left", no_wrap=number)
        for position, row in enumerate(self.rows):
            # Text: rich must not read markup such as "[red]" into names.
            cells = (Text(printable(cell)) for cell in row)
            table.add_row(*cells, style="bold" if position == self.strong else None)
        return table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        return _rich_lines([self], options.max_width)


class _Folded(Struct, frozen=True):
    """A layout of rows that are wider than a terminal."""

    #: Most columns of a line.
    width: int
    #: Positions of the columns inside of the table, and their widths.
    inside: list[int]
    widths: list[int]

    def lines(self, rows: list[list[str]], position: int, right: list[bool]) -> Iterator[str]:
        """Yield a row: its first cell if that is outside of the table, the table's cells, and the other cells."""
        headers, row = rows[0], rows[position]
        indent = "" if 0 in self.inside else _GAP
        if indent:
            yield row[0]
        cells = [_wrapped(row[column], width) for column, width in zip(self.inside, self.widths, strict=True)]
        for line in zip_longest(*cells, fillvalue=""):
            yield indent + _joined(line, self.widths, [right[column] for column in self.inside])
        below = [f"{headers[n]}: {row[n]}" for n in range(1, len(row)) if n not in self.inside and row[n]]
        if below and position:
            yield from (f"{_GAP}{line}" for line in _wrapped("; ".join(below), self.width - len(_GAP)))


def _fold(rows: list[list[str]], whole: list[int], width: int) -> _Folded:
    """Return a layout of at most ``width`` columns, if no word is longer."""
    columns = zip(*rows, strict=True)
    least = [max((_columns(word) for cell in cells for word in _WORD.findall(cell)), default=0) for cells in columns]
    inside = list(range(len(least)))
    while len(inside) > 1 and _total(least[n] for n in inside) + (0 if 0 in inside else len(_GAP)) > width:
        inside.remove(max(inside, key=least.__getitem__))
    widths = [least[n] for n in inside]
    spare = width - _total(widths) - (0 if 0 in inside else len(_GAP))
    for position in sorted(range(len(inside)), key=lambda each: whole[inside[each]] - widths[each]):
        more = max(0, min(spare, whole[inside[position]] - widths[position]))
        widths[position] += more
        spare -= more
    return _Folded(width, inside, widths)


def _total(widths: Iterable[int]) -> int:
    widths = list(widths)
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _joined(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = []
    for cell, width, number in zip(cells, widths, right, strict=True):
        space = " " * (width - _columns(cell))
        padded.append(space + cell if number else cell + space)
    return _GAP.join(padded).rstrip()


def _wrapped(text: str, width: int) -> list[str]:
    """Return a text as lines that are broken between words; a longer word has a line of its own."""
    if _columns(text) <= width:
        return [text]
    lines = [""]
    for word in _WORD.findall(text):
        if lines[-1] and _columns(lines[-1]) + 1 + _columns(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return lines


def _columns(text: str) -> int:
    """Return the columns of a text on a terminal."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return len(text) + wide - sum(map(bool, map(unicodedata.combining, text)))


#: A line, a line that stands out, or a table.
Section: TypeAlias = str | Grid


class Report:
    """Base class of reports: ``str()``, rich and JSON from one description."""

    __slots__ = ()

    def sections(self) -> Iterator[Section]:
        """Yield the lines and tables that describe the report to people."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values that ``json.dumps`` takes."""
        return plain_fields(self)

    def __str__(self) -> str:
        return "\n".join(lines_of(self.sections()))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        return _rich_lines(self.sections(), options.max_width)


def checkpoint_title(path: str, format_name: str, key: str | None = None) -> str:
    """Return a path with its format, and the part of the checkpoint that is concerned."""
    return f"{path} ({format_name}, key {key!r})" if key else f"{path} ({format_name})"


def cast_lines(casts: Mapping[str, int]) -> Iterator[str]:
    """Yield a line for each change of dtype with its number of tensors."""
    return (f"cast {change}: {counted(count, 'tensor')}" for change, count in casts.items())


def lines_of(sections: Iterable[Section], width: int | None = None) -> Iterator[str]:
    """Yield sections as lines without characters that a terminal could interpret, folded to a width if there is one."""
    for section in sections:
        if isinstance(section, Grid):
            yield from section.lines(width)
            continue
        lines = [printable(section)]
        if width is not None and _columns(lines[0]) > width:
            lines = [f"{_GAP if n else ''}{line}" for n, line in enumerate(_wrapped(lines[0], width - len(_GAP)))]
        yield from map(Strong, lines) if isinstance(section, Strong) else lines


def _rich_lines(sections: Iterable[Section], width: int) -> Iterator[Text]:
    from rich.text import Text

    return (Text(line, "bold" if isinstance(line, Strong) else "") for line in lines_of(sections, width))


def plain(value: object) -> Any:
    """Return a record, mapping or sequence as the dicts and lists that ``json.dumps`` takes."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, Struct) or is_dataclass(value):
        return plain_fields(value)
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(each) for each in value]
    return value


def plain_fields(record: Any) -> dict[str, Any]:
    """Return the fields of a record as plain values, without those that its ``repr`` leaves out."""
    names = record.__struct_fields__ if isinstance(record, Struct) else [f.name for f in fields(record) if f.repr]
    return {name: plain(getattr(record, name)) for name in names}
