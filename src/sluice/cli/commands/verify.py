"""``sluice verify``: read all of a checkpoint once and say what is damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import get_args

import click

import sluice
from sluice._errors import SluiceError
from sluice.cli.failures import Failure
from sluice.cli.terminal import allow_replacing, progress_wanted
from sluice.formats.manifest import HashAlgorithm

__all__ = ["Unreadable", "unreadable", "verify_command"]


class Unreadable(Failure):
    """There is no answer, because something could not be read or written."""

    exit_code = 2


@contextmanager
def unreadable() -> Iterator[None]:
    """Keep exit code 1 for the answer: whatever stands in the way of one is 2."""
    try:
        yield
    except SluiceError as error:
        raise Unreadable(str(error)) from error
    except ImportError as error:
        raise Unreadable(str(error)) from error


@click.command("verify")
@click.argument("path", type=click.Path())
@click.option("--manifest", metavar="FILE", help="Compare every tensor with the dtype, shape and hash that FILE says.")
@click.option("--write-manifest", metavar="FILE", help="Hash every tensor, and write FILE when nothing is wrong.")
@click.option(
    "--hash",
    "algorithm",
    type=click.Choice(get_args(HashAlgorithm)),
    help="Hash for --write-manifest; sha256 unless you say otherwise. xxh3_128 is faster and only finds damage.",
)
@click.option("--force", is_flag=True, help="Let --write-manifest replace a file without asking.")
@click.option("--nan", is_flag=True, help="Count the elements of each tensor that are NaN or infinite.")
@click.option("--strict", is_flag=True, help="Exit with 1 for warnings too.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors; the exit code is the answer.")
def verify_command(
    path: str,
    *,
    manifest: str | None,
    write_manifest: str | None,
    algorithm: HashAlgorithm | None,
    force: bool,
    nan: bool,
    strict: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Read all of the checkpoint at PATH once and say what is damaged.

    PATH is a file, a directory or the index file of shards. Checked are the structure, the CRC-32 of every record of
    torch.save files, a shard index against its shards, the indices of sparse tensors, and that every byte can be read.
    safetensors files hold no checksums: there only a manifest finds a changed byte. sluice save writes one with
    manifest=, this command with --write-manifest. Memory stays below 100 MiB, whatever the size of the file.

    \b
    Examples:
      sluice verify model.pth
      sluice verify model.safetensors --write-manifest model.manifest.json
      sluice verify model.safetensors --manifest model.manifest.json
      sluice verify model.pth --nan --json | jq .non_finite

    \b
    Exit codes:
      0    nothing is wrong
      1    something is damaged, missing, too much or not as the manifest says; with --strict
           also for a warning: the shard index leaves tensors of its shards out, or has
           another total_size, which nothing reads
      2    PATH or the manifest cannot be read or written, the manifest to write exists
           and nobody said --force, or the command line is wrong
      130  interrupted

    \b
    The JSON object:
      ok                whether nothing is wrong
      source, format, warnings, notes
      problems          [{kind, problem, file, tensor, offset, expected, found}]; kind is
                        structure, truncated, incomplete, checksum, unreadable, or against
                        a manifest missing, extra, dtype, shape, layout, hash, unsupported
      tensors, nbytes, seconds
      checksums         number of CRC-32s that were compared
      without_checksum  names of records whose writer recorded none
      algorithm         name of the hash, or null
      hashes            {name: {dtype, shape, layout, hash}}
      non_finite        {name: {nan, inf}}, with --nan
      unsupported       names of tensors that sluice does not read
    """
    if manifest and write_manifest:
        raise click.UsageError("--manifest compares and --write-manifest makes the truth: choose one")
    if algorithm and not write_manifest:
        raise click.UsageError("--hash goes with --write-manifest; --manifest says its own")
    if write_manifest and os.path.realpath(write_manifest) == os.path.realpath(path):
        raise click.UsageError("the manifest needs a name of its own, not that of the checkpoint")
    replaced = [write_manifest] if write_manifest and os.path.lexists(write_manifest) else []
    if not force:
        allow_replacing(replaced, Unreadable)  # now, not when everything has been hashed
    with unreadable():
        report = sluice.verify(
            path,
            manifest=manifest,
            hashes=(algorithm or "sha256") if write_manifest else None,
            nan=nan,
            progress=progress_wanted(quiet=quiet),
        )
        if write_manifest and report.ok:
            report.write_manifest(write_manifest, overwrite=bool(replaced))
    if as_json:
        click.echo(json.dumps(report.to_json()))
    elif not quiet:
        # Here, not above: rich takes 50 ms to import, and JSON goes without.
        from sluice.cli.views.console import print_sections

        written = [f"manifest written: {write_manifest}"] if write_manifest and report.ok else []
        print_sections(chain(written, report.sections()))
    if not report.ok or (strict and report.warnings):
        raise click.exceptions.Exit(1)
