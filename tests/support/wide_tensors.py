"""Tensors that take several reads, and a module for them."""

from __future__ import annotations

import torch

COUNT, WIDTH = 3, 300_000


def tensors(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {f"w{number}": torch.arange(WIDTH) + float(number) + value for number in range(COUNT)}


def module(*, live: bool) -> torch.nn.ParameterDict:
    """Return a module of zeros, or on meta."""
    made = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(WIDTH)) for name in tensors()})
    return made if live else made.to("meta")
