"""State dicts in memory as entries, and the tensors that a load would finish from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from sluice._dtypes import dtype_name, torch_dtype
from sluice.matching.match import Match, match
from sluice.matching.placement import device_of
from sluice.modules.collect import ModuleState, collect
from sluice.modules.following import follow_loading
from sluice.modules.initial_values import initial_values
from sluice.modules.install import finish_loading, install
from sluice.records import Entry, Request, elements_of
from sluice.records.geometry import contiguous_stride


@dataclass(frozen=True)
class Held:
    """A state dict that takes the place of a file."""

    entries: dict[str, Entry]
    storages: list[torch.UntypedStorage]

    def finish(self, request: Request) -> torch.Tensor:
        """Return the tensor that the engine would finish for a request that is not filled in place."""
        entry = request.entry
        found = torch.empty(0, dtype=torch_dtype(entry.dtype)).set_(
            self.storages[entry.storage], entry.storage_offset, entry.shape, entry.stride
        )
        stride = contiguous_stride(entry.shape) if request.stride is None else request.stride
        with torch.inference_mode(mode=False):  # as the engine does
            finished = torch.empty_strided(entry.shape, stride, dtype=torch_dtype(request.dtype), device=request.device)
            return finished.copy_(found)


def hold(state_dict: Mapping[str, torch.Tensor]) -> Held:
    """Return the index of a file of the state dict; tensors that share a storage share it in the file."""
    storages: dict[int, int] = {}
    kept: list[torch.UntypedStorage] = []
    entries = {}
    for name, tensor in state_dict.items():
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages or storage.nbytes() == 0:
            storages[storage.data_ptr()] = len(kept)
            kept.append(storage)
        entries[name] = Entry(
            elements=elements_of(dtype_name(tensor.dtype)),
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
) -> tuple[Match, tuple[str, ...]]:
    """Load a state dict into a module with everything but the engine; return also the names of replaced tensors."""
    held = hold(state_dict)
    followed = follow_loading(module, held.entries, versions=versions, strict=strict)
    state = collect(module)
    found = match(
        state.outline,
        followed.entries,
        placement=placement,
        dtype=dtype,
        strict=strict,
        versions=versions,
        optional_names=followed.optional_names,
        problems=followed.problems,
    )
    initial = memory_for(state, found, placement or {})
    initial_values(state, found, initial, scratch_bytes=1 << 20)
    finished = []
    for slot, request in zip(found.slots, found.requests, strict=True):
        tensor = held.finish(request)
        if request.existing:
            with torch.no_grad():
                tensor = state.tensors[slot].detach().copy_(tensor)
        finished.append(tensor)
    replaced = install(state, found, finished, initial, placement=placement)
    finish_loading(state, found, {}, strict=strict)
    return found, replaced


def memory_for(state: ModuleState, found: Match, placement: Mapping[str, str]) -> dict[int, torch.Tensor]:
    """Return memory for the tensors that are computed, by slot."""
    with torch.inference_mode(mode=False):
        return {
            slot: torch.empty(
                state.outline.slots[slot].shape,
                dtype=torch_dtype(found.initial_dtypes[slot]),
                device=device_of(state.outline.slots[slot].names[0], placement) or "cpu",
            )
            for slot in (*found.zeroed, *found.initialised)
        }
