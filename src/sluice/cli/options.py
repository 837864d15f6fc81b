"""Arguments and options shared by several commands: paths, the model and its arguments, dtypes, sizes, renames."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, get_args

import click

import sluice
from sluice._arguments import dtype_argument
from sluice._dtypes import parse_dtype
from sluice._options import NO_LIMITS, TEXT_ENCODING, MemoryLimits, PageCache
from sluice._units import parse_bytes
from sluice.cli.output import Failure, describe
from sluice.cli.remote_options import Command, together, with_settings

if TYPE_CHECKING:
    import torch

    from sluice.sources.opening import Location

__all__ = [
    "Command",
    "DTypeName",
    "Size",
    "build_model",
    "changes_options",
    "encoding_option",
    "find_factory",
    "keywords_of",
    "memory_options",
    "number",
    "page_cache_option",
    "parse_arguments",
    "paths_argument",
    "source_of",
    "together",
    "weighted",
]

#: A URL, whose last parameter has a value if it has any, and a number.
_URL_WITH_WEIGHT = re.compile(r"([^?]+|.+\?.*=[^=&]*)=([-+.\deE]+)")


class DTypeName(click.ParamType[str]):
    """A real floating-point dtype as people write it, converted to torch's name."""

    name = "name"

    def __init__(self, *, auto: bool = True) -> None:
        self._auto = auto

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            name = parse_dtype(value, auto=self._auto, floats_only=True)
            dtype_argument(name)  # refuses a dtype that the installed torch does not have
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return name


class Size(click.ParamType[int]):
    """A size such as ``2GiB`` or ``2G``, or ``2GB`` (decimal), converted to bytes."""

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
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"not JSON: {error}", param_hint="--model-args") from error
    if isinstance(value, dict):
        return [], value
    if isinstance(value, list):
        return value, {}
    raise click.BadParameter("must be a JSON object or array", param_hint="--model-args")


def source_of(paths: Sequence[str]) -> Location | list[Location]:
    """Return the source that the PATH arguments name: one path, or a list of files; URLs with ``--cache``."""
    if len(set(paths)) < len(paths):
        raise click.UsageError("PATH is given twice: each file of a checkpoint is named once")
    return with_settings(paths[0]) if len(paths) == 1 else list(map(with_settings, paths))


def weighted(text: str) -> tuple[str, str]:
    """Return a path and its weight; the parameters of a URL and names of directories have signs of equality too."""
    if "?" in text or "://" in text:
        found = _URL_WITH_WEIGHT.fullmatch(text)
        return (found[1], found[2]) if found else (text, "")
    path, equals, weight = text.rpartition("=")
    return (path, weight) if equals and "/" not in weight and not os.path.lexists(text) else (text, "")


def number(text: str) -> float:
    """Return a number on the command line."""
    try:
        return float(text)
    except ValueError:
        raise click.UsageError(f"{text!r} is not a number") from None


def find_factory(spec: str) -> Callable[..., Any]:
    """Import the class or function of ``--model``; see ``_import_object``."""
    target = _import_object(spec, "--model")
    if not callable(target):
        raise click.BadParameter(f"{spec} is a {type(target).__name__}, not a class or function", param_hint="--model")
    return target  # type: ignore[no-any-return]  # callable() narrows Any to a callable of anything


def _import_object(spec: str, option: str) -> Any:
    """Import ``package.module:name`` with the current directory on the path, as ``python -m`` does."""
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        module, dot, last = spec.rpartition(".")
        hint = f"; write {module}:{last}" if dot and ":" not in spec and module and last != "py" else ""
        raise click.BadParameter(f"{spec!r} is not of the form package.module:name{hint}", param_hint=option)
    if module_name.endswith(".py") or os.sep in module_name:
        hint = module_name.removesuffix(".py").removeprefix(f".{os.sep}").replace(os.sep, ".")
        raise click.BadParameter(f"{module_name!r} is a path; write the module: {hint}:{name}", param_hint=option)
    sys.path.insert(0, os.getcwd())
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise click.BadParameter(f"no module {error.name!r}", param_hint=option) from error
        raise Failure(f"{module_name} needs the module {error.name!r}, which is not installed") from error
    except Exception as error:
        raise Failure(f"importing {module_name} raised {describe(error)}") from error
    for attribute in name.split("."):
        if not hasattr(target, attribute):
            close = get_close_matches(name, dir(target), n=1)
            hint = f"; did you mean {module_name}:{close[0]}?" if close else ""
            raise click.BadParameter(f"{module_name} has no {name!r}{hint}", param_hint=option)
        target = getattr(target, attribute)
    return target


