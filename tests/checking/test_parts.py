"""The parts of two checkpoints that are compared, and the part that a verification names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice


def training(value: float = 1.0, momentum: float = 2.0) -> dict[str, Any]:
    """Return the object that a training script saves."""
    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, value)
    nn.init.zeros_(model.bias)
    optimizer = {"state": {0: {"exp_avg": torch.full((4, 4), momentum)}}, "param_groups": [{"params": [0]}]}
    return {"model_state_dict": model.state_dict(), "optimizer": optimizer, "epoch": 3}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    torch.save(training(), tmp_path / "run.pt")
    return tmp_path / "run.pt"


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "model"])
def test_a_converted_state_dict_is_the_same(run: Path, tmp_path: Path, name: str) -> None:
    key = "model_state_dict" if name == "x.pt" else None  # torch files hold the whole object
    sluice.convert(run, tmp_path / name, key=key)
    for a, b, part, other in ((run, tmp_path / name, "a", "b"), (tmp_path / name, run, "b", "a")):
        report = sluice.diff(a, b)
        assert report.same, report
        record = report.to_json()
        assert record[f"key_{part}"] == "model_state_dict"
        assert record[f"key_{other}"] is None
        assert (record[f"compared_{part}"], record[f"tensors_{part}"], record[f"outside_{part}"]) == (2, 2, 1)
        assert f"{part}: {run} (torch-zip, key 'model_state_dict'): 2 tensors; 1 outside this part" in str(report)
    assert str(sluice.diff(run, tmp_path / name)).startswith("compared 2 of 3 tensors of a with 2 of 2 tensors of b\n")


def test_two_training_checkpoints_are_compared_as_a_whole(run: Path, tmp_path: Path) -> None:
    torch.save(training(momentum=7.0), tmp_path / "other.pt")
    report = sluice.diff(run, tmp_path / "other.pt")
    assert [each.name for each in report.differences] == ["optimizer.state.0.exp_avg"]
    assert (report.key_a, report.key_b, report.compared_a) == (None, None, 3)
    assert sluice.diff(run, tmp_path / "other.pt", key="model_state_dict", other_key="model_state_dict").same
    with sluice.open(run, key="model_state_dict") as part:
        assert sluice.diff(part, tmp_path / "other.pt").same
    assert not sluice.diff(run, tmp_path / "other.pt", key="", other_key="").same


def test_several_state_dicts_are_listed(run: Path, tmp_path: Path) -> None:
    state = training()
    torch.save({"model": state["model_state_dict"], "ema": state["model_state_dict"] | {}}, tmp_path / "two.pt")
    with pytest.raises(sluice.MismatchError, match=r"two.pt: .* more than one state dict(.|\n)*other_key='ema'"):
        sluice.diff(run, tmp_path / "two.pt")
    with pytest.raises(sluice.MismatchError, match=r"key='model'"):
        sluice.diff(tmp_path / "two.pt", run)
    assert sluice.diff(run, tmp_path / "two.pt", other_key="ema").same
    assert sluice.diff(tmp_path / "two.pt", tmp_path / "two.pt").compared_a == 4  # the same keys: as a whole


def test_without_a_common_state_dict_the_whole_is_compared(run: Path, tmp_path: Path) -> None:
    torch.save(training()["optimizer"], tmp_path / "optimizer.pt")
    torch.save([torch.ones(2), torch.ones(3)], tmp_path / "list.pt")
    for name, count in (("optimizer.pt", 1), ("list.pt", 2)):
        report = sluice.diff(tmp_path / name, tmp_path / name)
        assert report.same
        assert report.compared_a == count
    assert not sluice.diff(tmp_path / "list.pt", tmp_path / "optimizer.pt").same
    torch.save({"x": torch.ones(4, 4)}, tmp_path / "x.pt")
    report = sluice.diff(run, tmp_path / "x.pt")
    assert not report.same
    assert str(report).startswith("compared 0 of 3 tensors of a with 0 of 1 tensor of b\n")
    assert "no name is in both: key= and other_key= (--key-a, --key-b)" in str(report)


def test_verification_reads_everything_and_says_which_state_dict_it_names(run: Path) -> None:
    report = sluice.verify(run, hashes="sha256")
    assert str(report).startswith(f"checked 3 of 3 tensors of {run} (torch-zip)\n")
    assert "state dict: model_state_dict" in str(report)
    assert set(report.hashes) == {"model_state_dict.weight", "model_state_dict.bias", "optimizer.state.0.exp_avg"}
    part = sluice.verify(run, key="model_state_dict", hashes="sha256")
    assert set(part.hashes) == {"weight", "bias"}
    assert (part.key, part.named, part.total) == ("model_state_dict", 2, 3)
    assert report.nbytes >= part.nbytes > run.stat().st_size  # every byte
    assert part.checksums == report.checksums
    assert json.loads(json.dumps(part.to_json()))["state_dicts"] == ["model_state_dict"]
    with pytest.raises(sluice.MismatchError, match="nothing at key 'modle'"):
        sluice.verify(run, key="modle")


def test_damage_outside_the_named_part_is_found(run: Path) -> None:
    data = bytearray(run.read_bytes())
    at = data.index(torch.full((4, 4), 2.0).numpy().tobytes())
    data[at] ^= 1
    run.write_bytes(data)
    assert not sluice.verify(run, key="model_state_dict").ok


def test_the_manifest_of_a_conversion_fits_its_source(run: Path, tmp_path: Path) -> None:
    manifest, whole = tmp_path / "x.json", tmp_path / "whole.json"
    sluice.convert(run, tmp_path / "x.safetensors", manifest=manifest)
    report = sluice.verify(run, manifest=manifest)
    assert report.ok, report
    assert report.key == "model_state_dict"
    assert "tensors of 'model_state_dict' by name: 2 of 3 tensors" in str(report)
    sluice.verify(run, hashes="sha256").write_manifest(whole)
    assert sluice.verify(run, manifest=whole).ok
    assert sluice.verify(run, manifest=whole).key is None
    assert not sluice.verify(run, manifest=whole, key="model_state_dict").ok
    torch.save(training(value=9.0), run)
    kinds = [(each.kind, each.tensor) for each in sluice.verify(run, manifest=manifest).problems]
    assert kinds == [("hash", "weight")]


def test_a_conversion_of_the_whole_is_compared_as_a_whole(run: Path, tmp_path: Path) -> None:
    state = training()["model_state_dict"]
    torch.save({"model": state, "ema": state | {}}, tmp_path / "two.pt")
    for source, tensors in ((run, 3), (tmp_path / "two.pt", 4)):
        sluice.convert(source, tmp_path / "whole.safetensors", key="", overwrite=True)
        for pair in ((source, tmp_path / "whole.safetensors"), (tmp_path / "whole.safetensors", source)):
            report = sluice.diff(*pair)
            assert report.same, report
            assert (report.key_a, report.key_b, report.common, report.outside_a) == (None, None, tensors, 0)


def test_a_state_dict_that_only_one_has_is_a_difference(tmp_path: Path) -> None:
    state = training()["model_state_dict"]
    torch.save({"model": state}, tmp_path / "only.pt")
    torch.save({"model": state, "ema": {"weight": torch.zeros(4, 4)}}, tmp_path / "both.pt")
    report = sluice.diff(tmp_path / "only.pt", tmp_path / "both.pt")
    assert (report.common, report.compared_a) == (2, 2)
    assert [(each.name, each.kinds) for each in report.differences] == [("ema.weight", ("only_b",))]
    torch.save({"model": state, "ema": state | {}}, tmp_path / "tied.pt")
    assert sluice.diff(tmp_path / "only.pt", tmp_path / "tied.pt").same


def test_the_parts_with_the_most_names_in_common_are_compared(tmp_path: Path) -> None:
    state, metric = {"a": torch.ones(4), "model.a": torch.ones(4)}, torch.ones(1)
    torch.save({"model": state, "step": metric}, tmp_path / "run.pt")
    sluice.convert(tmp_path / "run.pt", tmp_path / "x.safetensors")  # 'model.a' is a name of the whole source as well
    assert sluice.diff(tmp_path / "run.pt", tmp_path / "x.safetensors").same
    torch.save({"net": state, "step": metric}, tmp_path / "net.pt")
    report = sluice.diff(tmp_path / "run.pt", tmp_path / "net.pt")  # 'step' alone does not relate the wholes
    assert (report.same, report.key_a, report.key_b) == (True, "model", "net")


def test_the_state_dict_with_the_key_of_the_only_other_one_is_compared(tmp_path: Path) -> None:
    torch.save({"model": {"a": torch.ones(4)}}, tmp_path / "only.pt")
    torch.save({"model": {"b": torch.ones(4)}, "ema": {"b": torch.ones(4)}}, tmp_path / "both.pt")
    for pair in (("only.pt", "both.pt"), ("both.pt", "only.pt")):
        report = sluice.diff(*(tmp_path / name for name in pair))
        assert (report.key_a, report.key_b, report.common) == ("model", "model", 0)
