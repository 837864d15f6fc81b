"""Whole files: the functions of ``safetensors.torch``."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import Any

import safetensors.torch as library
import torch
from torch import nn

from sluice.api.load import load_into
from sluice.api.save import save as save_checkpoint
from sluice.matching.candidates import Candidate
from sluice.modules.collect import collect
from sluice.modules.following import follow_loading
from sluice.safetensors._open import safe_open
from sluice.sources.remote.location import Remote

__all__ = ["load", "load_file", "load_model", "save", "save_file", "save_model"]

# ruff: noqa: SLF001  which of several names of one memory is kept has to be what the library decides


def load_file(
    filename: str | os.PathLike[str] | Remote, device: str | int | torch.device = "cpu", *, backend: str = "mmap"
) -> dict[str, torch.Tensor]:
    """Read a safetensors file as ``safetensors.torch.load_file`` does, into memory of its own.

    Args:
        filename: Path or URL of the file, or a ``sluice.Remote``.
        device: Device of the tensors.
        backend: Accepted and without effect.

    Raises:
        SafetensorError: The file is damaged, or not a safetensors file.
        FileNotFoundError: It does not exist.
    """
    with safe_open(filename, framework="pt", device=device, backend=backend) as file:
        return file.get_tensors()


def load(data: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file in memory."""
    with safe_open(io.BytesIO(data), framework="pt") as file:  # type: ignore[arg-type]  # as sluice.open takes it
        return file.get_tensors()


def save_file(
    tensors: dict[str, torch.Tensor],
    filename: str | os.PathLike[str] | Remote,
    metadata: dict[str, str] | None = None,
) -> None:
    """Write tensors as ``safetensors.torch.save_file`` does, the same bytes, and replace a file only when complete.

    Raises:
        ValueError: A tensor is sparse or not contiguous, or is none.
        RuntimeError: Tensors share memory, or one is on the meta device.
        SaveError: The operating system failed; an existing file is intact.
    """
    _check(tensors)
    _write(tensors, filename, metadata)


def save(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Return the bytes of a safetensors file; those of the library, which has them in memory as well."""
    return library.save(tensors, metadata)


def save_model(
    model: nn.Module,
    filename: str | os.PathLike[str] | Remote,
    metadata: dict[str, str] | None = None,
    force_contiguous: bool = True,  # noqa: FBT001, FBT002  the signature of the library
) -> None:
    """Write the state dict of a model, of tied weights one, and the other names in the metadata.

    Raises:
        ValueError: A tensor is not contiguous and ``force_contiguous`` is False.
        RuntimeError: No name of a shared memory covers all of it.
        SaveError: The operating system failed; an existing file is intact.
    """
    state = dict(model.state_dict())
    for kept, others in library._remove_duplicate_names(state).items():
        for name in others:
            metadata = {name: kept, **(metadata or {})}
            del state[name]
    if not force_contiguous:
        try:
            _check(state)
        except ValueError as error:
            text = f"{error} Or use save_model(..., force_contiguous=True), read the docs for potential caveats."
            raise ValueError(text) from None
    _write(state, filename, metadata)


def load_model(
    model: nn.Module,
    filename: str | os.PathLike[str] | Remote,
    strict: bool = True,  # noqa: FBT001, FBT002  the signature of the library
    device: str | int | torch.device = "cpu",
    *,
    backend: str = "mmap",
) -> tuple[set[str], list[str]]:
    """Fill a model from a file of ``save_model`` or ``save_file``; its tensors stay on their devices.

    Args:
        model: The model.
        filename: Path or URL of the file, or a ``sluice.Remote``.
        strict: Whether missing and unexpected names are an error.
        device: Accepted and without effect: each weight is read straight to where the model has it.
        backend: Accepted and without effect.

    Returns:
        Names of the model that are not in the file, and names of the file that the model does not use.

    Raises:
        RuntimeError: Names are missing or unexpected; the model is unchanged.
        SafetensorError: The file is damaged, or not a safetensors file.
    """
    with safe_open(filename, framework="pt", device=device, backend=backend) as file:
        names = file._open.entries
        # A file of sluice declares further names of a tensor; the library knows the one that is stored.
        first = {id(entry): name for name, entry in reversed(names.items())}
        stored = dict.fromkeys(reversed(first.values()))
        state = model.state_dict(keep_vars=True)
        tied = library._remove_duplicate_names(dict(state), preferred_names=list(stored))
        others = {name for group in tied.values() for name in group}
        kept: dict[int, str] = {}  # by object, which ties on the meta device, without memory, have in common
        preferred = sorted(state, key=lambda name: (name not in stored, name))
        others.update(name for name in preferred if kept.setdefault(id(state[name]), name) != name)
        entries = {name: names[name] for name in stored if name not in others}
        own = Candidate(key=None, entries=entries, versions={}, extra_state={})
        followed = follow_loading(model, own, strict=False)  # load hooks of the model add and rename
        added = {name for slot in collect(model).outline.slots if slot.added_in for name in slot.names}
        missing = state.keys() - {*followed.entries, *followed.extra_state, *followed.optional_names, *added, *others}
        unexpected = [*(name for name in followed.entries if name not in state), *filter(others.__contains__, stored)]
        if strict and (missing or unexpected):
            lines = [f"Error(s) in loading state_dict for {type(model).__name__}:"]
            for title, found in (("Missing", missing), ("Unexpected", unexpected)):
                if found:
                    listed = ", ".join(f'"{name}"' for name in sorted(found))
                    lines.append(f"    {title} key(s) in state_dict: {listed}")
            raise RuntimeError("\n".join(lines))
        dropped: dict[Any, None] = dict.fromkeys((names.keys() - entries.keys()) | (names.keys() & unexpected))
        load_into(model, file._open, strict=False, allow_empty=True, rename=dropped or None)
    return missing, unexpected


def _write(tensors: Mapping[str, torch.Tensor], filename: Any, metadata: dict[str, str] | None) -> None:
    save_checkpoint(
        tensors, filename, format="safetensors", metadata={"format": None, **(metadata or {})}, overwrite=True
    )


def _check(tensors: Any) -> None:
    """Refuse what the library refuses, with its texts."""
    if not isinstance(tensors, dict):
        raise ValueError(f"Expected a dict of [str, torch.Tensor] but received {type(tensors)}")  # noqa: TRY004
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"Key `{name}` is invalid, expected torch.Tensor but received {type(tensor)}")  # noqa: TRY004
    sparse = [name for name, tensor in tensors.items() if tensor.layout != torch.strided]
    if sparse:
        raise ValueError(
            f"You are trying to save a sparse tensors: `{sparse}` which this library does not support. You can make it"
            " a dense tensor before saving with `.to_dense()` but be aware this might make a much larger file than"
            " needed."
        )
    if shared := [names for names in library._find_shared_tensors(tensors) if len(names) > 1]:
        raise RuntimeError(
            f"Some tensors share memory, this will lead to duplicate memory on disk and potential differences when"
            f" loading them again: {shared}. A potential way to correctly save your model is to use `save_model`."
        )
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(
                f"You are trying to save a non contiguous tensor: `{name}` which is not allowed. It either means you"
                " are trying to save tensors which are reference of each other in which case it's recommended to save"
                " only the full tensors, and reslice at load time, or simply call `.contiguous()` on your tensor to"
                " pack it before saving."
            )
        if tensor.is_meta:
            raise RuntimeError(f"Cannot copy out of meta tensor; no data! (`{name}`)")
