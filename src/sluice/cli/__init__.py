"""The command line: ``commands`` parse options and call the API, ``views`` print what it returns.

Every failure is one paragraph on stderr and an exit code; ``--debug`` adds the traceback.
"""

from __future__ import annotations

import io
import sys
import traceback

import click

from sluice import __version__
from sluice._interrupts import InterruptsRaised
from sluice.cli.commands.bench import bench_command
from sluice.cli.commands.convert import convert_command
from sluice.cli.commands.diff import diff_command
from sluice.cli.commands.inspect import inspect_command
from sluice.cli.commands.load import load_command
from sluice.cli.commands.plan import plan_command
from sluice.cli.commands.verify import verify_command
from sluice.cli.failures import failure_of

__all__ = ["main"]


class _Commands(click.Group):
    """A group that turns exceptions of its commands into a paragraph and an exit code."""

    def invoke(self, ctx: click.Context) -> object:
        with InterruptsRaised() as interrupts:
            try:
                return super().invoke(ctx)
            # Click handles these itself: --help, and a closed pipe.
            except (click.exceptions.Exit, click.Abort, BrokenPipeError):
                raise
            except (Exception, KeyboardInterrupt) as error:
                if ctx.params["debug"]:
                    traceback.print_exc()
                if interrupts.happened:
                    raise failure_of(KeyboardInterrupt()) from error
                if isinstance(error, click.ClickException):
                    raise
                raise failure_of(error) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="sluice", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(*, debug: bool) -> None:  # noqa: ARG001  read from the context by _Commands
    """Put the weights of a PyTorch checkpoint into a model; peak memory = the finished model + a fixed pool of buffers.

    \b
    Examples:
      sluice inspect model.pth
      sluice inspect model.safetensors --json | jq .tensor_bytes
      sluice plan model.pth --model mypackage.models:build --host-limit 4GiB
      sluice load model.pth --model mypackage.models:build --dtype bfloat16
      sluice convert model.pth model.safetensors --dtype bfloat16
      sluice verify model.pth
      sluice diff model.pth model.safetensors
      sluice bench --size small

    \b
    Exit codes (verify and diff have their own, see their --help):
      0    success
      1    the checkpoint, the model or the disk is at fault
      2    the command line is wrong
      3    the load does not fit into the memory limits
      130  interrupted
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # letters that the terminal cannot show become escapes
            stream.reconfigure(errors="backslashreplace")


main.add_command(bench_command)
main.add_command(convert_command)
main.add_command(diff_command)
main.add_command(inspect_command)
main.add_command(load_command)
main.add_command(plan_command)
main.add_command(verify_command)
