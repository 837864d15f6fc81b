"""Weights that autograd saves for the backward pass: it gets a description instead, and the weight when it needs it.

So the backward pass of a model whose weights are frozen reads the blocks again, in its own order, and nothing is
computed twice. The result of a cast, as autocast makes it, or of ``dequantize`` is found by its values, and made again;
``torch.utils.checkpoint``, which holds what is saved for one block at a time, is left to hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, pairwise
from typing import Any

import torch
from msgspec import Struct
from torch import nn
from torch.utils.checkpoint import checkpoint

from sluice import _defaults as defaults
from sluice._private_torch import saved_tensors_hooks_around
from sluice.streaming.calls import Calls
from sluice.streaming.units import Unit
from sluice.streaming.window import Window

__all__ = ["Backward", "SavedWeight", "saving"]

#: Elements that tell at once most tensors that are not casts of a weight.
_SAMPLE = 256

#: Elements that are cast at once to compare the others: a whole weight does not fit into the caches of a processor.
_PIECE = 1 << 20


class SavedWeight(Struct, frozen=True, eq=False):
    """A view of a streamed weight, or of the result of a cast or of ``dequantize``."""

    #: The unit of the weight.
    unit: int
    #: Position of its tensor there, or after all tensors, of a quantized weight.
    part: int
    #: Dtype of the cast, or of the weight.
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    #: Its first element in the memory of the weight.
    offset: int

    def view_in(self, unit: Unit) -> torch.Tensor:
        """Return what was saved, from the unit, which is in memory."""
        count = len(unit.tensors)
        weight = unit.tensors[self.part] if self.part < count else unit.parameter(self.part - count).dequantize()
        flat = _flat(weight).to(self.dtype)
        return flat.as_strided(self.size, self.stride, flat.storage_offset() + self.offset)


class _Hooks:
    """The functions that autograd calls while units are in use."""

    def __init__(self, used: Mapping[int, Unit], lend: Callable[[SavedWeight], torch.Tensor]) -> None:
        self.used, self._lend = used, lend
        self._around = saved_tensors_hooks_around()
        self._copies = self._around is None or self._around[0].__module__ != checkpoint.__module__

    def pack(self, tensor: torch.Tensor) -> object:
        found = _find(tensor, self.used, copies=self._copies)
        if found is not None:
            return found
        return tensor if self._around is None else self._around[0](tensor)

    def unpack(self, packed: Any) -> Any:
        if type(packed) is SavedWeight:
            return self._lend(packed)
        return packed if self._around is None else self._around[1](packed)


def saving(
    used: Mapping[int, Unit], lend: Callable[[SavedWeight], torch.Tensor], *, inside: bool = True
) -> AbstractContextManager[None]:
    """Save descriptions for the weights of units in use; other tensors are saved as they are around this.

    Args:
        used: The units in use at each time, by position.
        lend: Returns the tensor of a description.
        inside: Whether to do so inside of hooks of others too. ``torch.utils.checkpoint`` counts what is saved: it has
            to see the same tensors when it computes a part of a block again as when the block was called.
    """
    around = saved_tensors_hooks_around()
    own = around is not None and getattr(getattr(around[0], "__self__", None), "used", None) is used
    if own or (around is not None and not inside):
        return nullcontext()
    hooks = _Hooks(used, lend)
    return torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack)


def _find(tensor: torch.Tensor, used: Mapping[int, Unit], *, copies: bool) -> SavedWeight | None:
    """Return the description of a tensor; None unless it views a weight or, with ``copies``, its cast."""
    plain = type(tensor) in {torch.Tensor, nn.Parameter}
    if not plain or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return None
    for number, unit in used.items():
        own = (_place(tensor, weight, copies=copies) for weight in unit.tensors)
        quantized = (
            _place_in_quantized(tensor, unit.parameter(position)) if copies and each.held.assembled else None
            for position, each in enumerate(unit.plan.weights)
        )
        for part, place in enumerate(chain(own, quantized)):
            if place is not None:
                return SavedWeight(number, part, tensor.dtype, tensor.shape, tensor.stride(), place)
    return None


def _place(tensor: torch.Tensor, weight: torch.Tensor, *, copies: bool) -> int | None:
    """Return the offset of a tensor in the memory of a weight or its cast, in elements; None if it views neither."""
    if tensor.dtype != weight.dtype:
        return _place_by_values(tensor, weight) if copies else None
    if tensor.device != weight.device:
        return None
    offset, rest = divmod(tensor.data_ptr() - weight.data_ptr(), weight.itemsize)
    if rest or not 0 <= offset < weight.numel():
        return None
    last = offset + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return offset if offset <= last < weight.numel() else None


def _place_by_values(tensor: torch.Tensor, weight: torch.Tensor) -> int | None:
    """Return the offset of a tensor in a cast of a weight; None if its memory has different values."""
    if not _may_be_copy(tensor, weight):
        return None
    count = weight.numel()
    found, flat = tensor.as_strided((count,), (1,), 0), _flat(weight)
    bits = torch.int64 if count % 8 == 0 else torch.int8  # faster than numbers; and NaN is NaN
    same = all(
        torch.equal(found[first:end].view(bits), flat[first:end].to(tensor.dtype).view(bits))
        for first, end in pairwise((0, _SAMPLE, *range(_PIECE, count, _PIECE), count))
    )
    return int(tensor.storage_offset()) if same else None


def _place_in_quantized(tensor: torch.Tensor, weight: torch.Tensor) -> int | None:
    """Return the offset of a tensor in the values of a quantized weight; None if its memory has different ones."""
    if type(weight).dequantize is torch.Tensor.dequantize or not _may_be_copy(tensor, weight):
        return None
    return _place_by_values(tensor, weight.dequantize())


def _may_be_copy(tensor: torch.Tensor, weight: torch.Tensor) -> bool:
    nbytes = weight.numel() * tensor.itemsize
    large = tensor.is_floating_point() and nbytes >= defaults.STREAMED_BYTES
    return large and tensor.device == weight.device and tensor.untyped_storage().nbytes() == nbytes


def _flat(weight: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor in the order of its memory."""
    return weight.as_strided((weight.numel(),), (1,), weight.storage_offset())


class Backward:
    """The block that was reached, whose units stay in memory until a different one is. The next ones are read ahead.

    Memory that autograd still views is not used again.
    """

    def __init__(self, units: Sequence[Unit], window: Window, calls: Calls, *, reads_ahead: bool) -> None:
        self._units, self._window, self._calls, self._reads_ahead = units, window, calls, reads_ahead
        self._block: int | None = None
        self._held = set[int]()

    def lend(self, saved: SavedWeight) -> torch.Tensor:
        """Return a weight that autograd saved."""
        self.reach(saved.unit)
        with self._window.holding(saved.unit), torch.inference_mode(mode=False), torch.no_grad():
            return saved.view_in(self._units[saved.unit])

    def reach(self, unit: int) -> None:
        """Hold a unit, unless a block is running, whose memory it might take."""
        block = self._calls.blocks.get(unit)
        if block is None or unit in self._held or self._window.used.keys() - self._held:
            return
        if block != self._block:
            self.end()
            self._block = block
            self._calls.note_part(block)
        self._window.acquire(unit, install=False)
        self._held.add(unit)
        if self._reads_ahead:
            self._window.read_ahead(self._calls.upcoming())

    def end(self) -> None:
        """Let the units go: a block is called, or the stream ends."""
        while self._held:
            self._window.release(self._held.pop(), installed=False)
        self._block = None
