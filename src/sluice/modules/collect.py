"""What a module holds: every tensor once, with all its names and all its holders.

Tensor objects that view the same memory in the same way (``head.weight = nn.Parameter(embedding.weight.data)``) are
one tensor as well: they are filled once and share their memory afterwards.

``collect`` also finds what cannot be loaded into: tensors of kinds that have no memory of their own to fill, tensors
that overlap others, and tensors on the meta device that no state dict will ever fill (non-persistent buffers, plain
attributes).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from sluice._dtypes import ITEM_BYTES, dtype_name
from sluice._geometry import is_dense
from sluice.matching.match import Outline, Slot
from sluice.modules.load_hooks import extra_state_names
from sluice.modules.swap import is_plain

__all__ = ["Holding", "ModuleState", "Owner", "collect", "reset_of", "undivided"]

# What nn.Module registers has no other public view that tells names, None and persistence apart.
# ruff: noqa: SLF001

#: Attributes in which a module keeps what it registers.
_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})

#: Types of most other attributes; they hold no tensor.
_PLAIN = frozenset({bool, int, float, str, type(None)})

_CONTAINERS = frozenset({dict, OrderedDict, list, tuple, set})

#: Levels of lists and dicts in which attributes are looked through for tensors.
_NESTING = 3

#: Version of BatchNorm that added ``num_batches_tracked``.
_NUM_BATCHES_TRACKED_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A module, and the name of the parameter or buffer by which it holds a tensor."""

    #: The module.
    module: nn.Module
    #: The name in this module.
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A tensor object and who holds it."""

    #: The object.
    tensor: torch.Tensor
    #: Every holder.
    owners: tuple[Owner, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleState:
    """The tensors of a module. ``outline.slots``, ``tensors`` and ``owners`` run in parallel."""

    #: The module.
    module: nn.Module
    #: Its description for matching.
    outline: Outline
    #: The tensor of each slot.
    tensors: tuple[torch.Tensor, ...]
    #: Every holder of the tensor of each slot.
    owners: tuple[tuple[Owner, ...], ...]
    #: Further objects over the memory of a slot's tensor, by slot.
    aliases: Mapping[int, tuple[Holding, ...]]
    #: Non-persistent buffers by name: computed by constructors, in no state dict. The objects over the memory of each.
    unsaved: Mapping[str, tuple[Holding, ...]]

    def holdings(self, slot: int) -> tuple[Holding, ...]:
        """Return every object over the memory of a slot."""
        return (Holding(tensor=self.tensors[slot], owners=self.owners[slot]), *self.aliases.get(slot, ()))


@dataclass(slots=True, kw_only=True, eq=False)
class _Found:
    """One tensor object while its holders are looked for."""

    tensor: torch.Tensor
    #: Where it was found first.
    path: str
    parameter: bool
    #: Whether it has memory of torch's own that can be filled.
    plain: bool
    #: Names in the state dict.
    names: list[str] = field(default_factory=list)
    owners: dict[tuple[int, str], Owner] = field(default_factory=dict)
    added_in: int | None = None
    #: Other objects over the same memory.
    aliases: list[_Found] = field(default_factory=list)

    @property
    def can_be_loaded(self) -> bool:
        return is_lazy(self.tensor) or (self.plain and dtype_name(self.tensor.dtype) in ITEM_BYTES)

    @property
    def holding(self) -> Holding:
        return Holding(tensor=self.tensor, owners=tuple(self.owners.values()))


def collect(module: nn.Module) -> ModuleState:
    """Describe every parameter and buffer of a module.

    Nothing is raised: what cannot be loaded into is in ``outline.problems``, to be reported with everything else.
    """
    found: dict[int, _Found] = {}
    extra_state: list[str] = []
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        _add_tensors(prefix, part, found)
        extra_state.extend(extra_state_names(prefix, part))
    slots: list[_Found] = []
    refused: list[_Found] = []
    unsaved: list[_Found] = []
    for one in _join_aliases(found.values()):
        (unsaved if not one.names else slots if one.can_be_loaded else refused).append(one)
    on_meta = {id(owner.module): owner.module for one in slots if one.tensor.is_meta for owner in one.owners.values()}
    resettable = {key for key, owner in on_meta.items() if reset_of(owner)}
    return ModuleState(
        module=module,
        outline=Outline(
            slots=tuple(_slot(one, resettable) for one in slots),
            extra_state=tuple(extra_state),
            refused=tuple(name for one in refused for name in one.names),
            problems=(
                *map(_describe_refused, refused),
                *_overlaps(slots),
                *_leftovers(module, found, unsaved),
            ),
        ),
        tensors=tuple(one.tensor for one in slots),
        owners=tuple(one.holding.owners for one in slots),
        aliases={slot: tuple(alias.holding for alias in one.aliases) for slot, one in enumerate(slots) if one.aliases},
        unsaved={one.path: (one.holding, *(alias.holding for alias in one.aliases)) for one in unsaved},
    )


def _leftovers(module: nn.Module, found: dict[int, _Found], unsaved: list[_Found]) -> Iterator[str]:
    """Yield a sentence for all that a load could not bring into order."""
    if type(module).load_state_dict is not nn.Module.load_state_dict or "load_state_dict" in vars(module):
        yield f"the module ({type(module).__name__}) has a load_state_dict of its own, which would not be called"
    for one in unsaved:
        if one.tensor.is_meta:
            yield (
                f"non-persistent buffer {one.path!r} is on the meta device and in no state dict: build the model "
                "under sluice.empty_init(), or, if it is computed from parameters, compute it after loading"
            )
    for path, part in module.named_modules():
        yield from _attributes_on_meta(f"{path}." if path else "", part, found)


def _add_tensors(prefix: str, module: nn.Module, found: dict[int, _Found]) -> None:
    """Add the tensors that the module registers itself, in the order of a state dict."""
    for kind in (module._parameters, module._buffers):
        for name, tensor in kind.items():
            if tensor is None:
                continue
            one = found.get(id(tensor))
            if one is None:
                parameter = kind is module._parameters
                one = _Found(tensor=tensor, path=prefix + name, parameter=parameter, plain=is_plain(tensor))
                found[id(tensor)] = one
            one.owners[id(module), name] = Owner(module=module, name=name)
            if name not in module._non_persistent_buffers_set:
                one.names.append(prefix + name)
            if name == "num_batches_tracked" and isinstance(module, _NormBase):
                one.added_in = _NUM_BATCHES_TRACKED_VERSION


def _join_aliases(found: Iterable[_Found]) -> list[_Found]:
    """Make one of the objects that view the same memory in the same way: the first, which gets the names of all."""
    joined: list[_Found] = []
    first_of: dict[object, _Found] = {}
    for one in found:
        tensor = one.tensor
        if not one.plain or tensor.numel() == 0:
            joined.append(one)
            continue
        storage = tensor.untyped_storage()._cdata
        view = (storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        first = first_of.setdefault((view, tensor.dtype, tensor.is_conj(), tensor.is_neg()), one)
        if first is one:
            joined.append(one)
            continue
        first.aliases.append(one)
        first.names += one.names
        first.parameter |= one.parameter
    return joined


def _overlaps(found: Sequence[_Found]) -> Iterator[str]:
    """Yield a sentence for each dense tensor that shares a part of its memory with another one."""
    storages = [one.tensor.untyped_storage()._cdata if one.plain else None for one in found]
    shared = Counter(storages)  # nearly all tensors have theirs for themselves
    views = [
        (storage, one.tensor.storage_offset() * one.tensor.itemsize, one)
        for storage, one in zip(storages, found, strict=True)
        if storage is not None
        and shared[storage] > 1
        and one.tensor.numel()
        and is_dense(tuple(one.tensor.shape), one.tensor.stride())
    ]
    views.sort(key=lambda view: view[:2])
    for (storage, start, one), (other_storage, other_start, other) in pairwise(views):
        if storage == other_storage and other_start < start + one.tensor.nbytes:
            yield f"{one.path!r} and {other.path!r} overlap in memory, and are not the same tensor"


def _slot(one: _Found, resettable: Container[int]) -> Slot:
    """Describe a tensor; ``resettable`` has the ids of the modules on meta that can initialise their own."""
    tensor = one.tensor
    if is_lazy(tensor):
        return _lazy_slot(one)
    return Slot(
        names=tuple(one.names),
        parameter=one.parameter,
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        dtype=dtype_name(tensor.dtype),
        device=str(tensor.device),
        requires_grad=any(holding.tensor.requires_grad for holding in (one, *one.aliases)),
        in_place=_can_be_filled(tensor),
        resettable=tensor.is_meta and any(module in resettable for module, _ in one.owners),
        added_in=one.added_in,
    )


def _lazy_slot(one: _Found) -> Slot:
    """Describe a tensor of a lazy module, which has a dtype and a device but no shape yet."""
    data = one.tensor.data  # the tensor itself refuses to be asked for some of this
    return Slot(
        names=tuple(one.names),
        parameter=one.parameter,
        shape=(),
        stride=(),
        dtype=dtype_name(data.dtype),
        device=str(data.device),
        requires_grad=one.tensor.requires_grad,
        in_place=False,
        lazy=True,
    )


def reset_of(module: nn.Module) -> Callable[[], object] | None:
    """Return the module's ``reset_parameters`` when it cannot harm: everything that it may fill is on meta."""
    # torch's attention and transformers have theirs under the private name.
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    harmless = callable(reset) and all(
        tensor is None or tensor.is_meta or name in part._non_persistent_buffers_set
        for part in module.modules()
        for held in (part._parameters, part._buffers)
        for name, tensor in held.items()
    )
    return reset if harmless else None


