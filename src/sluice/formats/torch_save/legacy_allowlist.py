"""Permitted globals and persistent ids that only legacy files use: module classes, old-style tensors.

- persistent id ``("storage", class, key, location, elements, None)``: a ``StorageReference``
- persistent id ``("module", class, file, source)``: the class, as an inert leaf
- ``torch.FloatTensor()`` and the state ``(storage, offset, size, stride)``, from torch before 0.4: an ``Entry``
- ``torch.nn.Parameter(tensor)`` and ``(requires_grad, volatile, hooks)``, or ``torch.nn.Parameter()`` and ``(tensor,
  gradient, hooks, requires_grad, volatile)``: the ``Entry`` of the tensor, as a parameter; the gradient is dropped

Unsupported: views of storages, of which torch before 0.4 wrote a description in place of None; untyped storages, which
torch writes (for dtypes such as ``float8_e5m2``) but fails to read; complex storages from a big-endian machine, whose
real and imaginary parts torch exchanges.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from reprlib import repr as short_repr
from typing import Any

from sluice._errors import FormatError, UnsupportedError
from sluice._options import Limits
from sluice.formats.pickles.unpickler import Constructor, PendingObject
from sluice.formats.torch_save.allowlist import TorchAllowlist
from sluice.formats.torch_save.plain_values import from_bytes
from sluice.formats.torch_save.storages import StorageKind, StorageReference
from sluice.records import Entry, Opaque

__all__ = ["LegacyAllowlist"]

#: ``("storage", class, key, location, elements, view)``
_IDENTITY_FIELDS = 6

#: Tensor classes of torch before 0.4. Classes of accelerator tensors stay inert: torch needs the accelerator for them.
_TENSOR_CLASSES = {
    "DoubleTensor": "float64",
    "FloatTensor": "float32",
    "HalfTensor": "float16",
    "LongTensor": "int64",
    "IntTensor": "int32",
    "ShortTensor": "int16",
    "CharTensor": "int8",
    "ByteTensor": "uint8",
}

_UNTYPED = "torch.storage.UntypedStorage"


class LegacyAllowlist(TorchAllowlist):
    """The permitted globals of the pickle of one legacy file, and the storages that it has used so far."""

    def __init__(self, limits: Limits, pickle_bytes: int, *, little_endian: bool = True) -> None:
        """Prepare for one pickle.

        Args:
            limits: Bounds on tensors, dimensions and names.
            pickle_bytes: Size of the pickle, in bytes.
            little_endian: Whether a little-endian machine wrote the file.
        """
        super().__init__(limits, pickle_bytes)
        self._little_endian = little_endian
        for name, dtype in _TENSOR_CLASSES.items():
            self.names["torch", name] = Constructor(
                qualified_name=f"torch.{name}", build=partial(self._early_tensor, dtype), creates=True
            )
        self.names["torch.nn.parameter", "Parameter"] = Constructor(
            qualified_name="torch.nn.parameter.Parameter", build=self._early_parameter, creates=True
        )

    def load_persistent(  # type: ignore[override]  # returns module classes too
        self, identity: object
    ) -> StorageReference | Opaque:
        """Return the storage, or the module class, that a persistent id declares.

        Raises:
            FormatError: The id is malformed or contradicts an earlier declaration of the same storage.
            UnsupportedError: It is a view of a storage, or torch does not read its dtype from legacy files.
        """
        if type(identity) is not tuple:
            return super().load_persistent(identity)
        if identity and type(identity[0]) is bytes:
            identity = tuple(map(from_bytes, identity))
        if len(identity) > 1 and identity[0] == "module" and isinstance(identity[1], Opaque):
            return identity[1]
        if len(identity) != _IDENTITY_FIELDS:
            raise FormatError("a persistent id has the wrong length", expected=_IDENTITY_FIELDS, found=len(identity))
        kind, view = identity[1], identity[5]
        storage = super().load_persistent(identity[:5])
        if type(kind) is StorageKind and kind.qualified_name == _UNTYPED:
            problem = "a tensor in an untyped storage, which torch itself does not read from legacy files"
            raise UnsupportedError(problem, found=_UNTYPED)
        if storage.nbytes and storage.dtype.startswith("complex") and not self._little_endian:
            problem = "a complex tensor from a big-endian machine, which torch misreads"
            raise UnsupportedError(problem, found=f"torch.{storage.dtype}")
        if view is not None:
            raise UnsupportedError("a tensor in a view of a storage, as torch wrote before 0.4", found=short_repr(view))
        return storage

    def _early_tensor(self, dtype: str, arguments: tuple[Any, ...]) -> PendingObject:
        if arguments:
            raise FormatError("the constructor of a tensor class has arguments")
        return PendingObject(finish=partial(self._finish_tensor, dtype))

    def _finish_tensor(self, dtype: str, state: object) -> Entry:
        storage, offset, size, stride = state if type(state) is tuple and len(state) == 4 else (None,) * 4
        if type(storage) is not StorageReference or storage.dtype != dtype:
            raise FormatError(f"the state of a {dtype} tensor is not a view of a {dtype} storage")
        return self._tensor(None, storage, offset, size, stride, requires_grad=False)

    def _early_parameter(self, arguments: tuple[Any, ...]) -> PendingObject:
        if len(arguments) > 1:
            problem = "the constructor of a parameter has the wrong number of arguments"
            raise FormatError(problem, expected="0 or 1", found=len(arguments))
        return PendingObject(
            finish=partial(self._finish_parameter, *arguments) if arguments else self._finish_empty_parameter
        )

    def _finish_parameter(self, data: object, state: object) -> Entry:
        if type(state) is not tuple or len(state) != 3:
            raise FormatError("the state of a parameter has the wrong length", expected=3)
        requires_grad, _volatile, hooks = state
        return self._rebuild_parameter((data, requires_grad, OrderedDict() if hooks is None else hooks))

    def _finish_empty_parameter(self, state: object) -> Entry:
        if type(state) is not tuple or len(state) != 5:
            raise FormatError("the state of a parameter has the wrong length", expected=5)
        data, _gradient, hooks, requires_grad, volatile = state
        return self._finish_parameter(data, (requires_grad, volatile, hooks))
