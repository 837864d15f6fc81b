"""Open checkpoints: names and lazy tensors over an index without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sluice._arguments import check_load, device_name, dtype_argument, memory_limits
from sluice._dtypes import DType, torch_dtype
from sluice._messages import nearest_names
from sluice._options import TEXT_ENCODING, Limits, Memory
from sluice._public import explain_keywords, public
from sluice.checkpoint.open_checkpoint import CheckpointSource, OpenCheckpoint
from sluice.entries import tree as trees
from sluice.entries.slicing import Key, slice_entry
from sluice.records import Entry, Opaque

if TYPE_CHECKING:
    import torch

__all__ = ["Checkpoint", "LazyTensor", "open"]


@public()
class LazyTensor:
    """One tensor of an open checkpoint. Nothing is read until ``read`` is called.

    Example:
        >>> with sluice.open("model.pth") as checkpoint:
        ...     rows = checkpoint["tok_emb.weight"][:10].read()
    """

    __slots__ = ("_checkpoint", "_entry", "name")

    def __init__(self, checkpoint: Checkpoint, name: str, entry: Entry) -> None:
        self._checkpoint = checkpoint
        self._entry = entry
        #: Dotted name in the checkpoint.
        self.name = name

    @property
    def entry(self) -> Entry:
        """Record in the index: dtype as text, shape, stride and storage, without torch."""
        return self._entry

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype in the file, or the one that its packs are decoded to; imports torch on first use."""
        dtype: torch.dtype = torch_dtype(self._entry.dtype)
        return dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each dimension, in elements."""
        return self._entry.shape

    def stride(self) -> tuple[int, ...]:
        """Return the step of each dimension in its storage, in elements."""
        return self.entry.stride

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, decoded if they are stored in packs."""
        return self._entry.nbytes

    @property
    def storage_key(self) -> str:
        """Name of its storage, or of the storages of its parts; tensors of one file with the same key share storage."""
        return "+".join(self._checkpoint.index.storages[number].key for number in self.entry.storages)

    def __getitem__(self, key: Key) -> LazyTensor:
        """Return the view of torch's basic indexing: integers, slices with positive steps, ``...`` and None.

        Raises:
            IndexError: An integer is out of range, or there are more indices than dimensions.
            TypeError: The key is a tensor, a list or another index that selects elements one by one.
            ValueError: A step is not positive.
        """
        return LazyTensor(self._checkpoint, self.name, slice_entry(self.entry, key))

    @explain_keywords
    def read(
        self,
        *,
        device: str | int | torch.device | None = None,
        dtype: DType | None = None,
        out: torch.Tensor | None = None,
        memory: Memory = None,
    ) -> torch.Tensor:
        """Read the bytes that this tensor needs and return it, cast as ``.to(dtype)`` would.

        Args:
            device: Its device; None for the CPU. Not with ``out``.
            dtype: Its dtype, a ``torch.dtype`` or a name such as ``"bf16"``; None keeps the file's. Not with ``out``.
            out: A tensor of the same shape to fill in place, on its device and in its dtype.
            memory: How much memory may grow, as in ``load_into``.

        Raises:
            FormatError: It is sparse and has invalid indices.
            MismatchError: ``out`` has a different shape, or the tensor is sparse or quantized where it must be dense.
            BudgetError: The memory limits cannot be kept; nothing was read.
            ReadError: The operating system failed a read.
            SourceChangedError: The file is no longer the one that was opened.
            ValueError: ``out`` was passed together with ``device`` or ``dtype``, or the checkpoint is closed.
        """
        from sluice.reading.composites import read_tensor  # imports torch, which opening does not need

        return read_tensor(
            self._checkpoint,
            self.name,
            self.entry,
            device=None if device is None else device_name(device),
            dtype=dtype_argument(dtype, auto_is_none=True),
            out=out,
            memory=memory_limits(memory),
        )

    def __repr__(self) -> str:
        return f"LazyTensor({self.name!r}, dtype={self._entry.dtype}, shape={self.shape})"


class _UnknownNameError(KeyError):
    """A name that is not in a checkpoint. The most similar one is searched when the text is shown."""

    def __init__(self, name: str, checkpoint: Checkpoint) -> None:
        super().__init__(name)
        self._checkpoint = checkpoint

    def __str__(self) -> str:
        name = self.args[0]
        close = (
            nearest_names({name: None}, ((each, None) for each in self._checkpoint)) if isinstance(name, str) else {}
        )
        hint = "".join(f"; did you mean {each!r}?" for each in close.values())
        return f"{name!r} is not in {self._checkpoint.path}{hint}"

    def __reduce__(self) -> tuple[type[KeyError], tuple[str]]:
        return KeyError, (str(self),)  # an open checkpoint is not pickled


