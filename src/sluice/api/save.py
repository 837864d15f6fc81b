"""``sluice.save``: a module, a state dict or a training state to disk, through a fixed amount of memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from sluice import _options as options
from sluice._dtypes import ITEM_BYTES, dtype_name
from sluice._errors import SaveError
from sluice._progress import Progress, byte_progress
from sluice._units import parse_bytes
from sluice.formats.manifest import HashAlgorithm
from sluice.reports.save import SaveReport
from sluice.writing.chunks import Staging
from sluice.writing.durable.replacement import NewFile, Replacement, saving
from sluice.writing.items import flat_tensors, named_tensors, outlines
from sluice.writing.manifest import ManifestWriter, manifest_writer
from sluice.writing.parameters import check_file_names, parameter_directory, parameter_file
from sluice.writing.safetensors import SafetensorsLayout, TensorOutline, lay_out_safetensors
from sluice.writing.shards import write_model_directory
from sluice.writing.torch_zip import lay_out_torch_zip, write_torch_zip
from sluice.writing.write_queue import write_queue

__all__ = ["SaveFormat", "choose_format", "save"]

#: ``huggingface`` is a directory: one safetensors file, or shards and their index.
SaveFormat = Literal["safetensors", "torch", "huggingface", "per-parameter"]

_SUFFIXES: dict[str, SaveFormat] = {
    ".safetensors": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".ckpt": "torch",
}


def save(
    obj: nn.Module | torch.optim.Optimizer | Mapping[str, object],
    path: str | os.PathLike[str],
    *,
    format: SaveFormat | None = None,  # noqa: A002  (the name that every library has for it)
    dtype: torch.dtype | None = None,
    max_shard_size: int | str | None = None,
    metadata: Mapping[str, str] | None = None,
    manifest: str | os.PathLike[str] | None = None,
    manifest_hash: HashAlgorithm = "sha256",
    overwrite: bool = False,
    progress: Progress = False,
) -> SaveReport:
    """Write weights to disk, whole or not at all, with a fixed amount of memory beside what is saved.

    What is cast, strided or on an accelerator goes through one buffer; nothing is copied as a whole. The file is
    written beside its final name, synced and renamed, so that a crash leaves the old file or the new one.

    Args:
        obj: A module or an optimizer (its ``state_dict()`` is saved), a state dict, or a nested training state.
        path: A file or a directory. A file may be the very one that the weights were loaded from.
        format: ``"torch"`` (``torch.load(weights_only=True)`` reads it), ``"safetensors"``, ``"huggingface"`` (a
            directory with ``model.safetensors``, or shards and an index) or ``"per-parameter"`` (a directory with a
            file for each tensor). None decides by the suffix: ``.safetensors``; ``.pt``, ``.pth``, ``.bin`` and
            ``.ckpt`` are torch; without a suffix, or with ``max_shard_size``, a Hugging Face directory.
        dtype: Cast real floating-point tensors to this; None keeps each one's own.
        max_shard_size: Bytes of tensors in one shard, such as ``"5GB"``; only for ``"huggingface"``.
        metadata: Text for the headers of safetensors files, such as ``checkpoint.metadata``; in a torch file such texts
            are part of ``obj``.
        manifest: Where to write the hash, dtype and shape of each tensor, for ``verify``; they are hashed on their way
            to the disk, and this file gets its name after the data.
        manifest_hash: ``"sha256"``, or ``"xxh3_128"``, which is faster and only finds damage.
        overwrite: Whether what exists may be replaced, the manifest too.
        progress: True draws a bar; a function is called with each ``ProgressEvent``.

    Raises:
        SaveError: It cannot be saved so, or the operating system failed; what existed is intact.
        ValueError: The format is unknown or does not go with the other arguments.
        ImportError: The hash needs a library that is not installed.

    Example:
        >>> report = sluice.save(model, "half.safetensors", dtype=torch.bfloat16, manifest="model.manifest.json")
    """
    started = time.perf_counter()
    destination = Path(os.fsdecode(path))
    chosen = choose_format(destination, format, max_shard_size)
    if metadata and chosen not in {"safetensors", "huggingface"}:
        raise ValueError(f"metadata goes into the header of safetensors files; {chosen!r} has none")
    job = _Job(
        destination=destination,
        dtype=dtype_name(dtype) if dtype is not None else None,
        limit_bytes=None if max_shard_size is None else parse_bytes(max_shard_size),
        metadata={"format": "pt", **(metadata or {})},
        overwrite=overwrite,
        staging=Staging.make(options.SAVE_STAGING_BYTES),
        manifest=manifest_writer(manifest, manifest_hash, destination, overwrite=overwrite),
    )
    state = obj.state_dict() if isinstance(obj, (nn.Module, torch.optim.Optimizer)) else obj
    files, tensors, nbytes, tied = _WRITERS[chosen](job, state, progress)
    if job.manifest:
        job.manifest.commit()
    return SaveReport(
        destination=str(path),
        format=chosen,
        files=tuple(map(str, files)),
        tensors=tensors,
        nbytes=nbytes,
        seconds=time.perf_counter() - started,
        tied=tied,
        file_bytes=tuple(os.path.getsize(file) for file in files),
    )


def choose_format(path: Path, asked: str | None, max_shard_size: int | str | None) -> str:
    """Return the format that a path and the arguments of ``save`` ask for.

    Raises:
        ValueError: None is known, or they do not go together.
    """
    if asked is not None and asked not in _WRITERS:
        raise ValueError(f"unknown format {asked!r}: one of {', '.join(_WRITERS)}")
    suffix = path.suffix.lower()
    named = _SUFFIXES.get(suffix)
    if named is None and (suffix == "" or max_shard_size is not None):
        named = "huggingface"
    chosen = asked or named
    if chosen is None:
        raise ValueError(f"no format for the suffix {path.suffix!r}: name one with format=")
    if suffix in _SUFFIXES and chosen != named:
        raise ValueError(f"format={chosen!r} contradicts the suffix {path.suffix!r}, which is that of {named!r}")
    if max_shard_size is not None and chosen != "huggingface":
        raise ValueError(f"max_shard_size goes with a directory of shards, not with {chosen!r}")
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    destination: Path
    dtype: str | None
    limit_bytes: int | None
    metadata: Mapping[str, str]
    overwrite: bool
    staging: Staging
    manifest: ManifestWriter | None


#: Files, tensors, bytes of data, and names that were not stored because another name has the tensor.
_Written = tuple[list[Path], int, int, dict[str, str]]


def _save_torch(job: _Job, state: object, progress: Progress) -> _Written:
    saved = lay_out_torch_zip(state, job.dtype)
    nbytes = saved.writer.nbytes
    names = named_tensors(state) if job.manifest else {}
    with ExitStack() as stack:
        out = stack.enter_context(Replacement(job.destination, overwrite=job.overwrite))
        wrote = stack.enter_context(_counting(progress, job.destination, nbytes))
        out.commit(nbytes=write_torch_zip(saved, out, job.staging, wrote, job.manifest, names))
    return [job.destination], saved.tensors, nbytes, {}


def _save_safetensors(job: _Job, state: object, progress: Progress) -> _Written:
    tensors, aliases = _stored_once(_flat(state))
    layout = lay_out_safetensors(outlines(tensors, job.dtype), _metadata(job, aliases))
    nbytes = layout.nbytes - len(layout.header)
    with ExitStack() as stack:
        out = stack.enter_context(Replacement(job.destination, overwrite=job.overwrite))
        wrote = stack.enter_context(_counting(progress, job.destination, nbytes))
        _write_safetensors(layout, tensors, out, job, wrote)
        out.commit(nbytes=layout.nbytes)
    return [job.destination], len(tensors), nbytes, aliases


def _save_directory(job: _Job, state: object, progress: Progress) -> _Written:
    tensors, aliases = _stored_once(_flat(state))
    described = outlines(tensors, job.dtype)
    nbytes = _data_bytes(described)
    with _counting(progress, job.destination, nbytes) as wrote:
        files = write_model_directory(
            job.destination,
            described,
            metadata=_metadata(job, aliases),
            limit_bytes=job.limit_bytes,
            overwrite=job.overwrite,
            write=lambda layout, out: _write_safetensors(layout, tensors, out, job, wrote),
        )
    return files, len(tensors), nbytes, aliases


def _save_parameters(job: _Job, state: object, progress: Progress) -> _Written:
    tensors = _flat(state, dense=False)
    if job.manifest:
        named_tensors(tensors)  # refuses what has no hash
    check_file_names(tensors)
    stored, aliases = _stored_once(tensors)
    nbytes = sum(lay_out_torch_zip(tensor, job.dtype).writer.nbytes for tensor in stored.values())
    with ExitStack() as stack:
        wrote = stack.enter_context(_counting(progress, job.destination, nbytes))
        hidden = stack.enter_context(parameter_directory(job.destination, tensors, overwrite=job.overwrite))
        for name, tensor in stored.items():
            same = [name, *(other for other, kept in aliases.items() if kept == name)]
            saved = lay_out_torch_zip(tensor, job.dtype)
            with NewFile(hidden / parameter_file(name)) as out:
                named = dict.fromkeys(same, tensor)
                out.seal(nbytes=write_torch_zip(saved, out, job.staging, wrote, job.manifest, named))
        with saving(str(job.destination)):
            for name, kept in aliases.items():  # stored once, and readable under both names
                os.link(hidden / parameter_file(kept), hidden / parameter_file(name))
    return [job.destination / parameter_file(name) for name in tensors], len(stored), nbytes, aliases


_WRITERS: dict[str, Callable[[_Job, object, Progress], _Written]] = {
    "torch": _save_torch,
    "safetensors": _save_safetensors,
    "huggingface": _save_directory,
    "per-parameter": _save_parameters,
}


def _flat(state: object, *, dense: bool = True) -> dict[str, torch.Tensor]:
    if not isinstance(state, Mapping):
        raise SaveError("this format holds a state dict", found=type(state).__name__)
    return dict(flat_tensors(state, dense=dense))


def _metadata(job: _Job, aliases: Mapping[str, str]) -> dict[str, str]:
    """Return the texts of a safetensors header: the caller's, and the other names of tensors."""
    wrong = next((part for item in job.metadata.items() for part in item if not isinstance(part, str)), None)
    if wrong is not None:
        raise SaveError("metadata of safetensors is text to text", found=repr(wrong))
    for name in job.metadata.keys() & aliases.keys():
        if job.metadata[name] != aliases[name]:
            raise SaveError("the metadata has the name of a tensor that is stored under another", tensor=name)
    return {**job.metadata, **aliases}


