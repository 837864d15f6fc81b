"""Write small checkpoints with DeepSpeed's ZeRO by two processes: ``python tools/write_deepspeed_files.py``.

Needs deepspeed, whose CPU backend is enough; tested with 0.19.8. Archives in ``tests/support/deepspeed_files`` have a
directory ``run`` as DeepSpeed wrote it, ``weights.safetensors`` as its zero_to_fp32 puts it together, and
``optimizer.safetensors`` with the state of each parameter as its ds_to_universal does: ``NAME/exp_avg``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

TARGET = Path(__file__).parents[1] / "tests" / "support" / "deepspeed_files"

#: Name of each archive: stage, precision, further settings of ``zero_optimization``.
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "stage-1": (1, "fp32", {}),
    "stage-1-bf16": (1, "bf16", {}),
    "stage-2": (2, "fp32", {}),
    "stage-2-bf16-round-robin": (2, "bf16", {"round_robin_gradients": True}),
    "stage-3": (3, "fp32", {}),
    "stage-3-bf16-sub-groups": (3, "bf16", {"sub_group_size": 40}),
}

STEPS, RANKS = 3, 2


class Net(nn.Module):
    """Matrices, vectors, a scalar, a convolution; frozen, tied; buffers of all kinds. Sizes are odd."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.norm = nn.LayerNorm(3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.conv = nn.Conv2d(1, 2, (2, 3))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.linspace(0, 1, 4))
        self.register_buffer("count", torch.arange(3))
        self.register_buffer("hidden", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss that depends on all parameters."""
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        hidden = self.norm(hidden) * self.scale + self.frozen(hidden)
        found: torch.Tensor = self.head(hidden) * self.conv(hidden[None, None, :2]).sum()
        return found.float().square().mean()


def train(name: str, directory: str) -> None:
    """Train in one of the ranks, and save."""
    import deepspeed  # type: ignore[import-not-found]  # not one of sluice's dependencies, here and below

    stage, precision, settings = CASES[name]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **settings},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    torch.manual_seed(0)
    model = Net()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0, "lr": 2e-3},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.8, 0.95))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step * RANKS + int(os.environ["RANK"]))
        engine.backward(engine(torch.randint(0, 5, (4,), generator=generator)))
        engine.step()
    engine.save_checkpoint(directory)


def write(name: str, folder: Path) -> None:
    """Write one archive."""
    from deepspeed.utils.zero_to_fp32 import (  # type: ignore[import-not-found]
        get_fp32_state_dict_from_zero_checkpoint,
    )
    from safetensors.torch import save_file

    environment = {**os.environ, "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617"}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, name, str(folder / "run")],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "DS_ACCELERATOR": "cpu"},
        )
        for rank in range(RANKS)
    ]
    if any(rank.wait() for rank in ranks):
        sys.exit(f"{name}: a rank failed")
    for script in (folder / "run").glob("*.py"):
        script.unlink()
    weights = get_fp32_state_dict_from_zero_checkpoint(str(folder / "run"))
    save_file({key: value.clone() for key, value in weights.items()}, folder / "weights.safetensors")
    tag = f"global_step{STEPS}"
    converter = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--no_strict", "--inject_missing_state"]
    places = ["--input_folder", str(folder / "run" / tag), "--output_folder", str(folder / "universal" / tag)]
    subprocess.run([*converter, *places, "--num_extract_workers", "1", "--num_merge_workers", "1"], check=True)
    states = {}
    for path in sorted((folder / "universal" / tag / "zero").glob("*/exp_avg*.pt")):
        value = torch.load(path, weights_only=False)
        states[f"{path.parent.name}/{path.stem}"] = (value["param"] if isinstance(value, dict) else value).clone()
    save_file(states, folder / "optimizer.safetensors")


def without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return a member of an archive without what differs between machines."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def main() -> None:
    """Write every archive, or train as one of the ranks."""
    if len(sys.argv) > 1:
        return train(*sys.argv[1:])
    TARGET.mkdir(exist_ok=True)
    for name in CASES:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            write(name, folder)
            (folder / "universal" / "latest_universal").unlink(missing_ok=True)
            if name not in {"stage-2", "stage-3"}:
                shutil.rmtree(folder / "universal")
            with tarfile.open(TARGET / f"{name}.tar.xz", "w:xz") as archive:  # compressed across files
                for path in sorted(filter(Path.is_file, folder.rglob("*"))):
                    archive.add(path, str(path.relative_to(folder)), filter=without_owner)
    return None


if __name__ == "__main__":
    main()
