"""Comparison of loaded objects with those of torch."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

import sluice
from sluice._dtypes import torch_dtype
from sluice._options import Limits
from sluice.entries import tree as _tree
from sluice.formats.detection import detect
from sluice.records import Entry, Index
from sluice.sources.protocol import Source
from support.sources import MemorySource


def bits(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's elements in the order of its indices."""
    flat = tensor.detach().flatten()
    if flat.is_conj() or flat.is_neg() or flat.stride() != (1,):  # else no copy: old versions cannot copy float4
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).cpu().numpy().tobytes()


def parts(tensor: torch.Tensor) -> tuple[list[torch.Tensor], list[object]]:
    """Return the dense tensors that a tensor consists of, and its other properties."""
    tensor = tensor.detach()
    flags: list[object] = [tensor.is_conj(), tensor.is_neg()]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()], [*flags, tensor.is_coalesced()]
    if tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()], flags
    if tensor.layout in {torch.sparse_csc, torch.sparse_bsc}:
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()], flags
    if not tensor.is_quantized:
        return [tensor.resolve_conj().resolve_neg()], flags
    flags += [tensor.qscheme(), tensor.stride()]
    if tensor.qscheme() is torch.per_tensor_affine:
        return [tensor.int_repr()], [*flags, tensor.q_scale(), tensor.q_zero_point()]
    scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return [tensor.int_repr(), scales, zero_points], [*flags, tensor.q_per_channel_axis()]


def same_tensor(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two tensors are equal in type, layout, bits, flags and Python attributes."""
    kinds = [(type(one), one.layout, one.dtype, one.shape, one.requires_grad) for one in (ours, theirs)]
    if kinds[0] != kinds[1]:
        return False
    (our_parts, our_flags), (their_parts, their_flags) = parts(ours), parts(theirs)
    return (
        our_flags == their_flags
        and [one.dtype for one in our_parts] == [one.dtype for one in their_parts]
        and list(map(bits, our_parts)) == list(map(bits, their_parts))
        and same(vars(ours), vars(theirs))
    )


def same(ours: Any, theirs: Any) -> bool:
    """Whether two loaded objects are equal in types, keys, values, bits, shapes and flags."""
    if isinstance(theirs, torch.Tensor):
        return isinstance(ours, torch.Tensor) and same_tensor(ours, theirs)
    if isinstance(theirs, dict):
        return list(ours) == list(theirs) and all(same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, (list, tuple)):
        return type(ours) is type(theirs) and len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(theirs, float):
        return type(ours) is float and repr(ours) == repr(theirs)  # NaN too
    return type(ours) is type(theirs) and bool(ours == theirs)


def save_and_compare(path: Path, value: Any, **how: Any) -> OrderedDict[str, Any]:
    """Save with torch, compare the results of ``load_state_dict`` and ``torch.load``, and return it.

    Args:
        path: The file to write.
        value: The object to save.
        how: Keyword arguments of ``torch.save``.
    """
    torch.save(value, path, **how)
    ours = sluice.load_state_dict(path)
    assert same(ours, torch.load(path, weights_only=True, mmap=False))
    return ours


def located(content: bytes) -> tuple[Source, Index]:
    """Return a file in memory, and its index with the place of every storage."""
    source = MemorySource(content)
    index = detect(source).read_index(source, Limits())
    offsets = detect(source).locate(source, index, range(len(index.storages)))
    storages = [replace(one, offset=offsets.get(i, one.offset)) for i, one in enumerate(index.storages)]
    return source, replace(index, storages=tuple(storages))


def loaded(source: Source, index: Index) -> Any:
    """Return the object of an index of one file, with tensors built by torch from the bytes of the file."""
    storages = []
    for storage in index.storages:
        data = bytearray(source.read_at(storage.offset, storage.nbytes))
        storages.append(torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8))

    def tensor(entry: Entry) -> torch.Tensor:
        memory = storages[entry.storage].untyped_storage()
        made = torch.empty(0, dtype=torch_dtype(entry.dtype))
        made.set_(memory, entry.storage_offset, entry.shape, entry.stride)
        if entry.parameter:
            return torch.nn.Parameter(made, requires_grad=entry.requires_grad)
        return made.requires_grad_(entry.requires_grad)

    return _tree.map_leaves(index.tree, tensor)


def state_dict_of_views(**others: Any) -> OrderedDict[str, Any]:
    """Return a state dict of views, strides, parameters and a tied tensor, with further values before the tied one."""
    base = torch.randn(40, 50)
    return OrderedDict(
        whole=base,
        rows=base[5:9],
        column=base[:, 3],
        transposed=torch.randn(6, 7).t(),
        channels_last=torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        expanded=torch.randn(1, 3).expand(4, 3),
        parameter=torch.nn.Parameter(torch.randn(3)),
        frozen=torch.nn.Parameter(torch.randn(3), requires_grad=False),
        wants_grad=torch.randn(3, requires_grad=True),
        **others,
        tied=base,
    )
