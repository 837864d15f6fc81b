"""Decide how a model is streamed: its blocks, its units, what stays in memory, and how each unit is read.

Everything that headers can show is settled here: names, shapes, dtypes and memory are those of a load.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import nn

from sluice import _options as options
from sluice._dtypes import ITEM_BYTES, torch_dtype
from sluice._errors import BudgetError, StreamError
from sluice._geometry import round_up
from sluice._options import MemoryLimits, TransferOptions
from sluice._units import format_bytes, parse_bytes
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.dtensors.description import is_dtensor
from sluice.loading.module_job import ModuleJob, ModuleRequest
from sluice.modules.blocks import Block, find_blocks, smallest_blocks
from sluice.modules.parked import ParkedParameter
from sluice.planning.budget import HOST, find_limits
from sluice.planning.streaming import Step, StreamedUnit, Streaming, decide_streaming
from sluice.reading.transfer import plan_transfer
from sluice.records import LoadPlan, Request
from sluice.streaming.lookup import Lookup, looks_up_rows
from sluice.streaming.units import UnitPlan, Weight

__all__ = ["StreamJob", "StreamRequest", "decide_stream"]


class StreamRequest(Struct, frozen=True, kw_only=True):
    """Arguments of ``sluice.stream``, without the checkpoint."""

    #: What fills the model; its memory limits are those of the caller.
    load: ModuleRequest
    #: Bytes for the weights; None for what the limits leave.
    memory_bytes: int | None = None
    #: Paths of the blocks, with ``*`` for any characters; None finds them.
    blocks: tuple[str, ...] | None = None


class StreamJob(Struct, frozen=True, kw_only=True, eq=False):
    """A decided stream; nothing is touched yet."""

    #: The load of the whole model.
    whole: ModuleJob
    #: The load of what stays in memory.
    resident: ModuleJob
    #: The blocks of the model.
    blocks: tuple[Block, ...]
    #: The units that pass through memory.
    units: tuple[UnitPlan, ...]
    #: Positions of the units that each block uses.
    uses: tuple[tuple[int, ...], ...]
    #: Embeddings of which only rows are read.
    lookups: tuple[Lookup, ...]
    #: Bytes of what stays and of what passes through.
    decision: Streaming
    #: Device of the streamed weights.
    device: str

    @property
    def streamed_bytes(self) -> int:
        """Bytes that are read for each call that uses every unit."""
        used = set(chain.from_iterable(self.uses))
        return sum(unit.prepared.plan.read_bytes for number, unit in enumerate(self.units) if number in used)


def decide_stream(request: StreamRequest, checkpoint: OpenCheckpoint) -> StreamJob:
    """Decide a stream; nothing is touched.

    Raises:
        MismatchError: The checkpoint does not fit the model.
        StreamError: The model is of a kind that cannot be streamed.
        BudgetError: The memory is too small for the largest block.
        ValueError: ``blocks`` names no part of the model.
    """
    model = request.load.model
    _refuse(model)
    job = request.load.job(checkpoint)
    memory_bytes = _memory_left(job, request.load.memory) if request.memory_bytes is None else request.memory_bytes
    transfer = replace(request.load.options, facts=job.plan.facts)
    found = _divide(job, find_blocks(model, request.blocks), memory_bytes, transfer)
    if not found.decision.fits(memory_bytes) and request.blocks is None:
        found = _divide(job, smallest_blocks(model), memory_bytes, transfer)
    if not found.decision.fits(memory_bytes):
        raise BudgetError(
            "the memory is too small for the largest block, and what always stays",
            file=checkpoint.path,
            expected=f"memory={format_bytes(memory_bytes)}",
            found=f"at least {format_bytes(found.decision.smallest_bytes)}",
        )
    return found


def _refuse(model: nn.Module) -> None:
    """Refuse models whose calls cannot be followed."""
    for path, part in model.named_modules():
        reason = None
        if isinstance(part, torch.jit.ScriptModule):
            reason = "torch.jit compiled it"
        elif getattr(part, "_compiled_call_impl", None) is not None:
            reason = "torch.compile compiled it"
        elif hasattr(part, "_hf_hook"):
            reason = "accelerate has attached a hook to it"
        elif any(type(parameter) is ParkedParameter for parameter in part.parameters(recurse=False)):
            reason = "it is streamed already"
        elif any(map(is_dtensor, part.parameters(recurse=False))):
            reason = "its parameters are DTensors"
        if reason is not None:
            raise StreamError(f"the module {path!r} cannot be streamed: {reason}" if path else f"{reason}: no streaming")


def _memory_left(job: ModuleJob, memory: MemoryLimits) -> int:
    """Return the bytes for weights that the limits leave, without the gate and a reserve for activations."""
    device = _device(job)
    limits = {limit.where: limit.nbytes for limit in find_limits(job.plan.facts, memory)}
    found = limits.get(HOST if device == "cpu" else device)
    if found is None:
        raise BudgetError(f"the free memory of {device} is unknown", advice="Say how much to use, as memory='6GiB'.")
    gate = parse_bytes(memory.staging) + options.OVERHEAD_BYTES if device == "cpu" else 0
    return max(0, int(found * (1 - options.AUTO_RESERVE)) - gate)


def _device(job: ModuleJob) -> str:
    """Return the device of the model's weights."""
    devices = Counter(request.device for request in job.requests)
    return devices.most_common(1)[0][0] if devices else "cpu"


