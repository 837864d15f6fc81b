"""Giving a tensor object other memory while it stays the same object.

``tensor.data = other`` cannot cross the border between the meta device and real memory. ``torch.utils.swap_tensors``
can, and every holder of the object (ties, optimizers, plain attributes) sees the new memory. On its own it hands the
class and the attributes to the other tensor and leaves gradient hooks silent, because they are registered with the
memory and not with the object; here the other tensor gets all of them first.
"""

from __future__ import annotations

import torch
from torch.nn.parameter import is_lazy

__all__ = ["is_plain", "swap_data", "with_data"]


def swap_data(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    """Make ``tensor`` hold the memory of ``data``.

    Class, attributes, ``requires_grad`` and hooks of ``tensor`` stay; its gradient does not.

    Returns:
        False, with nothing changed, where torch refuses: someone holds a weak reference to the tensor, a view of it,
        or a graph that runs through it.
    """
    other = with_data(tensor, data)
    try:
        torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return True


def with_data(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Return a new object that holds ``data`` and has class, attributes, ``requires_grad`` and hooks of ``tensor``."""
    other = torch.Tensor._make_subclass(type(tensor), data, tensor.requires_grad)  # noqa: SLF001  as nn.Parameter does
    other.__dict__.update(tensor.__dict__)
    other._backward_hooks = tensor._backward_hooks  # noqa: SLF001  hooks of a tensor have no public reader
    other._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks  # noqa: SLF001  as above
    return other


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is strided memory of torch's own.

    False for fake and functional tensors, lazy parameters, sparse and quantized tensors, and subclasses that bring
    their own memory or operators (DTensor among them); subclasses of ``nn.Parameter`` that do not are plain.
    """
    kind = type(tensor)
    ours = kind is torch.Tensor or torch.nn.Parameter in kind.__mro__
    if not ours or kind.__torch_dispatch__ != torch.Tensor.__torch_dispatch__ or is_lazy(tensor):
        return False
    if torch._is_functional_tensor(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # noqa: SLF001  the only way to tell
        return False
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
