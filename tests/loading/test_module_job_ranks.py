"""Loads into models that are divided over ranks: every layout, from every format, on meta and live."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from support.directories import write_parameters
from support.divided_models import LAYOUTS, Net, differences, divide, local, locals_of, mesh_of
from support.ranks import Ranks


def attempted(model: nn.Module, path: Path, **options: Any) -> str:
    """Load into a model; return the error, or an empty text."""
    try:
        sluice.load_into(model, path, **options)
    except sluice.RankError as error:
        return str(error)
    return ""


def save_distributed(whole: Path, directory: Path) -> None:
    """Write the state dict with torch.distributed.checkpoint, as the ranks of an FSDP2 job do."""
    from torch.distributed.checkpoint import state_dict_saver

    model = divide("fsdp", meta=False)
    sluice.load_into(model, whole)
    state_dict_saver.save(model.state_dict(), checkpoint_id=directory)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file that torch reads."""
    path: Path = tmp_path_factory.mktemp("whole") / "m.pth"
    model = Net()
    state = model.state_dict()
    state["norm.num_batches_tracked"].fill_(7)
    torch.save(state, path)
    return path


@pytest.fixture(scope="module")
def formats(whole: Path, four_ranks: Ranks) -> Mapping[str, Path]:
    """Return the same state dict in every format."""
    state, folder = torch.load(whole, weights_only=True), whole.parent
    paths = {name: folder / name for name in ("legacy", "m.safetensors", "shards", "parameters", "dcp", "nested")}
    torch.save(state, paths["legacy"], _use_new_zipfile_serialization=False)
    torch.save({"epoch": 3, "model": {f"module.{name}": one for name, one in state.items()}}, paths["nested"])
    sluice.save(state, paths["m.safetensors"])
    sluice.save(state, paths["shards"], max_shard_size=500)
    write_parameters(paths["parameters"], state)
    four_ranks.run(save_distributed, whole, paths["dcp"])
    return {"zip": whole, **paths}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_gets_its_part_from_every_format(
    layout: str, whole: Path, formats: Mapping[str, Path], four_ranks: Ranks
) -> None:
    assert four_ranks.run(differences, layout, whole, formats) == [[]] * 4
    few = {name: formats[name] for name in ("zip", "shards", "dcp")}
    assert four_ranks.run(differences, layout, whole, few, torch.bfloat16) == [[]] * 4
    assert four_ranks.run(differences, layout, whole, few, None, "map") == [[]] * 4


def refusals(whole: Path, other: Path) -> list[str]:
    """Return the errors of loads that cannot be done, and what they changed."""
    from torch.distributed.tensor import DTensor, Partial

    texts = []
    for path, prepare in ((whole, "summands"), (other, "shapes"), (other, "missing")):
        model = divide("fsdp" if prepare == "shapes" else "columns", meta=True)
        if prepare == "summands":
            row: Any = model.row
            placements = [Partial(), *row.placements[1:]]
            model.row = torch.nn.Parameter(DTensor.from_local(row.to_local(), row.device_mesh, placements))
        texts.append(attempted(model, path, strict=prepare != "missing"))
        texts += [name for name, tensor in model.named_parameters() if not tensor.is_meta]
    return texts


def test_what_cannot_be_loaded_is_named_before_anything_is_read(whole: Path, tmp_path: Path, four_ranks: Ranks) -> None:
    state = torch.load(whole, weights_only=True)
    state["up.weight"] = torch.zeros(8, 8)
    torch.save(state, tmp_path / "shapes.pth")
    for summands, shapes, *rest in four_ranks.run(refusals, whole, tmp_path / "shapes.pth"):
        assert "'row' is a DTensor with the placement Partial(sum): its ranks hold summands" in summands
        assert "up.weight" in shapes
        assert "[9, 8]" in shapes
        assert "[8, 8]" in shapes
        assert len(rest) == 1


def load_fsdp(path: Path) -> str:
    return attempted(divide("fsdp", meta=True), path)


def without_a_weight(path: Path) -> list[object]:
    refused = attempted(divide("fsdp", meta=True), path, strict=False)
    model = divide("fsdp", meta=False)
    before = local(model.up.bias).clone()
    report = sluice.load_into(model, path, strict=False)
    return [refused, report.missing, torch.equal(local(model.up.bias), before)]


def test_missing_parts_keep_live_values_and_are_refused_on_meta(whole: Path, tmp_path: Path, four_ranks: Ranks) -> None:
    state = torch.load(whole, weights_only=True)
    del state["up.bias"]
    torch.save(state, tmp_path / "less.pth")
    for refused, missing, kept in four_ranks.run(without_a_weight, tmp_path / "less.pth"):
        assert "'up.bias' is on the meta device and not in the checkpoint, and it is divided over ranks" in refused
        assert missing == ("up.bias",)
        assert kept


def with_options(folder: Path) -> list[bool]:
    model, truth = divide("fsdp-tp", meta=True), divide("fsdp-tp", meta=True)
    sluice.load_into(truth, folder / "plain.pth")
    turned = [sluice.rules.transpose("up.weight")]
    sluice.load_into(model, folder / "trained.pth", key="model", rename={"rows": "row"}, rules=turned)
    loaded = locals_of(model)
    return [torch.equal(loaded[name], tensor) for name, tensor in locals_of(truth).items()]


