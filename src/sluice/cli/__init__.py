"""The command line: ``commands`` parse options, call the API, and print what it returns.

Every failure is one paragraph on stderr and an exit code; ``--debug`` adds the traceback.
"""

from __future__ import annotations

import io
import os
import sys
from errno import EBADF, EDQUOT, EFBIG, EIO, ENOSPC, EPIPE
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem

from sluice import __version__
from sluice._interrupts import InterruptsRaised
from sluice.cli.output import failure_of, unwritten

__all__ = ["main"]

#: The commands with the first sentence of their help. ``commands/NAME.py`` has the command ``NAME_command``, and is
#: imported when it runs: each needs other packages, and ``sluice inspect`` should not wait for them.
_SUMMARIES = {
    "bench": "Load one checkpoint in several ways and compare peak memory and time.",
    "convert": "Write the checkpoint at SOURCE to DESTINATION in another format, with a fixed amount of memory.",
    "diff": "Compare presence, dtype, shape and values of the tensors of the checkpoints at A and B.",
    "doctor": "Show versions, memory, disks, accelerators and settings: what a bug report needs.",
    "inspect": "Show format, contents, dtypes, bytes, largest tensors and shared storages of the checkpoint at PATH.",
    "load": "Build a model, fill it from the checkpoint at PATH, and report time and peak memory.",
    "merge": "Merge or average checkpoints into DESTINATION, with a fixed amount of memory.",
    "plan": "Predict the memory of loading the checkpoint at PATH, and whether it fits.",
    "share": "Find or build one copy of the checkpoint at PATH in shared memory, for all processes of this host.",
    "verify": "Read the checkpoint at PATH once and report what is damaged.",
}

#: Commands that share a module: the module is named after the first of them.
_ELSEWHERE = {"diff": "verify", "plan": "load"}


class _Commands(click.Group):
    """A group that imports a command when it runs, and turns exceptions into a paragraph and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  the signature is click's
        return list(_SUMMARIES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  as above
        if cmd_name not in _SUMMARIES:
            return None
        module = _ELSEWHERE.get(cmd_name, cmd_name)
        command: click.Command = getattr(import_module(f"sluice.cli.commands.{module}"), f"{cmd_name}_command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches  # here, not above: few commands are misspelt

            close = get_close_matches(args[0], _SUMMARIES, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            if args[0] == "prefetch":
                hint = " 'sluice verify URL --cache DIRECTORY' downloads all files and checks them."
            raise click.UsageError(f"{error.message}{hint}", ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  as above
        with formatter.section("Commands"):
            formatter.write_dl(list(_SUMMARIES.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        commands = [
            CompletionItem(name, help=summary) for name, summary in _SUMMARIES.items() if name.startswith(incomplete)
        ]
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        try:
            return super().make_context(info_name, args, parent, **extra)
        except OSError as error:  # from printing --help or --version
            raise unwritten(error, 1) from error

    def invoke(self, ctx: click.Context) -> object:
        sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  None where it is closed, as by `>&-`
        with InterruptsRaised() as interrupts:
            try:
                try:
                    return super().invoke(ctx)
                finally:
                    sys.stdout.flush()
            except (click.exceptions.Exit, click.Abort):  # click handles these itself
                raise
            except (Exception, KeyboardInterrupt) as error:
                if ctx.params["debug"]:
                    import traceback  # here, not above: few commands fail

                    traceback.print_exc()
                if interrupts.happened:
                    raise failure_of(KeyboardInterrupt()) from error
                if isinstance(error, click.ClickException):
                    raise
                unwritable = {EBADF, EDQUOT, EFBIG, EIO, ENOSPC, EPIPE}  # other errors without a file have other causes
                if isinstance(error, OSError) and error.errno in unwritable and error.filename is None:
                    raise unwritten(error, 2 if ctx.invoked_subcommand in {"verify", "diff"} else 1) from error
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
