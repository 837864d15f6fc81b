"""``--cache`` and ``--cache-bytes``: the cache directory of the URLs that a command reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sluice._units import parse_bytes

if TYPE_CHECKING:
    from sluice.sources.opening import Location

__all__ = ["CACHE_VARIABLE", "cache_options", "chosen_cache", "with_cache"]

#: Variable that names the directory if ``--cache`` does not.
CACHE_VARIABLE = "SLUICE_CACHE"

#: Keys of the values in the context of a command.
_CACHE, _BYTES = "sluice.cache", "sluice.cache_bytes"

_Command = TypeVar("_Command", bound=Callable[..., Any])


def cache_options(command: _Command) -> _Command:
    """Add the options to a command. Their values stay in its context, from which ``with_cache`` takes them."""
    directory = click.option(
        "--cache",
        metavar="DIR",
        envvar=CACHE_VARIABLE,
        show_envvar=True,
        expose_value=False,
        callback=_keep_directory,
        help="Keep the bytes of URLs in this directory, and read them there.",
    )
    bound = click.option(
        "--cache-bytes",
        metavar="SIZE",
        expose_value=False,
        callback=_keep_bytes,
        help="Most bytes of that directory. Default: 50GiB.",
    )
    return directory(bound(command))


def chosen_cache() -> str | None:
    """Return the directory of ``--cache`` or its variable; None without.

    Raises:
        click.UsageError: ``--cache-bytes`` was given without a directory.
    """
    values = click.get_current_context().meta
    directory: str | None = values.get(_CACHE)
    if directory is None and values.get(_BYTES) is not None:
        raise click.UsageError(f"--cache-bytes needs --cache, or the variable {CACHE_VARIABLE}")
    return directory


def with_cache(path: str) -> Location:
    """Return a path as it is read: a URL with the chosen cache, a local path unchanged."""
    directory = chosen_cache()
    if directory is None:
        return path
    # Here, not above: most commands have no cache.
    from sluice.sources.opening import is_remote
    from sluice.sources.remote.location import Remote

    if not is_remote(path):
        return path
    return Remote(path, cache=directory, cache_bytes=click.get_current_context().meta.get(_BYTES))


def _keep_directory(ctx: click.Context, param: click.Parameter, value: str | None) -> None:  # noqa: ARG001  click's
    ctx.meta[_CACHE] = value or None


def _keep_bytes(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    try:
        ctx.meta[_BYTES] = None if value is None else parse_bytes(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None
