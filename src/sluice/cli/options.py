"""Options shared by several commands: the model and its arguments, dtypes, devices and sizes."""

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
from sluice._options import MemoryLimits, Place
from sluice._units import parse_bytes
from sluice.cli.failures import Failure, describe

if TYPE_CHECKING:
    import torch

__all__ = [
    "DTYPES",
    "Size",
    "build_model",
    "check_device",
    "dtype_option",
    "find_factory",
    "key_option",
    "no_strict_option",
    "parse_arguments",
    "parse_dtype",
    "place_option",
    "staging_option",
]

#: Choices of ``--dtype``.
DTYPES = ("auto", *(name for name in ITEM_BYTES if is_castable(name)))


class Size(click.ParamType[int]):
    """A size such as ``2GiB``, converted to bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_bytes(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def parse_arguments(text: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and keyword arguments in the JSON of ``--model-args``."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"not JSON: {error}", param_hint="--model-args") from error
    if isinstance(value, dict):
        return [], value
    if isinstance(value, list):
        return value, {}
    raise click.BadParameter("must be a JSON object or array", param_hint="--model-args")


def parse_dtype(name: str | None) -> torch.dtype | Literal["auto"] | None:
    """Return the dtype of a ``--dtype`` option; None if it was not given."""
    if name is None:
        return None
    if name == "auto":
        return "auto"
    try:
        dtype: torch.dtype = torch_dtype(name)
    except sluice.UnsupportedError as error:
        raise click.BadParameter(f"the installed torch has no {name}", param_hint="--dtype") from error
    return dtype


def check_device(device: str) -> None:
    """Refuse a device that torch cannot use, before a model is built."""
    import torch

    try:
        is_meta = torch.empty(0, device=device).is_meta
    # A torch without CUDA raises an AssertionError.
    except (RuntimeError, AssertionError) as error:
        raise click.BadParameter(f"{device!r} cannot be used: {error}", param_hint="--device") from error
    if is_meta:
        raise click.BadParameter("the meta device holds no weights", param_hint="--device")


def find_factory(spec: str) -> Callable[..., Any]:
    """Import ``package.module:name`` with the current directory on the path, as ``python -m`` does."""
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise click.BadParameter(f"{spec!r} is not of the form package.module:name", param_hint="--model")
    sys.path.insert(0, os.getcwd())
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise click.BadParameter(f"no module {error.name!r}", param_hint="--model") from error
        raise Failure(f"{module_name} needs the module {error.name!r}, which is not installed") from error
    except Exception as error:
        raise Failure(f"importing {module_name} raised {describe(error)}") from error
    for attribute in name.split("."):
        target = getattr(target, attribute, None)
    if not callable(target):
        raise click.BadParameter(f"{module_name} has no class or function {name!r}", param_hint="--model")
    return target  # type: ignore[no-any-return]  # callable() narrows Any to a callable of anything


def build_model(build: Callable[..., Any], spec: str, arguments: list[Any], named: dict[str, Any]) -> torch.nn.Module:
    """Build the model of ``--model`` inside ``empty_init``, and check that it is a module."""
    # Here, not above: torch takes a second to import, and wrong options are refused before.
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


dtype_option = click.option(
    "--dtype", type=click.Choice(DTYPES), metavar="NAME", help="float32, bfloat16, ... or auto: as in the file."
)

staging_option = click.option(
    "--staging",
    type=Size(),
    default=MemoryLimits().staging,
    show_default=True,
    help="Size of the staging buffers.",
)

key_option = click.option("--key", help="Part of the checkpoint that holds the weights, such as model_state_dict.")

no_strict_option = click.option("--no-strict", is_flag=True, help="Allow missing and unexpected names.")

place_option = click.option(
    "--place",
    type=click.Choice(get_args(Place)),
    default="copy",
    show_default=True,
    help="map: unchanged CPU tensors become mapped pages of the file.",
)
