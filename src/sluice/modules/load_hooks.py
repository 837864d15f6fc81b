"""Follow the hooks and loaders that ``load_state_dict`` runs, for a state dict whose tensors are not read.

- Pre-hooks rename, drop, rearrange or reject entries: they run on symbolic tensors (``symbolic_tensors``). A hook that
  computes a tensor cannot be followed and is reported.
- Overrides of ``_load_from_state_dict`` are followed in the same way, on a copy of the module; see
  ``custom_loaders``. Those of torch's norms are known (``Slot.added_in``).
- An override of ``load_state_dict`` of the module itself decides which state dict reaches which of its parts; see
  ``load_overrides``. ``nn.Module.load_state_dict`` never calls those of its children.
- Lazy modules materialise their tensors in a pre-hook. That hook is skipped: their tensors are materialised when they
  are filled.
- Hooks see extra state as plain data; ``restore_extra_state`` passes it to the modules after their tensors are in
  place.
- Post-hooks of the modules whose ``load_state_dict`` is called run unchanged, at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from msgspec import Struct, field
from msgspec.structs import replace
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from sluice._private_torch import EXTRA_STATE_KEY, KNOWN_LOADERS, IncompatibleKeys
from sluice.records import Entry

if TYPE_CHECKING:
    from sluice.modules.load_overrides import Loader
    from sluice.modules.meta_copy import MetaCopy

__all__ = ["Followed", "extra_state_names", "follow_loading", "follow_parts", "restore_extra_state", "run_post_hooks"]

# nn.Module documents these names for subclasses only; they have no public accessor.
# ruff: noqa: SLF001


class Followed(Struct, frozen=True, kw_only=True):
    """A state dict after the hooks and loaders of a module."""

    #: Its tensors, by their names in the module.
    entries: dict[str, Entry]
    #: Its extra state by name: plain values and containers with ``Entry`` leaves.
    extra_state: dict[str, object] = field(default_factory=dict)
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


def extra_state_names(prefix: str, module: nn.Module) -> Iterator[str]:
    """Yield the name of this module's extra state in a state dict, if it has any."""
    if type(module).set_extra_state is not nn.Module.set_extra_state:
        yield prefix + EXTRA_STATE_KEY


def follow_loading(
    module: nn.Module,
    entries: Mapping[str, Entry],
    extra_state: Mapping[str, object] | None = None,
    *,
    versions: Mapping[str, int] | None = None,
    strict: bool = True,
    ignore_mismatched: bool = False,
) -> Followed:
    """Return the state dict that remains after the code that ``module.load_state_dict`` runs.

    Args:
        module: The module to load into; it is not changed.
        entries: The state dict, by names in the module.
        extra_state: Its extra state, by the same names.
        versions: Version of each module's state by the module's name.
        strict: Argument of ``load_state_dict``.
        ignore_mismatched: Whether a name of a different shape is accepted by an own ``load_state_dict``.
    """
    loader = _loader(module, entries, strict=strict)
    if loader is not None:
        from sluice.modules.load_overrides import follow_override  # rarely needed

        return follow_override(
            module,
            entries,
            extra_state or {},
            versions=versions or {},
            loader=loader,
            ignore_mismatched=ignore_mismatched,
        )
    return replace(follow_parts(module, entries, extra_state, versions=versions), strict=strict)


def _loader(module: nn.Module, entries: Mapping[str, Entry], *, strict: bool) -> Loader | None:
    """Return the code that loads these entries if it is not ``nn.Module.load_state_dict``."""
    if type(module).load_state_dict is not nn.Module.load_state_dict or "load_state_dict" in vars(module):
        from sluice.modules.load_overrides import own_load_state_dict  # rarely needed

        return own_load_state_dict(module, strict=strict)
    if "peft" in sys.modules:
        from sluice.modules.adapters import adapter_loader

        return adapter_loader(module, entries, strict=strict)
    return None


