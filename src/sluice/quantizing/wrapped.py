"""Quantized weights in ``torch.save`` files, which pickle them as tensor subclasses that wrap plain tensors.

The plain tensors get the names that they have in safetensors files (``saved``). The objects themselves are not built:
their classes are those of the model, and the attributes in the file are compared with those of the model's weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from msgspec.structs import replace

from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.records import Entry, Opaque, UnsupportedValue

__all__ = ["is_described_by", "with_inner_tensors"]


def with_inner_tensors(checkpoint: OpenCheckpoint) -> tuple[OpenCheckpoint, dict[str, list[UnsupportedValue]]]:
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


def is_described_by(weight: Any, wrapped: UnsupportedValue) -> bool:
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
