"""Formats of ``sluice.save`` and ``sluice.convert``, and the choice of one by path and arguments. Pure; no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeVar, get_args

__all__ = ["CONVERT_FORMATS", "SAVE_FORMATS", "ConvertFormat", "SaveFormat", "choose_format"]

#: ``huggingface`` is a directory: one safetensors file, or shards and their index.
ConvertFormat = Literal["safetensors", "torch", "huggingface"]

#: ``dcp`` is a directory of torch.distributed.checkpoint.
SaveFormat = Literal["safetensors", "torch", "huggingface", "dcp"]

CONVERT_FORMATS: tuple[ConvertFormat, ...] = get_args(ConvertFormat)

SAVE_FORMATS: tuple[SaveFormat, ...] = get_args(SaveFormat)

#: Ends of the error for formats without a writer.
_READ_ONLY = {
    "per-parameter": "; a file for each tensor saves no memory when sluice loads the model, so it only reads such files"
}

_Format = TypeVar("_Format", ConvertFormat, SaveFormat)

_SUFFIXES: dict[str, ConvertFormat] = {
    ".safetensors": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".ckpt": "torch",
}


def choose_format(
    path: Path, requested: str | None, max_shard_size: int | str | None, known: tuple[_Format, ...]
) -> _Format:
    """Return the format for a path and the arguments of ``save`` or ``convert``, which have the ``known`` formats.

    Raises:
        ValueError: The format is unknown or cannot be derived, or the arguments contradict each other.
    """
    suffix = path.suffix.lower()
    named: str | None = _SUFFIXES.get(suffix)
    if named is None and requested is None and (suffix == "" or max_shard_size is not None):
        named = "huggingface"
    if requested is None and named is None:
        raise ValueError(f"no format for the suffix {path.suffix!r}: name one with format=")
    chosen = next((each for each in known if each == (requested or named)), None)
    if chosen is None:
        advice = _READ_ONLY.get(str(requested), "")
        raise ValueError(f"unknown format {requested!r}: one of {', '.join(known)}{advice}")
    if suffix in _SUFFIXES and chosen != named:
        raise ValueError(f"format={chosen!r} contradicts the suffix {path.suffix!r}, which means {named!r}")
    if max_shard_size is not None and chosen != "huggingface":
        raise ValueError(f"max_shard_size applies to a directory of shards, not to {chosen!r}")
    return chosen