@public()
class Checkpoint(OpenCheckpoint, Mapping[str, LazyTensor]):
    """An open checkpoint: a mapping from dotted names to ``LazyTensor``, and a context manager.

    Example:
        >>> with sluice.open("model.pth") as checkpoint:
        ...     print(checkpoint.format, len(checkpoint))
        torch-zip 39
    """

    __hash__ = object.__hash__  # other mappings have none, but checkpoints are keys of a merge

    @cached_property
    def tree(self) -> Any:
        """The nested object of the file, with ``LazyTensor`` for tensors.

        ``Opaque`` stands for values that are never loaded: objects that only running code could build, and, as
        ``UnsupportedValue``, tensors of kinds that sluice does not read.
        """
        names = {id(entry): name for name, entry in trees.walk(self.index.tree)}
        return trees.map_leaves(
            self.index.tree, lambda entry: LazyTensor(self, names.get(id(entry), "_metadata"), entry)
        )

    @cached_property
    def _not_built(self) -> dict[str, Opaque]:
        return trees.opaques(self.index.tree)

    def __getitem__(self, name: str) -> LazyTensor:
        """Return the tensor of this name.

        Raises:
            KeyError: There is no such name.
            UnsafeContentError: It is an object that only running code could build.
            UnsupportedError: It is a tensor of a kind that sluice does not read.
        """
        entry = self.entries.get(name)
        if entry is not None:
            return LazyTensor(self, name, entry)
        if name in self._not_built:
            raise trees.refusal(self._not_built[name], name, self.path)
        raise _UnknownNameError(name, self)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        return f"<Checkpoint {self.format} {self.path}>"


@public()
@explain_keywords
def open(  # noqa: A001  (the name says what it does, as in gzip.open)
    source: CheckpointSource,
    *,
    key: str | None = None,
    limits: Limits | None = None,
    encoding: str = TEXT_ENCODING,
) -> Checkpoint:
    """Open a checkpoint without reading tensor data or importing torch.

    Args:
        source: A file written by ``torch.save`` or safetensors, or a GGUF file; a directory: a Hugging Face model, one
            that torch.distributed.checkpoint wrote, one file for each parameter, or safetensors parts; the index file
            of a sharded model; the URL of one of them, or a ``Remote``; a list of files that are one checkpoint
            together; an open checkpoint; or a file opened with ``open(path, "rb")`` or an ``io.BytesIO``: reading
            starts at its position. Afterwards the position is the end of the object in a legacy ``torch.save`` file,
            and otherwise the end of the file. ``~`` is the home directory.
        key: Only this part: a path into the nested object (``"ema.model"``) or a dotted prefix of names.
        limits: Bounds for hostile files; None for the defaults. Without effect on an open checkpoint.
        encoding: Encoding of text that Python 2 wrote, which does not declare it, as in ``torch.load``: ``"latin1"``,
            ``"ascii"``, or ``"bytes"`` to keep bytes. All other text is UTF-8. Without effect on an open checkpoint.

    Returns:
        A ``Checkpoint``: a mapping from names to ``LazyTensor``, for use in a ``with`` block.

    Raises:
        CheckpointError: The file is damaged, unsafe or of an unknown kind; the subclass tells which.
        MismatchError: ``key`` is not in the checkpoint.
        UnsafeContentError: The value at ``key``, or the whole file, is an object that only running code could build.
        UnsupportedError: The value at ``key`` is a tensor of a kind that sluice does not read.
        ReadError: The file cannot be read; a ``RemoteError`` if a server does not answer.
        TypeError: ``source`` is a file object that can only be read in order, or one that decompresses or decodes; or
            an argument has a wrong type.
        ValueError: ``source`` is an empty list, or names a file twice; or ``encoding`` is unknown.

    Example:
        >>> with sluice.open("model.safetensors") as checkpoint:
        ...     for name, tensor in checkpoint.items():
        ...         print(name, tensor.dtype, tensor.shape)
        wte.weight torch.float32 (64, 16)
    """
    check_load(key=key, limits=limits)
    return Checkpoint.open(source, key=key, limits=limits, encoding=encoding)
