"""What a module holds: every tensor object once, with all its names and all its holders.

``collect`` also finds what cannot be loaded into: tensors of kinds that have no memory of their own to fill, and
tensors on the meta device that no state dict will ever fill (non-persistent buffers, plain attributes).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from sluice._dtypes import ITEM_BYTES, dtype_name
from sluice._load_hooks import extra_state_names, unknown_loading
from sluice._matching import Outline, Slot
from sluice._swap import is_plain

__all__ = ["ModuleState", "Owner", "can_reset", "collect"]

# What nn.Module registers has no other public view that tells names, None and persistence apart.
# ruff: noqa: SLF001

#: Attributes in which a module keeps what it registers.
_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})

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
    #: Non-persistent buffers by name: computed by constructors, in no state dict.
    unsaved: Mapping[str, torch.Tensor]


@dataclass(slots=True, kw_only=True, eq=False)
class _Found:
    """One tensor object while its holders are looked for."""

    tensor: torch.Tensor
    #: Where it was found first.
    path: str
    parameter: bool
    #: Names in the state dict.
    names: list[str] = field(default_factory=list)
    owners: dict[tuple[int, str], Owner] = field(default_factory=dict)
    added_in: int | None = None

    @property
    def can_be_loaded(self) -> bool:
        return is_plain(self.tensor) and dtype_name(self.tensor.dtype) in ITEM_BYTES


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
    for one in found.values():
        (unsaved if not one.names else slots if one.can_be_loaded else refused).append(one)
    return ModuleState(
        module=module,
        outline=Outline(
            slots=tuple(map(_slot, slots)),
            extra_state=tuple(extra_state),
            refused=tuple(name for one in refused for name in one.names),
            problems=(*map(_describe_refused, refused), *_leftovers(module, found, unsaved)),
        ),
        tensors=tuple(one.tensor for one in slots),
        owners=tuple(tuple(one.owners.values()) for one in slots),
        unsaved={one.path: one.tensor for one in unsaved},
    )


def _leftovers(module: nn.Module, found: dict[int, _Found], unsaved: list[_Found]) -> Iterator[str]:
    """Yield a sentence for all that a load could not bring into order."""
    for one in unsaved:
        if one.tensor.is_meta:
            yield (
                f"non-persistent buffer {one.path!r} is on the meta device and in no state dict: build the model "
                "under sluice.empty_init()"
            )
    for path, part in module.named_modules():
        yield from unknown_loading(path, part)
        yield from _attributes_on_meta(f"{path}." if path else "", part, found)


def _add_tensors(prefix: str, module: nn.Module, found: dict[int, _Found]) -> None:
    """Add the tensors that the module registers itself, in the order of a state dict."""
    for kind in (module._parameters, module._buffers):
        for name, tensor in kind.items():
            if tensor is None:
                continue
            one = found.setdefault(
                id(tensor), _Found(tensor=tensor, path=prefix + name, parameter=kind is module._parameters)
            )
            one.owners[id(module), name] = Owner(module=module, name=name)
            if name not in module._non_persistent_buffers_set:
                one.names.append(prefix + name)
            if name == "num_batches_tracked" and isinstance(module, _NormBase):
                one.added_in = _NUM_BATCHES_TRACKED_VERSION


def _slot(one: _Found) -> Slot:
    tensor = one.tensor
    return Slot(
        names=tuple(one.names),
        parameter=one.parameter,
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        dtype=dtype_name(tensor.dtype),
        device=str(tensor.device),
        requires_grad=tensor.requires_grad,
        in_place=_can_be_filled(tensor),
        resettable=tensor.is_meta and any(can_reset(owner.module) for owner in one.owners.values()),
        added_in=one.added_in,
    )


def can_reset(module: nn.Module) -> bool:
    """Return whether ``reset_parameters`` exists and cannot harm: everything that it may fill is on meta."""
    if not callable(getattr(module, "reset_parameters", None)):
        return False
    return all(
        tensor is None or tensor.is_meta or name in part._non_persistent_buffers_set
        for part in module.modules()
        for held in (part._parameters, part._buffers)
        for name, tensor in held.items()
    )


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
    for name, value in vars(module).items():
        if name in _REGISTERED or name in recomputed:
            continue  # weight_norm, spectral_norm and pruning compute their attribute before each forward
        if any(tensor.is_meta and id(tensor) not in found for tensor in _tensors_in(value)):
            yield (
                f"attribute {prefix + name!r} holds a tensor on the meta device that is neither a parameter nor a "
                "buffer: compute it after loading, or from real tensors under sluice.empty_init()"
            )


def _tensors_in(value: object) -> Sequence[torch.Tensor]:
    """Return a tensor, or the tensors directly in a list, tuple or dict."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if not isinstance(value, (list, tuple, dict)) or not value:
        return ()
    members = value.values() if isinstance(value, dict) else value
    return [member for member in members if isinstance(member, torch.Tensor)]
