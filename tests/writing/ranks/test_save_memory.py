"""Memory of saves by ranks, measured from outside of their processes: a fixed amount that the ranks of a host share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sluice
from sluice import _options as options
from support.ranks import Ranks

_MIB = 1 << 20

#: What is saved, kept between two functions on a rank.
_STATE: dict[str, torch.Tensor] = {}


def prepare(directory: Path) -> None:
    """Make one tensor that is much larger than staging, divided by columns, and import everything."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2,))
    for name, size in (("small", 2), ("w", 4096)):
        _STATE[name] = DTensor.from_local(torch.full((size, size // 2), 1.5), mesh, [Shard(1)], run_check=False)
    for path, form in (("a.pth", None), ("a.safetensors", None), ("a", "dcp")):
        sluice.save({"small": _STATE["small"]}, directory / path, format=form)  # type: ignore[arg-type]


def save(path: Path, dtype: torch.dtype | None) -> None:
    sluice.save({"w": _STATE["w"]}, path, format=None if path.suffix else "dcp", dtype=dtype)


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
        for path, dtype in (("w.pth", None), ("w.safetensors", torch.bfloat16), ("w", torch.float64)):
            before = []
            for process in two_ranks.processes:
                Path(f"/proc/{process.pid}/clear_refs").write_text("5", encoding="ascii")
                before.append(_memory(process.pid, "VmRSS"))
            two_ranks.run(save, tmp_path / path, dtype)
            for process, start in zip(two_ranks.processes, before, strict=True):
                growth = _memory(process.pid, "VmHWM") - start
                assert growth <= options.SAVE_STAGING_BYTES // 2 + 8 * _MIB, f"{path}: {growth / _MIB:.1f} MiB"
    finally:
        two_ranks.run(forget)
    assert bool((sluice.load_state_dict(tmp_path / "w.pth")["w"] == 1.5).all())