def follow_parts(
    module: nn.Module,
    entries: Mapping[str, Entry],
    extra_state: Mapping[str, object] | None = None,
    *,
    versions: Mapping[str, int] | None = None,
) -> Followed:
    """Return the state dict after the load_state_dict pre-hooks and custom loaders of the module and its children.

    The arguments are those of ``follow_loading``.
    """
    extra_state = extra_state or {}
    parts = [
        (path, part)
        for path, part in module.named_modules(remove_duplicate=False)
        if _has_custom_loader(part) or any(True for _ in _pre_hooks(part))
    ]
    if not parts:
        return Followed(entries=dict(entries), extra_state=dict(extra_state))
    follower = _Follower(entries, extra_state)
    for path, part in parts:
        metadata = {"version": versions[path]} if versions and path in versions else {}
        follower.follow(path, part, metadata)
    return follower.result()


def _has_custom_loader(module: nn.Module) -> bool:
    """Return whether this module, without its children, has a loader other than torch's own."""
    return getattr(module._load_from_state_dict, "__func__", None) not in KNOWN_LOADERS


def _pre_hooks(module: nn.Module) -> Iterator[Any]:
    """Yield the pre-hooks of a module, except the one that materialises lazy modules."""
    for hook in module._load_state_dict_pre_hooks.values():
        function = getattr(getattr(hook, "hook", None), "__func__", None)
        if function is not LazyModuleMixin._lazy_load_hook:
            yield hook


def _hooks_of_copy(part: nn.Module, prefix: str) -> tuple[list[Callable[..., object]], MetaCopy | None]:
    """Return the pre-hooks of a module for a copy of it, and the copy.

    There is no copy if no hook takes the module, or if it holds tensors without a stand-in, such as lazy ones. Then a
    hook gets the module itself, and only stops at the first write.
    """
    from sluice.modules.meta_copy import MetaCopy, NotFollowedError

    hooks: list[Callable[..., object]] = []
    copy: MetaCopy | None = None
    for wrapped in _pre_hooks(part):
        hook = getattr(wrapped, "hook", wrapped)
        is_method = getattr(hook, "__self__", None) is part
        with_module = getattr(wrapped, "with_module", False)
        if with_module or is_method:
            try:
                copy = copy or MetaCopy(part, prefix)
            except NotFollowedError:
                return list(_pre_hooks(part)), None
            hook = MethodType(hook.__func__, copy.module) if is_method else hook
            hook = partial(hook, copy.module) if with_module else hook
        hooks.append(hook)
    return hooks, copy


def _refuse_copy(name: str, _: Entry) -> NoReturn:
    """Refuse a copy into a tensor of the module: what a hook loads by itself is not followed."""
    from sluice.modules.symbolic_tensors import CannotFollow

    raise CannotFollow(f"copies into {name!r}")


