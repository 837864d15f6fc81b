"""Arguments and tensors of a save or a conversion, in memory or in a checkpoint, and the files that it has written."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from msgspec import Struct, field

from sluice import _defaults as defaults
from sluice._dtypes import ITEM_BYTES
from sluice._errors import SaveError
from sluice._progress import Progress, byte_progress
from sluice.writing.durable.replacement import Replacement
from sluice.writing.manifest import ManifestWriter
from sluice.writing.safetensors import TensorOutline
from sluice.writing.torch_zip import TorchFile
from sluice.writing.uploads import Upload, UploadedFile
from sluice.writing.write_queue import Put, Staging, WriteQueue

__all__ = ["Contents", "SaveJob", "SavedFiles", "WrittenItem", "stored_once", "write_items"]

_Tensor = TypeVar("_Tensor")


class SaveJob(Struct, frozen=True, kw_only=True):
    """The arguments of one save or conversion."""

    #: The file or directory to write.
    destination: Path | Upload
    #: Dtype that real floating-point tensors are cast to; None keeps each dtype.
    dtype: str | None
    #: Bytes of tensors in one shard; None for a single file.
    limit_bytes: int | None
    #: Text for the headers of safetensors files.
    metadata: Mapping[str, str]
    #: Whether existing files may be replaced.
    overwrite: bool
    #: Buffers for tensors that are cast, strided or on an accelerator.
    staging: Staging = field(default_factory=lambda: Staging.make(defaults.SAVE_STAGING_BYTES))
    #: Writer of the manifest; None if none was requested.
    manifest: ManifestWriter | None
    #: Progress bar or function.
    progress: Progress
    #: Whether to lay out only and write nothing.
    dry_run: bool = False

    @property
    def in_order(self) -> bool:
        """Whether each file is written from its first byte to its last."""
        return isinstance(self.destination, Upload)

    def file(self) -> Replacement | UploadedFile:
        """Return the file at the destination, which is written in its ``with`` block.

        Raises:
            SaveError: It exists and may not or cannot be replaced.
        """
        if isinstance(self.destination, Upload):
            return self.destination.file(overwrite=self.overwrite)
        return Replacement(self.destination, overwrite=self.overwrite or self.dry_run)

    def existing(self) -> tuple[str, ...]:
        """Return the path of the file at the destination if it exists."""
        place = self.destination
        found = place.exists("") if isinstance(place, Upload) else os.path.lexists(place)
        return (str(place),) if found else ()

    def header(self) -> Mapping[str, str]:
        """Return the text for a safetensors header.

        Raises:
            SaveError: It is not text.
        """
        invalid = next((part for item in self.metadata.items() for part in item if not isinstance(part, str)), None)
        if invalid is not None:
            raise SaveError("safetensors metadata must map text to text", found=repr(invalid))
        return self.metadata

    @contextmanager
    def counting(self, total_bytes: int) -> Iterator[Callable[[int], None]]:
        """Yield a function that is called with the bytes of each piece and reports their sum."""
        if self.dry_run:
            yield lambda _: None
            return
        with byte_progress(self.progress, str(self.destination), total_bytes) as report:
            done = 0

            def wrote(nbytes: int) -> None:
                nonlocal done
                done += nbytes
                if report:
                    report(done)

            yield wrote


class SavedFiles(Struct, frozen=True, kw_only=True):
    """The files of one save, or those that it would write."""

    #: Size of each file, by its path or address; the index of a sharded model is the last.
    files: Mapping[str, int]
    #: Number of names with a tensor.
    tensors: int
    #: Bytes of tensor data.
    nbytes: int
    #: Names that are not stored because another name has the same tensor: ``{name: stored name}``.
    tied: Mapping[str, str] = field(default_factory=dict)
    #: Files that existed before.
    replaced: tuple[str, ...] = ()
    #: Number of cast tensors by pair of dtypes.
    casts: Mapping[str, int] = field(default_factory=dict)
    #: Bytes of tensor data that each rank wrote; empty if one process wrote all of it.
    ranks: tuple[int, ...] = ()


class WrittenItem(Struct, frozen=True, kw_only=True):
    """A tensor or storage of a file: its row-major elements are consecutive bytes."""

    #: Holder of the elements, for ``Contents.pieces``.
    source: Any
    #: Dtype in the file.
    dtype: str
    #: First byte in the file.
    first: int
    #: Writes bytes of it, from any thread.
    put: Put
    #: Key of the item in the manifest.
    stored: Hashable


class Contents(Protocol):
    """Tensors to write. They are values of any kind: ``torch.Tensor`` or ``Entry``."""

    #: A nested object with tensors, or a state dict.
    tree: object

    def named(self) -> Mapping[str, Any]:
        """Return the tensors of the tree by the names under which ``sluice.open`` shows them."""
        ...

    def distinct(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return each tensor of the state dict under one name, and its other names: ``{name: stored name}``.

        Raises:
            SaveError: It is not a state dict, or has a tensor that the format cannot store.
        """
        ...

    def outlines(self, tensors: Mapping[str, Any]) -> dict[str, TensorOutline]:
        """Return dtype and shape in the file of each tensor."""
        ...

    def casts(self, tensors: Iterable[Any]) -> Mapping[str, int]:
        """Return the number of cast tensors by pair of dtypes; a save does not count them."""
        ...

    def lay_out(self, obj: object, named: Mapping[str, Any]) -> TorchFile:
        """Return the layout of the torch file of an object; no tensor data is read.

        Args:
            obj: A tensor, or an object with tensors.
            named: Its tensors by their names in the manifest; empty without one.

        Raises:
            SaveError: It contains something that ``torch.load(weights_only=True)`` would refuse, or a tensor that
                cannot be saved.
        """
        ...

    def pieces(
        self, items: Iterable[WrittenItem], drain: Callable[[], None]
    ) -> Iterator[tuple[WrittenItem, torch.Tensor]]:
        """Yield the elements of each item in row-major order, in pieces that live until they are written.

        Args:
            items: The items; each has at least one piece.
            drain: Waits for all writes of the pieces so far.
        """
        ...


def write_items(
    queue: WriteQueue, contents: Contents, items: Iterable[WrittenItem], manifest: ManifestWriter | None = None
) -> None:
    """Write items one after the other, and hash them."""
    last, at, look = None, 0, None
    for item, tensor in contents.pieces(items, queue.drain):
        if item is not last:
            last, at, look = item, 0, manifest.consumer(item.stored) if manifest else None
        queue.write(tensor, item.dtype, item.first, item.put, look, at)
        at += tensor.numel() * ITEM_BYTES[item.dtype]


def stored_once(
    tensors: Mapping[str, _Tensor], identity: Callable[[_Tensor], Hashable | None]
) -> tuple[dict[str, _Tensor], dict[str, str]]:
    """Return each distinct tensor under one name, and its other names: ``{name: stored name}``.

    The stored name is the first in alphabetical order, as in ``save_model`` of safetensors.

    Args:
        tensors: The tensors, by name.
        identity: Returns equal keys for tensors that are the same, and None for those that are always stored.
    """
    firsts: dict[Hashable, str] = {}
    aliases: dict[str, str] = {}
    for name in sorted(tensors):
        same = identity(tensors[name])
        kept = name if same is None else firsts.setdefault(same, name)
        if kept != name:
            aliases[name] = kept
    return {name: tensor for name, tensor in tensors.items() if name not in aliases}, aliases
