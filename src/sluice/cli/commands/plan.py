"""``sluice plan``: predict the memory of a load, whether it fits, and how the usual ways to load compare."""

from __future__ import annotations

from typing import Any

import click

import sluice
from sluice.cli.failures import wrong_options
from sluice.cli.load_options import LoadArguments, load_options
from sluice.cli.views.report import show_report

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
@click.option("--ranks-per-host", type=click.IntRange(1), help="Ranks that share a host. Default: all.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one JSON object.")
@click.pass_context
def plan_command(
    ctx: click.Context,
    load: LoadArguments,
    *,
    mesh: dict[str, int] | None,
    ranks_per_host: int | None,
    as_json: bool,
) -> None:
    """Predict the memory of loading the checkpoint at PATH, and whether it fits. Nothing is loaded.

    Peaks are predicted for sluice and for the usual ways to load, and one of them is recommended. With --model the
    plan is that of `sluice load` with the same options; without, the model is assumed to have the tensors of the file.
    The exit code is 3 if the load does not fit.

    \b
    Examples:
      sluice plan model.pth
      sluice plan model.pth --model net:Net --dtype bfloat16
      sluice plan model.pth --model net:Net --device cuda:0 --host-limit 2GiB --device-limit 8GiB
      sluice plan model.pth --model net:Net --mesh dp=8,tp=4 --ranks-per-host 8
      sluice plan model.pth --json | jq .recommended
    """
    model = load.model()
    with wrong_options():
        report = sluice.plan(model, load.source, **load.keywords, mesh=mesh, ranks_per_host=ranks_per_host)
    show_report(report, as_json=as_json)
    if not report.fits:
        ctx.exit(_DOES_NOT_FIT)
