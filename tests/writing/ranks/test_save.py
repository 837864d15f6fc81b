"""Models that ranks hold in parts, saved by all of them, compared bit for bit with the whole model."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch

import sluice
from support import fresh_process
from support.directories import assert_same
from support.distributed import torch_loaded
from support.divided_models import LAYOUTS, Net
from support.ranks import Ranks, failure

#: A file or directory for each format, and its arguments of ``save``.
FORMATS: dict[str, dict[str, Any]] = {
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


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "part-of-the-ranks"])
def test_every_layout_in_every_format(
    four_ranks: Ranks, tmp_path: Path, layout: str, dtype: torch.dtype | None
) -> None:
    (tmp_path / "model.safetensors").touch()
    reports = four_ranks.run(saved_everywhere, layout, tmp_path, {"dtype": dtype, "overwrite": True})
    expected = expected_state(dtype)
    untied = {name: tensor for name, tensor in expected.items() if name != "head.weight"}
    assert_same(safetensors.torch.load_file(tmp_path / "model.safetensors"), untied)
    shards: dict[str, torch.Tensor] = {}
    for shard in sorted((tmp_path / "model").glob("*.safetensors")):
        shards |= safetensors.torch.load_file(shard)
    assert_same(shards, untied)
    assert_same(torch_loaded(tmp_path / "dcp"), expected)
    for path in FORMATS:
        assert_same(sluice.load_state_dict(tmp_path / path), expected)
    for own in zip(*reports, strict=True):
        assert len({(report.files, report.file_bytes, report.written_by_rank, report.replaced) for report in own}) == 1
        assert sum(own[0].written_by_rank) == own[0].nbytes
    assert reports[1][0].replaced == (str(tmp_path / "model.safetensors"),)
    assert list(tmp_path.rglob(".*")) == [tmp_path / "dcp" / ".metadata"]


def test_a_process_alone_saves_a_distributed_checkpoint(tmp_path: Path) -> None:
    state = {"model": expected_state(), "steps": [1, 2.5], "optimizer": {"state": [{"step": torch.ones(())}]}}
    report = sluice.save(state, tmp_path / "dcp", format="dcp")
    loaded = torch_loaded(tmp_path / "dcp")
    assert_same(loaded.pop("model"), expected_state())
    assert loaded == {"steps": [1, 2.5], "optimizer": {"state": [{"step": torch.ones(())}]}}
    with sluice.open(tmp_path / "dcp") as checkpoint:
        assert checkpoint.tree["steps"] == [1, 2.5]
    assert (report.format, report.written_by_rank) == ("dcp", (report.nbytes,))
    with pytest.raises(sluice.SaveError, match="already contains a checkpoint"):
        sluice.save({}, tmp_path / "dcp", format="dcp")
    again = sluice.save({"w": torch.ones(2, 0)}, tmp_path / "dcp", format="dcp", overwrite=True)
    assert set(again.replaced) == set(report.files)
    assert torch_loaded(tmp_path / "dcp")["w"].shape == (2, 0)
    assert len(list((tmp_path / "dcp").iterdir())) == 2


def test_what_is_no_state_dict_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sluice.SaveError, match="can only hold a state dict"):
        sluice.save(torch.ones(2), tmp_path / "a", format="dcp")  # type: ignore[arg-type]
    circle: dict[str, object] = {}
    circle["again"] = circle
    for state, problem in ((circle, "recursion"), ({"\ud800": 1}, "surrogates")):
        with pytest.raises(sluice.SaveError, match=f"no distinct flat names in UTF-8; found .*{problem}"):
            sluice.save(state, tmp_path / "a", format="dcp")
    assert list(tmp_path.iterdir()) == []


def test_dtensors_of_ranks_that_are_gone(fresh_processes: None, tmp_path: Path) -> None:
    code = """
        import sys, torch, sluice
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        weight = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)
        try:
            sluice.save({"w": weight}, sys.argv[1])
        except sluice.SaveError as error:
            print(error.problem)
    """
    result = fresh_process.run(textwrap.dedent(code), tmp_path / "w.safetensors")
    assert "there is no process group of them" in result.stdout, result.stderr


def training_state(directory: Path) -> list[str]:
    """Train a divided model for a step, save all of its state, and load it; return what differs on this rank."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer), "step": 1}
    sluice.save(state, directory / "dcp", format="dcp")
    if not torch.distributed.get_rank():
        sluice.convert(directory / "dcp", directory / "state.pth")
    torch.distributed.barrier()

    problems = []
    own: Any = state["optim"]
    moments: dict[str, DTensor] = {name: each["exp_avg_sq"] for name, each in own["state"].items()}
    by_name = torch.load(directory / "state.pth", weights_only=True)["optim"]["state"]
    for name, moment in moments.items():
        whole = moment.full_tensor()
        if not torch.equal(by_name[name]["exp_avg_sq"], whole) or by_name[name]["step"] != 1:
            problems.append(f"state.pth: {name}")
    before = {name: moment.to_local().clone() for name, moment in moments.items()}
    for moment in moments.values():
        moment.to_local().zero_()
    loaded: dict[str, Any] = {
        "optim": {"state": {name: {"exp_avg_sq": moment} for name, moment in moments.items()}},
        "step": 0,
    }
    dcp.load(loaded, checkpoint_id=directory / "dcp")  # type: ignore[attr-defined]
    problems += [f"dcp: {name}" for name, moment in moments.items() if not torch.equal(moment.to_local(), before[name])]
    return problems + ["dcp: step"] * (loaded["step"] != 1)


