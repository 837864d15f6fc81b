"""Save a state with DTensors, by all ranks that hold parts of it.

1. Every rank describes what it holds; all ranks compute the same files from all descriptions.
2. The lead creates each file under a hidden name; all ranks write their parts of it and make them durable.
3. The lead puts the files in place, and all ranks return.

A rank that fails in any step fails the save on every rank, and what existed is unchanged.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from types import MappingProxyType
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
from sluice.writing.contents import SavedFiles, SaveJob
from sluice.writing.formats import write_model
from sluice.writing.held_object import tensor_items
from sluice.writing.ranks.distributed_directory import write_item_files
from sluice.writing.ranks.division import DividedTensor, HeldTensor, agreed_ties, divide, dtensors_in, held_tensors
from sluice.writing.ranks.group import LEAD, RankGroup, together
from sluice.writing.ranks.items import flatten, lay_out_items, value_item
from sluice.writing.ranks.shared_writes import RankWriter
from sluice.writing.safetensors import TensorOutline, in_utf8
from sluice.writing.save_formats import SaveFormat
from sluice.writing.shards import Model
from sluice.writing.write_queue import Staging

__all__ = ["save_by_ranks"]

_NO_TORCH = 'Nothing was written. Save with format="dcp"; convert(directory, "state.pth") makes one file of it.'
_NO_MANIFEST = "Nothing was written. Save without manifest=; convert(path, copy, manifest=...) writes one."


class _Contribution(Struct, frozen=True, kw_only=True):
    """The message of a rank to the others before anything is written."""

    #: Its host, whose ranks share one amount of staging memory.
    host: str
    #: Its arguments, as text by name.
    arguments: dict[str, str]
    #: Its tensors, by name.
    held: dict[str, HeldTensor]
    #: Digest and size in bytes of the item of each of its other values, by flat name.
    values: dict[str, tuple[str, int]] = {}
    #: Path of each tensor and value in its object, by flat name.
    paths: dict[str, list[str | int]] = {}


_CONTRIBUTIONS = msgspec.msgpack.Decoder(_Contribution)  # made when this is imported: see formats.strict_json


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
    #: The messages of all ranks.
    ranks: list[_Contribution]

    def saved(self, files: Iterable[str], replaced: tuple[str, ...], tensors: int) -> SavedFiles:
        """Return what was written; the sizes of the files are not known yet."""
        return SavedFiles(
            files=dict.fromkeys(files, 0),
            tensors=tensors,
            nbytes=sum(self.written),
            tied=self.ties,
            replaced=replaced,
            ranks=self.written,
        )


def save_by_ranks(state: object, save_format: SaveFormat, job: SaveJob, error: SaveError | None) -> SavedFiles:
    """Write a state with DTensors; called by every rank that holds parts of it. All hear of ``error``.

    Raises:
        SaveError: The format cannot hold DTensors, or there is no process group.
        RankError: A rank failed. Its cause on that rank is a ``SaveError`` if the format cannot hold the state, or if
            the ranks hold parts that do not fit together.
    """
    if save_format not in _WRITERS:
        expected = f"one of {', '.join(_WRITERS)}"
        raise SaveError("this format cannot hold DTensors", expected=expected, found=save_format, advice=_NO_TORCH)
    if job.manifest:
        raise SaveError("a manifest cannot be written by ranks", advice=_NO_MANIFEST)
    dtensors: list[Any] = dtensors_in(state)
    group = group_of(dtensors)
    if group is None:
        if any(tensor.device_mesh.get_coordinate() is None for tensor in dtensors):
            advice = "Nothing was written. Call save on the ranks of the mesh only."
            raise SaveError("this rank is not part of the mesh of the tensors", advice=advice)
        if any(tensor.device_mesh.size() > 1 for tensor in dtensors):
            problem = "the state has DTensors of several ranks, but there is no process group of them"
            advice = "Nothing was written. Save before destroy_process_group(), on every rank."
            raise SaveError(problem, advice=advice)
        return _saved_by(RankGroup(), state, save_format, job, error)
    with Agreement(group, verb="save") as agreement:
        agreement.meet()
        return _saved_by(RankGroup(agreement), state, save_format, job, error)


def _saved_by(group: RankGroup, state: object, chosen: SaveFormat, job: SaveJob, error: SaveError | None) -> SavedFiles:
    saved: list[SavedFiles] = []
    given = Path(str(job.destination))
    absolute = given.absolute()  # the process may change its directory

    def work() -> bytes:
        if error is not None:
            raise error
        saved.append(_WRITERS[chosen](replace(job, destination=absolute), state, group))
        # None but on the lead.
        sizes = {os.fsencode(os.path.relpath(file, absolute)): os.path.getsize(file) for file in saved[0].files}
        replaced = [os.fsencode(os.path.relpath(file, absolute)) for file in saved[0].replaced]
        return msgspec.msgpack.encode((sizes, replaced))

    files, replaced = msgspec.msgpack.decode(together(group, work), type=tuple[dict[bytes, int], list[bytes]])
    names = {str(given / os.fsdecode(file)): nbytes for file, nbytes in files.items()}
    return replace(saved[0], files=names, replaced=tuple(str(given / os.fsdecode(file)) for file in replaced))


def _save_flat(save_format: SaveFormat, job: SaveJob, state: object, group: RankGroup) -> SavedFiles:
    held: dict[str, torch.Tensor] = {}

    def describe() -> dict[str, HeldTensor]:
        held.update(tensor_items(state))
        in_utf8("".join(held))
        return held_tensors(held, job.dtype)

    division = _divided(job, describe, group, save_format=save_format)
    outlines = {name: TensorOutline(tensor.dtype, tensor.shape) for name, tensor in division.tensors.items()}
    model = Model(tensors=outlines, ties=division.ties, metadata=job.header(), limit_bytes=job.limit_bytes)
    files: Iterable[str] = ()
    replaced: tuple[str, ...] = ()
    with _rank_writer(division, held, group) as ranks:
        if group.position == LEAD:
            files, replaced = write_model(job, save_format, model, ranks.write)
        else:
            for layout in model.layouts():
                ranks.write(layout, None)
    return division.saved(files, replaced, len(division.tensors) + len(division.ties))


def _save_distributed(job: SaveJob, state: object, group: RankGroup) -> SavedFiles:
    assert isinstance(job.destination, Path)  # ranks save to file systems
    flat, paths = flatten(state)
    held = {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}
    values = {name: value_item(value, name) for name, value in flat.items() if name not in held}
    describe = partial(held_tensors, held, job.dtype)
    division = _divided(job, describe, group, save_format="dcp", values=values, paths=paths)
    layout = lay_out_items(division.tensors, _agreed_values(division))
    every_path = {name: path for rank in division.ranks for name, path in rank.paths.items()}
    with _rank_writer(division, held, group) as ranks:
        files, replaced = write_item_files(ranks, layout, values, every_path, job.destination, overwrite=job.overwrite)
    return division.saved(files, replaced, len(division.tensors))


def _agreed_values(division: _Division) -> dict[str, tuple[int, int]]:
    """Return the first rank that has each value, and the size of its item; ranks may have different values.

    Raises:
        SaveError: Ranks have different values under one name.
    """
    found: dict[str, tuple[int, int]] = {}
    for rank, each in enumerate(division.ranks):
        for name, (digest, nbytes) in each.values.items():
            first, _ = found.setdefault(name, (rank, nbytes))
            if name in division.tensors or division.ranks[first].values[name][0] != digest:
                raise _disagreement(first, rank, "have different values in the object", name)
    return found


def _disagreement(rank: int, other: int, problem: str, name: str | None = None) -> SaveError:
    """Return the error of two ranks whose objects do not fit together; ``name`` is that of a value in them."""
    return SaveError(
        f"ranks {rank} and {other} {problem}",
        tensor=name,
        advice="Existing files are intact. Call save with the same arguments on every rank, and keep values that "
        "differ between ranks, such as random states, in files of their own.",
    )


_WRITERS: dict[SaveFormat, Callable[[SaveJob, object, RankGroup], SavedFiles]] = {
    "safetensors": partial(_save_flat, "safetensors"),
    "huggingface": partial(_save_flat, "huggingface"),
    "dcp": _save_distributed,
}


def _divided(
    job: SaveJob,
    describe: Callable[[], dict[str, HeldTensor]],
    group: RankGroup,
    *,
    save_format: SaveFormat,
    values: Mapping[str, bytes] = MappingProxyType({}),
    paths: Mapping[str, Sequence[str | int]] = MappingProxyType({}),
) -> _Division:
    """Tell all ranks what this one holds, and return what all hold.

    Args:
        job: The arguments.
        describe: Returns what this rank holds.
        group: The ranks.
        save_format: The format; but for "dcp", a tensor with several names is stored once.
        values: Items of values that are not tensors, by name.
        paths: Path of each tensor and value in the object, by name.

    Raises:
        RankError: A rank cannot describe what it holds.
        SaveError: The ranks have different arguments, or their parts do not fit together; the same on every rank.
    """
    host = this_process().host

    def contribute() -> bytes:
        own = _Contribution(
            host=host,
            arguments={"format": save_format, **_arguments(job)},
            held=describe(),
            values={name: (hashlib.sha256(item).hexdigest(), len(item)) for name, item in values.items()},
            paths={name: list(path) for name, path in paths.items()},
        )
        return zlib.compress(msgspec.msgpack.encode(own), 1)  # regions of layers are alike: a tenth of the size

    ranks = [_CONTRIBUTIONS.decode(zlib.decompress(each)) for each in group.exchange(contribute)]
    for other, rank in enumerate(ranks):
        for name, value in rank.arguments.items():
            if (first := ranks[0].arguments[name]) != value:
                problem = f"were called with different arguments: {name}={first} and {name}={value}"
                raise _disagreement(0, other, problem)
    held = [rank.held for rank in ranks]
    ties = {} if save_format == "dcp" else agreed_ties(held)
    stored = [{name: each for name, each in own.items() if name not in ties} for own in held]
    tensors = divide(stored)
    local = sum(rank.host == host for rank in ranks)
    staging = Staging.make(defaults.SAVE_STAGING_BYTES // local)
    written = _written(tensors, group.size)
    return _Division(job=replace(job, staging=staging), tensors=tensors, ties=ties, written=written, ranks=ranks)


def _arguments(job: SaveJob) -> dict[str, str]:
    return {
        "path": os.fsencode(os.path.abspath(str(job.destination))).decode(errors="backslashreplace"),
        "dtype": str(job.dtype),
        "max_shard_size": str(job.limit_bytes),
        "overwrite": str(job.overwrite),
        "metadata": repr(sorted(job.metadata.items())),
    }


def _written(tensors: Mapping[str, DividedTensor], ranks: int) -> tuple[int, ...]:
    written = [0] * ranks
    for tensor in tensors.values():
        for region, writer in tensor.parts.items():
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
