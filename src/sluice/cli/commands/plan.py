"""``sluice plan``: predict the memory of a load, whether it fits, and how the usual ways to load compare."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from typing import Any

import click

import sluice
from sluice._units import format_bytes
from sluice.cli.load_options import LoadArguments, load_options
from sluice.cli.options import Size
from sluice.cli.views.report import show_report
from sluice.reports.ranks import RanksPlan

__all__ = ["plan_command"]

#: Exit code of a plan that does not fit, as after a load.
_DOES_NOT_FIT = 3


class MeshSizes(click.ParamType[dict[str, int]]):
    """Ranks along each dimension of a mesh, such as ``dp=8,tp=4``."""

    name = "mesh"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for part in value.split(","):
            name, equals, size = part.strip().partition("=")
            if not (name and equals and size.isdecimal()) or name in sizes:
                self.fail(f"expected NAME=RANKS,..., each name once, such as dp=8,tp=4; not {value!r}", param, ctx)
            sizes[name] = int(size)
        return sizes


@click.command("plan")
@load_options(required=False, model="What builds the model. Default: plan for the checkpoint alone.")
@click.option(
    "--mesh",
    type=MeshSizes(),
    help="Plan for every rank of a mesh, such as dp=8,tp=4: dp is fully_shard, ddp are copies, tp is tensor "
    "parallelism. Needs --model.",
)
@click.option("--ranks", type=click.IntRange(1), help="Number of ranks; alone the same as --mesh dp=RANKS.")
@click.option("--ranks-per-host", type=click.IntRange(1), help="Ranks that share a host. Default: all.")
@click.option("--tp-plan", metavar="JSON", help="Style by pattern of module names. Default: the model's tp_plan.")
@click.option("--disk-speed", type=Size(), help="Bytes that one host reads in a second, such as 3GB.")
@click.option("--network-speed", type=Size(), help="Bytes that shared storage sends to all hosts in a second.")
@click.option("--probe", is_flag=True, help="Load up to 128 MiB to estimate the time.")
@click.option("--explain", is_flag=True, help="List how each group of tensors would be read, staged and cast.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one JSON object.")
@click.pass_context
def plan_command(
    ctx: click.Context,
    load: LoadArguments,
    *,
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
    report = sluice.plan(
        load.model(),
        load.source,
        **load.keywords,
        probe=probe,
        mesh=_mesh_sizes(mesh, ranks),
        ranks_per_host=ranks_per_host,
        tp_plan=_parse_styles(tp_plan),
    )
    explanation = report.explain() if explain else None
    speeds = _speed_lines(report.ranks, disk_speed, network_speed) if report.ranks and disk_speed else ()
    show_report(
        report,
        as_json=as_json,
        more_json={"explanation": explanation.to_json()} if explanation else None,
        more_sections=(*speeds, *(explanation.sections() if explanation else ())),
    )
    if not report.fits:
        ctx.exit(_DOES_NOT_FIT)


def _mesh_sizes(mesh: dict[str, int] | None, ranks: int | None) -> dict[str, int] | None:
    """Return the mesh of ``--mesh`` and ``--ranks``; None without both."""
    if mesh is None:
        return None if ranks is None else {"dp": ranks}
    if ranks not in {None, prod(mesh.values())}:
        raise click.BadParameter(f"the mesh has {prod(mesh.values())} ranks, not {ranks}", param_hint="--ranks")
    return mesh


def _parse_styles(text: str | None) -> dict[str, str] | None:
    """Return the tensor-parallel plan in the JSON of ``--tp-plan``."""
    if text is None:
        return None
    try:
        styles = json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"not JSON: {error}", param_hint="--tp-plan") from error
    if not isinstance(styles, dict) or not all(isinstance(style, str) for style in styles.values()):
        raise click.BadParameter("must be a JSON object from patterns to styles", param_hint="--tp-plan")
    return styles


def _speed_lines(ranks: RanksPlan, disk: int, network: int | None) -> Iterator[str]:
    """Yield the seconds that the reads of all ranks take at given speeds."""
    at = f"{format_bytes(disk)}/s on each host"
    if network is not None:
        at += f" and {format_bytes(network)}/s from storage that all share"
    yield f"reads at {at}: {ranks.seconds(disk=disk, network=network):.1f} s"
