"""Skip initialisers on the meta device.

They change no values there, but they are not free: several of torch's meta kernels import its compiler on first use,
which takes a second and about 100 MB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["INITIALISERS", "SET_DATA", "InitialisersSkipMeta"]

#: Functions that change the values of a tensor and nothing else.
INITIALISERS = frozenset(
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
        torch.Tensor.fill_,
        torch.Tensor.geometric_,
        torch.Tensor.log_normal_,
        torch.Tensor.normal_,
        torch.Tensor.random_,
        torch.Tensor.uniform_,
        torch.Tensor.zero_,
    }
)


#: The setter of ``tensor.data``, as torch function modes see it.
SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # a C descriptor


class InitialisersSkipMeta(TorchFunctionMode):
    """A context of one thread in which initialisers skip meta tensors.

    ``tensor.data = values`` is an initialiser as well: a meta tensor takes the shape and dtype of the values.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func``, or return its tensor unchanged."""
        options = kwargs or {}
        if func in INITIALISERS:
            tensor = args[0] if args else options.get("tensor")  # functions of nn.init are called with keywords only
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return tensor
        if func == SET_DATA and args[0].is_meta and not args[1].is_meta:
            args = (args[0], torch.empty_like(args[1], device="meta"))
        return func(*args, **options)
