"""Names of tensors that a file stores once. No torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

__all__ = ["stored_once"]

T = TypeVar("T")


def stored_once(
    tensors: Mapping[str, T], identity: Callable[[T], Hashable | None]
) -> tuple[dict[str, T], dict[str, str]]:
    """Return each distinct tensor under one name, and its other names: ``{name: stored name}``.

    The stored name is the first in alphabetical order, as in ``save_model`` of safetensors.

    Args:
        tensors: The tensors, by name.
        identity: Returns equal keys for tensors that are the same, and None for those that are always stored.
    """
    firsts: dict[Hashable, str] = {}
    aliases: dict[str, str] = {}
    for name in sorted(tensors):
        same = identity(tensors[name])
        kept = name if same is None else firsts.setdefault(same, name)
        if kept != name:
            aliases[name] = kept
    return {name: tensor for name, tensor in tensors.items() if name not in aliases}, aliases
