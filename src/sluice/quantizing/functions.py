"""The ``quantize`` argument of loads as a function that quantizes the modules below a root in place.

The layers of bitsandbytes, such as ``Linear4bit``, hold ordinary weights until they move to a device, which quantizes
them. The meta device, which shows the finished size, is not such a device, so that the method that the move calls is
called here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sluice._messages import type_of

__all__ = ["Quantize", "quantize_function", "quantize_layers", "quantized_form"]

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
        return quantize_layers
    raise TypeError(
        f"quantize= is {type_of(quantize)}; write a configuration of torchao, such as Int8WeightOnlyConfig(), "
        "'bitsandbytes' for a model with its layers, or a function that quantizes the modules of a model in place, "
        "such as functools.partial(quantize_, config=..., filter_fn=...)"
    )


def quantize_layers(root: nn.Module) -> None:
    """Replace the weights of the layers below a root by quantized ones, as a move to their device does.

    Raises:
        ValueError: There are no such weights.
    """
    quantized = 0
    for module in root.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if _waits(parameter):
                module.register_parameter(name, _quantized(parameter, parameter.data))
                quantized += 1
    if not quantized:
        raise ValueError(
            "quantize='bitsandbytes': the model has no layers of bitsandbytes whose weights are not quantized; build "
            "it with them, such as bitsandbytes.nn.Linear4bit, under sluice.empty_init()"
        )


def _waits(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is one of bitsandbytes that is not quantized yet."""
    if not type(parameter).__module__.startswith("bitsandbytes.") or not parameter.is_floating_point():
        return False
    return not getattr(parameter, "bnb_quantized", False) and not getattr(parameter, "has_fp16_weights", False)


def quantized_form(parameter: nn.Parameter) -> Any:
    """Return the quantized weight, without data, that a parameter of a layer becomes; it refers to no layer."""
    return _quantized(parameter, torch.empty(parameter.shape, device="meta"), module=None)


def _quantized(parameter: nn.Parameter, data: torch.Tensor, **others: object) -> nn.Parameter:
    functional: Any = sys.modules.get("bitsandbytes.functional")
    if functional is not None and data.is_meta:  # it keeps tables on the device of the first call
        functional.quantize_blockwise(torch.zeros(1, device="cpu"))
    fresh: Any = type(parameter)(data, requires_grad=False, **{**vars(parameter), **others})
    return fresh._quantize(data.device)  # type: ignore[no-any-return]  # noqa: SLF001  no public name
