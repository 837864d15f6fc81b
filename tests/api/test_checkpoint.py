from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch

import sluice


@pytest.fixture(params=["f.pth", "f.safetensors"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / str(request.param)
    tensors = {"a.w": torch.arange(60.0).reshape(12, 5), "a.b": torch.arange(12), "c": torch.ones(3).half()}
    if path.suffix == ".pth":
        torch.save(tensors, path)
    else:
        safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    return path


def test_a_checkpoint_is_a_mapping_of_lazy_tensors(file: Path) -> None:
    with sluice.open(file) as checkpoint:
        assert set(checkpoint) == {"a.w", "a.b", "c"}
        assert len(checkpoint) == 3
        assert checkpoint.format == {"f.pth": "torch-zip", "f.safetensors": "safetensors"}[file.name]
        assert checkpoint.files == (str(file),)
        assert checkpoint.nbytes == 240 + 96 + 6
        tensor = checkpoint["a.w"]
        assert (tensor.name, tensor.dtype, tensor.shape, tensor.stride()) == ("a.w", torch.float32, (12, 5), (5, 1))
        assert tensor.nbytes == 240
        assert repr(tensor) == "LazyTensor('a.w', dtype=float32, shape=(12, 5))"
        assert tensor.storage_key != checkpoint["c"].storage_key
        assert "nope" not in checkpoint


def test_tensors_and_slices_read_themselves(file: Path) -> None:
    expected = torch.arange(60.0).reshape(12, 5)
    with sluice.open(file) as checkpoint:
        tensor = checkpoint["a.w"]
        assert torch.equal(tensor.read(), expected)
        assert torch.equal(tensor[2:9:3, 1].read(), expected[2:9:3, 1])
        assert torch.equal(tensor[-1].read(dtype=torch.bfloat16), expected[-1].to(torch.bfloat16))
        assert tensor[3, 4].read().item() == 19.0


def test_a_tensor_reads_into_memory_that_exists(file: Path) -> None:
    with sluice.open(file) as checkpoint:
        out = torch.zeros(5, 12, dtype=torch.float64).t()
        assert checkpoint["a.w"].read(out=out).data_ptr() == out.data_ptr()
        assert torch.equal(out, torch.arange(60.0).reshape(12, 5).double())
        with pytest.raises(sluice.MismatchError, match=r"out has another shape; expected \(12, 5\); found \(3,\)"):
            checkpoint["a.w"].read(out=torch.zeros(3))
        with pytest.raises(ValueError, match="out decides"):
            checkpoint["a.w"].read(out=out, dtype=torch.float32)


def test_a_key_shows_a_part(file: Path) -> None:
    with sluice.open(file, key="a") as checkpoint:
        assert set(checkpoint) == {"w", "b"}
    with sluice.open(file) as checkpoint, sluice.open(checkpoint, key="a") as part:
        assert torch.equal(part["b"].read(), torch.arange(12))


def test_a_closed_checkpoint_reads_nothing_more(file: Path) -> None:
    with sluice.open(file) as checkpoint:
        tensor = checkpoint["c"]
    with pytest.raises(ValueError, match="closed"):
        tensor.read()


def test_the_tree_mirrors_the_file(tmp_path: Path) -> None:
    saved = {"model": {"w": torch.ones(2)}, "steps": [1, torch.zeros(1)], 3: "three"}
    torch.save(saved, tmp_path / "f.pth")
    with sluice.open(tmp_path / "f.pth") as checkpoint:
        tree = checkpoint.tree
        assert list(tree) == ["model", "steps", 3]
        assert torch.equal(tree["model"]["w"].read(), torch.ones(2))
        assert tree["model"]["w"].name == "model.w"
        assert tree["steps"][0] == 1
        assert tree["steps"][1].name == "steps.1"


def test_names_that_collide_are_an_error_on_the_dotted_view_only(tmp_path: Path) -> None:
    torch.save({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}, tmp_path / "f.pth")
    with sluice.open(tmp_path / "f.pth") as checkpoint:
        assert checkpoint.tree["a"]["b"].read().item() == 0.0
        with pytest.raises(sluice.FormatError, match="same dotted name"):
            len(checkpoint)


def test_metadata_is_that_of_the_file(file: Path) -> None:
    with sluice.open(file) as checkpoint:
        wanted = {"f.pth": ("byteorder", "little"), "f.safetensors": ("format", "pt")}[file.name]
        assert checkpoint.metadata[wanted[0]] == wanted[1]


def test_a_misspelt_name_is_a_key_error_that_names_a_similar_one(file: Path) -> None:
    with sluice.open(file) as checkpoint:
        name = next(iter(checkpoint))
        with pytest.raises(KeyError, match=f"is not in {file}; did you mean {name!r}") as caught:
            checkpoint[f"{name}x"]
        assert caught.value.args == (f"{name}x",)
        assert str(pickle.loads(pickle.dumps(caught.value))) == repr(str(caught.value))
        assert checkpoint.get("zzz") is None