class _Follower:
    """Passes one state dict through hooks and loaders, parents first."""

    def __init__(self, entries: Mapping[str, Entry], extra_state: Mapping[str, object]) -> None:
        from sluice.modules.symbolic_tensors import SymbolicTensor  # rarely needed

        self._symbolic = SymbolicTensor
        extra = {
            name: SymbolicTensor(value) if isinstance(value, Entry) else value for name, value in extra_state.items()
        }
        self._state: dict[str, Any] = {name: SymbolicTensor(entry) for name, entry in entries.items()} | extra
        self._optional_names: set[str] = set()
        self._problems: list[str] = []
        self._attributes: dict[str, Entry] = {}

    def follow(self, path: str, part: nn.Module, metadata: dict[str, Any]) -> None:
        """Run the hooks and the loader of one module; note a problem for each thing that cannot be followed."""
        prefix = f"{path}." if path else ""
        # load_state_dict passes a module only the names below it.
        below = {name: self._state.pop(name) for name in list(self._state) if name.startswith(prefix)}
        if _has_custom_loader(part):
            below = self._follow_loader(path, part, below, metadata)
        else:
            self._follow_hooks(path, part, below, metadata)
        self._state.update(below)

    def _follow_loader(
        self, path: str, part: nn.Module, below: dict[str, Any], metadata: dict[str, Any]
    ) -> dict[str, Any]:
        from sluice.modules.custom_loaders import follow_custom_loader
        from sluice.modules.meta_copy import NotFollowedError

        described = f"the _load_from_state_dict of {path or 'the module'} ({type(part).__name__})"
        try:
            followed = follow_custom_loader(part, below, f"{path}." if path else "", metadata)
        except NotFollowedError as error:
            self._problems.append(f"{described} {error}")
            return below
        self._optional_names |= followed.optional_names
        self._attributes |= followed.attributes
        self._problems += [f"{described} rejects the state dict: {error}" for error in followed.errors]
        return followed.state

    def _follow_hooks(self, path: str, part: nn.Module, below: dict[str, Any], metadata: dict[str, Any]) -> None:
        from sluice.modules.meta_copy import CopyRecorder, NotFollowedError, reason_of, untouched

        described = f"the load_state_dict pre-hook of {path or 'the module'} ({type(part).__name__})"
        prefix = f"{path}." if path else ""
        missing: list[str] = []
        unexpected: list[str] = []
        errors: list[str] = []
        try:
            hooks, copy = _hooks_of_copy(part, prefix)
            recorder = CopyRecorder(copy.tensors if copy else {}, _refuse_copy)
            with untouched(part), recorder:
                for hook in hooks:
                    # torch always passes strict=True and applies its own strict to the lists at the end.
                    hook(below, prefix, metadata, True, missing, unexpected, errors)
            for problem in recorder.problems:  # the hook may have caught the exception
                raise NotFollowedError(problem)
            if copy:
                self._attributes |= copy.attributes()
        except NotFollowedError as error:
            self._problems.append(f"{described} {error}")
        except Exception as error:  # noqa: BLE001  foreign code may raise anything
            self._problems.append(f"{described} {reason_of(error)}")
        errors += [f"it requires {name!r}" for name in missing] + [
            f"it does not expect {name!r}" for name in unexpected
        ]
        self._problems += [f"{described} rejects the state dict: {error}" for error in errors]
        self._problems += [
            f"{described} computes a tensor from the state dict: {name!r}"
            for name, value in below.items()
            if isinstance(value, torch.Tensor) and not isinstance(value, self._symbolic)
        ]

    def result(self) -> Followed:
        """Return the state dict that remains."""
        entries: dict[str, Entry] = {}
        extra_state: dict[str, object] = {}
        for name, value in self._state.items():
            entry = value.entry if isinstance(value, self._symbolic) else None
            if name.rpartition(".")[2] == EXTRA_STATE_KEY:
                extra_state[name] = value if entry is None else entry
            elif entry is not None:
                entries[name] = entry
        return Followed(
            entries=entries,
            extra_state=extra_state,
            optional_names=frozenset(self._optional_names),
            problems=tuple(self._problems),
            attributes=self._attributes,
        )


def restore_extra_state(module: nn.Module, values: Mapping[str, object]) -> None:
    """Call ``set_extra_state`` of each module that has extra state, parents first as ``load_state_dict`` does.

    Args:
        module: The loaded module.
        values: The extra state by name in the state dict.
    """
    if not values:
        return
    for path, part in module.named_modules(remove_duplicate=False):
        for name in extra_state_names(f"{path}." if path else "", part):
            if name in values:
                part.set_extra_state(values[name])


def run_post_hooks(module: nn.Module, missing: list[str], unexpected: list[str]) -> None:
    """Run the module's load_state_dict post-hooks, children first, as ``load_state_dict`` does.

    Hooks may change the lists.
    """
    for child in module._modules.values():
        if child is not None:
            run_post_hooks(child, missing, unexpected)
    for hook in module._load_state_dict_post_hooks.values():
        hook(module, IncompatibleKeys(missing, unexpected))
