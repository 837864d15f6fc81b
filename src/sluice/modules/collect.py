"""Collect the tensors of a module: each once, with all its names and all its owners.

A DTensor counts as the region that this rank holds: its memory is the local tensor.

Tensor objects that view the same memory in the same way (``head.weight = nn.Parameter(embedding.weight.data)``) count
as one tensor: they are filled once and share their memory afterwards.

``collect`` also finds tensors that cannot be loaded into: those without memory of their own, those that overlap others,
and those on the meta device that no state dict fills (non-persistent buffers, plain attributes).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from functools import lru_cache

import torch
from msgspec import Struct, field
from torch import nn
from torch.nn.parameter import is_lazy

from sluice._dtypes import ITEM_BYTES, dtype_name
from sluice._private_torch import EXTRA_STATE_KEY, KNOWN_LOADERS, NORM_BASE, storage_address
from sluice.matching.match import Outline, Slot
from sluice.modules.emptied import home_of
from sluice.modules.leftovers import find_leftovers, is_plain
from sluice.records.geometry import contiguous_stride, is_dense, span_elements
from sluice.sharding.dtensors import ShardMemory, UndescribedError, home, local_of, region_held, reshard, shard_memories
from sluice.sharding.regions import Region

__all__ = ["Holding", "ModuleState", "Owner", "collect", "has_custom_loader", "reset_of", "undivided"]

# No public view of the registered tensors of an nn.Module distinguishes names, None and persistence.
# ruff: noqa: SLF001

#: Name of a device; the same object for every tensor there.
_device_name = lru_cache(maxsize=64)(str)

#: Version of BatchNorm that added ``num_batches_tracked``.
_NUM_BATCHES_TRACKED_VERSION = 2


class Owner(Struct, frozen=True, kw_only=True):  # with gc: a streamed model refers to its own
    """A module that holds a tensor, and the name of the tensor there."""

    #: The module.
    module: nn.Module
    #: Name of the parameter or buffer in this module.
    name: str


class Holding(Struct, frozen=True, kw_only=True):
    """A tensor object and its owners."""

    #: The object.
    tensor: torch.Tensor
    #: Every module that holds it.
    owners: tuple[Owner, ...]


class ModuleState(Struct, frozen=True, kw_only=True):
    """The tensors of a module. ``outline.slots``, ``tensors`` and ``owners`` run in parallel."""

    #: The module.
    module: nn.Module
    #: The description of the module for matching.
    outline: Outline
    #: The tensor of each slot.
    tensors: tuple[torch.Tensor, ...]
    #: Owners of the tensor of each slot.
    owners: tuple[tuple[Owner, ...], ...]
    #: Further objects that view the memory of a slot's tensor, by slot.
    aliases: Mapping[int, tuple[Holding, ...]]
    #: Non-persistent buffers by name, which no state dict holds: the objects that view the memory of each.
    unsaved: Mapping[str, tuple[Holding, ...]]
    #: Memory in which fully_shard keeps the local tensors of slots after the load, by slot.
    shards: Mapping[int, ShardMemory]
    #: Whether a tensor is on the meta device, and whether one is divided over ranks.
    on_meta: bool
    divided: bool
    #: Whether ``load_state_dict`` may run code other than torch's own, for ``following`` to look closer.
    runs_code: bool

    def holdings(self, slot: int) -> tuple[Holding, ...]:
        """Return every object that views the memory of a slot."""
        return (Holding(tensor=self.tensors[slot], owners=self.owners[slot]), *self.aliases.get(slot, ()))


class _Collected(Struct, kw_only=True, eq=False):
    """One tensor object while its owners are collected."""

    tensor: torch.Tensor
    #: Its memory on this rank: the local tensor of a DTensor, or the tensor itself.
    memory: torch.Tensor
    #: Name under which it was found first.
    path: str
    parameter: bool
    #: Address of its storage; None unless the memory is strided memory of torch's own, see ``is_plain``.
    address: int | None
    #: Whether it can be loaded.
    loadable: bool
    #: Region of a DTensor that this rank holds.
    region: Region | None = None
    #: Why this region is not known.
    undescribed: str | None = None
    #: Names in the state dict.
    names: tuple[str, ...] = ()
    owners: tuple[Owner, ...] = ()
    added_in: int | None = None
    #: Other objects that view the same memory.
    aliases: list[_Collected] = field(default_factory=list)

    @property
    def holding(self) -> Holding:
        return Holding(tensor=self.tensor, owners=self.owners)


def collect(module: nn.Module) -> ModuleState:
    """Describe every parameter and buffer of a module.

    Tensors that cannot be loaded into are described in ``outline.problems``, to be reported with all other problems.
    """
    ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    memories = shard_memories(reshard(module)) if ranks else {}
    collected: dict[int, _Collected] = {}
    extra_state: list[str] = []
    visited: set[int] = set()
    runs_code = type(module).load_state_dict is not nn.Module.load_state_dict or "load_state_dict" in vars(module)
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        _add_tensors(prefix, part, collected, known=id(part) in visited)
        visited.add(id(part))
        if type(part).set_extra_state is not nn.Module.set_extra_state:
            extra_state.append(prefix + EXTRA_STATE_KEY)
        runs_code = runs_code or bool(part._load_state_dict_pre_hooks) or has_custom_loader(part)
    slots: list[_Collected] = []
    refused: list[_Collected] = []
    unsaved: list[_Collected] = []
    # Storages that several tensors view; nearly all tensors have their own.
    addresses = Counter(held.address for held in collected.values() if held.address is not None)
    shared = {address for address, count in addresses.items() if count > 1}
    for held in _join_aliases(collected.values(), shared) if shared else collected.values():
        (unsaved if not held.names else slots if held.loadable else refused).append(held)
    on_meta = {id(owner.module): owner.module for held in slots if held.tensor.is_meta for owner in held.owners}
    leftovers = find_leftovers(module, ((held.path, held.memory) for held in unsaved), collected)
    geometries: dict[tuple[int, ...], tuple[int, ...]] = {}
    shards = {slot: memories[id(held.tensor)] for slot, held in enumerate(slots) if id(held.tensor) in memories}
    resettable = set(map(id, filter(reset_of, on_meta.values())))
    return ModuleState(
        module=module,
        outline=Outline(
            slots=tuple(_slot(held, resettable, geometries, shards.get(slot)) for slot, held in enumerate(slots)),
            extra_state=tuple(extra_state),
            refused=tuple(name for held in refused for name in held.names),
            problems=(
                *map(_describe_refused, refused),
                *(_overlaps(slots, shared) if shared else ()),
                *leftovers,
            ),
        ),
        tensors=tuple(held.tensor for held in slots),
        owners=tuple(held.owners for held in slots),
        aliases={
            slot: tuple(alias.holding for alias in held.aliases) for slot, held in enumerate(slots) if held.aliases
        },
        unsaved={held.path: (held.holding, *(alias.holding for alias in held.aliases)) for held in unsaved},
        shards=shards,
        on_meta=bool(on_meta),
        runs_code=runs_code,
        divided=any(held.region is not None for held in slots),
    )


def has_custom_loader(module: nn.Module) -> bool:
    """Return whether this module, without its children, has a loader other than torch's own."""
    return "_load_from_state_dict" in vars(module) or type(module)._load_from_state_dict not in KNOWN_LOADERS


