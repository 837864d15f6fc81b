"""Options of ``sluice plan`` that describe the ranks of a mesh."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, TypeVar

import click

from sluice._units import format_bytes
from sluice.cli.options import Size
from sluice.reports.ranks import RanksPlan

__all__ = ["mesh_options", "mesh_sizes", "parse_styles", "speed_lines"]

_Command = TypeVar("_Command", bound=Callable[..., Any])


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


_STYLES = click.option(
    "--tp-plan", metavar="JSON", help="Style by pattern of module names. Default: the model's tp_plan."
)


def _together(*options: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    """Return a decorator that adds several options, which the help shows in this order."""

    def add(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


#: Adds the options of ``sluice plan``.
mesh_options = _together(
    click.option(
        "--mesh",
        type=MeshSizes(),
        help="Plan for every rank of a mesh, such as dp=8,tp=4: dp is fully_shard, ddp are copies, tp is tensor "
        "parallelism. Needs --model.",
    ),
    click.option("--ranks", type=click.IntRange(1), help="Number of ranks; alone the same as --mesh dp=RANKS."),
    click.option("--ranks-per-host", type=click.IntRange(1), help="Ranks that share a host. Default: all."),
    _STYLES,
    click.option("--disk-speed", type=Size(), help="Bytes that one host reads in a second, such as 3GB."),
    click.option("--network-speed", type=Size(), help="Bytes that shared storage sends to all hosts in a second."),
)


def mesh_sizes(mesh: dict[str, int] | None, ranks: int | None) -> dict[str, int] | None:
    """Return the mesh of ``--mesh`` and ``--ranks``; None without both."""
    if mesh is None:
        return None if ranks is None else {"dp": ranks}
    if ranks not in {None, prod(mesh.values())}:
        raise click.BadParameter(f"the mesh has {prod(mesh.values())} ranks, not {ranks}", param_hint="--ranks")
    return mesh


def parse_styles(text: str | None) -> dict[str, str] | None:
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


def speed_lines(ranks: RanksPlan, disk: int, network: int | None) -> Iterator[str]:
    """Yield the seconds that the reads of all ranks take at given speeds."""
    at = f"{format_bytes(disk)}/s on each host"
    if network is not None:
        at += f" and {format_bytes(network)}/s from storage that all share"
    yield f"reads at {at}: {ranks.seconds(disk=disk, network=network):.1f} s"
