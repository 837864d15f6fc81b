"""Options of the commands that read checkpoints for the URLs among them: the cache, and settings of requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sluice._units import parse_bytes

if TYPE_CHECKING:
    from sluice.sources.opening import Location

__all__ = ["Command", "remote_options", "together", "with_settings"]

#: Key of the arguments of ``Remote`` in the context of a command.
_SETTINGS = "sluice.remote"

Command = TypeVar("Command", bound=Callable[..., Any])


def together(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return a decorator that adds several options, which the help shows in this order."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def with_settings(path: str) -> Location:
    """Return a path as it is read: a URL with the chosen cache and settings, a local path unchanged."""
    settings = click.get_current_context().meta.get(_SETTINGS, {})
    if "cache_bytes" in settings and "cache" not in settings:
        raise click.UsageError("--cache-bytes needs --cache, or the variable SLUICE_CACHE")
    if not settings:
        return path
    # Here, not above: most commands have no such options.
    from sluice.sources.opening import is_remote
    from sluice.sources.remote.location import Remote

    if not is_remote(path):
        return path
    try:
        return Remote(path, **settings)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _header(texts: tuple[str, ...]) -> dict[str, str]:
    parts = [text.partition(":") for text in texts]
    if not all(name.strip() and colon for name, colon, _ in parts):
        raise ValueError("a header has the form NAME:VALUE")  # its text may be a credential
    return {name.strip(): value.strip() for name, _, value in parts}


def _option(name: str, *, convert: Callable[[Any], Any] = lambda value: value, **settings: Any) -> Any:
    """Return an option whose value becomes the argument ``name`` of ``Remote``."""

    def keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value in (None, "", ()):
            return
        try:
            ctx.meta.setdefault(_SETTINGS, {})[name] = convert(value)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from None

    flag = {"headers": "--header"}.get(name, "--" + name.replace("_", "-"))
    return click.option(flag, expose_value=False, callback=keep, **settings)


#: Adds the options to a command. Their values stay in its context, from which ``with_settings`` takes them.
remote_options = together(
    _option(
        "cache",
        metavar="DIR",
        envvar="SLUICE_CACHE",
        show_envvar=True,
        help="Keep the bytes of URLs in this directory, and read them there.",
    ),
    _option("cache_bytes", convert=parse_bytes, metavar="SIZE", help="Most bytes of that directory. Default: 50GiB."),
    _option("connections", type=click.IntRange(min=1), metavar="N", help="Requests for one URL in flight at once."),
    _option(
        "headers",
        convert=_header,
        multiple=True,
        metavar="NAME:VALUE",
        help="Header of each request for URLs; may be repeated.",
    ),
    _option(
        "timeout",
        type=click.FloatRange(min=0, min_open=True),
        metavar="SECONDS",
        help="Seconds without a byte after which a request counts as failed.",
    ),
    _option(
        "verify",
        convert=lambda text: text != "no" and text,
        metavar="FILE|no",
        help="Trusted certificates of servers, or no check at all.",
    ),
    _option("cert", metavar="FILE", help="Client certificate and its key, in PEM."),
)
