"""Match the weights of a checkpoint to a model: the library's key conversions, ties and exceptions."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from msgspec import Struct, field
from torch import nn

from sluice._dtypes import dtype_name
from sluice._errors import UnsupportedError
from sluice._messages import Findings, Shape
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.loading.module_fill import same_values
from sluice.modules.symbolic_tensors import SymbolicTensor
from sluice.records import Entry, Request

__all__ = ["MatchedWeights", "apply_dtype_plan", "check", "make_real", "missing_if_mismatched", "tensor_of", "tie"]

# ruff: noqa: SLF001  the functions of the library's loader are private; the supported versions are pinned


class MatchedWeights(Struct, kw_only=True):
    """The weights of a checkpoint under the names of the model."""

    #: Entry that fills each parameter and persistent buffer.
    entries: dict[str, Entry]
    #: Converted names of the checkpoint that the model does not have.
    unexpected: list[str]
    #: Names of the model that no entry fills.
    missing: set[str]
    #: Names of a different shape, which count as missing: the shape in the model, and in the checkpoint.
    mismatched: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)
    #: Conversions of the library that were used; ``save_pretrained`` reverts them.
    used: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, library: Any, model: Any, entries: Mapping[str, Entry], path: str) -> MatchedWeights:
        """Run the library's conversions on the names of a checkpoint."""
        own = model.state_dict()
        transforms = library.get_model_conversion_mapping(model)
        renamings = [each for each in transforms if isinstance(each, library.WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, library.WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        plain: dict[str, Entry] = {}
        converted: dict[str, Any] = {}
        unexpected: list[str] = []
        for name in sorted(entries, key=library.dot_natural_key):
            new, pattern = library.rename_source_key(name, renamings, converters, model.base_model_prefix, own)
            if new not in own and name in own:
                new, pattern = library.rename_source_key(name, [], [], model.base_model_prefix, own)
            if new not in own:
                targets = by_pattern[pattern].target_patterns if pattern is not None else [new]
                unexpected.extend(new.replace(targets[0], target) for target in targets)
            elif pattern is None or new in plain:
                if new not in converted:
                    plain.setdefault(new, entries[name])
            else:
                converter = converted.setdefault(new, copy.deepcopy(by_pattern[pattern]))
                converter.add_tensor(new, name, pattern, SymbolicTensor(entries[name]))
        for name, converter in converted.items():
            plain.update(_convert(converter, name, model, path))
        unexpected.extend(name for name in plain if name not in own)
        known = {name: entry for name, entry in plain.items() if name in own}
        return cls(
            entries=known,
            unexpected=list(dict.fromkeys(unexpected)),
            missing=set(own) - set(known),
            used=[transform for transform in transforms if transform.was_used()],
        )


def missing_if_mismatched(model: Any, names: MatchedWeights) -> None:
    """Let weights of a different shape count as missing: the library initializes them."""
    for name, entry in list(names.entries.items()):
        own = tuple(tensor_of(model, name).shape)
        if own != entry.shape:
            names.mismatched[name] = (own, entry.shape)
            names.missing.add(name)
            del names.entries[name]


def _convert(converter: Any, name: str, model: Any, path: str) -> dict[str, Entry]:
    """Run one conversion on the entries that it collected and return the resulting entries by name."""
    try:
        converted = converter.convert(name, model=model, config=model.config)
        tensors = {new: value[0] if isinstance(value, list) else value for new, value in converted.items()}
        return {new: tensor.entry for new, tensor in tensors.items()}
    except Exception as error:  # the library's code may raise anything
        steps = ", ".join(type(step).__name__ for step in converter.operations)
        problem = f"{type(model).__name__} needs a weight conversion ({steps}) that sluice does not support: {error}"
        raise UnsupportedError(problem, file=path, tensor=name) from error


def apply_dtype_plan(model: Any, dtype: torch.dtype, names: Mapping[str, Entry]) -> None:
    """Set the dtype of tensors that the library keeps in float32."""
    for glob, kept in model._get_dtype_plan(dtype).items():
        pattern = re.compile(glob.replace("*", ".*"))  # as the library compiles it
        for name in names:
            if pattern.search(name):
                _put(model, name, torch.empty_like(tensor_of(model, name), dtype=kept))


def tie(model: Any, names: MatchedWeights, checkpoint: OpenCheckpoint) -> list[str]:
    """Tie the weights that the library ties; two tensors of the checkpoint are tied only if they are equal.

    Returns:
        A sentence for each pair that was not tied.
    """
    model.tie_weights(missing_keys=names.missing, recompute_mapping=False)
    notes = []
    of_tensor = {id(tensor_of(model, name)): name for name in reversed(names.entries)}
    for target, source in list(model.all_tied_weights_keys.items()):
        own, other = tensor_of(model, target), tensor_of(model, source)
        first = of_tensor.get(id(other))
        if own is other or target not in names.entries or first is None:
            continue
        dtype = dtype_name(other.dtype)
        requests = [
            Request(name=name, entry=names.entries[name], dtype=dtype, device="cpu") for name in (first, target)
        ]
        if own.shape == other.shape and same_values(checkpoint, *requests, limit_bytes=_COMPARED_BYTES):
            _put(model, target, other)
            del names.entries[target]
        else:
            model.all_tied_weights_keys.pop(target)
            notes.append(f"{target!r} and {source!r} differ in the checkpoint and were not tied")
    return notes


#: Bytes of two tied tensors that are compared at once.
_COMPARED_BYTES = 16 << 20


def check(model: Any, names: MatchedWeights, *, strict: bool, allow_empty: bool) -> None:
    """Update missing and unexpected names by the library's exceptions, and check them.

    Raises:
        MismatchError: ``strict``, and there are any; or not ``allow_empty``, and every weight of the model is missing.
    """
    info = SimpleNamespace(missing_keys=names.missing - names.mismatched.keys(), unexpected_keys=set(names.unexpected))
    model._adjust_missing_and_unexpected_keys(info)
    names.unexpected = [name for name in names.unexpected if name in info.unexpected_keys]
    empty = bool(info.missing_keys) and not names.entries and not allow_empty
    if strict or empty:
        Findings(
            missing={(name,): tuple(tensor_of(model, name).shape) for name in sorted(info.missing_keys)},
            report_names=strict,
            none_of=len(names.missing) if empty else 0,
            others=[f"{name!r} is unexpected: {type(model).__name__} has no such tensor" for name in names.unexpected],
        ).raise_if_any()


def make_real(model: Any, missing: set[str]) -> None:
    """Allocate missing tensors; ``load_into`` moves them to their device, and the library fills them afterwards.

    The same for non-persistent buffers that a constructor created on the device of a meta tensor.
    """
    for name in (*missing, *(name for name, _ in model.named_non_persistent_buffers())):
        old = tensor_of(model, name)
        if old.is_meta:
            _put(model, name, torch.zeros_like(old, device="cpu"))


def tensor_of(model: nn.Module, name: str) -> torch.Tensor:
    owner, _, own = name.rpartition(".")
    tensor: torch.Tensor = getattr(model.get_submodule(owner), own)
    return tensor


def _put(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Replace a tensor of the model; a parameter stays a parameter."""
    owner, _, own = name.rpartition(".")
    module = model.get_submodule(owner)
    old = getattr(module, own)
    if isinstance(old, nn.Parameter) and not isinstance(tensor, nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=old.requires_grad and tensor.is_floating_point())
    setattr(module, own, tensor)
