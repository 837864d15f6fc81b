"""``empty_init``: modules whose parameters and persistent buffers take no memory.

**How.** Inside the context ``torch.empty``, ``zeros``, ``ones`` and ``full`` return tensors on the meta device, which
get memory and values, in place, when something else than a parameter or persistent buffer is made of them
(``constructor_calls``). And methods of torch are wrapped while any thread is inside; the wrappers act only in threads
that are inside. Those of ``unseen_calls`` see what function modes do not. The others see registration:

- ``nn.Parameter.__new__`` notes which parameters were created inside;
- ``nn.Module.register_parameter`` moves such a parameter to the meta device *in place* as it is registered, if it is
  not there. The object stays the same one, so parameters that were shared before or after they were registered, kept in
  lists or decorated with attributes stay tied. A parameter that existed before the context may be in use elsewhere and
  stays real;
- ``nn.Module.register_buffer`` registers a meta tensor instead of a persistent buffer, the same one each time the same
  tensor is registered. The caller's tensor is not changed: constructors share tables that way.

Assignment (``module.weight = parameter``, ``nn.Buffer``) calls the same two methods. One parameter at a time is real,
from its creation to its registration, if it was not made by one of the four functions.

**Values.** Constructors move, cast, copy, tie and initialise what has no memory; ``constructor_calls`` records it. A
number that is read is computed from the record: it is an initial value that ordinary construction could have had, drawn
from a generator of its own. A tensor that the module keeps (a non-persistent buffer or an attribute) is computed from
parameters only if ordinary construction gives the same values, that is, without random numbers; otherwise it stays on
meta, and ``load_into`` finds and names it. ``EmptyInitError`` says where values are needed that cannot be computed.

**Alternatives.** ``torch.device("meta")`` and dispatch modes see the creation of tensors, not their registration: they
also put non-persistent buffers, which no checkpoint holds, on meta.

**Differences from ordinary construction.** No random numbers are drawn for parameters on meta, so the state of the
generator afterwards differs, also that of a generator passed to an initialiser. Parameters that torch refuses to swap,
because a weak reference to them exists before they are registered, and parameters of subclasses with memory of their
own stay real and are filled in place.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from msgspec import Struct
from torch import nn
from torch._functorch import eager_transforms, vmap
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from sluice._public import public
from sluice.modules.constructor_calls import ConstructorCalls
from sluice.modules.histories import Histories, History, empty_on_meta
from sluice.modules.moves import remember_move
from sluice.modules.regions import region_of
from sluice.modules.swap import is_plain, swap_data
from sluice.modules.unseen_calls import script_function, script_method, transform_entry

# Storages have no public identity, and torch's context without function modes is private.
# ruff: noqa: SLF001

__all__ = ["empty_init"]

_CPU = torch.device("cpu")


class _Scope(threading.local):
    """State of this thread inside the context."""

    #: Tensors without memory; None outside.
    histories: Histories | None = None
    #: The calls of the constructor; None outside.
    calls: ConstructorCalls | None = None
    #: Parameters with memory that were created inside and are not registered yet, by id.
    created: dict[int, weakref.ref[nn.Parameter]]
    #: Meta tensor for each buffer with memory registered inside, or None if the real one is kept. Keys are weak and
    #: compared by identity.
    buffers: WeakTensorKeyDictionary
    #: Bytes emptied since free memory was last returned to the system.
    emptied_bytes: int = 0


_scope = _Scope()

#: Bytes emptied between two returns of free memory. Small allocations land in the space that the tensors of one layer
#: leave, those of the next layer then do not fit there, and the heap grows although nearly all of it is free.
_RETURN_AFTER_BYTES = 32 << 20


@public()
@contextmanager
def empty_init() -> Iterator[None]:
    """Build modules whose parameters and persistent buffers keep no memory.

    Non-persistent buffers are computed for real, because no checkpoint holds them. Constructors may move, cast, copy,
    tie and initialise parameters as usual, and read values, which are true initial values. ``load_into`` puts tensors
    where the constructor moved them, unless it is given a device. Fill the module with ``sluice.load_into``. Contexts
    can be nested; other threads are not affected.

    Note:
        Initialisers of parameters do not run, so the random generators that they would draw from do not advance: the
        global one, and one that is passed as ``generator=``.

    Raises:
        EmptyInitError: A constructor needs values that cannot be computed.

    Example:
        >>> with sluice.empty_init():
        ...     layer = torch.nn.Linear(50_000, 50_000)
        >>> layer.weight.is_meta
        True
    """
    if _scope.histories is not None:
        yield
        return
    _install()
    _scope.histories = Histories()
    _scope.created, _scope.buffers = {}, WeakTensorKeyDictionary()
    calls = _scope.calls = ConstructorCalls(_scope.histories)
    try:
        with calls:
            yield
    finally:
        histories, _scope.histories, _scope.calls = _scope.histories, None, None
        _scope.created, _scope.buffers = {}, WeakTensorKeyDictionary()
        _uninstall()
        _finish(calls, histories)
        if _scope.emptied_bytes:
            _return_free_memory()


def _finish(calls: ConstructorCalls, histories: Histories) -> None:
    """Give memory to all tensors that are neither parameters nor persistent buffers, and remember moves."""
    for history in histories:
        if history.empty and history.device != _CPU:
            remember_move(history.storage, history.device)
        if history.held and history.live():
            calls.give_memory(history, seeded=history.empty, determined=history.empty)
        if history.empty and history.buffers:
            calls.emptied.share(history.storage, history.buffers)
    calls.emptied.remember()


def _note_created(original: Callable[..., Any]) -> Any:
    def create(cls: type, *args: Any, **options: Any) -> Any:
        parameter = original(cls, *args, **options)
        if _scope.histories is not None:
            with torch._C.DisableTorchFunction():
                history = _scope.histories.of(parameter)
                if history is None:
                    if not parameter.is_meta and is_plain(parameter):
                        _scope.created[id(parameter)] = weakref.ref(parameter)
                elif not history.empty:
                    history.has_parameter = True
                    history.held.append(weakref.ref(parameter))
        return parameter

    return staticmethod(create)


def _empty_registered(original: Callable[..., Any]) -> Any:
    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(self, name, param)
        registered = self._parameters.get(name)  # a global registration hook may have replaced it
        if registered is None or _scope.histories is None:
            return
        with torch._C.DisableTorchFunction():
            _empty_parameter(_scope.histories, registered, self, name)

    return register_parameter


def _empty_parameter(histories: Histories, parameter: nn.Parameter, module: nn.Module, name: str) -> None:
    """Leave a parameter that was created inside the context without memory."""
    created = _scope.created.pop(id(parameter), None)
    if created is not None and created() is parameter:
        del created  # before the swap, which refuses tensors with weak references
        if not swap_data(parameter, _stand_in(parameter)):
            return
    history = histories.of(parameter)
    if history is not None and not is_lazy(parameter):
        # Other tensors over the storage stay without memory too; alone, they would keep initial values after a load.
        history.held = []
        history.empty = True
        history.owner = history.owner or f"{type(module).__name__}.{name}"


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    assert _scope.calls is not None
    _count_emptied(tensor.nbytes)
    return _scope.calls.emptied.stand_in(tensor)


def _replace_persistent(original: Callable[..., Any]) -> Any:
    def register_buffer(self: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:  # noqa: FBT001, FBT002  torch's own signature
        original(self, name, tensor, persistent)
        registered = self._buffers.get(name)
        if _scope.histories is None or registered is None:
            return
        with torch._C.DisableTorchFunction():
            history = _scope.histories.of(registered)
            if history is None:
                buffer = _empty_buffer(registered, persistent=persistent)
            elif not persistent:
                before = history.buffers.get(region_of(registered))
                buffer = registered if before is None else before
                if before is None:
                    _compute_buffer(history)
            else:
                buffer = registered if history.empty else _deferred_buffer(_scope.histories, history, registered)
            empty = _scope.histories.of(buffer) if persistent else None
            if empty is not None:
                empty.release(buffer)
                empty.owner = empty.owner or f"{type(self).__name__}.{name}"
            self._buffers[name] = buffer

    return register_buffer


def _compute_buffer(history: History) -> None:
    """Give a non-persistent buffer memory and values, unless they are computed from random parameters.

    All tensors over its storage are real from then on, as persistent buffers too.
    """
    live = history.live()
    assert _scope.calls is not None
    if _scope.calls.give_memory(history, seeded=history.empty, determined=history.empty):
        for tensor in live:
            _scope.buffers[tensor] = None


def _empty_buffer(buffer: torch.Tensor, *, persistent: bool) -> torch.Tensor:
    """Return the tensor to register for ``buffer``; its first registration decides for all."""
    known = _scope.buffers
    if buffer not in known:
        empty = None
        if persistent and is_plain(buffer) and not buffer.is_meta:
            empty = _like_buffer(_stand_in(buffer), buffer)
        known[buffer] = empty
    replacement: torch.Tensor | None = known[buffer]
    return buffer if replacement is None else replacement


def _deferred_buffer(histories: Histories, history: History, buffer: torch.Tensor) -> torch.Tensor:
    """Return the tensor to register for a deferred ``buffer``, which stays deferred."""
    known = history.buffers.get(region_of(buffer))
    if known is not None:
        return known
    empty = _like_buffer(empty_on_meta(buffer), buffer)
    histories.derive(empty, histories.freeze_call(torch.clone, (buffer,), {}), history.device, empty=True)
    history.buffers[region_of(buffer)] = empty
    return empty


def _like_buffer(empty: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    empty.__dict__.update(buffer.__dict__)  # marks of nn.Buffer
    return empty.requires_grad_(buffer.requires_grad)


def _count_emptied(nbytes: int) -> None:
    _scope.emptied_bytes += nbytes
    if _scope.emptied_bytes >= _RETURN_AFTER_BYTES:
        _return_free_memory()


def _return_free_memory() -> None:
    """Return free memory in the C library's heap to the system, if the library supports it (glibc)."""
    _scope.emptied_bytes = 0
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


