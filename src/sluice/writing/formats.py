"""Write contents in each format: lay out, write through staging, and put the files in place at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from sluice.checkpoint.tied_names import TIES_FILE
from sluice.formats.safetensors.ties import declare_ties
from sluice.writing.batches import batched
from sluice.writing.contents import Contents, WrittenItem, write_items
from sluice.writing.durable.replacement import NewFile
from sluice.writing.manifest import ManifestWriter
from sluice.writing.parameters import (
    check_file_names,
    link_ties,
    old_parameters,
    parameter_directory,
    parameter_file,
    ties_file,
)
from sluice.writing.safetensors import SafetensorsLayout, TensorOutline, lay_out_safetensors
from sluice.writing.save_formats import SaveFormat
from sluice.writing.save_job import SavedFiles, SaveJob
from sluice.writing.shards import Model, plan_model_directory, write_model_directory
from sluice.writing.torch_zip import TorchFile, TorchZipWriter
from sluice.writing.uploads import Upload, UploadedFile
from sluice.writing.write_queue import write_queue

__all__ = ["write_contents"]

_Out: TypeAlias = NewFile | UploadedFile

#: A torch file under construction.
_Made: TypeAlias = tuple[TorchFile, TorchZipWriter, _Out]

#: Number of single-tensor files that are written together: each takes a descriptor.
_FILES_AT_ONCE = 32


def write_contents(contents: Contents, save_format: SaveFormat, job: SaveJob) -> SavedFiles:
    """Write contents and their manifest.

    Raises:
        SaveError: The format cannot hold the contents, or the operating system or the store failed.
    """
    saved = _WRITERS[save_format](job, contents)
    if job.manifest:
        job.manifest.repeat(saved.tied)
        job.manifest.commit()
    return saved


def _write_torch(job: SaveJob, contents: Contents) -> SavedFiles:
    file = contents.lay_out(contents.tree, contents.named() if job.manifest else {})
    writer = TorchZipWriter(file.pickled, file.sizes, in_order=job.in_order)
    out = job.file()
    replaced = job.existing()
    if not job.dry_run:
        with out, job.counting(writer.nbytes) as wrote:
            _fill_torch_files(job, contents, [(file, writer, out)], wrote)
            out.commit(nbytes=writer.finish(out))
    return SavedFiles(
        files={str(job.destination): writer.file_bytes},
        tensors=file.tensors,
        nbytes=writer.nbytes,
        replaced=replaced,
        casts=file.casts,
    )


def _write_safetensors(job: SaveJob, contents: Contents) -> SavedFiles:
    tensors, ties = contents.distinct(pickled=False)
    outlines = contents.outlines(tensors)
    layout = lay_out_safetensors(outlines, declare_ties(ties, job.header()))
    out = job.file()
    replaced = job.existing()
    nbytes = layout.nbytes - len(layout.header)
    if not job.dry_run:
        with out, job.counting(nbytes) as wrote:
            _fill_safetensors(job, contents, tensors, outlines, wrote, layout, out)
            out.commit(nbytes=layout.nbytes)
    files = {str(job.destination): layout.nbytes}
    return _saved(contents, tensors, ties, files=files, nbytes=nbytes, replaced=replaced)


def _write_directory(job: SaveJob, contents: Contents) -> SavedFiles:
    tensors, ties = contents.distinct(pickled=False)
    outlines = contents.outlines(tensors)
    model = Model(tensors=outlines, ties=ties, metadata=job.header(), limit_bytes=job.limit_bytes)
    destination, nbytes = job.destination, model.nbytes
    planned = plan_model_directory(destination, model)
    files = {_inside(destination, name): size for name, size in planned.sizes.items()}
    if not job.dry_run:
        with job.counting(nbytes) as wrote:
            fill = partial(_fill_safetensors, job, contents, tensors, outlines, wrote)
            names = write_model_directory(destination, model, overwrite=job.overwrite, write=fill)
        files = dict(zip((_inside(destination, name) for name in names), files.values(), strict=True))
    replaced = tuple(_inside(destination, name) for name in planned.old)
    return _saved(contents, tensors, ties, files=files, nbytes=nbytes, replaced=replaced)


def _write_parameters(job: SaveJob, contents: Contents) -> SavedFiles:
    stored, ties = contents.distinct(pickled=True)
    if job.manifest:
        contents.named()  # refuses what has no hash
    names = [*stored, *ties]
    check_file_names(names)
    sizes = {name: _laid_out(job, contents, tensor) for name, tensor in stored.items()}
    nbytes = sum(data_bytes for _, data_bytes in sizes.values())
    files = {name: size for name, (size, _) in sizes.items()}
    files |= {name: files[same] for name, same in ties.items()}
    destination = job.destination
    replaced = tuple(_inside(destination, file) for file in old_parameters(destination))
    if not job.dry_run:
        with ExitStack() as stack:
            wrote = stack.enter_context(job.counting(nbytes))
            place = stack.enter_context(parameter_directory(destination, names, overwrite=job.overwrite))
            for group in batched(stored, 1 if job.in_order else _FILES_AT_ONCE):
                _fill_parameters(job, contents, {name: stored[name] for name in group}, ties, place, wrote)
            link_ties(place, ties)
    paths = {_inside(destination, parameter_file(name)): size for name, size in files.items()}
    if ties:
        paths[_inside(destination, TIES_FILE)] = len(ties_file(ties))
    return _saved(contents, stored, ties, files=paths, nbytes=nbytes, replaced=replaced)


_WRITERS: Mapping[SaveFormat, Callable[[SaveJob, Contents], SavedFiles]] = {
    "torch": _write_torch,
    "safetensors": _write_safetensors,
    "huggingface": _write_directory,
    "per-parameter": _write_parameters,
}


def _saved(
    contents: Contents,
    stored: Mapping[str, Any],
    ties: Mapping[str, str],
    *,
    files: Mapping[str, int],
    nbytes: int,
    replaced: tuple[str, ...],
) -> SavedFiles:
    casts = contents.casts(stored.values())
    tensors = len(stored) + len(ties)
    return SavedFiles(files=files, tensors=tensors, nbytes=nbytes, tied=ties, replaced=replaced, casts=casts)


def _inside(destination: Path | Upload, name: str) -> str:
    return destination.url_of(name) if isinstance(destination, Upload) else str(destination / name)


def _fill_safetensors(
    job: SaveJob,
    contents: Contents,
    tensors: Mapping[str, Any],
    outlines: Mapping[str, TensorOutline],
    wrote: Callable[[int], None],
    layout: SafetensorsLayout,
    out: _Out,
) -> None:
    """Write header and tensors of one file, which the caller commits."""

    def items() -> Iterator[WrittenItem]:
        for name, dtype, first in layout.tensors:
            if job.manifest:
                _expect(job.manifest, name, outlines[name], name)
            yield WrittenItem(
                source=tensors[name], dtype=dtype, first=first, put=partial(_put, out, first), stored=name
            )

    out.reserve(layout.nbytes, job.staging.pool)
    out.write_at(0, layout.header)
    with write_queue(0 if job.in_order else layout.nbytes, job.staging, wrote) as queue:
        write_items(queue, contents, items(), job.manifest)


def _put(out: _Out, first: int, at: int, piece: memoryview) -> None:
    out.write_at(first + at, piece)


def _expect(manifest: ManifestWriter, name: str, outline: TensorOutline, stored: object, start: int = 0) -> None:
    manifest.expect(name, dtype=outline.dtype, shape=outline.shape, nbytes=outline.nbytes, stored=stored, start=start)


def _laid_out(job: SaveJob, contents: Contents, tensor: Any) -> tuple[int, int]:
    """Return the size of the torch file of a tensor, and that of its data, in bytes."""
    file = contents.lay_out(tensor, {})
    writer = TorchZipWriter(file.pickled, file.sizes, in_order=job.in_order)
    return writer.file_bytes, writer.nbytes


def _fill_parameters(
    job: SaveJob,
    contents: Contents,
    tensors: Mapping[str, Any],
    ties: Mapping[str, str],
    place: Path | Upload,
    wrote: Callable[[int], None],
) -> None:
    """Write the files of some tensors, which ``place`` holds."""
    with ExitStack() as stack:
        made: list[_Made] = []
        for name, tensor in tensors.items():
            same = [name, *(other for other, kept in ties.items() if kept == name)] if job.manifest else ()
            file = contents.lay_out(tensor, dict.fromkeys(same, tensor))
            writer = TorchZipWriter(file.pickled, file.sizes, in_order=job.in_order)
            own = parameter_file(name)
            out: _Out = place.file(own) if isinstance(place, Upload) else NewFile(place / own)
            stack.enter_context(out)
            made.append((file, writer, out))
        _fill_torch_files(job, contents, made, wrote)
        for _, writer, out in made:
            out.seal(nbytes=writer.finish(out))


def _fill_torch_files(job: SaveJob, contents: Contents, files: Sequence[_Made], wrote: Callable[[int], None]) -> None:
    """Write the storages of all files; the caller finishes and commits each file."""
    for number, (file, writer, out) in enumerate(files):
        out.reserve(writer.records_bytes, job.staging.pool)
        if job.manifest:
            _hash_storages(job, contents, file, number)

    def items() -> Iterator[WrittenItem]:
        for number, (file, writer, out) in enumerate(files):
            for storage, (source, dtype) in enumerate(file.storages):
                put = partial(writer.write, out, storage)
                first = writer.offset(storage)
                yield WrittenItem(source=source, dtype=dtype, first=first, put=put, stored=(number, storage))

    nbytes = 0 if job.in_order else sum(writer.records_bytes for _, writer, _ in files)
    with write_queue(nbytes, job.staging, wrote) as queue:
        write_items(queue, contents, items(), job.manifest)


def _hash_storages(job: SaveJob, contents: Contents, file: TorchFile, number: int) -> None:
    """Announce the tensors of a file to the manifest; those not in row-major order in a storage are hashed now."""
    assert job.manifest
    for name, tensor in file.hashed.items():
        if tensor.apart is None:
            _expect(job.manifest, name, tensor.outline, (number, tensor.storage), tensor.start)
            continue
        item = WrittenItem(source=tensor.apart, dtype=tensor.outline.dtype, first=0, put=_drop, stored=(name, number))
        _expect(job.manifest, name, tensor.outline, item.stored)
        with write_queue(0, job.staging, lambda _: None) as queue:
            write_items(queue, contents, [item], job.manifest)


def _drop(at: int, piece: memoryview) -> None:
    """Write nothing: the elements are only hashed."""
