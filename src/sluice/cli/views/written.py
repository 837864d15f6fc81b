"""What a conversion wrote, or would write, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sluice._units import format_bytes
from sluice.cli.text import printable, printable_name
from sluice.cli.views.render import counted, make_console, make_table

if TYPE_CHECKING:
    from sluice.api.save import SaveReport

__all__ = ["print_written"]

#: What is shown of long lists.
_FILES_SHOWN = 20
_NAMES_SHOWN = 8


def print_written(report: SaveReport) -> None:
    """Print what a conversion made, or would make."""
    console = make_console()
    console.print(f"{printable(report.destination)} ({report.format})", style="bold")
    what = f"{counted(report.tensors, 'tensor')}, {format_bytes(report.nbytes)}"
    if report.dry_run:
        console.print(f"{what}; a dry run: nothing was written")
    else:
        console.print(f"{what} in {report.seconds:.2f} s, {report.gb_per_second:.2f} GB/s")
    table = make_table("file", ">bytes")
    rows = list(zip(report.files, report.file_bytes, strict=True))
    for file, nbytes in rows[:_FILES_SHOWN]:
        table.add_row(printable(file), f"{nbytes:,}")
    if len(rows) > _FILES_SHOWN:
        table.add_row(f"and {len(rows) - _FILES_SHOWN:,} more", f"{sum(report.file_bytes[_FILES_SHOWN:]):,}")
    console.print(table)
    for change, count in report.casts.items():
        console.print(f"cast {change}: {counted(count, 'tensor')}")
    if report.tied:
        tied = [f"{name} = {stored}" for name, stored in report.tied.items()]
        console.print(f"stored once ({len(tied):,}): {_joined(tied)}")
    if report.replaced:
        console.print(f"replaced ({len(report.replaced):,}): {_joined(report.replaced)}")
    for note in report.notes:
        console.print(f"note: {printable(note)}")


def _joined(names: Sequence[str]) -> str:
    text = ", ".join(map(printable_name, names[:_NAMES_SHOWN]))
    return text if len(names) <= _NAMES_SHOWN else f"{text} and {len(names) - _NAMES_SHOWN:,} more"
