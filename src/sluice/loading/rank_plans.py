"""Plan the loads of all ranks of a mesh in one process, without a process group.

Each rank gets the plan that ``load_into`` would make there. The module is not changed: its description is divided, for
one rank after the other, as ``sharding.layouts`` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace
from torch import nn

from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.entries.patterns import compile_pattern
from sluice.loading.module_request import ModuleRequest
from sluice.machine.facts import machine_facts
from sluice.matching.match import Slot
from sluice.modules.collect import collect
from sluice.records import LoadPlan
from sluice.records.geometry import contiguous_stride
from sluice.reports.plan import RankLoad, RanksPlan
from sluice.sharding.layouts import Mesh, divided_dim, sharding_on
from sluice.sharding.regions import Region, region_of, shape_of

__all__ = ["RankLayout", "plan_ranks", "tensor_parallel_dims"]


class RankLayout(Struct, frozen=True, kw_only=True):
    """A mesh, and what its ranks share."""

    #: The mesh.
    mesh: Mesh
    #: Ranks of one host; they have consecutive numbers.
    ranks_per_host: int
    #: Dimension that tensor parallelism divides, by name of the parameter; others are not divided by it.
    tp_dims: Mapping[str, int]


class _Reads(Struct, frozen=True, kw_only=True):
    """Memory and reads of one rank."""

    final_bytes: int
    peak_bytes: int
    read_bytes: int
    #: File, first byte and end of each read.
    ranges: tuple[tuple[str, int, int], ...]


def tensor_parallel_dims(model: nn.Module, plan: Mapping[str, str]) -> dict[str, int]:
    """Return the dimension of each parameter that a tensor-parallel plan divides.

    Args:
        model: The whole model.
        plan: Style by pattern of module names, such as ``{"layers.*.mlp.up_proj": "colwise"}``. The last pattern that
            matches a module counts.

    Raises:
        ValueError: A style is not known, or a pattern matches no module.
    """
    found: dict[str, int] = {}
    modules = dict(model.named_modules())
    for pattern, style in plan.items():
        regex = compile_pattern(pattern).regex
        matching = [path for path in modules if regex.fullmatch(path)]
        if not matching:
            raise ValueError(f"the tensor-parallel plan names {pattern!r}, which matches no module of the model")
        for path in matching:
            for name, _ in modules[path].named_parameters(recurse=False):
                part = "table" if isinstance(modules[path], nn.Embedding) else name
                full = f"{path}.{name}" if path else name
                dim = divided_dim(style, part)
                found.pop(full, None)
                if dim is not None:
                    found[full] = dim
    return found


def plan_ranks(
    request: ModuleRequest, checkpoint: OpenCheckpoint, layout: RankLayout
) -> tuple[RanksPlan, ModuleRequest]:
    """Plan the load of every rank.

    Returns:
        The loads, and the request of the rank whose memory grows most. Its limit is an equal share of that of its host,
        which is taken to be like this one if the caller names none.

    Raises:
        MismatchError: The checkpoint does not fit the module.
    """
    whole = collect(request.model)
    facts = machine_facts(checkpoint.sources, host_ranks=layout.ranks_per_host)
    options = replace(request.options, host_ranks=layout.ranks_per_host, facts=facts)
    known: dict[tuple[Region | None, ...], _Reads] = {}  # ranks that hold the same read the same
    parts: dict[tuple[int, ...], _Reads] = {}
    fullest = None
    for coordinate in dict.fromkeys(map(layout.mesh.part, layout.mesh.coordinates())):
        slots = tuple(_divided(slot, layout, coordinate) for slot in whole.outline.slots)
        regions = tuple(slot.region for slot in slots)
        if regions not in known:
            part = replace(whole, outline=replace(whole.outline, slots=slots))
            divided = replace(request, options=options, part=part)
            known[regions] = own = _reads(divided.job(checkpoint).plan)
            if fullest is None or own.peak_bytes > fullest[0]:
                fullest = own.peak_bytes, divided
        parts[coordinate] = known[regions]
    assert fullest is not None
    return _ranks_plan(layout, [parts[layout.mesh.part(each)] for each in layout.mesh.coordinates()]), fullest[1]


def _reads(plan: LoadPlan) -> _Reads:
    return _Reads(
        final_bytes=plan.final_bytes,
        peak_bytes=plan.predicted.total_bytes,
        read_bytes=sum(read.nbytes for read in plan.reads),
        ranges=tuple((plan.files[read.file].path, read.offset, read.offset + read.nbytes) for read in plan.reads),
    )


def _ranks_plan(layout: RankLayout, reads: Sequence[_Reads]) -> RanksPlan:
    loads = tuple(
        RankLoad(
            rank=rank,
            coordinate=coordinate,
            host=rank // layout.ranks_per_host,
            final_bytes=own.final_bytes,
            read_bytes=own.read_bytes,
            reads=len(own.ranges),
            peak_bytes=own.peak_bytes,
        )
        for rank, (coordinate, own) in enumerate(zip(layout.mesh.coordinates(), reads, strict=True))
    )
    return RanksPlan(
        mesh=dict(zip(layout.mesh.names, layout.mesh.sizes, strict=True)),
        ranks=loads,
        needed_bytes=_covered_bytes({each for own in {id(own): own for own in reads}.values() for each in own.ranges}),
    )


def _divided(slot: Slot, layout: RankLayout, coordinate: tuple[int, ...]) -> Slot:
    """Return what a rank holds of a slot, without memory yet; buffers and lazy parameters are not divided."""
    if not slot.parameter or slot.lazy:
        return slot
    tp_dim = next((layout.tp_dims[name] for name in slot.names if name in layout.tp_dims), None)
    sharding = sharding_on(layout.mesh, coordinate, dimensions=len(slot.shape), tp_dim=tp_dim)
    region = region_of(slot.shape, sharding)
    resettable = slot.resettable and layout.mesh.names == ("ddp",)  # no DTensors, whose random numbers would differ
    slot = replace(slot, device="meta", home="cpu", in_place=False, resettable=resettable)
    return replace(slot, region=region, stride=contiguous_stride(shape_of(region)))


def _covered_bytes(ranges: Iterable[tuple[str, int, int]]) -> int:
    """Return the number of bytes that lie in at least one of the ranges ``(file, start, stop)``."""
    covered, last, end = 0, "", 0
    for file, start, stop in sorted(ranges):
        end = end if file == last else 0
        covered += max(0, stop - max(start, end))
        last, end = file, max(end, stop)
    return covered
