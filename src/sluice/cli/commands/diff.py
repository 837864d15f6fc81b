"""``sluice diff``: compare the tensors of two checkpoints."""

from __future__ import annotations

from typing import Any

import click

import sluice
from sluice.cli.commands.verify import unreadable
from sluice.cli.options import encoding_option
from sluice.cli.remote_options import remote_options, with_settings
from sluice.cli.terminal import progress_wanted
from sluice.cli.views.report import output_options, show_report

__all__ = ["diff_command"]


@click.command("diff")
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@remote_options
@click.option("--key-a", "--key", "key", metavar="KEY", help="Compare only this part of A, such as model_state_dict.")
@click.option("--key-b", "other_key", metavar="KEY", help="Compare only this part of B.")
@click.option("--rtol", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Relative tolerance.")
@click.option("--atol", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Absolute tolerance.")
@click.option("--patch", metavar="DIR", help="Also write what makes B of A, for sluice.Patched, to a new directory.")
@click.option("--sparse", is_flag=True, help="Make the patch a .safetensors file of indices and values.")
@encoding_option
@output_options("Print nothing but errors; the exit code is the answer.")
def diff_command(a: str, b: str, *, as_json: bool, quiet: bool, **options: Any) -> None:
    """Compare presence, dtype, shape and values of the tensors of the checkpoints at A and B.

    A and B are files, directories, index files of shards or URLs of them, in any two formats. Tensors are compared by
    name, as numbers: 0.0 and -0.0 are the same, and so are two NaNs. Elements differ when |a - b| > atol + rtol * |b|.
    A name that only one of them has is not a difference if it is tied to a name that both have. Memory stays below 100
    MiB for files of any size.

    Without --key-a and --key-b, two checkpoints with their state dicts under the same keys are compared as a whole,
    and so are two with full names of state dicts in common. Otherwise the state dict of each is compared, as
    `sluice convert` chooses it; the first lines say which.

    \b
    Examples:
      sluice diff train.pt converted.safetensors
      sluice diff before.pt after.pt --json | jq -r '.differences[].name'
      sluice diff step_6 step_7 --patch weight_v000007
      sluice diff run.pt exported --key-a model_state_dict --rtol 1e-3 --quiet

    \b
    Exit codes:
      0    the same
      1    different
      2    A or B cannot be read, or the command line is wrong
      130  interrupted

    \b
    The JSON object:
      same         whether nothing differs
      a, b, format_a, format_b
      key_a, key_b             the compared parts; null is the whole checkpoint
      tensors_a, tensors_b     number of names in these parts
      compared_a, compared_b   number of these names that were compared
      outside_a, outside_b     number of tensors outside the parts
      differences  [{name, kinds, dtype_a, dtype_b, shape_a, shape_b, similar, elements,
                   different, nan, max_abs, max_rel}]; kinds are only_a, only_b, layout,
                   shape, dtype, values, unsupported (not compared, because sluice does
                   not read it); similar is the most similar name of the other side,
                   for the first 100 names that only one side has;
                   nan counts elements that are NaN on one side only; an infinite
                   maximum is the text "inf"
      common       number of names that both have
      tied         names that only one has, for tensors with a common name
      nbytes, seconds
    """
    if options["sparse"] and options["patch"] is None:
        raise click.UsageError("--sparse is for --patch")
    with unreadable():
        report = sluice.diff(with_settings(a), with_settings(b), progress=progress_wanted(quiet=quiet), **options)
    show_report(report, as_json=as_json, quiet=quiet)
    if not report.same:
        raise click.exceptions.Exit(1)
