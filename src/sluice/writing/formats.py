"""Write contents in each format: lay out, write through staging, and put the files in place at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeAlias

from sluice.writing.contents import Contents, SavedFiles, SaveJob, WrittenItem, write_items
from sluice.writing.durable.replacement import Replacement
from sluice.writing.safetensors import SafetensorsLayout
from sluice.writing.save_formats import SaveFormat
from sluice.writing.shards import Model, plan_model_directory, write_model_directory
from sluice.writing.torch_zip import TorchFile, TorchZipWriter
from sluice.writing.uploads import Upload, UploadedFile
from sluice.writing.write_queue import write_queue

__all__ = ["write_contents", "write_model"]

_Out: TypeAlias = Replacement | UploadedFile


def write_contents(contents: Contents, save_format: SaveFormat, job: SaveJob) -> SavedFiles:
    """Write contents and their manifest.

    Raises:
        SaveError: The format cannot hold the contents, or the operating system or the store failed.
    """
    saved = _write_torch(job, contents) if save_format == "torch" else _write_flat(job, contents, save_format)
    if isinstance(job.destination, Upload):
        job.destination.added.clear()  # it is complete, also if the manifest fails
    if job.manifest and not job.dry_run:
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
            out.reserve(writer.records_bytes, job.staging.pool)
            if job.manifest:
                _hash_storages(job, contents, file)
            put = partial(writer.write, out.write_at)
            items = (
                WrittenItem(source=source, dtype=dtype, first=writer.offset(n), put=partial(put, n), stored=n)
                for n, (source, dtype) in enumerate(file.storages)
            )
            with write_queue(0 if job.in_order else writer.records_bytes, job.staging, wrote) as queue:
                write_items(queue, contents, items, job.manifest)
            out.commit(nbytes=writer.finish(out.write_at))
    return SavedFiles(
        files={str(job.destination): writer.file_bytes},
        tensors=file.tensors,
        nbytes=writer.nbytes,
        replaced=replaced,
        casts=file.casts,
    )


def _write_flat(job: SaveJob, contents: Contents, save_format: SaveFormat) -> SavedFiles:
    tensors, ties = contents.distinct()
    outlines = contents.outlines(tensors)
    model = Model(tensors=outlines, ties=ties, metadata=job.header(), limit_bytes=job.limit_bytes)
    with job.counting(model.nbytes) as wrote:

        def fill(layout: SafetensorsLayout, out: _Out) -> None:
            def items() -> Iterator[WrittenItem]:
                for name, dtype, first in layout.tensors:
                    if job.manifest:
                        job.manifest.expect(name, outlines[name])
                    put = partial(_put, out, first)
                    yield WrittenItem(source=tensors[name], dtype=dtype, first=first, put=put, stored=name)

            out.reserve(layout.nbytes, job.staging.pool)
            out.write_at(0, layout.header)
            with write_queue(0 if job.in_order else layout.nbytes, job.staging, wrote) as queue:
                write_items(queue, contents, items(), job.manifest)

        files, replaced = write_model(job, save_format, model, fill)
    return SavedFiles(
        files=files,
        tensors=len(tensors) + len(ties),
        nbytes=model.nbytes,
        tied=ties,
        replaced=replaced,
        casts=contents.casts(tensors.values()),
    )


def write_model(
    job: SaveJob, save_format: SaveFormat, model: Model, write: Callable[[SafetensorsLayout, _Out], None]
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Write a model to one safetensors file or to a directory.

    Args:
        job: Destination and options.
        save_format: ``"safetensors"`` or ``"huggingface"``.
        model: The model.
        write: Writes the content of one file, without committing it.

    Returns:
        Size of each file in bytes, and the files that existed before.

    Raises:
        SaveError: The model was not written; what existed is intact.
    """
    destination = job.destination
    if save_format == "safetensors":
        (layout,) = model.layouts()
        out, replaced = job.file(), job.existing()
        if not job.dry_run:
            with out:
                write(layout, out)
                out.commit(nbytes=layout.nbytes)
        return {str(destination): layout.nbytes}, replaced
    planned = plan_model_directory(destination, model)
    names = list(planned.sizes)
    old = tuple(_inside(destination, name) for name in planned.old)
    if job.manifest:
        job.manifest.refuse([*old, *(_inside(destination, name) for name in names)])
    if not job.dry_run:
        names = write_model_directory(destination, model, planned, overwrite=job.overwrite, write=write)
    paths = [_inside(destination, name) for name in names]
    return dict(zip(paths, planned.sizes.values(), strict=True)), old


def _inside(destination: Path | Upload, name: str) -> str:
    return destination.url_of(name) if isinstance(destination, Upload) else str(destination / name)


def _put(out: _Out, first: int, at: int, piece: memoryview) -> None:
    out.write_at(first + at, piece)


def _hash_storages(job: SaveJob, contents: Contents, file: TorchFile) -> None:
    """Announce the tensors of a file to the manifest; those that are not a whole storage in order are hashed now."""
    assert job.manifest
    apart = []
    for name, tensor in file.hashed.items():
        job.manifest.expect(name, tensor.outline, name if tensor.storage is None else tensor.storage)
        if tensor.storage is None:
            apart.append(WrittenItem(source=tensor.source, dtype=tensor.outline.dtype, first=0, put=_drop, stored=name))
    with write_queue(0, job.staging, lambda _: None) as queue:
        write_items(queue, contents, apart, job.manifest)


def _drop(at: int, piece: memoryview) -> None:
    """Write nothing: the elements are only hashed."""