def test_key_rename_and_rules(whole: Path, tmp_path: Path, four_ranks: Ranks) -> None:
    state = torch.load(whole, weights_only=True)
    torch.save(state, tmp_path / "plain.pth")
    state["up.weight"], state["rows"] = state["up.weight"].t().contiguous(), state.pop("row")
    torch.save({"model": state, "optimizer": {"a": torch.ones(2)}}, tmp_path / "trained.pth")
    assert all(all(same) for same in four_ranks.run(with_options, tmp_path))


def test_copies_of_tied_tensors_are_compared_where_a_rank_holds_them(
    whole: Path, tmp_path: Path, four_ranks: Ranks
) -> None:
    state = torch.load(whole, weights_only=True)
    state["head.weight"] = state["head.weight"].clone()
    torch.save(state, tmp_path / "equal.pth")
    assert four_ranks.run(load_fsdp, tmp_path / "equal.pth") == [""] * 4
    state["head.weight"][4] += 1  # of the second rank
    torch.save(state, tmp_path / "different.pth")
    texts = four_ranks.run(load_fsdp, tmp_path / "different.pth")
    assert all("are tied in the model and differ" in text and "on 1 of 4 ranks" in text for text in texts)


def after_a_forward(whole: Path) -> list[bool]:
    from torch.distributed.fsdp import fully_shard

    model = Net()
    fully_shard(model, mesh=mesh_of(4), reshard_after_forward=False)
    tokens = torch.tensor([1, 2, 3])
    model(tokens)
    gathered = not hasattr(model.row, "to_local")
    sluice.load_into(model, whole)
    real = Net()
    real.load_state_dict(torch.load(whole, weights_only=True))
    loss, expected = model(tokens), real(tokens)
    sluice.load_into(model.down, whole, key="down")  # whose parent divides it
    own = torch.equal(local(model.down.weight), torch.chunk(real.down.weight, 4)[torch.distributed.get_rank()])
    loss.backward()
    return [gathered, torch.equal(loss, expected), own and model.row.grad is not None]


def test_parameters_that_are_gathered_for_a_forward_are_divided_again(whole: Path, four_ranks: Ranks) -> None:
    assert four_ranks.run(after_a_forward, whole) == [[True] * 3] * 4


class Hooked(Net):
    """A model with what ``load_state_dict`` runs besides copying."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0
        self.seen = 0
        self._register_load_state_dict_pre_hook(self._renamed)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(Hooked._count)  # type: ignore[no-untyped-call]

    def _renamed(self, state: dict[str, torch.Tensor], prefix: str, *_: object) -> None:
        if f"{prefix}old" in state:
            state[f"{prefix}row"] = state.pop(f"{prefix}old")

    def _count(self, _: object) -> None:
        self.seen += 1

    def get_extra_state(self) -> object:
        return {"epoch": self.epoch}

    def set_extra_state(self, state: Any) -> None:
        self.epoch = state["epoch"]


def with_hooks(path: Path) -> list[object]:
    with torch.device("meta"):
        model = Hooked()
    model.table = torch.ones(3, 4)
    LAYOUTS["columns"](model)
    sluice.load_into(model, path)
    return [model.epoch, model.seen, bool((model.table == 1).all()), local(model.row).tolist()]


def test_hooks_extra_state_and_buffers_that_are_not_saved(tmp_path: Path, four_ranks: Ranks) -> None:
    model = Hooked()
    model.epoch = 5
    state = model.state_dict()
    state["old"] = state.pop("row")
    torch.save(state, tmp_path / "hooked.pth")
    rows = [chunk.tolist() for chunk in torch.chunk(model.row.detach(), 2, 1)]
    assert four_ranks.run(with_hooks, tmp_path / "hooked.pth") == [[5, 1, True, rows[rank % 2]] for rank in range(4)]


class Loader(nn.Module):
    """A part that loads its weight itself, in a model that passes it other names."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(7, 3))

    def _load_from_state_dict(self, state: Any, prefix: str, *_: object) -> None:
        with torch.no_grad():
            self.weight.copy_(state[f"{prefix}transposed"].t())


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Loader()

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(
            {name.replace("old.", "part."): one for name, one in state.items()}, strict, assign
        )


def with_loaders(path: Path) -> list[list[float]]:
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = Renamed()
    fully_shard(model, mesh=mesh_of(4))
    sluice.load_into(model, path)
    rows: list[list[float]] = local(model.part.weight).tolist()
    return rows


def test_code_that_loads_by_itself_gets_whole_tensors(tmp_path: Path, four_ranks: Ranks) -> None:
    whole = torch.arange(21.0).reshape(7, 3)
    torch.save({"old.transposed": whole.t().contiguous()}, tmp_path / "m.pth")
    expected = [chunk.tolist() for chunk in torch.chunk(whole, 4)]
    assert four_ranks.run(with_loaders, tmp_path / "m.pth") == expected
