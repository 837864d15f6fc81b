"""A model whose tensors are divided over ranks in the ways that people divide them, and loads into it on every rank.

The truth is a real model that was loaded whole with torch and divided afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import sluice
from support.oracles import same_tensor


class Net(nn.Module):
    """No dimension but the hidden one is a multiple of four; the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 9)
        self.down = nn.Linear(9, 8)
        self.norm = nn.BatchNorm1d(8)
        self.row = nn.Parameter(torch.randn(1, 5))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.randn(3, 4), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        hidden = self.norm(hidden + self.down(self.up(hidden).relu()))
        return torch.as_tensor(self.head(hidden).sum() + self.row.sum())


def mesh_of(*shape: int, names: Sequence[str] | None = None) -> Any:
    """Return a mesh of all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=None if names is None else tuple(names))


def _fully_shard(model: Net, mesh: Any, **options: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.up, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def _fsdp_columns(model: Net) -> None:
    from torch.distributed.tensor import Shard

    _fully_shard(model, mesh_of(4), shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 and p.shape[1] == 8 else None)


def _parallelize(model: Net, mesh: Any) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    rows = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel(), "embedding": rows})
    model.head.weight = model.embedding.weight


def _fsdp_tp(model: Net) -> None:
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    _parallelize(model, mesh["tp"])
    _fully_shard(model, mesh["dp"])


def _replaced(model: Net, made: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Replace the parameters and buffers but for the norm's, which stay plain."""
    for path in ("", "embedding", "up", "down"):
        part = model.get_submodule(path)
        for name, tensor in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(made(name, tensor.detach())))
    model.head.weight = model.embedding.weight


def _columns(model: Net) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = mesh_of(2, 2)
    _replaced(
        model, lambda _, t: distribute_tensor(t, mesh, [Replicate(), Shard(1)] if t.ndim == 2 else [Replicate()] * 2)
    )
    mean = model.norm.running_mean
    assert mean is not None
    model.norm.running_mean = distribute_tensor(mean, mesh, [Shard(0), Replicate()])


def _part_of_the_ranks(model: Net) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh("cpu", [1, 3])
    _replaced(model, lambda _, t: distribute_tensor(t, mesh, [Shard(0)]))


def _fused(model: Net) -> None:
    """Rows of two joined weights, of which each rank holds a part of either, as tensor-parallel plans divide them."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = mesh_of(4)
    rank = mesh.get_coordinate()[0]

    def made(_: str, whole: torch.Tensor) -> torch.Tensor:
        halves = torch.chunk(whole, 2)
        pieces = [torch.chunk(half, 4) for half in halves]
        own = [piece[rank] if rank < len(piece) else piece[0][:0] for piece in pieces]
        placements = [_StridedShard(0, split_factor=2)]
        return DTensor.from_local(torch.cat(own), mesh, placements, shape=whole.shape, stride=whole.stride())

    _replaced(model, made)


#: Ways to divide a ``Net`` over four ranks.
LAYOUTS: Mapping[str, Callable[[Net], None]] = {
    "fsdp": lambda model: _fully_shard(model, mesh_of(4)),
    "fsdp-columns": _fsdp_columns,
    "hsdp": lambda model: _fully_shard(model, mesh_of(2, 2, names=("replicate", "shard"))),
    "tp": lambda model: _parallelize(model, mesh_of(4)),
    "fsdp-tp": _fsdp_tp,
    "columns": _columns,
    "part-of-the-ranks": _part_of_the_ranks,
    "fused": _fused,
}


def divide_by_names(model: nn.Module, names: Sequence[str], sizes: Sequence[int]) -> None:
    """Divide a model with the layers table, up and down over a mesh of these names, as torch's documentation has it."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = mesh_of(*sizes, names=names)
    if "tp" in names:
        styles = {"table": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], styles)
    if "dp" in names:
        fully_shard(model, mesh=mesh["dp"] if "tp" in names else mesh)


def divide(layout: str, *, meta: bool) -> Net:
    """Return a divided ``Net``; with ``meta``, its tensors have no memory but for the buffer that is not saved."""
    with torch.device("meta" if meta else "cpu"):
        model = Net()
    if meta:
        model.table = torch.ones(3, 4)
    LAYOUTS[layout](model)
    return model


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of this rank."""
    to_local = getattr(tensor, "to_local", None)
    return tensor.detach() if to_local is None else to_local().detach()


def locals_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the memory of this rank for every name of the state dict."""
    return {name: local(tensor) for name, tensor in model.state_dict().items()}


def differences(
    layout: str,
    whole: Path,
    paths: Mapping[str, Path],
    dtype: torch.dtype | None = None,
    place: Literal["copy", "map"] = "copy",
) -> list[str]:
    """Load a divided model from each path, on meta and live; return what differs from the truth on this rank.

    Args:
        layout: How it is divided.
        whole: The checkpoint that torch reads.
        paths: The checkpoints that sluice reads, by name.
        dtype: As in ``load_into``.
        place: As in ``load_into``.
    """
    real = Net()
    real.load_state_dict(torch.load(whole, weights_only=True))
    LAYOUTS[layout](real)
    truth = {
        name: tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        for name, tensor in locals_of(real).items()
    }
    problems = []
    for name, path in paths.items():
        for meta in (True, False):
            model = divide(layout, meta=meta)
            objects = {key: id(tensor) for key, tensor in model.named_parameters()}
            memory = {key: tensor.data_ptr() for key, tensor in locals_of(model).items()}
            sluice.load_into(model, path, dtype=dtype, place=place)
            if not meta and place == "map":
                sluice.refresh(model, path)
            loaded = locals_of(model)
            where = f"{name}, {'meta' if meta else 'live'}: "
            same = {key for key in truth if loaded[key].is_contiguous() and same_tensor(loaded[key], truth[key])}
            problems += [where + key for key in truth if key not in same]
            if not meta and dtype is None:
                problems += [f"{where}{key} moved" for key in memory if loaded[key].data_ptr() != memory[key]]
            if objects != {key: id(tensor) for key, tensor in model.named_parameters()}:
                problems.append(f"{where}objects changed")
            if model.head.weight is not model.embedding.weight:
                problems.append(f"{where}untied")
    return problems
