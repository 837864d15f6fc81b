"""Layout of final memory: requests become targets and views of them, and each target gets a block.

A dense tensor keeps the order of its dimensions, so that one contiguous read fills it. A view with gaps becomes
contiguous unless other views need the bytes of the gaps. Views that overlap in the file share a target in state dicts
(``shared_targets``), and have one target each in modules (``single_targets``).

Pure functions: no I/O, no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import mul

from msgspec.structs import replace

from sluice import _defaults as defaults
from sluice._dtypes import ITEM_BYTES
from sluice._errors import UnsupportedError
from sluice.records import NO_STORAGE, Block, BlockKind, Constant, Entry, Fill, Index, Request, Target, View
from sluice.records.geometry import collapse, contiguous_stride, is_dense, overlapping, round_up, span_elements

__all__ = ["lay_out_blocks", "packed_fill", "shared_targets", "single_targets"]


def single_targets(
    requests: Sequence[Request], index: Index, offsets: Mapping[int, int]
) -> tuple[tuple[Target, ...], tuple[View, ...]]:
    """Return one target and one view per request. Conjugates and negatives are materialized.

    Args:
        requests: The requested tensors.
        index: Index of the entries.
        offsets: Data offset of each storage that the index has not located, by position.
    """
    targets, views = [], []
    for position, request in enumerate(requests):
        target, view = _single_target(request, position, index, offsets)
        targets.append(target)
        views.append(view)
    return tuple(targets), tuple(views)


def shared_targets(
    requests: Sequence[Request], index: Index, offsets: Mapping[int, int]
) -> tuple[tuple[Target, ...], tuple[View, ...]]:
    """Return targets, shared by views of the same bytes, and one view per request.

    Targets hold only the union of the requested views: a 10-row view of a large storage takes 10 rows. Conjugates and
    negatives are views of what is stored, for the caller to mark. For the arguments see ``single_targets``.
    """
    targets: list[Target] = []
    views: dict[int, View] = {}
    bare = [replace(each, entry=each.entry.stored) if each.entry.elements.view_bits else each for each in requests]
    for members in _storage_groups(bare):
        ordered = sorted(members, key=lambda i: bare[i].entry.storage_offset)
        for group in overlapping(ordered, lambda i: _span(bare[i].entry)):
            _lay_out_group([(i, bare[i]) for i in group], targets, views, index, offsets)
    return tuple(targets), tuple(views[i] for i in range(len(requests)))


def lay_out_blocks(
    targets: Sequence[Target], leads: Mapping[int, int], mapped: Mapping[int, Block]
) -> tuple[tuple[Block, ...], tuple[int, ...]]:
    """Return the block of each target, and the bytes of each arena.

    An arena is closed when it is full. If it holds enough, it is also closed at the next module, so that deleting a
    module releases its memory.

    Args:
        targets: Final memory.
        leads: Bytes to leave before a target in its own mapping, by position; 0 if absent.
        mapped: Blocks of the mapped targets, by position.
    """
    blocks: list[Block] = []
    arenas: list[int] = []
    used, module = 0, ""
    for position, target in enumerate(targets):
        if position in mapped:
            blocks.append(mapped[position])
            continue
        kind: BlockKind = "existing" if target.existing else _block_kind(target)
        if kind != "arena":
            blocks.append(Block(kind=kind, offset=leads.get(position, 0)))
            continue
        parent = target.name.rpartition(".")[0]
        too_full = used + target.nbytes > defaults.ARENA_BYTES
        if not arenas or too_full or (parent != module and used >= defaults.ARENA_MODULE_BYTES):
            arenas.append(0)
            used = 0
        blocks.append(Block(kind="arena", memory=len(arenas) - 1, offset=used))
        used = round_up(used + target.nbytes, defaults.TENSOR_ALIGNMENT_BYTES)
        arenas[-1] = used
        module = parent
    return tuple(blocks), tuple(arenas)


def _block_kind(target: Target) -> BlockKind:
    """Return the kind of block of a target that needs memory of its own."""
    if target.nbytes == 0:
        return "empty"
    if target.device != "cpu":
        return "device"
    # The input of a finisher is freed early, whereas an arena is freed with its last tensor.
    return "mapping" if target.nbytes >= defaults.OWN_MAPPING_BYTES or target.finisher else "arena"


def _single_target(request: Request, position: int, index: Index, offsets: Mapping[int, int]) -> tuple[Target, View]:
    """Return a target for one tensor, with the requested stride, its own stride if it leaves no gaps, or row-major."""
    entry, stride = request.entry, request.stride
    if request.finisher is not None:
        stride = contiguous_stride(entry.shape)  # finishers get row-major tensors
    if stride is not None:
        target = _filled_target(request, entry, stride, index, offsets)
        return target, View(target=position, start=0, shape=entry.shape, stride=stride)
    # Each element of an expanded tensor is read and held once.
    once = replace(entry, shape=tuple(min(size, 1) if not step else size for size, step in _dimensions(entry)))
    span = span_elements(once.shape, once.stride)
    if not is_dense(once.shape, once.stride) and span <= once.numel:
        # Elements overlap without a step of 0, as in sliding windows: hold the range of the storage that they view.
        first = entry.storage_offset
        target = _union_target(request, first, first + span, index, offsets)
        return target, View(target=position, start=0, shape=entry.shape, stride=entry.stride)
    stride = once.stride if span <= once.numel else contiguous_stride(once.shape)
    target = _filled_target(request, once, stride, index, offsets)
    repeated = tuple(0 if step == 0 else new for (_, step), new in zip(_dimensions(entry), stride, strict=True))
    return target, View(target=position, start=0, shape=entry.shape, stride=repeated)


def _dimensions(entry: Entry) -> Iterator[tuple[int, int]]:
    """Yield the size and the step of each dimension."""
    return zip(entry.shape, entry.stride, strict=True)


def _filled_target(
    request: Request, entry: Entry, stride: tuple[int, ...], index: Index, offsets: Mapping[int, int]
) -> Target:
    """Return a target with the given stride, with one fill for the entry or one per part.

    Raises:
        UnsupportedError: It needs parts of packs.
    """
    numel = entry.numel
    elements = numel if request.existing else span_elements(entry.shape, stride)
    if entry.parts or entry.constant is not None:
        pieces = [(part.entry, sum(map(mul, part.start, stride))) for part in entry.parts] or [(entry, 0)]
        held = [(piece, first) for piece, first in pieces if piece.numel]
        read = [(piece, first) for piece, first in held if piece.constant is None]
        fills = tuple(_fill(piece, first, stride, index, offsets) for piece, first in read)
        constants = tuple(_constants(held, stride))
    else:  # a computed tensor has neither
        fills = (_fill(entry, 0, stride, index, offsets),) if numel and entry.storage != NO_STORAGE else ()
        constants = ()
    return Target(
        name=request.name,
        dtype=request.dtype,
        nbytes=elements * ITEM_BYTES[request.dtype],
        device=request.device,
        fills=fills,
        constants=constants,
        existing=request.existing,
        replaces=request.replaces,
        finisher=request.finisher,
        origin=entry.origin,
    )


def _fill(piece: Entry, first: int, stride: tuple[int, ...], index: Index, offsets: Mapping[int, int]) -> Fill:
    """Return the fill from a view of one storage to a target, whose element 0 goes to ``first``."""
    storage = index.storages[piece.storage]
    offset = storage.offset if storage.located else offsets[piece.storage]
    if piece.elements.packing is not None:
        return packed_fill(piece, first, stride, storage.file, offset)
    if piece.storage_offset:  # a sum with 0 would be a new object
        offset += piece.storage_offset * ITEM_BYTES[piece.dtype]
    return Fill(
        file=storage.file,
        offset=offset,
        elements=replace(piece.elements, swap_bytes=storage.swap_bytes) if storage.swap_bytes else piece.elements,
        shape=piece.shape,
        source_stride=piece.stride,
        target_stride=stride,
        target_start=first,
    )


def packed_fill(piece: Entry, first: int, stride: tuple[int, ...], file: int, offset: int) -> Fill:
    """Return the fill from a view of packed elements, which are read and decoded in whole packs.

    Args:
        piece: A view of one storage.
        first: Position of its element 0 in the target, in elements.
        stride: Its steps in the target, in elements.
        file: Position of the file in the plan.
        offset: First byte of the storage in the file.

    Raises:
        UnsupportedError: It takes parts of packs.
    """
    packing = piece.elements.packing
    assert packing is not None
    shape, source, target = collapse(piece.shape, piece.stride, stride)
    size = packing.elements
    run = next((dim for dim, step in enumerate(source) if step == 1), None)
    others = [dim for dim in range(len(shape)) if dim != run]
    if run is None or shape[run] % size or piece.storage_offset % size or any(source[dim] % size for dim in others):
        raise UnsupportedError(
            f"this selection takes parts of packs of {size} elements ({packing.name})",
            advice="Read whole rows and select from the result, or convert the file with a larger "
            "MemoryLimits(staging=...), or first without rules.",
        )
    return Fill(
        file=file,
        offset=offset + piece.storage_offset // size * packing.nbytes,
        elements=replace(piece.elements, packing=replace(packing, target_step=target[run])),
        shape=(*(shape[dim] for dim in others), shape[run] // size),
        source_stride=(*(source[dim] // size for dim in others), 1),
        target_stride=(*(target[dim] for dim in others), target[run] * size),
        target_start=first,
    )


def _constants(pieces: Iterable[tuple[Entry, int]], stride: tuple[int, ...]) -> Iterator[Constant]:
    """Yield the constants among the pieces of an entry."""
    for piece, first in pieces:
        if piece.constant is not None:
            yield Constant(
                value=piece.constant,
                elements=piece.elements,
                shape=piece.shape,
                target_stride=stride,
                target_start=first,
            )


def _storage_groups(requests: Sequence[Request]) -> Iterable[list[int]]:
    """Return groups of positions of requests whose targets may be shared."""
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for position, request in enumerate(requests):
        entry = request.entry  # an assembled entry shares memory only with equal ones
        source = (entry.parts or entry.storage, entry.elements)
        alone = request.alone or request.finisher or entry.elements.packing
        apart = position if alone else None
        groups[*source, request.dtype, request.device, apart].append(position)
    return groups.values()


def _span(entry: Entry) -> tuple[int, int]:
    return entry.storage_offset, entry.storage_offset + span_elements(entry.shape, entry.stride)


def _lay_out_group(
    group: list[tuple[int, Request]],
    targets: list[Target],
    views: dict[int, View],
    index: Index,
    offsets: Mapping[int, int],
) -> None:
    """Append the targets of overlapping views of one storage to ``targets``, and store their views by position."""
    distinct = {(r.entry.storage_offset, r.entry.shape, r.entry.stride): r for _, r in group}
    first = min(start for start, _, _ in distinct)
    end = max(start + span_elements(shape, stride) for start, shape, stride in distinct)
    viewed = sum(request.entry.numel for request in distinct.values())
    if len(distinct) == 1 or end - first > viewed:
        # One view, or views so sparse that separate copies take less memory than their union.
        by_geometry: dict[tuple[int, tuple[int, ...], tuple[int, ...]], View] = {}
        for position, request in group:
            geometry = (request.entry.storage_offset, request.entry.shape, request.entry.stride)
            if geometry not in by_geometry:
                target, by_geometry[geometry] = _single_target(request, len(targets), index, offsets)
                targets.append(target)
            views[position] = by_geometry[geometry]
        return
    for position, request in group:
        entry = request.entry
        views[position] = View(
            target=len(targets), start=entry.storage_offset - first, shape=entry.shape, stride=entry.stride
        )
    targets.append(_union_target(group[0][1], first, end, index, offsets))


def _union_target(request: Request, first: int, end: int, index: Index, offsets: Mapping[int, int]) -> Target:
    """Return one target for the elements ``first`` to ``end`` of a storage."""
    whole = replace(request.entry, shape=(end - first,), stride=(1,), storage_offset=first)
    return _filled_target(request, whole, (1,), index, offsets)
