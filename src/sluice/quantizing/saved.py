"""Quantized weights in safetensors files, in the layout of ``torchao.prototype.safetensors``.

A weight ``layer.weight`` that consists of ``qdata`` and ``scale`` is stored as ``layer._weight_qdata`` and
``layer._weight_scale``. The metadata has its class and attributes as JSON, and the names of all tensors.

A load builds no object that the file names: the model has the classes, because it was quantized on the meta device, and
the file fills the plain tensors of its weights. The metadata must describe these weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from msgspec import Struct
from torch import nn

from sluice._errors import MismatchError, SaveError
from sluice._messages import SHOWN, section
from sluice.quantizing.inner_tensors import assemble, inner_tensors, is_assembled
from sluice.quantizing.wrapped import is_described_by
from sluice.records import UnsupportedValue

__all__ = ["OpenedWeight", "check_described", "flattened", "opened_weights"]

#: Key of the metadata that lists the names of all tensors.
_NAMES = "tensor_names"


class OpenedWeight(Struct, frozen=True, kw_only=True, eq=False):
    """A quantized weight, and the parameters for its plain tensors."""

    #: The weight on the meta device.
    weight: nn.Parameter
    #: The modules that hold it, and its name in each.
    owners: tuple[tuple[nn.Module, str], ...]
    #: The parameters, in the order of the plain tensors.
    parts: tuple[nn.Parameter, ...]


class _Opened(Struct, frozen=True, eq=False):
    """A module whose quantized weights are replaced by their plain tensors."""

    #: The module.
    part: nn.Module
    #: Its parameters before, in order.
    parameters: dict[str, nn.Parameter | None]
    #: Names of the plain tensors of each quantized weight, by its name.
    inner: dict[str, list[str]]


@contextmanager
def opened_weights(model: nn.Module, *, finish: bool = True) -> Iterator[tuple[OpenedWeight, ...]]:
    """Replace quantized weights on the meta device by parameters for their plain tensors, during the block.

    Args:
        model: The model.
        finish: Whether the weights consist of what these parameters have become, at the end of the block. Otherwise,
            and after a failure, they stay unchanged; so do those of which a parameter is still on the meta device.

    Yields:
        The quantized weights.
    """
    opened = list(_open(model))
    try:
        yield _weights(opened)
    except BaseException:
        for each in opened:
            _set_parameters(each.part, each.parameters)
        raise
    for each in opened:
        _set_parameters(each.part, _closed(each) if finish else each.parameters)


def _open(model: nn.Module) -> Iterator[_Opened]:
    made: dict[int, nn.Parameter] = {}  # tied weights share their plain tensors
    for part in model.modules():
        before: dict[str, nn.Parameter | None] = dict(part._parameters)  # noqa: SLF001  names and None too
        inner = {name: _inner_names(name, weight) for name, weight in before.items() if _can_open(weight)}
        if not inner:
            continue
        after = {name: parameter for name, parameter in before.items() if name not in inner}
        for name, names in inner.items():
            for inner_name, tensor in zip(names, inner_tensors(_held(before[name])), strict=True):
                after[inner_name] = made.setdefault(id(tensor), nn.Parameter(tensor, requires_grad=False))
        _set_parameters(part, after)
        yield _Opened(part, before, inner)


def _weights(opened: Sequence[_Opened]) -> tuple[OpenedWeight, ...]:
    """Return the quantized weights of modules, each once."""
    found: dict[int, OpenedWeight] = {}
    for each in opened:
        for name, names in each.inner.items():
            weight = _held(each.parameters[name])
            known = found.get(id(weight))
            found[id(weight)] = OpenedWeight(
                weight=weight,
                owners=(*(known.owners if known else ()), (each.part, name)),
                parts=tuple(_held(each.part._parameters[inner]) for inner in names),  # noqa: SLF001  as above
            )
    return tuple(found.values())


def _can_open(weight: nn.Parameter | None) -> bool:
    """Return whether a weight consists of plain tensors, all on the meta device."""
    if weight is None or not is_assembled(weight):
        return False
    parts = [getattr(weight, name) for name in _names(weight)]
    return all(type(part) is torch.Tensor and part.is_meta for part in parts)


def _inner_names(name: str, weight: Any) -> list[str]:
    return [f"_{name}_{inner}" for inner in _names(weight)]


def _names(weight: Any) -> list[str]:
    names, _ = weight.__tensor_flatten__()
    return list(names)


def _held(parameter: nn.Parameter | None) -> nn.Parameter:
    assert parameter is not None
    return parameter


def _closed(opened: _Opened) -> dict[str, nn.Parameter | None]:
    now = opened.part._parameters  # noqa: SLF001  names and None too
    parameters: dict[str, nn.Parameter | None] = {}
    for name, before in opened.parameters.items():
        if name not in opened.inner:
            parameters[name] = now[name]
            continue
        template, parts = _held(before), [_held(now[inner]).detach() for inner in opened.inner[name]]
        if any(part.is_meta for part in parts):
            parameters[name] = template
        else:
            parameters[name] = nn.Parameter(assemble(template, parts), requires_grad=template.requires_grad)
    return parameters


def _set_parameters(part: nn.Module, parameters: Mapping[str, nn.Parameter | None]) -> None:
    held: dict[str, nn.Parameter | None] = part._parameters  # noqa: SLF001  as above
    held.clear()
    held.update(parameters)


def check_described(
    model: nn.Module, metadata: Mapping[str, str], wrapped: Mapping[str, Sequence[UnsupportedValue]], file: str
) -> None:
    """Refuse a checkpoint that describes other quantized weights than the model has.

    Args:
        model: The model, before ``opened_weights``.
        metadata: Metadata of the checkpoint; weights that it does not describe are not compared.
        wrapped: Weights that a pickle describes, by their names.
        file: The checkpoint, for messages.

    Raises:
        MismatchError: It names every such weight.
    """
    wrong = []
    for name, weight in model.named_parameters():
        if name in metadata and _can_open(weight):
            ours, theirs = _description(weight), _parsed(metadata[name])
            if theirs is None or (theirs.get("_type"), theirs.get("_data")) != (ours["_type"], ours["_data"]):
                wrong.append(f"{name!r} is {_shown(ours)} in the module, {_shown(theirs)} in the checkpoint")
        elif name in wrapped and _can_open(weight) and not any(is_described_by(weight.data, o) for o in wrapped[name]):
            ours_is, kind = type(weight.data).__name__, wrapped[name][0].qualified_name
            wrong.append(f"{name!r} is {ours_is} in the module, a different {kind} in the checkpoint")
    if wrong:
        text = section("quantized in a different way", wrong[:SHOWN], wrong)
        error = MismatchError(f"the checkpoint does not fit the module\n{text}\nNothing was read", file=file)
        error.advice = "Quantize the model on the meta device with the configuration that the checkpoint was made with."
        raise error


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _shown(description: Mapping[str, Any] | None) -> str:
    if description is None:
        return "of an unknown kind"
    return f"{description.get('_type')} {json.dumps(description.get('_data'))[:200]}"


def _description(weight: torch.Tensor) -> dict[str, Any]:
    """Return the class and attributes of a weight as torchao writes them."""
    from torchao.prototype.safetensors.safetensors_utils import TensorSubclassAttributeJSONEncoder

    found: dict[str, Any] = json.loads(json.dumps(weight.data, cls=TensorSubclassAttributeJSONEncoder))
    return found


def flattened(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]] | None:
    """Return the plain tensors of a state dict and their metadata; None if no weight is quantized by torchao.

    Raises:
        SaveError: A quantized weight has no module, whose name the layout needs.
    """
    if not any(_is_torchao(value) for value in state.values()):
        return None
    tensors: dict[str, Any] = {}
    metadata: dict[str, str] = {}
    for name, value in state.items():
        if not _is_torchao(value):
            tensors[name] = value
            metadata[name] = json.dumps({"_type": "Tensor"})
            continue
        module, dot, weight = name.rpartition(".")
        if not dot:
            raise SaveError("the layout of torchao needs the name of a module before that of the weight", tensor=name)
        description = _description(value)
        for inner in description["_tensor_data_names"]:
            tensors[f"{module}._{weight}_{inner}"] = getattr(value, inner)
        metadata[name] = json.dumps(description)
    return tensors, {**metadata, _NAMES: json.dumps(list(state))}


def _is_torchao(value: object) -> bool:
    """Return whether a value is a weight of a class that torchao can read from safetensors."""
    if not isinstance(value, torch.Tensor) or type(value).__module__.partition(".")[0] != "torchao":
        return False
    from torchao.prototype.safetensors.safetensors_utils import ALLOWED_TENSORS_SUBCLASSES

    return type(value).__name__ in ALLOWED_TENSORS_SUBCLASSES
