"""``sluice convert``: write a checkpoint in another format, dtype or naming."""

from __future__ import annotations

import os
from typing import Any, get_args

import click

import sluice
from sluice.cli.options import (
    DTypeName,
    Size,
    changes_options,
    encoding_option,
    keywords_of,
    memory_options,
    number,
    page_cache_option,
    weighted,
)
from sluice.cli.output import already_exists, output_options, progress_wanted, show_report, wrong_options
from sluice.cli.remote_options import remote_options, with_settings
from sluice.formats.manifest import HashAlgorithm
from sluice.writing.save_formats import CONVERT_FORMATS

__all__ = ["convert_command"]


def _adapter(text: str) -> sluice.Adapter:
    """Return an adapter of ``--adapter``."""
    path, weight = weighted(text)
    return sluice.Adapter(with_settings(path), weight=number(weight) if weight else 1.0)


@click.command("convert")
@click.argument("source", type=click.Path())
@click.argument("destination", type=click.Path())
@remote_options
@click.option("--key", help="Part of the checkpoint, such as model_state_dict. Default: all of it, or the state dict.")
@click.option("--format", type=click.Choice(CONVERT_FORMATS), help="Default: by the suffix of DESTINATION.")
@click.option("--dtype", type=DTypeName(), help="bf16, half, float32, ... for real floats. Default: auto, no cast.")
@changes_options
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="PATH[=WEIGHT]",
    help="Merge an adapter, such as lora/ or style.safetensors=0.8; repeatable.",
)
@click.option("--max-shard-size", type=Size(), help="Bytes of tensors in one shard, such as 5GB.")
@click.option("--manifest", type=click.Path(), help="Write the hash of each tensor to this file.")
@click.option(
    "--manifest-hash",
    type=click.Choice(get_args(HashAlgorithm)),
    default="sha256",
    show_default=True,
    help="Its hash.",
)
@memory_options
@page_cache_option
@encoding_option
@click.option("--dry-run", is_flag=True, help="Print what would be written, and write nothing.")
@click.option("--force", is_flag=True, help="Replace existing files.")
@output_options()
def convert_command(
    source: str,
    destination: str,
    *,
    dry_run: bool,
    force: bool,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Write the checkpoint at SOURCE to DESTINATION in another format, with a fixed amount of memory.

    SOURCE is a file, a model directory, the index file of shards, a torch.distributed.checkpoint directory, a directory
    with one file per parameter, or the URL of one of them. DESTINATION is a .safetensors file, a torch file (.pt, .pth,
    .bin, .ckpt), or a directory in the Hugging Face layout. Existing files are replaced only with --force, and stay
    intact until the new file is on the disk.

    \b
    Examples:
      sluice convert model.pth model.safetensors --dtype bfloat16
      sluice convert run.ckpt model.safetensors --key state_dict --rename 'module.**=**'
      sluice convert dcp-directory hf-model --max-shard-size 5GB
      sluice convert model.pth model.safetensors --rename-regex 'h\\.(\\d+)\\.(.*)=blocks.\\1.\\2'
      sluice convert model.pth model.safetensors --adapter lora --adapter style.safetensors=0.8
      sluice convert model.pth model.safetensors --dry-run
      sluice convert model.pth model.safetensors --force --quiet --manifest model.manifest.json

    \b
    Exit codes:
      0    written, or with --dry-run could be
      1    SOURCE or the disk is at fault, or DESTINATION exists and --force was not given
      2    the command line is wrong
      3    the conversion does not fit into --memory
      130  interrupted

    \b
    The JSON object:
      destination, format, files, file_bytes, tensors, nbytes, seconds, notes, dry_run
      source, source_format, key
                   what was converted; a key of null is the whole checkpoint
      taken, total number of tensors of the source that are in the files, and of all
      tied         {name: the name that its tensor is stored under}
      casts        {"float32 -> bfloat16": number of tensors}
      replaced     files that existed
      written_by_rank
                   empty: one process writes a conversion
    """
    manifest = options["manifest"]
    keywords = {**keywords_of(options), "adapters": list(map(_adapter, options["adapters"]))}
    shown = progress_wanted(quiet=quiet or dry_run)
    with wrong_options():
        report = sluice.convert(
            with_settings(source), destination, **keywords, overwrite=force, progress=shown, dry_run=dry_run
        )
    show_report(report, as_json=as_json, quiet=quiet)
    existing = [*report.replaced, *([manifest] if manifest is not None and os.path.lexists(manifest) else [])]
    if dry_run and existing and not force:
        raise already_exists(existing[0])
