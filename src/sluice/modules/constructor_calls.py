"""Calls of a constructor that involve tensors without memory.

``ConstructorCalls`` sees every function of torch that a constructor calls, also the attributes of tensors. There are
two kinds of tensors without memory, both on the meta device, and a ``History`` for each:

- *empty* ones: parameters and persistent buffers, which the checkpoint will fill, and what is computed from them. Calls
  run on meta, which gives shapes and dtypes, and are recorded. Initialisers are recorded only. ``device`` is the device
  that ordinary construction would give; ``to`` and its relatives change it. If a number or an array is needed, the
  recorded calls are repeated on real memory;
- *deferred* ones: results of ``torch.empty``, ``zeros``, ``ones`` and ``full``. Most become parameters and are empty
  from then on. The first call that is not in
  ``LAZY`` gives them memory, in place, and they are ordinary tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sluice.modules import function_kinds as kinds
from sluice.modules.emptied import Emptied
from sluice.modules.factories import can_defer, uninitialised
from sluice.modules.histories import Call, Histories, History, Replay, UnknownValuesError, empty_on_meta, tensors_in
from sluice.modules.refusals import refusal
from sluice.modules.special_calls import SPECIAL_CALLS
from sluice.modules.swap import swap_data

# Storages have no public identity, and torch passes private functions to modes.
# ruff: noqa: SLF001

__all__ = ["ConstructorCalls"]

_Function = Callable[..., Any]
_T: Any = torch.Tensor
_META, _CPU = torch.device("meta"), torch.device("cpu")


class ConstructorCalls(TorchFunctionMode):
    """A context of one thread that lets constructors work with tensors without memory."""

    def __init__(self, histories: Histories) -> None:
        super().__init__()
        self.histories = histories
        self.emptied = Emptied(histories)

    def __torch_function__(
        self, func: _Function, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``, record it, or both."""
        options = kwargs or {}
        if func in kinds.UNCHANGED:
            return func(*args, **options)
        special = _SPECIAL.get(func)
        if special is not None:
            return special(self, func, args, options)
        if isinstance(func, FunctionType) and func.__name__ in kinds.INITIALISER_NAMES:
            own: Any = kinds.INITIALISER_NAMES[func.__name__]
            return self._initialise(own, args, options, wrapper=func)
        return self.run(func, args, options)

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
        if history.buffers and values:
            self.emptied.share(values[0].untyped_storage(), history.buffers)
        history.held = []  # torch does not swap tensors to which weak references exist
        with torch.inference_mode(mode=False), torch.no_grad():
            swapped = [swap_data(tensor, value) for tensor, value in zip(live, values, strict=True)]
        return all(swapped)

    def give_arguments_memory(self, *values: object) -> History | None:
        """Give memory to the deferred tensors among arguments; return the history of one that still has none."""
        with torch._C.DisableTorchFunction():
            for _, history in self._managed(values):
                if not history.empty:
                    self.give_memory(history)
            return next((history for _, history in self._managed(values)), None)

    def run_with_values(self, func: _Function, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run a call that torch does not show to function modes; it never sees a tensor without memory."""
        rest = self.give_arguments_memory(args, options)
        with torch._C.DisableTorchFunction():
            if rest is None:
                return func(*args, **options)
            return self._read(func, args, options, self.histories.freeze_call(func, args, options))

    def run(self, func: _Function, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run a call that has no rule of its own."""
        managed = self._managed(args, options)
        if not managed:
            return func(*args, **options)
        if func not in kinds.LAZY and not any(history.empty for _, history in managed):
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
        reads = func in kinds.READERS or (func == _T.__format__ and not args[0].dim())
        if reads or any(not tensor.is_meta for tensor in tensors_in(kinds.changed_by(func, args, options))):
            return self._read(func, args, options, call)
        if func in kinds.CONTIGUOUS and not options.get("out") and args:
            return self._noted(torch.empty(args[0].shape, dtype=args[0].dtype, device=_META), call, managed)
        if func in kinds.CLONES and not args[0].requires_grad and options.get("memory_format") in kinds.PRESERVING:
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
        return self._noted(result, call, managed, hold=func not in kinds.CASTS)

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
                    result = _without_base(tensor)
                    history.held.append(weakref.ref(result))
                else:
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
            raise refusal(func, unknown.history, "they depend on a tensor that was not kept") from error
        kept = [tensor for tensor in tensors_in((args, options), 4) if not tensor.is_meta]
        written = [_version(tensor) for tensor in kept]
        inputs = list(tensors_in((real_args, real_options), 4))
        before = [_version(tensor) for tensor in inputs]
        result = func(*real_args, **real_options)
        if not replay.determined and [_version(tensor) for tensor in kept] != written:
            raise refusal(func, managed[0][1], "they are random, and a tensor that keeps its values depends on them")
        originals = list(tensors_in((args, options), 4))
        for original, tensor, version in zip(originals, inputs, before, strict=True):
            history = self.histories.of(original)
            if history is not None and (_version(tensor) != version or func == _T.__dlpack__):
                self.histories.change(history, None if func == _T.__dlpack__ else call, overwrites=False)
        if func in kinds.ARRAYS:
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
        if not can_defer(func, args, options):
            return self.run(func, args, options)
        if self._managed(args, options):
            return self.run(func, args, options)
        tensor = uninitialised(func, args, options)
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
            if self._managed(args, options):
                return self.run(wrapper or func, args, options)
            skipped = isinstance(tensor, torch.Tensor) and tensor.is_meta
            return tensor if skipped else (wrapper or func)(*args, **options)
        if not history.empty and not history.has_parameter and func not in kinds.LAZY:
            return self.run(wrapper or func, args, options)
        call = self.histories.freeze_call(func, args, options)
        whole = func in kinds.OVERWRITING and tensor.nbytes == history.storage.nbytes()
        self.histories.change(history, call, overwrites=whole)
        return tensor


_SPECIAL: dict[Any, _Function] = {
    **SPECIAL_CALLS,
    **dict.fromkeys(kinds.FACTORIES, ConstructorCalls._defer),
    **dict.fromkeys(kinds.CHANGES, ConstructorCalls._initialise),
}


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
