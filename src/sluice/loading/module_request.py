"""Decide a load into a module from the arguments of the user.

All that headers can show is settled here, before a byte of tensor data is read: names, shapes, dtypes, memory.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from msgspec.structs import replace
from torch import nn

from sluice._arguments import dtype_argument, memory_limits
from sluice._errors import MismatchError
from sluice._options import TransferOptions
from sluice.adapters.config import Adapter, adapter_list
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.entries import tree as trees
from sluice.entries.lookup import subtree
from sluice.entries.rules import Rule
from sluice.loading.devices import Device, other_devices, parse_placement
from sluice.loading.job import LoadRequest
from sluice.loading.module_job import ModuleJob, module_job
from sluice.matching.match import Outline, match
from sluice.matching.name_fit import unwrap
from sluice.matching.renaming import Rename, Renaming
from sluice.matching.selection import Selection, select
from sluice.modules.collect import ModuleState, collect
from sluice.modules.emptied import describe_moves
from sluice.modules.following import base_names, base_outline, follow_loading, through_wrappers
from sluice.modules.load_hooks import Followed
from sluice.modules.refused_models import advice_for, refuse_flattened
from sluice.planning.budget import Change
from sluice.records import Entry, UnsupportedValue
from sluice.sharding.dtensors import is_dtensor, local_of, reshard

if TYPE_CHECKING:
    from sluice.quantizing.saved import OpenedWeight

__all__ = ["EntriesRequest", "IntoModule", "ModuleRequest"]

#: The dtype offered if a load does not fit: half the size of float32, with the same range.
_SMALLER_DTYPE = "bfloat16"


class IntoModule(LoadRequest, frozen=True, kw_only=True):
    """A load into a module, which several ranks may hold."""

    #: The module to load into.
    model: nn.Module
    #: Device, devices by prefix of names, ``"auto"``, or None. ``job`` resolves it, because that can create a context.
    device: Device = None
    #: Name of a real floating-point dtype, ``"auto"`` for the checkpoint's, or None for the module's.
    dtype: str | None = None
    #: Quantizes weights; a configuration of torchao, or a function.
    quantize: object = None
    #: Adapters to merge.
    adapters: tuple[Adapter, ...] = ()

    def opened(
        self, opening: AbstractContextManager[OpenCheckpoint], *, finish: bool = True
    ) -> AbstractContextManager[tuple[AbstractContextManager[OpenCheckpoint], tuple[OpenedWeight, ...]]]:
        """Return a context in which quantized weights of the model are parameters for their plain tensors.

        See ``sluice.quantizing.saved.opened_model``. Other models are unchanged, and so are their checkpoints.
        """
        kinds = set(map(type, self.model.parameters())) - {nn.Parameter}
        assembled = bool(kinds) and any(hasattr(kind, "__tensor_flatten__") for kind in kinds)  # DTensors, too
        if not assembled or any(map(is_dtensor, self.model.parameters())):
            return nullcontext((opening, ()))
        from sluice.quantizing.saved import opened_model  # here, not above: few models are quantized

        return opened_model(self.model, opening, dtype=self.dtype, finish=finish)

    can_map: ClassVar[bool] = True

    def tensors(self) -> Iterable[torch.Tensor]:
        """See ``LoadRequest.tensors``."""
        reshard(self.model)  # a gathered parameter is an ordinary tensor
        return chain(self.model.parameters(), self.model.buffers())

    def offers(self) -> Sequence[Change]:
        """See ``LoadRequest.offers``: the changes that keep every value."""
        places = [Change(place="map")] if self.can_map and self.options.place == "copy" else []
        return [*places, *(Change(device=other) for other in other_devices(parse_placement(self.device)))]


class ModuleRequest(IntoModule, frozen=True, kw_only=True):
    """Arguments of ``sluice.load_into``."""

    #: Part of the checkpoint; None searches for the state dict.
    key: str | None = None
    #: New names for the names of the checkpoint.
    rename: Rename | None = None
    #: Rules to apply before names are matched.
    rules: Sequence[Rule] = ()
    #: Whether missing and unexpected names are errors.
    strict: bool = True
    #: Whether it is accepted that no tensor of the module is in the checkpoint.
    allow_empty: bool = False
    #: Whether names of a different shape keep the module's values.
    ignore_mismatched: bool = False
    #: Description of the part of the module that one rank holds, if its load is only planned.
    part: ModuleState | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any], **own: Any) -> Self:
        """Return the request for the arguments of a verb, which have been checked.

        Args:
            arguments: The arguments by name; only fields of the request are taken.
            own: Fields that differ from the arguments of their names.
        """
        transfer = {name: arguments[name] for name in ("page_cache", "place") if name in arguments}
        fields = {name: arguments[name] for name in cls.__struct_fields__ if name in arguments} | {
            "dtype": dtype_argument(arguments["dtype"]),
            "adapters": () if arguments.get("adapters") is None else adapter_list(arguments["adapters"]),
            "options": TransferOptions(memory=memory_limits(arguments["memory"]), **transfer),
        }
        return cls(**{**fields, **own})

    def arguments(self) -> dict[str, str]:
        """See ``LoadRequest.arguments``."""
        return {
            "dtype": str(self.dtype),
            "key": str(self.key),
            "strict": str(self.strict),
            "ignore_mismatched": str(self.ignore_mismatched),
            "rename": "a function" if callable(self.rename) else repr(self.rename),
            "rules": re.sub(" at 0x[0-9a-f]+", "", repr([*self.rules])),  # without the addresses of functions
            "place": self.options.place,
        }

    def job(self, checkpoint: OpenCheckpoint) -> ModuleJob:
        """See ``LoadRequest.job``; the errors are those of ``sluice.load_into``."""
        try:
            return self._job(checkpoint)
        except MismatchError as error:
            refuse_flattened(self.model)
            advice = advice_for(self.model)
            if advice is not None:
                error.advice = f"{error.advice} {advice}"
            raise

    def _selected(
        self, checkpoint: OpenCheckpoint, state: ModuleState, base: Mapping[str, str | None] | None
    ) -> Selection:
        """Return the entries for the names of the module; peft's wrappers have the names of their base layers."""
        tree = checkpoint.index.tree
        if checkpoint.index.metadata:
            tree = checkpoint.tree_with_ties(slot.names for slot in state.outline.slots)
        outline = state.outline if base is None else base_outline(state.outline, base)
        selection = select(tree, outline, key=self.key, rename=self.rename, rules=self.rules, limits=checkpoint.limits)
        if base is not None:
            selection = through_wrappers(selection, state.outline, base)
        if not (isinstance(tree, dict) and set(map(type, tree.values())) == {Entry}):  # as most trees are
            _refuse_opaques(self, selection, state, checkpoint)
        return selection

    def _job(self, checkpoint: OpenCheckpoint) -> ModuleJob:
        state = self.part or collect(self.model)
        base = base_names(self.model, state.outline, checkpoint.entries) if "peft" in sys.modules else None
        selection = self._selected(checkpoint, state, base)
        followed = Followed(entries=selection.entries, extra_state=selection.extra_state, strict=self.strict)
        if "peft" in sys.modules or state.runs_code:
            followed = follow_loading(
                self.model, selection, strict=self.strict, ignore_mismatched=self.ignore_mismatched
            )
        entries, optional = followed.entries, followed.optional_names
        if followed.assigned and not self.dtype:
            entries = _in_own_dtype(entries, followed.assigned)
        if base is not None:
            optional |= {name for name, of_base in base.items() if of_base is None}
        match_on = partial(
            match,
            state.outline,
            entries,
            dtype=self.dtype,
            strict=followed.strict,
            versions=selection.versions,
            extra_state=followed.extra_state,
            optional_names=optional,
            problems=followed.problems,
            allow_empty=self.allow_empty,
            ignore_mismatched=self.ignore_mismatched,
            candidates=selection.candidates,
            needs_values=self.strict,
            has_attributes=bool(followed.attributes),
        )
        own, skipped = _own_extra_state(followed.extra_state, state.outline) if followed.extra_state else ({}, [])
        moved = self.device is None and state.on_meta
        job = module_job(checkpoint, state, match_on, self, strict=self.strict)
        decided = replace(
            job,
            key=selection.key,
            prefix=selection.prefix,
            receivers=followed.receivers,
            attributes=followed.attributes,
            extra_state=own,
            notes=(
                *selection.notes,
                *followed.notes,
                *job.notes,
                *(describe_moves(map(local_of, state.tensors)) if moved else ()),
                *skipped,
            ),
        )
        return replace(decided, prepared=decided.with_values(job.prepared)) if own or followed.attributes else decided

    def offers(self) -> Sequence[Change]:
        """See ``LoadRequest.offers``."""
        # If the caller asked for a cast, the file's own dtypes may fit: they can be mapped, or are in place.
        dtypes = (_SMALLER_DTYPE, "auto") if self.dtype not in {None, "auto"} else (_SMALLER_DTYPE,)
        return [*super().offers(), *(Change(dtype=dtype) for dtype in dtypes)]


