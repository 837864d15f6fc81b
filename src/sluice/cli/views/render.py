"""Summaries and reports as tables for people. Imported by a command only when it prints them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import islice

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sluice._units import format_bytes
from sluice.cli.text import path_and_key, printable, printable_name, shorten
from sluice.cli.views.outline import describe_dtype
from sluice.cli.views.summary import SharedStorage, Summary
from sluice.records import Entry, Peaks
from sluice.reports.load import LoadReport
from sluice.reports.plan import PlanReport
from sluice.reports.table import aligned

__all__ = ["counted", "make_console", "make_table", "print_plan", "print_report", "print_summary"]

#: Columns where the output is no terminal: a line of a file or a pipe is never folded.
_UNBOUNDED_COLUMNS = 100_000

#: Headers that start with ``>`` are of columns of numbers.
_TENSOR_HEADERS = ("name", "dtype", "shape", ">bytes")
_SHARED_HEADERS = ("storage", ">bytes", "shared by")

#: What is shown without ``--all``: rows of a table, names in a row, characters of a name and of a metadata text.
_ROWS_SHOWN = 10
_NAMES_SHOWN = 8
_NAME_SHOWN = 120
_TEXT_SHOWN = 200

#: Things at the top of a training checkpoint: about a dozen.
_CONTENTS_SHOWN = 20


def make_console() -> Console:
    """Return where tables are printed."""
    # Markup and emoji codes off: names such as "[red]" or ":smile:" are a stranger's text.
    width = None if sys.stdout.isatty() else _UNBOUNDED_COLUMNS
    return Console(markup=False, emoji=False, highlight=False, width=width)


def make_table(*headers: str) -> Table:
    """Return a table without rows; a header that starts with ``>`` is of a column of numbers."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for header in headers:
        number = header.startswith(">")
        table.add_column(
            header.removeprefix(">"), justify="right" if number else "left", overflow="fold", no_wrap=number
        )
    return table


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: ``"1 tensor"``, ``"2,000 tensors"``."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def print_summary(summary: Summary, *, everything: bool) -> None:
    """Print the tables of ``sluice inspect``; with ``everything`` no list is cut."""
    console = make_console()
    index = summary.index
    total = sum(file.identity.nbytes for file in index.files)
    console.print(path_and_key(summary.path, summary.key), style="bold")
    console.print(f"{index.format}, {counted(len(index.files), 'file')}, {format_bytes(total)}")
    stored = f", {format_bytes(summary.stored_bytes)} stored" if summary.shared else ""
    console.print(f"{counted(len(summary.tensors), 'tensor')}, {format_bytes(summary.tensor_bytes)}{stored}")
    if len(index.files) > 1:
        console.print(_files(summary, everything=everything))
    if summary.contents:
        console.print(_contents(summary, everything=everything))
        _print_state_dicts(console, summary)
    if summary.tensors:
        console.print(_dtypes(summary))
    if summary.unsupported:
        console.print(_unsupported(summary, everything=everything))
    if everything:
        _print_columns(_TENSOR_HEADERS, [_tensor_row(name, entry) for name, entry in summary.tensors.items()])
        _print_columns(_SHARED_HEADERS, [_shared_row(summary, shared, None) for shared in summary.shared])
    else:
        _print_shortened(console, summary)
    if index.metadata:
        console.print("Metadata", style="bold")
    for name, text in index.metadata.items():
        console.print(f"{printable(name)}: {printable(text if everything else shorten(text, _TEXT_SHOWN))}")
    for note in index.notes:
        console.print(f"note: {printable(note)}")


