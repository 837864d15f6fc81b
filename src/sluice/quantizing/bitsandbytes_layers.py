"""Quantize the weights of the layers of bitsandbytes.

These layers, such as ``Linear4bit``, hold ordinary weights until they move to a device, which quantizes them. The meta
device, which shows the finished size, is not such a device, so that the method that the move calls is called here.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

__all__ = ["quantize_layers", "quantized_form"]


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
