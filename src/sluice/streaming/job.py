"""Decide how a model is streamed: its blocks, its units, what stays in memory, and how each unit is read.

Everything that headers can show is settled here: names, shapes, dtypes and memory are those of a load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import nn

from sluice import _defaults as defaults
from sluice._arguments import memory_limits
from sluice._errors import BudgetError, StreamError
from sluice._messages import listed
from sluice._options import NO_LIMITS, Memory, MemoryLimits, TransferOptions
from sluice._units import format_bytes, parse_bytes
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.loading.module_job import ModuleJob
from sluice.loading.module_request import EntriesRequest, ModuleRequest
from sluice.modules.blocks import ModuleBlock, find_blocks, smallest_blocks
from sluice.modules.unloaded import refuse_streamed
from sluice.planning.budget import HOST, device_limit, find_limits
from sluice.planning.streaming import Streaming, choose_resting
from sluice.reports.stream import StreamPlan
from sluice.sharding.dtensors import is_dtensor
from sluice.streaming.division import Division, divide, held_parameters, with_packed_rest
from sluice.streaming.host_weights import resting_bytes
from sluice.streaming.lookup import Lookup, looks_up_rows
from sluice.streaming.units import UnitPlan

if TYPE_CHECKING:
    from sluice.quantizing.saved import OpenedWeight

__all__ = ["StreamJob", "StreamRequest", "decide_stream", "opened_request", "plan_stream", "stream_memory"]


class StreamRequest(Struct, frozen=True, kw_only=True):
    """Arguments of ``sluice.stream``, without the checkpoint."""

    #: The load that fills the model.
    load: ModuleRequest | EntriesRequest
    #: Bytes for the weights where they are used; None for the limits of the load, or what they leave.
    memory_bytes: int | None = None
    #: Paths of the blocks, with ``*`` for any name; None finds them.
    blocks: Sequence[str] | None = None
    #: Whether the model is trained; parameters that require gradients then stay in memory.
    train: bool = False
    #: Quantized weights, in whose place the model has parameters for their plain tensors.
    quantized: tuple[OpenedWeight, ...] = ()


def stream_memory(memory: Memory) -> tuple[MemoryLimits | None, int | None]:
    """Return the limits of the loads of a stream, or the bytes for its weights: one size limits no load.

    Raises:
        ValueError: See ``memory_limits``.
        TypeError: See ``memory_limits``.
    """
    if isinstance(memory, MemoryLimits):
        return memory, None
    limits = memory_limits(memory)
    return None, None if limits is None else parse_bytes(limits.host or 0)


class StreamJob(Struct, frozen=True, kw_only=True, eq=False):
    """A decided stream; nothing is touched yet."""

    #: The load of the whole model.
    whole: ModuleJob
    #: The load of what stays in memory.
    resident: ModuleJob
    #: The blocks of the model.
    blocks: tuple[ModuleBlock, ...]
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
    #: Positions of the units whose bytes rest in host memory.
    resting: frozenset[int] = frozenset()
    #: Positions of the units that stay in the window as long as every call uses them.
    kept: frozenset[int] = frozenset()
    #: Whether calls may need gradients.
    train: bool = False
    #: The quantized weights of the model, which are on the meta device again after the stream.
    quantized: tuple[OpenedWeight, ...] = ()

    @property
    def host_bytes(self) -> int:
        """Bytes of the files that rest in host memory, so that only the first call reads them."""
        return sum(self.units[number].prepared.plan.read_bytes for number in self.resting)

    @property
    def call_bytes(self) -> int:
        """Bytes that are read from the files for each call that uses every unit."""
        used = set(chain.from_iterable(self.uses)) - self.kept
        return sum(self.units[number].prepared.plan.read_bytes for number in used) - self.host_bytes


@contextmanager
def opened_request(
    request: StreamRequest, checkpoint: OpenCheckpoint
) -> Iterator[tuple[StreamRequest, OpenCheckpoint]]:
    """Give a model parameters for the plain tensors of its quantized weights, during the block.

    After it, the weights whose tensors were loaded consist of them, and the others are unchanged.

    Yields:
        The request, and the checkpoint that has names for the plain tensors.

    Raises:
        MismatchError: The checkpoint describes its quantized weights, and they are not those of the model.
        ValueError: ``dtype`` would cast the scales of quantized weights.
    """
    with request.load.opened(nullcontext(checkpoint)) as (opening, weights), opening as plain:
        yield replace(request, quantized=weights), plain


def decide_stream(request: StreamRequest, checkpoint: OpenCheckpoint) -> StreamJob:
    """Decide a stream; nothing is touched.

    Raises:
        MismatchError: The checkpoint does not fit the model.
        StreamError: The model is of a kind that cannot be streamed.
        BudgetError: The memory is too small for the largest block.
        ValueError: ``blocks`` names no part of the model.
    """
    stream, memory_bytes = _decide(request, checkpoint)
    if not stream.decision.fits(memory_bytes):
        error = BudgetError(
            "the memory is too small for the largest block, and what always stays",
            file=checkpoint.path,
            expected=f"memory={format_bytes(memory_bytes)}",
            found=f"at least {format_bytes(stream.decision.smallest_bytes)}",
        )
        trained = [name for name, each in request.load.model.named_parameters() if each.requires_grad]
        if request.train and trained:
            error.advice = (
                f"{listed('These require gradients, so that they stay', trained)}. Freeze what is not trained with "
                "requires_grad_(False) first."
            )
        raise error
    return stream


def plan_stream(request: StreamRequest, checkpoint: OpenCheckpoint) -> StreamPlan:
    """Return what a stream would hold and read; the errors are those of ``decide_stream`` but for ``BudgetError``.

    Args:
        request: Arguments of the stream.
        checkpoint: What would be read.
    """
    stream, memory_bytes = _decide(request, checkpoint)
    return StreamPlan(
        blocks=sum(map(bool, stream.uses)),
        memory_bytes=memory_bytes,
        smallest_bytes=stream.decision.smallest_bytes,
        resident_bytes=stream.decision.resident_bytes,
        window_bytes=stream.decision.window_bytes,
        host_bytes=stream.host_bytes,
        call_bytes=stream.call_bytes,
    )


def _decide(request: StreamRequest, checkpoint: OpenCheckpoint) -> tuple[StreamJob, int]:
    """Return the stream for the memory of the request, or for the smallest that is possible, and this memory."""
    model = request.load.model
    _refuse(model)
    job = request.load.job(checkpoint)
    memory_bytes = _memory_bytes(job, request)
    transfer = replace(request.load.options, facts=job.plan.facts)
    held = held_parameters(job, request.quantized)
    passing = [each for each in held if not (request.train and each.tensor.requires_grad)]
    found = divide(job, passing, find_blocks(model, request.blocks), memory_bytes, transfer)
    fits, passing_bytes = found.decision.fits(memory_bytes), found.decision.passing_bytes
    routed = any("expert" in block.group for block in found.blocks)  # most are skipped, which only lists can tell
    if request.blocks is None and (not fits or (passing_bytes and not routed)):
        smaller = divide(job, passing, smallest_blocks(model), memory_bytes, transfer)
        waits = smaller.decision.reads_all_ahead and not found.decision.reads_all_ahead
        if not fits or waits or smaller.decision.passing_bytes < passing_bytes * defaults.SMALLER_BLOCKS_SHARE:
            found = smaller
    found, rest = with_packed_rest(found, memory_bytes) if _device(job) == "cpu" else (found, 0)
    decided = _stream_job(job, found, transfer, rest or _resting_bytes(request, _device(job)))
    return replace(decided, train=request.train, quantized=request.quantized), memory_bytes


def _refuse(model: nn.Module) -> None:
    """Refuse models whose calls cannot be followed."""
    refuse_streamed(model, "be streamed: it is streamed already")
    for path, part in model.named_modules():
        reason = None
        if isinstance(part, torch.jit.ScriptModule):
            reason = "torch.jit compiled it"
        elif getattr(part, "_compiled_call_impl", None) is not None or hasattr(part, "_orig_mod"):
            reason = "torch.compile compiled it"
        elif hasattr(part, "_hf_hook"):
            reason = "accelerate has attached a hook to it"
        elif any(type(each).__module__.startswith("bitsandbytes.") for each in part.parameters(recurse=False)):
            reason = "bitsandbytes computes with its weights, which are loaded, not streamed"
        elif any(map(is_dtensor, part.parameters(recurse=False))):
            reason = "its parameters are DTensors"
        if reason is not None:
            raise StreamError(
                f"the module {path!r} cannot be streamed: {reason}" if path else f"{reason}: no streaming"
            )


def _memory_bytes(job: ModuleJob, request: StreamRequest) -> int:
    """Return the bytes for weights: those of the caller, or those that the limits leave without gate and activations.

    Raises:
        BudgetError: The caller gives none, and the free memory of the device is unknown.
    """
    if request.memory_bytes is not None:
        return request.memory_bytes
    device, memory = _device(job), request.load.memory
    given = memory.host if device == "cpu" else device_limit(memory, device)
    if given is not None:
        return parse_bytes(given)
    limits = {limit.where: limit.nbytes for limit in find_limits(job.plan.facts, NO_LIMITS)}
    found = limits.get(HOST if device == "cpu" else device)
    if found is None:
        raise BudgetError(f"the free memory of {device} is unknown; give memory=, such as memory='6GiB'")
    gate = parse_bytes(memory.staging) + defaults.OVERHEAD_BYTES if device == "cpu" else 0
    return max(0, int(found * (1 - defaults.AUTO_RESERVE)) - gate)


def _resting_bytes(request: StreamRequest, device: str) -> int:
    """Return the bytes of host memory for weights of a model on an accelerator: those of the caller, less the gate."""
    memory = request.load.memory
    if device == "cpu" or request.memory_bytes is not None or memory.host is None:
        return 0
    return max(0, parse_bytes(memory.host) - parse_bytes(memory.staging) - defaults.OVERHEAD_BYTES)


def _device(job: ModuleJob) -> str:
    """Return the device of the model's weights."""
    devices = Counter(request.device for request in job.requests)
    return devices.most_common(1)[0][0] if devices else "cpu"


