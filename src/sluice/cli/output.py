"""Output of commands: reports on stdout; a failure as one paragraph on stderr, with an exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain

import click

from sluice import __version__
from sluice._errors import BudgetError, SluiceError
from sluice._interrupts import INTERRUPTED
from sluice.cli.remote_options import Command, together
from sluice.reports.document import Grid, Report, Section, lines_of, printable_paragraph, rich_sections

__all__ = [
    "OVER_BUDGET",
    "Failure",
    "already_exists",
    "describe",
    "failure_of",
    "output_options",
    "print_sections",
    "progress_wanted",
    "show_report",
    "unwritten",
    "wrong_options",
]

#: Exit code of a load that does not fit into the memory limits.
OVER_BUDGET = 3


class Failure(click.ClickException):
    """A failed command; with exit code 1 the checkpoint, the model or the disk is at fault."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # click reads it from the instance

    def format_message(self) -> str:
        """Return the paragraph, with text from files made printable."""
        return printable_paragraph(self.message)


def already_exists(path: str, exit_code: int = 1) -> Failure:
    """Return the failure of a command that may not replace a file."""
    return Failure(f"{path}: the file already exists; use --force to replace it", exit_code)


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
        return Failure("interrupted", INTERRUPTED)
    if isinstance(error, BudgetError):
        return Failure(str(error), OVER_BUDGET)
    if isinstance(error, SluiceError):
        return Failure(str(error).replace("pass overwrite=True", "use --force"))
    return Failure(
        f"unexpected {describe(error)}. This is a defect of sluice: please run the command again as "
        f"`sluice --debug ...` and report the traceback with the versions of sluice ({__version__}), torch and Python."
    )


def unwritten(error: OSError, exit_code: int) -> click.ClickException | click.exceptions.Exit:
    """Return what ends a command whose output cannot be written; a closed pipe, as that of ``head``, has no message."""
    with suppress(OSError):
        sys.stdout.close()  # or Python writes the rest when it ends, with a message and an exit code of its own
    if isinstance(error, BrokenPipeError):
        return click.exceptions.Exit(exit_code)
    return Failure(f"cannot write the output: {error.strerror}", exit_code)


def describe(error: BaseException) -> str:
    """Return the type and text of an exception, as one clause."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def output_options(quiet: str = "Print nothing but errors.") -> Callable[[Command], Command]:
    """Return a decorator that adds ``--json`` and ``--quiet``."""
    return together(
        click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object."),
        click.option("--quiet", is_flag=True, help=quiet),
    )


def show_report(
    report: Report,
    *,
    as_json: bool,
    quiet: bool = False,
    more_json: Mapping[str, object] | None = None,
    more_sections: Iterable[Section] = (),
) -> None:
    """Print a report to stdout.

    Args:
        report: The report.
        as_json: Print it as one JSON object, even if ``quiet``.
        quiet: Print nothing else.
        more_json: Further keys of the JSON object.
        more_sections: Lines and tables after those of the report.
    """
    if as_json:
        click.echo(json.dumps({**report.to_json(), **(more_json or {})}))
    elif not quiet:
        print_sections(chain(report.sections(), more_sections))


def print_sections(sections: Iterable[Section]) -> None:
    """Print lines and tables to stdout; at a terminal with rich, else with an empty line around each table."""
    if sys.stdout.isatty():
        from rich.console import Console, Group  # here, not above: output to a file or pipe does without

        console = Console(highlight=False)
        console.print(Group(*rich_sections(sections, console.width)))
        return
    after_table = False
    for section in sections:
        is_table = isinstance(section, Grid)
        if is_table or after_table:
            sys.stdout.write("\n")
        after_table = is_table
        sys.stdout.writelines(f"{line}\n" for line in lines_of([section]))


def progress_wanted(*, quiet: bool) -> bool:
    """Return whether to draw a bar: stderr is a terminal, and not closed."""
    return not quiet and sys.stderr is not None and sys.stderr.isatty()
