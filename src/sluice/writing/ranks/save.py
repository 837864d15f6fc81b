"""Save a state with DTensors, by all ranks that hold parts of it.

1. Every rank describes what it holds; all ranks compute the same files from all descriptions.
2. The lead creates each file under a hidden name; all ranks write their parts of it and make them durable.
3. The lead puts the files in place, and all ranks return.

A rank that fails in any step fails the save on every rank, and what existed is unchanged.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import msgspec
import torch
from msgspec import Struct
from msgspec.structs import replace

from sluice import _defaults as defaults
from sluice._dtypes import ITEM_BYTES
from sluice._errors import SaveError
from sluice.machine.processes import this_process
from sluice.ranks.agreement import Agreement
from sluice.ranks.membership import group_of
from sluice.sharding.regions import shape_of
from sluice.writing.chunks import Staging
from sluice.writing.formats import write_model
from sluice.writing.items import tensor_items
from sluice.writing.ranks.division import DividedTensor, HeldTensor, agreed_ties, divide
from sluice.writing.ranks.group import LEAD, RankGroup, together
from sluice.writing.ranks.held import dtensors_in, held_tensors
from sluice.writing.ranks.shared_writes import RankWriter, check_equal
from sluice.writing.safetensors import TensorOutline
from sluice.writing.save_formats import SaveFormat
from sluice.writing.save_job import SavedFiles, SaveJob
from sluice.writing.shards import Model

__all__ = ["save_by_ranks"]

_NO_TORCH = "Nothing was written. Save as safetensors; torch.distributed.checkpoint.save writes nested states of ranks."
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

    def outlines(self) -> dict[str, TensorOutline]:
        """Return dtype and shape of each stored tensor."""
        return {name: TensorOutline(tensor.dtype, tensor.shape) for name, tensor in self.tensors.items()}


def save_by_ranks(state: object, save_format: SaveFormat, job: SaveJob) -> SavedFiles:
    """Write a state with DTensors; called by every rank that holds parts of it.

    Raises:
        SaveError: The format cannot hold DTensors, or there is no process group.
        RankError: A rank failed. Its cause on that rank is a ``SaveError`` if the format cannot hold the state, or if
            the ranks hold parts that do not fit together.
    """
    if save_format == "torch":
        raise SaveError("this format cannot hold DTensors", found=save_format, advice=_NO_TORCH)
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
    divisions: list[_Division] = []

    def work() -> bytes:
        held: dict[str, torch.Tensor] = {}
        division = _divided(job, state, held, group)
        divisions.append(division)
        return msgspec.json.encode(_write(division, held, group, save_format))

    files = msgspec.json.decode(together(group, work), type=dict[str, int])
    (division,) = divisions
    return SavedFiles(
        files=files,
        tensors=len(division.tensors) + len(division.ties),
        nbytes=sum(division.written),
        tied=division.ties,
        ranks=division.written,
    )


def _write(
    division: _Division, held: Mapping[str, torch.Tensor], group: RankGroup, save_format: SaveFormat
) -> dict[str, int]:
    """Write the part of this rank; return the size of each file on the lead, and nothing on other ranks."""
    job = division.job
    outlines = division.outlines()
    model = Model(tensors=outlines, ties=division.ties, metadata=job.header(), limit_bytes=job.limit_bytes)
    with _rank_writer(division, held, group) as ranks:
        if group.position == LEAD:
            files, _ = write_model(job, save_format, model, ranks.write)
            return files
        for layout in model.layouts():
            ranks.write(layout, None)
        return {}


def _divided(job: SaveJob, state: object, held: dict[str, torch.Tensor], group: RankGroup) -> _Division:
    """Tell all ranks what this one holds, and return what all hold.

    Args:
        job: The arguments.
        state: A flat state dict.
        held: Filled with its tensors, by name.
        group: The ranks.

    Raises:
        RankError: A rank cannot describe what it holds.
        SaveError: The ranks have different arguments, or their parts do not fit together; the same on every rank.
    """
    host = this_process().host

    def contribute() -> bytes:
        held.update(tensor_items(state))
        own = _Contribution(host=host, arguments=_arguments(job), held=held_tensors(held, job.dtype))
        return zlib.compress(msgspec.msgpack.encode(own), 1)  # regions of layers are alike: a tenth of the size

    decode = msgspec.msgpack.Decoder(_Contribution).decode
    ranks = [decode(zlib.decompress(each)) for each in group.exchange(contribute)]
    for name in ranks[0].arguments:
        given = [rank.arguments[name] for rank in ranks]
        other = next((value for value in given if value != given[0]), "")
        check_equal(given, f"were called with different arguments: {name}={given[0]} and {name}={other}")
    ties = agreed_ties([rank.held for rank in ranks])
    tensors = divide([{name: each for name, each in rank.held.items() if name not in ties} for rank in ranks])
    staging = Staging.make(defaults.SAVE_STAGING_BYTES // sum(rank.host == host for rank in ranks))
    written = _written(tensors, group.size)
    return _Division(job=replace(job, staging=staging), tensors=tensors, ties=ties, written=written)


def _arguments(job: SaveJob) -> dict[str, str]:
    return {
        "path": os.path.abspath(str(job.destination)),
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
    """Yield a writer that reports the bytes of each piece, and ends the work if a different rank has failed."""
    job = division.job
    with job.counting(division.written[group.position]) as count:

        def wrote(nbytes: int) -> None:
            count(nbytes)
            group.look()

        yield RankWriter(group=group, tensors=division.tensors, held=held, staging=job.staging, wrote=wrote)
