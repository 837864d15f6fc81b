"""An open checkpoint: names and tensors that read themselves when asked, over an index without torch."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self, TypeAlias

from sluice._dtypes import dtype_name, torch_dtype
from sluice._errors import CheckpointError, MismatchError
from sluice._options import Limits, MemoryLimits, TransferOptions
from sluice.checkpoint.merging import OpenFile
from sluice.checkpoint.opening import open_path, open_section
from sluice.entries import tree as _tree
from sluice.entries.lookup import subtree
from sluice.entries.slicing import Key, slice_entry
from sluice.formats.protocol import Checksum
from sluice.records import Entry, Index, Opaque, Request
from sluice.sources.file_objects import stream_source
from sluice.sources.protocol import Source

if TYPE_CHECKING:
    import torch

__all__ = ["Checkpoint", "CheckpointSource", "LazyTensor", "borrow", "open"]


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
        """Its record in the index: dtype as text, shape, stride and storage, without torch."""
        return self._entry

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype in the file; imports torch on first use."""
        dtype: torch.dtype = torch_dtype(self._entry.dtype)
        return dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each dimension, in elements."""
        return self._entry.shape

    def stride(self) -> tuple[int, ...]:
        """Return the step of each dimension in its storage, in elements."""
        return self._entry.stride

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self._entry.nbytes

    @property
    def storage_key(self) -> str:
        """Name of its storage, or of those that it is assembled from; tensors of one file share what has one key."""
        return "+".join(self._checkpoint.index.storages[number].key for number in self._entry.storages)

    def __getitem__(self, key: Key) -> LazyTensor:
        """Return a view as torch's basic indexing gives it: integers, slices with positive steps, ``...`` and None.

        Raises:
            IndexError: An integer is out of range, or there are more indices than dimensions.
            TypeError: The key is a tensor, a list or anything else that would select elements one by one.
            ValueError: A step is not positive.
        """
        return LazyTensor(self._checkpoint, self.name, slice_entry(self._entry, key))

    def read(
        self,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
        memory: MemoryLimits | None = None,
    ) -> torch.Tensor:
        """Read the bytes that this tensor needs and return it, cast as ``.to(dtype)`` would.

        Args:
            device: Where it goes; None is the CPU. Not with ``out``.
            dtype: Its dtype; None keeps the file's. Not with ``out``.
            out: A tensor of the same shape to fill in place, on its device and in its dtype.
            memory: How much memory may grow.

        Raises:
            FormatError: It is sparse, and its indices do not fit it.
            MismatchError: ``out`` has another shape, or the tensor is sparse or quantized and would have to be dense.
            ValueError: ``out`` was given together with ``device`` or ``dtype``, or the checkpoint is closed.
        """
        # Here, not above: this imports torch, and an index does without.
        from sluice.engine.targets import Targets
        from sluice.reading import transfer as _transfer
        from sluice.reading.composites import assemble, component_requests

        if out is None:
            wanted = None if dtype is None else dtype_name(dtype)
            if wanted and self._entry.layout == "quantized":
                raise MismatchError("a quantized tensor is not cast while it is read", tensor=self.name)
            requests = component_requests(self.name, self._entry, device=str(device or "cpu"), dtype=wanted)
            existing = None
        else:
            requests, existing = [self._request_into(out, device, dtype)], {0: out}
        prepared = _transfer.prepare(self._checkpoint, requests, options=TransferOptions(memory=memory))
        tensors, _ = _transfer.run(self._checkpoint, prepared, Targets(prepared.plan, existing))
        return assemble(self.name, self._entry, tensors, file=self._checkpoint.path)

    def _request_into(self, out: torch.Tensor, device: object, dtype: object) -> Request:
        if device is not None or dtype is not None:
            raise ValueError("out decides device and dtype: leave out the other two")
        if self._entry.composite is not None:
            problem = f"a {self._entry.layout} tensor is not read into another one"
            raise MismatchError(problem, tensor=self.name)
        if tuple(out.shape) != self._entry.shape:
            raise MismatchError("out has another shape", tensor=self.name, expected=self.shape, found=tuple(out.shape))
        return Request(
            name=self.name,
            entry=self._entry,
            dtype=dtype_name(out.dtype),
            device=str(out.device),
            stride=out.stride(),
            existing=True,
        )

    def __repr__(self) -> str:
        return f"LazyTensor({self.name!r}, dtype={self._entry.dtype}, shape={self.shape})"


class Checkpoint(Mapping[str, LazyTensor]):
    """An open checkpoint: a mapping from dotted names to ``LazyTensor``, and a context manager.

    Example:
        >>> with sluice.open("model.pth") as checkpoint:
        ...     print(checkpoint.format, len(checkpoint))
        torch-zip 39
    """

    def __init__(self, path: str, index: Index, files: tuple[OpenFile, ...], limits: Limits) -> None:
        #: What was opened: a file or a directory.
        self.path = path
        #: Every tensor as records that do not need torch.
        self.index = index
        self._files = files
        self.limits = limits
        self._offsets: dict[int, int] = {}
        self._closed = False

    @property
    def format(self) -> str:
        """Name of the format.

        Of a file ``"torch-zip"`` or ``"safetensors"``; of a Hugging Face directory or a shard index
        ``"huggingface-safetensors"`` or ``"huggingface-bin"``; of parts without an index ``"safetensors-parts"``; of
        one file for each parameter ``"per-parameter"``; of a torch.distributed.checkpoint directory
        ``"torch-distributed"``.
        """
        return self.index.format

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of the files that hold its data."""
        return tuple(file.path for file in self.index.files)

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data; bytes that several tensors share count once."""
        return sum(storage.nbytes for storage in self.index.storages)

    @property
    def metadata(self) -> Mapping[str, str]:
        """Text that the file says of itself; of several files, what all of them say."""
        return self.index.metadata

    @cached_property
    def tree(self) -> Any:
        """The nested object of the file, with ``LazyTensor`` for tensors.

        ``Opaque`` stands for what is never loaded: objects that only running code could build, and, as
        ``UnsupportedValue``, tensors of kinds that sluice does not read.
        """
        names = {id(entry): name for name, entry in _tree.walk(self.index.tree)}
        return _tree.map_leaves(
            self.index.tree, lambda entry: LazyTensor(self, names.get(id(entry), "_metadata"), entry)
        )

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """The record of every tensor by its dotted name."""
        return _tree.flatten(self.index.tree, self.limits)

    @property
    def sources(self) -> tuple[Source, ...]:
        """The files, ready to be read.

        Raises:
            ValueError: The checkpoint is closed.
        """
        if self._closed:
            raise ValueError("the checkpoint is closed")
        return tuple(file.source for file in self._files)

    @cached_property
    def stored_names(self) -> Mapping[str, str]:
        """Names that a safetensors file keeps in its metadata for tensors that it stores under others; these names."""
        if "safetensors" not in self.format:
            return {}
        entries = self.entries
        return {name: stored for name, stored in self.metadata.items() if stored in entries and name not in entries}

    def checksums(self) -> list[list[Checksum | CheckpointError]]:
        """Return the checksums that each file records, and what is wrong with headers that should lead to one.

        Raises:
            ValueError: The checkpoint is closed.
        """
        if self._closed:
            raise ValueError("the checkpoint is closed")
        return [file.checksums(self.limits) for file in self._files]

    @property
    def extents(self) -> tuple[tuple[int, int], ...]:
        """The bytes of each file that are the checkpoint's: the first, and the first behind them."""
        ends = (file.index.end for file in self._files)
        return tuple(
            (file.start, file.source.identity.nbytes if end is None else file.start + end)
            for file, end in zip(self._files, ends, strict=True)
        )

    def locate(self, storages: Iterable[int]) -> dict[int, int]:
        """Return the data offset of each of ``storages``; headers that were checked once are not read again."""
        if self._closed:
            raise ValueError("the checkpoint is closed")
        wanted: defaultdict[int, list[int]] = defaultdict(list)
        for number in set(storages) - self._offsets.keys():
            wanted[self.index.storages[number].file].append(number)
        for position, numbers in wanted.items():
            self._offsets.update(self._files[position].locate(numbers))
        return self._offsets

    @cached_property
    def _not_built(self) -> dict[str, Opaque]:
        return _tree.opaques(self.index.tree)

    def __getitem__(self, name: str) -> LazyTensor:
        """Return the tensor of this name.

        Raises:
            KeyError: Nothing has it.
            UnsafeContentError: It is an object that only running code could build.
            UnsupportedError: It is a tensor of a kind that sluice does not read.
        """
        entry = self.entries.get(name)
        if entry is not None:
            return LazyTensor(self, name, entry)
        if name in self._not_built:
            raise _tree.refusal(self._not_built[name], name, self.path)
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def close(self) -> None:
        """Release the files. Tensors that were read stay valid; reading more raises ``ValueError``."""
        self._closed = True
        for file in self._files:
            file.source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Checkpoint {self.format} {self.path}>"


