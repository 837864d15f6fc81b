"""Merge methods: what they compute from all inputs of a tensor, piece by piece.

The bits are those of mergekit 0.1.5 where no random draw decides: the same operations in the same dtypes and order. A
piece is a range of the elements of a tensor in row-major order. What a method needs to know of a whole tensor (norms,
thresholds) is computed once, by passes over its pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeAlias

import torch
from msgspec import Struct
from msgspec.structs import replace

from sluice._errors import MismatchError

__all__ = ["MergedTensor", "Reader", "compute", "survey", "whole_tensors"]

#: Elements of one piece of a pass, and of the blocks that have a random state each.
_BLOCK = 1 << 18

#: Elements of the pieces whose norms and products slerp adds: those of mergekit.
_SLERP_BLOCK = 1 << 20

#: Bits of a magnitude that are counted at a time, in the search for a threshold.
_HALF = 16

#: Tensors that are held for each input, sums included, by methods that need whole ones.
_WHOLE = {"nuslerp": 3, "model_stock": 2}


class MergedTensor(Struct, frozen=True, kw_only=True, eq=False):
    """One tensor of a merge."""

    name: str
    method: str
    shape: tuple[int, ...]
    #: Dtype of the computation and of the result, as torch spells them.
    dtype: str
    out_dtype: str
    #: Position of the base among the inputs; None without one.
    base: int | None
    #: Parameters of the merge, and of each input.
    shared: Mapping[str, Any]
    each: tuple[Mapping[str, Any], ...]
    #: Where random draws begin, and the first name of a tensor of these inputs: the names of a tied one draw the same.
    seed: int = 0
    drawn_as: str = ""

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return torch.Size(self.shape).numel()


#: Returns elements ``first`` to ``end`` of every input, in the dtype of the computation.
Reader: TypeAlias = Callable[[int, int], list[torch.Tensor]]


def whole_tensors(merged: MergedTensor) -> int:
    """Return how many tensors of its size are held at once; 0 if only pieces are."""
    held = _WHOLE.get(merged.method, 0) * len(merged.each)
    return held and held + 4  # the earlier result, and freed blocks that the allocator keeps


def survey(merged: MergedTensor, read: Reader) -> Any:
    """Return what ``compute`` needs to know of a whole tensor."""
    known = _SURVEYS.get(merged.method)
    return None if known is None or not getattr(torch, merged.dtype).is_floating_point else known(merged, read)


def compute(merged: MergedTensor, tensors: Sequence[torch.Tensor], first: int, known: Any) -> torch.Tensor:
    """Return elements of the merged tensor, from ``first`` on.

    Args:
        merged: The tensor.
        tensors: These elements of each input.
        first: Position of the first element.
        known: What ``survey`` returned.

    Raises:
        MismatchError: Integers differ between inputs.
    """
    if not tensors[0].is_floating_point():
        averages = _PIECES[merged.method] is _average and not tensors[0].is_complex()
        if not averages and any(not torch.equal(tensors[0], other) for other in tensors[1:]):
            advice = "Leave the tensor out with sluice.convert first; 'swa' and 'ema' take the last integers."
            raise MismatchError("the inputs of a merge have different integers", tensor=merged.name, advice=advice)
        return tensors[-1]  # as AveragedModel copies buffers
    return _PIECES[merged.method](merged, tensors, first, known).to(getattr(torch, merged.out_dtype))


def _pieces(merged: MergedTensor, elements: int = _BLOCK) -> Iterator[tuple[int, int]]:
    for first in range(0, merged.numel, elements):
        yield first, min(first + elements, merged.numel)


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _linear(merged: MergedTensor, tensors: Sequence[torch.Tensor], _first: int, _known: Any) -> torch.Tensor:
    weights = tensors[0].new_tensor([each["weight"] for each in merged.each], dtype=torch.float64).to(_wide(tensors[0]))
    result = torch.zeros_like(tensors[0], dtype=weights.dtype)
    for tensor, weight in zip(tensors, weights, strict=True):
        result.addcmul_(tensor, weight)
    if merged.shared["normalize"]:
        result.div_(weights.sum())
    return result.to(tensors[0].dtype)


def _passthrough(merged: MergedTensor, tensors: Sequence[torch.Tensor], _first: int, _known: Any) -> torch.Tensor:
    scale = merged.each[0]["scale"]
    return tensors[0] if scale is None else tensors[0] * scale


def _average(merged: MergedTensor, tensors: Sequence[torch.Tensor], _first: int, _known: Any) -> torch.Tensor:
    """Average as ``torch.optim.swa_utils``'s ``get_swa_multi_avg_fn`` or ``get_ema_multi_avg_fn``, one by one."""
    average = tensors[0].clone()
    for count, tensor in enumerate(tensors[1:], 2):
        average.lerp_(tensor, 1 / count if merged.method == "swa" else 1 - merged.shared["decay"])
    return average


