"""Contents of a save: an object in memory, its tensors and the storages that they share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from sluice._dtypes import ITEM_BYTES, dtype_name, why_no_cast
from sluice._errors import SaveError
from sluice.writing.composites import count_parts, dense_parts, describe
from sluice.writing.contents import WrittenItem, stored_once
from sluice.writing.items import (
    StorageSpan,
    collect_spans,
    finished_dtype,
    flat_tensors,
    named_tensors,
    outlines,
    refuse_unsupported,
    storage_key,
)
from sluice.writing.pickle_opcodes import Call
from sluice.writing.pickle_walk import walk_object
from sluice.writing.safetensors import TensorOutline
from sluice.writing.torch_pickle import is_plain, pickle_object, refusal
from sluice.writing.torch_tensors import Geometry, rebuilt
from sluice.writing.torch_zip import HashedTensor, TorchFile

__all__ = ["HeldObject", "identity"]


class HeldObject:
    """An object in memory; see ``Contents``."""

    def __init__(self, obj: object, dtype: str | None) -> None:
        """Look at nothing yet.

        Args:
            obj: A state dict, or any nested object for a torch file.
            dtype: Dtype that real floating-point tensors are cast to; None keeps each dtype.
        """
        self.tree = obj
        self._dtype = dtype

    def named(self) -> Mapping[str, torch.Tensor]:
        return named_tensors(self.tree)

    def distinct(self, *, pickled: bool) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        tensors = dict(flat_tensors(self.tree, dense=not pickled))
        return stored_once(tensors, _identity_in_pickle if pickled else identity)

    def outlines(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorOutline]:
        return outlines(tensors, self._dtype)

    def casts(self, tensors: Iterable[torch.Tensor]) -> Mapping[str, int]:  # noqa: ARG002 - a save does not count them
        return {}

    def lay_out(self, obj: object, named: Mapping[str, torch.Tensor]) -> TorchFile:
        walked = walk_object(obj, _attributes)
        dense = [part for tensor in walked.tensors for part in dense_parts(tensor)]
        spans = collect_spans(dense)
        kept = _quantized_parts(walked.tensors)
        finished = [finished_dtype(span.tensor, None if key in kept else self._dtype) for key, span in spans.items()]
        storages = tuple(zip(spans.values(), finished, strict=True))
        described = _descriptions(walked.tensors, dense, spans, finished, self._dtype)
        return TorchFile(
            pickled=pickle_object(obj, walked, described),
            storages=storages,
            sizes=[
                (span.end - span.start) * ITEM_BYTES[name] for span, name in zip(spans.values(), finished, strict=True)
            ],
            tensors=walked.places,
            casts={},
            hashed=dict(_hashed(named, spans, finished)),
        )

    def pieces(
        self,
        items: Iterable[WrittenItem],
        drain: Callable[[], None],  # noqa: ARG002  the tensors live on
    ) -> Iterator[tuple[WrittenItem, torch.Tensor]]:
        for item in items:
            yield item, item.source.flat() if isinstance(item.source, StorageSpan) else item.source


def _hashed(
    named: Mapping[str, torch.Tensor], spans: Mapping[Hashable, StorageSpan], finished: Sequence[str]
) -> Iterator[tuple[str, HashedTensor]]:
    numbers = {key: number for number, key in enumerate(spans)}
    for name, tensor in named.items():
        key = storage_key(tensor)
        dtype = finished[numbers[key]]
        start = (int(tensor.storage_offset()) - spans[key].start) * ITEM_BYTES[dtype]
        apart = None if tensor.is_contiguous() else tensor
        outline = TensorOutline(dtype, tuple(tensor.shape))
        yield name, HashedTensor(outline=outline, storage=numbers[key], start=start, apart=apart)


def identity(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Return equal keys for tensors with the same elements in the same memory; None if it is always stored."""
    if tensor.numel() == 0 or tensor.layout != torch.strided or tensor.is_quantized:
        return None
    view = tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride(), view


def _identity_in_pickle(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Return equal keys for tensors whose ``torch.save`` files are equal; None if it is always stored."""
    same = identity(tensor)
    return None if same is None else (*same, type(tensor), tensor.requires_grad, id(tensor) if vars(tensor) else 0)


def _attributes(value: Any) -> Mapping[str, object] | None:
    if isinstance(value, torch.Tensor):
        refuse_unsupported(value, "", dense=False)
        return vars(value)
    if is_plain(value):
        return None
    raise refusal(value)


def _quantized_parts(tensors: Sequence[torch.Tensor]) -> set[Hashable]:
    """Return the storages of the components of quantized tensors, which are never cast.

    Raises:
        SaveError: The integers of a quantized tensor are also saved as a separate tensor.
    """
    quantized = [dense_parts(tensor) for tensor in tensors if tensor.is_quantized]
    if not quantized:
        return set()
    integers = {storage_key(parts[0]) for parts in quantized}
    for tensor in tensors:
        if not tensor.is_quantized and not integers.isdisjoint(map(storage_key, dense_parts(tensor))):
            raise SaveError("tensors of different dtypes share one storage", found=tensor.dtype)
    return {storage_key(part) for parts in quantized for part in parts}


def _check_gradients(tensor: torch.Tensor, dtype: str | None) -> None:
    """Refuse to cast a tensor with ``requires_grad`` to a dtype without gradients: torch would not load it."""
    own = dtype_name(tensor.dtype)
    why = why_no_cast(own, finished_dtype(tensor, dtype), requires_grad=tensor.requires_grad)
    if why:
        raise SaveError(why)


def _descriptions(
    tensors: Iterable[torch.Tensor],
    dense: Iterable[torch.Tensor],
    spans: Mapping[Hashable, StorageSpan],
    finished: Sequence[str],
    dtype: str | None,
) -> Iterator[Call]:
    """Yield the description of each tensor; ``dense`` yields the ``dense_parts`` of all of them in order."""
    numbers = {key: number for number, key in enumerate(spans)}
    waiting = iter(dense)

    def geometry(part: torch.Tensor) -> Geometry:
        key = storage_key(part)
        span, number = spans[key], numbers[key]
        return Geometry(
            storage=number,
            elements=span.end - span.start,
            dtype=finished[number],
            device=str(part.device),
            start=int(part.storage_offset()) - span.start,
            shape=tuple(part.shape),
            stride=part.stride(),
        )

    for tensor in tensors:
        _check_gradients(tensor, dtype)
        parts = [geometry(part) for part in islice(waiting, count_parts(tensor))]
        yield rebuilt(
            describe(tensor, parts),
            requires_grad=tensor.requires_grad,
            parameter=isinstance(tensor, torch.nn.Parameter),
            attributes=vars(tensor),
        )
