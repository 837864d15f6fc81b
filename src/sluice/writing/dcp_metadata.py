"""The ``.metadata`` file of a torch.distributed.checkpoint directory, as torch pickles it. No torch.

``formats.distributed.metadata`` has the layout. Objects are pickled like dataclasses: created without a call of their
class, then given their fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sluice.formats.distributed.metadata import ItemPlace, TensorItem
from sluice.writing.pickle_opcodes import PickleOpcodes
from sluice.writing.torch_tensors import write_layout, write_size

__all__ = ["pickle_metadata"]

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"

#: Version of the format that torch writes.
_VERSION = "1.0.0"

_NEW = b"\x81"


def pickle_metadata(
    tensors: Mapping[str, TensorItem],
    values: Mapping[str, ItemPlace],
    paths: Mapping[str, Sequence[str | int]],
) -> bytearray:
    """Return the content of the file.

    Args:
        tensors: The tensors, by flat name.
        values: Items of values that are not tensors, by flat name.
        paths: Path of each item in the saved object, by flat name.
    """
    return _MetadataPickle().dump(tensors, values, paths)


class _MetadataPickle:
    def __init__(self) -> None:
        self._ops = PickleOpcodes()

    def dump(
        self,
        tensors: Mapping[str, TensorItem],
        values: Mapping[str, ItemPlace],
        paths: Mapping[str, Sequence[str | int]],
    ) -> bytearray:
        ops = self._ops
        self._begin(_METADATA, "Metadata")
        ops.constant("state_dict_metadata")
        self._open_dict()
        for name in paths:
            ops.text(name)
            if name in tensors:
                self._tensor(tensors[name])
            else:
                self._begin(_METADATA, "BytesStorageMetadata")
                self._finish()
        self._close_dict()
        ops.constant("planner_data")
        self._open_dict()
        for name, path in paths.items():
            ops.text(name)
            self._path(path)
        self._close_dict()
        ops.constant("storage_data")
        self._open_dict()
        for name, place in values.items():
            self._place(name, None, place)
        for name, tensor in tensors.items():
            for chunk in tensor.chunks:
                self._place(name, chunk.start, chunk.place)
        self._close_dict()
        ops.constant("version")
        ops.constant(_VERSION)
        self._finish()
        return ops.finish()

    def _begin(self, module: str, name: str) -> None:
        """Begin an object, of which fields follow."""
        self._ops.named(module, name)
        self._ops.open_tuple(0)
        self._ops.close_tuple(0)
        self._ops.out += _NEW
        self._open_dict()

    def _finish(self) -> None:
        self._close_dict()
        self._ops.out += PickleOpcodes.BUILD

    def _open_dict(self) -> None:
        self._ops.out += PickleOpcodes.EMPTY_DICT + PickleOpcodes.MARK

    def _close_dict(self) -> None:
        self._ops.out += PickleOpcodes.SETITEMS

    def _path(self, path: Sequence[str | int]) -> None:
        self._ops.open_tuple(len(path))
        for key in path:
            if isinstance(key, str):
                self._ops.text(key)
            else:
                self._ops.integer(key)
        self._ops.close_tuple(len(path))

    def _tensor(self, tensor: TensorItem) -> None:
        ops = self._ops
        self._begin(_METADATA, "TensorStorageMetadata")
        ops.constant("properties")
        self._properties(tensor.dtype)
        ops.constant("size")
        write_size(ops, tensor.shape)
        ops.constant("chunks")
        ops.out += PickleOpcodes.EMPTY_LIST + PickleOpcodes.MARK
        for chunk in tensor.chunks:
            self._begin(_METADATA, "ChunkStorageMetadata")
            ops.constant("offsets")
            write_size(ops, chunk.start)
            ops.constant("sizes")
            write_size(ops, chunk.shape)
            self._finish()
        ops.out += PickleOpcodes.APPENDS
        self._finish()

    def _properties(self, dtype: str) -> None:
        """Append an object whose state is a tuple: dtype, layout, requires_grad, memory format and pin_memory."""
        ops = self._ops
        ops.named(_METADATA, "TensorProperties")
        ops.open_tuple(0)
        ops.close_tuple(0)
        ops.out += _NEW
        ops.open_tuple(5)
        ops.named("torch", dtype)
        write_layout(ops, "torch.strided")
        ops.boolean(False)
        ops.named(_METADATA, "_MEM_FORMAT_ENCODING")
        ops.integer(0)
        ops.call(1)
        ops.boolean(False)
        ops.close_tuple(5)
        ops.out += PickleOpcodes.BUILD

    def _place(self, name: str, start: tuple[int, ...] | None, place: ItemPlace) -> None:
        """Append the key of an item, and its place."""
        ops = self._ops
        self._begin(_METADATA, "MetadataIndex")
        ops.constant("fqn")
        ops.text(name)
        ops.constant("index")
        ops.none()
        if start is not None:
            ops.constant("offset")
            write_size(ops, start)
        self._finish()
        self._begin(_FILESYSTEM, "_StorageInfo")
        ops.constant("relative_path")
        ops.constant(place.file)
        ops.constant("offset")
        ops.integer(place.offset)
        ops.constant("length")
        ops.integer(place.nbytes)
        self._finish()
