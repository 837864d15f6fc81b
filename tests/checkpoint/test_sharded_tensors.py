"""Files that the ranks of FSDP1 saved, joined: equal to the whole state dict, and hostile versions."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from sluice import CheckpointError, FormatError, IncompleteCheckpointError, LimitError, UnsupportedError
from support.hostile_archives import Call, Global, Raw, instance, storage, tensor_call, torch_archive
from support.ranks import Ranks


class Net(nn.Module):
    """Layers of sizes that do not divide, wrapped one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7, bias=False))
        self.head = nn.Linear(7, 2)
        self.register_buffer("scale", torch.arange(3.0))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.head(self.blocks(values)))


def save(directory: str, kind: str, use_orig_params: bool, training: bool) -> None:
    """Save what one rank has of a model, perhaps trained, and of its optimizer; the first rank saves it whole too."""
    from torch.distributed import fsdp
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    warnings.simplefilter("ignore")  # FSDP1 is deprecated
    torch.manual_seed(0)
    model = Net()
    rank = torch.distributed.get_rank()
    if rank == 0:
        torch.save(model.state_dict(), f"{directory}/whole")
    policy, device = ModuleWrapPolicy({nn.Linear}), torch.device("cpu")
    wrapper = fsdp.FullyShardedDataParallel
    divided = wrapper(model, auto_wrap_policy=policy, device_id=device, use_orig_params=use_orig_params)
    optimizer = trained(divided) if training else None
    onto_host = fsdp.ShardedOptimStateDictConfig(offload_to_cpu=False) if training else None
    with wrapper.state_dict_type(divided, fsdp.StateDictType[kind], optim_state_dict_config=onto_host):
        state = {"model": divided.state_dict(), "step": 3}
        if optimizer is not None:
            state["optimizer"] = wrapper.optim_state_dict(divided, optimizer)
        torch.save(state, f"{directory}/rank{rank}.pt")


def files_of(
    tmp_path: Path, ranks: Ranks, kind: str = "SHARDED_STATE_DICT", *, use_orig_params: bool, training: bool = False
) -> list[Path]:
    ranks.run(save, str(tmp_path), kind, use_orig_params, training)
    return [tmp_path / f"rank{rank}.pt" for rank in range(ranks.size)]


def trained(model: nn.Module) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(10.0).reshape(2, 5)).sum().backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_the_whole_state_dict(tmp_path: Path, two_ranks: Ranks, use_orig_params: bool) -> None:
    files = files_of(tmp_path, two_ranks, use_orig_params=use_orig_params)
    whole = torch.load(tmp_path / "whole")
    for source in (files, files[::-1]):
        found = sluice.load_state_dict(source, key="model")
        assert found.keys() == whole.keys()
        for name, tensor in whole.items():
            assert torch.equal(found[name], tensor), name
    model = Net()
    sluice.load_into(model, files)
    assert torch.equal(model.state_dict()["blocks.1.weight"], whole["blocks.1.weight"])
    with sluice.open(files) as checkpoint:
        assert checkpoint.format == "torch-sharded"
        assert checkpoint.tree["step"] == 3
    assert sluice.verify(files).ok
    sluice.convert(files, tmp_path / "m.safetensors", key="model")
    (tmp_path / "whole").rename(tmp_path / "whole.bin")
    assert sluice.diff(tmp_path / "m.safetensors", tmp_path / "whole.bin").same
    (tmp_path / "ranks").mkdir()
    for file in files:
        file.rename(tmp_path / "ranks" / file.name)
    assert sluice.load_state_dict(tmp_path / "ranks", key="model").keys() == whole.keys()


