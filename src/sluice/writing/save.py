"""Save an object in one of the formats: lay out, write through staging, and put the files in place at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
from msgspec import Struct

from sluice._dtypes import ITEM_BYTES
from sluice._errors import SaveError
from sluice._progress import Progress, byte_progress
from sluice.checkpoint.tied_names import TIES_FILE
from sluice.formats.safetensors.ties import declare_ties
from sluice.writing.aliases import stored_once
from sluice.writing.chunks import Staging
from sluice.writing.durable.replacement import NewFile, Replacement
from sluice.writing.items import flat_tensors, named_tensors, outlines
from sluice.writing.manifest import ManifestWriter
from sluice.writing.parameters import check_file_names, link_ties, parameter_directory, parameter_file
from sluice.writing.safetensors import SafetensorsLayout, lay_out_safetensors
from sluice.writing.save_formats import SaveFormat
from sluice.writing.shards import write_model_directory
from sluice.writing.torch_zip import lay_out_torch_zip, write_torch_zip
from sluice.writing.write_queue import write_queue

__all__ = ["SaveJob", "SavedFiles", "counting", "header_metadata", "save_state"]


class SaveJob(Struct, frozen=True, kw_only=True):
    """The arguments of one save."""

    #: The file or directory to write.
    destination: Path
    #: Dtype that real floating-point tensors are cast to; None keeps each dtype.
    dtype: str | None
    #: Bytes of tensors in one shard; None for a single file.
    limit_bytes: int | None
    #: Text for the headers of safetensors files.
    metadata: Mapping[str, str]
    #: Whether existing files may be replaced.
    overwrite: bool
    #: Buffers for tensors that are cast, strided or on an accelerator.
    staging: Staging
    #: Writer of the manifest; None if none was requested.
    manifest: ManifestWriter | None
    #: Progress bar or function.
    progress: Progress


class SavedFiles(Struct, frozen=True, kw_only=True):
    """The files of one save."""

    #: Paths, the index of a sharded model last.
    files: list[Path]
    #: Number of names with a tensor.
    tensors: int
    #: Bytes of tensor data.
    nbytes: int
    #: Names that are not stored because another name has the same tensor: ``{name: stored name}``.
    tied: Mapping[str, str]
    #: Bytes of tensor data that each rank wrote; empty if one process wrote all of it.
    ranks: tuple[int, ...] = ()


def save_state(state: object, save_format: SaveFormat, job: SaveJob) -> SavedFiles:
    """Write a state dict or a nested training state, and its manifest; by all ranks together if it has DTensors.

    Raises:
        SaveError: The format cannot hold the object, or the operating system failed.
    """
    if save_format == "dcp" or "torch.distributed.tensor" in sys.modules:  # otherwise there is no DTensor
        from sluice.writing.ranks.held import dtensors_in
        from sluice.writing.ranks.save import save_by_ranks

        if save_format == "dcp" or dtensors_in(state):
            return save_by_ranks(state, save_format, job)
    saved = _WRITERS[save_format](job, state)
    if job.manifest:
        job.manifest.commit()
    return saved


def _save_torch(job: SaveJob, state: object) -> SavedFiles:
    saved = lay_out_torch_zip(state, job.dtype)
    nbytes = saved.writer.nbytes
    names = named_tensors(state) if job.manifest else {}
    with ExitStack() as stack:
        out = stack.enter_context(Replacement(job.destination, overwrite=job.overwrite))
        wrote = stack.enter_context(counting(job, nbytes))
        out.commit(nbytes=write_torch_zip(saved, out, job.staging, wrote, job.manifest, names))
    return SavedFiles(files=[job.destination], tensors=saved.tensors, nbytes=nbytes, tied={})


def _save_safetensors(job: SaveJob, state: object) -> SavedFiles:
    tensors, aliases = stored_once(_flat(state), _identity)
    layout = lay_out_safetensors(outlines(tensors, job.dtype), declare_ties(aliases, header_metadata(job)))
    nbytes = layout.nbytes - len(layout.header)
    with ExitStack() as stack:
        out = stack.enter_context(Replacement(job.destination, overwrite=job.overwrite))
        wrote = stack.enter_context(counting(job, nbytes))
        _write_safetensors(layout, tensors, out, job, wrote)
        out.commit(nbytes=layout.nbytes)
    return _saved(job, [job.destination], tensors, aliases, nbytes)


def _save_directory(job: SaveJob, state: object) -> SavedFiles:
    tensors, aliases = stored_once(_flat(state), _identity)
    described = outlines(tensors, job.dtype)
    nbytes = sum(tensor.nbytes for tensor in described.values())
    with counting(job, nbytes) as wrote:
        files = write_model_directory(
            job.destination,
            described,
            ties=aliases,
            metadata=header_metadata(job),
            limit_bytes=job.limit_bytes,
            overwrite=job.overwrite,
            write=lambda layout, out: _write_safetensors(layout, tensors, out, job, wrote),
        )
    return _saved(job, files, tensors, aliases, nbytes)


def _saved(
    job: SaveJob, files: list[Path], stored: Mapping[str, torch.Tensor], ties: Mapping[str, str], nbytes: int
) -> SavedFiles:
    if job.manifest:
        job.manifest.repeat(ties)
    return SavedFiles(files=files, tensors=len(stored) + len(ties), nbytes=nbytes, tied=ties)


def _save_parameters(job: SaveJob, state: object) -> SavedFiles:
    tensors = _flat(state, dense=False)
    if job.manifest:
        named_tensors(tensors)  # refuses what has no hash
    check_file_names(tensors)
    stored, aliases = stored_once(tensors, _identity_in_pickle)
    nbytes = sum(lay_out_torch_zip(tensor, job.dtype).writer.nbytes for tensor in stored.values())
    with ExitStack() as stack:
        wrote = stack.enter_context(counting(job, nbytes))
        hidden = stack.enter_context(parameter_directory(job.destination, tensors, overwrite=job.overwrite))
        for name, tensor in stored.items():
            same = [name, *(other for other, kept in aliases.items() if kept == name)]
            saved = lay_out_torch_zip(tensor, job.dtype)
            with NewFile(hidden / parameter_file(name)) as out:
                named = dict.fromkeys(same, tensor)
                out.seal(nbytes=write_torch_zip(saved, out, job.staging, wrote, job.manifest, named))
        link_ties(hidden, aliases)
    files = [job.destination / parameter_file(name) for name in tensors]
    files += [job.destination / TIES_FILE] * bool(aliases)
    return SavedFiles(files=files, tensors=len(tensors), nbytes=nbytes, tied=aliases)


_WRITERS: dict[SaveFormat, Callable[[SaveJob, object], SavedFiles]] = {
    "torch": _save_torch,
    "safetensors": _save_safetensors,
    "huggingface": _save_directory,
    "per-parameter": _save_parameters,
}


def _flat(state: object, *, dense: bool = True) -> dict[str, torch.Tensor]:
    return dict(flat_tensors(state, dense=dense))


def header_metadata(job: SaveJob) -> Mapping[str, str]:
    """Return the caller's metadata for a safetensors header."""
    invalid = next((part for item in job.metadata.items() for part in item if not isinstance(part, str)), None)
    if invalid is not None:
        raise SaveError("safetensors metadata must map text to text", found=repr(invalid))
    return job.metadata


