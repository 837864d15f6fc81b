"""``sluice load``: build a model without memory, fill it, and report time and memory."""

from __future__ import annotations

from typing import get_args

import click

import sluice
from sluice._options import MemoryLimits, PageCache, Place
from sluice.cli.options import (
    Size,
    allow_empty_option,
    build_model,
    changes_of,
    check_allow_empty,
    check_device,
    check_dtype,
    dtype_option,
    encoding_option,
    find_factory,
    ignore_mismatched_option,
    key_option,
    no_strict_option,
    parse_arguments,
    paths_argument,
    place_option,
    rename_option,
    rename_regex_option,
    rules_option,
    source_of,
    staging_option,
)
from sluice.cli.remote_options import remote_options
from sluice.cli.terminal import progress_wanted
from sluice.cli.views.report import show_report

__all__ = ["load_command"]


@click.command("load")
@paths_argument
@remote_options
@click.option(
    "--model", "factory", required=True, metavar="MODULE:NAME", help="Class or function that builds the model."
)
@click.option("--model-args", metavar="JSON", default="{}", help="Its arguments: an object by name, an array in order.")
@click.option(
    "--device",
    help="Device of the tensors: cpu, cuda:0, ...; auto fills accelerators in order. Default: as in the model.",
)
@dtype_option
@key_option
@rename_option
@rename_regex_option
@rules_option
@click.option("--memory", type=Size(), help="Limit on the growth of host memory, such as 4GiB.")
@staging_option
@no_strict_option
@allow_empty_option
@ignore_mismatched_option
@click.option(
    "--page-cache",
    type=click.Choice(get_args(PageCache)),
    default="auto",
    show_default=True,
    help="keep: leave the file in the page cache. bypass: do not change the cache.",
)
@place_option
@encoding_option
@click.option("--table", is_flag=True, help="List how each tensor was filled.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
def load_command(
    paths: tuple[str, ...],
    *,
    factory: str,
    model_args: str,
    device: str | None,
    dtype: str | None,
    key: str | None,
    renames: tuple[str, ...],
    regexes: tuple[str, ...],
    rule_lists: tuple[str, ...],
    memory: int | None,
    staging: int,
    no_strict: bool,
    allow_empty: bool,
    ignore_mismatched: bool,
    page_cache: PageCache,
    place: Place,
    encoding: str,
    table: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Build a model, fill it from the checkpoint at PATH, and report time and peak memory.

    MODULE:NAME is imported with the current directory on the path, and called inside sluice.empty_init(), so that its
    parameters take no memory before they are read. PATH is a file, a directory, the index file of shards, or the URL of
    one; several files are one checkpoint together. The dtype is the model's, unless --dtype names one.

    \b
    Examples:
      sluice load model.pth --model net:Net
      sluice load model.pth --model net:Net --model-args '{"width": 64}' --dtype bfloat16
      sluice load run.pt --key model_state_dict --model net:build --memory 2GiB --json
      sluice load model.pth --model net:Net --rename 'backbone.**=encoder.**' --rename 'head.*='
      sluice load model.pth --model net:Net --rules net:from_gpt2
    """
    arguments, named = parse_arguments(model_args)
    build = find_factory(factory)
    check_allow_empty(allow_empty=allow_empty, no_strict=no_strict)
    rules = changes_of(renames, regexes, rule_lists)
    check_device(device)
    finished = check_dtype(dtype)
    model = build_model(build, factory, arguments, named)
    report = sluice.load_into(
        model,
        source_of(paths),
        device=device,
        dtype=finished,
        key=key,
        rules=rules,
        strict=not no_strict,
        allow_empty=allow_empty,
        ignore_mismatched=ignore_mismatched,
        memory=MemoryLimits(host=memory, staging=staging),
        page_cache=page_cache,
        place=place,
        encoding=encoding,
        progress=progress_wanted(quiet=quiet),
    )
    show_report(
        report,
        as_json=as_json,
        quiet=quiet,
        more_json={"table": report.table().to_json()} if table and as_json else None,
        more_sections=report.table().sections() if table else (),
    )
