"""Load a state dict: find the entries, read them, and return the object that ``torch.load`` would."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch

from sluice._arguments import device_name
from sluice._dtypes import is_castable
from sluice._errors import MismatchError
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.engine.running_plan import RunResult
from sluice.entries import tree as trees
from sluice.entries.rules import Rule, apply_rules
from sluice.loading.devices import other_devices
from sluice.loading.job import Loaded, LoadJob, LoadRequest
from sluice.matching.candidates import outside, whole_states
from sluice.matching.selection import state_dict_at
from sluice.planning.budget import Change
from sluice.reading.composites import component_requests, with_tensors
from sluice.reading.transfer import plan_transfer
from sluice.records import Entry
from sluice.reports.load import Subject

__all__ = ["StateDictJob", "StateDictRequest"]


class StateDictRequest(LoadRequest, frozen=True, kw_only=True):
    """Arguments of ``sluice.load_state_dict``."""

    #: Device of the tensors.
    device: str | int | torch.device
    #: Name of the dtype that real floating-point tensors are cast to; None keeps the file's.
    dtype: str | None = None
    #: Part of the checkpoint; None searches for the state dict.
    key: str | None = None
    #: Rules to apply to the tensors.
    rules: Sequence[Rule] = ()
    #: Whether the whole object of the file is requested, in its own containers.
    whole: bool = False

    def job(self, checkpoint: OpenCheckpoint) -> StateDictJob:
        """See ``LoadRequest.job``."""
        device = device_name(self.device)
        checkpoint.refuse_cast(self.dtype)
        tree: Any = checkpoint.index.tree
        tree, key = (tree, "") if self.whole else state_dict_at(tree, self.key, checkpoint.path)
        trees.refuse_opaques(tree, checkpoint.path)
        if self.rules:
            tree = _apply_rules(tree, self.rules, checkpoint)
        names = {id(entry): name for name, entry in trees.walk(tree)}
        entries = tuple(trees.every_entry(tree))
        requests = tuple(
            chain.from_iterable(
                component_requests(
                    names.get(id(entry), "_metadata"),
                    entry,
                    device=device,
                    dtype=entry.cast or (self.dtype if is_castable(entry.dtype) else None),
                )
                for entry in entries
            )
        )
        prepared = plan_transfer(checkpoint, requests, share_storages=True, options=self.options)
        return StateDictJob(
            checkpoint=checkpoint,
            requests=requests,
            prepared=prepared,
            key=key or None,
            tree=tree,
            entries=entries,
            whole=self.whole,
        )

    def offers(self) -> Sequence[Change]:
        """See ``LoadRequest.offers``."""
        devices = (device for device in other_devices({"": device_name(self.device)}) if device != "auto")
        return [*(Change(device=device) for device in devices), Change(dtype="bfloat16")]


class StateDictJob(LoadJob, frozen=True, kw_only=True):
    """A decided load of a state dict."""

    #: The state dict or object, with ``Entry`` leaves.
    tree: Any
    #: See ``StateDictRequest.whole``.
    whole: bool = False
    #: Every entry of it, once; ``requests`` are for their components.
    entries: tuple[Entry, ...]

    subject: ClassVar[Subject] = "checkpoint"

    @property
    def loaded(self) -> int:
        """See ``LoadJob.loaded``; each name counts."""
        return sum(1 for _ in trees.walk(self.tree))

    @property
    def total(self) -> int:
        """See ``LoadJob.total``: the tensors of the checkpoint, by name."""
        return sum(1 for _ in trees.walk(self.checkpoint.index.tree))

    def install(self, fetched: tuple[list[torch.Tensor], RunResult]) -> Loaded:
        """See ``LoadJob.install``; the value is the state dict."""
        tensors, result = fetched
        values = with_tensors(self.tree, self.entries, tensors, file=self.checkpoint.path)
        return Loaded(result=result, value=values if self.whole else _ordered(values, like=values))


def _apply_rules(tree: Mapping[str, object], rules: Sequence[Rule], checkpoint: OpenCheckpoint) -> Mapping[str, object]:
    """Return a flat state dict: the tensors after the rules, and extra state and the other values unchanged."""
    states = whole_states(tree)
    tensors = outside(states, trees.flatten(tree, checkpoint.limits).items())
    flat: dict[str, object] = {**apply_rules(tensors, rules)}
    values = [each for each in trees.leaves(tree) if not isinstance(each[1], Entry)]
    for name, value in (outside(states, values) | states).items():
        if name in flat:
            raise MismatchError(
                "rules map a tensor to the name of a different value", file=checkpoint.path, tensor=name
            )
        flat[name] = value
    return _ordered(flat, like=tree)


def _ordered(values: Mapping[str, object], *, like: object) -> OrderedDict[str, Any]:
    """Return values as an OrderedDict with the attributes (``_metadata``) of a given mapping."""
    ordered = OrderedDict(values)
    ordered.__dict__.update(getattr(like, "__dict__", {}))
    return ordered
