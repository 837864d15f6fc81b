"""The plain values that torch's pickles name: what each allowlisted global without tensor data becomes.

The list follows ``torch.load(weights_only=True)``, with ``frozenset``, ``bytes`` and ``defaultdict`` added, which are
as harmless. Left side: what the file names. Right side: what becomes of it.

- dtypes, layouts, quantization schemes: a ``TorchText``, equal to ``"torch.float32"``, ``"torch.strided"``
- ``torch.device``: a ``TorchText``, equal to ``"cuda:0"``
- ``torch.Size``: a ``TorchSize``, equal to a tuple
- ``OrderedDict``, ``Counter``: themselves; ``defaultdict``: a dict, its factory dropped
- ``set``, ``frozenset``, ``bytes``, ``bytearray``, ``complex``, ``_codecs.encode``: the value
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from sluice._dtypes import ITEM_BYTES
from sluice._errors import FormatError, LimitError
from sluice.formats.pickles.unpickler import Constructor, KeyGuard
from sluice.records import TorchSize, TorchText

__all__ = ["DTYPE_PREFIX", "PlainValues", "constructor", "is_torch_name"]

#: Before the name of a dtype, as ``str(torch.float32)`` writes it.
DTYPE_PREFIX = "torch."

#: Dtypes of ``torch`` that no plain strided tensor has.
_OTHER_DTYPES = (
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
    *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    *("qint8", "qint32", "quint8", "quint4x2", "quint2x4"),
)

_QUANTIZATION_SCHEMES = (
    "per_tensor_affine",
    "per_tensor_symmetric",
    "per_channel_affine",
    "per_channel_symmetric",
    "per_channel_affine_float_qparams",
)


def constructor(module: str, name: str, build: Callable[[tuple[Any, ...]], object]) -> Constructor:
    """Return the constructor that stands for a global."""
    return Constructor(qualified_name=f"{module}.{name}", build=build)


#: Protocol 2 keeps the name of Python 2.
_BUILTINS = ("builtins", "__builtin__")


@cache
def _names() -> Mapping[tuple[str, str], object]:
    """Return what stands for the same in every pickle: made once, as a thousand shards are a thousand pickles."""
    names: dict[tuple[str, str], object] = {
        ("torch", name): TorchText(DTYPE_PREFIX + name)
        for name in (*ITEM_BYTES, *_OTHER_DTYPES, *_QUANTIZATION_SCHEMES)
    }
    builders: dict[tuple[str, str], Callable[[tuple[Any, ...]], object]] = {
        ("collections", "defaultdict"): _default_dict,
        ("torch", "device"): _device,
        ("torch.serialization", "_get_layout"): _layout,
        **{(module, "complex"): _complex for module in _BUILTINS},
    }
    for (module, name), build in builders.items():
        names[module, name] = constructor(module, name, build)
    return MappingProxyType(names)


def is_torch_name(text: str) -> bool:
    """Return whether a text is the name of a dtype or a quantization scheme, as ``torch`` has it as an attribute."""
    return type(_names().get(("torch", text.removeprefix(DTYPE_PREFIX)))) is TorchText


class PlainValues:
    """Builds the plain values of one pickle."""

    def __init__(self, keys: KeyGuard, pickle_bytes: int) -> None:
        """Prepare for one pickle.

        Args:
            keys: Checks the elements of sets.
            pickle_bytes: Its size: an honest pickle copies each of its bytes at most twice (text, bytes, bytearray), a
                hostile one the same megabyte a million times.
        """
        self._keys = keys
        self._copies_left = 2 * pickle_bytes

    def names(self) -> dict[tuple[str, str], object]:
        """Return what each global stands for, by module and name."""
        names = dict(_names())
        for (module, name), build in self._builders().items():
            names[module, name] = constructor(module, name, build)
        return names

    def _builders(self) -> dict[tuple[str, str], Callable[[tuple[Any, ...]], object]]:
        """Return what builds the values that count against the limits of one pickle."""
        builders: dict[tuple[str, str], Callable[[tuple[Any, ...]], object]] = {
            ("collections", "OrderedDict"): self._ordered_dict,
            ("collections", "Counter"): self._counter,
            ("_codecs", "encode"): self._encode,
            ("torch", "Size"): self._size,
        }
        for module in _BUILTINS:
            builders[module, "set"] = self._set
            builders[module, "frozenset"] = lambda arguments: frozenset(self._set(arguments))
            builders[module, "bytes"] = lambda arguments: bytes(self._bytes(arguments))
            builders[module, "bytearray"] = lambda arguments: bytearray(self._bytes(arguments))
        return builders

    def _copy(self, size: int) -> None:
        self._copies_left -= size
        if self._copies_left < 0:
            raise LimitError("the calls of the pickle copy more than it holds")

    def _one(self, arguments: tuple[Any, ...], kinds: type | tuple[type, ...]) -> Any:
        value: Any = arguments[0] if len(arguments) == 1 else None
        if not isinstance(value, kinds):
            raise FormatError("a plain value is built from the wrong arguments")
        self._copy(len(value))  # type: ignore[arg-type]  # every kind has a length
        return value

    def _set(self, arguments: tuple[Any, ...]) -> set[Any]:
        items = self._one(arguments, list) if arguments else []
        for item in items:
            self._keys.check(item)
        return set(items)

    def _bytes(self, arguments: tuple[Any, ...]) -> bytes:
        data: bytes = self._one(arguments, bytes) if arguments else b""
        return data

    def _encode(self, arguments: tuple[Any, ...]) -> bytes:
        # How protocol 2 writes bytes: as text of the same code points.
        if len(arguments) != 2 or arguments[1] != "latin1":
            raise FormatError("bytes in an encoding other than latin1")
        text: str = self._one(arguments[:1], str)
        try:
            return text.encode("latin1")
        except UnicodeEncodeError as error:
            raise FormatError("bytes above 255") from error

    def _size(self, arguments: tuple[Any, ...]) -> TorchSize:
        sizes = self._one(arguments, (tuple, list))
        if any(type(size) is not int for size in sizes):
            raise FormatError("a torch.Size of something other than integers")
        return TorchSize(sizes)

    def _ordered_dict(self, arguments: tuple[Any, ...]) -> OrderedDict[Any, Any]:
        # Python 2 wrote the items as a list of lists; since then dicts are filled item by item.
        items = self._one(arguments, list) if arguments else []
        for item in items:
            if type(item) not in (list, tuple) or len(item) != 2:
                raise FormatError("an OrderedDict of something other than keys and values")
            self._keys.check(item[0])
        return OrderedDict(items)

    def _counter(self, arguments: tuple[Any, ...]) -> Counter[Any]:
        return Counter(self._one(arguments, dict) if arguments else {})


def _default_dict(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    if len(arguments) > 1:
        raise FormatError("a defaultdict that is not filled item by item")
    return {}


def _complex(arguments: tuple[Any, ...]) -> complex:
    if len(arguments) != 2 or any(type(part) is not float for part in arguments):
        raise FormatError("a complex number of something other than two floats")
    return complex(*arguments)


def _device(arguments: tuple[Any, ...]) -> TorchText:
    kind, *index = arguments or (None,)
    if type(kind) is not str or len(index) > 1 or any(type(one) is not int or not 0 <= one < 128 for one in index):
        raise FormatError("a torch.device of something other than a type and a number")
    return TorchText(":".join([kind, *map(str, index)]))


def _layout(arguments: tuple[Any, ...]) -> TorchText:
    if len(arguments) != 1 or type(arguments[0]) is not str or not arguments[0].startswith(DTYPE_PREFIX):
        raise FormatError("a layout that is not named by text")
    return TorchText(arguments[0])
