"""One description of a report, and what renders it: lines of text, or plain values for JSON.

A report describes itself once, as sections: lines, lines that stand out, and tables. ``str()``, the command line and
notebooks show the same lines.

Names and values of a checkpoint are untrusted: control characters and escape sequences in them could move the cursor or
change the colours and text that the user sees. Every character that is not printable is replaced by its escape.

At a terminal, rich folds tables to its width.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import islice
from reprlib import Repr
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from msgspec import Struct

from sluice._units import counted

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table

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
    "printable",
    "printable_name",
    "printable_paragraph",
    "printable_value",
    "rich_sections",
    "shorten",
]

#: Larger integers are shown in hexadecimal: Python refuses to convert very long ones to decimal.
_DECIMAL_BITS = 256


def printable(text: str) -> str:
    r"""Return ``text`` with every character that is not printable replaced by its escape.

    Example:
        >>> printable("w\x1b[31m")
        'w\\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def printable_name(name: str) -> str:
    """Return a printable name; the empty name as ``''``, so that it can be seen."""
    return printable(name) or "''"


def printable_paragraph(text: str) -> str:
    """Return ``text`` with every line made printable, and its line breaks."""
    return "\n".join(printable(line) for line in text.split("\n"))


def shorten(text: str, limit: int) -> str:
    """Return at most ``limit`` characters of ``text``; if it is longer, followed by its length."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text):,} characters)"


class _ShortRepr(Repr):
    """A short ``repr`` that cuts large values before it formats them."""

    def repr_int(self, x: int, level: int) -> str:  # noqa: ARG002  the signature is that of reprlib
        text = repr(x) if x.bit_length() <= _DECIMAL_BITS else hex(x)
        return text if len(text) <= self.maxother else f"{text[: self.maxother]}... ({x.bit_length()} bits)"

    def repr_bytes(self, x: bytes, level: int) -> str:  # noqa: ARG002  the signature is that of reprlib
        return repr(x[: self.maxother]) + (f"... ({len(x)} bytes)" if len(x) > self.maxother else "")


_SHORT = _ShortRepr()
_SHORT.maxstring = 80
_SHORT.maxother = 80


def printable_value(value: object) -> str:
    """Return a short ``repr`` of a plain value of a checkpoint, safe for terminals."""
    return printable(_SHORT.repr(value))


#: Rows of a table that lists what a report found.
ROWS_SHOWN = 40

#: Most rows of a table that rich folds, which takes 0.3 ms for each; rows of longer ones are lines.
_FOLDED_ROWS = 1000

#: Narrowest terminal for such tables: on others, numbers would leave no columns for names.
_FOLDED_WIDTH = 64

#: Widest column that is padded: one name of 4,096 characters must not push every other row to the right.
_PADDED_COLUMNS = 100


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

    def lines(self) -> Iterator[str]:
        """Yield headers and rows as aligned columns."""
        headers = [header.removeprefix(">") for header in self.headers]
        right = [header.startswith(">") for header in self.headers]
        rows = [headers, *([printable(cell) for cell in row] for row in self.rows)]
        widths = [min(_PADDED_COLUMNS, max(map(_columns, column))) for column in zip(*rows, strict=True)]
        for row in rows:
            padded = []
            for cell, width, number in zip(row, widths, right, strict=True):
                space = " " * (width - _columns(cell))
                padded.append(space + cell if number else cell + space)
            yield "  ".join(padded).rstrip()
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
            justify: Literal["right", "left"] = "right" if number else "left"
            table.add_column(header.removeprefix(">"), justify=justify, no_wrap=number, overflow="fold")
        for position, row in enumerate(self.rows):
            # Text: rich must not read markup such as "[red]" into names.
            cells = (Text(printable(cell)) for cell in row)
            table.add_row(*cells, style="bold" if position == self.strong else None)
        return table


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

    #: Properties that ``to_json`` has in addition to the fields.
    _properties: ClassVar[tuple[str, ...]] = ()

    def sections(self) -> Iterator[Section]:
        """Yield the lines and tables that describe the report to people."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values that ``json.dumps`` takes."""
        return {**plain_fields(self), **{name: plain(getattr(self, name)) for name in self._properties}}

    def __str__(self) -> str:
        return "\n".join(lines_of(self.sections()))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        return rich_sections(self.sections(), options.max_width)


def checkpoint_title(path: str, format_name: str, key: str | None = None) -> str:
    """Return a path with its format, and the part of the checkpoint that is concerned."""
    return f"{path} ({format_name}, key {key!r})" if key else f"{path} ({format_name})"


def cast_lines(casts: Mapping[str, int]) -> Iterator[str]:
    """Yield a line for each change of dtype with its number of tensors."""
    return (f"cast {change}: {counted(count, 'tensor')}" for change, count in casts.items())


def lines_of(sections: Iterable[Section]) -> Iterator[str]:
    """Yield sections as lines without characters that a terminal could interpret."""
    for section in sections:
        yield from section.lines() if isinstance(section, Grid) else [printable(section)]


def rich_sections(sections: Iterable[Section], width: int) -> Iterator[RenderableType]:
    """Yield sections as rich prints them: tables, and lines of which some are bold."""
    from rich.text import Text

    most = _FOLDED_ROWS if width >= _FOLDED_WIDTH else 0
    for section in sections:
        if isinstance(section, Grid) and len(section.rows) <= most:
            yield section.rich()
            yield from map(Text, section.rest())
        elif isinstance(section, Grid):
            yield from map(Text, section.lines())
        else:
            yield Text(printable(section), "bold" if isinstance(section, Strong) else "")


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
