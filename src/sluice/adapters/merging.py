"""Add adapters to whole weights, operation by operation as ``merge_and_unload`` of peft 0.21 does on the same device.

peft holds adapters in float32, also for weights of 16 bits, and rounds once, when it adds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import torch
from msgspec import Struct

__all__ = ["Layout", "MergeStep", "fits", "merge"]

#: How a module uses its weight: outputs first, inputs first (``Conv1D`` of transformers), rows by token, or kernels.
Layout: TypeAlias = Literal["linear", "transposed", "embedding", "conv"]

#: Elements that are added at a time: an addition of two dtypes makes copies of its operands.
_PIECE = 1 << 20


class MergeStep(Struct, frozen=True, kw_only=True):
    """One change of a weight by one adapter."""

    #: ``"LoRA"``, ``"DoRA"``, ``"LoHa"``, ``"LoKr"``, ``"bias"`` for an addition to a bias, ``"replaced"``.
    kind: str
    #: Name of each tensor of the adapter by its part.
    parts: Mapping[str, str]
    #: Factor of what is added.
    scale: float = 1.0
    layout: Layout = "linear"


def fits(step: MergeStep, shapes: Mapping[str, tuple[int, ...]], weight: tuple[int, ...]) -> bool:
    """Return whether the tensors of a step fit each other and a weight, by a computation without numbers."""
    own = {part: torch.empty(shapes[name], device="meta") for part, name in step.parts.items()}
    if step.kind in {"bias", "replaced"}:
        return all(tensor.shape == weight for tensor in own.values())
    try:
        if "magnitude" in own and own["magnitude"].numel() != len(own["b"]):
            return False
        return _delta(torch.empty(weight, device="meta"), step, own).shape == weight
    except (RuntimeError, IndexError, TypeError):
        return False


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
    rows = max(1, _PIECE * len(weight) // max(1, weight.numel()))
    for piece, added in zip(torch.split(weight, rows), torch.split(delta, rows), strict=True):
        # Rounded once, or twice as by peft.
        piece.add_(added.to(weight.dtype) if step.layout == "embedding" else added)


def _delta(weight: torch.Tensor, step: MergeStep, own: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return what an adapter adds to a weight."""
    if step.kind == "LoHa":
        delta = (own["hada_w1_a"] @ own["hada_w1_b"]).mul_(own["hada_w2_a"] @ own["hada_w2_b"])
        return delta.mul_(step.scale).reshape(weight.shape)
    if step.kind == "LoKr":
        w1, w2 = (own[name] if name in own else own[f"{name}_a"] @ own[f"{name}_b"] for name in ("lokr_w1", "lokr_w2"))
        return torch.kron(w1[:, :, None, None] if w2.dim() == 4 else w1, w2).mul_(step.scale).reshape(weight.shape)
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