def _print_columns(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print any number of rows as aligned columns."""
    if not rows:
        return
    plain = [header.removeprefix(">") for header in headers]
    sys.stdout.writelines(f"{line}\n" for line in aligned(plain, rows))
    sys.stdout.write("\n")


def _files(summary: Summary, *, everything: bool) -> Table:
    files = summary.index.files
    shown = len(files) if everything else _ROWS_SHOWN
    table = make_table(_cut_title("file", len(files), shown), ">bytes")
    for file in files[:shown]:
        table.add_row(printable(file.path), format_bytes(file.identity.nbytes))
    return table


def _contents(summary: Summary, *, everything: bool) -> Table:
    found = summary.contents
    shown = len(found) if everything else _CONTENTS_SHOWN
    table = make_table(_cut_title("contents", len(found), shown), "", ">tensors", ">bytes")
    for content in found[:shown]:
        numbers = (f"{content.tensors:,}", format_bytes(content.nbytes)) if content.tensors else ("", "")
        table.add_row(shorten(content.label, _NAME_SHOWN), content.text, *numbers)
    return table


def _unsupported(summary: Summary, *, everything: bool) -> Table:
    found = summary.unsupported
    shown = len(found) if everything else _ROWS_SHOWN
    table = make_table(_cut_title("not loaded", len(found), shown), "what it is", "in the file")
    for name, leaf in islice(found.items(), shown):
        table.add_row(_name(name, _NAME_SHOWN), printable(leaf.reason), printable(leaf.qualified_name))
    return table


def _print_state_dicts(console: Console, summary: Summary) -> None:
    """Print what a load takes without ``key=``, or between what it has to choose."""
    found = summary.state_dicts
    if len(found) > 1:
        console.print(f"state dicts, to choose from with --key: {_joined(found, _NAMES_SHOWN)}")
    elif found and found[0]:
        console.print(f"state dict: {_joined(found, None)}")


def _dtypes(summary: Summary) -> Table:
    table = make_table("dtype", ">tensors", ">bytes")
    for dtype, (count, nbytes) in summary.dtypes.items():
        table.add_row(dtype, f"{count:,}", format_bytes(nbytes))
    return table


def _print_shortened(console: Console, summary: Summary) -> None:
    if summary.tensors:
        console.print(_cut_title("Largest tensors", len(summary.tensors)), style="bold")
        table = make_table(*_TENSOR_HEADERS)
        for name, entry in summary.largest(_ROWS_SHOWN):
            table.add_row(*_tensor_row(name, entry, _NAME_SHOWN))
        console.print(table)
    if summary.shared:
        console.print(_cut_title("Shared storages", len(summary.shared)), style="bold")
        table = make_table(*_SHARED_HEADERS)
        for shared in summary.shared[:_ROWS_SHOWN]:
            table.add_row(*_shared_row(summary, shared, _NAMES_SHOWN))
        console.print(table)


def _tensor_row(name: str, entry: Entry, shown: int | None = None) -> tuple[str, str, str, str]:
    return _name(name, shown), describe_dtype(entry), str(list(entry.shape)), format_bytes(entry.nbytes)


def _name(name: str, shown: int | None) -> str:
    return printable_name(name if shown is None else shorten(name, shown))


def _shared_row(summary: Summary, shared: SharedStorage, shown: int | None) -> tuple[str, str, str]:
    storage = summary.index.storages[shared.storage]
    return printable(storage.key), format_bytes(storage.nbytes), _joined(shared.names, shown)


def _cut_title(title: str, count: int, shown: int = _ROWS_SHOWN) -> str:
    return title if count <= shown else f"{title} ({shown} of {count:,}; --all shows all)"


def _joined(names: Sequence[str], shown: int | None) -> str:
    text = ", ".join(_name(name, shown and _NAME_SHOWN) for name in names[:shown])
    return text if shown is None or len(names) <= shown else f"{text} and {len(names) - shown:,} more"


def print_report(report: LoadReport) -> None:
    """Print the report of a load."""
    console = make_console()
    console.print(f"{path_and_key(report.source, report.key)} ({report.format})", style="bold")
    console.print(
        f"{counted(report.tensors, 'tensor')}, {format_bytes(report.final_bytes)} on {', '.join(report.devices)}"
        f" in {report.seconds:.2f} s, {report.gb_per_second:.2f} GB/s"
    )
    console.print(_peaks(report))
    console.print(_reads(report))
    for where, prefixes in report.prefixes_by_device().items():
        console.print(f"on {where}: {_joined(prefixes, _NAMES_SHOWN)}")
    if report.prefix:
        console.print(f"prefix stripped: {printable(report.prefix)}")
    for change, count in report.cast.items():
        console.print(f"cast {change}: {counted(count, 'tensor')}")
    for label, names in report.name_lists().items():
        if names:
            console.print(f"{label} ({len(names):,}): {_joined(names, _NAMES_SHOWN)}")
    for note in report.notes:
        console.print(f"note: {printable(note)}")


_KINDS = {
    "anon_bytes": "host, anonymous",
    "file_bytes": "host, mapped files",
    "shmem_bytes": "host, shared",
    "total_bytes": "host, total",
}


def _peaks(report: LoadReport) -> Table:
    table = make_table("growth of memory", ">predicted", ">measured")
    for name, label in _KINDS.items():
        table.add_row(label, _peak(report.predicted, name), _peak(report.measured, name))
    for device in report.device_memory:
        reserved = "not available" if device.reserved_bytes is None else format_bytes(device.reserved_bytes)
        table.add_row(f"{device.device}, reserved", format_bytes(device.predicted_bytes), reserved)
    return table


def _peak(peaks: Peaks | None, name: str) -> str:
    return format_bytes(getattr(peaks, name)) if peaks else "not available"


def _reads(report: LoadReport) -> str:
    methods = ", ".join(f"{format_bytes(nbytes)} {method}" for method, nbytes in report.reads.items() if nbytes)
    stepped = f"; {counted(report.stepped_down, 'read')} stepped down" if report.stepped_down else ""
    mapped = f"; {format_bytes(report.mapped_bytes)} mapped" if report.mapped_bytes else ""
    return f"read {format_bytes(report.read_bytes)}" + (f": {methods}" if methods else "") + stepped + mapped


def print_plan(report: PlanReport, *, explain: bool) -> None:
    """Print a plan; with ``explain`` also how each group of tensors would be moved."""
    console = make_console()
    for line in report.lines():
        console.print(printable(line))
    for label, names in (("missing", report.missing), ("unexpected", report.unexpected)):
        if names:
            console.print(f"{label} ({len(names):,}): {_joined(names, _NAMES_SHOWN)}")
    console.print(_compared(report))
    console.print(printable(report.verdict()), style="bold")
    for note in report.notes:
        console.print(f"note: {printable(note)}")
    if explain:
        explanation = report.explain()
        console.print(explanation.table())
        for line in explanation.lines():
            console.print(printable(line))


def _compared(report: PlanReport) -> Table:
    left = {"method", "fits", "remark"}
    table = make_table(*(header if header in left else f">{header}" for header in report.headers))
    for row in report.rows():
        table.add_row(*map(printable, row), style="bold" if row[0] == report.recommended else None)
    return table
