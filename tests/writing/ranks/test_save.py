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
from support.distributed import torch_loaded
from support.divided_models import LAYOUTS, Net, locals_of
from support.ranks import Ranks

#: A file or directory for each format, and its arguments of ``save``.
FORMATS: dict[str, dict[str, Any]] = {
    "model.pth": {},
    "model.safetensors": {},
    "model": {"max_shard_size": 300},
    "dcp": {"format": "dcp"},
}


def whole_model() -> Net:
    torch.manual_seed(7)
    return Net()


def divided_model(layout: str) -> Net:
    model = whole_model()
    LAYOUTS[layout](model)
    return model


def saved_everywhere(layout: str, directory: Path, options: Mapping[str, Any]) -> list[sluice.SaveReport]:
    model = divided_model(layout)
    return [sluice.save(model, directory / path, **options, **own) for path, own in FORMATS.items()]


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
    for shard in sorted((tmp_path / "model").glob("*.safetensors")):
        shards |= safetensors.torch.load_file(shard)
    check_equal(shards, expected, but="head.weight")
    check_equal(torch_loaded(tmp_path / "dcp"), expected)
    for path in FORMATS:
        check_equal(sluice.load_state_dict(tmp_path / path), expected)
    for own in zip(*reports, strict=True):
        assert len({(report.files, report.file_bytes, report.written_by_rank) for report in own}) == 1
        assert sum(own[0].written_by_rank) == own[0].nbytes
    assert list(tmp_path.rglob(".*")) == [tmp_path / "dcp" / ".metadata"]


def test_the_archive_has_correct_checksums(four_ranks: Ranks, tmp_path: Path) -> None:
    four_ranks.run(saved_everywhere, "fsdp-columns", tmp_path, {})
    with zipfile.ZipFile(tmp_path / "model.pth") as archive:
        assert archive.testzip() is None
    assert sluice.verify(tmp_path / "model.pth").ok


def loaded_by_torch(layout: str, directory: Path) -> list[str]:
    """Load a distributed checkpoint into a divided model of other values; return what differs on this rank."""
    import torch.distributed.checkpoint as dcp

    expected = locals_of(divided_model(layout))
    torch.manual_seed(8)
    model = Net()
    LAYOUTS[layout](model)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=directory)  # type: ignore[attr-defined]
    model.load_state_dict(state)
    found = locals_of(model)
    return [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "fsdp-tp"])
def test_torch_loads_the_distributed_checkpoint_into_the_same_layout(
    four_ranks: Ranks, tmp_path: Path, layout: str
) -> None:
    four_ranks.run(saved_everywhere, layout, tmp_path, {})
    assert four_ranks.run(loaded_by_torch, layout, tmp_path / "dcp") == [[]] * 4


def test_a_process_alone_saves_a_distributed_checkpoint(tmp_path: Path) -> None:
    state = {"model": expected_state(), "steps": [1, 2.5], "optimizer": {"state": [{"step": torch.ones(())}]}}
    report = sluice.save(state, tmp_path / "dcp", format="dcp")
    loaded = torch_loaded(tmp_path / "dcp")
    check_equal(loaded.pop("model"), expected_state())
    assert loaded == {"steps": [1, 2.5], "optimizer": {"state": [{"step": torch.ones(())}]}}
    with sluice.open(tmp_path / "dcp") as checkpoint:
        assert checkpoint.tree["steps"] == [1, 2.5]
    assert (report.format, report.written_by_rank) == ("dcp", (report.nbytes,))