def _add_tensors(prefix: str, module: nn.Module, collected: dict[int, _Collected], *, known: bool) -> None:
    """Add the tensors that the module itself registers, in the order of a state dict.

    A module that is ``known`` from another path adds names only.
    """
    for kind in (module._parameters, module._buffers):
        for name, tensor in kind.items():
            if tensor is None:
                continue
            full_name = prefix + name
            held = collected.get(id(tensor))
            if held is None:
                held = _found(tensor, full_name, parameter=kind is module._parameters)
                collected[id(tensor)] = held
            if not known:
                held.owners += (Owner(module=module, name=name),)
            if name not in module._non_persistent_buffers_set:
                held.names += (full_name,)
            if name == "num_batches_tracked" and isinstance(module, NORM_BASE):
                held.added_in = _NUM_BATCHES_TRACKED_VERSION


def _found(tensor: torch.Tensor, path: str, *, parameter: bool) -> _Collected:
    """Return a tensor that was found first under a path."""
    memory = tensor if type(tensor) is nn.Parameter else local_of(tensor)
    address = storage_address(memory) if is_plain(memory) else None
    loadable = is_lazy(tensor) if address is None else dtype_name(tensor.dtype) in ITEM_BYTES
    held = _Collected(tensor=tensor, memory=memory, path=path, parameter=parameter, address=address, loadable=loadable)
    try:
        held.region = None if memory is tensor else region_held(tensor)
    except UndescribedError as error:
        held.undescribed, held.loadable = str(error), False
    return held


