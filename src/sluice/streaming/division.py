"""Divide the weights of a model into units: those that the same blocks use are read together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from torch import nn

from sluice import _options as options
from sluice._dtypes import ITEM_BYTES, torch_dtype
from sluice._geometry import round_up
from sluice._options import TransferOptions
from sluice.loading.module_job import ModuleJob
from sluice.modules.blocks import Block
from sluice.modules.parked import ParkedParameter
from sluice.planning.streaming import Step, StreamedUnit, Streaming, decide_streaming
from sluice.reading.transfer import plan_transfer
from sluice.records import LoadPlan, Request
from sluice.streaming.lookup import looks_up_rows
from sluice.streaming.units import UnitPlan, Weight

__all__ = ["Division", "divide"]


class Division(Struct, frozen=True, kw_only=True, eq=False):
    """The units of a model, and which of them stay in memory."""

    #: The blocks of the model.
    blocks: tuple[Block, ...]
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


def divide(job: ModuleJob, blocks: Sequence[Block], memory_bytes: int, transfer: TransferOptions) -> Division:
    """Return the units of a model with these blocks, and which of them stay in memory.

    Args:
        job: The load of the whole model.
        blocks: Its blocks.
        memory_bytes: Bytes for all weights.
        transfer: How bytes are moved.
    """
    nearest = _nearest_blocks(blocks)
    large = _streamable(job, nearest, options.STREAMED_BYTES)
    small_bytes = _bytes(request for i, request in enumerate(job.requests) if i not in large)
    if small_bytes > memory_bytes * options.SMALL_WEIGHTS_SHARE:
        large = _streamable(job, nearest, 1)
    groups: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for position, used_by in large.items():
        groups[used_by].append(position)
    units = [_plan_unit(job, blocks[used_by[0]].path, members, transfer) for used_by, members in groups.items()]
    others = tuple(i for i in range(len(job.requests)) if i not in large)
    return Division(
        blocks=tuple(blocks),
        used_by=tuple(groups),
        members=tuple(map(tuple, groups.values())),
        units=tuple(units),
        others=others,
        decision=decide_streaming(
            [StreamedUnit(name=unit.name, nbytes=unit.nbytes) for unit in units],
            list(_steps(blocks, list(groups))),
            fixed_bytes=_bytes(job.requests[i] for i in others),
            memory_bytes=memory_bytes,
        ),
    )


def _nearest_blocks(blocks: Sequence[Block]) -> dict[int, int]:
    """Return the innermost block around each module, by the identity of the module."""
    found: dict[int, int] = {}
    for number, block in enumerate(blocks):  # outer blocks come before those inside of them
        found.update((id(part), number) for part in block.module.modules())
    return found


def _streamable(job: ModuleJob, nearest: Mapping[int, int], least_bytes: int) -> dict[int, tuple[int, ...]]:
    """Return the requests that may be streamed, each with the blocks that use it."""
    found: dict[int, tuple[int, ...]] = {}
    for position, (slot, request) in enumerate(zip(job.match.slots, job.requests, strict=True)):
        state, tensor = job.state, job.state.tensors[slot]
        ordinary = type(tensor) is nn.Parameter and tensor.is_meta and not request.existing and not request.replaces
        shared = slot in state.aliases or slot in state.followers or slot in state.shards
        blocks = {nearest.get(id(owner.module)) for owner in state.owners[slot]}
        if ordinary and not shared and None not in blocks and _bytes([request]) >= least_bytes:
            found[position] = tuple(sorted(block for block in blocks if block is not None))
    return found


def _plan_unit(job: ModuleJob, name: str, positions: Sequence[int], transfer: TransferOptions) -> UnitPlan:
    requests = [job.requests[i] for i in positions]
    prepared = plan_transfer(job.checkpoint, requests, options=transfer, serial_bytes=0)
    weights = []
    for position in positions:
        slot = job.match.slots[position]
        tensor, path = job.state.tensors[slot], job.state.outline.slots[slot].names[0]
        dtype = torch_dtype(job.requests[position].dtype)
        finished = tensor if tensor.dtype == dtype else nn.Parameter(tensor.detach().to(dtype), tensor.requires_grad)
        parked = ParkedParameter.of(finished, path, job.requests[position].device)
        weights.append(Weight(owners=job.state.owners[slot], original=tensor, parked=parked))
    return UnitPlan(name=name, nbytes=_memory_bytes(prepared.plan), prepared=prepared, weights=tuple(weights))


def _memory_bytes(plan: LoadPlan) -> int:
    """Return the bytes of the memory that a unit takes."""
    step = options.RECYCLED_STEP_BYTES
    pairs = zip(plan.targets, plan.blocks, strict=True)
    own = [block.lead_bytes + target.nbytes for target, block in pairs if block.kind not in {"arena", "empty"}]
    return sum(round_up(nbytes, step) for nbytes in (*own, *plan.arenas))


def _steps(blocks: Sequence[Block], groups: Sequence[tuple[int, ...]]) -> Iterator[Step]:
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