def _identity(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Return equal keys for tensors with the same elements in the same memory; None if it is always stored."""
    if tensor.numel() == 0 or tensor.layout != torch.strided or tensor.is_quantized:
        return None
    view = tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride(), view


def _identity_in_pickle(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Return equal keys for tensors whose ``torch.save`` files are equal; None if it is always stored."""
    same = _identity(tensor)
    return None if same is None else (*same, type(tensor), tensor.requires_grad, id(tensor) if vars(tensor) else 0)


def _write_safetensors(
    layout: SafetensorsLayout,
    tensors: Mapping[str, torch.Tensor],
    file: NewFile,
    job: SaveJob,
    wrote: Callable[[int], None],
) -> None:
    """Write header and tensors of one file, which the caller commits.

    Args:
        layout: The layout of the file.
        tensors: The tensors, by name.
        file: The file to write.
        job: The arguments of the save.
        wrote: Called with the bytes of each written piece.
    """
    file.reserve(layout.nbytes, job.staging.pool)
    file.write_at(0, layout.header)
    with write_queue(layout.nbytes, job.staging, wrote) as queue:
        for name, dtype, start in layout.tensors:
            look = None
            if job.manifest:
                shape = tensors[name].shape
                job.manifest.expect(name, dtype=dtype, shape=shape, nbytes=shape.numel() * ITEM_BYTES[dtype])
                look = job.manifest.in_order(name)
            queue.write(tensors[name], dtype, start, partial(_write_from, file, start), look)
            if job.manifest:
                job.manifest.done(name)


def _write_from(file: NewFile, start: int, at: int, piece: memoryview) -> None:
    file.write_at(start + at, piece)


@contextmanager
def counting(job: SaveJob, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that is called with the bytes of each piece and reports their sum."""
    with byte_progress(job.progress, str(job.destination), total_bytes) as report:
        done = 0

        def wrote(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if report:
                report(done)

        yield wrote
