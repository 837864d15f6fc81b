"""What a save writes: storages with a name, and the tensors of a state dict over them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from sluice._dtypes import dtype_name, is_castable
from sluice._errors import SaveError
from sluice._options import Limits
from sluice.entries.tree import component
from sluice.writing.composites import QUANTIZED_DTYPES, SPARSE_LAYOUTS
from sluice.writing.safetensors import TensorOutline

__all__ = [
    "StorageSpan",
    "collect_spans",
    "finished_dtype",
    "flat_tensors",
    "named_tensors",
    "outlines",
    "refuse_unsupported",
    "storage_key",
]


@dataclass(slots=True)
class StorageSpan:
    """The part of one storage that the saved tensors need."""

    #: One of them: device and dtype are those of all.
    tensor: torch.Tensor
    #: First element needed, in elements from the start of the storage.
    start: int
    #: First element behind what is needed.
    end: int

    def flat(self) -> torch.Tensor:
        """Return the needed elements, in one dimension."""
        return self.tensor.as_strided((self.end - self.start,), (1,), self.start)


def refuse_unsupported(tensor: torch.Tensor, name: str, *, dense: bool = True) -> None:
    """Raise ``SaveError`` for a tensor that has no plain bytes.

    Args:
        tensor: The tensor.
        name: Its name, for messages.
        dense: Whether only dense tensors can be stored, and none that are made of several.
    """
    problem = ""
    if type(tensor) not in {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}:
        problem = f"a tensor of class {type(tensor).__qualname__} has no plain bytes to save"
    elif tensor.layout != torch.strided and (dense or tensor.layout not in SPARSE_LAYOUTS):
        problem = f"a tensor of layout {tensor.layout} has no place in this format"
    elif tensor.is_quantized and (dense or tensor.dtype not in QUANTIZED_DTYPES):
        problem = f"a tensor of dtype {tensor.dtype} has no place in this format"
    elif tensor.is_meta:
        problem = "a tensor on the meta device has no values"
    if problem:
        raise SaveError(problem, tensor=name)


def finished_dtype(tensor: torch.Tensor, dtype: str | None) -> str:
    """Return the dtype that a tensor has in the file: real floating point is cast, nothing else."""
    own = dtype_name(tensor.dtype)
    return dtype if dtype is not None and is_castable(own) else own


def outlines(tensors: Mapping[str, torch.Tensor], dtype: str | None) -> dict[str, TensorOutline]:
    """Return what the file says of each tensor."""
    return {name: TensorOutline(finished_dtype(tensor, dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}


def storage_key(tensor: torch.Tensor) -> Hashable:
    """Return what tells apart what is stored: tensors of one storage, and their conjugates and negatives.

    These are stored as what they stand for, so that they cannot share bytes with what they were made of.
    """
    # torch.save tells storages apart by this number, too.
    return (tensor.untyped_storage()._cdata, tensor.is_conj(), tensor.is_neg())  # noqa: SLF001


def collect_spans(tensors: Iterable[torch.Tensor]) -> dict[Hashable, StorageSpan]:
    """Return what dense tensors need of each storage, by ``storage_key``.

    Raises:
        SaveError: Tensors of different dtypes view one storage.
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


def flat_tensors(state: Mapping[str, object], *, dense: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a flat state dict.

    Args:
        state: The state dict.
        dense: Whether only dense tensors can be stored.

    Raises:
        SaveError: A name or a value is of another kind.
    """
    for name, value in state.items():
        if not isinstance(name, str):
            raise SaveError(f"names of tensors are texts, not {type(name).__name__}", tensor=repr(name))
        if not isinstance(value, torch.Tensor):
            raise SaveError(
                "this format holds tensors only; a nested training state goes into a .pt file",
                tensor=name,
                found=type(value).__name__,
            )
        refuse_unsupported(value, name, dense=dense)
        yield name, value


def named_tensors(state: object) -> dict[str, torch.Tensor]:
    """Return the tensors of a nested object by the dotted names that ``sluice.open`` will show.

    Raises:
        SaveError: Two have the same name, they are nested deeper than ``sluice.open`` reads, or one is made of several.
    """
    found: dict[str, torch.Tensor] = {}
    waiting = [("", state, 0)]
    while waiting:
        name, value, depth = waiting.pop()
        if isinstance(value, torch.Tensor):
            if name in found:
                raise SaveError(
                    "two tensors have the same dotted name, which a manifest cannot tell apart", tensor=name
                )
            if value.layout != torch.strided or value.is_quantized:
                raise SaveError(
                    "a manifest has no hash for sparse and quantized tensors",
                    tensor=name,
                    found=value.dtype if value.is_quantized else value.layout,
                )
            found[name] = value
        elif isinstance(value, (dict, list, tuple)):
            if depth == Limits().depth:
                raise SaveError("this is nested deeper than sluice reads", tensor=name, expected=Limits().depth)
            prefix = f"{name}." if depth else ""
            children = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [(prefix + component(key), child, depth + 1) for key, child in reversed(list(children))]
    return found
