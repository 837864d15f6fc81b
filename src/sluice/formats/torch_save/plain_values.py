"""Permitted globals without tensor data in torch's pickles, and the plain values that replace them.

The list is that of ``torch.load(weights_only=True)`` plus ``frozenset``, ``bytes`` and ``defaultdict``, which are
equally harmless:

- dtypes, layouts, quantization schemes: a ``TorchText``, equal to ``"torch.float32"``, ``"torch.strided"``; also names
  in ``torch`` with the form of a dtype, because new versions of torch add dtypes
- ``torch.device``: a ``TorchText``, equal to ``"cuda:0"``
- ``torch.Size``: a ``TorchSize``, equal to a tuple
- ``OrderedDict``, ``Counter``: the same types; ``defaultdict``: a dict without the factory
- ``set``, ``frozenset``, ``bytes``, ``bytearray``, ``complex``, ``_codecs.encode``: the value

Limits: the calls of one pickle copy at most twice its size.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Mapping
from functools import cache
from reprlib import repr as short_repr
from types import MappingProxyType
from typing import Any

from sluice._dtypes import ITEM_BYTES
from sluice._errors import FormatError, LimitError, UnsupportedError
from sluice.formats.pickles.unpickler import Constructor, KeyGuard
from sluice.records import TorchSize, TorchText

__all__ = ["DTYPE_PREFIX", "UNREAD_DTYPE", "PlainValues", "from_bytes", "is_torch_name", "plain_global"]

#: Prefix of the name of a dtype in ``str(torch.float32)``.
DTYPE_PREFIX = "torch."

#: Why a tensor is not read whose dtype is not in ``ITEM_BYTES``.
UNREAD_DTYPE = "a tensor of a dtype that sluice does not read; torch.load may, if this version of torch has it"

#: Form of the names of dtypes: ``bcomplex32``, ``float8_e4m3fn``, ``bits1x8``, ``uint3``.
_DTYPE = re.compile(r"(b|q|u|qu)?(float|complex|int|bits)[1-9][0-9]{0,3}[a-z0-9_]{0,16}", re.ASCII)

#: Encoding of bytes that were pickled as text: by Python 3, and by Python 2.
_ENCODINGS = frozenset({"latin1", "latin-1"})

_QUANTIZATION_SCHEMES = (
    "per_tensor_affine",
    "per_tensor_symmetric",
    "per_channel_affine",
    "per_channel_symmetric",
    "per_channel_affine_float_qparams",
)


def from_bytes(text: object) -> object:
    """Return text, also if it is bytes because the caller keeps the text of Python 2 as bytes."""
    return text.decode("latin1") if type(text) is bytes else text


#: Names of the module of built-in types. Protocol 2 keeps the name from Python 2.
_BUILTINS = ("builtins", "__builtin__")


@cache
def _names() -> Mapping[tuple[str, str], object]:
    """Return the replacements that are the same in every pickle; cached, because each shard has its own pickle."""
    names: dict[tuple[str, str], object] = {
        **{("torch", name): TorchText(DTYPE_PREFIX + name) for name in (*ITEM_BYTES, *_QUANTIZATION_SCHEMES)},
        ("collections", "defaultdict"): _default_dict,
        ("torch", "device"): _device,
        ("torch.serialization", "_get_layout"): _layout,
        **{(module, "complex"): _complex for module in _BUILTINS},
    }
    return MappingProxyType(names)


def is_torch_name(text: str) -> bool:
    """Return whether ``text`` names a dtype or quantization scheme that is an attribute of ``torch``."""
    return type(plain_global("torch", text.removeprefix(DTYPE_PREFIX))) is TorchText


def plain_global(module: str, name: str) -> object | None:
    """Return the replacement of a global that every pickle may use; None for any other."""
    known = _names().get((module, name))
    if known is None and module == "torch" and _DTYPE.fullmatch(name):
        return TorchText(DTYPE_PREFIX + name)
    return known


class PlainValues:
    """Builder of the plain values of one pickle."""

    def __init__(self, keys: KeyGuard, pickle_bytes: int) -> None:
        """Prepare for one pickle.

        Args:
            keys: Checks of set elements.
            pickle_bytes: Size of the pickle in bytes. Its calls may copy twice that, the most that picklers need (text,
                bytes, bytearray); a hostile pickle copies the same megabyte a million times.
        """
        self._keys = keys
        self._copies_left = 2 * pickle_bytes

    def names(self) -> dict[tuple[str, str], object]:
        """Return the globals that count against the limits, by module and name; see ``Allowlist.find``."""
        names: dict[tuple[str, str], object] = {
            ("collections", "OrderedDict"): self._ordered_dict,
            ("collections", "Counter"): self._counter,
            ("_codecs", "encode"): self._encode,
            # torch 1.0 used NEWOBJ.
            ("torch", "Size"): Constructor(qualified_name="torch.Size", build=self._size, creates=True),
        }
        for module in _BUILTINS:
            names[module, "set"] = self._set
            names[module, "frozenset"] = lambda arguments: frozenset(self._set(arguments))
            names[module, "bytes"] = lambda arguments: bytes(self._bytes(arguments))
            names[module, "bytearray"] = lambda arguments: bytearray(self._bytearray(arguments))
        return names

    def count_copy(self, size: int) -> None:
        """Count what a call copies against the limit."""
        self._copies_left -= size
        if self._copies_left < 0:
            raise LimitError("the calls in the pickle copy more bytes than it holds")

    def _sole_argument(self, arguments: tuple[Any, ...], kinds: type | tuple[type, ...]) -> Any:
        value: Any = arguments[0] if len(arguments) == 1 else None
        if not isinstance(value, kinds):
            raise FormatError("the constructor of a plain value has invalid arguments")
        self.count_copy(len(value))  # type: ignore[arg-type]  # every kind has a length
        return value

    def _set(self, arguments: tuple[Any, ...]) -> set[Any]:
        items = self._sole_argument(arguments, list) if arguments else []
        for item in items:
            self._keys.check(item)
        return set(items)

    def _bytes(self, arguments: tuple[Any, ...]) -> bytes:
        data: bytes = self._sole_argument(arguments, bytes) if arguments else b""
        return data

    def _bytearray(self, arguments: tuple[Any, ...]) -> bytes:
        # Python 2 passes text and its encoding, Python 3 passes bytes.
        return self._encode(arguments) if len(arguments) == 2 else self._bytes(arguments)

    def _encode(self, arguments: tuple[Any, ...]) -> bytes:
        # Protocol 2 writes bytes as text with the same code points.
        encoding = from_bytes(arguments[1]) if len(arguments) == 2 else None
        if type(encoding) is not str or encoding not in _ENCODINGS:
            raise UnsupportedError("bytes in an encoding that picklers do not use", found=short_repr(encoding))
        text: str = self._sole_argument(arguments[:1], str)
        try:
            return text.encode("latin1")
        except UnicodeEncodeError as error:
            raise FormatError("a code point of encoded bytes is above 255") from error

    def _size(self, arguments: tuple[Any, ...]) -> TorchSize:
        sizes = self._sole_argument(arguments, (tuple, list))
        if any(type(size) is not int for size in sizes):
            raise FormatError("a torch.Size holds a value that is not an integer")
        return TorchSize(sizes)

    def _ordered_dict(self, arguments: tuple[Any, ...]) -> OrderedDict[Any, Any]:
        # Python 2 passed the items as a list of lists; Python 3 sets them one by one.
        items = self._sole_argument(arguments, list) if arguments else []
        for item in items:
            if type(item) not in (list, tuple) or len(item) != 2:
                raise FormatError("the items of an OrderedDict are not pairs of key and value")
            self._keys.check(item[0])
        return OrderedDict(items)

    def _counter(self, arguments: tuple[Any, ...]) -> Counter[Any]:
        return Counter(self._sole_argument(arguments, dict) if arguments else {})


def _default_dict(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    if len(arguments) > 1:
        raise UnsupportedError("a defaultdict that is built with initial items")
    return {}


def _complex(arguments: tuple[Any, ...]) -> complex:
    if len(arguments) != 2 or any(type(part) is not float for part in arguments):
        raise FormatError("a complex number is not built from two floats")
    return complex(*arguments)


def _device(arguments: tuple[Any, ...]) -> TorchText:
    kind, *index = map(from_bytes, arguments or (None,))
    if (
        type(kind) is not str
        or len(index) > 1
        or any(type(number) is not int or not 0 <= number < 128 for number in index)
    ):
        raise FormatError("a torch.device is not built from a type and an index")
    return TorchText(":".join([kind, *map(str, index)]))


def _layout(arguments: tuple[Any, ...]) -> TorchText:
    if len(arguments) != 1 or type(arguments[0]) is not str or not arguments[0].startswith(DTYPE_PREFIX):
        raise FormatError("the name of a layout is not text")
    return TorchText(arguments[0])
