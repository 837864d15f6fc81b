"""Large files that ranks write around the page cache: their bytes, and the memory of each rank, from outside of it.

The memory is a fixed amount that the ranks of a host share.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sluice
from sluice import _defaults as defaults
from support.ranks import Ranks

_MIB = 1 << 20

#: The tensors to save, kept between two functions on a rank.
_STATE: dict[str, torch.Tensor] = {}


def numbered(rows: range, columns: range, width: int) -> torch.Tensor:
    """Return a part of a tensor whose elements have their positions as values."""
    return torch.tensor(rows).float()[:, None] * width + torch.tensor(columns).float()


def prepare(directory: Path) -> None:
    """Make tensors that are much larger than staging, divided by columns and by rows, and import everything."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()

    def divided(local: torch.Tensor, dim: int, *shape: int) -> torch.Tensor:
        made: torch.Tensor = DTensor.from_local(
            local, mesh, [Shard(dim)], run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
        )
        return made

    _STATE["small"] = divided(torch.ones(2, 1), 1, 2, 2)
    _STATE["columns"] = divided(numbered(range(4096), range(2048 * rank, 2048 * (rank + 1)), 4096), 1, 4096, 4096)
    _STATE["rows"] = divided(
        numbered(range(2050 * rank, min(2050 * (rank + 1), 4099)), range(1023), 1023), 0, 4099, 1023
    )
    for path, form in (("a.safetensors", None), ("a", "dcp")):
        sluice.save({"small": _STATE["small"]}, directory / path, format=form)  # type: ignore[arg-type]


def save(path: Path, dtype: torch.dtype | None) -> None:
    state = {name: tensor for name, tensor in _STATE.items() if name != "small"}
    sluice.save(state, path, format=None if path.suffix else "dcp", dtype=dtype)


def forget() -> None:
    _STATE.clear()


def _memory(pid: int | None, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(field)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs the kernel's record of the peak")
def test_every_rank_takes_its_share_of_staging(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(prepare, tmp_path)
    try:
        for path, dtype in (("v.safetensors", None), ("w.safetensors", torch.bfloat16), ("w", torch.float64)):
            before = []
            for process in two_ranks.processes:
                Path(f"/proc/{process.pid}/clear_refs").write_text("5", encoding="ascii")
                before.append(_memory(process.pid, "VmRSS"))
            two_ranks.run(save, tmp_path / path, dtype)
            for process, start in zip(two_ranks.processes, before, strict=True):
                growth = _memory(process.pid, "VmHWM") - start
                assert growth <= defaults.SAVE_STAGING_BYTES // 2 + 8 * _MIB, f"{path}: {growth / _MIB:.1f} MiB"
    finally:
        two_ranks.run(forget)
    for path, dtype in (("v.safetensors", torch.float32), ("w.safetensors", torch.bfloat16), ("w", torch.float64)):
        loaded = sluice.load_state_dict(tmp_path / path)
        assert torch.equal(loaded["columns"], numbered(range(4096), range(4096), 4096).to(dtype))
        assert torch.equal(loaded["rows"], numbered(range(4099), range(1023), 1023).to(dtype))
