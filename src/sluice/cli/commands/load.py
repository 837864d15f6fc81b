"""``sluice load``: build a model without memory, fill it, and report time and memory."""

from __future__ import annotations

import click

import sluice
from sluice._options import PageCache
from sluice.cli.load_options import LoadArguments, load_options
from sluice.cli.options import page_cache_option
from sluice.cli.terminal import progress_wanted
from sluice.cli.views.report import output_options, show_report

__all__ = ["load_command"]


@click.command("load")
@load_options(required=True, model="Class or function that builds the model.")
@page_cache_option
@click.option("--table", is_flag=True, help="List how each tensor was filled.")
@output_options()
def load_command(load: LoadArguments, *, page_cache: PageCache, table: bool, as_json: bool, quiet: bool) -> None:
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
    report = sluice.load_into(
        load.model(),  # type: ignore[arg-type]  # --model is required
        load.source,
        **load.keywords,
        page_cache=page_cache,
        progress=progress_wanted(quiet=quiet),
    )
    show_report(
        report,
        as_json=as_json,
        quiet=quiet,
        more_json={"table": report.table().to_json()} if table and as_json else None,
        more_sections=report.table().sections() if table else (),
    )
