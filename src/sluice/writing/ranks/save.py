"""Save a state with DTensors, by all ranks that hold parts of it.

1. Every rank describes what it holds; all ranks compute the same files from all descriptions.
2. The lead creates each file under a hidden name; all ranks write their parts of it and make them durable.
3. The lead puts the files in place, and all ranks return.

A rank that fails in any step fails the save on every rank, and what existed is unchanged.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct
from msgspec.structs import replace

from sluice import _defaults as defaults
from sluice._dtypes import ITEM_BYTES
from sluice._errors import SaveError
from sluice.formats.safetensors.ties import declare_ties
from sluice.machine.processes import this_process
from sluice.ranks.agreement import Agreement
from sluice.ranks.membership import group_of
from sluice.sharding.regions import shape_of
from sluice.writing.chunks import Staging
from sluice.writing.durable.replacement import Replacement
from sluice.writing.items import tensor_items
from sluice.writing.ranks.division import DividedTensor, HeldTensor, agreed_ties, divide
from sluice.writing.ranks.group import LEAD, RankGroup, together
from sluice.writing.ranks.held import dtensors_in, held_tensors
from sluice.writing.ranks.item_files import ItemFiles
from sluice.writing.ranks.items import flatten, value_item
from sluice.writing.ranks.shared_writes import FilePlan, RankWriter, check_equal, different
from sluice.writing.ranks.torch_object import outline_object, pickle_flat, pickle_outlined, storage_sizes
from sluice.writing.safetensors import SafetensorsLayout, TensorOutline, lay_out_safetensors
from sluice.writing.save import SavedFiles, SaveJob, counting, header_metadata
from sluice.writing.save_formats import SaveFormat
from sluice.writing.shards import lay_out_shards, write_model_directory
from sluice.writing.torch_zip import TorchZipWriter

__all__ = ["save_by_ranks"]

#: Path of a value in the saved object, and its bytes in the file; None for a tensor.
_Item: TypeAlias = tuple[tuple[str | int, ...], bytes | None]

_NO_MANIFEST = "Nothing was written. Save without manifest=; convert(path, copy, manifest=...) writes one."


class _Contribution(Struct, frozen=True, kw_only=True):
    """The message of a rank to the others before anything is written."""

    #: Its host, whose ranks share one amount of staging memory.
    host: str
    #: Its arguments, as text by name.
    arguments: dict[str, str]
    #: Its tensors, by name.
    held: dict[str, HeldTensor]


class _Division(Struct, frozen=True, kw_only=True):
    """The tensors of all ranks, and the part of this one in writing them."""

    #: The arguments, with the staging memory of this rank.
    job: SaveJob
    #: The stored tensors of all ranks, by name.
    tensors: dict[str, DividedTensor]
    #: Names that are not stored: ``{name: stored name}``.
    ties: dict[str, str]
    #: Bytes that each rank writes.
    written: tuple[int, ...]
    #: Whether all ranks hold tensors of the same names; the stages of a pipeline do not.
    alike: bool

    def outlines(self) -> dict[str, TensorOutline]:
        """Return dtype and shape of each stored tensor."""
        return {name: TensorOutline(tensor.dtype, tensor.shape) for name, tensor in self.tensors.items()}

    def saved(self, files: list[Path], tensors: int) -> SavedFiles:
        return SavedFiles(files=files, tensors=tensors, nbytes=sum(self.written), tied=self.ties, ranks=self.written)


def save_by_ranks(state: object, save_format: SaveFormat, job: SaveJob) -> SavedFiles:
    """Write a state with DTensors; called by every rank that holds parts of it.

    Raises:
        SaveError: The format cannot hold DTensors, or there is no process group.
        RankError: A rank failed. Its cause on that rank is a ``SaveError`` if the format cannot hold the state, or if
            the ranks hold parts that do not fit together.
    """
    if save_format not in _WRITERS:
        expected = f"one of {', '.join(_WRITERS)}"
        raise SaveError("this format cannot hold DTensors", expected=expected, found=save_format)
    if job.manifest:
        raise SaveError("a manifest of DTensors cannot be written", advice=_NO_MANIFEST)
    dtensors = dtensors_in(state)
    group = group_of(dtensors)
    if group is None:
        _check_alone(dtensors)
        return _saved_by(RankGroup(), state, save_format, job)
    with Agreement(group, verb="save") as agreement:
        agreement.meet()
        return _saved_by(RankGroup(agreement), state, save_format, job)


def _check_alone(dtensors: Sequence[Any]) -> None:
    """Refuse DTensors of which other ranks hold parts, if no process group has these ranks."""
    if any(tensor.device_mesh.size() > 1 and tensor.device_mesh.get_coordinate() for tensor in dtensors):
        raise SaveError(
            "the state has DTensors of several ranks, but there is no process group of them",
            advice="Nothing was written. Save before destroy_process_group(), on every rank.",
        )


def _saved_by(group: RankGroup, state: object, save_format: SaveFormat, job: SaveJob) -> SavedFiles:
    saved: list[SavedFiles] = []

    def work() -> bytes:
        saved.append(_WRITERS[save_format](job, state, group))
        return msgspec.json.encode([str(file) for file in saved[0].files])

    files = msgspec.json.decode(together(group, work), type=list[str])
    return replace(saved[0], files=list(map(Path, files)))


def _save_torch(job: SaveJob, state: object, group: RankGroup) -> SavedFiles:
    outlined = outline_object(state)
    division = _divided(job, partial(held_tensors, outlined.storages, job.dtype), group)
    held, names = outlined.storages, outlined.walked.places
    if division.alike:
        pickled = pickle_outlined(outlined, division.tensors, division.ties, job.dtype)
    else:
        _check_flat(state)
        held, division = _flat(job, state, group)
        names = len(division.tensors) + len(division.ties)
        pickled = pickle_flat(division.tensors, division.ties)
    writer = TorchZipWriter(pickled, storage_sizes(division.tensors))
    numbers = {name: number for number, name in enumerate(division.tensors)}
    starts = {name: writer.offset(number) for name, number in numbers.items()}
    plan = FilePlan.make(writer.records_bytes, starts, pickled)
    with _rank_writer(division, held, group) as ranks:
        write = partial(ranks.write, plan, crcs=partial(_account, writer, numbers), sums=writer.sums)
        if group.position != LEAD:
            write(None)
        else:
            with Replacement(job.destination, overwrite=job.overwrite) as out:
                for sums in write(out)[LEAD + 1 :]:
                    writer.add_sums(sums)
                out.commit(nbytes=writer.finish(out))
    return division.saved([job.destination], names)


def _check_flat(state: object) -> None:
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise SaveError(
            "ranks hold different tensors, which a torch file can only join in a flat state dict",
            advice="Existing files are intact. Save the state dict of the model alone, or use format='dcp'.",
        )


def _save_safetensors(job: SaveJob, state: object, group: RankGroup) -> SavedFiles:
    held, division = _flat(job, state, group)
    layout = lay_out_safetensors(division.outlines(), declare_ties(division.ties, header_metadata(job)))
    with _rank_writer(division, held, group) as ranks:
        if group.position != LEAD:
            _write_safetensors(layout, ranks, None)
        else:
            with Replacement(job.destination, overwrite=job.overwrite) as out:
                _write_safetensors(layout, ranks, out)
                out.commit(nbytes=layout.nbytes)
    return division.saved([job.destination], len(division.tensors) + len(division.ties))


def _save_directory(job: SaveJob, state: object, group: RankGroup) -> SavedFiles:
    held, division = _flat(job, state, group)
    outlines, ties, metadata = division.outlines(), division.ties, header_metadata(job)
    files: list[Path] = []
    with _rank_writer(division, held, group) as ranks:
        if group.position != LEAD:
            for layout in lay_out_shards(outlines, ties=ties, metadata=metadata, limit_bytes=job.limit_bytes):
                _write_safetensors(layout, ranks, None)
        else:
            files = write_model_directory(
                job.destination,
                outlines,
                ties=ties,
                metadata=metadata,
                limit_bytes=job.limit_bytes,
                overwrite=job.overwrite,
                write=lambda layout, out: _write_safetensors(layout, ranks, out),
            )
    return division.saved(files, len(division.tensors) + len(division.ties))


def _save_distributed(job: SaveJob, state: object, group: RankGroup) -> SavedFiles:
    flat, paths = flatten(state)
    held = {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}
    values = {name: value_item(value, name) for name, value in flat.items() if name not in held}
    division = _divided(job, partial(held_tensors, held, job.dtype), group, tied=False)
    if not division.alike:
        items = _of_all_ranks({name: (path, values.get(name)) for name, path in paths.items()}, group)
        paths = {name: path for name, (path, _) in items.items()}
        values = {name: item for name, (_, item) in items.items() if item is not None}
    with _progress(division, group) as wrote:
        writer = ItemFiles(
            group=group,
            tensors=division.tensors,
            held=held,
            values=values,
            paths=paths,
            staging=division.job.staging,
            wrote=wrote,
        )
        files = writer.write(job.destination, overwrite=job.overwrite)
    return division.saved(files, len(division.tensors))


_WRITERS: dict[SaveFormat, Callable[[SaveJob, object, RankGroup], SavedFiles]] = {
    "torch": _save_torch,
    "safetensors": _save_safetensors,
    "huggingface": _save_directory,
    "dcp": _save_distributed,
}


def _write_safetensors(layout: SafetensorsLayout, ranks: RankWriter, out: Replacement | None) -> None:
    starts = {name: start for name, _, start in layout.tensors}
    plan = FilePlan.make(layout.nbytes, starts, layout.header)
    if out is not None:
        out.write_at(0, layout.header)
    ranks.write(plan, out)


def _account(
    writer: TorchZipWriter,
    numbers: Mapping[str, int],
    name: str,
    ends: npt.NDArray[np.int64],
    crcs: npt.NDArray[np.uint32],
) -> None:
    writer.account_runs(numbers[name], ends, crcs)


def _flat(job: SaveJob, state: object, group: RankGroup) -> tuple[dict[str, torch.Tensor], _Division]:
    """Return the tensors of a flat state dict, and what all ranks hold."""
    held: dict[str, torch.Tensor] = {}

    def describe() -> dict[str, HeldTensor]:
        held.update(tensor_items(state))
        return held_tensors(held, job.dtype)

    return held, _divided(job, describe, group)


def _divided(
    job: SaveJob, describe: Callable[[], dict[str, HeldTensor]], group: RankGroup, *, tied: bool = True
) -> _Division:
    """Tell all ranks what this one holds, and return what all hold.

    Args:
        job: The arguments.
        describe: Returns what this rank holds.
        group: The ranks.
        tied: Whether a tensor with several names is stored once.

    Raises:
        RankError: A rank cannot describe what it holds.
        SaveError: The ranks have different arguments, or their parts do not fit together; the same on every rank.
    """
    host = this_process().host

    def contribute() -> bytes:
        own = _Contribution(host=host, arguments=_arguments(job), held=describe())
        return zlib.compress(msgspec.msgpack.encode(own), 1)  # regions of layers are alike: a tenth of the size

    decode = msgspec.msgpack.Decoder(_Contribution).decode
    ranks = [decode(zlib.decompress(each)) for each in group.exchange(contribute)]
    for name in ranks[0].arguments:
        values = [rank.arguments[name] for rank in ranks]
        other = next((value for value in values if value != values[0]), "")
        check_equal(values, f"were called with different arguments: {name}={values[0]} and {name}={other}")
    held = [rank.held for rank in ranks]
    ties = agreed_ties(held) if tied else {}
    stored = [{name: each for name, each in own.items() if name not in ties} for own in held]
    tensors = divide(stored)
    local = sum(rank.host == host for rank in ranks)
    staging = Staging.make(defaults.SAVE_STAGING_BYTES // local)
    return _Division(
        job=replace(job, staging=staging),
        tensors=tensors,
        ties=ties,
        written=_written(tensors, group.size),
        alike=all(own.keys() == held[0].keys() for own in held),
    )


def _of_all_ranks(own: Mapping[str, _Item], group: RankGroup) -> dict[str, _Item]:
    """Return what all ranks have by name.

    Raises:
        SaveError: Ranks have different values of one name; the same on every rank.
    """
    decode = msgspec.msgpack.Decoder(dict[str, _Item]).decode
    joined: dict[str, _Item] = {}
    for rank, items in enumerate(map(decode, group.exchange(lambda: msgspec.msgpack.encode(own)))):
        for name, item in items.items():
            if joined.setdefault(name, item) != item:
                raise different(f"rank {rank} and one before it have different values of {name!r}")
    return joined


def _arguments(job: SaveJob) -> dict[str, str]:
    return {
        "path": os.path.abspath(job.destination),
        "dtype": str(job.dtype),
        "max_shard_size": str(job.limit_bytes),
        "overwrite": str(job.overwrite),
        "metadata": repr(sorted(job.metadata.items())),
    }


def _written(tensors: Mapping[str, DividedTensor], ranks: int) -> tuple[int, ...]:
    written = [0] * ranks
    for tensor in tensors.values():
        for region, writer in zip(tensor.regions, tensor.writers, strict=True):
            written[writer] += prod(shape_of(region)) * ITEM_BYTES[tensor.dtype]
    return tuple(written)


@contextmanager
def _rank_writer(division: _Division, held: Mapping[str, torch.Tensor], group: RankGroup) -> Iterator[RankWriter]:
    with _progress(division, group) as wrote:
        yield RankWriter(group=group, tensors=division.tensors, held=held, staging=division.job.staging, wrote=wrote)


@contextmanager
def _progress(division: _Division, group: RankGroup) -> Iterator[Callable[[int], None]]:
    """Yield a function that reports the bytes of each piece, and ends the work if a different rank has failed."""
    with counting(division.job, division.written[group.position]) as count:

        def wrote(nbytes: int) -> None:
            count(nbytes)
            group.look()

        yield wrote
