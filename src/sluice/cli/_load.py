"""``sluice load``: build a model without memory, fill it, and print what that took."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

import sluice
from sluice._dtypes import ITEM_BYTES, is_castable, torch_dtype
from sluice._options import MemoryLimits, PageCache, Place
from sluice._units import parse_bytes
from sluice.cli._failures import Failure, describe

if TYPE_CHECKING:
    import torch

__all__ = ["load_command"]

_DTYPES = ("auto", *(name for name in ITEM_BYTES if is_castable(name)))


class _Size(click.ParamType[int]):
    """A size such as ``2GiB``, as bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_bytes(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command("load")
@click.argument("path", type=click.Path())
@click.option(
    "--model", "factory", required=True, metavar="MODULE:NAME", help="What builds the model: class or function."
)
@click.option("--model-args", metavar="JSON", default="{}", help="Its arguments: an object by name, an array in order.")
@click.option(
    "--device",
    help="Where the tensors go: cpu, cuda:0, ...; auto: fill accelerators in order. Default: as in the model.",
)
@click.option(
    "--dtype", type=click.Choice(_DTYPES), metavar="NAME", help="float32, bfloat16, ... or auto: as in the file."
)
@click.option("--key", help="Part of the checkpoint that holds the weights, such as model_state_dict.")
@click.option("--memory", type=_Size(), help="Limit on the growth of host memory, such as 4GiB.")
@click.option("--staging", type=_Size(), default=MemoryLimits().staging, show_default=True, help="Size of the gate.")
@click.option("--no-strict", is_flag=True, help="Allow names that are missing in the file or in the model.")
@click.option(
    "--page-cache",
    type=click.Choice(get_args(PageCache)),
    default="auto",
    show_default=True,
    help="keep: leave the file cached. bypass: leave the cache alone.",
)
@click.option(
    "--place",
    type=click.Choice(get_args(Place)),
    default="copy",
    show_default=True,
    help="map: tensors on the CPU that need no change are pages of the file.",
)
@click.option("--table", is_flag=True, help="Say of each tensor how it was filled.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
def load_command(
    path: str,
    *,
    factory: str,
    model_args: str,
    device: str | None,
    dtype: str | None,
    key: str | None,
    memory: int | None,
    staging: int,
    no_strict: bool,
    page_cache: PageCache,
    place: Place,
    table: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Build a model, fill it from the checkpoint at PATH, and report time and peak memory.

    The model is built by MODULE:NAME, which is imported with the current directory on the path, inside
    sluice.empty_init(): its parameters take no memory until they are read.

    \b
    Examples:
      sluice load model.pth --model net:Net
      sluice load model.pth --model net:Net --model-args '{"width": 64}' --dtype bfloat16
      sluice load run.pt --key model_state_dict --model net:build --memory 2GiB --json
    """
    arguments, named = _parse_arguments(model_args)
    build = _find_factory(factory)
    if device not in {None, "auto"}:
        _check_device(device)
    model = _build_model(build, factory, arguments, named)
    report = sluice.load_into(
        model,
        path,
        device=device,
        dtype=_parse_dtype(dtype),
        key=key,
        strict=not no_strict,
        memory=MemoryLimits(host=memory, staging=staging),
        page_cache=page_cache,
        place=place,
        progress=sys.stderr.isatty() and not quiet,
    )
    if as_json:
        rows = {"table": report.table().to_json()} if table else {}
        click.echo(json.dumps(report.to_json() | rows))
    elif not quiet:
        # Here, not above: rich takes 50 ms to import, and only tables need it.
        from sluice.cli._render import print_report

        print_report(report)
        if table:
            click.echo(f"\n{report.table()}")


def _parse_arguments(text: str) -> tuple[list[Any], dict[str, Any]]:
    """Return positional and named arguments out of the JSON of ``--model-args``."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"not JSON: {error}", param_hint="--model-args") from error
    if isinstance(value, dict):
        return [], value
    if isinstance(value, list):
        return value, {}
    raise click.BadParameter("must be a JSON object or array", param_hint="--model-args")


def _parse_dtype(name: str | None) -> torch.dtype | Literal["auto"] | None:
    if name is None:
        return None
    if name == "auto":
        return "auto"
    try:
        dtype: torch.dtype = torch_dtype(name)
    except AttributeError as error:
        raise click.BadParameter(f"the installed torch has no {name}", param_hint="--dtype") from error
    return dtype


def _check_device(device: str) -> None:
    """Refuse a device that torch does not know or cannot use, before anything is built."""
    import torch

    try:
        useless = torch.empty(0, device=device).is_meta
    # A torch without CUDA says so with an AssertionError.
    except (RuntimeError, AssertionError) as error:
        raise click.BadParameter(f"{device!r} cannot be used: {error}", param_hint="--device") from error
    if useless:
        raise click.BadParameter("the meta device holds no weights", param_hint="--device")


def _find_factory(spec: str) -> Callable[..., Any]:
    """Import ``package.module:name`` with the current directory on the path, as ``python -m`` does."""
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise click.BadParameter(f"{spec!r} is not of the form package.module:name", param_hint="--model")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise click.BadParameter(f"there is no module {error.name!r}", param_hint="--model") from error
        raise Failure(f"{module_name} needs the module {error.name!r}, which is not installed") from error
    except Exception as error:
        raise Failure(f"importing {module_name} raised {describe(error)}") from error
    for attribute in name.split("."):
        found = getattr(found, attribute, None)
    if not callable(found):
        raise click.BadParameter(f"{module_name} has no class or function {name!r}", param_hint="--model")
    return found  # type: ignore[no-any-return]  # callable() narrows Any to a callable of anything


def _build_model(build: Callable[..., Any], spec: str, arguments: list[Any], named: dict[str, Any]) -> torch.nn.Module:
    # Here, not above: torch takes a second to import, and wrong options should be refused before that.
    from torch import nn

    try:
        with sluice.empty_init():
            model = build(*arguments, **named)
    except sluice.SluiceError:
        raise
    except Exception as error:
        raise Failure(f"{spec} raised {describe(error)}") from error
    if not isinstance(model, nn.Module):
        raise click.BadParameter(
            f"{spec} returned a {type(model).__name__}, not a torch.nn.Module", param_hint="--model"
        )
    return model
