"""The nested object of a checkpoint as lines of text.

Lines are generated while they are printed: a file of a kilobyte can describe a tree with millions of leaves.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import chain, islice

from sluice._units import format_bytes
from sluice.records import Entry, Opaque, UnsupportedValue
from sluice.reports.document import printable, printable_name, printable_value, shorten

__all__ = ["children", "describe", "describe_dtype", "outline", "print_outline"]

#: Shown without ``--all``: children of one container, lines, and characters of a name.
_CHILDREN_SHOWN = 40
_LINES_SHOWN = 2000
_NAME_SHOWN = 200


def print_outline(heading: str, tree: object, *, everything: bool) -> None:
    """Print a tree under a heading; without ``everything`` long containers and long outlines are cut."""
    lines = outline(tree, None if everything else _CHILDREN_SHOWN)
    shown = islice(lines, None if everything else _LINES_SHOWN)
    sys.stdout.writelines(f"{line}\n" for line in chain([f"{printable(heading)}: {describe(tree)}"], shown))
    if next(lines, None) is not None:
        sys.stdout.write("... more lines follow; --all shows them\n")


def outline(tree: object, shown: int | None, indent: str = "") -> Iterator[str]:
    """Yield a line for each value of a tree; at most ``shown`` children of each container."""
    if not isinstance(tree, (Mapping, list, tuple)) or (shown is not None and _is_plain_list(tree)):
        return
    last = len(tree) - 1 if shown is None else min(len(tree) - 1, shown)
    for number, (label, child) in enumerate(children(tree)):
        if number == shown:
            yield f"{indent}└── ... {len(tree) - number:,} more; --all shows them"
            return
        name = label if shown is None else shorten(label, _NAME_SHOWN)
        yield f"{indent}{'└──' if number == last else '├──'} {name}: {describe(child)}"
        yield from outline(child, shown, indent + ("    " if number == last else "│   "))


def children(container: Mapping[object, object] | list[object] | tuple[object, ...]) -> Iterator[tuple[str, object]]:
    """Yield the label, safe for terminals, and the value of each child of a container."""
    if isinstance(container, Mapping):
        for key, child in container.items():
            yield printable_name(key) if isinstance(key, str) else printable_value(key), child
    else:
        for number, child in enumerate(container):
            yield f"[{number}]", child


def describe(value: object) -> str:
    """Return a value as one line, safe for terminals; for a container its type and length."""
    if isinstance(value, Entry):
        kind = "Parameter " if value.parameter else "storage " if value.bare else ""
        return f"{kind}{describe_dtype(value)} {list(value.shape)}, {format_bytes(value.nbytes)}"
    if isinstance(value, UnsupportedValue):
        return f"{printable(value.reason)}, {printable(value.qualified_name)} (not loaded)"
    if isinstance(value, Opaque):
        return f"{printable(value.qualified_name)} (not loaded)"
    if isinstance(value, (Mapping, list, tuple)):
        values = f": {printable_value(value)}" if _is_plain_list(value) else ""
        return f"{type(value).__name__} of {len(value):,}{values}"
    return printable_value(value)


def describe_dtype(entry: Entry) -> str:
    """Return the dtype of an entry and its other properties: sparse, quantized, packed, conjugated or negated."""
    layout = () if entry.composite is None else (entry.layout,)
    packing = () if entry.elements.packing is None else (entry.elements.packing.name, "as")
    return " ".join((*layout, *packing, *entry.math_bits, entry.dtype))


def _is_plain_list(value: object) -> bool:
    """Return whether one line is enough: parameter numbers of an optimizer, betas, a shape."""
    return isinstance(value, (list, tuple)) and not any(
        isinstance(child, (Entry, Opaque, Mapping, list, tuple)) for child in value
    )
