"""One weight of a module, quantized apart from everything else."""

from __future__ import annotations

from typing import Any

import torch
from msgspec import Struct
from torch import nn

from sluice.quantizing.functions import Quantize
from sluice.quantizing.twins import alone, like_parameter, shell_of

__all__ = ["SingleWeight"]


class SingleWeight(Struct, frozen=True, kw_only=True, eq=False):
    """A weight, and the function that quantizes it."""

    #: Path of its module.
    path: str
    #: Its module.
    module: nn.Module
    #: Name of the parameter in the module.
    name: str
    #: The function.
    quantize: Quantize

    @property
    def full_name(self) -> str:
        """Name of the parameter in the model."""
        return f"{self.path}.{self.name}" if self.path else self.name

    def quantized(self, values: torch.Tensor) -> torch.Tensor:
        """Return the quantized form of all or some rows; the module is unchanged."""
        twin = shell_of(self.module)
        held: Any = vars(twin)
        held["_parameters"][self.name] = like_parameter(
            held["_parameters"][self.name], values, {id(self.module): twin}, requires_grad=False
        )
        self.quantize(alone(twin, self.path))
        quantized = twin.get_parameter(self.name)
        held.clear()  # a cycle, such as a method that was set, would keep the values until a garbage collection
        return quantized