def _join_aliases(collected: Collection[_Collected], shared: Container[int]) -> list[_Collected]:
    """Merge objects that view the same memory in the same way into the first, which gets all names."""
    joined: list[_Collected] = []
    first_of: dict[object, _Collected] = {}
    for held in collected:
        tensor, address = held.memory, held.address
        if address is None or address not in shared or tensor.numel() == 0:
            joined.append(held)
            continue
        view = (address, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        first = first_of.setdefault((view, tensor.dtype, tensor.is_conj(), tensor.is_neg(), held.region), held)
        if first is held:
            joined.append(held)
            continue
        first.aliases.append(held)
        first.names += held.names
        first.parameter |= held.parameter
    return joined


def _overlaps(slots: Sequence[_Collected], shared: Container[int]) -> Iterator[str]:
    """Yield a problem for each tensor that shares part of its memory with another one, or lies between its elements.

    Live tensors with gaps are filled in place and may share.
    """
    places: dict[int, list[tuple[int, int, _Collected]]] = {}
    for held in slots:
        if held.address is not None and held.address in shared and held.memory.numel():
            memory, shape, stride = held.memory, tuple(held.memory.shape), held.memory.stride()
            if memory.is_meta or is_dense(shape, stride):
                start = int(memory.storage_offset()) * memory.itemsize
                stop = start + span_elements(shape, stride) * memory.itemsize
                places.setdefault(held.address, []).append((start, stop, held))
    for group in places.values():
        group.sort(key=lambda place: place[:2])
        for number, (_, stop, held) in enumerate(group):
            for start, _, other in group[number + 1 :]:
                if start >= stop:
                    break
                yield f"{held.path!r} and {other.path!r} overlap in memory and are not the same tensor"


def _slot(
    held: _Collected,
    resettable: Container[int],
    geometries: dict[tuple[int, ...], tuple[int, ...]],
    shard: ShardMemory | None,
) -> Slot:
    """Describe a tensor.

    Args:
        held: The tensor.
        resettable: Ids of the modules that can initialise their tensors on meta.
        geometries: The shapes and strides of other slots, of which equal ones are the same object.
        shard: The memory in which fully_shard keeps it.
    """
    tensor = held.tensor
    lazy = held.address is None and is_lazy(tensor)  # without a shape yet
    shape, stride = ((), ()) if lazy else (tuple(tensor.shape), held.memory.stride())
    if len(stride) != len(shape):  # outside of the mesh: a local tensor of shape (0,)
        stride = contiguous_stride(shape)
    shown = tensor.data if lazy else tensor  # a lazy tensor raises for some attributes
    return Slot(
        names=held.names,
        parameter=held.parameter,
        shape=geometries.setdefault(shape, shape),
        stride=geometries.setdefault(stride, stride),
        dtype=dtype_name(shown.dtype),
        device=_device_name(shown.device),
        requires_grad=tensor.requires_grad or any(alias.tensor.requires_grad for alias in held.aliases),
        in_place=not lazy and _can_be_filled(held.memory),
        # Parts of random values differ from the values of the whole, and copies on other ranks from each other.
        resettable=shown.is_meta
        and held.region is None
        and not lazy
        and any(id(owner.module) in resettable for owner in held.owners),
        added_in=held.added_in,
        lazy=lazy,
        home=_home_of(held, shard) if shown.is_meta and not lazy else "cpu",
        region=held.region,
    )


def _home_of(held: _Collected, shard: ShardMemory | None) -> str:
    """Return where a tensor on meta gets its memory: a DTensor on the device of its mesh, unless it is offloaded."""
    if held.region is None:
        return home_of(held.tensor)
    return "cpu" if shard is not None and shard.offloaded else home(held.tensor)


def reset_of(module: nn.Module) -> Callable[[], object] | None:
    """Return the module's ``reset_parameters`` if it cannot change live tensors: all that it may fill are on meta."""
    # torch's attention and transformer modules use the private name.
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    harmless = callable(reset) and all(
        tensor is None or tensor.is_meta or name in part._non_persistent_buffers_set
        for part in module.modules()
        for held in (part._parameters, part._buffers)
        for name, tensor in held.items()
    )
    return reset if harmless else None


def undivided(module: nn.Module) -> frozenset[str]:
    """Return the paths of modules that must stay on one device, as models of transformers declare it."""
    parts = dict(module.named_modules())
    kinds = {kind for part in parts.values() for kind in getattr(part, "_no_split_modules", None) or ()}
    return frozenset(path for path, part in parts.items() if type(part).__name__ in kinds)


def _can_be_filled(tensor: torch.Tensor) -> bool:
    """Return whether the tensor gets its values by writing each element of its memory once."""
    if tensor.is_meta or tensor.is_conj() or tensor.is_neg():
        return False
    if tensor.is_contiguous() and tensor.numel():
        return True
    reach = 0  # elements spanned by the dimensions of smaller steps
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if step <= reach:
                return False  # an expanded or overlapping view
            reach += (size - 1) * step
    return True


def _describe_refused(held: _Collected) -> str:
    kind = type(held.tensor)
    if held.undescribed is not None:
        return f"{' = '.join(map(repr, held.names))} is {held.undescribed}"
    text = f"a {kind.__module__}.{kind.__qualname__}"
    if kind in {torch.Tensor, nn.Parameter}:
        text = (
            "a functional tensor" if held.tensor.layout is torch.strided else f"a tensor of layout {held.tensor.layout}"
        )
        if dtype_name(held.tensor.dtype) not in ITEM_BYTES:
            text = f"a tensor of dtype {held.tensor.dtype}"
    return f"{' = '.join(map(repr, held.names))} is {text}"
