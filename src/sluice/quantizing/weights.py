"""The weights that a function quantizes: found on the meta device, and quantized when they have arrived."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from msgspec import Struct
from torch import nn

from sluice._threads import Workers
from sluice.engine.accelerators import allocate_on, current_device
from sluice.engine.host_memory import HostMemory
from sluice.quantizing.functions import Quantize, SingleWeight, twin_of
from sluice.quantizing.inner_tensors import assemble, inner_tensors, is_assembled
from sluice.quantizing.pieces import Pieces, fill_in_pieces, find_pieces, piece_bytes, pieces_transient_bytes

__all__ = ["QuantizedWeight", "find_quantized", "quantizing_threads"]

#: Memory of one call of a function of torchao or bitsandbytes on the CPU, in multiples of the weight. Measured: 2.0 to
#: 2.6.
_TRANSIENT = 3

#: Segments of an accelerator's allocator for smaller tensors of such a call.
_SEGMENTS_BYTES = 40 << 20

_AFTER = "Load the model without quantize=, and quantize it afterwards."

#: Numbers of threads that the current loads found; only that of the first is not the 1 of a load.
_found: list[int] = []
_lock = threading.Lock()

#: Smallest inner tensor that gets a mapping of its own.
_OWN_MAPPING_BYTES = 64 << 10


class QuantizedWeight(Struct, frozen=True, kw_only=True, eq=False):
    """A weight that is replaced by its quantized form."""

    #: The weight before.
    single: SingleWeight
    #: Its finished form on the meta device.
    template: torch.Tensor
    #: Attributes that quantizing sets in the module, such as its representation, with tensors on the meta device.
    attributes: Mapping[str, Any]
    #: The module to whose copy on the meta device they refer.
    twin: nn.Module
    #: Bytes before, in the dtype in which it is quantized.
    whole_bytes: int
    #: How pieces of rows are quantized one by one; None if the result would differ.
    pieces: Pieces | None
    #: Where it is quantized, and stays.
    device: torch.device
    #: Whether other owners keep the weight before, so that a plain result is a new parameter, too.
    untied: bool = False

    def transient_bytes(self, cores: int) -> int:
        """Return the bytes that quantizing it takes for a moment, in addition to the weight and its finished form."""
        whole = _TRANSIENT * self.whole_bytes + (0 if self.device.type == "cpu" else _SEGMENTS_BYTES)
        return whole if self.pieces is None else min(whole, pieces_transient_bytes(cores, self.device))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each plain tensor of its finished form."""
        return tuple(inner.nbytes for inner in inner_tensors(self.template))

    def finisher(self, workers: Workers, cores: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the function that quantizes the weight when it has arrived.

        Args:
            workers: Threads for pieces.
            cores: Their number.

        Everything that stays is allocated now. Small objects that stay, allocated between two pieces, would divide the
        free blocks of the heap: the temporary tensors of the next piece would not fit them, and the heap would grow.
        """
        pieces = self.pieces
        if pieces is None and self.device.type == "cpu":
            return self._whole
        inner = [_empty(each, self.device) for each in inner_tensors(self.template)]
        finished = self._assembled(inner)

        def finish(whole: torch.Tensor) -> torch.Tensor:
            with current_device(self.device):
                if pieces is None:
                    return self._copied(self._whole(whole), inner, finished)
                nbytes = piece_bytes(cores, self.device)
                fill_in_pieces(self.single, pieces, inner, workers, whole, nbytes=nbytes)
                return finished

        return finish

    def _whole(self, whole: torch.Tensor) -> torch.Tensor:
        quantized = self.single.quantized(whole)
        return quantized if is_assembled(quantized) else self._assembled(inner_tensors(quantized))

    def _copied(self, quantized: torch.Tensor, inner: Sequence[torch.Tensor], finished: torch.Tensor) -> torch.Tensor:
        """Copy a quantized weight to the memory that was reserved for it; one of a different form stays."""
        parts = list(inner_tensors(quantized))
        if [(part.shape, part.dtype) for part in parts] != [(each.shape, each.dtype) for each in inner]:
            return quantized
        for target, part in zip(inner, parts, strict=True):
            target.copy_(part)
        return finished

    def _assembled(self, inner: Iterable[torch.Tensor]) -> torch.Tensor:
        finished = assemble(self.template, inner, {id(self.twin): self.single.module})
        # Integers cannot require gradients, as the parameter that they replace may.
        integers = type(finished) is torch.Tensor and not finished.is_floating_point()
        own = self.untied or is_assembled(finished) or integers
        return nn.Parameter(finished, requires_grad=False) if own else finished

    def set_attributes(self) -> None:
        """Give the module, which holds the finished weight, what quantizing sets in addition to it."""
        module = self.single.module
        parameter = module.get_parameter(self.single.name)
        parameter.requires_grad_(self.template.requires_grad)
        finished = vars(parameter)
        instead = {id(value): finished[name] for name, value in vars(self.template).items() if name in finished}
        instead[id(self.twin)] = module
        vars(module).update({name: copy.deepcopy(value, dict(instead)) for name, value in self.attributes.items()})


def find_quantized(
    module: nn.Module, quantize: Quantize, forms: Mapping[int, tuple[torch.dtype, torch.device]]
) -> tuple[QuantizedWeight, ...]:
    """Return the weights of a module that a function would quantize; nothing is read, and the module is unchanged.

    Args:
        module: The module.
        quantize: The function.
        forms: Dtype before it is quantized and device of each parameter that is loaded, by its identity.

    Raises:
        ValueError: The function does not only change single parameters of modules, or needs their values.
    """
    twin = twin_of(module, {key: dtype for key, (dtype, _) in forms.items()})
    before = {path: (part, type(part), _held(part)) for path, part in twin.named_modules()}
    dtypes = {parameter: parameter.dtype for parameter in twin.parameters()}
    try:
        quantize(twin)
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(f"the function of quantize= fails on tensors without data: {error}. {_AFTER}") from error
    if any(parameter.dtype != dtype for parameter, dtype in dtypes.items()):
        raise ValueError(f"the function of quantize= casts weights in place; write dtype= for that. {_AFTER}")
    after = {path: (part, type(part)) for path, part in twin.named_modules()}
    for path in {**before, **after}:
        if before.get(path, ())[:2] != after.get(path):
            problem = f"the function of quantize= replaces or adds the module {path!r}"
            raise ValueError(f"{problem}; do so before the load, while the model is on the meta device")
    found = []
    pieces: dict[object, Pieces | None] = {}
    for path, (part, _, old) in before.items():
        name = _changed_parameter(path, old, _held(part))
        if name is None:
            continue
        own = module.get_submodule(path)
        single = SingleWeight(path=path, module=own, name=name, quantize=quantize)
        template = part.get_parameter(name)
        _, device = forms.get(id(own.get_parameter(name)), (None, torch.device("cpu")))
        kind = (
            device,
            type(part),
            old[name].dtype,
            old[name].shape,
            type(template),
            _options(old[name]),
            *((inner.dtype, inner.shape) for inner in inner_tensors(template)),
        )
        if kind not in pieces:
            pieces[kind] = find_pieces(single, old[name], template, device)
        found.append(
            QuantizedWeight(
                single=single,
                template=template,
                attributes=_set_attributes(own, part),
                twin=part,
                whole_bytes=old[name].numel() * old[name].dtype.itemsize,
                pieces=pieces[kind],
                device=device,
            )
        )
    return tuple(found)


def _set_attributes(module: nn.Module, twin: nn.Module) -> dict[str, Any]:
    """Return the attributes that a module's twin has got, except for its tensors and parts."""
    before, own = vars(module), {"_parameters", "_buffers", "_modules"}
    return {name: value for name, value in vars(twin).items() if name not in own and before.get(name) is not value}


def _options(parameter: nn.Parameter) -> str:
    """Return the plain attributes of a parameter, which may tell its library how to quantize it."""
    return str({name: value for name, value in vars(parameter).items() if isinstance(value, (int, str, torch.dtype))})


def _held(module: nn.Module) -> dict[str, Any]:
    """Return the parameters and buffers of a module itself by name, and None for those that it lacks."""
    return {**module._parameters, **module._buffers}  # noqa: SLF001  names and None too


def _changed_parameter(path: str, old: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return the name of the parameter of a module that was quantized, or None.

    Raises:
        ValueError: More than one tensor was changed, or a buffer.
    """
    changed = [name for name in {**old, **now} if now.get(name) is not old.get(name)]
    if len(changed) > 1 or not all(isinstance(held.get(name), nn.Parameter) for name in changed for held in (old, now)):
        raise ValueError(f"the function of quantize= changes {changed} of the module {path!r} together. {_AFTER}")
    return changed[0] if changed else None


@contextmanager
def quantizing_threads(cores: int) -> Iterator[Workers]:
    """Lend threads for pieces, and keep the operations of torch in the thread that calls them.

    torch divides operations over a pool whose threads wait actively; next to threads that read, most calls would wait
    for one that does not run.
    """
    with _lock:
        _found.append(torch.get_num_threads())
        torch.set_num_threads(1)
    try:
        with Workers(cores, "sluice-quantizer") as workers:
            yield workers
    finally:
        with _lock:
            torch.set_num_threads(_found[0])
            _found.pop()


def _empty(template: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a new tensor; a large one on the host in a mapping, because in the heap it would separate free blocks."""
    if device.type != "cpu":
        strided = torch.empty_strided(template.shape, template.stride(), dtype=template.dtype, device="meta")
        flat = allocate_on(device, strided.untyped_storage().nbytes() // template.itemsize, template.dtype)
        return flat.as_strided(template.shape, template.stride())
    if template.nbytes < _OWN_MAPPING_BYTES or not template.is_contiguous():
        return torch.empty_like(template, device="cpu")
    memory = HostMemory(template.nbytes, huge_pages=False)
    flat = torch.frombuffer(memory.mapping, dtype=template.dtype, count=template.numel(), offset=memory.start)
    return flat.view(template.shape)
