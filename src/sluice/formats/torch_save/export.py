"""Exported programs (``torch.export.save`` since torch 2.8): their state dict, without the program.

Records besides those of every zip file of torch (``zip_format``)::

    NAME/archive_format                           "pt2"
    NAME/data/weights/MODEL_weights_config.json   {"config": {FQN: {"path_name": KEY, "is_param", "use_pickle",
                                                   "tensor_meta": {"dtype", "sizes", "strides", "storage_offset",
                                                   "layout", "requires_grad"}}}}
    NAME/data/weights/KEY                         bytes of a storage
    NAME/models/MODEL.json, data/constants/...    the graph, and tensors that only it uses; not read

Numbers of shapes are ``{"as_int": N}``, dtypes and layouts those of ``torch._export.serde.schema``. The tensors of
several models are below the name of their model.

Limits: ``Limits.header_bytes`` of JSON, ``Limits.entries`` tensors, ``Limits.dimensions``.
Refused: archives without weights, such as compiled packages; tensors outside their storage. ``UnsupportedValue``
leaves: tensors that were pickled (subclasses), and those of unknown dtypes and layouts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, cast

from sluice._errors import CheckpointError, FormatError, LimitError, UnsupportedError
from sluice._options import Limits
from sluice.formats.archives.zip_directory import CentralDirectory
from sluice.formats.archives.zip_records import read_record
from sluice.formats.strict_json import decode_json
from sluice.formats.torch_save.allowlist import TorchAllowlist
from sluice.formats.torch_save.plain_values import DTYPE_PREFIX
from sluice.formats.torch_save.storages import storage_kinds
from sluice.records import Entry, TorchText, UnsupportedValue
from sluice.sources.protocol import Source

__all__ = ["read_exported"]

_WEIGHTS, _CONFIG = "data/weights/", "_weights_config.json"

#: Dtypes by their number.
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


def read_exported(
    source: Source, directory: CentralDirectory, limits: Limits, *, big_endian: bool
) -> tuple[object, TorchAllowlist, tuple[str, ...]]:
    """Return the state dict of an exported program, what declares its storages, and notes.

    Raises:
        UnsupportedError: The archive has no weights of a program.
        FormatError: The description of the weights is malformed, or contradicts the archive.
        LimitError: There are more tensors than the limits allow, or more JSON.
    """
    models: dict[str, object] = {}
    left = limits.header_bytes
    reader = _WeightsReader(source, directory, limits, big_endian=big_endian)
    start = f"{directory.archive}/{_WEIGHTS}"
    for record in directory.records():
        if record.name.startswith(start) and record.name.endswith(_CONFIG):
            _, text = read_record(source, record, left)
            left -= len(text)
            value = decode_json(text, dict[str, Any], "the description of the weights", source.path)
            models[record.name[len(start) : -len(_CONFIG)]] = reader.state_dict(value)
    if not models:
        problem = "this is an archive of torch.export without the weights of a program, such as a compiled package"
        raise UnsupportedError(problem, file=source.path, advice="Save the program itself with torch.export.save.")
    tree = next(iter(models.values())) if len(models) == 1 else models
    constants = any(name.startswith("data/constants/tensor_") for name in directory.positions)
    notes = ("Tensors that only the program uses, its constants, are left out.",) if constants else ()
    return tree, reader.allowlist, notes


class _WeightsReader:
    """Builds the entries of an archive from their descriptions."""

    def __init__(self, source: Source, directory: CentralDirectory, limits: Limits, *, big_endian: bool) -> None:
        self._file = source.path
        self._directory = directory
        self._limits = limits
        self._kind = storage_kinds()["torch.storage", "UntypedStorage"]
        #: Declares the storages, and checks the tensors as those of a pickle.
        self.allowlist = TorchAllowlist(limits, 0, big_endian=big_endian)
        find = self.allowlist.find
        self._rebuild = cast("Callable[[tuple[Any, ...]], Entry]", find("torch._utils", "_rebuild_tensor_v3"))
        self._parameter = cast("Callable[[tuple[Any, ...]], Entry]", find("torch._utils", "_rebuild_parameter"))

    def state_dict(self, value: Mapping[str, Any]) -> OrderedDict[str, object]:
        """Return the tensors that a description of weights names."""
        config = value.get("config")
        if not isinstance(config, dict):
            raise FormatError("the description of the weights has no object 'config'", file=self._file)
        if len(config) > self._limits.entries:
            raise LimitError(f"the checkpoint has more than {self._limits.entries} tensors", file=self._file)
        found: OrderedDict[str, object] = OrderedDict()
        for name, payload in config.items():
            if len(name) > self._limits.name_bytes:
                raise LimitError(f"a name is longer than {self._limits.name_bytes} characters", file=self._file)
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

    def _tensor(self, payload: Any) -> Entry:
        meta = payload.get("tensor_meta") if isinstance(payload, dict) else None
        key = payload.get("path_name") if isinstance(payload, dict) else None
        if not isinstance(meta, dict) or type(key) is not str:
            raise FormatError("a tensor is malformed", expected="path_name and tensor_meta")
        if payload.get("use_pickle"):
            raise UnsupportedError("a tensor that torch.export pickled, as a subclass", found=key)
        number, layout = meta.get("dtype"), meta.get("layout")
        dtype = _DTYPES.get(number) if type(number) is int else None
        if dtype is None or layout != _STRIDED:
            found = f"dtype {str(number)[:40]}, layout {str(layout)[:40]}"
            raise UnsupportedError("a tensor of a dtype or layout that sluice does not know", found=found)
        record = self._directory.record(f"{_WEIGHTS}{key}")
        if record is None:
            raise FormatError(f"the archive has no record for the weight {key!r}")
        storage = self.allowlist.load_persistent(("storage", self._kind, f"weights/{key}", "cpu", record.nbytes))
        offset, gradients = _number(meta.get("storage_offset")), meta.get("requires_grad") is True
        shape, stride = _numbers(meta.get("sizes")), _numbers(meta.get("strides"))
        entry = self._rebuild(
            (storage, offset, shape, stride, gradients, OrderedDict(), TorchText(DTYPE_PREFIX + dtype))
        )
        return self._parameter((entry, gradients, OrderedDict())) if payload.get("is_param") else entry


def _number(value: object) -> object:
    return value.get("as_int") if isinstance(value, dict) else None


def _numbers(values: object) -> object:
    return tuple(map(_number, values)) if isinstance(values, list) else None