def _stream_job(job: ModuleJob, division: Division, transfer: TransferOptions, host_bytes: int) -> StreamJob:
    resident = division.decision.resident
    staying = [position for number in resident for position in division.members[number]]
    streamed = [number for number in range(len(division.units)) if number not in resident]
    uses: list[list[int]] = [[] for _ in division.blocks]
    lookups: list[Lookup] = []
    for unit, number in enumerate(streamed):
        for block in division.used_by[number]:
            if looks_up_rows(division.blocks[block].module):
                request = job.requests[division.members[number][0]]
                lookups.append(
                    Lookup(block=block, unit=unit, request=request, checkpoint=job.checkpoint, transfer=transfer)
                )
            else:
                uses[block].append(unit)
    units = tuple(division.units[number] for number in streamed)
    used = {unit for each in uses for unit in each}
    sizes = [resting_bytes(unit.prepared.plan.reads) if i in used else host_bytes + 1 for i, unit in enumerate(units)]
    return StreamJob(
        whole=job,
        resident=job.part(sorted([*division.others, *staying]), transfer),
        blocks=division.blocks,
        units=units,
        uses=tuple(map(tuple, uses)),
        lookups=tuple(lookups),
        decision=division.decision,
        device=_device(job),
        resting=choose_resting(sizes, host_bytes),
        kept=frozenset(unit for unit, number in enumerate(streamed) if number in division.decision.kept),
    )
