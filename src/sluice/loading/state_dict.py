"""Which tensors of a checkpoint make a state dict, and how they are read; ``_api.load_state_dict`` runs it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from sluice._dtypes import is_castable
from sluice._errors import MismatchError
from sluice._options import MemoryLimits, TransferOptions
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.entries import tree as _tree
from sluice.entries.lookup import subtree
from sluice.loading.devices import other_devices
from sluice.matching.selection import only_state_dict
from sluice.planning.alternatives import Change, Offer, Replan, check_budget
from sluice.reading import transfer as _transfer
from sluice.reading.composites import component_requests
from sluice.reading.transfer import Prepared
from sluice.records import Entry, LoadPlan, Request
from sluice.rules._apply import Rule, apply_rules

__all__ = ["StateDictJob", "Wanted", "plan_state_dict", "prepare_state_dict", "state_dict_changes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a caller asks for; see ``sluice.load_state_dict``."""

    #: Where the tensors go, as torch writes it.
    device: str
    #: Name of the dtype that real floating-point tensors are cast to; None keeps the file's.
    dtype: str | None = None
    #: Part of the checkpoint; None finds it.
    key: str | None = None
    #: What the tensors become.
    rules: Sequence[Rule] = ()
    #: How the bytes are moved.
    options: TransferOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDictJob:
    """A state dict that is found, and how it is read; nothing was read yet."""

    #: The state dict, with ``Entry`` leaves.
    chosen: Mapping[str, object]
    #: Every tensor of it once.
    entries: tuple[Entry, ...]
    #: What is read of them.
    requests: tuple[Request, ...]
    #: How.
    prepared: Prepared


def prepare_state_dict(checkpoint: OpenCheckpoint, wanted: Wanted) -> StateDictJob:
    """Find a state dict, plan how it is read and check that this keeps the limits."""
    job = plan_state_dict(checkpoint, wanted)
    memory = wanted.options.memory or MemoryLimits()
    replan, offer = state_dict_changes(checkpoint, wanted)
    check_budget(job.prepared.plan, memory, replan, file=checkpoint.path, offer=offer)
    return job


def state_dict_changes(checkpoint: OpenCheckpoint, wanted: Wanted) -> tuple[Replan, Offer]:
    """Return what plans the same load with other arguments, and the arguments that could be asked for."""

    def replan(change: Change) -> LoadPlan:
        changed = replace(
            wanted,
            device=change.device or wanted.device,
            dtype=change.dtype or wanted.dtype,
            options=_transfer.changed(wanted.options, change),
        )
        return plan_state_dict(checkpoint, changed).prepared.plan

    def offer() -> list[Change]:
        devices = (device for device in other_devices({"": wanted.device}) if device != "auto")
        return [*(Change(device=device) for device in devices), Change(dtype="bfloat16")]

    return replan, offer


def plan_state_dict(checkpoint: OpenCheckpoint, wanted: Wanted) -> StateDictJob:
    """Find a state dict and plan how it is read; memory limits are not checked."""
    chosen = _find_state_dict(checkpoint, wanted.key)
    if wanted.rules:
        chosen = _ruled(chosen, wanted.rules, checkpoint)
    names = {id(entry): name for name, entry in _tree.walk(chosen)}
    entries = tuple(_tree.every_entry(chosen))
    requests = tuple(
        chain.from_iterable(_requests(names.get(id(entry), "_metadata"), entry, wanted) for entry in entries)
    )
    prepared = _transfer.plan_transfer(checkpoint, requests, share_storages=True, options=wanted.options)
    return StateDictJob(chosen=chosen, entries=entries, requests=requests, prepared=prepared)


def _find_state_dict(checkpoint: OpenCheckpoint, key: str | None) -> Mapping[str, object]:
    tree = checkpoint.index.tree
    chosen = subtree(tree, only_state_dict(tree, checkpoint.path) if key is None else key)
    if not isinstance(chosen, Mapping):
        raise MismatchError(
            "this part of the checkpoint is not a state dict",
            file=checkpoint.path,
            tensor=key or "",
            found=type(chosen).__name__,
        )
    _tree.refuse_opaques(chosen, checkpoint.path)
    return chosen


def _ruled(chosen: Mapping[str, object], rules: Sequence[Rule], checkpoint: OpenCheckpoint) -> Mapping[str, object]:
    """Return a flat state dict of what rules make of the tensors, and of the other values as they are."""
    made: dict[str, object] = {**apply_rules(_tree.flatten(chosen, checkpoint.limits), rules)}
    for name, value in _tree.leaves(chosen):
        if isinstance(value, Entry):
            continue
        if name in made:
            raise MismatchError("rules give a tensor the name of another value", file=checkpoint.path, tensor=name)
        made[name] = value
    ruled = OrderedDict(made)
    ruled.__dict__.update(getattr(chosen, "__dict__", {}))
    return ruled


def _requests(name: str, entry: Entry, wanted: Wanted) -> list[Request]:
    dtype = wanted.dtype if is_castable(entry.dtype) else None
    return component_requests(name, entry, device=wanted.device, dtype=entry.cast or dtype)