def test_the_optimizer_continues_in_a_plain_one(tmp_path: Path, two_ranks: Ranks) -> None:
    files = files_of(tmp_path, two_ranks, use_orig_params=True, training=True)
    torch.manual_seed(0)
    plain = Net()
    expected = trained(plain)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    sluice.load_into(model, files)
    sluice.load_optimizer(optimizer, files, model=model)
    assert optimizer.param_groups[0]["lr"] == 0.1
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
        found, state = optimizer.state[one], expected.state[other]
        assert all(torch.equal(found[key], state[key]) for key in ("step", "exp_avg", "exp_avg_sq"))


def test_one_file_alone(tmp_path: Path, two_ranks: Ranks) -> None:
    files = files_of(tmp_path, two_ranks, use_orig_params=False)
    with sluice.open(files[1]) as checkpoint:
        assert list(checkpoint) == ["model.scale"]
    with pytest.raises(UnsupportedError, match=r"a part of a tensor that FSDP divided.* pass all of them as a list"):
        sluice.load_state_dict(files[1])


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_flat_parameters_stay_vectors_with_the_reason(tmp_path: Path, two_ranks: Ranks, use_orig_params: bool) -> None:
    files = files_of(tmp_path, two_ranks, "LOCAL_STATE_DICT", use_orig_params=use_orig_params)
    whole = torch.load(tmp_path / "whole")
    with sluice.open(files) as checkpoint:
        flat = checkpoint["model.blocks.1._flat_param"].read()
        assert torch.equal(flat[:21], whole["blocks.1.weight"].flatten())
        notes = " ".join(checkpoint.tree and sluice.verify(files).notes)
    assert "the files do not tell the names and shapes of the tensors in them" in notes
    if use_orig_params:
        with pytest.raises(UnsupportedError, match=r"a piece of a flat parameter of FSDP1.*Save it with SHARDED"):
            sluice.load_state_dict(files, key="model")


SHARDED = "torch.distributed._shard.sharded_tensor."


def shard(start: object, sizes: list[int], tensor: object = None) -> Raw:
    fields = {"shard_offsets": start, "shard_sizes": sizes, "placement": None}
    place = instance("torch.distributed._shard.metadata", "ShardMetadata", (None, fields))
    held = tensor_call(storage("0", 4), shape=tuple(sizes)) if tensor is None else tensor
    return instance(f"{SHARDED}shard", "Shard", (None, {"tensor": held, "metadata": place}))


def divided(shards: object, size: object = (4, 2), dtype: str = "float32") -> Call:
    metadata = {"size": Call(Global("torch", "Size"), (size,)), "shards_metadata": []}
    state = (shards, instance(f"{SHARDED}metadata", "ShardedTensorMetadata", metadata), None, None, False)
    kind = Global(f"{SHARDED}api", "ShardedTensor")
    arguments = (kind, Global("torch", dtype), size, (2, 1), 0, None, None, False)
    inner = Global("torch._utils", "_rebuild_wrapper_subclass")
    return Call(Global("torch._tensor", "_rebuild_from_type_v2"), (inner, kind, arguments, state))


def opened(tmp_path: Path, *values: object, limits: sluice.Limits | None = None) -> Any:
    for number, value in enumerate(values):
        content = value if isinstance(value, dict) else {"w": value}
        (tmp_path / f"{number}.pt").write_bytes(torch_archive(content, {"0": bytes(16)}))
    files = [tmp_path / f"{number}.pt" for number in range(len(values))]
    with sluice.open(files, limits=limits) as checkpoint:
        return checkpoint.tree


TOP, BOTTOM = divided([shard([0, 0], [2, 2])]), divided([shard([2, 0], [2, 2])])


def test_shards_that_fit(tmp_path: Path) -> None:
    assert opened(tmp_path, TOP, BOTTOM)["w"].shape == (4, 2)
    assert opened(tmp_path, TOP, BOTTOM, TOP, BOTTOM)["w"].shape == (4, 2)  # of hybrid sharding
    assert opened(tmp_path, divided([shard([0, 0], [2, 2]), shard([2, 0], [2, 2])]), divided([]))["w"].shape == (4, 2)
    assert opened(tmp_path, divided([shard([0, 0], [2, 2])], (2, 2)))["w"].shape == (2, 2)


