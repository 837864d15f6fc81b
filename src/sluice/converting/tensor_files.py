"""Conversions to safetensors: a single file, or a Hugging Face model directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from sluice import _defaults as defaults
from sluice._geometry import contiguous_stride
from sluice.converting.contents import refuse_repeats
from sluice.converting.conversion import Conversion, Written, existing
from sluice.converting.stream import TargetStream
from sluice.formats.safetensors.ties import declare_ties
from sluice.planning.memory_layout import single_targets
from sluice.records import Entry, Request
from sluice.writing.aliases import stored_once
from sluice.writing.batches import batched
from sluice.writing.durable.replacement import Replacement
from sluice.writing.manifest import ManifestWriter
from sluice.writing.safetensors import SafetensorsLayout, lay_out_safetensors
from sluice.writing.shards import plan_model_directory, write_model_directory

__all__ = ["convert_to_directory", "convert_to_safetensors"]


def convert_to_safetensors(conversion: Conversion, tree: object) -> Written:
    """Write the tensors of a state dict to one safetensors file."""
    entries, aliases = _once(conversion, tree)
    layout = lay_out_safetensors(conversion.outlines(entries), declare_ties(aliases, _metadata(conversion)))
    out = Replacement(conversion.destination, overwrite=conversion.overwrite or conversion.dry_run)
    replaced = existing([conversion.destination])
    nbytes = layout.nbytes - len(layout.header)
    if not conversion.dry_run:
        with conversion.stream(len(entries), nbytes) as stream, out:
            _fill_safetensors(conversion, entries, stream, layout, out)
            out.commit(nbytes=layout.nbytes)
    files = {conversion.destination: layout.nbytes}
    return _written(conversion, entries, aliases, files=files, replaced=replaced, nbytes=nbytes)


def convert_to_directory(conversion: Conversion, tree: object) -> Written:
    """Write the tensors of a state dict to a Hugging Face model directory."""
    entries, aliases = _once(conversion, tree)
    outlines, metadata = conversion.outlines(entries), _metadata(conversion)
    nbytes = sum(outline.nbytes for outline in outlines.values())
    planned = plan_model_directory(
        conversion.destination, outlines, ties=aliases, metadata=metadata, limit_bytes=conversion.limit_bytes
    )
    files = {conversion.destination / name: size for name, size in planned.sizes.items()}
    if not conversion.dry_run:
        with conversion.stream(len(entries), nbytes) as stream:
            paths = write_model_directory(
                conversion.destination,
                outlines,
                ties=aliases,
                metadata=metadata,
                limit_bytes=conversion.limit_bytes,
                overwrite=conversion.overwrite,
                write=lambda layout, out: _fill_safetensors(conversion, entries, stream, layout, out),
            )
        files = dict(zip(paths, files.values(), strict=True))
    replaced = tuple(str(conversion.destination / name) for name in planned.old)
    return _written(conversion, entries, aliases, files=files, replaced=replaced, nbytes=nbytes)


def _written(
    conversion: Conversion,
    entries: Mapping[str, Entry],
    aliases: Mapping[str, str],
    *,
    files: Mapping[Path, int],
    replaced: tuple[str, ...],
    nbytes: int,
) -> Written:
    if conversion.manifest:
        conversion.manifest.repeat(aliases)
    return Written(
        files=files,
        replaced=replaced,
        tensors=len(entries) + len(aliases),
        nbytes=nbytes,
        casts=conversion.casts(entries.values()),
        tied=aliases,
    )


def _once(conversion: Conversion, tree: object) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return each tensor under one name, and its other names; check sizes and headers."""
    assert isinstance(tree, dict)
    entries, aliases = stored_once(tree, _identity)
    refuse_repeats(entries, conversion.checkpoint)
    conversion.offsets(list(entries.values()))
    return entries, aliases


def _identity(entry: Entry) -> Entry | None:
    return replace(entry, parameter=False, requires_grad=False, origin="") if entry.numel else None


def _metadata(conversion: Conversion) -> dict[str, str]:
    """Return the metadata of a safetensors source, and the format."""
    own = conversion.checkpoint.metadata if "safetensors" in conversion.checkpoint.format else {}
    return {"format": "pt", **own}


def _fill_safetensors(
    conversion: Conversion,
    entries: Mapping[str, Entry],
    stream: TargetStream,
    layout: SafetensorsLayout,
    out: Replacement,
) -> None:
    """Write a file without committing it."""
    # Hashing reads early pieces back through the page cache, so direct writes are off.
    out.reserve(layout.nbytes, None if conversion.manifest else stream.writing)
    out.write_at(0, layout.header)
    offsets = conversion.offsets(())
    for batch in batched(layout.tensors, defaults.STREAM_FILLS):
        requests = [
            Request(
                name=name,
                entry=entries[name],
                dtype=dtype,
                device="cpu",
                stride=contiguous_stride(entries[name].shape),
            )
            for name, dtype, _ in batch
        ]
        targets, _ = single_targets(requests, conversion.checkpoint.index, offsets)
        starts = [start for _, _, start in batch]

        names = [name for name, _, _ in batch]
        manifest = conversion.manifest
        if manifest:
            for name, outline in conversion.outlines({name: entries[name] for name in names}).items():
                manifest.expect(name, dtype=outline.dtype, shape=outline.shape, nbytes=outline.nbytes)
        stream.move(targets, partial(_write_tensor, manifest, out, names, starts))
        if manifest:
            for name in names:
                manifest.done(name)


def _write_tensor(
    manifest: ManifestWriter | None,
    out: Replacement,
    names: Sequence[str],
    starts: Sequence[int],
    position: int,
    at: int,
    piece: memoryview,
) -> None:
    """Write a piece of a tensor and hash it."""
    start = starts[position]
    out.write_at(start + at, piece)
    if manifest:
        manifest.piece(names[position], at, piece, lambda first, nbytes: out.read_at(start + first, nbytes))
