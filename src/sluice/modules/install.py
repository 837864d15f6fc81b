"""Install finished tensors in a module.

A tensor on the meta device gets its memory by a swap, so that it stays the same object for ties, optimizers and
attributes; if torch refuses the swap, it is replaced in every module that holds it. A live tensor was filled in place,
or gets its new memory through ``.data``. Gradients of live parameters are kept, as ``load_state_dict`` does, unless the
parameter changes its dtype or device: then they are dropped.

No code of the module runs before every tensor is in place: an error in it would leave the module half loaded.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from sluice._errors import PartialLoadError
from sluice._private_torch import EXTRA_STATE_KEY, IncompatibleKeys
from sluice.entries.patterns import Placement, device_of
from sluice.matching.match import Match
from sluice.modules.collect import Holding, ModuleState, Owner
from sluice.modules.leftovers import NESTING
from sluice.modules.swap import swap_data, with_data
from sluice.sharding.dtensors import is_dtensor, local_of

__all__ = ["after_loading", "finish_loading", "hold", "install", "install_one", "note_written", "registered"]

# nn.Module has no public names for its post-hooks and members, nor RNNBase for its weak references.
# ruff: noqa: SLF001


def install(
    state: ModuleState,
    match: Match,
    tensors: Sequence[torch.Tensor],
    initial: Mapping[int, torch.Tensor] | None = None,
    *,
    placement: Placement | None = None,
) -> tuple[str, ...]:
    """Install finished tensors in the module; none of its tensors is on the meta device afterwards.

    Args:
        state: The module.
        match: The match of its tensors.
        tensors: The finished tensor of each request; requests that are ``existing`` were filled in place.
        initial: Finished tensors without an entry, by slot.
        placement: Devices to which live tensors without an entry and non-persistent buffers move.

    Returns:
        Names of tensors that became new objects, because torch refused to swap their memory.
    """
    replaced: list[str] = []
    new: list[tuple[int, torch.Tensor]] = []
    for slot, request, tensor in zip(match.slots, match.requests, tensors, strict=True):
        if not request.existing:
            new.append((slot, tensor))
            continue
        note_written(state.tensors[slot])
        for holding in state.aliases.get(slot, ()):
            note_written(holding.tensor)
    new += (initial or {}).items()
    if not (new or match.kept or state.unsaved):
        return ()
    with torch.inference_mode(mode=False), torch.no_grad():
        for slot, tensor in new:
            if not install_one(state, slot, tensor):
                replaced.append(state.outline.slots[slot].names[0])
        for slot in match.kept:
            _move(state.module, state.holdings(slot), device_of(state.outline.slots[slot].names[0], placement or {}))
        for name, holdings in state.unsaved.items():
            _move(state.module, holdings, device_of(name, placement or {}))
    return tuple(replaced)


def finish_loading(
    state: ModuleState,
    match: Match,
    extra_state: Mapping[str, object],
    *,
    strict: bool,
    attributes: Mapping[str, object] | None = None,
    receivers: Sequence[str] = ("",),
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Set attributes, restore extra state and run post-hooks, after every tensor is in place.

    Args:
        state: The module.
        match: The match of its tensors.
        extra_state: Finished extra state by name.
        strict: Whether names that hooks add are an error.
        attributes: Finished tensors that become attributes of modules, by full name.
        receivers: Paths of the modules whose post-hooks and those of their parts run.

    Returns:
        The missing and the unexpected names after the hooks.

    Raises:
        PartialLoadError: The module's code failed, or a post-hook reports names; every tensor was loaded.
    """
    missing, unexpected = list(match.missing), list(match.unexpected)
    step = "setting an attribute"
    try:
        for name, value in (attributes or {}).items():
            path, _, attribute = name.rpartition(".")
            setattr(state.module.get_submodule(path), attribute, value)
        step = "set_extra_state"
        for path, part in state.module.named_modules(remove_duplicate=False) if extra_state else ():
            if (name := f"{path}.{EXTRA_STATE_KEY}" if path else EXTRA_STATE_KEY) in extra_state:
                part.set_extra_state(extra_state[name])
        step = "a load_state_dict post-hook"
        for path in receivers:
            if path:
                _run_post_hooks_below(state.module, path, missing, unexpected)
            else:  # ScriptModules have no get_submodule
                _run_post_hooks(state.module, missing, unexpected)
    except Exception as error:
        raise after_loading(f"{step} failed: {error}", state) from error
    added = (missing, unexpected) != ([*match.missing], [*match.unexpected])
    if strict and added and (missing or unexpected):
        raise after_loading(f"a load_state_dict post-hook reports {missing} missing, {unexpected} unexpected", state)
    return tuple(missing), tuple(unexpected)


def _run_post_hooks_below(module: nn.Module, path: str, missing: list[str], unexpected: list[str]) -> None:
    """Run the post-hooks of one part, with the names that it knows; the lists get back what the hooks leave."""
    prefix = f"{path}."
    below = [
        [name.removeprefix(prefix) for name in names if name.startswith(prefix)] for names in (missing, unexpected)
    ]
    _run_post_hooks(module.get_submodule(path), *below)
    for names, left in zip((missing, unexpected), below, strict=True):
        names[:] = [*(name for name in names if not name.startswith(prefix)), *(prefix + name for name in left)]


