"""Load an ordinary checkpoint into a tensor-parallel model, which FSDP2 divides further if there are four ranks.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py
    torchrun --nproc-per-node 4 examples/tensor_parallel.py

The columns of ``up`` and the rows of ``down`` are on different ranks; each rank reads its own. Every rank compares its
output with that of the whole model, which only this example builds.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sluice


class Net(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def saved_by_rank_0(whole: Net) -> Path:
    """Write the whole model on rank 0 and return the path on every rank."""
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    path = Path(str(made[0])) / "model.pth"
    if dist.get_rank() == 0:
        torch.save(whole.state_dict(), path)
    dist.barrier()
    return path


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    torch.manual_seed(0)
    whole = Net().to(device)
    path = saved_by_rank_0(whole)

    ranks = dist.get_world_size()
    mesh = init_device_mesh(device, (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
    with torch.device("meta"):
        model = Net()
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if ranks > 2:
        fully_shard(model, mesh=mesh["data"])

    report = sluice.load_into(model, path)

    x = torch.ones(3, 256, device=device)
    torch.testing.assert_close(model(x), whole(x))
    read = sum(report.reads.values())
    print(
        f"rank {dist.get_rank()}: read {read} bytes of {path.stat().st_size}, output as of the whole model", flush=True
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
