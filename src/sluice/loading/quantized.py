"""Loads that quantize: the requests of a match whose weights are quantized when they have arrived."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import nn

from sluice._dtypes import torch_dtype
from sluice._units import counted, format_bytes
from sluice.matching.match import Match
from sluice.modules.collect import ModuleState, Owner
from sluice.quantizing.functions import quantize_function
from sluice.quantizing.weights import QuantizedWeight, find_quantized
from sluice.reading.transfer import Prepared, with_more
from sluice.records import Finisher, Request
from sluice.sharding.dtensors import is_dtensor

__all__ = ["QuantizedMatch", "quantized"]


class QuantizedMatch(Struct, frozen=True, kw_only=True):
    """A match of which weights are quantized when they have arrived."""

    #: The module, with slots of their own for weights that were tied to tensors that are not quantized.
    state: ModuleState
    #: The match, whose requests name what finishes them.
    match: Match
    #: The weights, by the positions of their requests.
    weights: Mapping[int, QuantizedWeight]
    #: Notes for the report, one sentence each.
    notes: tuple[str, ...] = ()

    def predicted(self, prepared: Prepared) -> Prepared:
        """Return the plan with the memory that computing one weight takes."""
        more: dict[str, int] = {}
        for weight in self.weights.values():
            place = str(weight.device)
            more[place] = max(more.get(place, 0), weight.transient_bytes(prepared.plan.facts.cores))
        return with_more(prepared, more)


def quantized(state: ModuleState, matched: Match, quantize: object) -> QuantizedMatch:
    """Return the match of a load that quantizes.

    Raises:
        TypeError: ``quantize`` is neither a configuration of torchao nor a function.
        ValueError: It changes more than single weights, a weight cannot be quantized while it is loaded, or the model
            is divided over ranks.
    """
    for one, tensor in zip(state.outline.slots, state.tensors, strict=True):
        if is_dtensor(tensor):
            # Scales may need numbers of other ranks, whose weights arrive in different orders.
            raise ValueError(f"quantize=: {one.names[0]!r} is a DTensor; load the model first, and quantize it then")
    requests = dict(zip(matched.slots, enumerate(matched.requests), strict=True))
    forms = {
        id(state.tensors[slot]): (torch_dtype(request.dtype), torch.device(request.device))
        for slot, (_, request) in requests.items()
    }
    slots = {_key(owner): slot for slot, owners in enumerate(state.owners) for owner in owners}
    found: dict[int, list[QuantizedWeight]] = {}
    for weight in find_quantized(state.module, quantize_function(quantize), forms):
        slot = slots.get((id(weight.single.module), weight.single.name))
        if slot is None or slot not in requests:
            raise ValueError(f"quantize=: the checkpoint does not fill {weight.single.full_name}")
        _check(requests[slot][1], state, slot)
        found.setdefault(slot, []).append(weight)
    untied: list[str] = []
    for slot, weights in list(found.items()):
        names = tuple(weight.single.full_name for weight in weights)
        places = {(id(weight.single.module), weight.single.name) for weight in weights}
        if places < {_key(owner) for owner in state.owners[slot]}:
            state, matched = _untied(state, matched, slot, places, names)
            found[len(state.tensors) - 1] = [replace(weight, untied=True) for weight in found.pop(slot)]
            untied.append(names[0])
    last = {slot: weights[-1] for slot, weights in found.items()}
    notes = (
        _description(last.values()),
        *(f"{name!r} is not tied any more: it is quantized, and what it was tied to is not" for name in untied),
    )
    return replace(_with_finishers(state, matched, last), notes=notes)


def _with_finishers(state: ModuleState, matched: Match, weights: Mapping[int, QuantizedWeight]) -> QuantizedMatch:
    """Return a match whose requests name what finishes them, from the weights by their slots."""
    requests, by_position = list(matched.requests), {}
    for position, slot in enumerate(matched.slots):
        if (weight := weights.get(slot)) is not None:
            request = requests[position]
            finisher = Finisher(name=request.name, shape=request.entry.shape, finished_sizes=weight.sizes)
            # Memory of its own, also where the module has some.
            replaces = request.existing or request.replaces
            requests[position] = replace(request, finisher=finisher, existing=False, replaces=replaces)
            by_position[position] = weight
    return QuantizedMatch(state=state, match=replace(matched, requests=tuple(requests)), weights=by_position)


def _key(owner: Owner) -> tuple[int, str]:
    return id(owner.module), owner.name


def _check(request: Request, state: ModuleState, slot: int) -> None:
    if request.existing or request.replaces:
        raise ValueError(f"quantize=: {request.name!r} has memory already; build the model under sluice.empty_init()")
    if slot in state.aliases:
        raise ValueError(
            f"quantize=: {request.name!r} shares its memory with another tensor; leave it out, as with filter_fn of "
            "quantize_"
        )


def _untied(
    state: ModuleState, matched: Match, slot: int, places: AbstractSet[tuple[int, str]], names: tuple[str, ...]
) -> tuple[ModuleState, Match]:
    """Give some owners of a tied tensor a slot and a request of their own, as quantizing unties them in a loaded model.

    Args:
        state: The module.
        matched: Its match.
        slot: The slot of the tied tensor.
        places: These owners.
        names: The names of the tensor in them.
    """
    owners, one = state.owners[slot], state.outline.slots[slot]
    rest = tuple(owner for owner in owners if _key(owner) not in places)
    slots = [*state.outline.slots, replace(one, names=names)]
    slots[slot] = replace(one, names=tuple(name for name in one.names if name not in names))
    divided = [*state.owners, tuple(owner for owner in owners if _key(owner) in places)]
    divided[slot] = rest
    own = nn.Parameter(torch.empty_like(state.tensors[slot]), requires_grad=state.tensors[slot].requires_grad)
    request = matched.requests[matched.slots.index(slot)]
    return (
        replace(
            state,
            outline=replace(state.outline, slots=tuple(slots)),
            tensors=(*state.tensors, own),
            owners=tuple(divided),
        ),
        replace(
            matched,
            requests=(*matched.requests, replace(request, name=names[0])),
            slots=(*matched.slots, len(state.tensors)),
            tied=tuple(slot.names for slot in slots if len(slot.names) > 1),
        ),
    )


def _description(weights: Collection[QuantizedWeight]) -> str:
    """Return a note on the weights that are quantized."""
    kinds = sorted({type(weight.template).__name__ for weight in weights})
    before = sum(weight.whole_bytes for weight in weights)
    after = sum(sum(weight.sizes) for weight in weights)
    apart = sum(weight.pieces is not None for weight in weights)
    how = f"{counted(apart, 'weight')} in pieces of rows" if apart else "each in whole"
    return (
        f"{counted(len(weights), 'weight')} quantized to {', '.join(kinds)}: {format_bytes(before)} became "
        f"{format_bytes(after)}, {how}"
    )
