"""Calls of a constructor that involve tensors without memory.

``ConstructorCalls`` sees every function of torch that a constructor calls, also the attributes of tensors. A call in
which a tensor on meta takes part runs on meta as a whole: torch itself computes numbers from a mix of real tensors and
tensors on meta. Initialisers are skipped, moves are noted (see ``emptied``). What would need values is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from traceback import walk_stack
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from sluice._errors import EmptyInitError
from sluice._private_torch import storage_use_count, transforms_are_active
from sluice.modules.emptied import EmptiedStorages, device_of, moved_to, remember_move
from sluice.modules.leftovers import is_plain, map_tensors, tensors_in
from sluice.modules.swap import swap_data, writes

# Storages have no public identity, and torch passes private functions to modes.
# ruff: noqa: SLF001

__all__ = ["ConstructorCalls", "refusal"]

_Function = Callable[..., Any]
_T: Any = torch.Tensor
_CPU = torch.device("cpu")

#: Functions that write to a tensor, but change more than values, or something else.
_NOT_VALUES = frozenset({
    "__set__", "as_strided_", "detach_", "rename_", "requires_grad_", "resize_", "resize_as_", "resize_as_sparse_",
    "set_", "share_memory_", "sparse_resize_", "sparse_resize_and_clear_", "squeeze_", "swapaxes_", "swapdims_", "t_",
    "transpose_", "unsqueeze_",
})  # fmt: skip

#: Directories whose frames are not the constructor's.
_NOT_CONSTRUCTORS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))

#: Functions of any tensor that neither read nor change values, for speed.
_UNCHANGED = frozenset({
    *(getattr(_T, name).__get__ for name in ("data", "dtype", "is_meta", "layout", "ndim", "requires_grad", "shape")),
    _T.detach, _T.dim, _T.is_complex, _T.is_floating_point, _T.numel, _T.size, _T.untyped_storage, _T.__hash__,
    _T.requires_grad_, torch._C._set_grad_enabled,
})  # fmt: skip

#: Functions with which constructors compute masks, and those with ``out`` that do the same.
_FILLS: dict[_Function, _Function] = {
    **{each: each for each in (torch.ones, torch.tril, torch.triu, torch.zeros)},
    _T.tril: torch.tril,
    _T.triu: torch.triu,
}

#: Sizes of results whose memory is kept for the next one, in bytes, and how many are kept at most.
_KEPT_BYTES = range(1 << 18, 1 << 24)
_MOST_KEPT = 4

#: Arguments with which norms write to running statistics, which autograd does not see.
_KEEPS_STATISTICS = frozenset({"training", "use_input_stats"})


class ConstructorCalls(TorchFunctionMode):
    """A context of one thread that lets constructors work with tensors without memory."""

    def __init__(
        self, *, empties: bool = True, drop: Callable[[torch.Tensor], torch.Tensor | None] = lambda _: None
    ) -> None:
        super().__init__()
        self.emptied = EmptiedStorages()
        #: Memory of large results, some still in use.
        self.kept: list[torch.UntypedStorage] = []
        #: Whether ``tensor.data = other`` may leave a tensor without the memory that it has.
        self.empties = empties
        #: Returns a tensor on meta in place of one to which unknown values are written, if files hold its values.
        self.drop = drop

    def __torch_function__(
        self, func: _Function, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``, on meta if a tensor on meta takes part, or skip it."""
        options = kwargs or {}
        if func in _UNCHANGED:
            return func(*args, **options)
        skipped = _changed_on_meta(func, args, options)
        if skipped is not None:
            self.emptied.note_change(skipped)
            return skipped
        tensors = list(tensors_in((args, options), 4))
        if any(map(self.emptied.is_stale, tensors)):
            raise refusal(func)
        if not any(tensor.is_meta for tensor in tensors):
            out = self._kept_memory(func, args, options)
            return func(*args, **options) if out is None else _FILLS[func](*args, **options, out=out)
        call: _Function = _SPECIAL.get(func, ConstructorCalls.run)
        return call(self, func, args, options)

    def _kept_memory(self, func: _Function, args: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor | None:
        """Return a tensor for a large mask in memory that nothing uses any more; None for other results.

        The first touch of new memory takes longer than the mask, and every layer would have new memory: glibc gives
        that of the mask before to a parameter, which stays untouched.
        """
        if func not in _FILLS or not args or torch.get_default_device() != _CPU:
            return None
        if not {"diagonal", "dtype"}.issuperset(name for name, value in options.items() if value is not None):
            return None
        if isinstance(source := args[0], torch.Tensor):
            if source.device != _CPU or source.requires_grad or not (is_plain(source) and source.is_contiguous()):
                return None
            shape, dtype = source.shape, source.dtype
        else:
            shape = torch.Size(source if isinstance(source, (tuple, list)) else args)
            dtype = options.get("dtype") or torch.get_default_dtype()
        nbytes = shape.numel() * dtype.itemsize if isinstance(dtype, torch.dtype) else 0  # or a type of Python
        if nbytes not in _KEPT_BYTES or torch._C._len_torch_dispatch_stack() or transforms_are_active():
            return None
        free = (kept for kept in self.kept if kept.nbytes() == nbytes and storage_use_count(kept._cdata) == 1)
        if (storage := next(free, None)) is None:
            storage = torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]
            self.kept = [*self.kept[1 - _MOST_KEPT :], storage]
        self.emptied.forget(storage)
        return torch.empty(0, dtype=dtype).set_(storage, 0, shape, torch.empty(shape, device="meta").stride())

    def run(self, func: _Function, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run a call on meta.

        Raises:
            EmptyInitError: It needs values, or writes to a tensor with memory that no file will fill.
        """
        replaced: list[torch.Tensor] = []
        real: dict[int, torch.Tensor] = {}

        def on_meta(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_meta:
                return tensor
            with torch.inference_mode(mode=False):  # inference tensors do not count changes
                replaced.append(torch.empty_like(tensor, device="meta", requires_grad=False))
            real[id(replaced[-1])] = tensor
            return replaced[-1]

        shapes, shape_options = map_tensors((args, options), on_meta)
        if replaced and not _KEEPS_STATISTICS.isdisjoint(name for name, value in options.items() if value is True):
            raise refusal(func)
        try:
            result = func(*shapes, **shape_options)
        except Exception as error:
            # torch raises several kinds for missing values; other errors are the constructor's own.
            if isinstance(error, NotImplementedError) or "meta" in str(error).lower() or func == _T.__format__:
                raise refusal(func) from error
            raise
        stand_ins = {id(tensor): self.drop(real[id(tensor)]) for tensor in replaced if tensor._version}
        if any(stand_in is None for stand_in in stand_ins.values()) or any(tensor.requires_grad for tensor in replaced):
            raise refusal(func)
        result = map_tensors(result, lambda tensor: stand_ins.get(id(tensor), tensor))
        home = next((moved_to(tensor) for tensor in tensors_in((args, options), 4) if tensor.is_meta), None)
        for tensor in tensors_in(result):
            if home is not None and tensor.is_meta and moved_to(tensor) is None:
                remember_move(tensor, home)
        return result

    def _clone(self, func: _Function, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Clone without torch's compiler, which its own function imports on meta."""
        if not args or args[0].requires_grad or options.get("memory_format") not in {None, torch.preserve_format}:
            return self.run(func, args, options)
        return self.run(torch.empty_like, args, {})

    def _set_data(self, func: _Function, args: tuple[Any, ...], _options: dict[str, Any]) -> Any:
        tensor, value = args
        if tensor.is_meta and not value.is_meta and is_plain(value):
            value = self.emptied.stand_in(value)
        elif self.empties and value.is_meta and not tensor.is_meta and swap_data(tensor, value.detach()):
            return None
        return func(tensor, value)

    def _move(self, func: _Function, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Note the device; a tensor with memory may move to the device and dtype of one on meta."""
        tensor = args[0]
        device, dtype, layout = _destination(func, args[1:], options)
        device, dtype = device or device_of(tensor), dtype or tensor.dtype
        if not tensor.is_meta:
            return tensor.to(device, dtype)
        if (device, dtype) == (device_of(tensor), tensor.dtype) and layout is None and not options.get("copy"):
            return tensor
        moved = torch.empty_like(tensor, dtype=dtype, memory_format=layout or torch.preserve_format)
        if device.type not in {"cpu", "meta"}:
            remember_move(moved, device)
        return moved


_SPECIAL: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.clone, _T.clone), ConstructorCalls._clone),
    **dict.fromkeys((_T.to, _T.cuda, _T.cpu, _T.xpu), ConstructorCalls._move),
    _T.data.__set__: ConstructorCalls._set_data,
    _T.device.__get__: lambda _, _func, args, _options: device_of(args[0]),
    # Module.to may get a tensor whose device and dtype are meant.
    torch._C._nn._parse_to: lambda _, func, args, options: (device_of(args[0]), *func(*args, **options)[1:]),
    # A number that tells ties from other tensors; torch returns 0 for every tensor on meta.
    _T.data_ptr: lambda _, _func, args, _options: (
        args[0].untyped_storage()._cdata + args[0].storage_offset() * args[0].itemsize
    ),
}


def _changed_on_meta(func: _Function, args: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor | None:
    """Return the tensor on meta of which a call changes the values and nothing else, such as an initialiser; or None.

    It is not run: torch imports its compiler for some, which takes a second. Functions of ``torch.nn.init`` and the
    wrappers that libraries put in their place are known by their names.
    """
    name = getattr(func, "__name__", "")
    if not writes(name) or name in _NOT_VALUES:
        return None
    tensor = args[0] if args else options.get("tensor")  # functions of nn.init are called with keywords only
    return tensor if isinstance(tensor, torch.Tensor) and tensor.is_meta else None


def refusal(func: _Function) -> EmptyInitError:
    """Return the error for a call that needs values, with the innermost line that is neither torch's nor sluice's."""
    frames = (frame for frame, _ in walk_stack(sys._getframe()))
    frame = next((each for each in frames if not each.f_code.co_filename.startswith(_NOT_CONSTRUCTORS)), None)
    where = "the constructor"
    if frame is not None:
        owner = frame.f_locals.get("self")
        name = f"{type(owner).__name__}." if isinstance(owner, nn.Module) else ""
        where = f"{name}{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"
    called = getattr(func, "__name__", "a function")
    return EmptyInitError(f"{where} needs the values of a parameter in {called}(), which is on the meta device")


def _destination(
    func: _Function, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[torch.device | None, torch.dtype | None, torch.memory_format | None]:
    """Return device, dtype and memory format that ``to``, ``cpu``, ``cuda`` or ``xpu`` asks for."""
    layout = options.get("memory_format")
    other = args[0] if args else options.get("other")
    if isinstance(other, torch.Tensor):
        return device_of(other), other.dtype, layout
    if func == _T.to:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **{k: v for k, v in options.items() if k != "copy"})
    else:
        dtype, place = None, options.get("device", func.__name__) if other is None else other
        device = torch.device(func.__name__, place) if isinstance(place, int) else torch.device(place)
    if device is not None and device.index is None and device.type not in {"cpu", "meta"}:
        module = getattr(torch, device.type, None)  # a tensor shows the current one
        available = module is not None and hasattr(module, "is_available") and module.is_available()
        device = torch.device(device.type, module.current_device() if available else 0)
    return device, dtype, layout
