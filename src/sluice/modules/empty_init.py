"""``empty_init``: modules whose parameters and persistent buffers take no memory.

Methods of torch are wrapped while any thread is inside; the wrappers act only in threads that are inside:

- ``nn.Parameter.__new__`` notes which parameters were created inside;
- ``nn.Module.register_parameter`` moves such a parameter to the meta device *in place* as it is registered. The object
  stays the same one, so parameters that were shared before or after they were registered, kept in lists or decorated
  with attributes stay tied. A parameter that existed before the context may be in use elsewhere and stays real;
- ``nn.Module.register_buffer`` registers a meta tensor instead of a persistent buffer, the same one each time the same
  tensor is registered; the caller's tensor stays. Small ones are replaced at the end: constructors compute with them.

Assignment (``module.weight = parameter``) calls the same two methods. There is no value to compute with: a call that
needs one is an ``EmptyInitError`` (``constructor_calls``), a tensor on meta that a module keeps is named by a load.

Parameters that torch refuses to swap, because a weak reference to them exists before they are registered, and those of
subclasses with memory of their own stay real and are filled in place.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from sluice._private_torch import make_subclass
from sluice._public import public
from sluice.machine.processes import read_memory, trim_heap
from sluice.modules.constructor_calls import ConstructorCalls, refusal
from sluice.modules.leftovers import is_plain, tensors_in
from sluice.modules.swap import swap_data
from sluice.records import collector_paused

# torch's context without function modes is private.
# ruff: noqa: SLF001

__all__ = ["empty_init"]

#: Smallest persistent buffer, in bytes, that is on meta as soon as it is registered.
_LARGE_BUFFER_BYTES = 1 << 18

#: Growth of the process, in bytes, after which free memory is returned. Small allocations land in the space that the
#: tensors of one layer leave, those of the next layer then do not fit, and the heap grows although most of it is free.
_RETURN_AFTER_BYTES = 32 << 20


class _Inside:
    """State of one thread inside the context."""

    def __init__(self) -> None:
        self.calls = ConstructorCalls(drop=self._drop_written)
        #: Parameters with memory that were created inside and are not registered yet, by id.
        self.created: dict[int, weakref.ref[nn.Parameter]] = {}
        #: Meta tensor for each persistent buffer. Keys are weak and compared by identity.
        self._buffers = WeakTensorKeyDictionary()
        #: Module and name of each small one, which is real until the end.
        self._small: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._emptied_bytes = 0
        self._anon_bytes = read_memory().anon_bytes

    def note_created(self, parameter: nn.Parameter, *_: object, **_options: object) -> None:
        """Note a parameter that was created inside."""
        if not parameter.is_meta and is_plain(parameter):
            self.created[id(parameter)] = weakref.ref(parameter)

    def empty_parameter(self, _result: None, module: nn.Module, name: str, *_: object, **_options: object) -> None:
        """Leave a parameter without memory if it was created inside."""
        parameter = module._parameters.get(name)  # a global registration hook may have replaced it
        created = self.created.pop(id(parameter), None)
        if parameter is not None and created is not None and created() is parameter:
            del created  # before the swap, which refuses tensors with weak references
            swap_data(parameter, self._stand_in(parameter))

    def empty_buffer(
        self, _result: None, module: nn.Module, name: str, *_: object, at_end: bool = False, **_options: object
    ) -> None:
        """Replace a persistent buffer, but a small one only at the end."""
        buffer = module._buffers.get(name)
        if buffer is None or buffer.is_meta or not is_plain(buffer) or name in module._non_persistent_buffers_set:
            return
        if not at_end and buffer.nbytes < _LARGE_BUFFER_BYTES:
            self._small.append((module, name, buffer))
            return
        if buffer not in self._buffers:
            empty = make_subclass(type(buffer), self._stand_in(buffer), buffer.requires_grad)
            empty.__dict__.update(buffer.__dict__)  # marks of nn.Buffer
            self._buffers[buffer] = empty
        module._buffers[name] = self._buffers[buffer]

    def _drop_written(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Empty the small buffers with the memory of a tensor that gets values of a parameter: files hold theirs."""
        dropped = False
        for module, name, buffer in self._small if is_plain(tensor) else ():
            same = buffer.untyped_storage()._cdata == tensor.untyped_storage()._cdata
            if same and module._buffers.get(name) is buffer:
                self.empty_buffer(None, module, name, at_end=True)
                dropped |= module._buffers[name] is not buffer
        if not dropped:
            return None
        stand_in = self._stand_in(tensor)
        self.calls.emptied.note_change(stand_in)
        return stand_in

    def finish(self) -> None:
        """Replace small buffers that are still registered, and remember what the tensors of modules need for a load."""
        for module, name, buffer in self._small:
            if module._buffers.get(name) is buffer:
                self.empty_buffer(None, module, name, at_end=True)
        self._small.clear()
        self.calls.kept.clear()
        self.calls.emptied.remember()
        trim_heap()

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        self._emptied_bytes += tensor.nbytes
        if self._emptied_bytes >= _RETURN_AFTER_BYTES:
            self._emptied_bytes = 0
            if read_memory().anon_bytes - self._anon_bytes >= _RETURN_AFTER_BYTES:
                trim_heap()
                self._anon_bytes = read_memory().anon_bytes
        return self.calls.emptied.stand_in(tensor)


