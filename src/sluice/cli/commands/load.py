"""``sluice load``: build a model without memory, fill it, and report time and memory. ``sluice plan``: predict both."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import click

import sluice
from sluice._arguments import device_name
from sluice._options import Place
from sluice.cli.options import (
    Command,
    DTypeName,
    Size,
    build_model,
    changes_options,
    encoding_option,
    find_factory,
    keywords_of,
    memory_options,
    page_cache_option,
    parse_arguments,
    paths_argument,
    source_of,
    together,
)
from sluice.cli.output import OVER_BUDGET, output_options, progress_wanted, show_report, wrong_options
from sluice.cli.remote_options import remote_options

if TYPE_CHECKING:
    from sluice.sources.opening import Location

__all__ = ["load_command", "plan_command"]

_OPTIONS = together(
    click.option("--model-args", metavar="JSON", help="Its arguments: a JSON object by name, or an array in order."),
    click.option("--device", help="Device of the tensors: cpu, cuda:0, ...; auto fills accelerators in order."),
    click.option(
        "--dtype", type=DTypeName(), help="bf16, half, float32, ..., or auto: as in the file. Default: the model's."
    ),
    click.option("--key", help="Part of the checkpoint that holds the weights, such as model_state_dict."),
    changes_options,
    memory_options,
    click.option(
        "--device-limit", type=Size(), help="Limit on the growth of each accelerator, such as 8GiB. Default: free."
    ),
    click.option("--no-strict", is_flag=True, help="Allow missing and unexpected names."),
    click.option(
        "--allow-empty",
        is_flag=True,
        help="With --no-strict, allow that no tensor of the model is in the checkpoint.",
    ),
    click.option(
        "--ignore-mismatched", is_flag=True, help="Keep the model's own values of tensors whose shape differs."
    ),
    click.option(
        "--place",
        type=click.Choice(get_args(Place)),
        default="copy",
        show_default=True,
        help="map: unchanged CPU tensors become mapped pages of the file.",
    ),
    encoding_option,
)


def _load_options(*, required: bool, model: str) -> Callable[[Command], Command]:
    """Return a decorator that adds the options that both commands have; ``model`` is the help of ``--model``."""
    model_option = click.option("--model", "spec", required=required, metavar="MODULE:NAME", help=model)
    return together(paths_argument, remote_options, model_option, _OPTIONS)


def _arguments(options: dict[str, Any]) -> tuple[Callable[[], Any], Location | list[Location], dict[str, Any]]:
    """Return what builds the model, the source, and keyword arguments of ``load_into`` and ``plan``.

    Those options are checked first that take no import of torch.
    """
    spec, model_args, device = options.pop("spec"), options.pop("model_args"), options["device"]
    no_strict, allow_empty = options.pop("no_strict"), options["allow_empty"]
    of_model = no_strict or allow_empty or options["place"] != "copy" or device == "auto"
    if spec is None and (model_args is not None or of_model):
        raise click.UsageError("--model-args, --no-strict, --allow-empty, --place and --device auto need --model")
    if allow_empty and not no_strict:
        raise click.UsageError("--allow-empty needs --no-strict: without it every missing name is an error")
    args, named = parse_arguments(model_args or "{}")
    build = (lambda: None) if spec is None else partial(build_model, find_factory(spec), spec, args, named)
    source = source_of(options.pop("paths"))
    keywords = {**keywords_of(options), "strict": not no_strict}
    try:
        if device not in {None, "auto"}:
            device_name(device)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--device") from error
    return build, source, keywords


@click.command("load")
@_load_options(required=True, model="Class or function that builds the model.")
@page_cache_option
@click.option("--table", is_flag=True, help="List how each tensor was filled.")
@output_options()
def load_command(*, table: bool, as_json: bool, quiet: bool, **options: Any) -> None:
    """Build a model, fill it from the checkpoint at PATH, and report time and peak memory.

    MODULE:NAME is imported with the current directory on the path, and called inside sluice.empty_init(), so that its
    parameters take no memory before they are read. PATH is a file, a directory, the index file of shards, or the URL of
    one; several files are one checkpoint together. The dtype is the model's, unless --dtype names one.

    \b
    Examples:
      sluice load model.pth --model net:Net
      sluice load model.pth --model net:Net --model-args '{"width": 64}' --dtype bfloat16
      sluice load run.pt --key model_state_dict --model net:build --memory 2GiB --json
      sluice load model.pth --model net:Net --rename 'backbone.**=encoder.**' --rename 'head.*='
      sluice load model.pth --model net:Net --rules net:from_gpt2
    """
    build, source, keywords = _arguments(options)
    report = sluice.load_into(build(), source, **keywords, progress=progress_wanted(quiet=quiet))
    show_report(
        report,
        as_json=as_json,
        quiet=quiet,
        more_json={"table": report.table().to_json()} if table and as_json else None,
        more_sections=report.table().sections() if table else (),
    )


class _MeshSizes(click.ParamType[dict[str, int]]):
    """Ranks along each dimension of a mesh, such as ``dp=8,tp=4``."""

    name = "mesh"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for part in value.split(","):
            name, equals, size = part.strip().partition("=")
            if not (name and equals and size.isdecimal() and len(size) < 10) or name in sizes:
                self.fail(f"expected NAME=RANKS,..., each name once, such as dp=8,tp=4; not {value!r}", param, ctx)
            sizes[name] = int(size)
        return sizes


@click.command("plan")
@_load_options(required=False, model="What builds the model. Default: plan for the checkpoint alone.")
@click.option(
    "--mesh",
    type=_MeshSizes(),
    help="Plan for every rank of a mesh, such as dp=8,tp=4: dp is fully_shard, ddp are copies, tp is tensor "
    "parallelism. Needs --model.",
)
@click.option("--ranks-per-host", type=click.IntRange(1), help="Ranks that share a host. Default: all.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one JSON object.")
def plan_command(*, as_json: bool, **options: Any) -> None:
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
    build, source, keywords = _arguments(options)
    model = build()
    with wrong_options():
        report = sluice.plan(model, source, **keywords)
    show_report(report, as_json=as_json)
    if not report.fits:
        raise click.exceptions.Exit(OVER_BUDGET)
