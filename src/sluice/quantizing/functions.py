"""The ``quantize`` argument of loads as a function that quantizes the modules below a root in place.

It is tried without a change of the model on twins of modules: equal in everything but their tensors.

The layers of bitsandbytes, such as ``Linear4bit``, hold ordinary weights until they move to a device, which quantizes
them. The meta device, which shows the finished size, is not such a device, so that the method that the move calls is
called here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from msgspec import Struct
from torch import nn

from sluice._messages import type_of
from sluice._private_torch import make_subclass

__all__ = ["Quantize", "SingleWeight", "quantize_function", "quantize_layers", "quantized_form", "twin_of"]

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


def twin_of(module: nn.Module, dtypes: Mapping[int, torch.dtype]) -> nn.Module:
    """Return a twin of a module and its parts, with parameters on the meta device.

    Args:
        module: The module, which stays unchanged.
        dtypes: Dtype of each parameter that changes its dtype, by its identity.
    """
    return _twin(module, dtypes, {}, {})


def _twin(
    module: nn.Module, dtypes: Mapping[int, torch.dtype], made: dict[int, nn.Parameter], seen: dict[int, nn.Module]
) -> nn.Module:
    if id(module) in seen:
        return seen[id(module)]
    twin = seen[id(module)] = module.__class__.__new__(module.__class__)
    held: Any = vars(twin)
    held.update(vars(module))
    for kind in ("_parameters", "_buffers", "_modules"):  # changes of these do not reach the module
        held[kind] = dict(held[kind])
    for name, parameter in module._parameters.items():  # noqa: SLF001  names and None too
        if parameter is None:
            continue
        if id(parameter) not in made:
            dtype = dtypes.get(id(parameter), parameter.dtype)
            data = torch.empty_like(parameter, dtype=dtype, device="meta")
            made[id(parameter)] = _like_parameter(parameter, data, {id(module): twin})
        held["_parameters"][name] = made[id(parameter)]
    for name, part in module._modules.items():  # noqa: SLF001  as above
        if part is not None:
            held["_modules"][name] = _twin(part, dtypes, made, seen)
    return twin


def _like_parameter(
    parameter: nn.Parameter, data: torch.Tensor, instead: Mapping[int, object], *, requires_grad: bool | None = None
) -> nn.Parameter:
    """Return a parameter of the same class and attributes with other data.

    Args:
        parameter: The parameter.
        data: Its data.
        instead: Replaces objects among the attributes, such as the module of the parameter, by their identity.
        requires_grad: Whether it requires gradients; None is as the parameter.
    """
    requires_grad = parameter.requires_grad if requires_grad is None else requires_grad
    if nn.Parameter in type(parameter).__mro__:
        made: Any = make_subclass(type(parameter), data, requires_grad)
    else:  # a tensor subclass that nn.Parameter marked
        made = nn.Parameter(data, requires_grad)
    made.__dict__.update({name: instead.get(id(value), value) for name, value in vars(parameter).items()})
    return made  # type: ignore[no-any-return]


def _alone(module: nn.Module, path: str) -> nn.Module:
    """Return a root that holds nothing but a module at its path; the module itself if the path is empty."""
    for name in reversed(path.split(".") if path else []):
        root = nn.Module()
        root.add_module(name, module)
        module = root
    return module


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
        twin = twin_of(self.module, {})
        held: Any = vars(twin)
        held["_parameters"][self.name] = _like_parameter(twin.get_parameter(self.name), values, {}, requires_grad=False)
        self.quantize(_alone(twin, self.path))
        quantized = twin.get_parameter(self.name)
        held.clear()  # a cycle, such as a method that was set, would keep the values until a garbage collection
        return quantized
