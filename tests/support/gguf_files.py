"""GGUF files, written by hand so that every field can be wrong, and packs with known elements."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

#: A tensor of a file: the sizes in the order of torch, the number of its type, its bytes.
Tensor = tuple[Sequence[int], int, bytes]

_PLAIN = {torch.float32: 0, torch.float16: 1, torch.int8: 24, torch.int32: 26, torch.int64: 27, torch.bfloat16: 30}


def text(value: str | bytes) -> bytes:
    """Return a text: its length and its bytes."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def number(kind: int, code: str, value: float) -> bytes:
    """Return a number of metadata with its type."""
    return struct.pack(f"<I{code}", kind, value)


def array(kind: int, count: int, items: bytes) -> bytes:
    """Return an array of metadata with its type."""
    return struct.pack("<IIQ", 9, kind, count) + items


def plain(tensor: torch.Tensor) -> Tensor:
    """Return a tensor in the type of its dtype."""
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return tensor.shape, _PLAIN[tensor.dtype], data


def packed(shape: Sequence[int], kind: str = "Q8_0", seed: int = 0) -> tuple[Tensor, torch.Tensor]:
    """Return a tensor in Q8_0 or Q4_0, whose scales are powers of two, and its elements in float32."""
    generator = np.random.default_rng(seed)
    packs = int(np.prod(shape)) // 32
    scales = (2.0 ** generator.integers(-6, 3, (packs, 1))).astype(np.float16)
    if kind == "Q8_0":
        numbers = generator.integers(-128, 128, (packs, 32), dtype=np.int8)
        stored = numbers.view(np.uint8)
    else:
        nibbles = generator.integers(0, 16, (packs, 32), dtype=np.uint8)
        numbers = nibbles.astype(np.int8) - np.int8(8)
        stored = nibbles[:, :16] | (nibbles[:, 16:] << np.uint8(4))
    data = np.concatenate([scales.view(np.uint8).reshape(packs, 2), stored], axis=1)
    elements = torch.from_numpy(scales.astype(np.float32) * numbers.astype(np.float32)).reshape(tuple(shape))
    return (shape, {"Q8_0": 8, "Q4_0": 2}[kind], data.tobytes()), elements


def gguf_bytes(
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str | bytes, bytes] | None = None,
    *,
    alignment: int = 32,
    version: int = 3,
    offsets: Mapping[str, int] | None = None,
    count: int | None = None,
) -> bytes:
    """Return a file; ``offsets`` and ``count`` replace what its tensors need."""
    metadata = metadata or {}
    head = struct.pack("<4sIQQ", b"GGUF", version, len(tensors) if count is None else count, len(metadata))
    head += b"".join(text(key) + value for key, value in metadata.items())
    data = b""
    for name, (shape, kind, stored) in tensors.items():
        begin = (offsets or {}).get(name, len(data))
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, begin)
        data += stored + bytes(-len(stored) % alignment)
    return head + bytes(-len(head) % alignment) + data


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str | bytes, bytes] | None = None) -> Path:
    """Write a file, and return its path."""
    path.write_bytes(gguf_bytes(tensors, metadata))
    return path
