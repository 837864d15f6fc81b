"""What verifications and comparisons found, as tables for people. Imported by a command only when it prints them."""

from __future__ import annotations

from rich.console import Console

from sluice._units import format_bytes
from sluice.cli.text import printable, printable_name, shorten
from sluice.cli.views.render import counted, make_console, make_table
from sluice.reports.diff import DiffReport, TensorDifference
from sluice.reports.verify import VerifyReport

__all__ = ["print_diff", "print_verification"]

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
    if report.unsupported:
        names = ", ".join(printable_name(name) for name in report.unsupported[:_ROWS_SHOWN])
        out.print(f"not hashed or counted ({len(report.unsupported):,}): {names}")
    for warning in report.warnings:
        out.print(f"warning: {printable(warning)}")
    for note in report.notes:
        out.print(f"note: {printable(note)}")
    if written is not None:
        out.print(f"manifest written: {printable(written)}")
    out.print(f"{counted(len(report.problems), 'problem')}" if report.problems else "ok", style="bold")


def print_diff(report: DiffReport) -> None:
    """Print the report of ``sluice diff``."""
    out = make_console()
    out.print(f"a: {printable(report.a)} ({report.format_a})", style="bold")
    out.print(f"b: {printable(report.b)} ({report.format_b})", style="bold")
    speed = report.nbytes / report.seconds / 1e9 if report.seconds else 0.0
    out.print(
        f"{counted(report.common, 'common name')}; compared {format_bytes(report.nbytes)} in {report.seconds:.2f} s, "
        f"{speed:.2f} GB/s"
    )
    if report.tied:
        out.print(f"tied to a common name: {counted(len(report.tied), 'name')}")
    if report.differences:
        rows = make_table("tensor", "differs in", "a", "b", ">elements", ">max abs", ">max rel")
        for one in report.differences[:_ROWS_SHOWN]:
            rows.add_row(printable_name(one.name), _kinds(one), *_sides(one), *_amounts(one))
        out.print(rows)
        _print_rest(out, len(report.differences))
    verdict = counted(len(report.differences), "tensor differs", "tensors differ") if report.differences else "the same"
    out.print(verdict, style="bold")


def _kinds(one: TensorDifference) -> str:
    words = {"only_a": "only in a", "only_b": "only in b"}
    text = ", ".join(words.get(kind, kind) for kind in one.kinds)
    return f"{text}; close to it: {printable_name(one.similar)}" if one.similar else text


def _sides(one: TensorDifference) -> tuple[str, str]:
    sides = ((one.dtype_a, one.shape_a), (one.dtype_b, one.shape_b))
    left, right = ("" if dtype is None else f"{dtype} {list(shape or ())}" for dtype, shape in sides)
    return left, right


def _amounts(one: TensorDifference) -> tuple[str, str, str]:
    if "values" not in one.kinds:
        return "", "", ""
    nan = f", {one.nan:,} NaN" if one.nan else ""
    return f"{one.different:,} of {one.elements:,}{nan}", f"{one.max_abs:.3g}", f"{one.max_rel:.3g}"


def _value(value: str | None) -> str:
    return "" if value is None else printable(shorten(value, _VALUE_SHOWN))


def _print_rest(out: Console, number: int) -> None:
    if number > _ROWS_SHOWN:
        out.print(f"and {number - _ROWS_SHOWN:,} more; --json shows all")
