"""The weights that a function quantizes: found on the meta device, and quantized when they have arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import nn

from sluice._threads import Workers
from sluice.engine.host_memory import HostMemory
from sluice.quantizing.functions import Quantize
from sluice.quantizing.inner_tensors import assemble, inner_bytes, inner_tensors
from sluice.quantizing.twins import alone, shell_of, twin_of

__all__ = ["QuantizedWeight", "find_quantized", "quantizing_threads"]

#: Memory of one call of a function of torchao on the CPU, in multiples of the weight. Measured: 2.0 to 2.3.
_TRANSIENT = 3

_AFTER = "Load the model without quantize=, and quantize it afterwards."

#: Rows of each of the two pieces with which it is tried whether rows can be quantized apart.
_TRIED_ROWS = 64

#: Smallest inner tensor that gets a mapping of its own.
_OWN_MAPPING_BYTES = 64 << 10

#: Bytes of a piece, in the dtype in which it is quantized. Smaller pieces take longer, larger ones more memory.
_PIECE_BYTES = 4 << 20


class QuantizedWeight(Struct, frozen=True, kw_only=True, eq=False):
    """A weight that is replaced by its quantized form."""

    #: Path of its module.
    path: str
    #: Its module.
    module: nn.Module
    #: Name of the parameter in the module.
    name: str
    #: Its finished form on the meta device.
    template: torch.Tensor
    #: The function that quantizes it.
    quantize: Quantize
    #: Whether pieces of rows are quantized one by one, because the result is the same.
    in_pieces: bool

    @property
    def transient_bytes(self) -> int:
        """Bytes that quantizing it takes for a moment, in addition to the weight and its finished form."""
        whole = self.template.numel() * self.template.dtype.itemsize
        return _TRANSIENT * (min(whole, _PIECE_BYTES) if self.in_pieces else whole)

    @property
    def nbytes(self) -> int:
        """Bytes of its finished form."""
        return inner_bytes(self.template)

    def finisher(self, workers: Workers) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the function that quantizes the weight when it has arrived.

        Args:
            workers: Threads for pieces.

        Everything that stays is allocated now. Small objects that stay, allocated between two pieces, would divide the
        free blocks of the heap: the temporary tensors of the next piece would not fit them, and the heap would grow.
        """
        if not self.in_pieces:
            return partial(_quantized, self)
        inner = [_empty(each) for each in inner_tensors(self.template)]
        return partial(_fill_in_pieces, self, inner, assemble(self.template, inner), workers)

    def attributes(self) -> Mapping[str, Any]:
        """Return the attributes that quantizing sets in the module, such as its representation."""
        twin = shell_of(self.module)
        vars(twin)["_parameters"][self.name] = torch.nn.Parameter(
            torch.empty(self.template.shape, dtype=self.template.dtype, device="meta"), requires_grad=False
        )
        before = dict(vars(twin))
        self.quantize(alone(twin, self.path))
        changed = {name: value for name, value in vars(twin).items() if before.get(name) is not value}
        return {
            name: MethodType(value.__func__, self.module) if getattr(value, "__self__", None) is twin else value
            for name, value in changed.items()
        }


def find_quantized(
    module: nn.Module, quantize: Quantize, dtypes: Mapping[int, torch.dtype]
) -> tuple[QuantizedWeight, ...]:
    """Return the weights of a module that a function would quantize; nothing is read, and the module is unchanged.

    Args:
        module: The module.
        quantize: The function.
        dtypes: Finished dtype of each parameter that changes it, by the identity of the parameter.

    Raises:
        ValueError: The function does not only change single parameters of modules, or needs their values.
    """
    twin = twin_of(module, dtypes)
    before = {path: (part, dict(part.named_parameters(recurse=False))) for path, part in twin.named_modules()}
    try:
        quantize(twin)
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(f"the function of quantize= fails on tensors without data: {error}. {_AFTER}") from error
    found = []
    apart: dict[object, bool] = {}
    for path, (part, old) in before.items():
        name = _changed_parameter(twin, path, part, old)
        if name is None:
            continue
        template = part.get_parameter(name).detach()
        weight = QuantizedWeight(
            path=path,
            module=module.get_submodule(path),
            name=name,
            template=template,
            quantize=quantize,
            in_pieces=False,
        )
        kind = (type(part), old[name].dtype, old[name].shape[1:], type(template), str(_forms(template)))
        if kind not in apart:
            apart[kind] = _equal_in_pieces(weight, old[name])
        found.append(replace(weight, in_pieces=apart[kind]))
    return tuple(found)


