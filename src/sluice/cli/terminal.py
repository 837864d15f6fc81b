"""Interaction at a terminal: progress bars, and questions before files are replaced. Scripts never get a question."""

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
    """Return whether to draw a bar: stderr is a terminal, and not closed."""
    return not quiet and sys.stderr is not None and sys.stderr.isatty()


def allow_replacing(existing: Sequence[str], failure: type[Failure]) -> None:
    """Return if no file would be replaced, or the user at the terminal agrees.

    Args:
        existing: Files that would be replaced.
        failure: Error to raise otherwise; raised without a question if there is no terminal.

    Raises:
        Failure: A file would be replaced.
    """
    if not existing:
        return
    names = ", ".join(printable(name) for name in existing[:_SHOWN]) + (", ..." if len(existing) > _SHOWN else "")
    if not _at_terminal():
        raise failure(f"{names} exists already: use --force to replace it. Nothing was written.")
    if not click.confirm(f"{names} exists already. Replace it?", err=True):
        raise failure("nothing was written")


def _at_terminal() -> bool:
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))
