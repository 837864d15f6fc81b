"""Private names of torch that sluice uses, each with a public replacement.

A name that the installed torch does not have is reported by one ``RuntimeWarning`` when this module is imported, and
its replacement is used: the results are the same, sometimes with more memory or time. So a torch that moves such a name
does not stop ``import sluice``.

Not listed, because nothing replaces them: the dictionaries of ``nn.Module`` (``_parameters``, ``_buffers``,
``_modules`` and those of hooks) and ``UntypedStorage._cdata``, which ``torch.save`` itself and most libraries use.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = [
    "EXTRA_STATE_KEY",
    "KNOWN_LOADERS",
    "MISSING_NAMES",
    "NORM_BASE",
    "PRIVATE_NAMES",
    "IncompatibleKeys",
    "copy_each",
    "is_traceable_wrapper_subclass",
    "make_subclass",
    "neg_view",
    "saved_tensors_hooks_around",
    "set_math_bits",
    "storage_address",
    "storage_use_count",
    "swap_contents",
    "transforms_are_active",
    "use_count",
]

# The names of this module are private to torch.
# ruff: noqa: SLF001


class _IncompatibleKeys(NamedTuple):
    """Arguments of a hook after loading; torch's class has the same fields."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def _is_wrapper(tensor: object) -> bool:
    """Return whether a tensor has the documented methods of traceable wrapper subclasses."""
    return all(hasattr(tensor, f"__tensor_{verb}__") for verb in ("flatten", "unflatten"))


def _neg(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.neg()  # a copy instead of a view


def _copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)  # releases the interpreter lock for each piece only


def _set_metadata(tensor: torch.Tensor, bits: dict[str, bool]) -> torch.Tensor:
    """Return a view with a base, where torch sets the bits of the tensor itself."""
    tensor = tensor.conj() if bits.get("conj") else tensor
    return neg_view(tensor) if bits.get("neg") else tensor


def _make_subclass(kind: type[torch.Tensor], data: torch.Tensor, requires_grad: bool) -> torch.Tensor:  # noqa: FBT001
    return data.detach().as_subclass(kind).requires_grad_(requires_grad)


def _storage_address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # leaves an object that lives as long as the storage


def _unknown_count(tensor: torch.Tensor) -> int:  # noqa: ARG001  the signature of torch's method
    return 0  # as if it were shared: torch.utils.swap_tensors decides


def _swap_contents(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.utils.swap_tensors(one, other)  # type: ignore[no-untyped-call]  # compares and swaps classes and attributes


def _no_hooks(ignore_is_tracing: bool) -> None:  # noqa: FBT001  the signature of torch's function
    """Return no hooks: those around a stream then see no tensors of its blocks, which takes more memory."""


#: Module, name and replacement of each private name.
PRIVATE_NAMES: tuple[tuple[str, str, Any], ...] = (
    ("torch", "_neg_view", _neg),
    ("torch", "_foreach_copy_", _copy_each),
    ("torch.Tensor", "_make_subclass", _make_subclass),
    ("torch.Tensor", "_use_count", _unknown_count),
    ("torch._C", "_are_functorch_transforms_active", bool),
    ("torch._C", "_storage_Use_Count", _unknown_count),
    ("torch._C", "_storage_address", _storage_address),
    ("torch._C", "_swap_tensor_impl", _swap_contents),
    ("torch._utils", "set_tensor_metadata", _set_metadata),
    ("torch.nn.modules.module", "_EXTRA_STATE_KEY_SUFFIX", "_extra_state"),
    ("torch.nn.modules.module", "_IncompatibleKeys", _IncompatibleKeys),
    ("torch.utils._python_dispatch", "is_traceable_wrapper_subclass", _is_wrapper),
)


def _found() -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the object to use for each name, and the names that torch does not have; warn about these."""
    objects: dict[str, Any] = {}
    missing: list[str] = []
    for where, name, replacement in PRIVATE_NAMES:
        try:
            owner: Any = torch.Tensor if where == "torch.Tensor" else import_module(where)
            objects[name] = getattr(owner, name)
        except (ImportError, AttributeError):
            missing.append(f"{where}.{name}")
            objects[name] = replacement
    if missing:
        warnings.warn(
            f"torch {torch.__version__} has no {', '.join(missing)}: sluice uses public functions instead, some of "
            "which take more memory or time. A later version of sluice may know this torch.",
            RuntimeWarning,
            stacklevel=2,
        )
    return objects, tuple(missing)


_OBJECTS, MISSING_NAMES = _found()

neg_view: Callable[[torch.Tensor], torch.Tensor] = _OBJECTS["_neg_view"]
copy_each: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None] = _OBJECTS["_foreach_copy_"]
storage_address: Callable[[torch.Tensor], int] = _OBJECTS["_storage_address"]
use_count: Callable[[torch.Tensor], int] = _OBJECTS["_use_count"]
#: Number of tensors and other objects that use a storage, given its ``_cdata``.
storage_use_count: Callable[[int], int] = _OBJECTS["_storage_Use_Count"]
swap_contents: Callable[[torch.Tensor, torch.Tensor], None] = _OBJECTS["_swap_tensor_impl"]
make_subclass: Callable[[type[torch.Tensor], torch.Tensor, bool], torch.Tensor] = _OBJECTS["_make_subclass"]
is_traceable_wrapper_subclass: Callable[[object], bool] = _OBJECTS["is_traceable_wrapper_subclass"]
#: Whether a transform of ``torch.func`` is running.
transforms_are_active: Callable[[], bool] = _OBJECTS["_are_functorch_transforms_active"]
EXTRA_STATE_KEY: str = _OBJECTS["_EXTRA_STATE_KEY_SUFFIX"]
IncompatibleKeys: Callable[[list[str], list[str]], Any] = _OBJECTS["_IncompatibleKeys"]

#: Not in the table of names, because torch 2.6, which is not warned of, has none.
_innermost_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", _no_hooks)

#: torch's own ``_load_from_state_dict``: of modules, of batch norms and of instance norms. Their only
#: effect is described by ``Slot.added_in``.
KNOWN_LOADERS = tuple(kind._load_from_state_dict for kind in (nn.Module, nn.BatchNorm1d, nn.InstanceNorm1d))

#: Class of all norms with ``num_batches_tracked``: the one that defines their loader.
NORM_BASE: Any = next(kind for kind in nn.BatchNorm1d.__mro__ if "_load_from_state_dict" in vars(kind))


def saved_tensors_hooks_around() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """Return the functions of the innermost ``torch.autograd.graph.saved_tensors_hooks`` that is active."""
    found: tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None
    found = _innermost_hooks(False)
    return found


def set_math_bits(tensor: torch.Tensor, bits: Sequence[str]) -> torch.Tensor:
    """Return the tensor with its conjugate or negative bit set, without computing values if torch can."""
    changed = _OBJECTS["set_tensor_metadata"](tensor, dict.fromkeys(bits, True)) if bits else None
    return tensor if changed is None else changed