def _divide(job: ModuleJob, blocks: Sequence[Block], memory_bytes: int, transfer: TransferOptions) -> StreamJob:
    """Return the stream of a model that is divided into these blocks."""
    nearest = _nearest_blocks(job.state.module, blocks)
    large = _streamable(job, nearest, options.STREAMED_BYTES)
    small_bytes = sum(_nbytes(each) for i, each in enumerate(job.requests) if i not in large)
    if small_bytes > memory_bytes * options.SMALL_WEIGHTS_SHARE:
        large = _streamable(job, nearest, 1)
    groups: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for position, used_by in large.items():
        groups[used_by].append(position)
    plans = [_plan_unit(job, blocks[used_by[0]].path, members, transfer) for used_by, members in groups.items()]
    fixed = [i for i in range(len(job.requests)) if i not in large]
    decision = decide_streaming(
        [StreamedUnit(name=plan.name, nbytes=plan.nbytes) for plan in plans],
        list(_steps(blocks, [_whole(blocks, used_by) for used_by in groups])),
        fixed_bytes=sum(_nbytes(job.requests[i]) for i in fixed),
        memory_bytes=memory_bytes,
    )
    staying = [i for number, members in enumerate(groups.values()) if number in decision.resident for i in members]
    streamed = [number for number in range(len(plans)) if number not in decision.resident]
    new_number = {old: new for new, old in enumerate(streamed)}
    uses: list[list[int]] = [[] for _ in blocks]
    lookups = []
    for number, (used_by, members) in enumerate(groups.items()):
        for block in used_by if number in new_number else ():
            if block in _whole(blocks, used_by):
                uses[block].append(new_number[number])
            else:
                request = job.requests[members[0]]
                lookups.append(
                    Lookup(
                        block=block,
                        unit=new_number[number],
                        request=request,
                        checkpoint=job.checkpoint,
                        transfer=transfer,
                    )
                )
    return StreamJob(
        whole=job,
        resident=job.part(sorted([*fixed, *staying]), transfer),
        blocks=tuple(blocks),
        units=tuple(plans[number] for number in streamed),
        uses=tuple(map(tuple, uses)),
        lookups=tuple(lookups),
        decision=decision,
        device=_device(job),
    )


def _whole(blocks: Sequence[Block], used_by: Sequence[int]) -> tuple[int, ...]:
    """Return the blocks that need all of their weights, not only rows."""
    return tuple(block for block in used_by if not looks_up_rows(blocks[block].module))


def _nearest_blocks(module: nn.Module, blocks: Sequence[Block]) -> dict[int, int]:
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
        if ordinary and not shared and None not in blocks and _nbytes(request) >= least_bytes:
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
        parked = ParkedParameter.of(finished, path, torch.device(job.requests[position].device))
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
    for number, used_by in enumerate(groups):
        for block in used_by:
            own[block].add(number)
    for number, block in enumerate(blocks):
        units, around = set(own[number]), block.parent
        while around is not None:
            units |= own[around]
            around = blocks[around].parent
        yield Step(units=frozenset(units), optional=block.optional)


def _nbytes(request: Request) -> int:
    return request.entry.numel * ITEM_BYTES[request.dtype]
