from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import sluice
from sluice.adapters.config import Adapter
from sluice.adapters.opening import open_adapted
from sluice.adapters.steps import BaseWeight
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from support.command_line import printed
from support.directories import assert_same, write_peft
from support.range_server import RangeServer
from support.trained_net import empty


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, 256)
        self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 48)
        self.head = nn.Linear(256, 64, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(torch.relu(self.first(self.tokens(tokens))))
        return found


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    torch.save({"epoch": 1, "model": Net().state_dict()}, tmp_path / "base.pth")
    return tmp_path / "base.pth"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    torch.manual_seed(4)
    modules = {"first": (256, 256), "second": (48, 256), "head": (64, 256)}
    tensors = {}
    for name, (rows, columns) in modules.items():
        tensors[f"{name}.lora_A.weight"] = torch.randn(4, columns)
        tensors[f"{name}.lora_B.weight"] = torch.randn(rows, 4)
    return write_peft(tmp_path / "lora", tensors, r=4)


@pytest.fixture
def want(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    model = empty(Net)
    sluice.load_into(model, base, adapters=sluice.Adapter(adapter, weight=0.5))
    plain = torch.load(base)["model"]
    low_rank = safetensors.torch.load_file(adapter / "adapter_model.safetensors")
    for name in ("first", "second", "head"):
        a, b = (low_rank[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
        plain[f"{name}.weight"] += b @ a * (3 / 4 * 0.5)
    found: dict[str, torch.Tensor] = model.state_dict()
    assert [name for name in plain if not torch.equal(plain[name], found[name])] == []
    return found


@pytest.mark.parametrize("name", ["new.safetensors", "new.pth", "model"])
def test_a_conversion_has_the_bits_of_a_load(
    base: Path, adapter: Path, want: dict[str, torch.Tensor], tmp_path: Path, name: str
) -> None:
    report = sluice.convert(base, tmp_path / name, key="model", adapters=[sluice.Adapter(adapter, weight=0.5)])

    found = sluice.load_state_dict(tmp_path / name)
    assert_same(found, want)
    assert report.tied or found["head.weight"].data_ptr() == found["tokens.weight"].data_ptr()
    assert any("merged" in note and "LoRA, 3 changes, scale 0.375" in note for note in report.notes)


def test_a_conversion_merges_by_new_names_and_is_a_dry_run(base: Path, adapter: Path, tmp_path: Path) -> None:
    old = tmp_path / "old.safetensors"
    sluice.convert(base, old, rename=lambda name: f"old.{name}")

    with pytest.raises(sluice.MismatchError, match="without a place"):
        sluice.convert(old, tmp_path / "new.safetensors", adapters=adapter)
    report = sluice.convert(old, tmp_path / "new.safetensors", rename={"old.**": "**"}, adapters=adapter, dry_run=True)

    assert report.dry_run
    taken: Any = {"manifest": adapter / "adapter_model.safetensors", "overwrite": True, "dry_run": True}
    with pytest.raises(ValueError, match="would replace a file"):
        sluice.convert(base, tmp_path / "new.safetensors", key="model", adapters=adapter, **taken)
    assert not (tmp_path / "new.safetensors").exists()


def test_the_command_takes_adapters_and_weights(
    base: Path, adapter: Path, want: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    new = tmp_path / "new.safetensors"
    printed("convert", base, new, "--adapter", f"{adapter}=0.5", "--quiet")
    assert_same(sluice.load_state_dict(new), want)


@pytest.mark.parametrize("streams", [True, False])
def test_a_stream_merges_what_it_reads(base: Path, adapter: Path, want: dict[str, torch.Tensor], streams: bool) -> None:
    whole, tokens = Net(), torch.arange(5)
    whole.load_state_dict(want)
    model, chosen = empty(Net), sluice.Adapter(adapter, weight=0.5)
    plan = sluice.plan(model, base, adapters=chosen, stream=True, memory=1)
    assert plan.stream is not None
    memory = plan.stream.smallest_bytes if streams else "1GiB"

    with torch.no_grad(), sluice.stream(model, base, adapters=chosen, memory=memory) as stream:
        assert torch.equal(model(tokens), whole(tokens))
        assert torch.equal(model(tokens), whole(tokens))
        assert bool(stream.report.call_bytes) is streams


def test_a_shared_copy_is_that_of_its_adapters(
    base: Path, adapter: Path, want: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_SHARED_DIR", str(tmp_path / "store"))
    chosen, model = sluice.Adapter(adapter, weight=0.5), empty(Net)
    plan = sluice.plan(model, base, place="shared", adapters=chosen)
    assert any("not built yet" in note for note in plan.notes)

    with sluice.shared(base, adapters=chosen) as copy, sluice.shared(base, adapters=[chosen]) as second:
        assert (copy.built, second.built) == (True, False)
        assert_same(sluice.load_state_dict(copy), want)
        with sluice.shared(base, adapters=adapter) as other, sluice.shared(base) as plain:
            assert len({copy.key, other.key, plain.key}) == 3
    report = sluice.load_into(model, base, place="shared", adapters=chosen)

    assert report.mapped_bytes
    assert_same(model.state_dict(), want)


def test_weights_are_merged_before_they_are_quantized(base: Path, adapter: Path, want: dict[str, torch.Tensor]) -> None:
    def quantize(model: nn.Module) -> None:
        first = model.get_submodule("first")
        assert isinstance(first, nn.Linear)
        first.weight = nn.Parameter(first.weight.detach() * 2)

    model = empty(Net)
    report = sluice.load_into(model, base, adapters=sluice.Adapter(adapter, weight=0.5), quantize=quantize)

    assert_same(model.state_dict(), {**want, "first.weight": want["first.weight"] * 2})
    assert report.adapters


def test_a_load_maps_what_does_not_change(base: Path, adapter: Path, tmp_path: Path) -> None:
    sluice.convert(base, tmp_path / "base.safetensors")
    report = sluice.load_into(empty(Net), tmp_path / "base.safetensors", place="map", adapters=adapter)

    assert report.mapped_bytes == 4 * (256 + 48)


@pytest.mark.parametrize(("fan_in_fan_out", "shape"), [(True, (6, 6)), (False, (6, 6)), (False, (4, 6))])
def test_a_weight_without_a_module_is_used_as_the_adapter_says(
    tmp_path: Path, fan_in_fan_out: bool, shape: tuple[int, int]
) -> None:
    a, b, weight = torch.randn(2, shape[0]), torch.randn(shape[1], 2), torch.randn(shape)
    lora = {"c.lora_A.weight": a, "c.lora_B.weight": b}
    path = write_peft(tmp_path / "lora", lora, lora_alpha=2, fan_in_fan_out=fan_in_fan_out)
    sluice.save({"c.weight": weight}, tmp_path / "base.safetensors")

    sluice.convert(tmp_path / "base.safetensors", tmp_path / "new.safetensors", adapters=path)

    linear = shape[0] == shape[1] and not fan_in_fan_out
    found = sluice.load_state_dict(tmp_path / "new.safetensors")["c.weight"]
    assert torch.equal(found, weight + (b @ a if linear else (b @ a).T))


def test_ranges_of_any_size_have_the_bytes_of_the_whole(base: Path, adapter: Path) -> None:
    with OpenCheckpoint.open(base, key="model") as checkpoint:
        weights = [
            BaseWeight(names=(name,), shape=entry.shape, entry=entry, dtype="bfloat16")
            for name, entry in checkpoint.entries.items()
        ]
        source = open_adapted(checkpoint, weights, [Adapter(adapter)]).checkpoint.sources[-1]
        nbytes = source.identity.nbytes
        whole = source.read_at(0, nbytes)

        assert b"".join(source.read_at(i, min(77_777, nbytes - i)) for i in range(0, nbytes, 77_777)) == whole
        assert source.read_at(nbytes - 1, 1) == whole[-1:]
        with pytest.raises(sluice.TruncatedError):
            source.read_at(nbytes, 1)


@pytest.mark.parametrize("name", ["weights", "w.SAFETENSORS"])
def test_a_file_of_any_name_has_its_configuration(
    base: Path, adapter: Path, want: dict[str, torch.Tensor], name: str
) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / name)
    model = empty(Net)
    sluice.load_into(model, base, adapters=sluice.Adapter(adapter / name, weight=0.5))
    assert_same(model.state_dict(), want)


def test_the_limits_of_the_load_are_those_of_its_adapters(base: Path, adapter: Path, tmp_path: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(tmp_path / "elsewhere")
    (adapter / "adapter_model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(sluice.PathEscapeError):
        sluice.load_into(empty(Net), base, adapters=adapter, limits=sluice.Limits(symlinks_outside=False))


def test_the_url_of_a_directory_is_an_adapter(base: Path, adapter: Path) -> None:
    pytest.importorskip("urllib3", reason="the extra 'remote' is not installed")
    own, served = empty(Net), empty(Net)
    sluice.load_into(own, base, adapters=adapter)
    with RangeServer({f"/lora/{each.name}": each.read_bytes() for each in adapter.iterdir()}) as server:
        sluice.load_into(served, base, adapters=server.url("/lora/"))
    assert all(map(torch.equal, own.state_dict().values(), served.state_dict().values()))


def test_a_checkpoint_is_not_an_adapter(base: Path, tmp_path: Path) -> None:
    torch.save(Net().state_dict(), tmp_path / "other.pth")
    with pytest.raises(sluice.UnsupportedError, match="whole weights, and no adapter"):
        sluice.load_into(empty(Net), base, adapters=tmp_path / "other.pth")


@pytest.mark.parametrize("weight", [pytest.param(10**400, id="large"), float("nan"), "much"])
def test_a_weight_is_a_finite_number(base: Path, adapter: Path, weight: Any) -> None:
    with pytest.raises(ValueError, match="weight of an adapter is a finite number"):
        sluice.load_into(empty(Net), base, adapters=sluice.Adapter(adapter, weight=weight))