def _changed_parameter(twin: nn.Module, path: str, part: nn.Module, old: Mapping[str, nn.Parameter]) -> str | None:
    """Return the name of the parameter of a module that was quantized, or None.

    Raises:
        ValueError: More than one parameter was changed.
    """
    if twin.get_submodule(path) is not part:
        raise ValueError(
            f"the function of quantize= replaces the module {path!r}; replace modules before the load, while the model "
            "is on the meta device"
        )
    now = dict(part.named_parameters(recurse=False))
    changed = [name for name in {**old, **now} if now.get(name) is not old.get(name)]
    if len(changed) > 1 or not set(changed) <= now.keys() & old.keys():
        raise ValueError(f"the function of quantize= changes {changed} of the module {path!r} together. {_AFTER}")
    return changed[0] if changed else None


def _forms(template: torch.Tensor) -> list[tuple[torch.dtype, torch.Size]]:
    """Return dtype and shape of the rows of each inner tensor."""
    return [(inner.dtype, inner.shape[1:]) for inner in inner_tensors(template)]


def _equal_in_pieces(weight: QuantizedWeight, parameter: nn.Parameter) -> bool:
    """Return whether rows that are quantized apart have the same bits as rows that are quantized together."""
    if any(inner.shape[:1] != parameter.shape[:1] for inner in inner_tensors(weight.template)):
        return False
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((2 * _TRIED_ROWS, *parameter.shape[1:]), generator=generator).to(parameter.dtype)
    together = list(inner_tensors(_quantized(weight, rows.clone())))
    pieces = [list(inner_tensors(_quantized(weight, rows[i : i + _TRIED_ROWS].clone()))) for i in (0, _TRIED_ROWS)]
    return all(len(each) == len(together) for each in pieces) and all(
        torch.equal(_bits(torch.cat(apart)), _bits(whole)) for whole, *apart in zip(together, *pieces, strict=True)
    )


@contextmanager
def quantizing_threads(cores: int) -> Iterator[Workers]:
    """Lend threads for pieces, and keep the operations of torch in the thread that calls them.

    torch divides operations over a pool whose threads wait actively; next to threads that read, most calls would wait
    for one that does not run.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with Workers(cores, "sluice-quantizer") as workers:
            yield workers
    finally:
        torch.set_num_threads(threads)


def _fill_in_pieces(
    weight: QuantizedWeight,
    inner: Sequence[torch.Tensor],
    finished: torch.Tensor,
    workers: Workers,
    whole: torch.Tensor,
) -> torch.Tensor:
    """Quantize pieces of rows of a weight into the inner tensors of its finished form, and return that."""
    step = max(1, _PIECE_BYTES // max(1, whole[:1].nbytes) // _TRIED_ROWS) * _TRIED_ROWS
    tasks = [
        workers.start(partial(_fill_piece, weight, inner, whole, first, step)) for first in range(0, len(whole), step)
    ]
    for task in tasks:
        task.result()
    return finished


def _fill_piece(
    weight: QuantizedWeight, inner: Sequence[torch.Tensor], whole: torch.Tensor, first: int, rows: int
) -> None:
    # Grad and inference mode belong to each thread.
    with torch.inference_mode(mode=False), torch.no_grad():
        # A copy: a function may keep rows that need no change as a view of the weight.
        piece = _quantized(weight, whole[first : first + rows].clone())
        for target, part in zip(inner, inner_tensors(piece), strict=True):
            target[first : first + len(part)].copy_(part)


def _quantized(weight: QuantizedWeight, values: torch.Tensor) -> torch.Tensor:
    """Return the quantized form of all or some rows of a weight."""
    twin = shell_of(weight.module)
    vars(twin)["_parameters"][weight.name] = nn.Parameter(values, requires_grad=False)
    weight.quantize(alone(twin, weight.path))
    quantized = twin.get_parameter(weight.name).detach()
    vars(twin).clear()  # a cycle, such as a method that was set, would keep the values until a garbage collection
    return quantized


def _empty(template: torch.Tensor) -> torch.Tensor:
    """Return a new tensor on the host; a large one in a mapping, because in the heap it would separate free blocks."""
    if template.nbytes < _OWN_MAPPING_BYTES or not template.is_contiguous():
        return torch.empty_like(template, device="cpu")
    memory = HostMemory(template.nbytes, huge_pages=False)
    flat = torch.frombuffer(memory.mapping, dtype=template.dtype, count=template.numel(), offset=memory.start)
    return flat.view(template.shape)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
