r"""Programs: the state dicts of TorchScript archives and of exported programs, without their code.

TorchScript (``torch.jit.save``) has these records besides those of ``torch.save`` (``zip_format``)::

    NAME/data.pkl                       the module: objects of classes below ``__torch__``, filled with attributes
    NAME/code/__torch__/PACKAGE.py      its classes as text, compressed, with the names of parameters and buffers
    NAME/constants.pkl, constants/KEY   values that only the code uses; not read

The result is the state dict of ``torch.jit.load``: attribute paths of parameters and buffers. The lines
``__parameters__ = [...]`` and ``__buffers__ = [...]`` of a class name them; nothing else of the code is looked at, and
nothing is run. Other attributes of a module are left out, tensors with a note. Without any such line, as in archives
whose code was removed, all tensors count.

Exported programs (``torch.export.save`` since torch 2.8) have::

    NAME/archive_format                           "pt2"
    NAME/data/weights/MODEL_weights_config.json   {"config": {FQN: {"path_name": KEY, "is_param", "use_pickle",
                                                   "tensor_meta": {"dtype", "sizes", "strides", "storage_offset",
                                                   "layout", "requires_grad"}}}}
    NAME/data/weights/KEY                         bytes of a storage
    NAME/models/MODEL.json, data/constants/...    the graph, and tensors that only it uses; not read

Numbers of shapes are ``{"as_int": N}``, dtypes and layouts those of ``torch._export.serde.schema``. The tensors of
several models are below the name of their model.

Limits: ``Limits.header_bytes`` of code, unpacked, and of JSON; ``Limits.entries`` tensors, ``Limits.dimensions``; those
of the inert unpickler.
Refused: two tensors with one path; an object that is not a module; frozen programs, whose weights are constants;
archives without weights, such as compiled packages; tensors outside their storage. ``UnsupportedValue`` leaves: tensors
that were pickled (subclasses), and those of unknown dtypes and layouts.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from msgspec import Struct
from msgspec.structs import replace

from sluice._errors import CheckpointError, FormatError, UnsupportedError
from sluice._messages import check_limit, listed
from sluice._options import Limits
from sluice.formats.archives.zip_directory import CentralDirectory
from sluice.formats.archives.zip_records import read_record
from sluice.formats.pickles.unpickler import Constructor, PendingObject
from sluice.formats.strict_json import decode_json
from sluice.formats.torch_save.allowlist import TorchAllowlist
from sluice.formats.torch_save.plain_values import DTYPE_PREFIX
from sluice.formats.torch_save.storages import StorageReference, storage_kinds
from sluice.records import Entry, Opaque, TorchText, UnsupportedValue
from sluice.sources.protocol import Source

__all__ = ["ScriptAllowlist", "declared_tensors", "read_exported"]

_CLASS = re.compile(rb"^class (\w+)\(Module\):\n  __parameters__ = \[(.*)\]\n  __buffers__ = \[(.*)\]$", re.MULTILINE)
_NAME = re.compile(rb'"([^"\\]+)"')

#: Package of all classes of an archive.
_CLASSES = "__torch__"

_WEIGHTS, _CONFIG = "data/weights/", "_weights_config.json"

#: Dtypes of exported programs by their number.
_DTYPES = {
    **dict(enumerate(("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"), 1)),
    10: "complex64",
    11: "complex128",
    12: "bool",
    13: "bfloat16",
    28: "uint16",
    29: "float8_e4m3fn",
    30: "float8_e5m2",
    31: "float8_e4m3fnuz",
    32: "float8_e5m2fnuz",
    33: "float8_e8m0fnu",
    34: "uint32",
    35: "uint64",
}

_STRIDED = 7


class ScriptAllowlist(TorchAllowlist):
    """The permitted globals of the pickle of one module: those of ``torch.save``, and the classes of the archive."""

    def __init__(self, limits: Limits, pickle_bytes: int, *, big_endian: bool = False) -> None:
        super().__init__(limits, pickle_bytes, big_endian=big_endian)
        #: Attributes and class of each object, by the ``id`` of its attributes.
        self._objects: dict[int, tuple[dict[object, object], str]] = {}

    def find(self, module: str, name: str) -> object | None:
        if module.partition(".")[0] == _CLASSES:
            kind = f"{module}.{name}"
            finish = partial(self._fill, kind)
            return Constructor(qualified_name=kind, build=lambda _: PendingObject(finish=finish), creates=True)
        if module == "torch.jit._pickle":
            return _first_argument  # lists and their types
        return super().find(module, name)

    def _fill(self, kind: str, state: object) -> object:
        if type(state) is not dict:
            raise UnsupportedError("an object whose state only its code can restore", found=kind)
        self._objects[id(state)] = state, kind
        return state

    def state_dict(
        self, root: object, declared: Mapping[str, frozenset[str]], file: str
    ) -> tuple[OrderedDict[str, object], tuple[str, ...]]:
        """Return the state dict of a module that was checked as a tree, and a note on the tensors left out.

        Args:
            root: The module.
            declared: See ``declared_tensors``.
            file: Path of the file, for error messages.

        Raises:
            FormatError: It is not a module, or two tensors have one path.
        """
        if id(root) not in self._objects:
            raise FormatError("the TorchScript archive does not hold a module", file=file, found=type(root).__name__)
        found: OrderedDict[str, object] = OrderedDict()
        without_gradients: dict[int, Entry] = {}
        others: list[str] = []
        pending = [("", root)]
        while pending:
            prefix, module = pending.pop()
            attributes, kind = self._objects[id(module)]
            own = declared.get(kind, frozenset()) if declared else None
            inner = []
            for name, value in attributes.items():
                path = f"{prefix}{name}"
                if id(value) in self._objects:
                    inner.append((f"{path}.", value))
                elif isinstance(value, (Entry, UnsupportedValue)) and own is not None and name not in own:
                    others.append(path)
                elif isinstance(value, (Entry, UnsupportedValue)):
                    if path in found:
                        raise FormatError("two tensors of the module have one path", file=file, tensor=path)
                    found[path] = _detached(value, without_gradients)
            pending += reversed(inner)
        left_out = "Tensors of the program that are neither parameters nor buffers, left out"
        return found, (f"{listed(left_out, others)}.",) if others else ()


def _first_argument(arguments: tuple[object, ...]) -> object:
    if not arguments:
        raise FormatError("a list of a TorchScript archive has no elements")
    return arguments[0]


def _detached(value: Entry | Opaque, known: dict[int, Entry]) -> Entry | Opaque:
    """Return a tensor as in a state dict, without gradients; shared tensors stay shared."""
    if not isinstance(value, Entry) or not value.requires_grad:
        return value
    return known.setdefault(id(value), replace(value, requires_grad=False))


def declared_tensors(source: Source, directory: CentralDirectory, limits: Limits) -> Mapping[str, frozenset[str]]:
    """Return the names of parameters and buffers that the text of each class of an archive declares.

    Raises:
        LimitError: The code has more than ``limits.header_bytes`` bytes.
        FormatError: A record is damaged.
    """
    declared: dict[str, frozenset[str]] = {}
    left = limits.header_bytes
    start = f"{directory.archive}/code/"
    for record in directory.records():
        if not record.name.startswith(start) or not record.name.endswith(".py"):
            continue
        _, text = read_record(source, record, left)
        left -= len(text)
        module = record.name[len(start) : -len(".py")].replace("/", ".")
        for name, parameters, buffers in _CLASS.findall(text):
            names = _NAME.findall(parameters) + _NAME.findall(buffers)
            declared[f"{module}.{name.decode()}"] = frozenset(each.decode("utf-8", "replace") for each in names)
    return declared


class _Number(Struct):
    as_int: int


class _Meta(Struct):
    dtype: int
    layout: int
    sizes: list[_Number]
    strides: list[_Number]
    storage_offset: _Number
    requires_grad: bool


class _Payload(Struct):
    path_name: str
    is_param: bool
    use_pickle: bool
    tensor_meta: _Meta


class _Config(Struct):
    config: dict[str, _Payload]


def read_exported(
    source: Source, directory: CentralDirectory, limits: Limits, *, big_endian: bool
) -> tuple[object, Sequence[StorageReference], tuple[str, ...]]:
    """Return the state dict of an exported program, its storages, and notes.

    Raises:
        UnsupportedError: The archive has no weights of a program.
        FormatError: The description of the weights is malformed, or contradicts the archive.
        LimitError: There are more tensors than the limits allow, or more JSON.
    """
    models: dict[str, OrderedDict[str, object]] = {}
    left = limits.header_bytes
    reader = _WeightsReader(source.path, directory, limits, big_endian=big_endian)
    start = f"{directory.archive}/{_WEIGHTS}"
    for record in directory.records():
        if record.name.startswith(start) and record.name.endswith(_CONFIG):
            _, text = read_record(source, record, left)
            left -= len(text)
            check_limit(limits, "entries", text.count(b'"path_name"'), "the number of tensors", file=source.path)
            described = decode_json(text, _Config, "the description of the weights", source.path)
            models[record.name[len(start) : -len(_CONFIG)]] = reader.state_dict(described.config)
    if not models:
        problem = "this is an archive of torch.export without the weights of a program, such as a compiled package"
        raise UnsupportedError(problem, file=source.path, advice="Save the program itself with torch.export.save.")
    tree = next(iter(models.values())) if len(models) == 1 else models
    constants = any(name.startswith("data/constants/tensor_") for name in directory.positions)
    notes = ("Tensors that only the program uses, its constants, are left out.",) if constants else ()
    return tree, reader.allowlist.storages, notes


class _WeightsReader:
    """Builds the entries of an archive from their descriptions."""

    def __init__(self, file: str, directory: CentralDirectory, limits: Limits, *, big_endian: bool) -> None:
        self._file, self._directory, self._limits = file, directory, limits
        self._kind = storage_kinds()["torch.storage", "UntypedStorage"]
        #: Declares the storages, and checks the tensors as those of a pickle.
        self.allowlist = TorchAllowlist(limits, 0, big_endian=big_endian)

    def state_dict(self, config: Mapping[str, _Payload]) -> OrderedDict[str, object]:
        """Return the tensors that a description of weights names."""
        found: OrderedDict[str, object] = OrderedDict()
        for name, payload in config.items():
            check_limit(self._limits, "name_bytes", len(name), "a name", file=self._file)
            try:
                found[name] = self._tensor(payload)
            except UnsupportedError as error:
                found[name] = UnsupportedValue(
                    qualified_name=str(error.found), reason=error.problem, file=self._file, advice=error.advice
                )
            except CheckpointError as error:
                error.file, error.tensor = self._file, name
                raise
        return found

    def _tensor(self, payload: _Payload) -> Entry:
        meta, key = payload.tensor_meta, payload.path_name
        if payload.use_pickle:
            raise UnsupportedError("a tensor that torch.export pickled, as a subclass", found=key)
        dtype = _DTYPES.get(meta.dtype)
        if dtype is None or meta.layout != _STRIDED:
            found = f"dtype {meta.dtype}, layout {meta.layout}"
            raise UnsupportedError("a tensor of a dtype or layout that sluice does not know", found=found)
        record = self._directory.record(f"{_WEIGHTS}{key}")
        if record is None:
            raise FormatError(f"the archive has no record for the weight {key!r}")
        storage = self.allowlist.load_persistent(("storage", self._kind, f"weights/{key}", "cpu", record.nbytes))
        shape, stride = (tuple(number.as_int for number in numbers) for numbers in (meta.sizes, meta.strides))
        hooks: OrderedDict[str, object] = OrderedDict()
        arguments = (storage, meta.storage_offset.as_int, shape, stride, meta.requires_grad, hooks)
        entry = self._call("_rebuild_tensor_v3", (*arguments, TorchText(DTYPE_PREFIX + dtype)))
        return self._call("_rebuild_parameter", (entry, meta.requires_grad, hooks)) if payload.is_param else entry

    def _call(self, name: str, arguments: tuple[Any, ...]) -> Entry:
        return cast("Callable[[tuple[Any, ...]], Entry]", self.allowlist.find("torch._utils", name))(arguments)
