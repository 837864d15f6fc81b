"""What modules do when ``load_state_dict`` loads them, done for a state dict whose tensors are not read.

- Pre-hooks rename, drop or reject entries: they run on meta tensors that stand for the entries, and each of these is
  recognised again by identity. A hook that computes a tensor cannot be followed and is named.
- Overrides of ``_load_from_state_dict`` are code that copies. Those of torch's norms are known (``Slot.added_in``);
  any other is named.
- Post-hooks run as they are, once the tensors are in place.
- Extra state is not restored; its names are known so that they are not unexpected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX, _IncompatibleKeys

from sluice._dtypes import torch_dtype
from sluice._errors import MismatchError
from sluice._records import Entry

__all__ = ["apply_pre_hooks", "extra_state_names", "run_post_hooks", "unknown_loading"]

# nn.Module documents these names for subclasses and keeps them private otherwise: there is no public way to ask.
# ruff: noqa: SLF001

_KNOWN_LOADERS = (
    nn.Module._load_from_state_dict,
    _NormBase._load_from_state_dict,
    _InstanceNorm._load_from_state_dict,
)


def unknown_loading(path: str, module: nn.Module) -> Iterator[str]:
    """Yield a sentence when this module, without its children, loads itself in a way that is not known here."""
    if getattr(module._load_from_state_dict, "__func__", None) not in _KNOWN_LOADERS:
        yield f"{path or 'the module'} ({type(module).__name__}) loads itself with its own _load_from_state_dict"


def extra_state_names(prefix: str, module: nn.Module) -> Iterator[str]:
    """Yield the name of this module's extra state in a state dict, when it has any."""
    if type(module).set_extra_state is not nn.Module.set_extra_state:
        yield prefix + _EXTRA_STATE_KEY_SUFFIX


def apply_pre_hooks(
    module: nn.Module,
    entries: Mapping[str, Entry],
    *,
    versions: Mapping[str, int] | None = None,
    strict: bool = True,
) -> dict[str, Entry]:
    """Return the entries as the module's load_state_dict pre-hooks leave them.

    Args:
        module: The module that is loaded.
        entries: The state dict, by the names that the module uses.
        versions: Version of each module's part of it, by the module's name.
        strict: What the hooks are told of missing and unexpected names.

    Raises:
        MismatchError: A hook rejects the state dict, fails on tensors without data, or adds one of its own.
    """
    hooked = [
        (path, part) for path, part in module.named_modules(remove_duplicate=False) if part._load_state_dict_pre_hooks
    ]
    if not hooked:
        return dict(entries)
    stand_ins = {
        name: torch.empty_strided(entry.shape, entry.stride, dtype=torch_dtype(entry.dtype), device="meta")
        for name, entry in entries.items()
    }
    entry_of = {id(stand_in): entries[name] for name, stand_in in stand_ins.items()}
    state = dict(stand_ins)  # stand_ins keeps every one of them alive, so that identities stay theirs
    for path, part in hooked:
        prefix = f"{path}." if path else ""
        # A hook sees what load_state_dict passes down: the names below its module.
        below = {name: state.pop(name) for name in list(state) if name.startswith(prefix)}
        metadata = {"version": versions[path]} if versions and path in versions else {}
        _run_pre_hooks(path, part, below, metadata, strict=strict)
        for name, tensor in below.items():
            if id(tensor) not in entry_of:
                raise MismatchError(f"{_describe(path, part)} computes a tensor from the state dict", tensor=name)
        state.update(below)
    return {name: entry_of[id(tensor)] for name, tensor in state.items()}


def _run_pre_hooks(
    path: str, module: nn.Module, state: dict[str, Any], metadata: dict[str, Any], *, strict: bool
) -> None:
    missing: list[str] = []
    unexpected: list[str] = []
    errors: list[str] = []
    try:
        for hook in module._load_state_dict_pre_hooks.values():
            hook(state, f"{path}." if path else "", metadata, strict, missing, unexpected, errors)
    except Exception as error:  # foreign code may raise anything
        raise MismatchError(f"{_describe(path, module)} failed on a state dict without data: {error}") from error
    if errors or missing or unexpected:
        raise MismatchError(
            "\n  ".join([f"{_describe(path, module)} rejects the state dict", *errors]),
            missing=tuple(missing),
            unexpected=tuple(unexpected),
        )


def _describe(path: str, module: nn.Module) -> str:
    return f"the load_state_dict pre-hook of {path or 'the module'} ({type(module).__name__})"


def run_post_hooks(module: nn.Module, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """Run the module's load_state_dict post-hooks, children first, as ``load_state_dict`` does."""
    for child in module.children():
        run_post_hooks(child, missing, unexpected)
    for hook in module._load_state_dict_post_hooks.values():
        hook(module, _IncompatibleKeys(list(missing), list(unexpected)))
