"""Contents of a save: an object in memory, its tensors and the storages that they share.

Of each storage the elements from the first to the last that the saved tensors need are written.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
from msgspec import Struct

from sluice._dtypes import ITEM_BYTES, dtype_name, is_castable, why_no_cast
from sluice._errors import SaveError
from sluice._options import DEFAULT_LIMITS
from sluice.entries.tree import children, component
from sluice.records import Entry, elements_of
from sluice.records.geometry import span_elements
from sluice.writing.contents import WrittenItem, stored_once
from sluice.writing.pickle_walk import walk_object
from sluice.writing.safetensors import TensorOutline
from sluice.writing.torch_pickle import is_plain, pickle_object, refusal
from sluice.writing.torch_tensors import Call, rebuilt, stored
from sluice.writing.torch_zip import HashedTensor, TorchFile

__all__ = ["HeldObject", "finished_dtype", "identity", "refuse_unsupported", "tensor_items"]


class _StorageSpan(Struct):
    """Range of one storage that the saved tensors need."""

    #: One of these tensors; all share its device and dtype.
    tensor: torch.Tensor
    #: First needed element, in elements from the start of the storage.
    start: int
    #: One past the last needed element.
    end: int
    #: Number of the storage in the file.
    number: int
    #: Dtype in the file.
    dtype: str

    @property
    def elements(self) -> int:
        """Number of needed elements."""
        return self.end - self.start

    def flat(self) -> torch.Tensor:
        """Return the needed elements as a one-dimensional tensor."""
        return self.tensor.as_strided((self.elements,), (1,), self.start)


class HeldObject(Struct, eq=False):
    """An object in memory; see ``Contents``."""

    #: A state dict, or any nested object for a torch file.
    tree: object
    #: Dtype that real floating-point tensors are cast to; None keeps each dtype.
    dtype: str | None

    def named(self) -> Mapping[str, torch.Tensor]:
        return _named_tensors(self.tree)

    def distinct(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        tensors = dict(tensor_items(self.tree))
        for name, tensor in tensors.items():
            refuse_unsupported(tensor, name)
        return stored_once(tensors, identity)

    def outlines(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorOutline]:
        return {
            name: TensorOutline(finished_dtype(tensor, self.dtype), tuple(tensor.shape))
            for name, tensor in tensors.items()
        }

    def casts(self, tensors: Iterable[torch.Tensor]) -> Mapping[str, int]:  # noqa: ARG002 - a save does not count them
        return {}

    def lay_out(self, obj: object, named: Mapping[str, torch.Tensor]) -> TorchFile:
        walked = walk_object(obj, _attributes)
        spans = _collect_spans(walked.tensors, self.dtype)
        return TorchFile(
            pickled=pickle_object(obj, walked, _descriptions(walked.tensors, spans)),
            storages=[(span, span.dtype) for span in spans.values()],
            sizes=[span.elements * ITEM_BYTES[span.dtype] for span in spans.values()],
            tensors=walked.places,
            casts={},
            hashed=dict(_hashed(named, spans)),
        )

    def pieces(
        self,
        items: Iterable[WrittenItem],
        drain: Callable[[], None],  # noqa: ARG002  the tensors live on
    ) -> Iterator[tuple[WrittenItem, torch.Tensor]]:
        for item in items:
            yield item, item.source.flat() if isinstance(item.source, _StorageSpan) else item.source


def _hashed(
    named: Mapping[str, torch.Tensor], spans: Mapping[Hashable, _StorageSpan]
) -> Iterator[tuple[str, HashedTensor]]:
    for name, tensor in named.items():
        span = spans[_storage_key(tensor)]
        whole = tensor.is_contiguous() and tensor.numel() == span.elements
        outline = TensorOutline(span.dtype, tuple(tensor.shape))
        yield name, HashedTensor(outline=outline, storage=span.number if whole else None, source=tensor)


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


def _descriptions(tensors: Iterable[torch.Tensor], spans: Mapping[Hashable, _StorageSpan]) -> Iterator[Call]:
    """Yield what rebuilds each tensor.

    Raises:
        SaveError: A tensor with ``requires_grad`` is cast to a dtype without gradients: torch would not load it.
    """
    for tensor in tensors:
        span = spans[_storage_key(tensor)]
        why = why_no_cast(dtype_name(tensor.dtype), span.dtype, requires_grad=tensor.requires_grad)
        if why:
            raise SaveError(why)
        view = Entry(
            elements=elements_of(span.dtype),
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            storage=span.number,
            storage_offset=int(tensor.storage_offset()) - span.start if tensor.numel() else 0,
            parameter=isinstance(tensor, torch.nn.Parameter),
            requires_grad=tensor.requires_grad,
            attributes=vars(tensor),
        )
        yield rebuilt(view, stored(view, span.elements, str(tensor.device)))


def refuse_unsupported(tensor: torch.Tensor, name: str = "") -> None:
    """Raise ``SaveError`` for a tensor that no format stores; ``name`` is for messages."""
    problem, advice = "", None
    if hasattr(tensor, "refuse"):  # a weight of a stream
        tensor.refuse("be saved")
    if type(tensor) not in {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}:
        problem = f"tensors of class {type(tensor).__qualname__} cannot be saved"
        if type(tensor).__module__.startswith("torchao."):
            advice = "Save weights that torchao quantized as .safetensors or as a Hugging Face directory."
    elif tensor.is_nested:
        problem, advice = "a nested tensor cannot be written", "Save what its unbind() returns."
    elif tensor.layout != torch.strided or tensor.is_quantized:
        problem = f"a {tensor.dtype if tensor.is_quantized else tensor.layout} tensor cannot be written"
        advice = "Save sparse and quantized tensors with torch.save; sluice reads them."
    elif tensor.is_meta:
        problem = "tensors on the meta device have no values to save"
    elif _end(tensor) * tensor.itemsize > tensor.untyped_storage().nbytes():  # after it is memory of others
        problem = "its storage was freed or shrunk"
        advice = "FSDP frees weights between their uses: save the state dict that it gathers."
    if problem:
        raise SaveError(problem, tensor=name or None, advice=advice)


def _end(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) + span_elements(tuple(tensor.shape), tensor.stride())


def finished_dtype(tensor: torch.Tensor, dtype: str | None) -> str:
    """Return the dtype of a tensor in the file; only real floating-point tensors are cast."""
    own = dtype_name(tensor.dtype)
    return dtype if dtype is not None and is_castable(own) else own


def _storage_key(tensor: torch.Tensor) -> Hashable:
    """Return a key that is equal for tensors that share stored bytes.

    Conjugate and negative views are stored resolved, so they do not share bytes with the storage that they view.
    """
    # torch.save identifies storages by this number, too.
    return (tensor.untyped_storage()._cdata, tensor.is_conj(), tensor.is_neg())  # noqa: SLF001


def _collect_spans(tensors: Iterable[torch.Tensor], dtype: str | None) -> dict[Hashable, _StorageSpan]:
    """Return the range of each storage that tensors need, by ``_storage_key``.

    Raises:
        SaveError: Tensors of different dtypes share one storage.
    """
    spans: dict[Hashable, _StorageSpan] = {}
    for tensor in tensors:
        start, end = int(tensor.storage_offset()), _end(tensor)
        key = _storage_key(tensor)
        span = spans.get(key)
        if span is None:
            spans[key] = _StorageSpan(tensor, start, end, len(spans), finished_dtype(tensor, dtype))
        elif span.tensor.dtype != tensor.dtype:
            raise SaveError(
                "tensors of different dtypes share one storage", expected=span.tensor.dtype, found=tensor.dtype
            )
        elif tensor.numel():
            span.start, span.end = (min(span.start, start), max(span.end, end)) if span.elements else (start, end)
    return spans


def tensor_items(state: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the items of a flat state dict, which may be tensors of any class.

    Raises:
        SaveError: It is not a mapping, a name is not a string, or a value is not a tensor.
    """
    if not isinstance(state, Mapping):
        raise SaveError("this format can only hold a state dict", found=type(state).__name__)
    for name, value in state.items():
        if not isinstance(name, str):
            raise SaveError(f"tensor names must be strings, not {type(name).__name__}", tensor=repr(name))
        if not isinstance(value, torch.Tensor):
            raise SaveError(
                "this format stores tensors only; save a nested training state to a .pt file",
                tensor=name,
                found=type(value).__name__,
            )
        yield name, value


def _named_tensors(state: object) -> dict[str, torch.Tensor]:
    """Return the tensors of a nested object by the dotted names under which ``sluice.open`` shows them.

    Raises:
        SaveError: Two tensors have the same name, or the object is nested deeper than ``sluice.open`` reads.
    """
    named: dict[str, torch.Tensor] = {}
    waiting = [("", state, 0)]
    while waiting:
        name, value, depth = waiting.pop()
        if isinstance(value, torch.Tensor):
            if name in named:
                raise SaveError("two tensors have the same dotted name; a manifest needs unique names", tensor=name)
            named[name] = value
        elif isinstance(value, (dict, list, tuple)):
            if depth == DEFAULT_LIMITS.depth:
                raise SaveError("the object is nested deeper than sluice reads", tensor=name, expected=depth)
            prefix = f"{name}." if depth else ""
            waiting += [(prefix + component(key), child, depth + 1) for key, child in reversed([*children(value)])]
    return named
