"""``sluice merge``: merge or average checkpoints."""

from __future__ import annotations

from typing import Any

import click

import sluice
from sluice.cli.options import DTypeName, Size, number, weighted
from sluice.cli.output import already_exists, output_options, progress_wanted, show_report, wrong_options
from sluice.cli.remote_options import remote_options, with_settings
from sluice.merging.recipe import METHODS
from sluice.writing.save_formats import CONVERT_FORMATS

__all__ = ["merge_command"]


@click.command("merge")
@click.argument("inputs", nargs=-1, required=True, metavar="CONFIG|PATH[=WEIGHT]...")
@click.argument("destination", type=click.Path())
@remote_options
@click.option("--method", type=click.Choice(list(METHODS)), help="Default: linear with weights, swa without.")
@click.option("--base", type=click.Path(), help="Base model.")
@click.option("--parameter", "-p", "parameters", multiple=True, metavar="NAME=VALUE", help="Such as density=0.5.")
@click.option("--key", help="Part of each input, such as model_state_dict. Default: the only state dict in it.")
@click.option("--dtype", type=DTypeName(), help="Dtype of the result. Default: auto, that of the inputs.")
@click.option("--format", type=click.Choice(CONVERT_FORMATS), help="Default: by the suffix of DESTINATION.")
@click.option("--max-shard-size", type=Size(), help="Bytes of tensors in one shard, such as 5GB.")
@click.option("--seed", type=int, default=0, show_default=True, help="Where random draws begin.")
@click.option("--memory", type=Size(), help="Limit on the growth of host memory, such as 200MiB.")
@click.option("--dry-run", is_flag=True, help="Print what would be written, and write nothing.")
@click.option("--force", is_flag=True, help="Replace existing files.")
@output_options()
def merge_command(
    inputs: tuple[str, ...],
    destination: str,
    *,
    method: str | None,
    base: str | None,
    parameters: tuple[str, ...],
    dry_run: bool,
    force: bool,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Merge or average checkpoints into DESTINATION, with a fixed amount of memory.

    The inputs are checkpoints of any format with their weights, or a configuration of mergekit (.yml, .yaml, .json).

    \b
    Examples:
      sluice merge config.yml merged/
      sluice merge a.pth=0.3 b.safetensors=0.7 merged.safetensors
      sluice merge a/=1 b/=0.5 merged/ --method ties --base base/ -p density=0.3
      sluice merge step-1.pth step-2.pth step-3.pth average.pth --key model
      sluice merge step-1.pth step-2.pth average.pth --method ema -p decay=0.999

    \b
    Exit codes:
      0    written, or with --dry-run could be
      1    an input or the disk is at fault, or DESTINATION exists and --force was not given
      2    the command line is wrong
      3    the merge does not fit into --memory
      130  interrupted
    """
    own: dict[str, Any] = {"method": method, "parameters": _named(parameters) or None, **options}
    own["base"] = base and with_settings(base)
    config = _config(inputs)

    shown = progress_wanted(quiet=quiet or dry_run)
    with wrong_options():
        report: Any = sluice.merge(config, destination, **own, overwrite=force, dry_run=dry_run, progress=shown)
    show_report(report, as_json=as_json, quiet=quiet)
    if dry_run and report.replaced and not force:
        raise already_exists(report.replaced[0])


def _config(inputs: tuple[str, ...]) -> Any:
    """Return the argument ``config`` of ``sluice.merge``."""
    if len(inputs) == 1 and inputs[0].endswith((".yml", ".yaml", ".json")):
        return inputs[0]
    pairs = list(map(weighted, inputs))
    if not any(weight for _, weight in pairs):
        return [with_settings(path) for path in inputs]
    if not all(weight for _, weight in pairs) or len({path for path, _ in pairs}) < len(pairs):
        raise click.UsageError("each input needs a weight of its own, such as a.pth=0.3, or none has one")
    return {with_settings(path): number(weight) for path, weight in pairs}


def _named(parameters: tuple[str, ...]) -> dict[str, float | bool]:
    pairs = [each.partition("=") for each in parameters]
    return {name: value == "true" if value in {"true", "false"} else number(value) for name, _, value in pairs}
