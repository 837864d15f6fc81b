"""Single tensors of an open checkpoint; sparse and quantized ones are assembled from the dense ones that were read.

An index outside its tensor makes torch access memory out of bounds, and ``torch.load`` does not check for it.
Therefore indices are checked here before torch uses them, piece by piece, in a constant amount of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from sluice._dtypes import dtype_name, torch_dtype
from sluice._errors import FormatError, MismatchError, UnsafeContentError
from sluice._messages import type_of
from sluice._options import MemoryLimits, TransferOptions
from sluice._private_torch import set_math_bits
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.engine.targets import Targets
from sluice.entries import tree as trees
from sluice.reading import transfer
from sluice.reading.reader import fill_caches
from sluice.reading.sparse_indices import check_indices, pieces_of
from sluice.records import Entry, Quantized, Request, Sparse, TorchSize, TorchText

__all__ = ["assemble", "component_requests", "read_into", "read_tensor", "torch_value", "with_tensors"]

# torch has no public constructors of quantized tensors from their integers; these are the ones that torch.load calls.
# ruff: noqa: SLF001


def component_requests(name: str, entry: Entry, *, device: str, dtype: str | None = None) -> list[Request]:
    """Return the requests for the components of an entry; a dense entry is its only component.

    Args:
        name: Its name.
        entry: The entry.
        device: Where the tensor goes.
        dtype: Dtype of its elements; None keeps that of the file. The integers of a quantized tensor are not cast.
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
    """Return the tensor of an entry. It shares memory with its components.

    Args:
        name: Its name, for messages.
        entry: The entry.
        tensors: The tensors read for ``component_requests``.
        file: The checkpoint, for messages.

    Raises:
        FormatError: An index is outside the tensor, or indices are not in the order that the layout requires.
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
    except (RuntimeError, IndexError) as error:  # torch's own checks
        problem = f"torch refuses this {composite.layout} tensor: {str(error).splitlines()[0]}"
        raise FormatError(problem, file=file, tensor=name) from error


def with_tensors(
    tree: object,
    entries: Sequence[Entry],
    tensors: Sequence[torch.Tensor],
    *,
    file: str,
    finish: Callable[[Entry, Any], Any] = lambda _, tensor: tensor,
) -> Any:
    """Return a copy of a tree with tensors in place of entries, with their Parameters and attributes.

    Args:
        tree: A part of ``Index.tree``.
        entries: All its entries, as ``tree.every_entry`` yields them.
        tensors: The tensors read for the ``component_requests`` of each entry, in order.
        file: The checkpoint, for messages.
        finish: Returns what takes the place of an entry, from the entry and its tensor.

    Raises:
        FormatError: See ``assemble``.
        UnsafeContentError: An attribute would replace one that torch defines.
    """
    names = {id(entry): name for name, entry in trees.walk(tree)}
    left = iter(tensors)
    finished: dict[int, Any] = {}
    for entry in entries:
        # Marked as torch.load does: conj() would make a view that keeps a base.
        parts = [set_math_bits(next(left), component.elements.view_bits) for component in entry.components]
        tensor = assemble(names.get(id(entry), "_metadata"), entry, parts, file=file)
        finished[id(entry)] = _as_in_file(tensor, entry)
    for entry in entries:
        _set_attributes(entry, finished, file)
    return trees.map_leaves(tree, lambda entry: finish(entry, finished[id(entry)]), plain=torch_value)


def torch_value(value: Any) -> Any:
    """Return the torch object for a value that an index holds as text; other values are returned unchanged."""
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
    except RuntimeError:  # a device or layout that this version of torch lacks
        return str(value)


def _as_in_file(tensor: torch.Tensor, entry: Entry) -> Any:
    if entry.bare:  # torch.load returns a typed storage, also for an untyped one
        storage = tensor.untyped_storage()
        whole = storage if storage.nbytes() == tensor.nbytes else tensor.clone().untyped_storage()
        return torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
            wrap_storage=whole, dtype=tensor.dtype, _internal=True
        )
    if entry.parameter:
        return torch.nn.Parameter(tensor, requires_grad=entry.requires_grad)
    return tensor.requires_grad_(entry.requires_grad)


def _set_attributes(entry: Entry, finished: Mapping[int, torch.Tensor], file: str) -> None:
    values = trees.map_leaves(entry.attributes or {}, lambda inner: finished[id(inner)], plain=torch_value)
    for name, value in values.items():
        if hasattr(torch.nn.Parameter, name):  # torch.load lets the file replace data, gradients or methods
            raise UnsafeContentError(
                f"the attribute {name!r} of a tensor would replace one that torch defines", file=file
            )
        setattr(finished[id(entry)], name, value)


def _coo(entry: Entry, composite: Sparse, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    check_indices(entry, [pieces_of(row) for row in indices])
    return torch.sparse_coo_tensor(
        indices, values, entry.shape, device=values.device, is_coalesced=composite.coalesced, check_invariants=False
    )


def _compressed(
    entry: Entry, composite: Sparse, compressed: torch.Tensor, plain: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    # torch's own check follows compressed indices into the plain ones: both must be valid before it.
    check_indices(entry, [pieces_of(compressed), pieces_of(plain)])
    layout = getattr(torch, composite.layout)
    return torch.sparse_compressed_tensor(
        compressed, plain, values, entry.shape, layout=layout, device=values.device, check_invariants=True
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
        # Empty except for the channels: its memory is replaced below.
        shape = [size if dim == composite.axis else 0 for dim, size in enumerate(entry.shape)]
        made = torch._empty_per_channel_affine_quantized(
            shape, scales=scales, zero_points=zero_points, axis=composite.axis, dtype=dtype, device=device
        )
    storage: Any = torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=integers.untyped_storage(), dtype=dtype, _internal=True
    )
    return made.set_(storage, int(integers.storage_offset()), integers.shape, integers.stride())


def _listed(composite: Quantized, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and zero points that the pickle holds as lists."""
    assert isinstance(composite.scales, tuple)
    assert isinstance(composite.zero_points, tuple)
    floats = any(isinstance(point, float) for point in composite.zero_points)
    return (
        torch.tensor(composite.scales, dtype=torch.float32 if floats else torch.float64, device=device),
        torch.tensor(composite.zero_points, dtype=torch.float32 if floats else torch.int64, device=device),
    )


