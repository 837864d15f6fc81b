"""Tensors of an open checkpoint, read by themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sluice._dtypes import dtype_name
from sluice._errors import MismatchError
from sluice._options import MemoryLimits, TransferOptions
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.engine.targets import Targets
from sluice.reading import transfer
from sluice.reading.caches import fill_caches
from sluice.reading.composites import assemble, component_requests
from sluice.records import Entry, Request

__all__ = ["read_into", "read_tensor"]


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
            raise MismatchError("a quantized tensor is not cast while it is read", tensor=name)
        requests = component_requests(name, entry, device=device or "cpu", dtype=dtype)
        existing = None
    else:
        if device is not None or dtype is not None:
            raise ValueError("out decides device and dtype: leave out the other two")
        requests, existing = [_request_into(name, entry, out)], {0: out}
    prepared = transfer.prepare(checkpoint, requests, options=TransferOptions(memory=memory))
    fill_caches(checkpoint.sources, prepared.plan)
    tensors, _ = transfer.run(checkpoint, prepared, Targets(prepared.plan, existing))
    return assemble(name, entry, tensors, file=checkpoint.path)


def read_into(checkpoint: OpenCheckpoint, wanted: Sequence[tuple[str, Entry, torch.Tensor]]) -> None:
    """Read entries into tensors of the same shapes, with one plan.

    Raises:
        MismatchError: A tensor has a different shape, or an entry is sparse or quantized.
    """
    requests = [_request_into(name, entry, out) for name, entry, out in wanted]
    prepared = transfer.prepare(checkpoint, requests)
    fill_caches(checkpoint.sources, prepared.plan)
    transfer.run(checkpoint, prepared, Targets(prepared.plan, {i: out for i, (_, _, out) in enumerate(wanted)}))


def _request_into(name: str, entry: Entry, out: torch.Tensor) -> Request:
    if entry.composite is not None:
        raise MismatchError(f"a {entry.layout} tensor is not read into another one", tensor=name)
    if tuple(out.shape) != entry.shape:
        raise MismatchError("out has another shape", tensor=name, expected=entry.shape, found=tuple(out.shape))
    return Request(
        name=name,
        entry=entry,
        dtype=dtype_name(out.dtype),
        device=str(out.device),
        stride=out.stride(),
        existing=True,
    )
