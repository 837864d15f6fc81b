"""``sluice prefetch``: fill a cache directory with the files of a remote checkpoint."""

from __future__ import annotations

import click

from sluice.cli.options import encoding_option, source_of
from sluice.cli.remote_options import CACHE_VARIABLE, chosen_cache, remote_options
from sluice.cli.terminal import progress_wanted
from sluice.cli.views.report import output_options, show_report

__all__ = ["prefetch_command"]


@click.command("prefetch")
@click.argument("urls", nargs=-1, required=True, metavar="URL...")
@remote_options
@encoding_option
@output_options()
def prefetch_command(urls: tuple[str, ...], *, encoding: str, as_json: bool, quiet: bool) -> None:
    """Fill a cache directory with the files of the checkpoint at URL, so that loads read them there.

    URL is a file, a directory or the index file of shards; several files are one checkpoint together. Loads with the
    same --cache then make one request for each file, which tells whether it is still the same version. What is cached
    already is not requested again, so that a prefetch that was interrupted continues. Other objects are removed if the
    directory would exceed --cache-bytes.

    \b
    Examples:
      sluice prefetch s3://bucket/model/ --cache /scratch/cache
      sluice load s3://bucket/model/ --cache /scratch/cache --model net:Net
      sluice prefetch hf://gpt2/model.safetensors --cache /scratch/cache --cache-bytes 200GiB

    \b
    Exit codes:
      0    all files are local
      1    the checkpoint or a server is at fault, or not all of it could be cached
      2    the command line is wrong
      130  interrupted

    \b
    The JSON object:
      source, cache, seconds
      files        [{path, nbytes, requested_bytes, requests, problem}]; problem is why
                   not all of the file is cached, or null
      complete     whether all files are local
    """
    # Here, not above: not needed for --help.
    from sluice.loading.prefetch import prefetch
    from sluice.sources.opening import is_remote

    cache = chosen_cache()
    if cache is None:
        raise click.UsageError(f"the directory is missing: give --cache, or set the variable {CACHE_VARIABLE}")
    local = next((url for url in urls if not is_remote(url)), None)
    if local is not None:
        raise click.UsageError(f"{local!r} is not a URL: local files need no cache")
    report = prefetch(source_of(urls), cache, encoding=encoding, progress=progress_wanted(quiet=quiet))
    show_report(report, as_json=as_json, quiet=quiet)
    if not report.complete:
        raise click.exceptions.Exit(1)
