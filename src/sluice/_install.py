"""Finished tensors become part of a module.

A tensor on the meta device gets its memory by a swap, so that it stays the same object for ties, optimizers and
attributes; where torch refuses that, it is replaced in every module that holds it. A live tensor was filled in place,
or gets its new memory through ``.data``. Gradients of live parameters are left alone, as ``load_state_dict`` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from sluice._dtypes import torch_dtype
from sluice._errors import MismatchError
from sluice._initialisers import InitialisersSkipMeta
from sluice._load_hooks import run_post_hooks
from sluice._matching import Match
from sluice._modules import ModuleState, Owner, can_reset
from sluice._placement import Placement, device_of
from sluice._swap import swap_data, with_data

__all__ = ["Installed", "initial_values", "install", "install_one"]

#: Byte that fills tensors before ``reset_parameters``: a NaN in every floating-point dtype, so that what it leaves out
#: shows.
_UNTOUCHED = 0xFF


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """What ``install`` did that the caller cannot see otherwise."""

    #: Names of tensors that became new objects, because torch refused to swap their contents.
    replaced: tuple[str, ...]


def install(
    state: ModuleState,
    match: Match,
    tensors: Sequence[torch.Tensor],
    initial: Mapping[int, torch.Tensor] | None = None,
    *,
    placement: Placement | None = None,
) -> Installed:
    """Make finished tensors part of the module; nothing of it is on the meta device afterwards.

    Args:
        state: The module.
        match: What was wanted.
        tensors: The finished tensor of each request; those of requests that are ``existing`` are filled already.
        initial: What ``initial_values`` returned.
        placement: Where live tensors without an entry, and non-persistent buffers, move to.
    """
    replaced: list[str] = []
    with torch.inference_mode(mode=False), torch.no_grad():
        for slot, request, tensor in zip(match.slots, match.requests, tensors, strict=True):
            if request.existing:
                _note_written(state.tensors[slot])
            elif not install_one(state, slot, tensor):
                replaced.append(state.outline.slots[slot].names[0])
        for slot, tensor in (initial or {}).items():
            if not install_one(state, slot, tensor):
                replaced.append(state.outline.slots[slot].names[0])
        kept = {state.outline.slots[slot].names[0]: state.tensors[slot] for slot in match.kept}
        for name, tensor in {**state.unsaved, **kept}.items():
            device = device_of(name, placement or {})
            if device is not None:
                tensor.data = tensor.data.to(device)
    run_post_hooks(state.module, match.missing, match.unexpected)
    return Installed(replaced=tuple(replaced))


def install_one(state: ModuleState, slot: int, tensor: torch.Tensor) -> bool:
    """Give one tensor of the module new memory; return whether it is still the same object."""
    own = state.tensors[slot]
    if not own.is_meta:
        own.data = tensor
        return True
    if swap_data(own, tensor):
        return True
    new = with_data(own, tensor)
    for owner in state.owners[slot]:
        setattr(owner.module, owner.name, new)  # not through the dicts: RNNs note assignments in their lists of weights
    return False


def _note_written(tensor: torch.Tensor) -> None:
    """Tell autograd that the tensor was written in place, which the readers did behind its back."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def initial_values(state: ModuleState, match: Match, *, placement: Placement | None = None) -> dict[int, torch.Tensor]:
    """Compute the values of the slots on meta that the checkpoint does not fill; the module is left as it is.

    Args:
        state: The module.
        match: Its ``zeroed`` and ``initialised`` slots are computed.
        placement: Where; the CPU for what it does not name.

    Raises:
        MismatchError: A ``reset_parameters`` fails, or leaves out a tensor that it should fill.
    """
    with torch.inference_mode(mode=False):  # parameters made of inference tensors could not be trained
        return _initial_values(state, match, placement or {})


def _initial_values(state: ModuleState, match: Match, placement: Placement) -> dict[int, torch.Tensor]:
    devices = {
        slot: device_of(state.outline.slots[slot].names[0], placement) or "cpu"
        for slot in (*match.zeroed, *match.initialised)
    }
    values = {
        slot: torch.zeros(
            state.tensors[slot].shape, dtype=torch_dtype(match.initial_dtypes[slot]), device=devices[slot]
        )
        for slot in match.zeroed
    }
    for slot, tensor in _reset(state, match.initialised, devices).items():
        if tensor.numel() and bool((tensor.reshape(-1).view(torch.uint8) == _UNTOUCHED).all()):
            raise MismatchError(
                "the checkpoint does not have it, and reset_parameters() left it out",
                tensor=state.outline.slots[slot].names[0],
            )
        values[slot] = tensor.to(torch_dtype(match.initial_dtypes[slot]))
    return values


def _reset(state: ModuleState, slots: Sequence[int], devices: Mapping[int, str]) -> dict[int, torch.Tensor]:
    """Return what ``reset_parameters`` makes of these tensors, whose places are real memory for as long as it runs."""
    modules = {
        module: None
        for slot in slots
        for module in (next(owner.module for owner in state.owners[slot] if can_reset(owner.module)),)
    }
    try:
        for slot in slots:
            own = state.tensors[slot]
            marked = torch.full((own.nbytes,), _UNTOUCHED, dtype=torch.uint8, device=devices[slot])
            _hold(state.owners[slot], with_data(own, marked.view(own.dtype).view(own.shape)))
        for module in modules:
            try:
                with InitialisersSkipMeta():
                    module.reset_parameters()  # type: ignore[operator]  # can_reset saw that it can be called
            except Exception as error:
                raise MismatchError(f"reset_parameters() of {type(module).__name__} failed: {error}") from error
        return {slot: _registered(state.owners[slot][0])[state.owners[slot][0].name].data for slot in slots}
    finally:
        for slot in slots:
            _hold(state.owners[slot], state.tensors[slot])


def _hold(owners: Sequence[Owner], tensor: torch.Tensor) -> None:
    for owner in owners:
        _registered(owner)[owner.name] = tensor


def _registered(owner: Owner) -> dict[str, torch.Tensor]:
    """Return the dict in which the module holds the tensor: for a while, without what assignments set off."""
    module = owner.module
    held = module._parameters if owner.name in module._parameters else module._buffers  # noqa: SLF001  as above
    return cast("dict[str, torch.Tensor]", held)