def keywords_of(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a command as keyword arguments of the function that it calls.

    Those of ``changes_options`` become ``rules``, those of ``memory_options`` and ``--device-limit`` ``memory``.
    """
    options = dict(options)
    rules = [*_renames(options.pop("renames"), regex=False), *_renames(options.pop("regexes"), regex=True)]
    for spec in options.pop("rule_lists"):
        rules.extend(_find_rules(spec))
    host, device = options.pop("host_limit"), options.pop("device_limit", None)
    memory = MemoryLimits(host=host, device=device, staging=options.pop("staging"))
    return {**options, "rules": rules, "memory": memory}


def _renames(texts: Sequence[str], *, regex: bool) -> Iterator[sluice.rules.Rule]:
    """Yield the rules of ``--rename`` or ``--rename-regex``; each must match a name."""
    option = "--rename-regex" if regex else "--rename"
    for text in texts:
        # A regular expression can contain "=" in a look-ahead, a name of a tensor cannot: split at the last one.
        old, sign, new = text.rpartition("=") if regex else text.partition("=")
        if not (old and sign):
            raise click.BadParameter(f"{text!r} is not of the form OLD=NEW", param_hint=option)
        try:
            pattern = re.compile(old) if regex else old
            yield sluice.rules.rename(pattern, new) if new else sluice.rules.drop(pattern)
        except (ValueError, re.error) as error:
            raise click.BadParameter(f"{text!r}: {error}", param_hint=option) from error


def _find_rules(spec: str) -> list[sluice.rules.Rule]:
    """Return the rules of ``--rules``: a list of them, or what a function without arguments returns."""
    found = _import_object(spec, "--rules")
    if callable(found):
        try:
            found = found()
        except Exception as error:
            raise Failure(f"{spec} raised {describe(error)}") from error
    if not isinstance(found, (list, tuple)) or not all(isinstance(each, sluice.rules.Rule) for each in found):
        raise click.BadParameter(f"{spec} is not a list of rules of sluice.rules", param_hint="--rules")
    return list(found)


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
        raise Failure(f"{spec} raised {describe(error)}; --model-args passes arguments to it") from error
    if not isinstance(model, nn.Module):
        raise click.BadParameter(
            f"{spec} returned a {type(model).__name__}, not a torch.nn.Module", param_hint="--model"
        )
    return model


def _encoding(ctx: click.Context, param: click.Parameter, value: str) -> str:
    from sluice.checkpoint.open_checkpoint import check_encoding  # not needed for --help

    try:
        return check_encoding(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


paths_argument = click.argument("paths", nargs=-1, required=True, type=click.Path(), metavar="PATH...")

encoding_option = click.option(
    "--encoding",
    callback=_encoding,
    default=TEXT_ENCODING,
    show_default=True,
    help="Encoding of text that Python 2 wrote, such as latin1; bytes keeps it as bytes.",
)

page_cache_option = click.option(
    "--page-cache",
    type=click.Choice(get_args(PageCache)),
    default="auto",
    show_default=True,
    help="keep: leave what is read in the page cache. bypass: do not change the cache.",
)

#: Options that change names; see ``keywords_of``.
changes_options = together(
    click.option(
        "--rename",
        "renames",
        multiple=True,
        metavar="OLD=NEW",
        help="Rename tensors; * is one part of a name, ** any text; OLD= drops it.",
    ),
    click.option(
        "--rename-regex",
        "regexes",
        multiple=True,
        metavar="REGEX=NEW",
        help=r"The same, for whole names; \1 is a group.",
    ),
    click.option(
        "--rules",
        "rule_lists",
        multiple=True,
        metavar="MODULE:NAME",
        help="A list of sluice.rules in a Python module, or a function that returns one; applied after --rename.",
    ),
)

#: Options that limit memory; see ``keywords_of``.
memory_options = together(
    click.option(
        "--memory",
        "--host-limit",
        "host_limit",
        type=Size(),
        help="Limit on the growth of host memory, such as 4GiB. Default: control group or free memory.",
    ),
    click.option(
        "--staging",
        type=Size(),
        default=NO_LIMITS.staging,
        show_default=True,
        help="Size of the staging buffers.",
    ),
)