def undivided(module: nn.Module) -> frozenset[str]:
    """Return the paths of the modules that the model says are to stay on one device, as transformers' models do."""
    parts = dict(module.named_modules())
    kinds = {kind for part in parts.values() for kind in getattr(part, "_no_split_modules", None) or ()}
    return frozenset(path for path, part in parts.items() if type(part).__name__ in kinds)


def _can_be_filled(tensor: torch.Tensor) -> bool:
    """Return whether writing to the tensor's memory, each element once, gives the tensor these values."""
    if tensor.is_meta or tensor.is_conj() or tensor.is_neg():
        return False
    reach = 0  # elements that the dimensions of smaller steps span
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if step <= reach:
                return False  # an expanded or overlapping view
            reach += (size - 1) * step
    return True


def _describe_refused(one: _Found) -> str:
    kind = type(one.tensor)
    what = f"a {kind.__module__}.{kind.__qualname__}"
    if kind in {torch.Tensor, nn.Parameter}:
        what = (
            "a functional tensor" if one.tensor.layout is torch.strided else f"a tensor of layout {one.tensor.layout}"
        )
        if dtype_name(one.tensor.dtype) not in ITEM_BYTES:
            what = f"a tensor of dtype {one.tensor.dtype}"
    return f"{' = '.join(map(repr, one.names))} is {what}"


