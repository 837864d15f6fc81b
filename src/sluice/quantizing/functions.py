"""The ``quantize`` argument of loads as a function that quantizes the modules below a root in place."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from sluice._messages import type_of

__all__ = ["Quantize", "quantize_function"]

#: Quantizes the modules of a model in place.
Quantize = Callable[[nn.Module], object]


def quantize_function(quantize: object) -> Quantize:
    """Return the function for a configuration of torchao or ``"bitsandbytes"``, and a function unchanged.

    Raises:
        TypeError: It is none of these.
    """
    if isinstance(quantize, type):
        raise TypeError(f"quantize= is {type_of(quantize)}, not an instance; write quantize={quantize.__name__}()")
    core = sys.modules.get("torchao.core.config")  # a process that has a configuration has imported it
    if core is not None and isinstance(quantize, core.AOBaseConfig):
        torchao: Any = sys.modules["torchao.quantization"]
        filters = {"filter_fn": None} if type(quantize).__name__ in {"FqnToConfig", "ModuleFqnToConfig"} else {}
        return functools.partial(torchao.quantize_, config=quantize, **filters)
    if callable(quantize):
        return quantize
    if quantize == "bitsandbytes":
        # Here, not above: few processes have the library.
        from sluice.quantizing.bitsandbytes_layers import quantize_layers

        return quantize_layers
    raise TypeError(
        f"quantize= is {type_of(quantize)}; write a configuration of torchao, such as Int8WeightOnlyConfig(), "
        "'bitsandbytes' for a model with its layers, or a function that quantizes the modules of a model in place, "
        "such as functools.partial(quantize_, config=..., filter_fn=...)"
    )
