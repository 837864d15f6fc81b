"""Load an ordinary checkpoint into a model that FSDP2 divides over ranks.

    torchrun --nproc-per-node 2 examples/fsdp2.py [model.pth] [--dtype bfloat16]

Each rank reads the bytes of its own shards; no rank holds a whole model. Without a path, rank 0 writes a small
checkpoint first. Runs on CPUs with gloo, and on GPUs with NCCL.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sluice


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 255, blocks: int = 4, words: int = 1001) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def shared_folder() -> str:
    """Return a folder that rank 0 made, on every rank."""
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return str(made[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path)
    parser.add_argument("--dtype")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    path = arguments.checkpoint
    if path is None:
        path = Path(shared_folder()) / "model.pth"
        if dist.get_rank() == 0:
            torch.save(Net().state_dict(), path)
        dist.barrier()

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    with torch.device("meta"):
        model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    report = sluice.load_into(model, path, dtype=arguments.dtype)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = model(torch.arange(8, device=device)).float().square().mean()
    loss.backward()
    optimizer.step()
    read = sum(report.reads.values())
    print(f"rank {dist.get_rank()}: read {read} bytes for {report.final_bytes}, loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
