"""``sluice share``: build and hold, list or drop the copies that all processes of a host share."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import click

import sluice
from sluice._units import format_bytes
from sluice.cli.options import DTypeName, Size, changes_options, encoding_option, keywords_of, memory_options, source_of
from sluice.cli.output import Failure, progress_wanted
from sluice.cli.remote_options import remote_options
from sluice.sharing import store

__all__ = ["share_command"]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Duration(click.ParamType[float]):
    """A duration such as ``90s``, ``10m``, ``2h`` or ``7d``, converted to seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = re.fullmatch(r"(\d+)([smhd])", str(value))
        if found is None:
            self.fail(f"{value!r} is not a duration such as 90s, 10m, 2h or 7d", param, ctx)
        return float(int(found[1]) * _UNITS[found[2]])


@click.command("share")
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@remote_options
@click.option("--key", help="Part of the checkpoint, such as model_state_dict. Default: the only state dict.")
@click.option("--dtype", type=DTypeName(), help="bf16, half, float32, ... for real floats. Default: auto, no cast.")
@changes_options
@click.option("--keep", type=Duration(), help="Hold the copy this long, such as 10m; then drop it unless it is used.")
@click.option("--max-bytes", type=Size(), help="Most bytes of all copies. Default: half of the file system.")
@click.option("--directory", type=click.Path(), help="Where copies are. Default: SLUICE_SHARED_DIR, or /dev/shm.")
@click.option("--list", "listing", is_flag=True, help="List the copies.")
@click.option("--drop", metavar="KEY", help="Drop the copy with this key, unless a process uses it.")
@memory_options
@encoding_option
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
def share_command(
    paths: tuple[str, ...],
    *,
    directory: str | None,
    keep: float | None,
    listing: bool,
    drop: str | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Find or build one copy of the checkpoint at PATH in shared memory, for all processes of this host.

    ``sluice.load_into(model, PATH, place="shared")`` with the same arguments finds it, and maps its pages (below
    --directory only if that is SLUICE_SHARED_DIR of that process too). Without --keep the command ends at once, and
    the copy stays until it is dropped or another one needs its room.

    \b
    Examples:
      sluice share model.pth --dtype bf16
      sluice share model.pth --dtype bf16 --keep 7d
      sluice share --list
      sluice share --drop 5096b1f873d4b910b2cc40b5f6d8ee52

    \b
    Exit codes:
      0    the copy is there, or is dropped
      1    the checkpoint or the directory is at fault, or the copy to drop is used or does not exist
      2    the command line is wrong
      3    there is no room for the copy
      130  interrupted
    """
    if sum([bool(paths), listing, drop is not None]) != 1:
        raise click.UsageError("give PATH, --list or --drop KEY")
    if not paths:
        _list_or_drop(store.open_store(directory), drop)
        return
    progress = progress_wanted(quiet=quiet)
    copy = sluice.shared(source_of(paths), directory=directory, progress=progress, **keywords_of(options))
    if not quiet:
        click.echo(f"{copy.key} {'built' if copy.built else 'found'}, {format_bytes(copy.nbytes)}: {copy.path}")
    if keep is not None:
        try:
            time.sleep(keep)
        finally:
            copy.close()
            store.drop(store.open_store(directory), copy.key)


def _list_or_drop(directory: Path, key: str | None) -> None:
    found = store.copies(directory)
    if key is None:
        for copy in found:
            used = "in use" if copy.in_use else f"unused for {time.time() - copy.used:.0f} s"
            click.echo(f"{copy.key}  {format_bytes(copy.nbytes)}  {used}")
    elif key not in {copy.key for copy in found}:
        raise Failure(f"there is no copy {key} in {directory}")
    elif not store.drop(directory, key):
        raise Failure(f"the copy {key} is in use: it can be dropped when the last process that uses it has ended")
