"""The record of a classified location, which ``opening.classify`` returns and everything below it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from sluice.formats.detection import Head
from sluice.sources.directory import Directory, LocalDirectory
from sluice.sources.opening import Place
from sluice.sources.protocol import Source

if TYPE_CHECKING:
    from sluice.formats.shard_index import ShardIndex

__all__ = ["METADATA_FILE", "PARAMETER_SUFFIX", "PLACES", "CheckpointLayout"]

#: File that describes a torch.distributed.checkpoint directory.
METADATA_FILE = ".metadata"

#: Suffix of the files of a directory with one file for each parameter.
PARAMETER_SUFFIX = ".pt"

#: Key of the metadata of a shard that torch's ``HuggingFaceStorageWriter`` wrote: the places of its chunks in their
#: tensors.
PLACES = "DCP_SHARDING_INFO"


class CheckpointLayout(Struct, frozen=True, kw_only=True):
    """The files that make up a checkpoint, before any of them is indexed."""

    #: Path of the file, directory or index file, or its address without credentials; for messages.
    path: str
    #: Its location.
    place: Place = Place(kind="local", title="")
    #: ``file``: one open file; ``whole``: one model file of a directory; ``shards``: parts with an index; ``parts``:
    #: state dicts without repetition; ``parameters``: one tensor each; ``distributed``: the files that the metadata
    #: file names; ``ranks``: one of each rank, with prefixes; ``zero``: the weights of DeepSpeed's ZeRO;
    #: ``zero-optimizer``: its optimizer.
    kind: Literal["file", "whole", "shards", "parts", "parameters", "distributed", "ranks", "zero", "zero-optimizer"]
    #: The open file, for ``file``.
    source: Source | None = None
    #: Its first bytes, if the checkpoint begins there.
    head: Head | None = None
    #: First byte of the checkpoint in ``source``, if other objects may follow it; None if it is the whole file.
    start: int | None = None
    #: The directory that holds ``files``; without meaning for ``file``.
    directory: Directory = LocalDirectory("")
    #: Relative names of the files, with forward slashes. They need not exist; ``distributed`` has one.
    files: tuple[str, ...] = ()
    #: The index, for ``shards``.
    shard_index: ShardIndex | None = None
    #: Notes for the report, each a sentence.
    notes: tuple[str, ...] = ()
