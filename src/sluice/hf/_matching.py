"""From the names and weights of a file to those of a model: the library's conversions, ties and lists of exceptions."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from sluice._dtypes import dtype_name
from sluice._errors import UnsupportedError
from sluice._messages import Findings
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.hf._symbolic_tensors import SymbolicTensor
from sluice.loading.module_fill import same_values
from sluice.records import Entry, Request

__all__ = ["MatchedWeights", "apply_dtype_plan", "check", "make_real", "tensor_of", "tie"]

# ruff: noqa: SLF001  the library keeps what its own loader needs private; the pinned range is what makes it safe


@dataclass(slots=True, kw_only=True)
class MatchedWeights:
    """The weights of a directory under the names of the model, as they become fewer until each has its place."""

    #: What fills each parameter and persistent buffer.
    entries: dict[str, Entry]
    #: Names of the checkpoint, converted, that the model does not have.
    unexpected: list[str]
    #: Names of the model that nothing fills.
    missing: set[str]
    #: The library's conversions that were used; ``save_pretrained`` reverts them.
    used: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, library: Any, model: Any, entries: Mapping[str, Entry], path: str) -> MatchedWeights:
        """Run the library's conversions on the names of a checkpoint."""
        own = model.state_dict()
        transforms = library.get_model_conversion_mapping(model)
        renamings = [one for one in transforms if isinstance(one, library.WeightRenaming)]
        converters = [one for one in transforms if isinstance(one, library.WeightConverter)]
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
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
            used=[one for one in transforms if one.was_used()],
        )


def _convert(converter: Any, name: str, model: Any, path: str) -> dict[str, Entry]:
    """Return what one conversion makes of the entries that it collected."""
    try:
        made = converter.convert(name, model=model, config=model.config)
        tensors = {new: one[0] if isinstance(one, list) else one for new, one in made.items()}
        return {new: tensor.entry for new, tensor in tensors.items()}
    except Exception as error:  # the library's code may raise anything
        steps = ", ".join(type(step).__name__ for step in converter.operations)
        problem = f"{type(model).__name__} needs a conversion of weights ({steps}) that sluice cannot follow: {error}"
        raise UnsupportedError(problem, file=path, tensor=name) from error


def apply_dtype_plan(model: Any, dtype: torch.dtype, names: Mapping[str, Entry]) -> None:
    """Give the tensors that the library keeps in float32 their dtype."""
    for glob, kept in model._get_dtype_plan(dtype).items():
        pattern = re.compile(glob.replace("*", ".*"))  # as the library compiles it
        for name in names:
            if pattern.search(name):
                _put(model, name, torch.empty_like(tensor_of(model, name), dtype=kept))


def tie(model: Any, names: MatchedWeights, checkpoint: OpenCheckpoint) -> list[str]:
    """Tie what the library ties; of tensors that the checkpoint has twice, only those that are equal in it.

    Returns:
        A sentence for each pair that is not.
    """
    model.tie_weights(missing_keys=names.missing, recompute_mapping=False)
    notes = []
    of_tensor = {id(tensor_of(model, name)): name for name in reversed(names.entries)}
    for target, source in list(model.all_tied_weights_keys.items()):
        own, other = tensor_of(model, target), tensor_of(model, source)
        first = of_tensor.get(id(other))
        if own is other or target not in names.entries or first is None:
            continue
        requests = [_request(names.entries[name], name, other) for name in (first, target)]
        if own.shape == other.shape and same_values(checkpoint, *requests, limit_bytes=_COMPARED_BYTES):
            _put(model, target, other)
            del names.entries[target]
        else:
            model.all_tied_weights_keys.pop(target)
            notes.append(f"{target!r} and {source!r} differ in the checkpoint and were not tied")
    return notes


#: Bytes of two tied tensors that are compared at a time.
_COMPARED_BYTES = 16 << 20


def _request(entry: Entry, name: str, like: torch.Tensor) -> Request:
    return Request(name=name, entry=entry, dtype=dtype_name(like.dtype), device="cpu")


def check(model: Any, names: MatchedWeights, *, strict: bool) -> None:
    """List what is missing and what has no place, without what the library says is neither.

    Raises:
        MismatchError: There is some, and ``strict``.
    """
    info = SimpleNamespace(missing_keys=set(names.missing), unexpected_keys=set(names.unexpected))
    model._adjust_missing_and_unexpected_keys(info)
    names.unexpected = [name for name in names.unexpected if name in info.unexpected_keys]
    if strict:
        Findings(
            missing=[((name,), tuple(tensor_of(model, name).shape)) for name in sorted(info.missing_keys)],
            others=[f"{name!r} has no place in {type(model).__name__}" for name in names.unexpected],
        ).raise_if_any()


def make_real(model: Any, missing: set[str]) -> None:
    """Give missing tensors memory; ``load_into`` moves it to their device, and the library fills it afterwards.

    The same for buffers that no state dict has, where a constructor makes them on the device of one that it has.
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
    """Put a tensor in the place of one; a parameter stays a parameter."""
    owner, _, own = name.rpartition(".")
    module = model.get_submodule(owner)
    old = getattr(module, own)
    if isinstance(old, nn.Parameter) and not isinstance(tensor, nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=old.requires_grad and tensor.is_floating_point())
    setattr(module, own, tensor)
