"""Tensors that a save writes, whether they are in memory or in a checkpoint, and the queue of their writes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import torch
from msgspec import Struct

from sluice._dtypes import ITEM_BYTES
from sluice.writing.manifest import ManifestWriter
from sluice.writing.safetensors import TensorOutline
from sluice.writing.torch_zip import TorchFile
from sluice.writing.write_queue import Put, WriteQueue

__all__ = ["Contents", "WrittenItem", "stored_once", "write_items"]

_Tensor = TypeVar("_Tensor")


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
