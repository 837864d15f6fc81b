"""Replace the memory of a tensor object, which stays the same object.

``tensor.data = other`` is impossible between the meta device and real memory. ``torch.utils.swap_tensors`` is possible,
and every holder of the object (ties, optimizers, plain attributes) sees the new memory. By itself it moves class and
attributes to the other tensor, and gradient hooks are not called afterwards because they are registered with the memory
and not with the object. So the other tensor gets all of these first.
"""

from __future__ import annotations

from weakref import getweakrefcount

import torch

from sluice._private_torch import make_subclass, swap_contents, use_count
from sluice.sharding.dtensors import is_dtensor, local_of, with_local

__all__ = ["swap_data", "with_data", "writes"]

#: Operators that change their first argument. The names of other functions of torch that do end in ``_``.
_OPERATORS = ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_WRITING = frozenset({"__set__", "__setitem__", "__delitem__", *(f"__i{operator}__" for operator in _OPERATORS)})


def writes(name: str) -> bool:
    """Return whether a function of torch with this name changes its first argument, perhaps not its values."""
    return name in _WRITING or (name.endswith("_") and not name.endswith("__"))


def swap_data(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    """Make ``tensor`` hold the memory of ``data``.

    Class, attributes, ``requires_grad`` and hooks of ``tensor`` stay; its gradient does not.

    Returns:
        False, with nothing changed, if torch refuses because a weak reference to the tensor, a view of it or a graph
        through it exists.
    """
    other = with_data(tensor, data)
    if not is_dtensor(tensor) and _unshared(tensor) and _unshared(other):
        swap_contents(tensor, other)  # class and attributes are equal, and need no swap
        return True
    try:
        torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return True


def with_data(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Return a new object with the memory of ``data`` and everything else of ``tensor``: class, attributes, hooks.

    For a DTensor, ``data`` is its new local tensor.
    """
    if is_dtensor(tensor):
        other = with_local(tensor, data.view(local_of(tensor).shape)).requires_grad_(tensor.requires_grad)
    else:
        other = make_subclass(type(tensor), data, tensor.requires_grad)
    if tensor.__dict__:
        other.__dict__.update(tensor.__dict__)
    hooks, grad_hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks  # noqa: SLF001  no public reader
    if hooks is not None:
        other._backward_hooks = hooks  # noqa: SLF001  as above
    if grad_hooks is not None:
        other._post_accumulate_grad_hooks = grad_hooks  # noqa: SLF001  as above
    return other


def _unshared(tensor: torch.Tensor) -> bool:
    """Return whether only its object refers to a tensor: no weak reference, no view and no graph, as a swap needs."""
    return not getweakrefcount(tensor) and use_count(tensor) == 1
