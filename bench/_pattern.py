"""A model whose every value is known from its position: written to files, and compared after a load."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

__all__ = ["FILES", "Pattern", "write_files", "wrong_tensors"]

#: Name of the file in each format.
FILES = ("pattern.safetensors", "pattern.pth")

#: Any odd number: successive products differ in every byte.
_FACTOR = -1_640_531_535

_BLOCK_BYTES = 4 * (2048 * 2048 + 1024 * 1024 + 417 * 911 + 1024 * 512 + 2048 + 3)


class _Block(nn.Module):
    """Tensors of several sizes: large, not a multiple of a page, all zero, and small."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.empty(2048, 2048))
        self.odd = nn.Parameter(torch.empty(417, 911))
        self.bias = nn.Parameter(torch.empty(2048))
        self.zeros = nn.Parameter(torch.empty(1024, 512))
        self.three = nn.Parameter(torch.empty(3))
        self.square = nn.Parameter(torch.empty(1024, 1024))


class Pattern(nn.Module):
    """As many blocks as fit ``nbytes``, and at least one."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(max(1, nbytes // _BLOCK_BYTES)))


def _bits(name: str, count: int) -> torch.Tensor:
    """Return the bit patterns of a tensor, as int32."""
    if name.endswith("zeros"):
        return torch.zeros(count, dtype=torch.int32)
    return torch.arange(count, dtype=torch.int32).mul_(_FACTOR).add_(zlib.crc32(name.encode()) >> 1)


def write_files(folder: Path, nbytes: int) -> None:
    """Write the model to ``folder``, once in each format."""
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Pattern(nbytes).state_dict().items()}
    state = {name: _bits(name, shape.numel()).view(torch.float32).view(shape) for name, shape in shapes.items()}
    save_file(state, folder / FILES[0])
    torch.save(state, folder / FILES[1])


def wrong_tensors(model: nn.Module) -> list[str]:
    """Return the names of the tensors that differ from the pattern in any bit."""
    return [
        name
        for name, tensor in model.state_dict().items()
        if not torch.equal(tensor.detach().view(torch.int32).flatten(), _bits(name, tensor.numel()))
    ]
