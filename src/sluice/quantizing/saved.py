"""Saved quantized weights: in safetensors files in the layout of ``torchao.prototype.safetensors``, and as pickled.

A weight ``layer.weight`` that consists of ``qdata`` and ``scale`` is stored as ``layer._weight_qdata`` and
``layer._weight_scale``. The metadata has its class and attributes as JSON, and the names of all tensors.

A load builds no object that the file names: the model has the classes, because it was quantized on the meta device, and
the file fills the plain tensors of its weights. The metadata must describe these weights.

``torch.save`` pickles the weights as tensor subclasses that wrap plain tensors. These get the names that they have in
safetensors files, and the attributes in the file are compared with those of the model's weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import nn

from sluice._errors import MismatchError, SaveError
from sluice._messages import SHOWN, section
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.quantizing.inner_tensors import assemble, inner_tensors, is_assembled
from sluice.records import Entry, Opaque, UnsupportedValue

__all__ = ["OpenedWeight", "flattened", "opened_model"]

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


@contextmanager
def opened_model(
    model: nn.Module, opening: AbstractContextManager[OpenCheckpoint], *, dtype: str | None, finish: bool = True
) -> Iterator[tuple[AbstractContextManager[OpenCheckpoint], tuple[OpenedWeight, ...]]]:
    """Give a model parameters for the plain tensors of its quantized weights, during the block.

    Args:
        model: The model.
        opening: Opens the checkpoint.
        dtype: The argument of the load.
        finish: Whether the weights consist of the loaded tensors after the block; otherwise the model is unchanged.

    Yields:
        What opens the checkpoint for the load, and the quantized weights.

    Raises:
        MismatchError: The checkpoint describes its quantized weights, and they are not those of the model.
        ValueError: ``dtype`` would cast the scales of quantized weights.
    """
    if dtype not in {None, "auto"}:
        raise ValueError(f"dtype={dtype!r} would cast the scales of quantized weights: leave it out")
    with opening as checkpoint:
        plain, wrapped = _with_inner_tensors(checkpoint)
        _check_described(model, checkpoint.metadata, wrapped, checkpoint.path)
        with _opened_weights(model, finish=finish) as weights:
            yield nullcontext(plain), weights


@contextmanager
def _opened_weights(model: nn.Module, *, finish: bool) -> Iterator[tuple[OpenedWeight, ...]]:
    """Replace quantized weights on the meta device by parameters for their plain tensors, during the block.

    Args:
        model: The model.
        finish: Whether the weights consist of what these parameters have become, at the end of the block. Otherwise,
            and after a failure, they stay unchanged; so do those of which a parameter is still on the meta device.

    Yields:
        The quantized weights.
    """
    held = ((part, dict(part._parameters)) for part in model.modules())  # noqa: SLF001  names and None too
    before = {part: parameters for part, parameters in held if any(map(_can_open, parameters.values()))}
    weights: dict[int, OpenedWeight] = {}  # tied weights share their plain tensors
    for part, parameters in before.items():
        after = dict(parameters)
        for name, weight in parameters.items():
            if weight is not None and _can_open(weight):
                known = weights.get(id(weight)) or _opened(weight)
                weights[id(weight)] = replace(known, owners=(*known.owners, (part, name)))
                del after[name]
                after.update(zip(_inner_names(name, weight), known.parts, strict=True))
        _set_parameters(part, after)
    closed, made = before, dict[int, nn.Parameter]()  # tied weights stay one
    try:
        yield tuple(weights.values())
        if finish:
            closed = {part: _closed(part, parameters, made) for part, parameters in before.items()}
    finally:  # of all parts or, after a failure, of none
        for part, parameters in closed.items():
            _set_parameters(part, parameters)


def _opened(weight: nn.Parameter) -> OpenedWeight:
    parts = tuple(nn.Parameter(tensor, requires_grad=False) for tensor in inner_tensors(weight))
    return OpenedWeight(weight=weight, owners=(), parts=parts)


def _can_open(weight: nn.Parameter | None) -> bool:
    """Return whether a weight consists of plain tensors, all on the meta device."""
    if weight is None or not is_assembled(weight):
        return False
    parts = [getattr(weight, name) for name in _names(weight)]
    return all(type(part) is torch.Tensor and part.is_meta for part in parts)


def _inner_names(name: str, weight: Any) -> list[str]:
    return [f"_{name}_{inner}" for inner in _names(weight)]


def _names(weight: Any) -> list[str]:
    return list(weight.__tensor_flatten__()[0])


def _closed(
    part: nn.Module, before: Mapping[str, nn.Parameter | None], made: dict[int, nn.Parameter]
) -> dict[str, nn.Parameter | None]:
    """Return the parameters of a module, whose quantized weights consist of what their plain tensors have become."""
    now = part._parameters  # noqa: SLF001  names and None too
    parameters: dict[str, nn.Parameter | None] = {}
    for name, weight in before.items():
        if weight is None or not _can_open(weight):
            parameters[name] = now[name]
            continue
        parts = [part.get_parameter(inner).detach() for inner in _inner_names(name, weight)]
        if not any(inner.is_meta for inner in parts):
            made.setdefault(id(weight), nn.Parameter(assemble(weight, parts), requires_grad=weight.requires_grad))
        parameters[name] = made.get(id(weight), weight)
    return parameters


def _set_parameters(part: nn.Module, parameters: Mapping[str, nn.Parameter | None]) -> None:
    held: dict[str, nn.Parameter | None] = part._parameters  # noqa: SLF001  as above
    held.clear()
    held.update(parameters)


def _check_described(
    model: nn.Module, metadata: Mapping[str, str], wrapped: Mapping[str, Sequence[UnsupportedValue]], file: str
) -> None:
    """Refuse a checkpoint that describes other quantized weights than the model has.

    Args:
        model: The model, before ``_opened_weights``.
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
        elif name in wrapped and _can_open(weight) and not any(_is_described_by(weight.data, o) for o in wrapped[name]):
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
        module, dot, weight = str(name).rpartition(".")
        if not dot:
            raise SaveError("the layout of torchao needs the name of a module before that of the weight", tensor=name)
        description = _description(value)
        inner = {f"{module}._{weight}_{part}": getattr(value, part) for part in description["_tensor_data_names"]}
        if taken := next((each for each in inner if each in state or each in tensors), None):
            raise SaveError("quantized data would have the name of a different tensor", tensor=taken)
        tensors |= inner
        metadata[name] = json.dumps(description)
    return tensors, {**metadata, _NAMES: json.dumps(list(state))}