def read_tensor(
    checkpoint: OpenCheckpoint,
    name: str,
    entry: Entry,
    *,
    device: str | None = None,
    dtype: str | None = None,
    out: torch.Tensor | None = None,
    memory: MemoryLimits | None = None,
) -> torch.Tensor:
    """Read one entry; ``sluice.LazyTensor.read`` has the arguments and errors."""
    if out is None:
        if dtype and entry.layout == "quantized":
            problem = "a quantized tensor is not cast while it is read"
            raise MismatchError(problem, file=checkpoint.path, tensor=name)
        requests = component_requests(name, entry, device=device or "cpu", dtype=dtype)
        existing: list[torch.Tensor] = []
    else:
        if device is not None or dtype is not None:
            raise ValueError("out decides device and dtype: leave out the other two")
        requests, existing = [_request_into(checkpoint.path, name, entry, out)], [out]
    tensors = _fill(checkpoint, requests, existing, TransferOptions(memory=memory))
    return assemble(name, entry, tensors, file=checkpoint.path)


def read_into(checkpoint: OpenCheckpoint, wanted: Sequence[tuple[str, Entry, torch.Tensor]]) -> None:
    """Read entries into tensors of the same shapes, with one plan.

    Raises:
        MismatchError: A tensor has a different shape, or an entry is sparse or quantized.
    """
    requests = [_request_into(checkpoint.path, name, entry, out) for name, entry, out in wanted]
    _fill(checkpoint, requests, [out for *_, out in wanted], TransferOptions())


def _fill(
    checkpoint: OpenCheckpoint, requests: Sequence[Request], existing: Sequence[torch.Tensor], options: TransferOptions
) -> list[torch.Tensor]:
    """Read tensors with one plan, into existing ones if there are any, and tell autograd."""
    prepared = transfer.prepare(checkpoint, requests, options=options)
    fill_caches(checkpoint.sources, prepared.plan)
    try:
        return transfer.run(checkpoint, prepared, Targets(prepared.plan, dict(enumerate(existing))))[0]
    finally:
        for tensor in existing:
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)


def _request_into(file: str, name: str, entry: Entry, out: torch.Tensor) -> Request:
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out= is {type_of(out)}, not a tensor")
    if entry.composite is not None:
        raise MismatchError(f"a {entry.layout} tensor is not read into another one", file=file, tensor=name)
    if is_lazy(out) or out.layout != torch.strided or out.is_meta or hasattr(out, "fake_mode"):
        raise MismatchError("out has no memory of a dense tensor", file=file, tensor=name, found=type(out).__name__)
    expanded = any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True))
    if expanded or out.is_conj() or out.is_neg():
        raise MismatchError(
            "out is an expanded, conjugated or negated view: it cannot hold each value", file=file, tensor=name
        )
    if entry.dtype.startswith("complex") and not out.is_complex():
        problem = "out has no room for imaginary parts"
        raise MismatchError(problem, file=file, tensor=name, expected=entry.dtype, found=dtype_name(out.dtype))
    if tuple(out.shape) != entry.shape:
        raise MismatchError(
            "out has another shape", file=file, tensor=name, expected=entry.shape, found=tuple(out.shape)
        )
    return Request(
        name=name,
        entry=entry,
        dtype=dtype_name(out.dtype),
        device=str(out.device),
        stride=out.stride(),
        existing=True,
    )