def _run_post_hooks(module: nn.Module, missing: list[str], unexpected: list[str]) -> None:
    """Run the post-hooks of a module and its parts, children first as ``load_state_dict`` does."""
    for child in module._modules.values():
        if child is not None:
            _run_post_hooks(child, missing, unexpected)
    for hook in module._load_state_dict_post_hooks.values():
        hook(module, IncompatibleKeys(missing, unexpected))


def after_loading(problem: str, state: ModuleState) -> PartialLoadError:
    """Return the error for a problem of a load, a clause, after every tensor is in place."""
    done = tuple(slot.names[0] for slot in state.outline.slots)
    return PartialLoadError(f"every tensor was loaded, but {problem}", done=done)


def install_one(state: ModuleState, slot: int, tensor: torch.Tensor) -> bool:
    """Give one tensor of the module, and its aliases, new memory; return whether they are still the same objects."""
    if slot not in state.aliases:
        return _set_memory(state.module, state.tensors[slot], state.owners[slot], tensor)
    same = [_set_memory(state.module, each.tensor, each.owners, tensor) for each in state.holdings(slot)]
    return all(same)


def _set_memory(module: nn.Module, own: torch.Tensor, owners: Sequence[Owner], tensor: torch.Tensor) -> bool:
    if isinstance(tensor, nn.Parameter):  # a quantized weight: an object of its own
        hold(owners, tensor)
        return False
    if is_lazy(own):
        cast("Any", own).__class__ = cast("Any", own).cls_to_become  # as its materialize() does
    # An inference tensor becomes an ordinary tensor: with ordinary memory it would not be a valid inference tensor.
    if not own.is_meta and not own.is_inference():
        if (own.dtype, own.device) != (tensor.dtype, tensor.device):
            own.grad = None  # the next backward pass could not add to it, and it belongs to the old values
        if not is_dtensor(own):  # of a DTensor, .data would change neither dtype nor device
            with suppress(RuntimeError):  # torch refuses it between the host and the device of a vendor's package
                own.data = tensor
                return True
    if not _recurrent(owners) and swap_data(own, tensor):
        return True
    with _without_weak_references(owners):
        if swap_data(own, tensor):
            return True
        new = with_data(own, tensor)
        hold(owners, new)
        _replace_in_attributes(module, own, new)
    return False


def _recurrent(owners: Sequence[Owner]) -> set[nn.RNNBase]:
    """Return the recurrent layers among the owners."""
    return {owner.module for owner in owners if isinstance(owner.module, nn.RNNBase)}


@contextmanager
def _without_weak_references(owners: Sequence[Owner]) -> Iterator[None]:
    """Clear the weak references of torch's recurrent layers to their weights, which prevent a swap, for the block."""
    layers = _recurrent(owners)
    for layer in layers:
        layer._flat_weight_refs = []
    try:
        yield
    finally:
        for layer in layers:
            weights = layer._flat_weights
            layer._flat_weight_refs = [weight if weight is None else weakref.ref(weight) for weight in weights]


def _replace_in_attributes(module: nn.Module, old: torch.Tensor, new: torch.Tensor) -> None:
    """Replace a tensor in plain attributes, and in their lists, tuples and dicts, as recurrent layers have them."""
    for part in module.modules():
        for name, value in vars(part).items():
            if value is old or isinstance(value, (list, tuple, dict)):
                vars(part)[name] = _replaced_in(value, old, new)


def _replaced_in(value: Any, old: torch.Tensor, new: torch.Tensor, depth: int = NESTING) -> Any:
    """Return a value in which a tensor is replaced: lists and dicts themselves, tuples that had it as new ones."""
    if value is old:
        return new
    if isinstance(value, (list, dict)) and depth:
        for key, member in list(value.items() if isinstance(value, dict) else enumerate(value)):
            other = _replaced_in(member, old, new, depth - 1)
            if other is not member:
                value[key] = other
    elif type(value) is tuple and depth:
        members = [_replaced_in(member, old, new, depth - 1) for member in value]
        if any(one is not other for one, other in zip(members, value, strict=True)):
            return tuple(members)
    return value


def _move(module: nn.Module, holdings: Sequence[Holding], device: str | None) -> None:
    """Move a live tensor; objects that view the same memory still share it afterwards."""
    data = local_of(holdings[0].tensor).data
    if device is None or data.device == torch.device(device):
        return
    moved = data.to(device)
    for holding in holdings:
        if is_lazy(holding.tensor):
            holding.tensor.data = moved
        else:
            _set_memory(module, holding.tensor, holding.owners, moved)


def note_written(tensor: torch.Tensor) -> None:
    """Tell autograd that the tensor was written in place, which it cannot see."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def hold(owners: Sequence[Owner], tensor: torch.Tensor) -> None:
    """Set the tensor in its owners, without the side effects of an assignment but for that on recurrent layers."""
    for owner in owners:
        registered(owner)[owner.name] = tensor
        flat = owner.module._flat_weights_names if isinstance(owner.module, nn.RNNBase) else []
        if owner.name in flat:  # otherwise the layer would hold a weight that has left it
            vars(owner.module)["_flat_weights"][flat.index(owner.name)] = tensor


def registered(owner: Owner) -> dict[str, torch.Tensor]:
    """Return the dict of the module that holds the tensor."""
    module = owner.module
    held = module._parameters if owner.name in module._parameters else module._buffers
    return cast("dict[str, torch.Tensor]", held)
