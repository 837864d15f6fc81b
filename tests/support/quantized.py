"""A small quantization for tests: a tensor subclass of two plain tensors, and functions that quantize modules by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

import sluice
from sluice.records import Entry

#: Configurations of torchao, made from its module.
CONFIGS: dict[str, Any] = {
    "int8": lambda torchao: torchao.Int8WeightOnlyConfig(),
    "int8-dynamic": lambda torchao: torchao.Int8DynamicActivationInt8WeightConfig(),
    "float8": lambda torchao: torchao.Float8WeightOnlyConfig(),
    "int4-groups": lambda torchao: torchao.IntxWeightOnlyConfig(
        weight_dtype=vars(torch)["int4"], granularity=torchao.PerGroup(32)
    ),
}


class Scaled(torch.Tensor):
    """Integers and a scale for each row, or one for all rows."""

    integers: torch.Tensor
    scale: torch.Tensor

    def __new__(cls: type[Self], integers: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Self:
        """Return the wrapper, which has no memory of its own."""
        del scale
        make: Any = torch.Tensor._make_wrapper_subclass
        made: Self = make(cls, integers.shape, dtype=dtype, device=integers.device, requires_grad=False)
        return made

    def __init__(self, integers: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        self.integers, self.scale = integers, scale
        del dtype

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["integers", "scale"], self.dtype

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: torch.dtype, _size: object, _stride: object
    ) -> Scaled:
        return cls(inner["integers"], inner["scale"], context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in {torch.ops.aten.detach.default, torch.ops.aten.alias.default}:
            return cls(args[0].integers, args[0].scale, args[0].dtype)
        values = [value.values() if isinstance(value, cls) else value for value in args]
        return func(*values, **(kwargs or {}))

    def values(self) -> torch.Tensor:
        """Return the numbers that it stands for."""
        return self.integers.to(self.dtype) * self.scale


def parts_in(checkpoint: sluice.Checkpoint, *path: str) -> dict[str, torch.Tensor]:
    """Return the plain tensors that a tensor in a checkpoint wraps, read."""
    leaf: Any = checkpoint.index.tree
    for key in path:
        leaf = leaf[key]
    entries = {name: part for name, part in leaf.inner.items() if isinstance(part, Entry)}
    return {name: sluice.LazyTensor(checkpoint, "", entry).read() for name, entry in entries.items()}


def scale_modules(*, by_row: bool = True, names: Callable[[str], bool] = bool) -> Callable[[nn.Module], None]:
    """Return a function that quantizes the linear layers of a model.

    Args:
        by_row: Whether each row has its own scale.
        names: Chooses layers by their paths.
    """

    def quantize(root: nn.Module) -> None:
        for path, part in root.named_modules():
            if isinstance(part, nn.Linear) and names(path) and not isinstance(part.weight.data, Scaled):
                weight = part.weight.detach()
                largest = weight.abs().amax(dim=1, keepdim=True) if by_row else weight.abs().amax().reshape(1, 1)
                scale = largest / 127
                integers = (weight / scale).round().to(torch.int8)
                part.weight = nn.Parameter(Scaled(integers, scale, weight.dtype), requires_grad=False)
                vars(part)["extra_repr"] = lambda: "scaled"

    return quantize


def plain_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of a model with the plain tensors of quantized weights, under the names of torchao's layout."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if isinstance(value, Scaled):
            head = name.removesuffix("weight")
            tensors[f"{head}_weight_integers"], tensors[f"{head}_weight_scale"] = value.integers, value.scale
        else:
            tensors[name] = value
    return tensors
