"""Follow modules that override ``_load_from_state_dict``, on a copy without data.

Such a method usually renames or drops names and leaves the rest to ``nn.Module``. It runs on a copy of the module
whose tensors are on the meta device (``meta_copy``), with a state dict of symbolic tensors. A method that computes
values, sets attributes or resizes tensors raises ``NotFollowedError`` with the reason. The module is not touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from msgspec import Struct
from torch import nn

from sluice._private_torch import EXTRA_STATE_KEY
from sluice.modules.meta_copy import CopyRecorder, MetaCopy, NotFollowedError, reason_of, untouched
from sluice.modules.symbolic_tensors import SymbolicTensor
from sluice.records import Entry

__all__ = ["FollowedLoader", "follow_custom_loader"]

# nn.Module documents these names for subclasses only; they have no public accessor.
# ruff: noqa: SLF001

_LOADER = "_load_from_state_dict"


class FollowedLoader(Struct, frozen=True, kw_only=True):
    """The part of a state dict that a custom loader leaves."""

    #: Values by the names that the module uses.
    state: dict[str, Any]
    #: Names of the module's tensors that the loader does not require.
    optional_names: frozenset[str]
    #: Errors that it reported.
    errors: tuple[str, ...]
    #: Tensors that it makes attributes of the module, by their full names.
    attributes: Mapping[str, Entry]


def follow_custom_loader(
    module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: dict[str, Any]
) -> FollowedLoader:
    """Run the module's loader on a copy, with a ``state`` whose tensors stand for entries.

    Args:
        module: The module; it is not changed.
        state: The part of the state dict below ``prefix``, by its full names.
        prefix: The module's name with a dot; empty for the root.
        metadata: Metadata of the state dict for this module.

    Raises:
        NotFollowedError: The loader needs data or changes more than names.
    """
    if _LOADER in vars(module):
        raise NotFollowedError("is set on the instance, not the class")  # it is bound to the module and not to the copy
    copy = MetaCopy(module, prefix)
    given = dict(state)
    missing: list[str] = []
    unexpected: list[str] = []
    errors: list[str] = []
    copied: dict[str, SymbolicTensor] = {}
    recorder = CopyRecorder(copy.tensors, lambda name, entry: copied.update({name: SymbolicTensor(entry)}))
    try:
        with untouched(module), recorder, torch.no_grad():
            copy.module._load_from_state_dict(given, prefix, metadata, True, missing, unexpected, errors)
    except NotFollowedError:
        raise
    except Exception as error:  # foreign code may raise anything
        raise NotFollowedError(reason_of(error)) from error
    for problem in recorder.problems:
        raise NotFollowedError(problem)
    attributes = copy.attributes()
    optional_names = _apply(module, prefix, given, copied, copy.tensors, {*missing}, {*unexpected})
    own = {name for name, _ in copy.tensors.values()} | {prefix + EXTRA_STATE_KEY}
    reported = [error for error in errors if not error.startswith("size mismatch for")]  # matching reports shapes
    reported += [f"it requires {name!r}" for name in missing if name not in own]
    return FollowedLoader(state=given, optional_names=optional_names, errors=tuple(reported), attributes=attributes)


def _apply(
    module: nn.Module,
    prefix: str,
    state: dict[str, Any],
    loaded: Mapping[str, torch.Tensor],
    tensors: Mapping[int, tuple[str, torch.Tensor]],
    missing: set[str],
    unexpected: set[str],
) -> frozenset[str]:
    """Put loaded values under the names of the module's tensors; return the names that are not required."""
    held = {name for kind in (module._parameters, module._buffers) for name, t in kind.items() if t is not None}
    for name in list(state):
        first, _, rest = name.removeprefix(prefix).partition(".")
        expected = first in module._modules if rest else first in held or first == EXTRA_STATE_KEY
        if not expected and name not in unexpected:
            del state[name]
    optional_names = set()
    for name, tensor in tensors.values():
        if name in loaded:
            state[name] = loaded[name]
        elif "." not in name.removeprefix(prefix):
            if name in state and state[name].shape == tensor.shape:
                del state[name]  # the loader left it out
            if name not in state and name not in missing:
                optional_names.add(name)
    return frozenset(optional_names)
