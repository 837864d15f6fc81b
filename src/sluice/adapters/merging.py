"""Add adapters to whole weights, operation by operation as ``merge_and_unload`` of peft 0.21 does on the same device.

peft holds adapters in float32, also for weights of 16 bits, and rounds once, when it adds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import torch
from msgspec import Struct

__all__ = ["Layout", "MergeStep", "merge", "shape_of_sum"]

#: How a module uses its weight: outputs first, inputs first (``Conv1D`` of transformers), rows by token, or kernels.
Layout: TypeAlias = Literal["linear", "transposed", "embedding", "conv"]

#: Elements that are added at a time: an addition of two dtypes makes copies of its operands.
_PIECE = 1 << 20


class MergeStep(Struct, frozen=True, kw_only=True):
    """One change of a weight by one adapter."""

    #: ``"LoRA"``, ``"DoRA"``, ``"LoHa"``, ``"bias"`` for an addition to a bias, ``"replaced"``.
    kind: str
    #: Name of each tensor of the adapter by its part.
    parts: Mapping[str, str]
    #: Factor of what is added.
    scale: float = 1.0
    layout: Layout = "linear"


def shape_of_sum(
    step: MergeStep, shapes: Mapping[str, tuple[int, ...]], weight: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the shape of what a step adds to a weight; None if its tensors do not fit each other."""
    one = {part: shapes[name] for part, name in step.parts.items()}
    if step.kind in {"bias", "replaced"}:
        return one[step.kind if step.kind == "bias" else "whole"]
    if step.kind not in {"LoRA", "DoRA"}:
        return weight
    a, b = one["a"], one["b"]
    if len(a) != len(b) or len(a) < 2 or a[0] != b[1] or any(size != 1 for size in b[2:]):
        return None
    if "magnitude" in one and one["magnitude"] != (b[0],) and step.layout != "conv":
        return None
    return (a[1], b[0]) if step.layout in {"transposed", "embedding"} else (b[0], *a[1:])


def merge(weight: torch.Tensor, step: MergeStep, parts: Mapping[str, torch.Tensor]) -> None:
    """Change a whole, row-major weight in place; ``parts`` has the tensors of the adapter by part."""
    if step.kind == "replaced":
        weight.copy_(parts["whole"])
        return
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    own = {part: tensor.to(weight.device, dtype) for part, tensor in parts.items()}
    if step.kind == "bias":
        weight += own["bias"] * step.scale
        return
    delta = _delta(weight, step, own)
    if "magnitude" in own:
        _add_dora(weight, delta, own["magnitude"], step.layout)
        return
    rows = max(1, _PIECE * weight.shape[0] // max(1, weight.numel()))
    for piece, added in zip(
        torch.split(weight, rows), torch.split(delta, rows), strict=True
    ):  # rounded once, or twice as by peft
        piece.add_(added.to(weight.dtype) if step.layout == "embedding" else added)


def _delta(weight: torch.Tensor, step: MergeStep, own: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return what an adapter adds to a weight."""
    if step.kind == "LoHa":
        delta = (own["hada_w1_a"] @ own["hada_w1_b"]).mul_(own["hada_w2_a"] @ own["hada_w2_b"])
        return delta.mul_(step.scale).reshape(weight.shape)
    a, b = own["a"], own["b"]
    if step.layout != "conv":
        return (b @ a if step.layout == "linear" else (b @ a).T).mul_(step.scale)
    if weight.shape[2:4] == (1, 1):
        return (b.squeeze(3).squeeze(2) @ a.squeeze(3).squeeze(2)).mul_(step.scale).unsqueeze(2).unsqueeze(3)
    convolve = (torch.conv1d, torch.conv2d, torch.conv3d)[weight.dim() - 3]
    return convolve(a.transpose(0, 1), b).transpose(0, 1).mul_(step.scale)


def _add_dora(weight: torch.Tensor, delta: torch.Tensor, magnitude: torch.Tensor, layout: Layout) -> None:
    """Add a delta, and give each output the norm that the adapter has learned for it."""
    if layout == "conv":
        norm = (weight + delta).norm(p=2, dim=tuple(range(1, weight.dim())), keepdim=True).transpose(1, 0)
        factor = (magnitude / norm).view(-1, *(1,) * (weight.dim() - 1))
    else:
        turned = layout != "linear"
        norm = torch.linalg.norm((weight.T + delta.T) if turned else (weight + delta), dim=1)
        factor = (magnitude / norm).view(-1, 1)
        factor = factor.T if turned else factor
    weight.copy_((weight + delta).mul_(factor))
