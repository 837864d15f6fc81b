"""Formats of ``sluice.save`` and ``sluice.convert``, and the choice of one by path and arguments. Pure; no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

__all__ = ["FORMATS", "SaveFormat", "choose_format"]

#: ``huggingface`` is a directory: one safetensors file, or shards and their index.
SaveFormat = Literal["safetensors", "torch", "huggingface"]

FORMATS: tuple[SaveFormat, ...] = get_args(SaveFormat)

#: Ends of the error for formats without a writer.
_READ_ONLY = {
    "per-parameter": "; a file for each tensor saves no memory when sluice loads the model: it only reads such files",
    "dcp": "; torch.distributed.checkpoint.save writes such directories, and sluice reads them",
}

_SUFFIXES: dict[str, SaveFormat] = {
    ".safetensors": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".ckpt": "torch",
}


def choose_format(path: Path, requested: str | None, max_shard_size: int | str | None) -> SaveFormat:
    """Return the format for a path and the arguments of ``save`` or ``convert``.

    Raises:
        ValueError: The format is unknown or cannot be derived, or the arguments contradict each other.
    """
    suffix = path.suffix.lower()
    named: str | None = _SUFFIXES.get(suffix)
    if named is None and requested is None and (suffix == "" or max_shard_size is not None):
        named = "huggingface"
    if requested is None and named is None:
        raise ValueError(f"no format for the suffix {path.suffix!r}: name one with format=")
    chosen = next((each for each in FORMATS if each == (requested or named)), None)
    if chosen is None:
        advice = _READ_ONLY.get(str(requested), "")
        raise ValueError(f"unknown format {requested!r}: one of {', '.join(FORMATS)}{advice}")
    if suffix in _SUFFIXES and chosen != named:
        raise ValueError(f"format={chosen!r} contradicts the suffix {path.suffix!r}, which means {named!r}")
    if max_shard_size is not None and chosen != "huggingface":
        raise ValueError(f"max_shard_size applies to a directory of shards, not to {chosen!r}")
    return chosen
