"""Options that ``sluice load`` and ``sluice plan`` share, as the arguments of ``load_into`` and ``plan``."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, get_args

import click
from msgspec import Struct

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


#: Parameters of a command that become its ``LoadArguments``.
_OWN = (
    *("paths", "spec", "model_args", "device", "dtype", "key", "renames", "regexes", "rule_lists", "host_limit"),
    *("staging", "device_limit", "no_strict", "allow_empty", "ignore_mismatched", "place", "encoding"),
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
            own = {name: options.pop(name) for name in _OWN}
            return command(_load_arguments(own), **options)

        with_options: Callable[..., Any] = together(paths_argument, remote_options, model_option, _OPTIONS)(checked)
        return with_options

    return add


def _load_arguments(options: dict[str, Any]) -> LoadArguments:
    """Check the options, those first that take no import of torch."""
    spec, model_args, device = options.pop("spec"), options.pop("model_args"), options["device"]
    no_strict, allow_empty = options.pop("no_strict"), options["allow_empty"]
    of_model = no_strict or allow_empty or options["place"] != "copy" or device == "auto"
    if spec is None and (model_args is not None or of_model):
        raise click.UsageError("--model-args, --no-strict, --allow-empty, --place and --device auto need --model")
    if allow_empty and not no_strict:
        raise click.UsageError("--allow-empty needs --no-strict: without it every missing name is an error")
    args, named = parse_arguments(model_args or "{}")
    factory = None if spec is None else find_factory(spec)
    source = source_of(options.pop("paths"))
    keywords = {**keywords_of(options), "strict": not no_strict}
    try:
        if device not in {None, "auto"}:
            device_name(device)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--device") from error
    return LoadArguments(factory=factory, spec=spec, args=args, named=named, source=source, keywords=keywords)