def _data_bytes(tensors: Mapping[str, TensorOutline]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _stored_once(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors without further names of the same tensor, and those names with the one that stays.

    The name that stays is the first in alphabetical order, as with safetensors' own ``save_model``.
    """
    firsts: dict[object, str] = {}
    aliases: dict[str, str] = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        if tensor.numel() == 0 or tensor.layout != torch.strided or tensor.is_quantized:
            continue
        same = (tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride())
        kept = firsts.setdefault(same, name)
        if kept != name:
            aliases[name] = kept
    return {name: tensor for name, tensor in tensors.items() if name not in aliases}, aliases


def _write_safetensors(
    layout: SafetensorsLayout,
    tensors: Mapping[str, torch.Tensor],
    file: NewFile,
    job: _Job,
    wrote: Callable[[int], None],
) -> None:
    """Write what was decided; the caller commits.

    Args:
        layout: From ``lay_out_safetensors``.
        tensors: The same tensors.
        file: Where to.
        job: How.
        wrote: Called with the bytes of each piece.
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
def _counting(progress: Progress, destination: Path, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the bytes of each piece and feeds ``progress`` with their sum."""
    with byte_progress(progress, str(destination), total_bytes) as report:
        done = 0

        def wrote(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if report:
                report(done)

        yield wrote
