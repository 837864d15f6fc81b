"""Conversions to torch zip files: a single file with the whole object, or one file per tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from sluice import _defaults as defaults
from sluice._dtypes import ITEM_BYTES
from sluice._geometry import contiguous_stride
from sluice.checkpoint.open_checkpoint import borrow
from sluice.checkpoint.tied_names import TIES_FILE
from sluice.converting.contents import refuse_repeats
from sluice.converting.conversion import Conversion, Written, existing
from sluice.converting.storages import Storages, descriptions, stored_bytes
from sluice.converting.stream import TargetStream
from sluice.entries.slicing import boxes, slice_entry
from sluice.entries.tree import flatten, walk
from sluice.reading.tensor import read_tensor
from sluice.records import Entry, Target
from sluice.writing.aliases import stored_once
from sluice.writing.batches import batched
from sluice.writing.chunks import Staging, row_major_bytes
from sluice.writing.durable.replacement import NewFile, Replacement
from sluice.writing.manifest import ManifestWriter
from sluice.writing.parameters import check_file_names, link_ties, parameter_directory, parameter_file, ties_file
from sluice.writing.pickle_walk import walk_object
from sluice.writing.safetensors import TensorOutline
from sluice.writing.torch_pickle import is_plain, pickle_object, refusal
from sluice.writing.torch_zip import TorchZipWriter

__all__ = ["convert_to_parameters", "convert_to_torch"]

#: Number of single-tensor files that are written together: each takes a descriptor.
_FILES_AT_ONCE = 32


def convert_to_torch(conversion: Conversion, tree: object) -> Written:
    """Write the whole object to one ``torch.save`` file."""
    names = flatten(tree, conversion.checkpoint.limits) if conversion.manifest else {}
    laid_out = _lay_out(conversion, tree, names)
    writer = laid_out.writer
    out = Replacement(conversion.destination, overwrite=conversion.overwrite or conversion.dry_run)
    replaced = existing([conversion.destination])
    if not conversion.dry_run:
        with conversion.stream(laid_out.tensors, writer.nbytes) as stream, out:
            _fill_torch_files(conversion, stream, [(laid_out, out)])
            out.commit(nbytes=writer.finish(out))
        _hash_written(conversion, conversion.destination, laid_out.apart)
    return Written(
        files={conversion.destination: writer.file_bytes},
        replaced=replaced,
        tensors=laid_out.tensors,
        nbytes=writer.nbytes,
        casts=laid_out.casts,
    )


class _TorchFile(Struct, frozen=True, kw_only=True):
    """Layout of a torch file and the sources of its storages."""

    writer: TorchZipWriter
    storages: Storages
    #: Number of places of its tensors; a container that occurs more than once counts once.
    tensors: int
    #: Number of cast tensors by pair of dtypes.
    casts: Mapping[str, int]
    #: Dtype and shape of its tensors, by their names in the manifest.
    hashed: Mapping[str, TensorOutline]
    #: Storage and first byte of tensors in row-major order in a storage, by their names in the manifest.
    together: Mapping[str, tuple[int, int]]
    #: Names in the file of the other tensors, by their names in the manifest.
    apart: Mapping[str, str]


def _lay_out(conversion: Conversion, tree: object, hashed: Mapping[str, Entry]) -> _TorchFile:
    """Lay out a torch file; views of the same bytes share a storage, as in the source.

    Args:
        conversion: The conversion.
        tree: The object to save.
        hashed: The tensors of the manifest, by their names in it.
    """
    walked = walk_object(tree, _attributes)
    dense = [part for entry in walked.tensors for part in entry.components]
    storages = Storages(conversion, walked.tensors, dense, _names(tree, walked.tensors))
    writer = TorchZipWriter(pickle_object(tree, walked, descriptions(walked.tensors, storages)), storages.sizes)
    positions = {id(entry): position for position, entry in enumerate(dense)} if hashed else {}
    together: dict[str, tuple[int, int]] = {}
    for name, entry in hashed.items():
        view = storages.geometry(positions[id(entry)])
        if view.stride == contiguous_stride(view.shape) and not view.math_bits:
            together[name] = (view.storage, view.start * ITEM_BYTES[view.dtype])
    own = {id(entry): name for name, entry in walk(tree)} if len(together) < len(hashed) else {}
    return _TorchFile(
        writer=writer,
        storages=storages,
        tensors=walked.places,
        casts=conversion.casts(walked.tensors),
        hashed=conversion.outlines(hashed),
        together=together,
        apart={name: own[id(entry)] for name, entry in hashed.items() if name not in together},
    )


def _attributes(value: object) -> Mapping[str, object] | None:
    if isinstance(value, Entry):
        return value.attributes or {}
    if is_plain(value):
        return None
    raise refusal(value)


def _names(tree: object, entries: Iterable[Entry]) -> list[str]:
    """Return a name for messages for each component of the entries."""
    names = {id(entry): name for name, entry in walk(tree)}
    return [names.get(id(entry), "_metadata") for entry in entries for _ in entry.components]


class _Place(NamedTuple):
    """A storage of a file under construction."""

    writer: TorchZipWriter
    out: NewFile
    storage: int
    target: Target


def _fill_torch_files(
    conversion: Conversion, stream: TargetStream, files: Sequence[tuple[_TorchFile, NewFile]]
) -> None:
    """Write the storages of all files in the order of the source; the caller finishes and commits each file."""
    first = 0
    for laid_out, out in files:
        # Hashing reads early pieces back through the page cache, so direct writes are off.
        out.reserve(laid_out.writer.records_bytes, None if conversion.manifest else stream.writing)
        if conversion.manifest:
            _expect(conversion.manifest, laid_out, first)
        first += len(laid_out.storages.sizes)
    places = (
        _Place(laid_out.writer, out, storage, target)
        for laid_out, out in files
        for storage, target in enumerate(laid_out.storages.targets())
    )
    first = 0
    for batch in batched(places, defaults.STREAM_FILLS):
        _fill(conversion.manifest, stream, batch, first)
        first += len(batch)


def _fill(manifest: ManifestWriter | None, stream: TargetStream, places: Sequence[_Place], first: int) -> None:
    """Write a batch of storages; ``first`` is the number of the first one in the manifest."""
    targets = [place.target for place in places]
    # The CRC of a storage that arrives in many short pieces is computed from the file when it is complete.
    scattered = {position for position, target in enumerate(targets) if stream.is_scattered(target)}

    def write(position: int, at: int, piece: memoryview) -> None:
        writer, out, storage, _ = places[position]
        writer.write(out, storage, at, piece, account=position not in scattered)
        if manifest:
            manifest.piece(first + position, at, piece, partial(writer.read, out, storage))

    stream.move(targets, write)
    if manifest:
        for position in range(len(targets)):
            manifest.done(first + position)
    for position in scattered:
        writer, out, storage, _ = places[position]
        writer.account_written(out, storage)


def _expect(manifest: ManifestWriter, laid_out: _TorchFile, first: int) -> None:
    """Announce the tensors that are hashed while they are written; storages are numbered from ``first``."""
    for name, (storage, start) in laid_out.together.items():
        tensor = laid_out.hashed[name]
        manifest.expect(
            name, dtype=tensor.dtype, shape=tensor.shape, nbytes=tensor.nbytes, stored=first + storage, start=start
        )


def _hash_written(conversion: Conversion, path: Path, names: Mapping[str, str]) -> None:
    """Hash the tensors of a finished file that are not in row-major order in it."""
    if conversion.manifest is None or not names:
        return
    staging = Staging.make(defaults.SCRATCH_BYTES)
    with borrow(path, limits=conversion.checkpoint.limits) as checkpoint:
        for name, own in names.items():
            entry = checkpoint.entries[own]
            keys = boxes(entry.shape, defaults.SAVE_STAGING_BYTES // ITEM_BYTES[entry.dtype])
            read = (read_tensor(checkpoint, own, slice_entry(entry, key)) for key in keys)
            pieces = (piece for tensor in read for piece in row_major_bytes(tensor, entry.dtype, staging))
            conversion.manifest.add(name, dtype=entry.dtype, shape=entry.shape, pieces=pieces)


def convert_to_parameters(conversion: Conversion, tree: object) -> Written:
    """Write a state dict as one ``torch.save`` file for each tensor."""
    assert isinstance(tree, dict)
    check_file_names(tree)
    stored, ties = stored_once(tree, _identity)
    refuse_repeats(stored, conversion.checkpoint)
    conversion.offsets(list(stored.values()))
    replaced = existing(sorted(conversion.destination.glob(parameter_file("*"))))  # all, not only those of tree
    nbytes = sum(stored_bytes(conversion, entry) for entry in stored.values())
    sizes: dict[str, int] = {}
    with ExitStack() as stack:
        stream = stack.enter_context(conversion.stream(len(stored), nbytes))
        hidden = None
        if not conversion.dry_run:
            hidden = stack.enter_context(
                parameter_directory(conversion.destination, tree, overwrite=conversion.overwrite)
            )
        for names in batched(stored, _FILES_AT_ONCE):
            laid_out = [
                _lay_out(conversion, tree[name], {name: tree[name]} if conversion.manifest else {}) for name in names
            ]
            sizes |= {name: torch_file.writer.file_bytes for name, torch_file in zip(names, laid_out, strict=True)}
            if hidden:
                places = [hidden / parameter_file(name) for name in names]
                _write_parameters(stream, list(zip(laid_out, places, strict=True)), conversion)
        if hidden:
            link_ties(hidden, ties)
    sizes |= {name: sizes[same] for name, same in ties.items()}
    if conversion.manifest:
        conversion.manifest.repeat(ties)
    files = {conversion.destination / parameter_file(name): size for name, size in sizes.items()}
    if ties:
        files[conversion.destination / TIES_FILE] = len(ties_file(ties))
    return Written(
        files=files,
        replaced=replaced,
        tensors=len(tree),
        nbytes=nbytes,
        casts=conversion.casts(stored.values()),
        tied=ties,
    )


def _identity(entry: Entry) -> tuple[Entry, int] | None:
    """Return equal keys for entries whose files are equal; None for an empty tensor."""
    return (entry, id(entry.attributes)) if entry.numel else None


def _write_parameters(stream: TargetStream, files: Sequence[tuple[_TorchFile, Path]], conversion: Conversion) -> None:
    with ExitStack() as stack:
        outs = [stack.enter_context(NewFile(path)) for _, path in files]
        laid_out = [torch_file for torch_file, _ in files]
        _fill_torch_files(conversion, stream, list(zip(laid_out, outs, strict=True)))
        for torch_file, out in zip(laid_out, outs, strict=True):
            out.seal(nbytes=torch_file.writer.finish(out))
    for torch_file, path in files:
        _hash_written(conversion, path, torch_file.apart)
