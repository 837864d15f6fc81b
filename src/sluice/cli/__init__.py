"""The command line: one file for each command, which parses with click, calls the API and renders what it returns.

Every failure leaves as one paragraph on stderr and an exit code; ``--debug`` adds the traceback.
"""

from __future__ import annotations

import io
import sys
import traceback

import click

from sluice import __version__
from sluice._errors import BudgetError, SluiceError
from sluice.cli._inspect import inspect_command
from sluice.cli._load import load_command
from sluice.cli._text import printable_paragraph

__all__ = ["main"]

EXIT_ERROR = 1
EXIT_BUDGET = 3
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count


class _Failure(click.ClickException):
    """One paragraph and an exit code; click writes it to stderr after ``Error:``."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(printable_paragraph(message))
        self.exit_code = exit_code


class _Commands(click.Group):
    """A group that turns every exception of its commands into a paragraph and an exit code."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        # Click ends these itself: --help, and a reader such as `head` that went away.
        except (click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except (Exception, KeyboardInterrupt) as error:
            if ctx.params["debug"]:
                traceback.print_exc()
            if isinstance(error, click.ClickException):
                error.message = printable_paragraph(error.message)
                raise
            raise _explain(error) from error


def _explain(error: BaseException) -> _Failure:
    if isinstance(error, KeyboardInterrupt):
        return _Failure("interrupted", EXIT_INTERRUPTED)
    if isinstance(error, SluiceError):
        return _Failure(str(error), EXIT_BUDGET if isinstance(error, BudgetError) else EXIT_ERROR)
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return _Failure(
        f"unexpected {what}. This is a defect of sluice: please run the command again as `sluice --debug ...` and "
        f"report the traceback with the versions of sluice ({__version__}), torch and Python.",
        EXIT_ERROR,
    )


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="sluice", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(*, debug: bool) -> None:  # noqa: ARG001  read from the context where errors are handled
    """Put the weights of a PyTorch checkpoint into a model, with peak memory = the finished model + a small gate.

    \b
    Examples:
      sluice inspect model.pth
      sluice inspect model.safetensors --json | jq .tensor_bytes
      sluice load model.pth --model mypackage.models:build --dtype bfloat16

    \b
    Exit codes:
      0    done
      1    the checkpoint, the model or the disk is at fault
      2    the command line is wrong
      3    the load does not fit into the memory limits
      130  interrupted
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a letter gets its escape, not an error
            stream.reconfigure(errors="backslashreplace")


main.add_command(inspect_command)
main.add_command(load_command)
