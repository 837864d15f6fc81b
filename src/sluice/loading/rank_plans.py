"""Plan the loads of all ranks of a mesh in one process, without a process group.

Each rank gets the plan that ``load_into`` would make there. The module stays as it is: its description is divided, for
one rank after the other, as ``sharding.layouts`` says.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace
from torch import nn

from sluice._geometry import contiguous_stride
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.entries.patterns import compile_pattern
from sluice.loading.module_job import ModuleRequest
from sluice.matching.match import Slot
from sluice.modules.collect import ModuleState, collect
from sluice.records import LoadPlan
from sluice.reports.ranks import FileReads, HostLoad, RankLoad, RanksPlan
from sluice.sharding.layouts import Mesh, divided_dim, sharding_on
from sluice.sharding.reads import covered_bytes
from sluice.sharding.regions import Region, region_of, shape_of

__all__ = ["DividedRequest", "RankLayout", "plan_ranks", "tensor_parallel_dims"]


class RankLayout(Struct, frozen=True, kw_only=True):
    """A mesh, and what its ranks share."""

    #: The mesh.
    mesh: Mesh
    #: Ranks of one host; they have consecutive numbers.
    ranks_per_host: int
    #: Dimension that tensor parallelism divides, by name of the parameter; others are not divided by it.
    tp_dims: Mapping[str, int]


class DividedRequest(ModuleRequest, frozen=True, kw_only=True):
    """A load into the part of a module that one rank of a mesh holds. It is only planned."""

    #: The description of the whole module.
    whole: ModuleState
    #: The mesh.
    layout: RankLayout
    #: Position of the rank in it.
    coordinate: tuple[int, ...]

    def describe(self) -> ModuleState:
        """Return the description of what the rank holds of the module, on the meta device."""
        outline = self.whole.outline
        slots = tuple(_divided(slot, self.layout, self.coordinate) for slot in outline.slots)
        return replace(self.whole, outline=replace(outline, slots=slots))


def tensor_parallel_dims(model: nn.Module, plan: Mapping[str, str]) -> dict[str, int]:
    """Return the dimension of each parameter that a tensor-parallel plan divides.

    Args:
        model: The whole model.
        plan: Style by pattern of module names, such as ``{"layers.*.mlp.up_proj": "colwise"}``.

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
                dim = divided_dim(style, part)
                if dim is not None:
                    found[f"{path}.{name}" if path else name] = dim
    return found


def plan_ranks(
    request: ModuleRequest, checkpoint: OpenCheckpoint, layout: RankLayout
) -> tuple[RanksPlan, DividedRequest]:
    """Plan the load of every rank.

    Returns:
        The loads, and the request of the rank whose memory grows most. Its limit is an equal share of that of its host,
        which is taken to be like this one if the caller names none.

    Raises:
        MismatchError: The checkpoint does not fit the module.
    """
    whole = collect(request.model)
    fields = {name: getattr(request, name) for name in ModuleRequest.__struct_fields__}
    fields["options"] = replace(request.options, host_ranks=layout.ranks_per_host)
    requests = [
        DividedRequest(**fields, whole=whole, layout=layout, coordinate=coordinate)
        for coordinate in layout.mesh.coordinates()
    ]
    known: dict[tuple[Region | None, ...], LoadPlan] = {}
    plans = [_plan_once(each, checkpoint, known) for each in requests]
    loads = [
        RankLoad(
            rank=rank,
            coordinate=each.coordinate,
            host=rank // layout.ranks_per_host,
            final_bytes=plan.final_bytes,
            read_bytes=plan.read_bytes,
            reads=len(plan.reads),
            peak_bytes=plan.predicted.total_bytes,
        )
        for rank, (each, plan) in enumerate(zip(requests, plans, strict=True))
    ]
    found = RanksPlan(
        mesh=dict(zip(layout.mesh.names, layout.mesh.sizes, strict=True)),
        ranks=tuple(loads),
        hosts=tuple(_hosts(loads, plans)),
        files=tuple(sorted(_files(plans), key=lambda file: -file.read_bytes)),
    )
    return found, requests[found.fullest.rank]


def _plan_once(
    request: DividedRequest, checkpoint: OpenCheckpoint, known: dict[tuple[Region | None, ...], LoadPlan]
) -> LoadPlan:
    """Return the plan of a rank; ranks that hold the same have the same plan."""
    regions = tuple(slot.region for slot in request.describe().outline.slots)
    if regions not in known:
        known[regions] = request.job(checkpoint).plan
    return known[regions]


def _divided(slot: Slot, layout: RankLayout, coordinate: tuple[int, ...]) -> Slot:
    """Return what a rank holds of a slot, without memory yet; buffers and lazy parameters are not divided."""
    if not slot.parameter or slot.lazy:
        return slot
    tp_dim = next((layout.tp_dims[name] for name in slot.names if name in layout.tp_dims), None)
    sharding = sharding_on(layout.mesh, coordinate, dimensions=len(slot.shape), tp_dim=tp_dim)
    region = region_of(slot.shape, sharding)
    return replace(
        slot, region=region, stride=contiguous_stride(shape_of(region)), device="meta", in_place=False, home="cpu"
    )


def _hosts(loads: Sequence[RankLoad], plans: Sequence[LoadPlan]) -> Iterator[HostLoad]:
    members: defaultdict[int, list[RankLoad]] = defaultdict(list)
    for load in loads:
        members[load.host].append(load)
    for host, own in members.items():
        yield HostLoad(
            host=host,
            ranks=len(own),
            read_bytes=sum(load.read_bytes for load in own),
            needed_bytes=sum(file.needed_bytes for file in _files([plans[load.rank] for load in own])),
            peak_bytes=sum(load.peak_bytes for load in own),
        )


def _files(plans: Sequence[LoadPlan]) -> Iterator[FileReads]:
    """Yield what ranks read of each file."""
    ranges: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    readers: Counter[int] = Counter()
    for plan in plans:
        readers.update({read.file for read in plan.reads})
        for read in plan.reads:
            ranges[read.file].append((read.offset, read.offset + read.nbytes))
    for file, found in ranges.items():
        yield FileReads(
            path=plans[0].files[file].path,
            ranks=readers[file],
            read_bytes=sum(stop - start for start, stop in found),
            needed_bytes=covered_bytes(found),
        )
