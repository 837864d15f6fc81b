"""Initialisers that cost nothing on the meta device.

There they change nothing, but they are not free: several of torch's meta kernels import its compiler on first use,
which takes a second and about 100 MB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["InitialisersSkipMeta"]

#: What initialisers do to a tensor: its values change and nothing else.
_INITIALISERS = frozenset(
    {
        nn.init.constant_,
        nn.init.kaiming_uniform_,
        nn.init.normal_,
        nn.init.uniform_,
        torch.Tensor.bernoulli_,
        torch.Tensor.cauchy_,
        torch.Tensor.clamp_,
        torch.Tensor.erfinv_,
        torch.Tensor.exponential_,
        torch.Tensor.geometric_,
        torch.Tensor.log_normal_,
        torch.Tensor.normal_,
        torch.Tensor.random_,
        torch.Tensor.uniform_,
    }
)


#: The setter behind ``tensor.data = other``, as torch function modes see it.
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # a C descriptor


class InitialisersSkipMeta(TorchFunctionMode):
    """A context in which initialisers leave meta tensors alone; it is this thread's own.

    ``tensor.data = values`` is an initialiser as well: a meta tensor takes the shape and the dtype of the values.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func``, or return its tensor as it is."""
        options = kwargs or {}
        if func in _INITIALISERS:
            tensor = args[0] if args else options.get("tensor")  # functions of nn.init come with keywords only
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return tensor
        if func == _SET_DATA and args[0].is_meta and not args[1].is_meta:
            args = (args[0], torch.empty_like(args[1], device="meta"))
        return func(*args, **options)
