"""State dicts in memory as entries, and the tensors that a load would finish from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from sluice._dtypes import dtype_name, torch_dtype
from sluice._geometry import contiguous_stride
from sluice._install import Installed, initial_values, install
from sluice._load_hooks import apply_pre_hooks
from sluice._matching import Match, match
from sluice._modules import collect
from sluice._records import Entry, Request


@dataclass(frozen=True)
class Held:
    """A state dict whose tensors stand for the file."""

    entries: dict[str, Entry]
    storages: list[torch.UntypedStorage]

    def finish(self, request: Request) -> torch.Tensor:
        """Return what the engine would make of a request that is not filled in place."""
        entry = request.entry
        found = torch.empty(0, dtype=torch_dtype(entry.dtype)).set_(
            self.storages[entry.storage], entry.storage_offset, entry.shape, entry.stride
        )
        stride = contiguous_stride(entry.shape) if request.stride is None else request.stride
        with torch.inference_mode(mode=False):  # as the engine does
            finished = torch.empty_strided(entry.shape, stride, dtype=torch_dtype(request.dtype), device=request.device)
            return finished.copy_(found)


def hold(state_dict: Mapping[str, torch.Tensor]) -> Held:
    """Describe a state dict as a file that holds it: tensors that share a storage share it in the file."""
    storages: dict[int, int] = {}
    kept: list[torch.UntypedStorage] = []
    entries = {}
    for name, tensor in state_dict.items():
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages or storage.nbytes() == 0:
            storages[storage.data_ptr()] = len(kept)
            kept.append(storage)
        entries[name] = Entry(
            dtype=dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            storage=storages[storage.data_ptr()],
            storage_offset=int(tensor.storage_offset()),
        )
    return Held(entries=entries, storages=kept)


def load(
    module: torch.nn.Module,
    state_dict: Mapping[str, torch.Tensor],
    *,
    placement: Mapping[str, str] | None = None,
    dtype: str | None = None,
    strict: bool = True,
    versions: Mapping[str, int] | None = None,
) -> tuple[Match, Installed]:
    """Load a state dict into a module with everything but the engine."""
    held = hold(state_dict)
    entries = apply_pre_hooks(module, held.entries, versions=versions, strict=strict)
    state = collect(module)
    found = match(state.outline, entries, placement=placement, dtype=dtype, strict=strict, versions=versions)
    initial = initial_values(state, found, placement=placement)
    finished = []
    for slot, request in zip(found.slots, found.requests, strict=True):
        tensor = held.finish(request)
        if request.existing:
            with torch.no_grad():
                tensor = state.tensors[slot].detach().copy_(tensor)
        finished.append(tensor)
    return found, install(state, found, finished, initial, placement=placement)
