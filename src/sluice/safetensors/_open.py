"""``safe_open``: names, metadata, tensors and slices of a safetensors file, as the class of safetensors has them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Self

from safetensors import SafetensorError

from sluice._arguments import device_name
from sluice._errors import CheckpointError
from sluice.api.checkpoint import Checkpoint, LazyTensor
from sluice.api.checkpoint import open as open_checkpoint
from sluice.api.load import load_state_dict
from sluice.formats.safetensors.header import DTYPES
from sluice.sources.remote.location import Remote

__all__ = ["SafetensorError", "safe_open"]

_FRAMEWORKS = {"pt": "pt", "torch": "pt", "pytorch": "pt", "np": "np", "numpy": "np"}
_BACKENDS = ("mmap", "pread")


@cache
def _both(kind: type[CheckpointError]) -> type[CheckpointError]:
    own: dict[str, object] = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    own["__reduce__"] = lambda error: (_restored, (kind, error.problem, error.__dict__))
    return type(kind.__name__, (kind, SafetensorError), own)


def _restored(kind: type[CheckpointError], problem: str, state: dict[str, object]) -> CheckpointError:
    error = _both(kind)(problem)  # type: ignore[arg-type]  # a class is hashable
    error.__dict__.update(state)
    return error


@contextmanager
def as_safetensors() -> Iterator[None]:
    """Let errors about a file also be a ``SafetensorError``, which callers of safetensors catch."""
    try:
        yield
    except CheckpointError as error:
        if not isinstance(error, SafetensorError):
            error.__class__ = _both(type(error))  # type: ignore[arg-type]  # a class is hashable
        raise


class safe_open:  # noqa: N801  the name in safetensors
    """Open a safetensors file and read its tensors one by one. A context manager, as in safetensors.

    Args:
        filename: Path or URL of the file, or a ``sluice.Remote``.
        framework: ``"pt"`` for tensors of torch, ``"np"`` for arrays of numpy.
        device: Device of the tensors.
        backend: Accepted and without effect: sluice chooses how it reads.

    Raises:
        SafetensorError: The file is damaged, or not a safetensors file.
        FileNotFoundError: It does not exist.

    Example:
        >>> with sluice.safetensors.safe_open("model.safetensors", framework="pt") as f:
        ...     rows = f.get_slice("wte.weight")[:10]
    """

    def __init__(
        self,
        filename: str | os.PathLike[str] | Remote,
        framework: str,
        device: str | int | Any = "cpu",
        *,
        backend: str = "mmap",
    ) -> None:
        if framework not in _FRAMEWORKS:
            raise SafetensorError(f'framework {framework!r} is not read by sluice: use "pt" or "np", or safetensors')
        if backend not in _BACKENDS:
            raise SafetensorError(f"backend {backend!r} is invalid; expected one of {', '.join(_BACKENDS)}")
        self._numpy = _FRAMEWORKS[framework] == "np"
        self._device = device_name(device)
        with as_safetensors():
            checkpoint = open_checkpoint(filename)
        if checkpoint.format != "safetensors" or len(checkpoint.files) != 1:
            checkpoint.close()
            raise SafetensorError(f"{checkpoint.path}: not a safetensors file: {checkpoint.format}")
        self._checkpoint: Checkpoint | None = checkpoint

    @property
    def _open(self) -> Checkpoint:
        if self._checkpoint is None:
            raise SafetensorError("File is not open")
        return self._checkpoint

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._checkpoint is not None:
            self._checkpoint.close()
            self._checkpoint = None

    def keys(self) -> list[str]:
        """Return the names, sorted."""
        return sorted(self._open)

    def offset_keys(self) -> list[str]:
        """Return the names in the order of the file."""
        entries, storages = self._open.entries, self._open.index.storages
        return sorted(entries, key=lambda name: (storages[entries[name].storages[0]].offset, name))

    def metadata(self) -> dict[str, str] | None:
        """Return the text in the header; None if there is none."""
        return dict(self._open.metadata) or None

    def get_tensor(self, name: str) -> Any:
        """Read a tensor."""
        with as_safetensors():
            return self._result(self._lazy(name).read(device=self._device))

    def get_tensors(self) -> dict[str, Any]:
        """Read every tensor, in one pass over the file."""
        order = self.offset_keys()
        with as_safetensors():
            tensors = load_state_dict(self._open, device=self._device, key="")
        return {name: self._result(tensors[name]) for name in order}

    def get_slice(self, name: str) -> _Slice:
        """Return a tensor that can be indexed; an index reads only the bytes that it needs."""
        return _Slice(self, self._lazy(name))

    def _lazy(self, name: str) -> LazyTensor:
        try:
            return self._open[name]
        except KeyError:
            raise SafetensorError(f"File does not contain tensor {name}") from None

    def _result(self, tensor: Any) -> Any:
        return tensor.numpy() if self._numpy else tensor


class _Slice:
    """A tensor that is read by indexing it."""

    def __init__(self, file: safe_open, lazy: LazyTensor) -> None:
        self._file = file
        self._lazy = lazy

    def get_shape(self) -> list[int]:
        """Return the size of each dimension."""
        return list(self._lazy.shape)

    def get_dtype(self) -> str:
        """Return the dtype as the header has it: ``"F32"``, ``"BF16"``, ..."""
        return next(code for code, dtype in DTYPES.items() if dtype == self._lazy.entry.dtype)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, list):
            if key:
                raise SafetensorError("Non empty lists are not implemented")
            key = slice(0, 0)
        with as_safetensors():
            return self._file._result(self._lazy[key].read(device=self._file._device))  # noqa: SLF001  one module
