"""Contents of a save: an object in memory, its tensors and the storages that they share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from sluice._dtypes import ITEM_BYTES, dtype_name, why_no_cast
from sluice._errors import SaveError
from sluice.writing.contents import WrittenItem, stored_once
from sluice.writing.items import (
    StorageSpan,
    collect_spans,
    finished_dtype,
    flat_tensors,
    named_tensors,
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

    def distinct(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        return stored_once(dict(flat_tensors(self.tree)), identity)

    def outlines(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorOutline]:
        return {
            name: TensorOutline(finished_dtype(tensor, self._dtype), tuple(tensor.shape))
            for name, tensor in tensors.items()
        }

    def casts(self, tensors: Iterable[torch.Tensor]) -> Mapping[str, int]:  # noqa: ARG002 - a save does not count them
        return {}

    def lay_out(self, obj: object, named: Mapping[str, torch.Tensor]) -> TorchFile:
        walked = walk_object(obj, _attributes)
        spans = collect_spans(walked.tensors)
        finished = [finished_dtype(span.tensor, self._dtype) for span in spans.values()]
        return TorchFile(
            pickled=pickle_object(obj, walked, _descriptions(walked.tensors, spans, finished)),
            storages=tuple(zip(spans.values(), finished, strict=True)),
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
        number, span = numbers[key], spans[key]
        whole = tensor.is_contiguous() and tensor.numel() == span.end - span.start
        outline = TensorOutline(finished[number], tuple(tensor.shape))
        yield name, HashedTensor(outline=outline, storage=number if whole else None, source=tensor)


def identity(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Return equal keys for tensors with the same elements in the same memory; None if it is always stored."""
    if tensor.numel() == 0:
        return None
    view = tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride(), view


def _attributes(value: Any) -> Mapping[str, object] | None:
    if isinstance(value, torch.Tensor):
        refuse_unsupported(value)
        return vars(value)
    if is_plain(value):
        return None
    raise refusal(value)


def _descriptions(
    tensors: Iterable[torch.Tensor], spans: Mapping[Hashable, StorageSpan], finished: Sequence[str]
) -> Iterator[Call]:
    """Yield what rebuilds each tensor.

    Raises:
        SaveError: A tensor with ``requires_grad`` is cast to a dtype without gradients: torch would not load it.
    """
    numbers = {key: number for number, key in enumerate(spans)}
    for tensor in tensors:
        key = storage_key(tensor)
        span, number = spans[key], numbers[key]
        why = why_no_cast(dtype_name(tensor.dtype), finished[number], requires_grad=tensor.requires_grad)
        if why:
            raise SaveError(why)
        geometry = Geometry(
            storage=number,
            elements=span.end - span.start,
            dtype=finished[number],
            device=str(tensor.device),
            start=int(tensor.storage_offset()) - span.start,
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
        )
        yield rebuilt(
            geometry,
            requires_grad=tensor.requires_grad,
            parameter=isinstance(tensor, torch.nn.Parameter),
            attributes=vars(tensor),
        )
