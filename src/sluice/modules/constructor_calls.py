"""Calls of a constructor that involve tensors without memory.

``ConstructorCalls`` sees every function of torch that a constructor calls, also the attributes of tensors. There are
two kinds of tensors without memory, both on the meta device, and a ``History`` for each:

- *empty* ones: parameters and persistent buffers, which the checkpoint will fill, and what is computed from them. Calls
  run on meta, which gives shapes and dtypes, and are recorded. Initialisers are recorded only. ``device`` is the device
  that ordinary construction would give; ``to`` and its relatives change it. If a number or an array is needed, the
  recorded calls are repeated on real memory;
- *deferred* ones: results of ``torch.empty``, ``zeros``, ``ones`` and ``full``. Most become parameters and are empty
  from then on. The first call that is not among ``_LAZY`` gives them memory, in place, and they are ordinary tensors.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _device

from sluice._errors import EmptyInitError
from sluice.modules.histories import Call, Histories, History, Replay, UnknownValuesError, empty_on_meta, tensors_in
from sluice.modules.meta_initialisers import INITIALISERS, SET_DATA
from sluice.modules.swap import swap_data

__all__ = ["ConstructorCalls"]

_Function = Callable[..., Any]
_T = torch.Tensor
_META, _CPU = torch.device("meta"), torch.device("cpu")


def _getters(*names: str) -> frozenset[Any]:
    return frozenset(getattr(_T, name).__get__ for name in names)


#: Functions that neither read nor change values, and whose results are the same on meta.
_UNCHANGED = _getters(
    "dtype", "grad", "grad_fn", "is_leaf", "itemsize", "layout", "nbytes", "ndim", "requires_grad", "shape", "_version"
) | frozenset({
    _T.dim, _T.element_size, _T.is_complex, _T.is_contiguous, _T.is_floating_point, _T.numel, _T.nelement, _T.size,
    _T.stride, _T.storage_offset, _T.requires_grad_, _T.requires_grad.__set__, _T.grad.__set__, _T.__len__,  # type: ignore[attr-defined]
    _T.untyped_storage, _T.ndimension, torch._C._set_grad_enabled, torch._has_compatible_shallow_copy_type,
    torch.is_floating_point, torch.is_complex, torch.numel,
    _T.register_hook, _T.register_post_accumulate_grad_hook, _T.__hash__,
})  # fmt: skip

#: Functions whose results are deferred.
_FACTORIES = frozenset({torch.empty, torch.full, torch.ones, torch.zeros})
#: Arguments with which they are not.
_NOT_DEFERRED = frozenset({"device", "layout", "names", "out", "pin_memory", "requires_grad", "memory_format"})

_NUMBERS = {bool, int, float, complex}

#: Functions that leave deferred tensors deferred: deterministic, and without results other than tensors.
_LAZY = _getters("data", "T", "mT") | frozenset({
    torch.tril, torch.triu, _T.tril, _T.triu, _T.tril_, _T.triu_, torch.logical_not, _T.logical_not, _T.__invert__,
    _T.bitwise_not, _T.masked_fill, _T.masked_fill_, _T.view, _T.reshape, _T.unsqueeze, _T.squeeze, _T.expand,
    _T.detach, _T.bool, _T.float, _T.half, _T.bfloat16, _T.double, _T.contiguous, _T.clone, _T.transpose, _T.t,
    _T.permute, _T.flatten, _T.fill_, _T.zero_, nn.init.constant_,
})  # fmt: skip

#: Functions whose results have the shape and dtype of their tensor and are contiguous; on meta, torch would import its
#: compiler for them.
_CONTIGUOUS = frozenset({torch.tril, torch.triu, _T.tril, _T.triu})

#: Functions that copy a tensor in its own layout, likewise; and the memory formats that mean it.
_CLONES = frozenset({torch.clone, _T.clone})
_PRESERVING = (None, torch.preserve_format)

#: Functions that change values and nothing else, and are not run on meta.
_CHANGES = INITIALISERS | {_T.tril_, _T.triu_}

#: Functions that need values, and give wrong ones or an error on meta.
_READERS = frozenset({
    _T.item, _T.tolist, _T.numpy, _T.__array__, _T.__bool__, _T.__float__, _T.__int__, _T.__index__, _T.__complex__,
    _T.__contains__, _T.equal, _T.allclose, _T.is_nonzero, torch.equal, torch.allclose, torch.is_nonzero,
    _T.__dlpack__,
})  # fmt: skip
#: Readers whose arrays share memory with the tensor: they are read-only, because what is written there cannot be seen.
_ARRAYS = frozenset({_T.numpy, _T.__array__})

#: Functions that make a tensor like another one, without its values.
_LIKE = frozenset({
    torch.empty_like, torch.full_like, torch.ones_like, torch.rand_like, torch.randint_like, torch.randn_like,
    torch.zeros_like, _T.new, _T.new_empty, _T.new_full, _T.new_ones, _T.new_tensor, _T.new_zeros,
})  # fmt: skip

#: Casts, which keep parameters and buffers empty when a module is cast.
_CASTS = frozenset({_T.half, _T.float, _T.double, _T.bfloat16, _T.bool, _T.int, _T.long})

#: Initialisers that write every element.
_OVERWRITING = INITIALISERS - {_T.clamp_, _T.erfinv_}

#: Initialisers by name: libraries wrap those of ``torch.nn.init``, and torch then passes the wrapper.
_INITIALISER_NAMES = {function.__name__: function for function in INITIALISERS if isinstance(function, FunctionType)}


class ConstructorCalls(TorchFunctionMode):
    """A context of one thread that lets constructors work with tensors without memory."""

    def __init__(self, histories: Histories) -> None:
        super().__init__()
        self.histories = histories

    def __torch_function__(
        self, func: _Function, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``, record it, or both."""
        options = kwargs or {}
        if func in _UNCHANGED:
            return func(*args, **options)
        special = _SPECIAL.get(func)
        if special is not None:
            return special(self, func, args, options)
        if func.__class__ is FunctionType and func.__name__ in _INITIALISER_NAMES:
            return self._initialise(_INITIALISER_NAMES[func.__name__], args, options, wrapper=func)
        return self._call(func, args, options)

    def give_memory(self, history: History, *, seeded: bool = False, determined: bool = False) -> bool:
        """Give the held tensors of a history memory and their values, in place.

        Args:
            history: The history.
            seeded: Whether random values are drawn from a private generator.
            determined: Whether nothing is done if the values are not those of ordinary construction.

        Returns:
            Whether they have memory now.
        """
        live = history.live()
        replay = Replay(self.histories, seeded=seeded)
        try:
            values = [replay.tensor(tensor) for tensor in live]
        except UnknownValuesError:
            return False
        if determined and not replay.determined:
            return False
        history.held = []  # torch does not swap tensors to which weak references exist
        with torch.inference_mode(mode=False), torch.no_grad():
            return all([swap_data(tensor, value) for tensor, value in zip(live, values, strict=True)])

    def _call(self, func: _Function, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        managed = self._managed(args, options)
        if not managed:
            return func(*args, **options)
        if func not in _LAZY and not any(history.empty for _, history in managed):
            for _, history in managed:
                self.give_memory(history)
            managed = self._managed(args, options)
            if not managed:
                return func(*args, **options)
        return self._record(func, args, options, managed)

    def _managed(self, *values: object) -> list[tuple[torch.Tensor, History]]:
        of = self.histories.of
        return [
            (tensor, history)
            for tensor in tensors_in(values, 4)
            if tensor.is_meta and (history := of(tensor)) is not None
        ]

    def _record(
        self,
        func: _Function,
        args: tuple[Any, ...],
        options: dict[str, Any],
        managed: list[tuple[torch.Tensor, History]],
    ) -> Any:
        """Run a call on meta and record what it changes and returns."""
        call = self.histories.freeze_call(func, args, options)
        if func in _READERS or (func == _T.__format__ and not args[0].dim()):
            return self._read(func, args, options, call)
        if func in _CONTIGUOUS and not options.get("out") and args:
            return self._noted(torch.empty(args[0].shape, dtype=args[0].dtype, device=_META), call, managed)
        if func in _CLONES and not args[0].requires_grad and options.get("memory_format") in _PRESERVING:
            return self._noted(empty_on_meta(args[0]), call, managed)
        stand_ins: list[torch.Tensor] = []
        shapes, shape_options = _on_meta(args, stand_ins), _on_meta(options, stand_ins)
        before = [_version(tensor) for tensor, _ in managed]
        try:
            result = func(*shapes, **shape_options)
        except Exception as error:  # noqa: BLE001  torch raises several kinds for missing values, and it is raised again
            return self._read(func, args, options, call, error=error)
        if any(map(_version, stand_ins)):
            return self._read(func, args, options, call)  # it writes to a tensor with memory
        changed = {
            id(history): (tensor, history)
            for (tensor, history), version in zip(managed, before, strict=True)
            if _version(tensor) != version
        }
        for tensor, history in changed.values():
            overwrites = func == _T.copy_ and tensor.nbytes == history.storage.nbytes()
            self.histories.change(history, call, overwrites=overwrites)
        return self._noted(result, call, managed, hold=func not in _CASTS)

    def _noted(
        self, result: Any, call: Call | None, managed: list[tuple[torch.Tensor, History]], *, hold: bool = True
    ) -> Any:
        """Start the histories of the tensors in a result; return the result."""
        for position, tensor in enumerate(tensors_in(result)):
            if not tensor.is_meta:
                continue
            history = self.histories.of(tensor)
            if history is None:
                own = None if call is None else Call(call.function, call.args, call.options, position)
                empty = any(other.empty for _, other in managed)
                history = self.histories.derive(tensor, own, managed[0][1].device, empty=empty)
                if hold or not empty:
                    history.held.append(weakref.ref(tensor))
            elif not history.empty and not any(other is tensor for other in history.live()):
                if tensor is result and tensor._base is not None:
                    result = tensor = _without_base(tensor)
                history.held.append(weakref.ref(tensor))
        return result

    def _read(
        self,
        func: _Function,
        args: tuple[Any, ...],
        options: dict[str, Any],
        call: Call | None,
        *,
        error: Exception | None = None,
    ) -> Any:
        """Run a call that needs values on those of a replay; the tensors in its result are on meta again."""
        replay = Replay(self.histories)
        managed = self._managed(args, options)
        try:
            real_args, real_options = replay.values(args), replay.values(options)
        except UnknownValuesError as unknown:
            if error is not None and "meta" not in str(error):
                raise error from None
            raise _refusal(func, unknown.history, "they depend on a tensor that was not kept") from error
        kept = [tensor for tensor in tensors_in((args, options), 4) if not tensor.is_meta]
        written = [_version(tensor) for tensor in kept]
        inputs = [tensor for tensor in tensors_in((real_args, real_options), 4)]
        before = [_version(tensor) for tensor in inputs]
        result = func(*real_args, **real_options)
        if not replay.determined and [_version(tensor) for tensor in kept] != written:
            raise _refusal(func, managed[0][1], "they are random, and a tensor that keeps its values depends on them")
        originals = list(tensors_in((args, options), 4))
        for original, tensor, version in zip(originals, inputs, before, strict=True):
            history = self.histories.of(original)
            if history is not None and (_version(tensor) != version or func == _T.__dlpack__):
                self.histories.change(history, None if func == _T.__dlpack__ else call, overwrites=False)
        if func in _ARRAYS:
            result.flags.writeable = False
        return self._emptied(result, call, managed, kept)

    def _emptied(
        self, result: Any, call: Call | None, managed: list[tuple[torch.Tensor, History]], kept: list[torch.Tensor]
    ) -> Any:
        """Replace the tensors that a replay computed by tensors on meta."""
        if isinstance(result, torch.Tensor):
            if any(result is tensor for tensor in kept):
                return result
            meta = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")
            return self._noted(meta, call, managed)
        if type(result) in {tuple, list} and any(isinstance(member, torch.Tensor) for member in result):
            metas = [
                torch.empty_strided(member.shape, member.stride(), dtype=member.dtype, device="meta")
                if isinstance(member, torch.Tensor)
                else member
                for member in result
            ]
            return self._noted(type(result)(metas), call, managed)
        return result

    def _defer(self, func: _Function, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if _device.CURRENT_DEVICE is not None or not _NOT_DEFERRED.isdisjoint(options):
            device = options.get("device")
            plain = options.keys() & _NOT_DEFERRED == {"device"} and (device is None or device in {"cpu", _CPU})
            if not plain or (device is None and _device.CURRENT_DEVICE is not None):
                return self._call(func, args, options)
        if func == torch.full and not {type(value) for value in (*args[1:], options.get("fill_value", 0))} <= _NUMBERS:
            return self._call(func, args, options)
        if self._managed(args, options):
            return self._call(func, args, options)
        tensor = _uninitialised(func, args, options)
        if not tensor.numel():
            return func(*args, **options)  # it has no values, and lazy parameters start as one
        call = Call(func, args, {**options, "dtype": tensor.dtype, "device": _CPU}, 0, tensor.detach())
        history = self.histories.start(tensor, call, _CPU, empty=False)
        history.held.append(weakref.ref(tensor))
        return tensor

    def _initialise(
        self, func: _Function, args: tuple[Any, ...], options: dict[str, Any], wrapper: _Function | None = None
    ) -> Any:
        # Functions of nn.init are called with keywords only.
        tensor = args[0] if args else options.get("tensor")
        history = self.histories.of(tensor) if isinstance(tensor, torch.Tensor) else None
        if history is None or tensor is None:
            skipped = isinstance(tensor, torch.Tensor) and tensor.is_meta
            return tensor if skipped else (wrapper or func)(*args, **options)
        if not history.empty and not history.has_parameter and func not in _LAZY:
            return self._call(wrapper or func, args, options)
        call = self.histories.freeze_call(func, args, options)
        whole = func in _OVERWRITING and tensor.nbytes == history.storage.nbytes()
        self.histories.change(history, call, overwrites=whole)
        return tensor

    def _move(self, func: _Function, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        tensor = args[0]
        device, dtype, layout = _destination(self, func, args[1:], options)
        history = self.histories.of(tensor)
        if history is None:
            other = args[1] if len(args) > 1 else None
            if isinstance(other, torch.Tensor) and self.histories.of(other) is not None:
                return tensor.to(device, other.dtype, **options)
            return func(*args, **options)
        if not history.empty:
            if device in {None, _CPU} and layout is None and not options.get("copy"):
                return tensor if dtype in {None, tensor.dtype} else self._call(_T.to, (tensor, dtype), {})
            self.give_memory(history)
            return func(*args, **options)
        device, dtype = device or history.device, dtype or tensor.dtype
        if (device, dtype) == (history.device, tensor.dtype) and layout is None and not options.get("copy"):
            return tensor
        call = self.histories.freeze_call(_T.to, (tensor,), {"dtype": dtype})
        moved = torch.empty_like(tensor, dtype=dtype, memory_format=layout) if layout else empty_on_meta(tensor, dtype)
        if device != _META:
            self.histories.derive(moved, call, device, empty=True).owner = history.owner
        return moved

    def _parse_to(self, func: _Function, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Answer ``Module.to``, which may name a tensor whose device and dtype are meant."""
        device, *others = func(*args, **options)
        history = self.histories.of(args[0]) if args and isinstance(args[0], torch.Tensor) else None
        return (device if history is None else history.device, *others)

    def _set_data(self, func: _Function, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        tensor, value = args
        history, values = self.histories.of(tensor), self.histories.of(value)
        if history is not None and values is None and not value.is_meta and not history.empty:
            self.give_memory(history)
        elif tensor.is_meta and not value.is_meta:
            meta = torch.empty_like(value, device="meta")
            new = self.histories.start(meta, self.histories.keep(value), value.device, empty=True)
            new.owner = "" if history is None else history.owner
            return func(tensor, meta)
        elif values is not None and not values.empty:
            if history is None or not history.empty:
                self.give_memory(values)
                if history is not None:
                    self.give_memory(history)
            else:
                values.empty, values.owner = True, history.owner
        return func(tensor, value)

    def _like(self, func: _Function, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        tensor = args[0] if args else options.get("input")
        history = self.histories.of(tensor) if isinstance(tensor, torch.Tensor) else None
        if history is None or tensor is None:
            return self._call(func, args, options)
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=history.device)
        return func(like, *args[1:], **{name: value for name, value in options.items() if name != "input"})

    def _describe(self, func: _Function, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        history = self.histories.of(args[0])
        if history is None or (history.empty and func == _IS_META):
            return func(*args, **options)
        return _DESCRIPTIONS[func](history.device)

    def _data_ptr(self, func: _Function, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        history = self.histories.of(args[0])
        if history is None or not history.empty:
            return self._call(func, args, options)
        # Constructors compare addresses to find ties; all are 0 on meta.
        return history.storage._cdata + args[0].storage_offset() * args[0].itemsize

    def _deepcopy(self, func: _Function, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        tensor = args[0]
        history = self.histories.of(tensor)
        if history is None or not history.empty:
            return self._call(func, args, options)
        call = self.histories.freeze_call(torch.clone, (tensor,), {})
        memo = args[1] if len(args) > 1 else options.get("memo", {})
        if id(tensor) in memo:
            return memo[id(tensor)]
        if type(tensor) is _T and not tensor.requires_grad and not vars(tensor):
            copied = memo[id(tensor)] = empty_on_meta(tensor)  # torch would import its compiler
        else:
            copied = func(*args, **options)
        if self.histories.of(copied) is None:
            self.histories.derive(copied, call, history.device, empty=True).owner = history.owner
        return copied


_IS_META = _T.is_meta.__get__  # type: ignore[attr-defined]  # a C descriptor
_DESCRIPTIONS: dict[Any, Callable[[torch.device], Any]] = {
    _T.device.__get__: lambda device: device,  # type: ignore[attr-defined]  # as above
    _T.is_cuda.__get__: lambda device: device.type == "cuda",  # type: ignore[attr-defined]  # as above
    _T.is_cpu.__get__: lambda device: device.type == "cpu",  # type: ignore[attr-defined]  # as above
    _IS_META: lambda _: False,
    _T.get_device: lambda device: -1 if device.index is None else device.index,
}

_SPECIAL: dict[Any, _Function] = {
    **dict.fromkeys(_FACTORIES, ConstructorCalls._defer),
    **dict.fromkeys(_CHANGES, ConstructorCalls._initialise),
    **dict.fromkeys(_LIKE, ConstructorCalls._like),
    **dict.fromkeys(_DESCRIPTIONS, ConstructorCalls._describe),
    **dict.fromkeys((_T.to, _T.cuda, _T.cpu, _T.xpu), ConstructorCalls._move),
    SET_DATA: ConstructorCalls._set_data,
    torch._C._nn._parse_to: ConstructorCalls._parse_to,
    _T.data_ptr: ConstructorCalls._data_ptr,
    _T.__deepcopy__: ConstructorCalls._deepcopy,
}


def _uninitialised(func: _Function, args: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
    """Return a tensor on meta as a factory makes it. All but ``torch.empty`` import torch's compiler there."""
    options = {**options, "device": _META}
    if func != torch.full:
        return torch.empty(*args, **options)
    size = args[0] if args else options.pop("size")
    value = args[1] if len(args) > 1 else options.pop("fill_value")
    if options.get("dtype") is None:
        kinds = {bool: torch.bool, int: torch.int64}
        options["dtype"] = kinds.get(type(value)) or torch.result_type(torch.empty(0, device=_META), value)
    return torch.empty(size, **options)


def _destination(
    calls: ConstructorCalls, func: _Function, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[torch.device | None, torch.dtype | None, torch.memory_format | None]:
    """Return device, dtype and memory format that ``to``, ``cpu``, ``cuda`` or ``xpu`` asks for."""
    layout = options.get("memory_format")
    if func != _T.to:
        name = func.__name__
        device = args[0] if args else options.get("device")
        if isinstance(device, int):
            device = torch.device(name, device)
        return _indexed(torch.device(device or name)), None, layout
    other = args[0] if args else options.get("other")
    if isinstance(other, torch.Tensor):
        history = calls.histories.of(other)
        return other.device if history is None else history.device, other.dtype, layout
    device, dtype, *_ = torch._C._nn._parse_to(*args, **{k: v for k, v in options.items() if k != "copy"})
    return None if device is None else _indexed(device), dtype, layout


def _indexed(device: torch.device) -> torch.device:
    """Return the device with the index that a tensor on it would show."""
    if device.index is not None or device.type in {"cpu", "meta"}:
        return torch.device(device.type) if device.type == "cpu" else device
    module = getattr(torch, device.type, None)
    available = module is not None and hasattr(module, "is_available") and module.is_available()
    return torch.device(device.type, module.current_device() if available else 0)


def _on_meta(value: Any, stand_ins: list[torch.Tensor]) -> Any:
    """Return arguments with tensors on meta in place of those with memory; scalars are allowed next to meta."""
    if isinstance(value, torch.Tensor):
        if value.is_meta or not value.dim():
            return value
        stand_ins.append(torch.empty_like(value, device="meta"))
        return stand_ins[-1]
    if type(value) in {tuple, list}:
        return type(value)([_on_meta(member, stand_ins) for member in value])
    if type(value) is dict:
        return {name: _on_meta(member, stand_ins) for name, member in value.items()}
    return value


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _without_base(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same view without autograd's reference to its base, which torch does not swap as long as it exists."""
    view = torch.empty(0, dtype=tensor.dtype, device="meta")
    return view.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


#: Directories whose frames are not the constructor's.
_NOT_CONSTRUCTORS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def _refusal(func: _Function, history: History | None, reason: str) -> EmptyInitError:
    """Return the error for values that cannot be computed."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_CONSTRUCTORS):
        frame = frame.f_back
    where = "the constructor"
    if frame is not None:
        owner = frame.f_locals.get("self")
        name = f"{type(owner).__name__}." if isinstance(owner, nn.Module) else ""
        where = f"{name}{frame.f_code.co_name} ({frame.f_code.co_filename}, line {frame.f_lineno})"
    what = history.owner if history is not None and history.owner else "a parameter or buffer"
    return EmptyInitError(
        f"{where} needs the values of {what} in {getattr(func, '__name__', func)}(), and under empty_init() {reason}"
    )
