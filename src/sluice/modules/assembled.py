"""Models with parameters that consist of other tensors, such as quantized weights."""

from __future__ import annotations

from torch import nn

from sluice.sharding.dtensors import is_dtensor

__all__ = ["is_assembled_model"]


def is_assembled_model(module: nn.Module) -> bool:
    """Return whether a module without DTensors has parameters that consist of other tensors."""
    others = [parameter for parameter in module.parameters() if type(parameter) is not nn.Parameter]
    return any(hasattr(other, "__tensor_flatten__") for other in others) and not any(map(is_dtensor, others))
