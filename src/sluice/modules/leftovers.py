"""Tensors of a module that no state dict holds: attributes and non-persistent buffers.

Those that share memory with a tensor on meta follow it. Others must be real: no load could fill them.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Container, Iterator, Sequence

import torch
from msgspec import Struct, field
from torch import nn

from sluice.modules.followers import Follower, SharedMemory

__all__ = ["NESTING", "Leftovers", "find_leftovers"]

# No public view of a module tells its registered tensors from its attributes.
# ruff: noqa: SLF001

#: Attributes in which a module keeps registered tensors and modules.
_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})

#: Types of most other attributes, which hold no tensor.
_PLAIN = frozenset({bool, int, float, str, type(None)})

_CONTAINERS = frozenset({dict, OrderedDict, list, tuple, set})

#: Levels of lists and dicts in attributes that are searched for tensors.
NESTING = 3


class Leftovers(Struct, kw_only=True):
    """The tensors that no state dict holds."""

    #: Those that follow a slot, by slot.
    followers: defaultdict[int, list[Follower]] = field(default_factory=lambda: defaultdict(list))
    #: Names of non-persistent buffers among them.
    following_buffers: set[str] = field(default_factory=set)
    #: A sentence for each that a load could not fill.
    problems: list[str] = field(default_factory=list)


def find_leftovers(
    module: nn.Module,
    slots: Sequence[tuple[str, torch.Tensor]],
    buffers: Sequence[tuple[str, Sequence[torch.Tensor]]],
    registered: Container[int],
) -> Leftovers:
    """Find the tensors that no state dict holds.

    Args:
        module: The module.
        slots: Name and tensor of each slot.
        buffers: Name of each non-persistent buffer, and the objects that view its memory.
        registered: Ids of all registered tensors.
    """
    found = Leftovers()
    names = [name for name, _ in slots]
    shared = SharedMemory([tensor for _, tensor in slots])
    for name, tensors in buffers:
        follows = [_follow(found, shared, names, f"non-persistent buffer {name!r}", tensor) for tensor in tensors]
        if all(follows):
            found.following_buffers.add(name)
        elif tensors[0].is_meta:
            found.problems.append(
                f"non-persistent buffer {name!r} is on the meta device and not in state dicts: build the model "
                "under sluice.empty_init(), or, if it is computed from parameters, compute it after loading"
            )
    seen: set[int] = set()
    for path, part in module.named_modules():
        for name, value in _attributes(part):
            label = f"attribute {(f'{path}.{name}' if path else name)!r}"
            tensors = [tensor for tensor in _tensors_in(value) if not (id(tensor) in registered or id(tensor) in seen)]
            seen.update(map(id, tensors))
            follows = [_follow(found, shared, names, label, tensor) for tensor in tensors]
            if any(tensor.is_meta and not follow for tensor, follow in zip(tensors, follows, strict=True)):
                found.problems.append(
                    f"{label} holds a tensor on the meta device that is neither a parameter nor a buffer: compute it "
                    "after loading, or from real tensors under sluice.empty_init()"
                )
    return found


def _follow(found: Leftovers, shared: SharedMemory, names: Sequence[str], label: str, tensor: torch.Tensor) -> bool:
    """Note which slot a tensor follows; return whether it shares memory with one, also if it cannot follow."""
    slots = list(shared.shared_with(tensor))
    if len(slots) == 1 and slots[0][1] is not None:
        found.followers[slots[0][0]].append(slots[0][1])
    elif slots:
        others = " and ".join(repr(names[slot]) for slot, _ in slots)
        found.problems.append(
            f"{label} shares memory with {others} and is not a view of it that a load can keep: compute it after "
            "loading, or make it a property"
        )
    return bool(slots)


def _attributes(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield the attributes of a module that may hold tensors, but for those that are computed in each forward."""
    hooks = module._forward_pre_hooks.values()
    # weight_norm, spectral_norm and pruning compute their attribute before each forward.
    recomputed = {getattr(hook, "name", None) or getattr(hook, "_tensor_name", None) for hook in hooks}
    if isinstance(module, nn.RNNBase):
        recomputed.add("_flat_weights")  # if parametrizations replace its weights
    for name, value in vars(module).items():
        if type(value) in _PLAIN or (type(value) in _CONTAINERS and not value):
            continue  # a fast path for nearly all attributes
        if name not in _REGISTERED and name not in recomputed:
            yield name, value


def _tensors_in(value: object, depth: int = NESTING) -> Iterator[torch.Tensor]:
    """Yield the tensor, or the tensors in a list, tuple or dict, nested up to ``depth`` levels."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)) and depth:
        for member in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(member, depth - 1)
