"""Loads that quantize: the requests of a match whose weights are quantized when they have arrived."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from msgspec.structs import replace

from sluice._dtypes import torch_dtype
from sluice._units import counted, format_bytes
from sluice.dtensors.description import is_dtensor
from sluice.matching.match import Match
from sluice.modules.collect import ModuleState
from sluice.quantizing.functions import quantize_function
from sluice.quantizing.weights import QuantizedWeight, find_quantized
from sluice.reading.transfer import Prepared
from sluice.records import Finisher, Request

__all__ = ["describe_quantized", "quantized_weights", "with_finishers", "with_transient"]


def quantized_weights(state: ModuleState, matched: Match, quantize: object) -> dict[int, QuantizedWeight]:
    """Return the weights that are quantized, by the positions of their requests.

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
    slots = {(id(owner.module), owner.name): slot for slot, owners in enumerate(state.owners) for owner in owners}
    found: dict[int, QuantizedWeight] = {}
    quantized: dict[int, set[tuple[int, str]]] = {}
    for weight in find_quantized(state.module, quantize_function(quantize), forms):
        place = (id(weight.single.module), weight.single.name)
        slot = slots.get(place)
        if slot is None or slot not in requests:
            raise ValueError(f"quantize=: the checkpoint does not fill {weight.single.path}.{weight.single.name}")
        position, request = requests[slot]
        _check(request)
        found[position] = weight
        quantized.setdefault(slot, set()).add(place)
    for slot, places in quantized.items():
        owners = {(id(owner.module), owner.name) for owner in state.owners[slot]}
        if owners != places or slot in state.aliases:
            name = state.outline.slots[slot].names[0]
            raise ValueError(
                f"quantize=: {name!r} is tied to a tensor that is not quantized; leave it out, as with filter_fn of "
                "quantize_"
            )
    return found


def _check(request: Request) -> None:
    if request.existing or request.replaces:
        raise ValueError(f"quantize=: {request.name!r} has memory already; build the model under sluice.empty_init()")


def with_finishers(matched: Match, weights: Mapping[int, QuantizedWeight]) -> Match:
    """Return the match whose requests name what finishes them."""
    return replace(
        matched,
        requests=tuple(
            replace(
                request, finisher=Finisher(name=request.name, shape=request.entry.shape, finished_sizes=found.sizes)
            )
            if (found := weights.get(i)) is not None
            else request
            for i, request in enumerate(matched.requests)
        ),
    )


def with_transient(prepared: Prepared, weights: Mapping[int, QuantizedWeight]) -> Prepared:
    """Return the plan whose predictions have the memory that quantizing one weight takes."""
    plan = prepared.plan
    more: dict[str, int] = {}
    for weight in weights.values():
        place = str(weight.device)
        more[place] = max(more.get(place, 0), weight.transient_bytes(plan.facts.cores))
    devices = [
        replace(device, working_bytes=device.working_bytes + more.get(device.device, 0)) for device in plan.devices
    ]
    host, peaks = more.get("cpu", 0), plan.predicted
    peaks = dataclasses.replace(peaks, anon_bytes=peaks.anon_bytes + host, total_bytes=peaks.total_bytes + host)
    return replace(prepared, plan=replace(plan, predicted=peaks, devices=tuple(devices)))


def describe_quantized(weights: Mapping[int, QuantizedWeight]) -> str:
    """Return a note on the weights that are quantized."""
    kinds = sorted({type(weight.template).__name__ for weight in weights.values()})
    before = sum(weight.whole_bytes for weight in weights.values())
    after = sum(sum(weight.sizes) for weight in weights.values())
    apart = sum(weight.pieces is not None for weight in weights.values())
    how = f"{counted(apart, 'weight')} in pieces of rows" if apart else "each in whole"
    return (
        f"{counted(len(weights), 'weight')} quantized to {', '.join(kinds)}: {format_bytes(before)} became "
        f"{format_bytes(after)}, {how}"
    )
