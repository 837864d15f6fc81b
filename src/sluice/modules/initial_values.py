"""Initial values by ``reset_parameters`` for tensors on the meta device that the checkpoint does not have.

They are computed before anything is read, in their final memory. Modules are reset one at a time in their own dtype and
then cast, so that the values are those of an ordinary model. A module whose tensors are larger than the scratch memory
of a cast is reset in the finished dtype, because the cast would need the memory twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from sluice._dtypes import dtype_name, torch_dtype
from sluice._errors import MismatchError
from sluice.matching.match import Match
from sluice.modules.collect import ModuleState, reset_of
from sluice.modules.constructor_calls import ConstructorCalls
from sluice.modules.install import hold, registered
from sluice.modules.swap import with_data

__all__ = ["initial_values"]

#: Byte that fills tensors before they are reset: a NaN in every floating-point dtype, so that skipped tensors show.
_UNTOUCHED = 0xFF

#: Elements checked at a time.
_PIECE = 1 << 20


def initial_values(state: ModuleState, match: Match, memory: Mapping[int, torch.Tensor], *, scratch_bytes: int) -> None:
    """Compute the values of the slots on meta that the checkpoint does not fill; the module is not changed.

    Args:
        state: The module.
        match: The match; its ``zeroed`` and ``initialised`` slots are computed.
        memory: The finished tensor of each of them, without values.
        scratch_bytes: Further memory that a module may take for values that are cast.

    Raises:
        MismatchError: A ``reset_parameters`` fails, or does not fill a tensor that it should.
    """
    # Parameters made of inference tensors could not be trained.
    with torch.inference_mode(mode=False), torch.no_grad():
        for slot in match.zeroed:
            memory[slot].zero_()
        slots_of: defaultdict[nn.Module, list[int]] = defaultdict(list)
        for slot in match.initialised:
            slots_of[next(owner.module for owner in state.owners[slot] if reset_of(owner.module))].append(slot)
        for module, slots in slots_of.items():
            _reset(state, module, {slot: memory[slot] for slot in slots}, scratch_bytes)


def _reset(state: ModuleState, module: nn.Module, memory: Mapping[int, torch.Tensor], scratch_bytes: int) -> None:
    """Run ``reset_parameters`` of one module with ``memory`` temporarily in place of its tensors."""
    reset = reset_of(module)
    assert reset is not None
    own = {slot: torch_dtype(state.outline.slots[slot].dtype) for slot in memory}
    needed = sum(tensor.numel() * own[slot].itemsize for slot, tensor in memory.items() if own[slot] != tensor.dtype)
    if needed > scratch_bytes:
        own = {slot: tensor.dtype for slot, tensor in memory.items()}
    places = {
        slot: tensor if tensor.dtype == own[slot] else torch.empty_like(tensor, dtype=own[slot])
        for slot, tensor in memory.items()
    }
    for place in places.values():
        place.as_strided((place.numel(),), (1,)).view(torch.uint8).fill_(_UNTOUCHED)  # all of its memory
    live = {name: buffer for name, buffer in module.named_buffers(recurse=False) if not buffer.is_meta}
    try:
        for slot, place in places.items():
            hold(state.owners[slot], with_data(state.tensors[slot], place))
        _run(reset, type(module).__name__, own.values())
        first_owners = {slot: state.owners[slot][0] for slot in memory}
        filled = {slot: registered(owner)[owner.name].data for slot, owner in first_owners.items()}
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta and name in live:
                module._buffers.update(live)  # noqa: SLF001  as they were registered
                problem = f"reset_parameters() of {type(module).__name__} computes it from values of the checkpoint"
                raise MismatchError(problem, tensor=name)
    finally:
        for slot in memory:
            hold(state.owners[slot], state.tensors[slot])
    for slot, values in filled.items():
        if values.is_meta or (values.numel() and _is_untouched(values)):
            raise MismatchError(
                "the checkpoint does not have it, and reset_parameters() does not fill it",
                tensor=state.outline.slots[slot].names[0],
            )
        if values.data_ptr() != memory[slot].data_ptr():
            memory[slot].copy_(values)


def _run(reset: Callable[[], object], owner: str, dtypes: Iterable[torch.dtype]) -> None:
    try:
        with ConstructorCalls(empties=False):  # tensors of the module that are on meta take part
            reset()
    except Exception as error:
        names = ", ".join(sorted({dtype_name(dtype) for dtype in dtypes}))
        raise MismatchError(f"reset_parameters() of {owner} failed on {names} tensors: {error}") from error


def _is_untouched(tensor: torch.Tensor) -> bool:
    pieces = torch.split(tensor.reshape(-1), _PIECE)
    return all(bool((piece.view(torch.uint8) == _UNTOUCHED).all()) for piece in pieces)
