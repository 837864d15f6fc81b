"""Failures of a command: one paragraph on stderr and an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

from sluice import __version__
from sluice._errors import BudgetError, SluiceError
from sluice._interrupts import INTERRUPTED
from sluice.reports.printable import printable_paragraph

__all__ = ["Failure", "Interrupted", "OverBudget", "describe", "failure_of", "wrong_options"]


class Failure(click.ClickException):
    """The checkpoint, the model or the disk is at fault."""

    exit_code = 1

    def format_message(self) -> str:
        """Return the paragraph, with text from files made printable."""
        return printable_paragraph(self.message)


class OverBudget(Failure):
    """The load does not fit into the memory limits."""

    exit_code = 3


class Interrupted(Failure):
    """The user interrupted the command."""

    exit_code = INTERRUPTED


@contextmanager
def wrong_options() -> Iterator[None]:
    """Turn refused arguments into a wrong command line, and a library that is not installed into a failure."""
    try:
        yield
    except ValueError as error:
        # The texts are those of the functions, with the names of their arguments.
        text = str(error).replace("format=", "--format ").replace("max_shard_size", "--max-shard-size")
        raise click.UsageError(text.rstrip()) from error
    except ImportError as error:
        raise Failure(str(error)) from error


def failure_of(error: BaseException) -> Failure:
    """Return the failure for an exception that ended a command."""
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("interrupted")
    if isinstance(error, BudgetError):
        return OverBudget(str(error))
    if isinstance(error, SluiceError):
        return Failure(str(error).replace("pass overwrite=True", "use --force"))
    return Failure(
        f"unexpected {describe(error)}. This is a defect of sluice: please run the command again as "
        f"`sluice --debug ...` and report the traceback with the versions of sluice ({__version__}), torch and Python."
    )


def describe(error: BaseException) -> str:
    """Return the type and text of an exception, as one clause."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