def test_a_tensor_that_one_rank_has_whole(tmp_path: Path) -> None:
    """One row is not divided; with a shard that is empty next to it, its stride stays."""
    row, nothing = divided([shard([0, 0], [1, 4])], (1, 4)), divided([], (1, 4))
    assert opened(tmp_path, row, nothing)["w"].shape == opened(tmp_path, nothing, row)["w"].shape == (1, 4)
    columns = shard([0, 0], [2, 2], tensor_call(storage("0", 4), shape=(2, 2), stride=(1, 2)))
    empty = shard([2, 0], [0, 2], tensor_call(storage("0", 4), shape=(0, 2)))
    assert opened(tmp_path, divided([columns, empty], (2, 2)), divided([], (2, 2)))["w"].stride() == (1, 2)


@pytest.mark.parametrize(
    ("values", "kind", "problem"),
    [
        ((TOP, TOP), IncompleteCheckpointError, "leave a gap.* files of other ranks"),
        ((TOP, divided([])), IncompleteCheckpointError, "leave a gap"),
        ((divided([]), divided([])), FormatError, "no file has a shard"),
        ((TOP, divided([shard([1, 0], [2, 2])])), FormatError, "overlap"),
        ((TOP, divided([shard([2, 0], [2, 2])], (5, 2))), FormatError, "disagree on the size or dtype"),
        ((TOP, tensor_call(storage("0", 4), shape=(4,))), FormatError, "disagree on the size or dtype"),
        ((TOP, 3), FormatError, "disagree on the size or dtype"),
        ((divided([shard([3, 0], [2, 2])]),) * 2, FormatError, "does not fit into its tensor"),
        ((divided([shard([-1, 0], [2, 2])]),) * 2, FormatError, "does not fit into its tensor"),
        ((divided([shard([0], [2, 2])]),) * 2, FormatError, "does not fit into its tensor"),
        ((divided([shard([True, 0], [2, 2])]),) * 2, FormatError, "does not fit into its tensor"),
        ((divided([shard([0, 0], [9, 9], tensor_call(storage("0", 4), shape=(2, 2)))]),) * 2, FormatError, "not fit"),
        ((divided([shard([0, 0], [2, 2], 5)]),) * 2, FormatError, "shard of a divided tensor is malformed"),
        ((divided([], (0, 2**62, 2**62)),) * 2, FormatError, "more bytes than torch can count"),
        ((divided([], (1,) * 65),) * 2, FormatError, "more bytes than torch can count"),
        ((divided([3]),) * 2, FormatError, "shard of a divided tensor is malformed"),
        ((divided(3),) * 2, FormatError, "divided tensor is malformed"),
        ((Call(divided([]).function, (*divided([]).arguments[:3], 5)),) * 2, FormatError, "tensor is malformed"),
        ((divided([shard([0, 0], [4, 2])]),) * 2, FormatError, "past the end of its storage"),
        (({"w": TOP}, {"w": BOTTOM, "x": BOTTOM}), FormatError, r"0\.pt, tensor 'x': a file lacks a name"),
        (
            ({"a.b": TOP, "a": {"b": TOP}}, {"a.b": BOTTOM, "a": {"b": BOTTOM}}),
            FormatError,
            r"0\.pt, tensor 'a\.b': two values of a rank have the same dotted name",
        ),
    ],
)
def test_hostile_shards(tmp_path: Path, values: tuple[object, ...], kind: type[CheckpointError], problem: str) -> None:
    with pytest.raises(kind, match=problem):
        opened(tmp_path, *values)


def test_limits(tmp_path: Path) -> None:
    rows = [divided([shard([row, 0], [1, 2])]) for row in range(4)]
    with pytest.raises(LimitError, match="more corners than the limit"):
        opened(tmp_path, *rows, limits=sluice.Limits(entries=6))
