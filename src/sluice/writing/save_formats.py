"""Formats of ``sluice.save`` and ``sluice.convert``, and the choice of one by path and arguments. Pure; no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

__all__ = ["SAVE_FORMATS", "SaveFormat", "choose_format"]

#: ``huggingface`` is a directory: one safetensors file, or shards and their index.
SaveFormat = Literal["safetensors", "torch", "huggingface", "per-parameter"]

SAVE_FORMATS: tuple[SaveFormat, ...] = get_args(SaveFormat)

_SUFFIXES: dict[str, SaveFormat] = {
    ".safetensors": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".ckpt": "torch",
}


def choose_format(path: Path, requested: str | None, max_shard_size: int | str | None) -> SaveFormat:
    """Return the format for a path and the arguments of ``save``.

    Raises:
        ValueError: The format is unknown or cannot be derived, or the arguments contradict each other.
    """
    if requested is not None and requested not in SAVE_FORMATS:
        raise ValueError(f"unknown format {requested!r}: one of {', '.join(SAVE_FORMATS)}")
    suffix = path.suffix.lower()
    named = _SUFFIXES.get(suffix)
    if named is None and (suffix == "" or max_shard_size is not None):
        named = "huggingface"
    chosen = next((each for each in SAVE_FORMATS if each == requested), named)
    if chosen is None:
        raise ValueError(f"no format for the suffix {path.suffix!r}: name one with format=")
    if suffix in _SUFFIXES and chosen != named:
        raise ValueError(f"format={chosen!r} contradicts the suffix {path.suffix!r}, which means {named!r}")
    if max_shard_size is not None and chosen != "huggingface":
        raise ValueError(f"max_shard_size applies to a directory of shards, not to {chosen!r}")
    return chosen
