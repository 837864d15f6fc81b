"""What verifications and comparisons found, as tables for people. Imported by a command only when it prints them."""

from __future__ import annotations

from rich.console import Console

from sluice._units import format_bytes
from sluice._verify_report import VerifyReport
from sluice.cli._render import counted, make_console, make_table
from sluice.cli._text import printable, printable_name, shorten

__all__ = ["print_verification"]

#: Rows of a table.
_ROWS_SHOWN = 40

#: Characters of a hash or of any other value.
_VALUE_SHOWN = 80


def print_verification(report: VerifyReport, *, written: str | None) -> None:
    """Print the report of ``sluice verify``.

    Args:
        report: What was found.
        written: The manifest that was written, or None.
    """
    out = make_console()
    out.print(printable(report.source) + (f" ({report.format})" if report.format else ""), style="bold")
    if report.format:
        speed = report.nbytes / report.seconds / 1e9 if report.seconds else 0.0
        hashed = f", {counted(len(report.hashes), 'hash', 'hashes')}" if report.algorithm else ""
        out.print(
            f"{counted(report.tensors, 'tensor')}, {counted(report.checksums, 'checksum')}{hashed}; read "
            f"{format_bytes(report.nbytes)} in {report.seconds:.2f} s, {speed:.2f} GB/s"
        )
    if report.problems:
        rows = make_table("problem", "where", ">byte", "what", "expected", "found")
        for one in report.problems[:_ROWS_SHOWN]:
            where = one.tensor if one.tensor is not None else one.file
            rows.add_row(
                one.kind,
                "" if where is None else printable_name(where),
                "" if one.offset is None else f"{one.offset:,}",
                printable(one.problem),
                _value(one.expected),
                _value(one.found),
            )
        out.print(rows)
        _print_rest(out, len(report.problems))
    if report.non_finite:
        rows = make_table("not finite", ">NaN", ">infinite")
        for name, found in list(report.non_finite.items())[:_ROWS_SHOWN]:
            rows.add_row(printable_name(name), f"{found.nan:,}", f"{found.inf:,}")
        out.print(rows)
        _print_rest(out, len(report.non_finite))
    if report.without_checksum:
        names = ", ".join(printable_name(name) for name in report.without_checksum[:_ROWS_SHOWN])
        out.print(f"records without a CRC-32 ({len(report.without_checksum):,}): {names}")
    for note in report.notes:
        out.print(f"note: {printable(note)}")
    if written is not None:
        out.print(f"manifest written: {printable(written)}")
    out.print(f"{counted(len(report.problems), 'problem')}" if report.problems else "ok", style="bold")


def _value(value: str | None) -> str:
    return "" if value is None else printable(shorten(value, _VALUE_SHOWN))


def _print_rest(out: Console, number: int) -> None:
    if number > _ROWS_SHOWN:
        out.print(f"and {number - _ROWS_SHOWN:,} more; --json shows all")
