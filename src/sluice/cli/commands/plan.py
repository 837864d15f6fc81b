"""``sluice plan``: predict the memory of a load, whether it fits, and how the usual ways to load compare."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

import sluice
from sluice._options import MemoryLimits, Place
from sluice.cli.mesh_options import mesh_options, mesh_sizes, parse_styles, speed_lines
from sluice.cli.options import (
    Size,
    allow_empty_option,
    build_model,
    changes_of,
    check_allow_empty,
    check_device,
    check_dtype,
    dtype_option,
    encoding_option,
    find_factory,
    ignore_mismatched_option,
    key_option,
    no_strict_option,
    parse_arguments,
    paths_argument,
    place_option,
    rename_option,
    rename_regex_option,
    rules_option,
    source_of,
    staging_option,
)
from sluice.cli.remote_options import remote_options
from sluice.cli.views.report import show_report

if TYPE_CHECKING:
    from torch import nn

__all__ = ["plan_command"]

#: Exit code of a plan that does not fit, as after a load.
_DOES_NOT_FIT = 3


@click.command("plan")
@paths_argument
@remote_options
@click.option(
    "--model",
    "factory",
    metavar="MODULE:NAME",
    help="What builds the model. Default: plan for the checkpoint alone.",
)
@click.option("--model-args", metavar="JSON", help="Its arguments: a JSON object by name, or an array in order.")
@click.option("--device", help="Device of the tensors: cpu, cuda:0, ...; with --model also auto.")
@dtype_option
@key_option
@rename_option
@rename_regex_option
@rules_option
@click.option(
    "--memory",
    "--host-limit",
    "host_limit",
    type=Size(),
    help="Limit on the growth of host memory, such as 4GiB. Default: control group or free memory.",
)
@click.option("--device-limit", type=Size(), help="Limit on the growth of each accelerator's memory. Default: free.")
@staging_option
@no_strict_option
@allow_empty_option
@ignore_mismatched_option
@place_option
@encoding_option
@mesh_options
@click.option("--probe", is_flag=True, help="Load up to 128 MiB to estimate the time.")
@click.option("--explain", is_flag=True, help="List how each group of tensors would be read, staged and cast.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one JSON object.")
@click.pass_context
def plan_command(
    ctx: click.Context,
    paths: tuple[str, ...],
    *,
    factory: str | None,
    model_args: str | None,
    device: str | None,
    dtype: str | None,
    key: str | None,
    renames: tuple[str, ...],
    regexes: tuple[str, ...],
    rule_lists: tuple[str, ...],
    host_limit: int | None,
    device_limit: int | None,
    staging: int,
    no_strict: bool,
    allow_empty: bool,
    ignore_mismatched: bool,
    place: Place,
    encoding: str,
    mesh: dict[str, int] | None,
    ranks: int | None,
    ranks_per_host: int | None,
    tp_plan: str | None,
    disk_speed: int | None,
    network_speed: int | None,
    probe: bool,
    explain: bool,
    as_json: bool,
) -> None:
    """Predict the memory of loading the checkpoint at PATH, and whether it fits. Nothing is loaded.

    Peaks are predicted for sluice and for the usual ways to load, and one of them is recommended. With --model the
    plan is that of `sluice load` with the same options; without, the model is assumed to have the tensors of the file.
    The exit code is 3 if the load does not fit.

    \b
    Examples:
      sluice plan model.pth
      sluice plan model.pth --model net:Net --dtype bfloat16 --explain
      sluice plan model.pth --model net:Net --device cuda:0 --host-limit 2GiB --device-limit 8GiB --probe
      sluice plan model.pth --model net:Net --mesh dp=8,tp=4 --ranks-per-host 8 --disk-speed 3GB
      sluice plan model.pth --json | jq .recommended
    """
    if (disk_speed or network_speed) and (not disk_speed or (mesh is None and ranks is None)):
        raise click.UsageError("--network-speed needs --disk-speed, and both need --mesh or --ranks")
    if factory is None and (model_args is not None or no_strict or allow_empty or place != "copy" or device == "auto"):
        raise click.UsageError("--model-args, --no-strict, --allow-empty, --place and --device auto need --model")
    check_allow_empty(allow_empty=allow_empty, no_strict=no_strict)
    rules = changes_of(renames, regexes, rule_lists)
    check_device(device)
    report = sluice.plan(
        _model(factory, model_args or "{}"),
        source_of(paths),
        device=device,
        dtype=check_dtype(dtype),
        key=key,
        rules=rules,
        strict=not no_strict,
        allow_empty=allow_empty,
        ignore_mismatched=ignore_mismatched,
        place=place,
        memory=MemoryLimits(host=host_limit, device=device_limit, staging=staging),
        encoding=encoding,
        probe=probe,
        mesh=mesh_sizes(mesh, ranks),
        ranks_per_host=ranks_per_host,
        tp_plan=parse_styles(tp_plan),
    )
    explanation = report.explain() if explain else None
    speeds = speed_lines(report.ranks, disk_speed, network_speed) if report.ranks and disk_speed else ()
    show_report(
        report,
        as_json=as_json,
        more_json={"explanation": explanation.to_json()} if explanation else None,
        more_sections=(*speeds, *(explanation.sections() if explanation else ())),
    )
    if not report.fits:
        ctx.exit(_DOES_NOT_FIT)


def _model(factory: str | None, model_args: str) -> nn.Module | None:
    if factory is None:
        return None
    arguments, named = parse_arguments(model_args)
    return build_model(find_factory(factory), factory, arguments, named)
