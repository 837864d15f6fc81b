"""The nested object of a checkpoint as lines of text.

Lines are made as they are printed: a file of a kilobyte can describe a tree with millions of places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

import click

from sluice._records import Entry, Opaque
from sluice._units import format_bytes
from sluice.cli._text import printable, printable_value

__all__ = ["outline", "print_outline"]

#: What is shown without ``--all``: children of one container, and lines.
_CHILDREN_SHOWN = 40
_LINES_SHOWN = 2000


def print_outline(heading: str, tree: object, *, everything: bool) -> None:
    """Print a tree under a heading; without ``everything`` long containers and long outlines are cut."""
    click.echo(f"{heading}: {_describe(tree)}")
    lines = outline(tree, None if everything else _CHILDREN_SHOWN)
    for line in islice(lines, None if everything else _LINES_SHOWN):
        click.echo(line)
    if next(lines, None) is not None:
        click.echo("... the outline goes on; --all shows it")


def outline(tree: object, shown: int | None, indent: str = "") -> Iterator[str]:
    """Yield a line for everything in a container, of each container at most ``shown`` children."""
    if not isinstance(tree, (Mapping, list, tuple)):
        return
    last = len(tree) - 1 if shown is None else min(len(tree) - 1, shown)
    for number, (label, child) in enumerate(_children(tree)):
        if number == shown:
            yield f"{indent}└── ... {len(tree) - number:,} more; --all shows them"
            return
        yield f"{indent}{'└──' if number == last else '├──'} {label}: {_describe(child)}"
        yield from outline(child, shown, indent + ("    " if number == last else "│   "))


def _children(container: Mapping[object, object] | list[object] | tuple[object, ...]) -> Iterator[tuple[str, object]]:
    if isinstance(container, Mapping):
        for key, child in container.items():
            yield printable(key) if isinstance(key, str) else printable_value(key), child
    else:
        for number, child in enumerate(container):
            yield f"[{number}]", child


def _describe(value: object) -> str:
    if isinstance(value, Entry):
        kind = "Parameter " if value.parameter else ""
        return f"{kind}{value.dtype} {list(value.shape)}, {format_bytes(value.nbytes)}"
    if isinstance(value, Opaque):
        return f"{printable(value.qualified_name)} (not loaded)"
    if isinstance(value, (Mapping, list, tuple)):
        return f"{type(value).__name__} of {len(value):,}"
    return printable_value(value)
