"""``load`` and ``save`` in place of those of ``torch``: tensors by sluice, code of a pickle never.

Replace ``torch.load(...)`` by ``sluice.torch.load(...)``. The object is the same as that of
``torch.load(weights_only=True)``: nested containers, plain values, tensors that share storage. It comes from any format
and any source that ``sluice.open`` takes. Different are:

- tensors go to the CPU unless ``map_location`` names a device; functions and dicts are refused;
- ``weights_only=False`` and ``pickle_module`` are refused: sluice runs no code of a file. Use torch for such a file;
- ``mmap`` has no effect: bytes are read into memory of their own, around the page cache if the file is cold;
- ``save`` takes only an object and a path, and replaces a file when the new one is complete and on the disk. What
  ``torch.load(weights_only=True)`` would refuse is a ``SaveError``.

Nothing of torch is patched.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from sluice._arguments import device_name
from sluice._errors import BudgetError, SaveError
from sluice._options import TransferOptions
from sluice.api.checkpoint import open as open_checkpoint
from sluice.api.save import save as save_checkpoint
from sluice.checkpoint.open_checkpoint import CheckpointSource
from sluice.loading.job import decide, run
from sluice.loading.state_dict import StateDictRequest
from sluice.sources.remote.location import Remote

__all__ = ["load", "save"]


def load(
    f: CheckpointSource,
    map_location: str | int | torch.device | None = None,
    pickle_module: None = None,
    *,
    weights_only: bool | None = True,
    mmap: bool | None = None,  # noqa: ARG001  without effect
    encoding: str = "utf-8",
) -> Any:
    """Load the object of a checkpoint as ``torch.load(weights_only=True)`` does.

    Args:
        f: A path, a URL, a file object, or any other source of ``sluice.open``.
        map_location: Device of all tensors; None is the CPU.
        pickle_module: None.
        weights_only: True or None.
        mmap: Accepted and without effect.
        encoding: Encoding of text that Python 2 wrote; see ``sluice.open``.

    Raises:
        UnsafeContentError: The object has a part that only running code could build; torch can, if you trust the file.
        CheckpointError: The file is damaged, unsafe or of an unknown kind.
        FileNotFoundError: It does not exist.
        ValueError: An argument asks for what only torch does.

    Example:
        >>> run = sluice.torch.load("run.pt", map_location="cpu")
    """
    if pickle_module is not None or weights_only is False:
        raise ValueError("sluice runs no code of a file: use torch.load for pickle_module= or weights_only=False")
    if callable(map_location) or isinstance(map_location, Mapping):
        problem = "map_location= is one device: load to the CPU and move tensors, or use torch.load"
        raise ValueError(problem)  # noqa: TRY004  torch takes them
    device = "cpu" if map_location is None else device_name(map_location)
    request = StateDictRequest(device=device, whole=True, options=TransferOptions())
    with open_checkpoint(f, encoding=encoding) as checkpoint:
        try:
            return run(decide(request, checkpoint), progress=False).value
        except BudgetError as error:
            error.alternatives, error.advice = (), "For a smaller dtype, use sluice.load_state_dict(f, dtype=...)."
            raise


def save(obj: Any, f: str | os.PathLike[str] | Remote) -> None:
    """Write an object as ``torch.save`` does, completely or not at all, with a fixed amount of additional memory.

    Args:
        obj: A module's state dict, or a nested training state.
        f: Path, or address of an object store.

    Raises:
        SaveError: ``torch.load(weights_only=True)`` would refuse the object, or the operating system failed.
        TypeError: ``f`` is a file object.

    Example:
        >>> sluice.torch.save({"model": model.state_dict(), "step": 3}, "run.pt")
    """
    if isinstance(obj, (torch.nn.Module, torch.optim.Optimizer)):
        problem, advice = "only tensors and plain values can be saved", "Save its state_dict()."
        raise SaveError(problem, found=type(obj).__qualname__, advice=advice)
    save_checkpoint(obj, f, format="torch", overwrite=True)