class _Scope(threading.local):
    """State of this thread; None outside of the context."""

    inside: _Inside | None = None


_scope = _Scope()


@public()
@contextmanager
def empty_init() -> Iterator[None]:
    """Build modules whose parameters and persistent buffers keep no memory.

    Constructors may move, cast, copy, tie and initialise parameters as usual; ``load_into`` puts tensors where the
    constructor moved them, unless it is given a device. Buffers are computed for real: non-persistent ones, which no
    checkpoint holds, stay, persistent ones of less than 256 KiB are dropped at the end. Fill the module with
    ``sluice.load_into``. Contexts can be nested; other threads are not affected.

    Note:
        Initialisers of parameters do not run, so the random generators that they would draw from do not advance: the
        global one, and one that is passed as ``generator=``.

    Raises:
        EmptyInitError: A constructor needs the values of a parameter.

    Example:
        >>> with sluice.empty_init():
        ...     layer = torch.nn.Linear(50_000, 50_000)
        >>> layer.weight.is_meta
        True
    """
    if _scope.inside is not None:
        yield
        return
    _count_contexts(1)
    inside = _scope.inside = _Inside()
    try:
        with inside.calls, collector_paused():
            yield
    finally:
        _scope.inside = None
        _count_contexts(-1)
        inside.finish()


def _followed_by(act: Callable[..., None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what wraps a method: ``act`` gets the state of this thread, the result and the arguments."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            if _scope.inside is not None:
                with torch._C.DisableTorchFunction():
                    act(_scope.inside, result, *args, **options)
            return result

        return call

    return wrap


def _run_compiled(original: Callable[..., Any]) -> Any:
    """Return the ``__call__`` of what torch compiled, which function modes do not see."""

    def call(self: Any, *args: Any, **options: Any) -> Any:
        if _scope.inside is None:
            return original(self, *args, **options)
        with torch._C.DisableTorchFunction():
            if any(tensor.is_meta for tensor in _tensors_of(getattr(self, "owner", None))):
                raise refusal(original)  # it may compute with them and with tensors that have memory
            if any(tensor.is_meta for tensor in tensors_in((args, options), 4)):
                return _scope.inside.calls.run(partial(original, self), args, options)
        return original(self, *args, **options)

    return call


def _tensors_of(module: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers of a compiled module and of those in it; a function has none."""
    if module is not None:
        yield from (
            tensor for kind in ("ParameterDict", "BufferDict") for _, tensor in getattr(torch._C, kind)(module).items()
        )
        yield from (tensor for _, child in torch._C.ModuleDict(module).items() for tensor in _tensors_of(child))


#: Methods of torch with their wrappers.
_WRAPPED: tuple[tuple[type, str, Callable[[Callable[..., Any]], Any]], ...] = (
    (nn.Parameter, "__new__", _followed_by(_Inside.note_created)),
    (nn.Module, "register_parameter", _followed_by(_Inside.empty_parameter)),
    (nn.Module, "register_buffer", _followed_by(_Inside.empty_buffer)),
    (torch._C.ScriptFunction, "__call__", _run_compiled),
    (torch._C.ScriptMethod, "__call__", _run_compiled),
)
_lock = threading.Lock()
_contexts = 0
#: Each method as it was before, and its wrapper, while a thread is inside.
_originals: list[tuple[Any, Any]] = []


def _count_contexts(change: int) -> None:
    """Count the threads inside; the first one wraps the methods, the last one restores them."""
    global _contexts  # noqa: PLW0603  under the lock
    with _lock:
        if _contexts == 0:
            _restore()  # what an interrupt left
            for owner, name, wrap in _WRAPPED:
                _originals.append((owner.__dict__[name], wrap(getattr(owner, name))))
                setattr(owner, name, _originals[-1][1])
        _contexts += change
        if _contexts == 0:
            _restore()


def _restore() -> None:
    """Restore the methods that are wrapped: all of them, or fewer after an interrupt."""
    for (owner, name, _), (original, installed) in zip(_WRAPPED, _originals, strict=False):
        # Code that wrapped it later keeps calling our wrapper, which does nothing outside the context.
        if owner.__dict__[name] is installed:
            setattr(owner, name, original)
    _originals.clear()
