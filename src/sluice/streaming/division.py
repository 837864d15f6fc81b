"""Divide the weights of a model into units: those that the same blocks use are read together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import nn

from sluice import _defaults as defaults
from sluice._dtypes import ITEM_BYTES, torch_dtype
from sluice._options import TransferOptions
from sluice.loading.module_job import ModuleJob
from sluice.modules.blocks import ModuleBlock
from sluice.modules.collect import Owner
from sluice.modules.unloaded import ParkedParameter
from sluice.planning.streaming import Step, Streaming, decide_streaming
from sluice.reading.transfer import plan_transfer
from sluice.records import LoadPlan, Request
from sluice.records.geometry import round_up
from sluice.streaming.host_weights import resting_bytes
from sluice.streaming.lookup import looks_up_rows
from sluice.streaming.units import HeldParameter, StreamedWeight, UnitPlan

if TYPE_CHECKING:
    from sluice.quantizing.saved import OpenedWeight

__all__ = ["Division", "divide", "held_parameters", "with_packed_rest"]

#: Parts of the memory of which one or more are tried for weights that rest as they are in the file.
_PARTS = 16


class Division(Struct, frozen=True, kw_only=True, eq=False):
    """The units of a model, and which of them stay in memory."""

    #: The blocks of the model.
    blocks: tuple[ModuleBlock, ...]
    #: The blocks that use each unit, by their positions.
    used_by: tuple[tuple[int, ...], ...]
    #: The requests of each unit, by their positions in the job.
    members: tuple[tuple[int, ...], ...]
    #: How each unit is read.
    units: tuple[UnitPlan, ...]
    #: The requests that belong to no unit.
    others: tuple[int, ...]
    #: The units that stay in memory.
    decision: Streaming
    #: Decides which stay in other bytes of memory.
    decide: Callable[[int], Streaming]


def held_parameters(job: ModuleJob, quantized: Iterable[OpenedWeight]) -> tuple[HeldParameter, ...]:
    """Return what the requests of a job fill, in their order.

    Args:
        job: The load of the whole model.
        quantized: Quantized weights, in whose place the model has parameters for their plain tensors.
    """
    state, filled = job.state, {id(job.state.tensors[slot]): i for i, slot in enumerate(job.match.slots)}
    found = [
        HeldParameter(
            positions=tuple(filled[id(part)] for part in each.parts),
            assembled=True,
            path=_path_of(state.outline.slots[job.match.slots[filled[id(each.parts[0])]]].names[0], each),
            tensor=each.weight,
            owners=tuple(Owner(module=module, name=name) for module, name in each.owners),
        )
        for each in quantized
        if all(id(part) in filled for part in each.parts)
    ]
    inner = {position for held in found for position in held.positions}
    found += [
        HeldParameter(
            positions=(position,),
            assembled=False,
            path=state.outline.slots[slot].names[0],
            tensor=state.tensors[slot],
            owners=state.owners[slot],
        )
        for position, slot in enumerate(job.match.slots)
        if position not in inner
    ]
    return tuple(sorted(found, key=lambda held: min(held.positions)))


def _path_of(inner: str, weight: OpenedWeight) -> str:
    """Return the name of a weight in the model, by that of one of its plain tensors."""
    module, dot, _ = inner.rpartition(".")
    return f"{module}{dot}{weight.owners[0][1]}"


def divide(
    job: ModuleJob,
    held: Sequence[HeldParameter],
    blocks: Sequence[ModuleBlock],
    memory_bytes: int,
    transfer: TransferOptions,
) -> Division:
    """Return the units of a model with these blocks, and which of them stay in memory.

    Args:
        job: The load of the whole model.
        held: What it fills and may be streamed.
        blocks: Its blocks.
        memory_bytes: Bytes for all weights.
        transfer: How bytes are moved.
    """
    nearest = _nearest_blocks(blocks, job.state.module)
    groups = _groups(job, held, nearest, defaults.STREAMED_BYTES)
    members = [_positions(group) for group in groups.values()]
    own_bytes = _bytes(job.requests[i] for i in {i for each in held for i in each.positions})
    small_bytes = own_bytes - sum(_bytes(job.requests[i] for i in each) for each in members)
    if small_bytes > memory_bytes * defaults.SMALL_WEIGHTS_SHARE:
        groups = _groups(job, held, nearest, 1)
        members = [_positions(group) for group in groups.values()]
    units = [_plan_unit(job, group, transfer) for group in groups.values()]
    streamed = {position for each in members for position in each}
    others = tuple(i for i in range(len(job.requests)) if i not in streamed)
    sizes, steps = [unit.nbytes for unit in units], list(_steps(blocks, list(groups)))
    fixed_bytes = _bytes(job.requests[i] for i in others)

    def decide(memory_bytes: int) -> Streaming:
        return decide_streaming(sizes, steps, fixed_bytes=fixed_bytes, memory_bytes=memory_bytes)

    return Division(
        blocks=tuple(blocks),
        used_by=tuple(groups),
        members=tuple(members),
        units=tuple(units),
        others=others,
        decision=decide(memory_bytes),
        decide=decide,
    )


def with_packed_rest(division: Division, memory_bytes: int) -> tuple[Division, int]:
    """Let packed weights, as those of GGUF, rest in memory, so that calls read the fewest bytes.

    They rest as they are in the file, and each call decodes them; finished weights take the other memory.

    Args:
        division: The units; returned as it is if there are no packed weights.
        memory_bytes: Bytes for all weights.

    Returns:
        The division, and the bytes for what rests.
    """
    fills = (fill for unit in division.units for target in unit.prepared.plan.targets for fill in target.fills)
    if all(fill.elements.packing is None for fill in fills):
        return division, 0
    whole = [not all(looks_up_rows(division.blocks[i].module) for i in used_by) for used_by in division.used_by]
    sizes = [resting_bytes(unit.prepared.plan.reads) for unit in division.units]
    best, least = (division, 0), sum(sizes)
    for rest in range(0, memory_bytes, max(1, memory_bytes // _PARTS)):
        decision = division.decide(memory_bytes - rest)
        passing = sum(size for i, size in enumerate(sizes) if whole[i] and i not in decision.resident)
        slower = decision.reads_all_ahead < division.decision.reads_all_ahead
        if decision.fits(memory_bytes - rest) and not slower and max(0, passing - rest) < least:
            best, least = (replace(division, decision=decision), rest), max(0, passing - rest)
    return best


def _nearest_blocks(blocks: Sequence[ModuleBlock], model: nn.Module) -> dict[int, int]:
    """Return the innermost block around each module, by the identity of the module."""
    found: dict[int, int] = {}
    for number, block in enumerate(blocks):  # outer blocks come before those inside of them
        found.update((id(part), number) for part in block.module.modules())
    for part in model.modules():
        if isinstance(part, nn.TransformerEncoder):  # it takes its fast path if the first layer has plain parameters
            for first in part.layers[0].modules():
                found.pop(id(first), None)
    return found


def _groups(
    job: ModuleJob, held: Iterable[HeldParameter], nearest: Mapping[int, int], least_bytes: int
) -> dict[tuple[int, ...], list[HeldParameter]]:
    """Return the parameters that may be streamed, by the blocks that use them."""
    found: defaultdict[tuple[int, ...], list[HeldParameter]] = defaultdict(list)
    for each in held:
        blocks = {nearest.get(id(owner.module)) for owner in each.owners}
        nbytes = _bytes(job.requests[position] for position in each.positions)
        if None not in blocks and nbytes >= least_bytes and all(_is_ordinary(job, i) for i in each.positions):
            found[tuple(sorted(block for block in blocks if block is not None))].append(each)
    return found


def _is_ordinary(job: ModuleJob, position: int) -> bool:
    """Return whether a request fills a parameter on the meta device that shares its memory with no other tensor."""
    state, slot, request = job.state, job.match.slots[position], job.requests[position]
    ordinary = type(state.tensors[slot]) is nn.Parameter and state.tensors[slot].is_meta
    shared = slot in state.aliases or slot in state.shards
    return ordinary and not shared and not request.existing and not request.replaces


def _positions(group: Iterable[HeldParameter]) -> tuple[int, ...]:
    """Return the requests of parameters, each once: two weights may consist of the same tensors."""
    return tuple(dict.fromkeys(position for each in group for position in each.positions))


def _plan_unit(job: ModuleJob, group: Sequence[HeldParameter], transfer: TransferOptions) -> UnitPlan:
    positions = _positions(group)
    requests = [job.requests[i] for i in positions]
    prepared = plan_transfer(job.checkpoint, requests, options=transfer, serial_bytes=0)
    places = {position: place for place, position in enumerate(positions)}
    weights = []
    for each in group:
        first = job.requests[each.positions[0]]
        dtype = each.tensor.dtype if each.assembled else torch_dtype(first.dtype)
        finished = torch.empty_strided(each.tensor.shape, each.tensor.stride(), dtype=dtype, device="meta")
        parked = ParkedParameter.of(nn.Parameter(finished, each.tensor.requires_grad), each.path, first.device)
        parts = tuple(places[position] for position in each.positions)
        weights.append(StreamedWeight(parts=parts, held=each, parked=parked))
    return UnitPlan(nbytes=_memory_bytes(prepared.plan), prepared=prepared, weights=tuple(weights))


def _memory_bytes(plan: LoadPlan) -> int:
    """Return the bytes of the memory that a unit takes."""
    step = defaults.RECYCLED_STEP_BYTES
    pairs = zip(plan.targets, plan.blocks, strict=True)
    own = [block.offset + target.nbytes for target, block in pairs if block.kind not in {"arena", "empty"}]
    return sum(round_up(nbytes, step) for nbytes in (*own, *plan.arenas))


def _steps(blocks: Sequence[ModuleBlock], groups: Sequence[tuple[int, ...]]) -> Iterator[Step]:
    """Yield what each block needs together with the blocks around it, in the order of the blocks."""
    own: list[set[int]] = [set() for _ in blocks]
    for unit, used_by in enumerate(groups):
        for number in used_by:
            if not looks_up_rows(blocks[number].module):
                own[number].add(unit)
    for number, block in enumerate(blocks):
        units, around = set(own[number]), block.parent
        while around is not None:
            units |= own[around]
            around = blocks[around].parent
        yield Step(units=frozenset(units), optional=block.optional)


def _bytes(requests: Iterable[Request]) -> int:
    """Return the bytes of finished tensors."""
    return sum(request.entry.numel * ITEM_BYTES[request.dtype] for request in requests)
