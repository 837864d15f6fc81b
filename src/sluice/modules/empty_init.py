"""``empty_init``: modules whose parameters and persistent buffers take no memory.

**How.** Three methods of torch are wrapped while any thread is inside the context; the wrappers act only in threads
that are inside:

- ``nn.Parameter.__new__`` notes which parameters were created inside;
- ``nn.Module.register_parameter`` moves such a parameter to the meta device *in place* as it is registered. The object
  stays the same one, so parameters that were shared before or after they were registered, kept in lists or decorated
  with attributes stay tied. A parameter that existed before the context may be in use elsewhere and stays real;
- ``nn.Module.register_buffer`` registers a meta tensor instead of a persistent buffer, the same one each time the same
  tensor is registered. The caller's tensor is not changed: constructors share tables that way.

Assignment (``module.weight = parameter``, ``nn.Buffer``) calls the same two methods. One parameter at a time is real,
from its creation to its registration; ``torch.empty`` does not touch its pages, and initialisers that run after the
registration, as in torch's own layers, are skipped.

**Alternatives.** ``torch.device("meta")`` and the torch function and dispatch modes see the creation of tensors, not
their registration: they also put non-persistent buffers, which no checkpoint holds, on meta. Moving parameters to meta
when they are *created* would empty those that a constructor copies or loads from a file.

**Differences from ordinary construction.** No random numbers are drawn for parameters on meta, so the state of the
generator afterwards differs. Buffers and plain attributes computed *from parameters* are on meta; ``load_into`` finds
and names them. A constructor that branches on the values of its parameters fails, as on any meta tensor. Parameters
that torch refuses to swap, because a weak reference to them exists before they are registered, and parameters of
subclasses with memory of their own stay real and are filled in place.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from msgspec import Struct
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from sluice._public import public
from sluice.modules.meta_initialisers import InitialisersSkipMeta
from sluice.modules.swap import is_plain, swap_data

__all__ = ["empty_init"]


class _Scope(threading.local):
    """State of this thread inside the context."""

    #: Parameters created inside and not registered yet, or None outside. Keys are weak and compared by identity.
    created: WeakTensorKeyDictionary | None = None
    #: Meta tensor for each buffer registered inside, or None if the real one is kept; None outside.
    buffers: WeakTensorKeyDictionary | None = None
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

    Non-persistent buffers are computed for real, because no checkpoint holds them. Fill the module with
    ``sluice.load_into``. Contexts can be nested; other threads are not affected.

    Example:
        >>> with sluice.empty_init():
        ...     layer = torch.nn.Linear(50_000, 50_000)
        >>> layer.weight.is_meta
        True
    """
    if _scope.created is not None:
        yield
        return
    _install()
    _scope.created, _scope.buffers = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
    try:
        with InitialisersSkipMeta():
            yield
    finally:
        _scope.created = _scope.buffers = None
        _uninstall()
        _return_free_memory()


def _note_created(original: Callable[..., Any]) -> Any:
    def create(cls: type, *args: Any, **options: Any) -> Any:
        parameter = original(cls, *args, **options)
        if _scope.created is not None and is_plain(parameter):
            _scope.created[parameter] = None
        return parameter

    return staticmethod(create)


def _empty_registered(original: Callable[..., Any]) -> Any:
    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(self, name, param)
        registered = self._parameters.get(name)  # a global registration hook may have replaced it
        created = _scope.created
        if registered is None or created is None or registered not in created:
            return
        del created[registered]  # before the swap, which refuses tensors with weak references
        if not registered.is_meta:
            _count_emptied(registered.nbytes)
            swap_data(registered, torch.empty_like(registered, device="meta", requires_grad=False))

    return register_parameter


def _replace_persistent(original: Callable[..., Any]) -> Any:
    def register_buffer(self: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:  # noqa: FBT001, FBT002  torch's own signature
        original(self, name, tensor, persistent)
        registered = self._buffers.get(name)
        if _scope.buffers is not None and registered is not None:
            self._buffers[name] = _empty_buffer(_scope.buffers, registered, persistent=persistent)

    return register_buffer


def _empty_buffer(known: WeakTensorKeyDictionary, buffer: torch.Tensor, *, persistent: bool) -> torch.Tensor:
    """Return the tensor to register for ``buffer``; its first registration decides for all."""
    if buffer not in known:
        empty = None
        if persistent and is_plain(buffer) and not buffer.is_meta:
            _count_emptied(buffer.nbytes)
            empty = torch.empty_like(buffer, device="meta", requires_grad=buffer.requires_grad)
            empty.__dict__.update(buffer.__dict__)  # marks of nn.Buffer
        known[buffer] = empty
    replacement: torch.Tensor | None = known[buffer]
    return buffer if replacement is None else replacement


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
    """One wrapped method of torch."""

    owner: type
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


_PATCHES = (
    _Patch(nn.Parameter, "__new__", _note_created),
    _Patch(nn.Module, "register_parameter", _empty_registered),
    _Patch(nn.Module, "register_buffer", _replace_persistent),
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
