"""What a command does only for people: bars, and questions before something is replaced. Scripts are never asked."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from sluice.cli.failures import Failure
from sluice.reports.printable import printable

__all__ = ["allow_replacing", "progress_wanted"]

#: Files that a question lists.
_SHOWN = 3


def progress_wanted(*, quiet: bool) -> bool:
    """Return whether somebody sees a bar on stderr, which may be closed."""
    return not quiet and sys.stderr is not None and sys.stderr.isatty()


def allow_replacing(found: Sequence[str], failure: type[Failure]) -> None:
    """Return when nothing would be replaced, or the user at the terminal wants it to be.

    Args:
        found: What exists and would be replaced.
        failure: What to raise otherwise; without a terminal that is at once.

    Raises:
        Failure: Something would be replaced.
    """
    if not found:
        return
    names = ", ".join(printable(name) for name in found[:_SHOWN]) + (", ..." if len(found) > _SHOWN else "")
    if not _at_terminal():
        raise failure(f"{names} exists already: say --force to replace it. Nothing was written.")
    if not click.confirm(f"{names} exists already. Replace it?", err=True):
        raise failure("nothing was written")


def _at_terminal() -> bool:
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))
