"""``sluice bench``: compare the ways to load one checkpoint, each in a separate process."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from sluice.cli.options import DTypeName, Size, find_factory, parse_arguments
from sluice.cli.output import Failure
from sluice.measuring._limit import memory_limit_refusal

__all__ = ["bench_command"]

#: Dtypes that can be compared, by their short names.
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

_SIZES = ("tiny", "small", "medium", "large", "xl")


class _ComparedDType(DTypeName):
    """A dtype that can be compared, converted to its short name."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        name = super().convert(value, param, ctx)
        short = next((short for short, compared in _DTYPES.items() if compared == name), None)
        return short or self.fail(f"{value!r} is not compared: write {', '.join(_DTYPES)}", param, ctx)


@click.command("bench")
@click.argument("checkpoint", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--model", "factory", metavar="MODULE:NAME", help="What builds the model of CHECKPOINT.")
@click.option("--model-args", metavar="JSON", default="{}", help="Its arguments: an object by name, an array in order.")
@click.option("--key", help="Part of CHECKPOINT that holds the weights, such as model_state_dict.")
@click.option("--size", type=click.Choice(_SIZES), help="A built-in GPT-2, with a generated checkpoint.")
@click.option(
    "--method", "methods", multiple=True, metavar="NAME", help="Only this method; repeatable. 'all': all of them."
)
@click.option("--dtype", "dtypes", multiple=True, type=_ComparedDType(auto=False), help="Finished dtype; repeatable.")
@click.option("--cold/--warm", "cold", default=None, help="Only with the checkpoint out of, or in, the page cache.")
@click.option("--runs", type=click.IntRange(1), default=1, show_default=True, help="Repetitions; tables show medians.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where models go; default: cuda if there is one.")
@click.option("--ram-limit", type=Size(), help="Host memory per process, such as 2GiB, with the interpreter.")
@click.option(
    "--timeout", type=click.FloatRange(1), default=900.0, show_default=True, help="Seconds until a load is stopped."
)
@click.option(
    "--directory", type=click.Path(path_type=Path), help="For generated checkpoints. Default: the temporary directory."
)
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench-out"), show_default=True, help="Results.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as one JSON object, and nothing else.")
@click.pass_context
def bench_command(ctx: click.Context, /, **options: Any) -> None:
    """Load one checkpoint in several ways and compare peak memory and time.

    Give CHECKPOINT and --model for your own checkpoint, or --size for a GPT-2 with a generated one. With neither, the
    largest GPT-2 is used whose loads fit this machine and about two minutes. Each load runs in a separate process,
    which is measured from outside. A process that dies is listed with the reason and its progress.

    Writes report.html (a page that works offline, with the memory of all methods over time), results.md and
    results.json into --out.

    \b
    Methods of the tutorial, which run unless --method is given:
      naive, sequential, meta-sequential, mmap, per-parameter, sluice
    Other loaders, which run by name if they are installed:
      safetensors-load-file, accelerate

    \b
    Examples:
      sluice bench --size small
      sluice bench model.pth --model net:Net --method naive --method mmap --method sluice
      sluice bench model.safetensors --model net:Net --method accelerate --dtype bf16 --warm --runs 3
      sluice bench --size large --ram-limit 4GiB --json | jq '.scenarios[].rows'
    """
    _check_options(options["checkpoint"], options["factory"], options["model_args"], options["size"])
    if options["ram_limit"] is not None and (refusal := memory_limit_refusal()):
        raise Failure(f"--ram-limit: {refusal}")
    # Here, not above: torch takes a second to import, and wrong options are refused before.
    from sluice.cli.comparison import compare

    dtypes = tuple(_DTYPES[name] for name in dict.fromkeys(options.pop("dtypes")))
    compare(ctx, SimpleNamespace(dtypes=dtypes, **options))


def _check_options(checkpoint: Path | None, factory: str | None, model_args: str, size: str | None) -> None:
    """Refuse options that contradict each other, before torch is imported."""
    if sys.platform != "linux":
        raise Failure("sluice bench needs Linux: it reads the memory of other processes from /proc")
    if (checkpoint is None) != (factory is None):
        raise click.UsageError("CHECKPOINT and --model belong together: one is loaded into the other")
    if checkpoint is not None and size is not None:
        raise click.UsageError("--size names a built-in model: give either --size, or CHECKPOINT and --model")
    parse_arguments(model_args)
    if factory is not None:
        find_factory(factory)
