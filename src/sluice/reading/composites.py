"""Sparse and quantized tensors, put together from the dense ones that were read.

An index that points outside its tensor makes torch read or write foreign memory, and ``torch.load`` does not look. So
indices are checked here before torch is given them, piece by piece: no check takes memory in proportion to the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from sluice._dtypes import torch_dtype
from sluice._errors import FormatError, UnsafeContentError
from sluice.entries import tree as _tree
from sluice.reading.sparse_indices import check_indices, pieces_of
from sluice.records import Entry, Quantized, Request, Sparse, TorchSize, TorchText

__all__ = ["assemble", "component_requests", "torch_value", "with_tensors"]

# torch has no public constructors of quantized tensors from their integers; these are the ones that torch.load calls.
# ruff: noqa: SLF001


def component_requests(name: str, entry: Entry, *, device: str, dtype: str | None = None) -> list[Request]:
    """Return the requests for what an entry is made of: itself, where it is dense.

    Args:
        name: Its name.
        entry: The entry.
        device: Where the tensor goes.
        dtype: Dtype of its elements; None keeps the file's. The integers of a quantized tensor keep theirs.
    """
    composite = entry.composite
    components = entry.components
    cast = composite.values if isinstance(composite, Sparse) else entry
    return [
        Request(
            name=name, entry=component, dtype=dtype if dtype and component is cast else component.dtype, device=device
        )
        for component in components
    ]


def assemble(name: str, entry: Entry, tensors: Sequence[torch.Tensor], *, file: str) -> torch.Tensor:
    """Return the tensor of an entry, which shares memory with those it is made of.

    Args:
        name: Its name, for messages.
        entry: The entry.
        tensors: What was read for ``component_requests``.
        file: The checkpoint, for messages.

    Raises:
        FormatError: An index points outside the tensor, or they are not in the order that the layout wants.
    """
    composite = entry.composite
    if composite is None:
        return tensors[0]
    try:
        with torch.inference_mode(mode=False), torch.no_grad():
            if isinstance(composite, Quantized):
                return _quantized(entry, composite, tensors)
            if composite.layout == "sparse_coo":
                return _coo(entry, composite, *tensors)
            return _compressed(entry, composite, *tensors)
    except FormatError as error:
        error.file, error.tensor = file, name
        raise
    except (RuntimeError, IndexError) as error:  # what torch itself finds, in words of its own
        problem = f"a {composite.layout} tensor that torch refuses: {str(error).splitlines()[0]}"
        raise FormatError(problem, file=file, tensor=name) from error


def with_tensors(tree: object, entries: Sequence[Entry], tensors: Sequence[torch.Tensor], *, file: str) -> Any:
    """Return a copy of a tree with tensors in place of its entries: Parameters, attributes and all, as in the file.

    Args:
        tree: A part of ``Index.tree``.
        entries: All its entries, as ``_tree.every_entry`` yields them.
        tensors: What was read for the ``component_requests`` of each, one after the other.
        file: The checkpoint, for messages.

    Raises:
        FormatError: See ``assemble``.
        UnsafeContentError: An attribute would take the place of one of torch's own.
    """
    names = {id(entry): name for name, entry in _tree.walk(tree)}
    left = iter(tensors)
    finished: dict[int, torch.Tensor] = {}
    for entry in entries:
        count = len(entry.components)
        tensor = assemble(names.get(id(entry), "_metadata"), entry, list(islice(left, count)), file=file)
        finished[id(entry)] = _as_in_file(tensor, entry)
    for entry in entries:
        _set_attributes(entry, finished, file)
    return _tree.map_leaves(tree, lambda entry: finished[id(entry)], plain=torch_value)


def torch_value(value: Any) -> Any:
    """Return what torch has for a value that an index holds without it; any other value, and unknown text, as it is."""
    kind = type(value)
    if kind is TorchSize:
        return torch.Size(value)
    if kind in (set, frozenset):
        return kind(map(torch_value, value)) if any(type(one) in (TorchSize, TorchText) for one in value) else value
    if kind is not TorchText:
        return value
    found = getattr(torch, value.removeprefix("torch."), None) if value.startswith("torch.") else None
    if isinstance(found, (torch.dtype, torch.layout, torch.qscheme)):
        return found
    try:
        return torch.device(value)
    except RuntimeError:  # a device or a layout that this torch does not know
        return str(value)


def _as_in_file(tensor: torch.Tensor, entry: Entry) -> torch.Tensor:
    if entry.parameter:
        return torch.nn.Parameter(tensor, requires_grad=entry.requires_grad)
    return tensor.requires_grad_(entry.requires_grad)


def _set_attributes(entry: Entry, finished: Mapping[int, torch.Tensor], file: str) -> None:
    values = _tree.map_leaves(entry.attributes or {}, lambda inner: finished[id(inner)], plain=torch_value)
    for name, value in values.items():
        if hasattr(torch.nn.Parameter, name):  # torch.load would let the file replace data, gradients or methods
            raise UnsafeContentError(f"a tensor's attribute {name!r}, which torch itself defines", file=file)
        setattr(finished[id(entry)], name, value)


def _coo(entry: Entry, composite: Sparse, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    check_indices(entry, [pieces_of(row) for row in indices])
    return torch.sparse_coo_tensor(
        indices, values, entry.shape, is_coalesced=composite.coalesced, check_invariants=False
    )


def _compressed(
    entry: Entry, composite: Sparse, compressed: torch.Tensor, plain: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    # torch's own check follows each pair of compressed indices into the plain ones: these have to be right before.
    check_indices(entry, [pieces_of(compressed), pieces_of(plain)])
    return torch.sparse_compressed_tensor(
        compressed,
        plain,
        values,
        entry.shape,
        layout=getattr(torch, composite.layout),
        check_invariants=True,
    )


def _quantized(entry: Entry, composite: Quantized, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    integers, *parameters = tensors
    dtype, device = torch_dtype(entry.dtype), integers.device
    if composite.axis is None:
        assert isinstance(composite.scales, tuple)
        assert isinstance(composite.zero_points, tuple)
        made = torch._empty_affine_quantized(
            (0,), scale=composite.scales[0], zero_point=int(composite.zero_points[0]), dtype=dtype, device=device
        )
    else:
        scales, zero_points = parameters or _listed(composite, device)
        # Empty but for the channels: its memory is replaced at once.
        shape = [size if dim == composite.axis else 0 for dim, size in enumerate(entry.shape)]
        made = torch._empty_per_channel_affine_quantized(
            shape, scales=scales, zero_points=zero_points, axis=composite.axis, dtype=dtype, device=device
        )
    storage: Any = torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=integers.untyped_storage(), dtype=dtype, _internal=True
    )
    return made.set_(storage, int(integers.storage_offset()), integers.shape, integers.stride())


def _listed(composite: Quantized, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and zero points that stood in the pickle as lists."""
    assert isinstance(composite.scales, tuple)
    assert isinstance(composite.zero_points, tuple)
    floats = any(isinstance(point, float) for point in composite.zero_points)
    return (
        torch.tensor(composite.scales, dtype=torch.float32 if floats else torch.float64, device=device),
        torch.tensor(composite.zero_points, dtype=torch.float32 if floats else torch.int64, device=device),
    )