def _is_torchao(value: object) -> bool:
    """Return whether a value is a weight of a class that torchao can read from safetensors."""
    if not isinstance(value, torch.Tensor) or type(value).__module__.partition(".")[0] != "torchao":
        return False
    from torchao.prototype.safetensors.safetensors_utils import ALLOWED_TENSORS_SUBCLASSES

    return type(value).__name__ in ALLOWED_TENSORS_SUBCLASSES


def _with_inner_tensors(checkpoint: OpenCheckpoint) -> tuple[OpenCheckpoint, dict[str, list[UnsupportedValue]]]:
    """Return a view of a checkpoint that has the plain tensors of wrapped ones, and the wrapped ones by their names."""
    found: dict[str, list[UnsupportedValue]] = {}
    tree = _expanded(checkpoint.index.tree, found, {})
    if not found:
        return checkpoint, {}
    view = OpenCheckpoint.open(checkpoint)
    view.index = replace(view.index, tree=tree)
    return view, found


def _expanded(tree: Any, found: dict[str, list[UnsupportedValue]], known: dict[int, object]) -> object:
    """Return a tree with further names in its dicts; one that occurs several times is expanded once."""
    if not isinstance(tree, dict):
        return tree
    if id(tree) in known:
        return known[id(tree)]
    result: dict[object, object] = type(tree)()
    known[id(tree)] = result
    vars_of = getattr(tree, "__dict__", None)  # an OrderedDict has its versions there
    if vars_of:
        vars(result).update(vars_of)
    for name, value in tree.items():
        if isinstance(value, UnsupportedValue) and value.inner is not None and isinstance(name, str):
            module, dot, weight = name.rpartition(".")
            inner = {key: part for key, part in value.inner.items() if isinstance(part, Entry)}
            result.update((f"{module}{dot}_{weight}_{key}", part) for key, part in inner.items())
            found.setdefault(name, []).append(value)
        else:
            result[name] = _expanded(value, found, known)
    return result


def _is_described_by(weight: Any, wrapped: UnsupportedValue) -> bool:
    """Return whether a weight of a model has the class and the attributes of a wrapped tensor in a file.

    Numbers, texts, lists and dtypes are compared, and of other objects the names of their classes.
    """
    if wrapped.qualified_name.rpartition(".")[2] != type(weight).__name__:
        return False
    _, context = weight.__tensor_flatten__()
    theirs = wrapped.inner or {}
    attributes = context if isinstance(context, Mapping) else {}
    return all(_equal(value, theirs[name]) for name, value in attributes.items() if name in theirs)


def _equal(ours: object, theirs: object) -> bool:
    if isinstance(ours, (list, tuple)):
        return isinstance(theirs, (list, tuple)) and list(ours) == list(theirs)
    if isinstance(ours, torch.dtype):
        return theirs == str(ours)
    if type(ours) in {bool, int, float, str, type(None)}:
        return type(ours) is type(theirs) and ours == theirs
    return isinstance(theirs, Opaque) and theirs.qualified_name.rpartition(".")[2] == type(ours).__name__
