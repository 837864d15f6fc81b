"""Places of parameters in the flat vectors of DeepSpeed's ranks, and entries that are assembled from them. Pure.

Files that contradict each other are from different saves.

Stages 1 and 2 concatenate the parameters of a group, pad the end, and give each rank an equal range; the files leave
padding out. Stage 3 gives each rank ``ceil(n / ranks)`` elements of each parameter of n, the last ones padded; they lie
in its vectors one after the other.

In row-major order a range of elements is at most ``2 * dimensions - 1`` boxes of a tensor: each becomes a part.

Limits: ``Limits.entries`` for the ranges of all parameters, and for their boxes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

from msgspec.structs import replace

from sluice._errors import FormatError, UnsupportedError
from sluice._messages import check_limit
from sluice._options import Limits
from sluice.entries.tree import map_leaves
from sluice.formats.deepspeed.states import ModelStates, RankStates, is_flat
from sluice.records import NO_STORAGE, Entry, Part, row_major
from sluice.records.geometry import contiguous_stride, round_up

__all__ = ["Assembler", "ParameterPlace", "check_agreement", "check_state", "other_save", "parameter_places"]

_Shape = tuple[int, ...]


def check_agreement(models: Sequence[ModelStates], ranks: Sequence[RankStates]) -> None:
    """Check that the files are of one save: what does not depend on the rank is equal."""
    for model in models:
        if (model.shapes, model.facts) != (models[0].shapes, models[0].facts):
            raise other_save(model.file, "model states", models[0].facts, model.facts)
        if model.world not in {0, len(ranks)}:
            raise other_save(model.file, "dp_world_size", len(ranks), model.world)
    first = _of_all_ranks(ranks[0])
    for rank in ranks:
        own = _of_all_ranks(rank)
        for name, value in first.items():
            if own[name] != value:
                raise other_save(rank.file, name, value, own[name])


def _of_all_ranks(rank: RankStates) -> dict[str, object]:
    lengths = [vector.numel for vector in rank.vectors]
    return {
        "number of ranks": rank.world,
        "stage": 3 if rank.by_parameter else "1 or 2",
        "dtypes": [vector.dtype for vector in rank.vectors],
        "elements": lengths if rank.by_parameter else len(lengths),
        "paddings": rank.gaps,
        "groups": map_leaves(list(rank.options), lambda _: None),
    }


def check_state(rank: RankStates, vector: int, known: Mapping[str, object]) -> None:
    """Check that the state of a vector has the values that another rank has, as long as the vector."""
    if rank.states[vector].keys() != known.keys():
        expected, found = sorted(map(str, known)), sorted(map(str, rank.states[vector]))
        problem = "the ranks have different states of the optimizer"
        raise FormatError(problem, file=rank.file, expected=expected, found=found)
    count = rank.vectors[vector].numel
    padded = count + (rank.paddings[vector] if vector < len(rank.paddings) else 0)
    for key, value in rank.states[vector].items():
        own = known[key]
        if not isinstance(own, Entry) or not own.shape or key == "step":
            continue  # the value of one rank counts
        if not is_flat(value) or len(value.shape) != 1 or not count <= value.numel <= padded:
            raise UnsupportedError(
                "state of the optimizer that is not flat like the weights",
                file=rank.file,
                tensor=str(key),
                expected=f"{count} or {padded} elements",
                found=str(getattr(value, "shape", value))[:200],
                advice="Only DeepSpeed can resume this optimizer.",
            )
        if value.dtype != own.dtype:
            raise other_save(rank.file, f"dtype of {key}", own.dtype, value.dtype)


def other_save(file: str, what: str, expected: object, found: object) -> FormatError:
    """Return the error for a file that contradicts those of other ranks in ``what``."""
    problem = f"the files of the ranks are from different saves: {what}"
    advice = "Delete the files of the other save, or copy the directory again from where it was written."
    return FormatError(problem, file=file, expected=str(expected)[:200], found=str(found)[:200], advice=advice)


class _Run(NamedTuple):
    """Consecutive elements in the vector of a rank."""

    rank: int
    #: Number of the vector.
    vector: int
    #: First element in it.
    first: int
    elements: int


class ParameterPlace(NamedTuple):
    """Where a parameter lies."""

    shape: _Shape
    #: Number of the vector that holds its first element.
    vector: int
    #: Its elements in row-major order.
    runs: tuple[_Run, ...]


class _Joined:
    """The concatenation of vectors."""

    def __init__(self, vectors: Sequence[tuple[int, int]], lengths: Sequence[int]) -> None:
        """Keep rank and number of each vector, and its number of elements."""
        self._vectors = vectors
        self._ends = list(accumulate(lengths))
        self.elements = sum(lengths)

    def vector_at(self, element: int) -> int:
        """Return the number of the vector that holds an element; the last one for the end."""
        return self._vectors[min(bisect_right(self._ends, element), len(self._ends) - 1)][1]

    def cut(self, first: int, count: int) -> Iterator[_Run]:
        """Yield the runs of a range."""
        position, end = bisect_right(self._ends, first), first + count
        while first < end:
            start = self._ends[position - 1] if position else 0
            stop = min(end, self._ends[position])
            if first < stop:
                yield _Run(*self._vectors[position], first - start, stop - first)
            first, position = stop, position + 1


def parameter_places(model: ModelStates, ranks: Sequence[RankStates], limits: Limits) -> dict[str, ParameterPlace]:
    """Return the place of each parameter.

    Raises:
        FormatError: The shapes do not add up to the vectors.
        LimitError: The parameters are divided into too many ranges.
    """
    places, count = {}, 0
    for name, place in (_by_parameter if ranks[0].by_parameter else _by_vector)(model, ranks):
        places[name] = place
        count += len(place.runs)
        check_limit(limits, "entries", count, "the number of ranges of the parameters", file=model.file)
    return places


def _by_vector(model: ModelStates, ranks: Sequence[RankStates]) -> Iterator[tuple[str, ParameterPlace]]:
    if len(model.shapes) != len(ranks[0].vectors):
        raise _contradiction(model, len(ranks[0].vectors), len(model.shapes), "vectors")
    for number, shapes in enumerate(model.shapes):
        lengths = [states.vectors[number].numel for states in ranks]
        joined = _Joined([(rank, number) for rank in range(len(ranks))], lengths)
        gaps = (ranks[0].gaps[number] if number < len(ranks[0].gaps) else ()) or (0,) * len(shapes)
        if len(gaps) != len(shapes):
            raise _contradiction(model, len(shapes), len(gaps), "paddings")
        sizes = list(map(prod, shapes.values()))
        needed, multiple = sum(sizes) + sum(gaps), 2 * len(ranks)  # of the padding, which may be left out or not
        unused = gaps[-1] if gaps else 0
        if needed - unused > joined.elements or round_up(needed, multiple) != round_up(joined.elements, multiple):
            raise _contradiction(model, needed, joined.elements, f"elements of vector {number}")
        first = 0
        for (name, shape), size, gap in zip(shapes.items(), sizes, gaps, strict=True):
            yield name, ParameterPlace(shape, number, tuple(joined.cut(first, size)))
            first += size + gap


def _by_parameter(model: ModelStates, ranks: Sequence[RankStates]) -> Iterator[tuple[str, ParameterPlace]]:
    world, first = len(ranks), 0
    lengths = [vector.numel for vector in ranks[0].vectors]
    own = [_Joined([(rank, number) for number in range(len(lengths))], lengths) for rank in range(world)]
    shapes = {name: shape for group in model.shapes for name, shape in group.items()}
    needed = sum(-(-prod(shape) // world) for shape in shapes.values())
    if shapes and not lengths:
        raise _contradiction(model, 1, 0, "vectors")
    if needed != sum(lengths):
        raise _contradiction(model, needed, sum(lengths), "elements of each rank")
    for name, shape in shapes.items():
        size = prod(shape)
        share = max(1, -(-size // world))
        runs: list[_Run] = []
        for rank in range(-(-size // share)):
            runs += own[rank].cut(first, min(share, size - rank * share))
        yield name, ParameterPlace(shape, own[0].vector_at(first), tuple(runs))
        first += -(-size // world)


class Assembler:
    """Builds entries from pieces of vectors, up to a number of boxes."""

    def __init__(self, file: str, limits: Limits) -> None:
        """Keep the file that messages name, and the limits."""
        self._file, self._limits = file, limits
        self._boxes = 0

    def placed(self, place: ParameterPlace, vector: Callable[[int, int], Entry]) -> Entry:
        """Return a parameter, or its state; ``vector`` returns that of a rank by its number."""
        pieces = [_piece(vector(run.rank, run.vector), run.first, run.elements) for run in place.runs]
        return self.assembled(place.shape, pieces or [_piece(vector(0, place.vector), 0, 0)])

    def assembled(self, shape: _Shape, pieces: Iterable[Entry]) -> Entry:
        """Return an entry of consecutive elements: always of parts, so that none shares memory with its neighbors."""
        parts: list[Part] = []
        first = 0
        like: Entry | None = None
        for piece in pieces:
            like = like or piece
            if piece.dtype != like.dtype:
                problem = "the files of the ranks hold parts of a tensor in different dtypes"
                raise FormatError(problem, file=self._file, expected=like.dtype, found=piece.dtype)
            within = 0
            for start, sizes in _boxes(shape, first, piece.numel):
                held = _piece(piece, within, prod(sizes))
                parts.append(Part(entry=replace(held, shape=sizes, stride=contiguous_stride(sizes)), start=start))
                within += held.numel
            first += piece.numel
        assert like is not None
        self._boxes += len(parts)
        check_limit(self._limits, "entries", self._boxes, "the number of boxes of the parameters", file=self._file)
        if not parts:
            return replace(like, shape=shape, stride=contiguous_stride(shape))
        return row_major(like.dtype, shape, NO_STORAGE, tuple(parts))

    def whole(self, shape: _Shape, vectors: Sequence[Entry]) -> Entry | None:
        """Return the first elements of the concatenation of dense tensors; None if there are too few."""
        left, pieces = prod(shape), []
        for vector in vectors:
            pieces.append(_piece(vector, 0, min(left, vector.numel)))
            left -= pieces[-1].numel
        return None if left else self.assembled(shape, pieces)


def _piece(vector: Entry, first: int, count: int) -> Entry:
    """Return consecutive elements of a dense tensor."""
    return Entry(
        elements=vector.elements,
        shape=(count,),
        stride=(1,),
        storage=vector.storage,
        storage_offset=vector.storage_offset + first,
    )


def _boxes(shape: _Shape, first: int, count: int) -> Iterator[tuple[_Shape, _Shape]]:
    """Yield start and sizes of the boxes that hold consecutive elements, in their order."""
    if not count or not shape:
        yield from [((), ())] * count
        return
    row, inner = prod(shape[1:]), shape[1:]
    end = first + count
    before, after = -(-first // row), end // row  # whole rows between
    if before > after:
        yield from _in_row(after, _boxes(inner, first - after * row, count))
        return
    yield from _in_row(before - 1, _boxes(inner, first - (before - 1) * row, before * row - first))
    if before < after:
        yield (before, *(0 for _ in inner)), (after - before, *inner)
    yield from _in_row(after, _boxes(inner, 0, end - after * row))


def _in_row(row: int, boxes: Iterable[tuple[_Shape, _Shape]]) -> Iterator[tuple[_Shape, _Shape]]:
    return (((row, *start), (1, *sizes)) for start, sizes in boxes)


def _contradiction(model: ModelStates, expected: int, found: int, what: str) -> FormatError:
    problem = f"the shapes of the parameters do not fit the files of the ranks: {what}"
    return FormatError(problem, file=model.file, tensor="param_shapes", expected=expected, found=found)
