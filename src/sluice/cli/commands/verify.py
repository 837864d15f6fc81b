"""``sluice verify``: read a checkpoint once and report what is damaged. ``sluice diff``: compare two checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

import click

import sluice
from sluice._arguments import path_argument
from sluice.cli.options import encoding_option, paths_argument, source_of
from sluice.cli.output import Failure, already_exists, failure_of, output_options, progress_wanted, show_report
from sluice.cli.remote_options import remote_options, with_settings
from sluice.formats.manifest import HashAlgorithm

__all__ = ["diff_command", "verify_command"]

#: Exit code if there is no result, because a file could not be read or written: 1 is a result.
_UNREADABLE = 2


@contextmanager
def _unreadable() -> Iterator[None]:
    """Turn errors into failures without a result, and refused arguments into a wrong command line."""
    try:
        yield
    except click.ClickException:
        raise
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except Exception as error:
        text = str(error) if isinstance(error, ImportError) else failure_of(error).message
        raise Failure(text, _UNREADABLE) from error


@click.command("verify")
@paths_argument
@remote_options
@click.option("--key", metavar="KEY", help="Part of which tensors are named, hashed and counted. Every byte is read.")
@click.option("--manifest", metavar="FILE", help="Compare dtype, shape and hash of every tensor with FILE.")
@click.option("--write-manifest", metavar="FILE", help="Hash every tensor, and write FILE if there is no problem.")
@click.option(
    "--hash",
    "algorithm",
    type=click.Choice(get_args(HashAlgorithm)),
    help="Hash for --write-manifest. Default: sha256. xxh3_128 is faster, and only detects accidental damage.",
)
@click.option("--force", is_flag=True, help="Replace an existing manifest.")
@encoding_option
@click.option("--nan", is_flag=True, help="Count NaN and infinite elements of each tensor.")
@click.option("--strict", is_flag=True, help="Exit with 1 for warnings too.")
@output_options("Print nothing but errors; the exit code is the answer.")
def verify_command(
    paths: tuple[str, ...],
    *,
    write_manifest: str | None,
    algorithm: HashAlgorithm | None,
    force: bool,
    strict: bool,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Read the checkpoint at PATH once and report what is damaged.

    PATH is a file, a directory, the index file of shards, or the URL of one; several files are one checkpoint together.
    The checks are: the structure, the CRC-32 of every record of torch.save files, a shard index against its shards, the
    indices of sparse tensors, and that every byte can be read. safetensors files have no checksums: only a manifest
    detects a changed byte. sluice.save writes one with manifest=, this command with --write-manifest. Memory grows
    by less than 100 MiB for files of any size.

    \b
    Examples:
      sluice verify model.pth
      sluice verify model.safetensors --write-manifest model.manifest.json
      sluice verify model.safetensors --manifest model.manifest.json
      sluice verify model.pth --nan --json | jq .non_finite

    \b
    Exit codes:
      0    no problem
      1    something is damaged, missing, unexpected or differs from the manifest, or PATH
           is not a checkpoint; with --strict also a warning: the shard index omits tensors of its shards, or has
           a wrong total_size, which no reader uses
      2    PATH, the manifest or the output cannot be read or written, the manifest to write exists
           and --force was not given, or the command line is wrong
      130  interrupted

    \b
    The JSON object:
      ok                whether there is no problem
      source, format, warnings, notes
      problems          [{kind, problem, file, tensor, offset, expected, found}]; kind is
                        structure, truncated, incomplete, checksum, unreadable, foreign
                        (not a checkpoint), unsupported, or against a manifest missing,
                        extra, dtype, shape, layout, hash, unsupported
      key               part of which tensors are named; null for the whole checkpoint
      state_dicts       keys of the state dicts in it; "" is the whole checkpoint
      tensors, total    number of tensors that were checked, and of all
      named             number of tensors in the part
      nbytes, seconds
      checksums         number of CRC-32s compared
      without_checksum  names of records without one
      algorithm         name of the hash, or null
      hashes            {name: {dtype, shape, layout, hash}}
      non_finite        {name: {nan, inf}}, with --nan
      unsupported       names of tensors that sluice does not read
    """
    write_manifest = write_manifest and path_argument(write_manifest)
    if options["manifest"] and write_manifest:
        raise click.UsageError("--manifest compares with a manifest, --write-manifest writes one: choose one of them")
    if algorithm and not write_manifest:
        raise click.UsageError("--hash needs --write-manifest; a manifest to compare with names its own hash")
    if write_manifest and os.path.realpath(write_manifest) in map(os.path.realpath, paths):
        raise click.UsageError("the manifest needs a different path than the checkpoint")
    if write_manifest and not force and os.path.lexists(write_manifest):  # before hashing
        raise already_exists(write_manifest, _UNREADABLE)
    if write_manifest and not os.path.isdir(os.path.dirname(os.path.realpath(write_manifest))):
        raise Failure(f"{write_manifest}: the directory does not exist", _UNREADABLE)
    with _unreadable():
        report = sluice.verify(
            source_of(paths),
            hashes=(algorithm or "sha256") if write_manifest else None,
            progress=progress_wanted(quiet=quiet),
            **options,
        )
        if write_manifest and report.ok:
            report.write_manifest(write_manifest, overwrite=force)
    written = [f"manifest written: {write_manifest}"] if write_manifest and report.ok else []
    show_report(report, as_json=as_json, quiet=quiet, more_sections=written)
    if not report.ok or (strict and report.warnings):
        raise click.exceptions.Exit(1)