class EntriesRequest(IntoModule, frozen=True, kw_only=True):
    """A load of entries that have the module's names already, because a library converted them.

    Nothing is searched, and load hooks of modules are not followed: the library has handled both. Tensors without an
    entry must be real and keep their values.
    """

    #: The entry of each parameter and persistent buffer, by name.
    entries: Mapping[str, Entry]

    verb: ClassVar[str] = "hf.from_pretrained"

    def job(self, checkpoint: OpenCheckpoint) -> ModuleJob:
        """See ``LoadRequest.job``."""
        state = collect(self.model)
        match_on = partial(match, state.outline, self.entries, strict=False, allow_empty=True)
        return module_job(checkpoint, state, match_on, self, strict=False)


def _in_own_dtype(entries: Mapping[str, Entry], assigned: Collection[str]) -> Mapping[str, Entry]:
    """Return the entries, of which those that are assigned keep the dtype of the checkpoint."""
    return {
        name: replace(entry, cast=entry.cast or entry.dtype) if name in assigned else entry
        for name, entry in entries.items()
    }


def _own_extra_state(found: Mapping[str, object], outline: Outline) -> tuple[dict[str, object], list[str]]:
    """Return the extra state of the module that plain values can build, and a note for each that they cannot."""
    own = {name: value for name, value in found.items() if name in outline.extra_state}
    skipped = [name for name, value in own.items() if trees.opaques(value)]
    notes = [f"extra state {name!r} was skipped: only running code could build it" for name in skipped]
    return {name: value for name, value in own.items() if name not in skipped}, notes


def _refuse_opaques(
    request: ModuleRequest, selection: Selection, state: ModuleState, checkpoint: OpenCheckpoint
) -> None:
    """Refuse values of the state dict that sluice does not build; without ``strict``, only tensors of the module."""
    opaques = trees.opaques(subtree(checkpoint.index.tree, selection.key or ""))
    if not opaques:
        return
    own = {unwrap(name) for slot in state.outline.slots for name in slot.names}
    renaming = Renaming(request.rename)
    for name, leaf in opaques.items():
        new_name = renaming.new_name(name)
        if new_name is not None:
            spellings = [new_name, unwrap(new_name)]
            rests = [each.removeprefix(selection.prefix) for each in spellings if each.startswith(selection.prefix)]
            needed = isinstance(leaf, UnsupportedValue) and any(unwrap(rest) in own for rest in rests)
            if needed or (request.strict and rests):
                raise trees.refusal(leaf, name, checkpoint.path)
