"""Storages on meta that took the place of real ones, and the devices to which constructors moved them.

A storage on meta has the size of the real one, and a tensor the same place in both, so tensors that shared memory share
it on meta too. Facts about storages do not keep them alive; a copy of a module has storages of its own.

Leftovers are the tensors that no state dict holds: attributes and non-persistent buffers. They must be real, and not
share the memory of a parameter that ``empty_init`` dropped: no load could fill them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator
from functools import cache, lru_cache
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

# Storages have no public identity, and no public view of a module tells its registered tensors from its attributes.
# ruff: noqa: SLF001

__all__ = [
    "NESTING",
    "EmptiedStorages",
    "describe_moves",
    "device_of",
    "find_leftovers",
    "home_of",
    "is_plain",
    "map_tensors",
    "moved_to",
    "remember_move",
    "tensors_in",
]

_Fact = TypeVar("_Fact")

_CPU = torch.device("cpu")

#: Facts that are always kept, also about storages that are gone.
_FEWEST = 256

#: Attributes in which a module keeps registered tensors and modules.
_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})

#: Types of most other attributes, which hold no tensor.
_PLAIN = frozenset({bool, int, float, str, type(None)})

#: Levels of lists and dicts in attributes that are searched for tensors.
NESTING = 3


class _StorageTable(Generic[_Fact]):
    """One fact for each storage, by its address. A weak reference keeps an address unique."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[StorageWeakRef, _Fact]] = {}
        self._most = _FEWEST

    def add(self, storage: StorageWeakRef, fact: _Fact) -> None:
        """Add a storage. Those that are gone are removed each time their number may have doubled."""
        if len(self._found) >= self._most:
            self._found = {at: known for at, known in self._found.items() if not known[0].expired()}  # type: ignore[no-untyped-call]
            self._most = _FEWEST + 2 * len(self._found)
        self._found[storage.cdata] = (storage, fact)

    def get(self, tensor: torch.Tensor) -> _Fact | None:
        """Return the fact about a tensor's storage, or None."""
        known = self._found.get(_address(tensor)) if self._found else None
        return None if known is None or known[0].expired() else known[1]  # type: ignore[no-untyped-call]


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has none, as lazy parameters and tensors inside torch.func."""
    try:
        return 0 if is_lazy(tensor) else tensor.untyped_storage()._cdata
    except NotImplementedError:
        return 0


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is strided memory of torch's own.

    False for fake and functional tensors, lazy parameters, sparse and quantized tensors, and subclasses with their own
    memory or operators, such as DTensor. Other subclasses of ``nn.Parameter`` are plain.
    """
    if not _is_plain_kind(type(tensor)):
        return False
    if torch._is_functional_tensor(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


@lru_cache(maxsize=64)
def _is_plain_kind(kind: type[torch.Tensor]) -> bool:
    """Return whether tensors of a class can be strided memory of torch's own."""
    known = kind is torch.Tensor or torch.nn.Parameter in kind.__mro__
    lazy = issubclass(kind, (UninitializedParameter, UninitializedBuffer))
    return known and not lazy and kind.__torch_dispatch__ == torch.Tensor.__torch_dispatch__


#: Devices to which constructors moved storages on meta.
_moves: _StorageTable[torch.device] = _StorageTable()

#: Real storages that something still used after ``empty_init``.
_emptied: _StorageTable[bool] = _StorageTable()


class EmptiedStorages:
    """The storages that became empty in one context."""

    def __init__(self) -> None:
        #: The real storage, which this does not keep alive, and the one on meta, by the address of the real one.
        self._of: dict[int, tuple[StorageWeakRef, torch.UntypedStorage]] = {}
        self._original: dict[int, StorageWeakRef] = {}
        self._stale: set[int] = set()

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on meta in place of one with memory."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._of:
            empty = torch.UntypedStorage(storage.nbytes(), device="meta")  # type: ignore[no-untyped-call]
            original = self._original[empty._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._of[storage._cdata] = original, empty
        stand_in = torch.empty(0, dtype=tensor.dtype, device="meta")
        stand_in.set_(self._of[storage._cdata][1], tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.device != _CPU:
            remember_move(stand_in, tensor.device)
        return stand_in

    def note_change(self, tensor: torch.Tensor) -> None:
        """Note that a change of the values of a tensor on meta was skipped."""
        original = self._original.get(_address(tensor))
        if original is not None and not original.expired():  # type: ignore[no-untyped-call]
            self._stale.add(original.cdata)

    def is_stale(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor with memory would have other values if no change had been skipped."""
        return bool(self._stale) and not tensor.is_meta and _address(tensor) in self._stale

    def remember(self) -> None:
        """Remember the real storages that are still in use; nearly all are gone."""
        for original, _ in self._of.values():
            if not original.expired():  # type: ignore[no-untyped-call]
                _emptied.add(original, fact=True)


def _was_emptied(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has the memory with which a parameter was made before ``empty_init`` emptied it."""
    return is_plain(tensor) and _emptied.get(tensor) is not None


def remember_move(tensor: torch.Tensor, device: torch.device) -> None:
    """Remember the device of a tensor on meta."""
    if _address(tensor):
        _moves.add(StorageWeakRef(tensor.untyped_storage()), device)  # type: ignore[no-untyped-call]


def moved_to(tensor: torch.Tensor) -> torch.device | None:
    """Return the device to which the constructor of a module moved a tensor on meta, or None."""
    return _moves.get(tensor) if tensor.is_meta else None


def device_of(tensor: torch.Tensor) -> torch.device:
    """Return the device that a tensor would have in ordinary construction."""
    return (moved_to(tensor) or _CPU) if tensor.is_meta else tensor.device


def home_of(tensor: torch.Tensor) -> str:
    """Return where a tensor on meta gets its memory: where the constructor moved it, if torch can use that device."""
    device = moved_to(tensor)
    return str(device) if device is not None and _is_available(device) else "cpu"


def describe_moves(tensors: Iterable[torch.Tensor]) -> Iterator[str]:
    """Yield a note for each device to which the constructor moved some of the tensors."""
    devices = Counter(filter(None, map(moved_to, tensors)))
    for device, count in devices.items():
        what = f"the constructor moved {count} {'tensor' if count == 1 else 'tensors'} to {device}"
        yield what if _is_available(device) else f"{what}, which is not available: placed on the CPU"


@cache
def _is_available(device: torch.device) -> bool:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):  # torch without CUDA raises AssertionError
        return False
    return True


def find_leftovers(
    module: nn.Module, buffers: Iterable[tuple[str, torch.Tensor]], registered: Container[int]
) -> Iterator[str]:
    """Yield a sentence for each tensor that a load could not fill.

    Args:
        module: The module.
        buffers: Name and tensor of each non-persistent buffer.
        registered: Ids of all registered tensors.
    """
    for name, tensor in buffers:
        if tensor.is_meta:
            yield (
                f"non-persistent buffer {name!r} is on the meta device and not in state dicts: build the model "
                "under sluice.empty_init(), or, if it is computed from parameters, compute it after loading"
            )
        elif _was_emptied(tensor):
            yield _shares(f"non-persistent buffer {name!r}")
    seen: set[int] = set()
    for path, part in module.named_modules():
        for name, value in _attributes(part):
            label = f"attribute {(f'{path}.{name}' if path else name)!r}"
            tensors = [tensor for tensor in tensors_in(value) if not (id(tensor) in registered or id(tensor) in seen)]
            seen.update(map(id, tensors))
            if any(tensor.is_meta for tensor in tensors):
                yield (
                    f"{label} holds a tensor on the meta device that is neither a parameter nor a buffer: compute it "
                    "after loading, or from real tensors under sluice.empty_init()"
                )
            elif any(map(_was_emptied, tensors)):
                yield _shares(label)


def _shares(label: str) -> str:
    return (
        f"{label} shares the memory of a parameter or buffer, which has new memory after sluice.empty_init(): compute "
        "it after loading, or make it a property"
    )


def _attributes(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield the attributes of a module that may hold tensors, but for those that are computed in each forward."""
    recomputed: set[object] = set()
    for hook in module._forward_pre_hooks.values():  # of weight_norm, spectral_norm and pruning
        recomputed.add(getattr(hook, "name", None) or getattr(hook, "_tensor_name", None))
    if isinstance(module, nn.RNNBase):
        recomputed.add("_flat_weights")  # if parametrizations replace its weights
    for name, value in vars(module).items():
        if type(value) in _PLAIN or (type(value) in {dict, OrderedDict, list, tuple, set} and not value):
            continue  # a fast path for nearly all attributes
        if name not in _REGISTERED and name not in recomputed:
            yield name, value


def tensors_in(value: object, depth: int = NESTING) -> Iterator[torch.Tensor]:
    """Yield the tensor, or the tensors in a list, tuple or dict, nested up to ``depth`` levels."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)) and depth:
        for member in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(member, depth - 1)


def map_tensors(value: Any, change: Callable[[torch.Tensor], object]) -> Any:
    """Return a value with other tensors: in lists, tuples and dicts, which are copied; others are the same."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in {tuple, list}:
        return type(value)(map_tensors(member, change) for member in value)
    if type(value) is dict:
        return {name: map_tensors(member, change) for name, member in value.items()}
    return value
