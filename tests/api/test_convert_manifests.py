"""Manifests of conversions: the hash of each tensor, copied or computed."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import sluice
from sluice import rules
from support.oracles import bits


@pytest.mark.parametrize("staging", ["2MiB", "64MiB"])
@pytest.mark.parametrize("name", ["out.pt", "out.safetensors", "model"])
def test_the_manifest_describes_the_written_tensors(tmp_path: Path, name: str, staging: str) -> None:
    base = torch.randn(700, 800)
    state = OrderedDict(
        base=base,
        turned=torch.randn(500, 900).t(),
        rows=base[3:9],
        tied=base,
        q=torch.randn(600, 600),
        k=torch.randn(600, 600),
        nothing=torch.empty(0, 2),
        ints=torch.arange(5),
    )
    torch.save({"model": state, "step": 2}, tmp_path / "in.pt")
    how: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "rules": [rules.concatenate(("q", "k"), "qk", dim=1)],
        "memory": sluice.MemoryLimits(staging=staging),
        "manifest": tmp_path / "manifest.json",
        "max_shard_size": "1MB" if name == "model" else None,
    }
    report = sluice.convert(tmp_path / "in.pt", tmp_path / name, **how)
    written = json.loads((tmp_path / "manifest.json").read_text(encoding="utf-8"))["tensors"]
    with sluice.open(tmp_path / name) as checkpoint:
        assert set(written) == set(checkpoint)
        for key, tensor in checkpoint.items():
            assert written[key]["dtype"] == tensor.entry.dtype
            assert tuple(written[key]["shape"]) == tensor.shape
            assert written[key]["hash"] == hashlib.sha256(bits(tensor.read())).hexdigest()
    assert report.casts == {"float32 -> bfloat16": 5}  # a tie counts once
    (tmp_path / "manifest.json").unlink()
    sluice.convert(tmp_path / "in.pt", tmp_path / "dry.pt", manifest=tmp_path / "manifest.json", dry_run=True)
    assert not (tmp_path / "manifest.json").exists()
