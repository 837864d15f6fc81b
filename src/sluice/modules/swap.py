"""Replace the memory of a tensor object, which stays the same object.

``tensor.data = other`` is impossible between the meta device and real memory. ``torch.utils.swap_tensors`` is possible,
and every holder of the object (ties, optimizers, plain attributes) sees the new memory. By itself it moves class and
attributes to the other tensor, and gradient hooks are not called afterwards because they are registered with the memory
and not with the object. So the other tensor gets all of these first.
"""

from __future__ import annotations

import torch
from torch.nn.parameter import is_lazy

from sluice._private_torch import make_subclass
from sluice.dtensors.description import is_dtensor, local_of, with_local

__all__ = ["is_plain", "swap_data", "with_data"]


def swap_data(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    """Make ``tensor`` hold the memory of ``data``.

    Class, attributes, ``requires_grad`` and hooks of ``tensor`` stay; its gradient does not.

    Returns:
        False, with nothing changed, if torch refuses because a weak reference to the tensor, a view of it or a graph
        through it exists.
    """
    other = with_data(tensor, data)
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
    other.__dict__.update(tensor.__dict__)
    other._backward_hooks = tensor._backward_hooks  # noqa: SLF001  hooks of a tensor have no public reader
    other._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks  # noqa: SLF001  as above
    return other


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is strided memory of torch's own.

    False for fake and functional tensors, lazy parameters, sparse and quantized tensors, and subclasses with their own
    memory or operators, such as DTensor. Other subclasses of ``nn.Parameter`` are plain.
    """
    kind = type(tensor)
    known = kind is torch.Tensor or torch.nn.Parameter in kind.__mro__
    if not known or kind.__torch_dispatch__ != torch.Tensor.__torch_dispatch__ or is_lazy(tensor):
        return False
    if torch._is_functional_tensor(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # noqa: SLF001  the only way to tell
        return False
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
