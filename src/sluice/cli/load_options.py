"""Options that ``sluice load`` and ``sluice plan`` share, as the arguments of ``load_into`` and ``plan``."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, get_args

import click
from msgspec import Struct

from sluice._arguments import device_name
from sluice._options import MemoryLimits, Place
from sluice.cli.options import (
    Command,
    DTypeName,
    Size,
    build_model,
    changes_of,
    changes_options,
    check_dtype,
    encoding_option,
    find_factory,
    memory_options,
    parse_arguments,
    paths_argument,
    source_of,
    together,
)
from sluice.cli.remote_options import remote_options

if TYPE_CHECKING:
    from torch import nn

    from sluice.sources.opening import Location

__all__ = ["LoadArguments", "load_options"]


class LoadArguments(Struct, frozen=True, kw_only=True):
    """Model, source and arguments of a load."""

    #: The class or function of ``--model``, and its text; None without.
    factory: Callable[..., Any] | None
    spec: str | None
    #: Its positional and keyword arguments.
    args: list[Any]
    named: dict[str, Any]
    #: The checkpoint.
    source: Location | list[Location]
    #: Keyword arguments of ``load_into`` and ``plan``.
    keywords: dict[str, Any]

    def model(self) -> nn.Module | None:
        """Build the model of ``--model``; None without."""
        if self.factory is None or self.spec is None:
            return None
        return build_model(self.factory, self.spec, self.args, self.named)


_OPTIONS = together(
    click.option("--model-args", metavar="JSON", help="Its arguments: a JSON object by name, or an array in order."),
    click.option("--device", help="Device of the tensors: cpu, cuda:0, ...; auto fills accelerators in order."),
    click.option(
        "--dtype", type=DTypeName(), help="bf16, half, float32, ..., or auto: as in the file. Default: the model's."
    ),
    click.option("--key", help="Part of the checkpoint that holds the weights, such as model_state_dict."),
    changes_options,
    memory_options,
    click.option("--device-limit", type=Size(), help="The same of each accelerator. Default: free memory."),
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


def load_options(*, required: bool, model: str) -> Callable[[Command], Callable[..., Any]]:
    """Return a decorator that adds the options, and passes ``LoadArguments`` to the command.

    Args:
        required: Whether ``--model`` is required.
        model: Help of ``--model``.
    """
    model_option = click.option("--model", "spec", required=required, metavar="MODULE:NAME", help=model)

    def add(command: Command) -> Callable[..., Any]:
        @wraps(command)
        def checked(**options: Any) -> Any:
            own = {name: options.pop(name) for name in _load_arguments.__annotations__ if name != "return"}
            return command(_load_arguments(**own), **options)

        return together(paths_argument, remote_options, model_option, _OPTIONS)(checked)

    return add


def _load_arguments(
    *,
    paths: tuple[str, ...],
    spec: str | None,
    model_args: str | None,
    device: str | None,
    dtype: str | None,
    key: str | None,
    renames: tuple[str, ...],
    regexes: tuple[str, ...],
    rule_lists: tuple[str, ...],
    host_limit: int | None,
    staging: int,
    device_limit: int | None,
    no_strict: bool,
    allow_empty: bool,
    ignore_mismatched: bool,
    place: Place,
    encoding: str,
) -> LoadArguments:
    """Check the options, those first that take no import of torch."""
    if spec is None and (model_args is not None or no_strict or allow_empty or place != "copy" or device == "auto"):
        raise click.UsageError("--model-args, --no-strict, --allow-empty, --place and --device auto need --model")
    if allow_empty and not no_strict:
        raise click.UsageError("--allow-empty needs --no-strict: without it every missing name is an error")
    args, named = parse_arguments(model_args or "{}")
    factory = None if spec is None else find_factory(spec)
    rules = changes_of(renames, regexes, rule_lists)
    try:
        if device not in {None, "auto"}:
            device_name(device)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--device") from error
    return LoadArguments(
        factory=factory,
        spec=spec,
        args=args,
        named=named,
        source=source_of(paths),
        keywords={
            "device": device,
            "dtype": check_dtype(dtype),
            "key": key,
            "rules": rules,
            "strict": not no_strict,
            "allow_empty": allow_empty,
            "ignore_mismatched": ignore_mismatched,
            "place": place,
            "memory": MemoryLimits(host=host_limit, device=device_limit, staging=staging),
            "encoding": encoding,
        },
    )
