"""Hooks and loaders of a module that ``load_state_dict`` runs, and the state dict after them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec import Struct, field
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from sluice.records import Entry

__all__ = ["Followed", "Loader", "pre_hooks"]

# nn.Module documents these names for subclasses only; they have no public accessor.
# ruff: noqa: SLF001


class Loader(Struct, frozen=True, kw_only=True):
    """The code that loads a state dict into a module."""

    #: Its name for messages and notes.
    name: str
    #: The code; it is called with a copy of the module and the state dict.
    load: Callable[[Any, Mapping[str, Any]], object]


class Followed(Struct, frozen=True, kw_only=True):
    """A state dict after the hooks and loaders of a module."""

    #: Its tensors, by their names in the module.
    entries: Mapping[str, Entry]
    #: Its extra state by name: plain values and containers with ``Entry`` leaves.
    extra_state: Mapping[str, object] = field(default_factory=dict)
    #: Names of tensors that their modules do not require.
    optional_names: frozenset[str] = frozenset()
    #: Problems that prevent the load, one sentence each.
    problems: tuple[str, ...] = ()
    #: Whether missing and unexpected names are errors.
    strict: bool = True
    #: Names of tensors that take the dtype of the checkpoint, because they are assigned instead of copied.
    assigned: frozenset[str] = frozenset()
    #: Paths of the modules whose ``load_state_dict`` is called, in that order.
    receivers: tuple[str, ...] = ("",)
    #: Tensors that become attributes of modules, neither parameters nor buffers, by the attributes' full names.
    attributes: Mapping[str, Entry] = field(default_factory=dict)
    #: Notes for the report, one sentence each.
    notes: tuple[str, ...] = ()


def pre_hooks(module: nn.Module) -> Iterator[Any]:
    """Yield the pre-hooks of a module, except the one that materialises lazy modules."""
    for hook in module._load_state_dict_pre_hooks.values():
        function = getattr(getattr(hook, "hook", None), "__func__", None)
        if function is not LazyModuleMixin._lazy_load_hook:
            yield hook