def _slerp_survey(merged: MergedTensor, read: Reader) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of the base and of the other input, from norms and products of pieces."""

    def each() -> Iterator[list[torch.Tensor]]:
        for first, end in _pieces(merged, _SLERP_BLOCK):
            base, other = _base_and_others(merged, read(first, end))
            yield [tensor.to(_wide(tensor)) for tensor in (base, *other)]

    parts = [[torch.linalg.vector_norm(tensor) for tensor in pair] for pair in each()]
    norms = [torch.linalg.vector_norm(torch.stack([pair[i] for pair in parts])) for i in (0, 1)]
    norms = [torch.where(norm > 1e-8, norm, 1) for norm in norms]
    dots = [((a / norms[0]) * (b / norms[1])).sum() for a, b in each()]
    dot = torch.stack(dots).sum().clamp(-1, 1)
    share = torch.tensor(merged.shared["t"], dtype=torch.float64, device="cpu").to(dot.dtype)
    linear = dot.abs() > 0.9995
    theta = torch.acos(torch.where(linear, 0, dot))
    sine = torch.sin(theta)
    return (
        torch.where(linear, 1 - share, torch.sin((1 - share) * theta) / sine),
        torch.where(linear, share, torch.sin(share * theta) / sine),
    )


def _slerp(merged: MergedTensor, tensors: Sequence[torch.Tensor], _first: int, known: Any) -> torch.Tensor:
    base, [other] = _base_and_others(merged, tensors)
    wide = _wide(base)
    turned: torch.Tensor = known[0] * base.to(wide) + known[1] * other.to(wide)
    return turned.to(base.dtype)


def _base_and_others(merged: MergedTensor, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    assert merged.base is not None
    return tensors[merged.base], [tensor for i, tensor in enumerate(tensors) if i != merged.base]


def _others(merged: MergedTensor) -> list[Mapping[str, Any]]:
    return [each for i, each in enumerate(merged.each) if i != merged.base]


def _nuslerp_survey(merged: MergedTensor, read: Reader) -> torch.Tensor:
    """Return the merged tensor."""
    tensors = [tensor.view(merged.shape) for tensor in read(0, merged.numel)]
    weights = [each["weight"] for each in _others(merged)]
    total = sum(weights)
    share = 0.5 if abs(total) < 1e-6 else weights[1] / total
    if merged.base is None:
        return _turned(share, tensors[0], tensors[1], merged)
    base, (one, other) = _base_and_others(merged, tensors)
    return base + _turned(share, one - base, other - base, merged)


def _turned(share: float, one: torch.Tensor, other: torch.Tensor, merged: MergedTensor) -> torch.Tensor:
    shape, columns = one.shape, merged.shared["nuslerp_row_wise"] and not merged.shared["nuslerp_flatten"]
    if merged.shared["nuslerp_flatten"]:
        one, other = one.reshape(-1), other.reshape(-1)
    elif columns:
        one, other = one.transpose(0, -1), other.transpose(0, -1)
    unit = [x / torch.norm(x, dim=-1, keepdim=True).clamp(min=1e-7) for x in (one, other)]
    cosine = torch.sum(unit[0] * unit[1], dim=-1, keepdim=True)  # beyond 1 by rounding is straight, too
    del unit
    straight = (1 - cosine.square()) <= 1e-16
    theta = torch.acos(torch.where(straight, 0, cosine))
    result = (torch.sin((1 - share) * theta) * one + torch.sin(share * theta) * other) / torch.sin(theta)
    result = torch.where(straight, (1 - share) * one + share * other, result)
    return (result.transpose(0, -1) if columns else result).reshape(shape)


def _model_stock_survey(merged: MergedTensor, read: Reader) -> torch.Tensor:
    base, others = _base_and_others(merged, [tensor.view(merged.shape) for tensor in read(0, merged.numel)])
    rows = merged.shared["filter_wise"]
    flat = (-1,) if not rows else (1, -1) if base.dim() == 1 else base.shape
    base, others = base.reshape(flat), [other.reshape(flat) for other in others]
    offsets = [other - base for other in others]
    cosines = []
    for position, a in enumerate(offsets):
        for b in offsets[position + 1 :]:
            product = torch.norm(a, dim=-1) * torch.norm(b, dim=-1)
            cosines.append(((a * b).sum(dim=-1) / product.clamp(min=1e-6)).clamp(-1, 1))
    del offsets, a, b
    cosine = torch.stack(cosines).mean(dim=0).unsqueeze(-1)
    divisor = 1 + (len(others) - 1) * cosine
    singular = divisor.abs() < 1e-6
    share = torch.where(singular, 0, len(others) * cosine / torch.where(singular, 1, divisor))
    average = sum(others) / len(others)
    return (share * average + (1 - share) * base).reshape(merged.shape)


def _found(_merged: MergedTensor, tensors: Sequence[torch.Tensor], first: int, known: Any) -> torch.Tensor:
    """Return elements of a tensor that its survey has merged."""
    whole: torch.Tensor = known.view(-1)
    return whole[first : first + tensors[0].numel()]


# What follows sparsifies the differences to the base. Of equal magnitudes at a threshold those count that a stable sort
# has first, as in mergekit on the CPU.

#: Magnitude and position of an element.
_Place: TypeAlias = tuple[float, int]


class _Kept(Struct, frozen=True, kw_only=True):
    """The kept elements of one difference: those between two places of an order by magnitude, then by position."""

    #: Magnitude and position of the first kept element, and of the first one that is too large; None without a bound.
    low: _Place | None = None
    high: _Place | None = None
    #: Whether of equal magnitudes the first count as the largest.
    descending: bool = False
    #: Share that is kept by chance; None without draws.
    density: float | None = None
    nothing: bool = False
    #: Factor afterwards.
    scale: float = 1.0

    def mask(self, difference: torch.Tensor, first: int, seed: bytes) -> torch.Tensor | None:
        """Return 1 for kept elements and 0 for others; None if all are kept."""
        if self.nothing:
            return torch.zeros_like(difference)
        if self.density is not None:
            return _drawn(difference, first, seed, self.density)
        kept = None
        for bound, inside in ((self.low, True), (self.high, False)):
            if bound is not None:
                found = _beyond(difference, first, bound, descending=self.descending)
                found = found if inside else ~found
                kept = found if kept is None else kept & found
        return None if kept is None else kept.to(difference.dtype)


def _beyond(difference: torch.Tensor, first: int, bound: tuple[float, int], *, descending: bool) -> torch.Tensor:
    """Return which elements are not before a place in the order of magnitudes."""
    magnitude, (value, position) = difference.abs().float(), bound
    cut = min(max(position + descending - first, 0), difference.numel())  # between equal ones of both kinds
    before, after = magnitude[:cut], magnitude[cut:]
    return torch.cat([before >= value, after > value] if descending else [before > value, after >= value])


def _drawn(difference: torch.Tensor, first: int, seed: bytes, density: float) -> torch.Tensor:
    """Return a mask of chance: each block of elements has a random state of its own, so that pieces agree."""
    parts = []
    for block in range(first // _BLOCK, -(-(first + difference.numel()) // _BLOCK)):
        number = int.from_bytes(blake2b(seed + block.to_bytes(8, "little"), digest_size=8).digest(), "little") >> 1
        parts.append(torch.rand(_BLOCK, generator=torch.Generator().manual_seed(number), device="cpu") < density)
    start = first % _BLOCK
    return torch.cat(parts)[start : start + difference.numel()].to(difference.dtype)


def _task_survey(merged: MergedTensor, read: Reader) -> list[_Kept]:
    """Return what is kept of each difference; all thresholds are found by the same passes."""
    count, others = merged.numel, _others(merged)
    wanted = [_ranks(merged, number, each) for number, each in enumerate(others)]
    asked = list(dict.fromkeys(rank for pair in wanted for rank in pair if rank and rank.at < count))
    ranks = dict(zip(asked, _places(merged, read, asked), strict=True)) if asked else {}
    kept = []
    for each, (low, high) in zip(others, wanted, strict=True):
        if merged.method == "task_arithmetic" or each["density"] >= 1:
            one = _Kept()
        elif merged.method.startswith("dare"):
            one = _Kept(density=each["density"])
        else:
            places = [ranks.get(rank) if rank else None for rank in (low, high)]
            one = _Kept(low=places[0], high=places[1], descending=bool(low and low.descending), nothing=low is None)
        kept.append(one)
    return _rescaled(merged, kept, read) if merged.shared["rescale"] else kept


class _Rank(Struct, frozen=True):
    """A place in the order of the magnitudes of one difference."""

    number: int
    at: int
    descending: bool


def _ranks(merged: MergedTensor, number: int, each: Mapping[str, Any]) -> tuple[_Rank | None, _Rank | None]:
    """Return the ranks of the first kept element, None if nothing is kept, and of the first one that is too large."""
    density, count = each["density"], merged.numel
    if density >= 1 or not count:
        return None, None
    if merged.method == "ties":
        least = max(1, int(density * count)) - 1
        return (_Rank(number, least, descending=True) if density > 0 else None), None
    if not merged.method.startswith("breadcrumbs") or int(density * count) == 0:
        return None, None
    wanted = int(density * count)
    least = max(0, count - wanted - int(each["gamma"] * count))
    return _Rank(number, least, descending=False), _Rank(number, least + wanted, descending=False)


def _rescaled(merged: MergedTensor, kept: list[_Kept], read: Reader) -> list[_Kept]:
    """Return what is kept with the factors that restore the sums of magnitudes, from one pass."""
    sums = {number: [0.0, 0.0] for number, one in enumerate(kept) if one != _Kept()}
    for first, differences in _differences(merged, read, sums) if sums else ():
        for number, difference in differences.items():
            mask = kept[number].mask(difference, first, _seed(merged, number))
            sums[number][0] += float(difference.abs().double().sum())
            sums[number][1] += float((difference if mask is None else difference * mask).abs().double().sum())
    for number, (before, after) in sums.items():
        kept[number] = replace(kept[number], scale=before / after if min(before, after) >= 1e-7 else 1.0)
    return kept


def _differences(
    merged: MergedTensor, read: Reader, numbers: Iterable[int]
) -> Iterator[tuple[int, dict[int, torch.Tensor]]]:
    for first, end in _pieces(merged):
        base, others = _base_and_others(merged, read(first, end))
        yield first, {number: others[number] - base for number in numbers}


def _places(merged: MergedTensor, read: Reader, ranks: Sequence[_Rank]) -> list[_Place]:
    """Return magnitude and position of the elements of some ranks, by counting 16 bits of magnitudes at a time."""
    numbers = sorted({rank.number for rank in ranks})
    narrow = getattr(torch, merged.dtype).itemsize == 2
    counts = {number: torch.zeros(1 << _HALF, dtype=torch.int64, device="cpu") for number in numbers}
    for _, found in _differences(merged, read, numbers):
        for number, difference in found.items():
            bits = _bits(difference)
            counts[number] += torch.bincount(bits if narrow else bits >> _HALF, minlength=1 << _HALF)
    states = [_below(counts[rank.number], rank.at, descending=rank.descending) for rank in ranks]
    if not narrow:
        inner = [torch.zeros(1 << _HALF, dtype=torch.int64, device="cpu") for _ in ranks]
        for _, found in _differences(merged, read, numbers):
            for i, (rank, (prefix, _)) in enumerate(zip(ranks, states, strict=True)):
                bits = _bits(found[rank.number])
                inner[i] += torch.bincount(bits[bits >> _HALF == prefix] & 0xFFFF, minlength=1 << _HALF)
        last = [
            _below(own, at, descending=rank.descending) for rank, (_, at), own in zip(ranks, states, inner, strict=True)
        ]
        states = [((prefix << _HALF) | low, at) for (prefix, _), (low, at) in zip(states, last, strict=True)]
    places: dict[int, _Place] = {}
    left = [at for _, at in states]
    for first, found in _differences(merged, read, numbers):
        for i, (rank, (bits_wanted, _)) in enumerate(zip(ranks, states, strict=True)):
            if i not in places:
                equal = (_bits(found[rank.number]) == bits_wanted).nonzero()
                if left[i] < len(equal):
                    at = int(equal[left[i]])
                    places[i] = float(found[rank.number][at].abs().float()), first + at
                left[i] -= len(equal)
        if len(places) == len(ranks):
            break
    return [places[i] for i in range(len(ranks))]


def _bits(difference: torch.Tensor) -> torch.Tensor:
    """Return magnitudes as integers of the same order."""
    magnitude = difference.abs()
    if magnitude.element_size() == 2:
        return magnitude.view(torch.int16)
    return magnitude.float().view(torch.int32)


def _below(counts: torch.Tensor, rank: int, *, descending: bool) -> tuple[int, int]:
    """Return the bin of an element by its rank, and its rank in the bin."""
    ends = (counts.flip(0) if descending else counts).cumsum(0)
    place = int(torch.searchsorted(ends, rank, right=True))
    inside = rank - (int(ends[place - 1]) if place else 0)
    return len(counts) - 1 - place if descending else place, inside


def _seed(merged: MergedTensor, number: int) -> bytes:
    return f"{merged.seed} {number} {merged.drawn_as}".encode()


def _task(merged: MergedTensor, tensors: Sequence[torch.Tensor], first: int, known: list[_Kept]) -> torch.Tensor:
    """Add the weighted differences to the base; with a consensus only those of the sign that prevails."""
    base, others = _base_and_others(merged, tensors)
    if not others:
        return base
    differences = base.new_empty((len(others), *base.shape))
    for number, (other, kept) in enumerate(zip(others, known, strict=True)):
        difference = other - base
        mask = kept.mask(difference, first, _seed(merged, number))
        if mask is not None:
            difference = difference * mask
            difference = difference if kept.scale == 1 else difference * kept.scale
        differences[number] = difference
    weights = torch.tensor([each["weight"] for each in _others(merged)], dtype=base.dtype, device="cpu").unsqueeze(-1)
    differences.mul_(weights)
    if merged.method.endswith("ties"):
        dtype = torch.int8 if merged.shared["int8_mask"] else base.dtype
        prevailing = (differences.sum(dim=0) >= 0).to(dtype) * 2 - 1
        agreeing = differences.sign().to(dtype) == prevailing
        mixed, divisor = (differences * agreeing).sum(dim=0), (weights * agreeing).sum(dim=0)
        divisor[divisor == 0] = 1
    else:
        mixed, divisor = differences.sum(dim=0), weights.sum(dim=0)
        divisor[divisor.abs() < 1e-8] = 1
    if merged.shared["normalize"]:
        mixed /= divisor
    if merged.shared["lambda"] != 1:
        mixed *= merged.shared["lambda"]
    return base + mixed


_SPARSE = ("task_arithmetic", "ties", "dare_linear", "dare_ties", "breadcrumbs", "breadcrumbs_ties")

_SURVEYS: Mapping[str, Callable[[MergedTensor, Reader], Any]] = {
    "slerp": _slerp_survey,
    "nuslerp": _nuslerp_survey,
    "model_stock": _model_stock_survey,
    **dict.fromkeys(_SPARSE, _task_survey),
}

_PIECES: Mapping[str, Callable[[MergedTensor, Sequence[torch.Tensor], int, Any], torch.Tensor]] = {
    "linear": _linear,
    "passthrough": _passthrough,
    "swa": _average,
    "ema": _average,
    "slerp": _slerp,
    "nuslerp": _found,
    "model_stock": _found,
    **dict.fromkeys(_SPARSE, _task),
}