#: What every ``source`` argument takes.
CheckpointSource: TypeAlias = "str | os.PathLike[str] | BinaryIO | Checkpoint"


def open(  # noqa: A001  (the name says what it does, as in gzip.open)
    source: CheckpointSource, *, key: str | None = None, limits: Limits | None = None
) -> Checkpoint:
    """Open a checkpoint without reading tensor data or importing torch.

    Args:
        source: A file written by ``torch.save`` or safetensors; a directory: a Hugging Face model, one that
            torch.distributed.checkpoint wrote, one file for each parameter, or safetensors parts; the index file of a
            sharded model; an open checkpoint; or a file opened with ``open(path, "rb")`` or an ``io.BytesIO``: what is
            read starts at its position, which is then the end of the object in a legacy ``torch.save`` file, and the
            end of the file otherwise.
        key: Show only this part: a path into the nested object (``"ema.model"``) or a dotted prefix of names.
        limits: Bounds for hostile files; None for the defaults.

    Returns:
        A ``Checkpoint``: a mapping from names to ``LazyTensor``, to be used in a ``with`` block.

    Raises:
        CheckpointError: The file is damaged, unsafe or of an unknown kind; the subclass says how.
        MismatchError: ``key`` is not in the checkpoint.
        UnsafeContentError: What ``key`` names, or the whole file, is an object that only running code could build.
        UnsupportedError: What ``key`` names is a tensor of a kind that sluice does not read.
        ReadError: The file cannot be read.
        TypeError: ``source`` is a file object that can only be read in order, or one that decompresses or decodes.

    Example:
        >>> with sluice.open("model.safetensors") as checkpoint:
        ...     for name, tensor in checkpoint.items():
        ...         print(name, tensor.dtype, tensor.shape)
        wte.weight torch.float32 (64, 16)
    """
    if isinstance(source, Checkpoint):
        if key is None:
            return source
        index = replace(source.index, tree=_part(source.index.tree, key, source.path))
        return Checkpoint(source.path, index, source._files, source.limits)  # noqa: SLF001  (its own class)
    limits = limits or Limits()
    if isinstance(source, (str, bytes, os.PathLike)):
        path = os.fsdecode(source)
        index, files = open_path(path, limits)
    else:
        opened, start = stream_source(source)
        path = opened.path
        index, files, end = open_section(opened, start, limits)
        source.seek(end)
    checkpoint = Checkpoint(path, index, files, limits)
    if key is not None:
        try:
            checkpoint.index = replace(index, tree=_part(index.tree, key, path))
        except BaseException:
            checkpoint.close()
            raise
    return checkpoint


def _part(tree: object, key: str, path: str) -> object:
    part = subtree(tree, key)
    if isinstance(part, Opaque):
        raise _tree.refusal(part, key, path)
    return part


@contextmanager
def borrow(source: CheckpointSource, *, limits: Limits | None = None) -> Iterator[Checkpoint]:
    """Open a checkpoint for the length of the block; one that was open already stays open."""
    checkpoint = open(source, limits=limits)
    try:
        yield checkpoint
    finally:
        if checkpoint is not source:
            checkpoint.close()
