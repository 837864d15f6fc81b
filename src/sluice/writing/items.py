"""Storages and tensors of a save: which elements of each storage are written, under which names and dtypes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping

import torch
from msgspec import Struct

from sluice._dtypes import dtype_name, is_castable
from sluice._errors import SaveError
from sluice._options import Limits
from sluice.entries.tree import component

__all__ = [
    "StorageSpan",
    "collect_spans",
    "finished_dtype",
    "flat_tensors",
    "named_tensors",
    "refuse_unsupported",
    "storage_key",
    "tensor_items",
]


class StorageSpan(Struct):
    """Range of one storage that the saved tensors need."""

    #: One of these tensors; all share its device and dtype.
    tensor: torch.Tensor
    #: First needed element, in elements from the start of the storage.
    start: int
    #: One past the last needed element.
    end: int

    def flat(self) -> torch.Tensor:
        """Return the needed elements as a one-dimensional tensor."""
        return self.tensor.as_strided((self.end - self.start,), (1,), self.start)


def refuse_unsupported(tensor: torch.Tensor, name: str = "") -> None:
    """Raise ``SaveError`` for a tensor that no format stores; ``name`` is for messages."""
    problem, advice = "", None
    if hasattr(tensor, "refuse"):  # a weight of a stream
        tensor.refuse("be saved")
    if type(tensor) not in {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}:
        problem = f"tensors of class {type(tensor).__qualname__} cannot be saved"
        if type(tensor).__module__.startswith("torchao."):
            advice = "Save weights that torchao quantized as .safetensors or as a Hugging Face directory."
    elif tensor.layout != torch.strided or tensor.is_quantized:
        problem = f"a {tensor.dtype if tensor.is_quantized else tensor.layout} tensor cannot be written"
        advice = "Save sparse and quantized tensors with torch.save; sluice reads them."
    elif tensor.is_meta:
        problem = "tensors on the meta device have no values to save"
    if problem:
        raise SaveError(problem, tensor=name or None, advice=advice)


def finished_dtype(tensor: torch.Tensor, dtype: str | None) -> str:
    """Return the dtype of a tensor in the file; only real floating-point tensors are cast."""
    own = dtype_name(tensor.dtype)
    return dtype if dtype is not None and is_castable(own) else own


def storage_key(tensor: torch.Tensor) -> Hashable:
    """Return a key that is equal for tensors that share stored bytes.

    Conjugate and negative views are stored resolved, so they do not share bytes with the storage that they view.
    """
    # torch.save identifies storages by this number, too.
    return (tensor.untyped_storage()._cdata, tensor.is_conj(), tensor.is_neg())  # noqa: SLF001


def collect_spans(tensors: Iterable[torch.Tensor]) -> dict[Hashable, StorageSpan]:
    """Return the range of each storage that tensors need, by ``storage_key``.

    Raises:
        SaveError: Tensors of different dtypes share one storage.
    """
    spans: dict[Hashable, StorageSpan] = {}
    for tensor in tensors:
        start = int(tensor.storage_offset())
        steps = (max(size - 1, 0) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        end = start + 1 + sum(steps) if tensor.numel() else start
        span = spans.setdefault(storage_key(tensor), StorageSpan(tensor, start, end))
        if span.tensor.dtype != tensor.dtype:
            raise SaveError(
                "tensors of different dtypes share one storage", expected=span.tensor.dtype, found=tensor.dtype
            )
        span.start, span.end = min(span.start, start), max(span.end, end)
    return spans


def flat_tensors(state: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a flat state dict.

    Raises:
        SaveError: It is not a mapping, a name is not a string, or a value is not a tensor that the format stores.
    """
    for name, value in tensor_items(state):
        refuse_unsupported(value, name)
        yield name, value


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


def named_tensors(state: object) -> dict[str, torch.Tensor]:
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
            if depth == Limits().depth:
                raise SaveError("the object is nested deeper than sluice reads", tensor=name, expected=Limits().depth)
            prefix = f"{name}." if depth else ""
            children = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [(prefix + component(key), child, depth + 1) for key, child in reversed(list(children))]
    return named
