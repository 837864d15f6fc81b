"""Models that ranks hold in parts, saved by all of them, compared bit for bit with the whole model."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import sluice
from support.divided_models import LAYOUTS, Net
from support.ranks import Ranks

FORMATS = {"torch": "model.pth", "safetensors": "model.safetensors", "huggingface": "model"}


def whole_model() -> Net:
    torch.manual_seed(7)
    return Net()


def divided_model(layout: str) -> Net:
    model = whole_model()
    LAYOUTS[layout](model)
    return model


def saved_everywhere(layout: str, directory: Path, options: Mapping[str, Any]) -> list[sluice.SaveReport]:
    model = divided_model(layout)
    shards = {"max_shard_size": 300}
    return [
        sluice.save(model, directory / path, **options, **(shards if name == "huggingface" else {}))
        for name, path in FORMATS.items()
    ]


def expected_state(dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    state = whole_model().state_dict()
    return {name: t.to(dtype) if dtype and t.is_floating_point() else t for name, t in state.items()}


def check_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], *, but: str = "") -> None:
    assert found.keys() == expected.keys() - {but}
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape), name
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), expected[name].reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "part-of-the-ranks"])
def test_every_layout_in_every_format(
    four_ranks: Ranks, tmp_path: Path, layout: str, dtype: torch.dtype | None
) -> None:
    reports = four_ranks.run(saved_everywhere, layout, tmp_path, {"dtype": dtype})
    expected = expected_state(dtype)
    check_equal(torch.load(tmp_path / "model.pth", weights_only=True), expected)
    check_equal(safetensors.torch.load_file(tmp_path / "model.safetensors"), expected, but="head.weight")
    shards: dict[str, torch.Tensor] = {}
    for path in sorted((tmp_path / "model").glob("*.safetensors")):
        shards |= safetensors.torch.load_file(path)
    check_equal(shards, expected, but="head.weight")
    for path in FORMATS.values():
        check_equal(sluice.load_state_dict(tmp_path / path), expected)
    for own in zip(*reports, strict=True):
        assert len({(report.files, report.file_bytes, report.written_by_rank) for report in own}) == 1
        assert sum(own[0].written_by_rank) == own[0].nbytes
    assert not list(tmp_path.rglob(".*"))


def test_the_archive_has_correct_checksums(four_ranks: Ranks, tmp_path: Path) -> None:
    four_ranks.run(saved_everywhere, "fsdp-columns", tmp_path, {})
    with zipfile.ZipFile(tmp_path / "model.pth") as archive:
        assert archive.testzip() is None
    assert sluice.verify(tmp_path / "model.pth").ok
