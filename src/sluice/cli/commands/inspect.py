"""``sluice inspect``: the contents of a checkpoint, from its headers alone. This path never imports torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from itertools import chain, islice

import click

import sluice
from sluice.cli.options import encoding_option, paths_argument, source_of
from sluice.cli.output import print_sections
from sluice.cli.remote_options import remote_options
from sluice.cli.summary import children, describe, is_plain_list, path_and_key, summarise, to_json
from sluice.reports.document import printable, shorten

__all__ = ["inspect_command", "outline"]

#: Shown without ``--all``: children of one container, lines, and characters of a name.
_CHILDREN_SHOWN = 40
_LINES_SHOWN = 2000
_NAME_SHOWN = 200


@click.command("inspect")
@paths_argument
@remote_options
@click.option("--tree", "as_tree", is_flag=True, help="Show the nested object of the file instead of tables.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
@click.option("--all", "everything", is_flag=True, help="Show complete lists.")
@encoding_option
@click.option("--key", help="Show only this part: a path such as ema.model, or a prefix of names.")
def inspect_command(
    paths: tuple[str, ...], *, as_tree: bool, as_json: bool, everything: bool, key: str | None, encoding: str
) -> None:
    """Show format, contents, dtypes, bytes, largest tensors and shared storages of the checkpoint at PATH.

    PATH is a file, a directory, the index file of shards, or the URL of one; several files are one checkpoint together.
    Only headers are read. No class or function that the file names is imported or called, and torch is not imported.

    \b
    Examples:
      sluice inspect model.pth
      sluice inspect run.pt --tree
      sluice inspect run.pt --key model_state_dict --all
      sluice inspect model.safetensors --json | jq '.tensors[].name'

    \b
    The JSON object:
      path, key, format, notes
      files         [{path, nbytes}]
      metadata      {name: text}
      tensor_bytes  bytes of all tensors, each name in full
      stored_bytes  bytes of the storages that they view, each once
      dtypes        {dtype: {count, nbytes}}
      tensors       [{name, dtype, layout, packing, math_bits, shape, stride, nbytes,
                      storages, storage_offset, parameter, requires_grad}]; strides
                      and offset in elements; layout is "strided" unless the tensor is
                      sparse or quantized; packing "Q4_K" or another GGUF type that is
                      decoded to the dtype, or null; math_bits "conj" and "neg";
                      several storages for a tensor made of several
      storages      [{key, file, nbytes}]; "storages" and "file" count from 0
      shared        [{storage, names}], storages that several names view
      state_dicts   keys of possible state dicts, the largest first;
                    "" is the whole
      unsupported   [{name, reason, found, file}], tensors that sluice does not read
      values        [{name, value}] for other values, {name, text} for those that
                    JSON cannot hold, {name, not_loaded} for objects never built
    """
    if as_json and (as_tree or everything):
        raise click.UsageError("--json already shows everything: omit --tree and --all")
    with sluice.open(source_of(paths), key=key, encoding=encoding) as checkpoint:
        path = checkpoint.path
        if as_tree:  # does not need dotted names, which can be ambiguous
            _print_outline(path_and_key(path, key), checkpoint.index.tree, everything=everything)
            return
        summary = summarise(path, key, checkpoint.index, checkpoint.entries)
        if as_json:
            click.echo(json.dumps(to_json(summary, checkpoint.limits)))
            return
    print_sections(summary.sections(everything=everything))


def _print_outline(heading: str, tree: object, *, everything: bool) -> None:
    """Print a tree under a heading; without ``everything`` long containers and long outlines are cut.

    Lines are generated while they are printed: a file of a kilobyte can describe a tree with millions of leaves.
    """
    lines = outline(tree, None if everything else _CHILDREN_SHOWN)
    shown = islice(lines, None if everything else _LINES_SHOWN)
    sys.stdout.writelines(f"{line}\n" for line in chain([f"{printable(heading)}: {describe(tree)}"], shown))
    if next(lines, None) is not None:
        sys.stdout.write("... more lines follow; --all shows them\n")


def outline(tree: object, shown: int | None, indent: str = "") -> Iterator[str]:
    """Yield a line for each value of a tree; at most ``shown`` children of each container."""
    if not isinstance(tree, (Mapping, list, tuple)) or (shown is not None and is_plain_list(tree)):
        return
    last = len(tree) - 1 if shown is None else min(len(tree) - 1, shown)
    for number, (label, child) in enumerate(children(tree)):
        if number == shown:
            yield f"{indent}└── ... {len(tree) - number:,} more; --all shows them"
            return
        name = label if shown is None else shorten(label, _NAME_SHOWN)
        yield f"{indent}{'└──' if number == last else '├──'} {name}: {describe(child)}"
        yield from outline(child, shown, indent + ("    " if number == last else "│   "))
