"""Twins of modules: equal in everything but their tensors, so that a function can be tried without changing a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from msgspec import Struct
from torch import nn

from sluice._private_torch import make_subclass
from sluice.quantizing.functions import Quantize

__all__ = ["SingleWeight", "twin_of"]


def twin_of(module: nn.Module, dtypes: Mapping[int, torch.dtype]) -> nn.Module:
    """Return a twin of a module and its parts, with parameters on the meta device.

    Args:
        module: The module, which stays unchanged.
        dtypes: Dtype of each parameter that changes its dtype, by its identity.
    """
    made: dict[int, nn.Parameter] = {}
    return _twin(module, dtypes, made, {})


def _twin(
    module: nn.Module, dtypes: Mapping[int, torch.dtype], made: dict[int, nn.Parameter], seen: dict[int, nn.Module]
) -> nn.Module:
    if id(module) in seen:
        return seen[id(module)]
    twin = _shell_of(module)
    seen[id(module)] = twin
    held: Any = vars(twin)
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


def _shell_of(module: nn.Module) -> nn.Module:
    """Return a module of the same class and attributes; changes of its tensors and parts do not reach the other."""
    shell = module.__class__.__new__(module.__class__)
    held = dict(vars(module))
    for name in ("_parameters", "_buffers", "_modules"):
        held[name] = dict(held[name])
    vars(shell).update(held)
    return shell


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
        twin = _shell_of(self.module)
        held: Any = vars(twin)
        held["_parameters"][self.name] = _like_parameter(
            held["_parameters"][self.name], values, {id(self.module): twin}, requires_grad=False
        )
        self.quantize(_alone(twin, self.path))
        quantized = twin.get_parameter(self.name)
        held.clear()  # a cycle, such as a method that was set, would keep the values until a garbage collection
        return quantized