@click.command("diff")
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@remote_options
@click.option("--key-a", "--key", "key", metavar="KEY", help="Compare only this part of A, such as model_state_dict.")
@click.option("--key-b", "other_key", metavar="KEY", help="Compare only this part of B.")
@click.option("--rtol", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Relative tolerance.")
@click.option("--atol", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Absolute tolerance.")
@click.option(
    "--patch", metavar="DIR", help="Also write the changes from A to B, for sluice.Patched, to a new directory."
)
@click.option("--sparse", is_flag=True, help="Make the patch a .safetensors file of indices and values.")
@encoding_option
@output_options("Print nothing but errors; the exit code is the answer.")
def diff_command(a: str, b: str, *, as_json: bool, quiet: bool, **options: Any) -> None:
    """Compare presence, dtype, shape and values of the tensors of the checkpoints at A and B.

    A and B are files, directories, index files of shards or URLs of them, in any two formats. Tensors are compared by
    name, as numbers: 0.0 and -0.0 are the same, and so are two NaNs. Elements differ when |a - b| > atol + rtol * |b|.
    A name that only one of them has is not a difference if it is tied to a name that both have. Memory grows by
    less than 100 MiB for files of any size, and with --patch by two tensors.

    Without --key-a and --key-b, two checkpoints with their state dicts under the same keys are compared as a whole,
    and so are two with full names of state dicts in common. Otherwise the state dict of each is compared, as
    `sluice convert` chooses it; the first lines say which.

    \b
    Examples:
      sluice diff train.pt converted.safetensors
      sluice diff before.pt after.pt --json | jq -r '.differences[].name'
      sluice diff step_6 step_7 --patch weight_v000007
      sluice diff run.pt exported --key-a model_state_dict --rtol 1e-3 --quiet

    \b
    Exit codes:
      0    the same
      1    different
      2    A or B cannot be read, the output not written, or the command line is wrong
      130  interrupted

    \b
    The JSON object:
      same         whether nothing differs
      a, b, format_a, format_b
      key_a, key_b             the compared parts; null is the whole checkpoint
      tensors_a, tensors_b     number of names in these parts
      compared_a, compared_b   number of these names that were compared
      outside_a, outside_b     number of tensors outside the parts
      differences  [{name, kinds, dtype_a, dtype_b, shape_a, shape_b, similar, elements,
                   different, nan, max_abs, max_rel}]; kinds are only_a, only_b, layout,
                   shape, dtype, values, unsupported (not compared, because sluice does
                   not read it); similar is the most similar name of the other side,
                   for the first 100 names that only one side has;
                   nan counts elements that are NaN on one side only; an infinite
                   maximum is the text "inf"
      common       number of names that both have
      tied         names that only one has, for tensors with a common name
      nbytes, seconds
    """
    if options["sparse"] and options["patch"] is None:
        raise click.UsageError("--sparse is for --patch")
    with _unreadable():
        report = sluice.diff(with_settings(a), with_settings(b), progress=progress_wanted(quiet=quiet), **options)
    show_report(report, as_json=as_json, quiet=quiet)
    if not report.same:
        raise click.exceptions.Exit(1)