class _Patch(Struct):
    """One wrapped method or function of torch."""

    #: A class or module.
    owner: Any
    name: str
    wrap: Callable[[Callable[..., Any]], Any]
    original: Any = None
    installed: Any = None

    def install(self) -> None:
        self.original = self.owner.__dict__[self.name]
        self.installed = self.wrap(getattr(self.owner, self.name))
        setattr(self.owner, self.name, self.installed)

    def uninstall(self) -> None:
        # Code that wrapped it later keeps calling our wrapper, which does nothing outside the context.
        if self.owner.__dict__[self.name] is self.installed:
            setattr(self.owner, self.name, self.original)


def _calls() -> ConstructorCalls | None:
    return _scope.calls


_PATCHES = (
    _Patch(nn.Parameter, "__new__", _note_created),
    _Patch(nn.Module, "register_parameter", _empty_registered),
    _Patch(nn.Module, "register_buffer", _replace_persistent),
    _Patch(torch._C.ScriptFunction, "__call__", partial(script_function, current=_calls)),
    _Patch(torch._C.ScriptMethod, "__call__", partial(script_method, current=_calls)),
    _Patch(vmap, "_add_batch_dim", partial(transform_entry, current=_calls)),
    _Patch(eager_transforms, "_wrap_for_grad", partial(transform_entry, current=_calls)),
)
_lock = threading.Lock()
_contexts = 0


def _install() -> None:
    global _contexts  # noqa: PLW0603  counts the threads inside, under the lock
    with _lock:
        if _contexts == 0:
            for patch in _PATCHES:
                patch.install()
        _contexts += 1


def _uninstall() -> None:
    global _contexts  # noqa: PLW0603  as above
    with _lock:
        _contexts -= 1
        if _contexts == 0:
            for patch in _PATCHES:
                patch.uninstall()