def _attributes_on_meta(prefix: str, module: nn.Module, found: dict[int, _Found]) -> Iterator[str]:
    """Yield a sentence for each plain attribute of the module that holds a meta tensor which nothing will fill."""
    hooks = module._forward_pre_hooks.values()
    recomputed = {getattr(hook, "name", None) or getattr(hook, "_tensor_name", None) for hook in hooks}
    if isinstance(module, nn.RNNBase):
        recomputed.add("_flat_weights")  # where parametrizations change its weights
    for name, value in vars(module).items():
        if type(value) in _PLAIN or (type(value) in _CONTAINERS and not value):
            continue  # nearly all of them, so it counts
        if name in _REGISTERED or name in recomputed:
            continue  # weight_norm, spectral_norm and pruning compute their attribute before each forward
        if any(tensor.is_meta and id(tensor) not in found for tensor in _tensors_in(value)):
            yield (
                f"attribute {prefix + name!r} holds a tensor on the meta device that is neither a parameter nor a "
                "buffer: compute it after loading, or from real tensors under sluice.empty_init()"
            )


def _tensors_in(value: object, depth: int = _NESTING) -> Iterator[torch.Tensor]:
    """Yield a tensor, or the tensors in a list, tuple or dict and a few levels of those inside of it."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)) and depth:
        for member in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(member, depth - 1)
