"""Permitted globals of a ``torch.save`` pickle: storages, tensors and parameters, rebuilt as records without torch.

- persistent id of a storage: a ``StorageReference`` (``storages``)
- ``_rebuild_tensor``, ``_v2``, ``_v3``: an ``Entry``, whose view is checked against its storage in exact integers
- ``_rebuild_parameter``, ``_rebuild_parameter_with_state``: the ``Entry`` of the tensor, as a parameter
- ``_rebuild_from_type_v2`` for a plain tensor: the ``Entry`` of the tensor
- ``_rebuild_sparse_tensor``, ``_rebuild_qtensor``: an ``Entry`` composed of other entries (``composites``)
- ``_rebuild_from_type_v2`` for a ``ShardedTensor``: see ``sharded``
- plain values: see ``plain_values``

Python attributes of tensors are kept, except objects of arbitrary classes, which are dropped and counted.

Limits: ``Limits.entries`` tensors, ``Limits.dimensions``, and sizes in signed 64-bit integers, as in torch.

Refused: views outside their storage and contradictory storage declarations.
Unsupported, and therefore leaves of the tree (``Machine.call``): nested, meta and subclassed tensors; dtypes without
plain strided tensors; dtypes, storage classes, metadata and further arguments that are unknown, as a newer
torch may write them; hooks; in a big-endian file, tensors whose dtype differs from the dtype of their storage, because
torch swaps bytes by that. Their storages are declared anyway, because legacy files store others after them.
The leaf of a tensor that wraps others has its attributes (``UnsupportedValue.inner``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache, partial
from reprlib import repr as short_repr
from types import MappingProxyType
from typing import Any, Never, cast

from msgspec.structs import replace

from sluice._dtypes import ITEM_BYTES, MAX_SIGNED, number_bytes
from sluice._errors import FormatError, LimitError, UnsupportedError
from sluice._options import Limits
from sluice.formats.pickles.machine import WrapperError
from sluice.formats.pickles.unpickler import Constructor
from sluice.formats.torch_save.composites import PACKED_DTYPES, QUANTIZED_DTYPES, quantized, sparse
from sluice.formats.torch_save.plain_values import DTYPE_PREFIX, UNREAD_DTYPE, PlainValues, plain_global
from sluice.formats.torch_save.sharded import SHARDED_TENSOR, record_class, sharded_tensor
from sluice.formats.torch_save.storages import DeclaredStorages, StorageReference, storage_kinds
from sluice.records import Entry, MathBit, Opaque, TorchText, elements_of

__all__ = ["TorchAllowlist"]

_UNSUPPORTED_TENSORS = {
    "_rebuild_sparse_csr_tensor": "a sparse tensor written by torch 1.9, which later versions of torch do not read",
    "_rebuild_nested_tensor": "a nested tensor",
    "_rebuild_meta_tensor_no_storage": "a tensor on the meta device, which has no data",
    "_rebuild_wrapper_subclass": "a tensor subclass that wraps other tensors",
    "_rebuild_device_tensor_from_numpy": "a tensor on a device without storages",
    "_rebuild_device_tensor_from_cpu_tensor": "a tensor on a device without storages",
    "_rebuild_xla_tensor": "a tensor on a device without storages",
}

_PLAIN_ATTRIBUTES = (type(None), int, float, complex, str, bytes, Opaque)


class TorchAllowlist(DeclaredStorages):
    """The permitted globals of the pickle of one file, and the storages that it has used so far."""

    def __init__(self, limits: Limits, pickle_bytes: int, *, big_endian: bool = False) -> None:
        """Prepare for one pickle.

        Args:
            limits: Bounds on tensors, dimensions and names.
            pickle_bytes: Size of the pickle, in bytes.
            big_endian: Whether the data of the storages is big-endian.
        """
        super().__init__(limits)
        self._limits = limits
        self._big_endian = big_endian
        self._tensors = 0
        self._plain = PlainValues(self.keys, pickle_bytes)
        self._rebuilds: dict[tuple[str, str], Callable[[tuple[Any, ...]], Entry]] = {
            ("torch._utils", "_rebuild_tensor"): self._rebuild_tensor,
            ("torch._utils", "_rebuild_tensor_v2"): self._rebuild_tensor_v2,
            ("torch._utils", "_rebuild_tensor_v3"): self._rebuild_tensor_v3,
            ("torch._utils", "_rebuild_sparse_tensor"): partial(sparse, limits=limits),
            ("torch._utils", "_rebuild_qtensor"): self._rebuild_qtensor,
        }
        #: The globals that depend on this pickle.
        self.names: dict[tuple[str, str], object] = {
            **self._plain.names(),
            **self._rebuilds,
            ("torch._utils", "_rebuild_parameter"): self._rebuild_parameter,
            ("torch._utils", "_rebuild_parameter_with_state"): self._rebuild_parameter,
            ("torch._tensor", "_rebuild_from_type_v2"): self._rebuild_from_type,
            ("torch.tensor", "_rebuild_from_type_v2"): self._rebuild_from_type,  # until torch 1.8
        }

    def find(self, module: str, name: str) -> object | None:
        key = module, name
        return self.names.get(key) or _names().get(key) or plain_global(module, name) or record_class(module, name)

    def _rebuild_tensor(self, arguments: tuple[Any, ...]) -> Entry:
        _check_number(arguments, (4,))
        storage, offset, size, stride = arguments
        return self._tensor(None, storage, offset, size, stride, False)

    def _rebuild_tensor_v2(self, arguments: tuple[Any, ...]) -> Entry:
        _check_number(arguments, (6, 7))
        _check_hooks(arguments[5])
        entry = self._tensor(None, *arguments[:5])
        return entry if len(arguments) == 6 else _with_math_bits(entry, arguments[6])

    def _rebuild_tensor_v3(self, arguments: tuple[Any, ...]) -> Entry:
        _check_number(arguments, (7, 8))
        _check_hooks(arguments[5])
        dtype = arguments[6]
        if type(dtype) is Opaque:
            raise UnsupportedError("a tensor of a dtype that sluice does not know", found=dtype.qualified_name)
        if type(dtype) is not TorchText or not dtype.startswith(DTYPE_PREFIX):
            raise FormatError("the dtype of a tensor is not a torch.dtype")
        entry = self._tensor(dtype[len(DTYPE_PREFIX) :], *arguments[:5])
        return entry if len(arguments) == 7 else _with_math_bits(entry, arguments[7])

    def _rebuild_qtensor(self, arguments: tuple[Any, ...]) -> Entry:
        _check_number(arguments, (7,))
        storage, offset, size, stride, parameters, requires_grad, hooks = arguments
        if type(storage) is StorageReference and storage.dtype in PACKED_DTYPES:
            raise UnsupportedError(
                "a quantized tensor with elements smaller than a byte", found=f"torch.{storage.dtype}"
            )
        if type(storage) is not StorageReference or storage.dtype not in QUANTIZED_DTYPES:
            raise FormatError("a quantized tensor is not a view of a quantized storage")
        _check_hooks(hooks)
        _check_requires_grad(storage.dtype, requires_grad)
        values = self._tensor(storage.element_dtype, storage, offset, size, stride, False)
        return quantized(storage.dtype, values, parameters)

    def _tensor(
        self, dtype: str | None, storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any
    ) -> Entry:
        if type(storage) is not StorageReference:
            raise FormatError("a tensor is not a view of a storage")
        dtype = dtype or storage.dtype
        item_bytes = ITEM_BYTES.get(dtype)
        if item_bytes is None:
            raise UnsupportedError(UNREAD_DTYPE, found=f"torch.{dtype}")
        _check_requires_grad(dtype, requires_grad)
        self._check_view(storage, item_bytes, offset, size, stride)
        if self._big_endian and storage.nbytes and number_bytes(dtype) != number_bytes(storage.element_dtype):
            raise UnsupportedError(
                "a tensor in a big-endian file that torch itself reads without swapping its bytes",
                found=f"torch.{dtype}",
            )
        self._tensors += 1
        if self._tensors > self._limits.entries:
            raise LimitError(f"the checkpoint has more than {self._limits.entries} tensors")
        return Entry(
            elements=elements_of(dtype),
            shape=tuple(size),
            stride=stride,
            storage=storage.position,
            storage_offset=offset,
            requires_grad=requires_grad,
        )

    def _check_view(self, storage: StorageReference, item_bytes: int, offset: Any, size: Any, stride: Any) -> None:
        if not isinstance(size, tuple) or type(stride) is not tuple or len(size) != len(stride):
            raise FormatError("the size and stride of a tensor are not tuples of equal length")
        if len(size) > self._limits.dimensions:
            raise FormatError(f"a tensor has more than {self._limits.dimensions} dimensions", found=len(size))
        if type(offset) is not int or not 0 <= offset <= MAX_SIGNED:
            raise FormatError("the storage offset of a tensor is not a valid integer")
        last, elements, empty = offset, 1, False
        for count, step in zip(size, stride, strict=True):
            if type(count) is not int or type(step) is not int or count < 0 or not 0 <= step <= MAX_SIGNED:
                raise FormatError("a size or stride of a tensor is not a valid integer")
            if count:
                elements *= count
                last += (count - 1) * step
            else:
                empty = True
        if elements * item_bytes > MAX_SIGNED:
            raise FormatError("a tensor has more bytes than torch can count", expected=MAX_SIGNED)
        if not empty and (last + 1) * item_bytes > storage.nbytes:
            problem = f"a tensor extends past the end of its storage {storage.key!r}"
            expected, found = f"at most {storage.nbytes} bytes", f"{(last + 1) * item_bytes} bytes"
            raise FormatError(problem, expected=expected, found=found)

    def _rebuild_parameter(self, arguments: tuple[Any, ...]) -> Entry:
        _check_number(arguments, (3, 4))
        data, requires_grad, hooks = arguments[:3]
        if type(data) is not Entry:
            raise FormatError("the data of a parameter is not a tensor")
        _check_hooks(hooks)
        _check_requires_grad(data.dtype, requires_grad)
        attributes = self._attributes(arguments[3]) if len(arguments) > 3 else data.attributes
        return replace(data, parameter=True, requires_grad=requires_grad, attributes=attributes)

    def _rebuild_from_type(self, arguments: tuple[Any, ...]) -> Entry:
        _check_number(arguments, (4,))
        function, kind, inner, state = arguments
        # Nested calls of this function are refused, because they would recurse without bound.
        module, _, name = function.qualified_name.rpartition(".") if type(function) is Constructor else ("", "", "")
        rebuild = self._rebuilds.get((module, name))
        if isinstance(kind, Opaque) and kind.qualified_name == SHARDED_TENSOR:
            return sharded_tensor(state, self._limits)
        if isinstance(kind, Opaque) and kind.qualified_name != "torch.Tensor":
            if type(state) is dict and all(type(name) is str for name in state):
                raise WrapperError("a tensor subclass", found=kind.qualified_name, inner=self._inner(state))
            raise UnsupportedError("a tensor subclass", found=kind.qualified_name)
        if rebuild is None or not isinstance(kind, Opaque) or type(inner) is not tuple:
            raise UnsupportedError("a tensor with a custom rebuild function")
        return replace(rebuild(inner), attributes=self._attributes(state))

    def _inner(self, state: dict[str, object]) -> dict[str, object]:
        """Return the plain attributes of a wrapper; copied, because later opcodes can make cycles of what they fill."""
        inner: dict[str, object] = {}
        for name, value in state.items():
            parts = value if isinstance(value, (list, tuple)) else (value,)
            self._plain.count_copy(len(parts) + 1)
            if type(value) is Entry:
                inner[name] = replace(value, attributes=None)
            elif all(isinstance(part, _PLAIN_ATTRIBUTES) for part in parts):
                inner[name] = tuple(parts) if parts is value else value
            else:
                inner[name] = Opaque(qualified_name=type(value).__name__)
        return inner

    def _attributes(self, state: object) -> dict[str, object] | None:
        """Return the attributes in the state of a tensor: its ``__dict__`` and its slots; None if there are none."""
        attributes: dict[str, object] = {}
        for part in state if type(state) is tuple else (state,):
            if part is None:
                continue
            if type(part) not in (dict, OrderedDict) or any(type(name) is not str for name in cast("Any", part)):
                raise FormatError("the attribute names of a tensor are not text")
            attributes.update(cast("dict[str, object]", part))
        if type(state) is tuple and len(state) != 2:
            raise FormatError("the state of a tensor has the wrong length", expected=2, found=len(state))
        return attributes or None


@cache
def _names() -> Mapping[tuple[str, str], object]:
    """Return the replacements that are the same in every pickle; cached, because each shard has its own pickle."""
    names = storage_kinds()
    names["torch", "Tensor"] = Opaque(qualified_name="torch.Tensor")
    for name, kind in _UNSUPPORTED_TENSORS.items():
        names["torch._utils", name] = _refusing(kind)
    return MappingProxyType(names)


def _check_number(arguments: tuple[Any, ...], permitted: tuple[int, ...]) -> None:
    if len(arguments) > permitted[-1]:
        raise UnsupportedError(f"a tensor saved in {len(arguments)} parts, of which sluice knows {permitted[-1]}")
    if len(arguments) not in permitted:
        problem = "the call that rebuilds a tensor has the wrong number of arguments"
        raise FormatError(problem, expected=permitted[0], found=len(arguments))


def _check_hooks(hooks: object) -> None:
    # torch 0.4 wrote None, all later versions an empty OrderedDict.
    if hooks is not None and (type(hooks) is not OrderedDict or hooks):
        raise UnsupportedError("a tensor with backward hooks, which sluice does not keep")


def _with_math_bits(entry: Entry, flags: Any) -> Entry:
    """Return the entry with the conj and neg bits from the optional last argument of its rebuild call."""
    if flags is None:
        return entry
    if type(flags) is not dict or not flags.keys() <= {"conj", "neg"}:
        raise UnsupportedError("a tensor with metadata that sluice does not know", found=short_repr(flags))
    if any(flag is not True for flag in flags.values()):  # torch writes only True, and would treat False as True
        raise FormatError("a flag in the metadata of a tensor is not True")
    bits: tuple[MathBit, ...] = tuple(bit for bit in ("conj", "neg") if bit in flags)
    if "conj" in bits and not entry.dtype.startswith("complex"):
        raise FormatError(f"a tensor of {entry.dtype} is marked as conjugated", expected="a complex dtype")
    return replace(entry, elements=replace(entry.elements, math_bits=bits)) if bits else entry


def _check_requires_grad(dtype: str, requires_grad: object) -> None:
    if requires_grad is False:
        return
    if requires_grad is not True or not dtype.startswith(("float", "bfloat", "complex")):
        problem = f"a tensor of {dtype} has an invalid requires_grad"
        raise FormatError(problem, expected="False, or a dtype with gradients")


def _refusing(kind: str) -> Callable[[tuple[Any, ...]], Never]:
    def refuse(arguments: tuple[Any, ...]) -> Never:
        classes = [argument.qualified_name for argument in arguments[:1] if isinstance(argument, Opaque)]
        raise UnsupportedError(kind, found=classes[0] if classes else None)

    return refuse
