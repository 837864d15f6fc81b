"""One description of a report, and what renders it: aligned text, a rich table, or plain values for JSON.

A report describes itself once, as sections: lines, lines that stand out, and tables. ``str()``, the command line and
notebooks render the same sections. Names and values come from files, so every renderer escapes what is not printable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from msgspec import Struct

from sluice._units import counted
from sluice.reports.printable import printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

__all__ = [
    "Grid",
    "Report",
    "Section",
    "Strong",
    "Subject",
    "aligned",
    "as_text",
    "cast_lines",
    "checkpoint_title",
    "describe_mismatched",
    "loaded_title",
    "plain",
    "plain_fields",
    "renderable",
]

#: Rows of a table that lists what a report found.
ROWS_SHOWN = 40

#: Widest column that is padded: one name of 4,096 characters must not push every other row to the right.
_PADDED_COLUMNS = 100


#: Whose tensors a load counts.
Subject: TypeAlias = Literal["model", "optimizer state", "checkpoint"]


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
    #: Whether to print aligned columns on a terminal too: for many rows or very long cells. Rich needs a third of a
    #: millisecond for each row.
    aligned: bool = False

    @classmethod
    def first(cls, headers: tuple[str, ...], rows: Iterable[Sequence[str]], total: int) -> Grid:
        """Return the first ``ROWS_SHOWN`` of ``total`` rows; the others are never made."""
        shown = list(islice(rows, ROWS_SHOWN))
        return cls(headers, shown, total - len(shown))

    def lines(self) -> Iterator[str]:
        """Yield headers and rows as aligned columns."""
        yield from aligned([header.removeprefix(">") for header in self.headers], list(map(_cells, self.rows)))
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
            title, number = header.removeprefix(">"), header.startswith(">")
            table.add_column(title, justify="right" if number else "left", overflow="fold", no_wrap=number)
        for position, row in enumerate(self.rows):
            # Text: rich must not read markup such as "[red]" into names.
            table.add_row(*map(Text, _cells(row)), style="bold" if position == self.strong else None)
        return table


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
        return as_text(self.sections())

    def __rich__(self) -> RenderableType:
        from rich.console import Group

        return Group(*map(renderable, self.sections()))


def checkpoint_title(path: str, format_name: str, key: str | None = None) -> str:
    """Return a path with its format, and the part of the checkpoint that is concerned."""
    return f"{path} ({format_name}, key {key!r})" if key else f"{path} ({format_name})"


def loaded_title(loaded: int, total: int, subject: Subject, source: str) -> str:
    """Return how many of how many tensors came from a checkpoint: the start of the first line of a report."""
    count = f"{loaded:,} of {counted(total, 'tensor')}"
    return f"{count} of {source}" if subject == "checkpoint" else f"{count} of the {subject} from {source}"


def cast_lines(casts: Mapping[str, int]) -> Iterator[str]:
    """Yield a line for each change of dtype with its number of tensors."""
    return (f"cast {change}: {counted(count, 'tensor')}" for change, count in casts.items())


def describe_mismatched(mismatched: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> tuple[str, ...]:
    """Return each name of a different shape with the shape in the model and in the checkpoint."""
    return tuple(f"{name} {list(own)}, {list(saved)} in the checkpoint" for name, (own, saved) in mismatched.items())


def as_text(sections: Iterable[Section]) -> str:
    """Return sections as text: aligned columns, and no character that a terminal could interpret."""
    return "\n".join(
        "\n".join(section.lines()) if isinstance(section, Grid) else printable(section) for section in sections
    )


def renderable(section: Section) -> RenderableType:
    """Return what rich prints for one section."""
    from rich.console import Group
    from rich.text import Text

    if not isinstance(section, Grid):
        return Text(printable(section), style="bold" if isinstance(section, Strong) else "")
    return Group(section.rich(), *map(Text, section.rest()))


def aligned(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield headers and rows as lines of aligned columns."""
    lines = [headers, *rows]
    widths = [min(_PADDED_COLUMNS, max(map(len, column))) for column in zip(*lines, strict=True)]
    return ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


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


def _cells(row: Sequence[str]) -> list[str]:
    return [printable(cell) for cell in row]