def test_the_state_of_an_optimizer(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks.run(training_state, tmp_path) == [[], []]


def stages(directory: Path) -> None:
    """Save a layer of this rank: each stage of a pipeline is on a mesh of its own, cut from one mesh of all ranks."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    part = distribute_tensor(torch.ones(2, 1), DeviceMesh("cpu", [1, 2]), [Shard(0)])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))["shard"]
    stage = dist.get_rank() // 2
    layer = distribute_tensor(torch.arange(15.0).reshape(5, 3) + 100 * stage, mesh, [Shard(0)])
    state = {f"layers.{stage}": layer, "scale": torch.tensor([2.0]), "part": part}
    sluice.save(state, directory / "model", max_shard_size=50)
    sluice.save({"model": state, f"stage {stage}": stage, "step": 7}, directory / "dcp", format="dcp")


def test_stages_of_a_pipeline_hold_different_tensors(four_ranks: Ranks, tmp_path: Path) -> None:
    four_ranks.run(stages, tmp_path)
    expected = {f"layers.{stage}": torch.arange(15.0).reshape(5, 3) + 100 * stage for stage in range(2)}
    expected |= {"scale": torch.tensor([2.0]), "part": torch.ones(2, 1)}
    assert_same(dict(sluice.load_state_dict(tmp_path / "model")), expected)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == 3
    loaded = torch_loaded(tmp_path / "dcp")
    assert_same(loaded.pop("model"), expected)
    assert loaded == {"stage 0": 0, "stage 1": 1, "step": 7}
    with sluice.open(tmp_path / "dcp") as checkpoint:
        assert checkpoint.tree["stage 1"] == 1


def of_part_of_the_ranks(path: Path) -> str:
    return failure(sluice.save, divided_model("part-of-the-ranks"), path)


def test_ranks_outside_of_the_mesh_raise_and_the_others_save(four_ranks: Ranks, tmp_path: Path) -> None:
    texts = four_ranks.run(of_part_of_the_ranks, tmp_path / "model.safetensors")
    assert (texts[1], texts[3]) == ("", "")
    assert all("this rank is not part of the mesh" in text for text in (texts[0], texts[2]))
    assert_same(dict(sluice.load_state_dict(tmp_path / "model.safetensors")), expected_state())


def load_partly(module: torch.nn.Module, directory: Path) -> None:
    with TemporaryDirectory(dir=directory) as folder:
        torch.save(module.state_dict(), f"{folder}/m.pth")
        with suppress(sluice.PartialLoadError):
            sluice.load_into(module, f"{folder}/m.pth", progress=Mock(side_effect=KeyError))


def refused(directory: Path) -> list[str]:
    """Return the error of each save that ranks do not agree on, or that their formats do not allow."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    summand = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    longer = distribute_tensor(torch.ones(5, 2), mesh, [Shard(0)])
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model.register_parameter("w", torch.nn.Parameter(weight))
    if rank:
        load_partly(model[0], directory.parent)
    calls: list[tuple[object, str, dict[str, Any]]] = [
        ({"w": weight, "seed": rank}, "a", {"format": "dcp"}),
        ({"w": weight if rank else longer}, "a.safetensors", {}),
        ({"w": weight}, "a.safetensors", {"dtype": "bf16" if rank else None}),
        ({"w": weight}, "a", {"format": "dcp" if rank else None}),
        ({"w": weight, "x": summand}, "a.safetensors", {}),
        ({"w": weight, "x": 1} if rank else {"w": weight}, "a.safetensors", {}),
        ({"w": weight}, "a.pth", {}),
        ({"w": weight}, "a.safetensors", {"manifest": directory / "m.json"}),
        ({"\ud800": weight}, "a.safetensors", {}),
        (model, "a", {"format": "dcp"}),
    ]
    return [failure(sluice.save, state, directory / path, **options) for state, path, options in calls]


def test_what_ranks_do_not_agree_on_is_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    texts = two_ranks.run(refused, tmp_path)
    assert texts[0] == texts[1]
    expected = [
        "ranks 0 and 1 have different values in the object",
        "ranks 0 and 1 hold different tensors under one name; expected float32 [5, 2]; found float32 [4, 2]",
        "ranks 0 and 1 were called with different arguments: dtype=None",
        "ranks 0 and 1 were called with different arguments: format=huggingface",
        "tensor 'x': the tensor is a DTensor with the placement",
        "rank 1: SaveError: tensor 'x': this format stores tensors only",
        "this format cannot hold DTensors",
        "a manifest cannot be written by ranks",
        "a name contains a lone surrogate",
        "rank 1: SaveError: a failed load has changed weights of the model",
    ]
    for text, problem in zip(texts[0], expected, strict=True):
        assert problem in text
    assert list(tmp_path.iterdir()) == []
