"""Choice of the files of a directory that are the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import sluice
from sluice.checkpoint import survey as _directory
from support.directories import chosen, notes, refusal, save, save_sharded, tensors


def test_the_preference(tmp_path: Path) -> None:
    one = tensors("w")
    for stem in ("model", "diffusion_pytorch_model", "adapter_model"):
        save_sharded(tmp_path, f"{stem}.safetensors.index.json", {f"{stem}-1.safetensors": one})
        save(tmp_path / f"{stem}.safetensors", one)
    for stem in ("pytorch_model", "diffusion_pytorch_model", "adapter_model"):
        save_sharded(tmp_path, f"{stem}.bin.index.json", {f"{stem}-1.bin": one})
        save(tmp_path / f"{stem}.bin", one)
    order = []
    for _ in range(12):
        (file,) = chosen(tmp_path)
        taken = tmp_path / file
        if taken.stem.endswith("-1"):
            taken = tmp_path / f"{taken.stem[:-2]}{taken.suffix}.index.json"
        order.append(taken.name)
        assert (f"{taken.name} was chosen" in notes(tmp_path)) == (len(order) < 12)
        taken.unlink()
    assert order == list(_directory._PREFERENCE)
    assert order[:4] == [
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ]


def test_a_variant_is_selected_only_without_a_default(tmp_path: Path) -> None:
    one = tensors("w")
    save(tmp_path / "pytorch_model.fp16.bin", one)
    assert chosen(tmp_path) == ["pytorch_model.fp16.bin"]
    assert "The model exists only as the variant 'fp16'" in notes(tmp_path)
    save_sharded(tmp_path, "model.safetensors.index.fp16.json", {"model.fp16-00001-of-00001.safetensors": one})
    assert chosen(tmp_path) == ["model.fp16-00001-of-00001.safetensors"]
    assert "left out (1): pytorch_model.fp16.bin" in notes(tmp_path)
    save(tmp_path / "model.fp16.safetensors", one)
    assert chosen(tmp_path) == ["model.fp16.safetensors"]
    save(tmp_path / "model.ema.safetensors", one)
    error = refusal(tmp_path)
    assert isinstance(error, sluice.FormatError)
    assert "several variants" in error.problem
    assert "model.ema.safetensors" in str(error.found)
    assert "model.fp16.safetensors" in str(error.found)
    save(tmp_path / "pytorch_model.bin", one)
    assert chosen(tmp_path) == ["pytorch_model.bin"]
    assert "variant" not in notes(tmp_path)


def test_an_index_with_a_different_name(tmp_path: Path) -> None:
    save_sharded(tmp_path, "consolidated.safetensors.index.json", {"x": tensors("w")})
    save(tmp_path / "left-alone.safetensors", tensors("other"))
    assert chosen(tmp_path) == ["x"]
    save_sharded(tmp_path, "other.safetensors.index.json", {"x": tensors("w")})
    assert "several shard indexes" in refusal(tmp_path).problem


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["pytorch_model.bin", "optimizer.bin", "scheduler.bin", "random_states_0.pkl"], "pytorch_model.bin"),
        (["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"], "model.safetensors"),
        (["adapter_model.safetensors", "adapter_config.json", "tokenizer.json"], "adapter_model.safetensors"),
        (["diffusion_pytorch_model.safetensors", "config.json"], "diffusion_pytorch_model.safetensors"),
    ],
    ids=["accelerate", "Trainer", "peft", "diffusers"],
)
def test_output_directories(tmp_path: Path, files: Sequence[str], expected: str) -> None:
    for name in files:
        if name.endswith((".json", ".pkl")):
            (tmp_path / name).write_text("{}")
        else:
            save(tmp_path / name, tensors("w") if name == expected else {"state": {}, "lr": 0.1})
    assert chosen(tmp_path) == [expected]


def test_parts_come_before_parameters(tmp_path: Path) -> None:
    save(tmp_path / "b.safetensors", tensors("b"))
    save(tmp_path / "a.safetensors", tensors("a"))
    save(tmp_path / "c.pt", torch.ones(1))
    with sluice.open(tmp_path) as checkpoint:
        assert checkpoint.format == "safetensors-parts"
        assert list(checkpoint) == ["a", "b"]
    assert notes(tmp_path) == "Left out, because there are .safetensors files (1): c.pt."


def test_nested_directories_are_not_searched(tmp_path: Path) -> None:
    save(tmp_path / "unet" / "model.safetensors", tensors("w"))
    (tmp_path / "model.safetensors").mkdir()
    (tmp_path / "w.pt").mkdir()
    error = refusal(tmp_path)
    assert isinstance(error, sluice.FormatError)
    assert "subdirectories are not searched" in error.problem
    assert error.found == "'model.safetensors', 'unet', 'w.pt'"
    assert error.file == str(tmp_path)


@pytest.mark.parametrize(
    ("names", "kind", "words"),
    [
        (["config.json", "model.safetensors.incomplete"], sluice.IncompleteCheckpointError, "was never completed"),
        (["blobs", "refs", "snapshots"], sluice.FormatError, "pass a directory in 'snapshots'"),
        (["model_index.json", "unet"], sluice.FormatError, "a pipeline of models: pass the directory of one"),
        (
            ["checkpoint-500", "checkpoint-9"],
            sluice.FormatError,
            "one of its checkpoints instead, such as",
        ),
        (["data", "data.pkl", "version"], sluice.FormatError, "unpacked torch.save file"),
        (["consolidated.00.pth", "params.json"], sluice.FormatError, "a file instead, such as 'consolidated.00.pth'"),
        (["config.json", "tf_model.h5"], sluice.UnsupportedError, "does not read 'tf_model.h5'"),
    ],
)
def test_names_of_files_decide_the_error(
    tmp_path: Path, names: Sequence[str], kind: type[sluice.SluiceError], words: str
) -> None:
    for name in names:
        (tmp_path / name).touch()
    error = refusal(tmp_path)
    assert type(error) is kind
    assert words in str(error)


def test_checkpoints_of_their_own_in_one_directory(tmp_path: Path) -> None:
    for name in ("1.pt", "2.pt"):
        save(tmp_path / name, {"model": tensors("w")})
    assert "pass the path of one, such as '1.pt'" in str(refusal(tmp_path))


def test_what_is_there_is_listed_in_part(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.txt").touch()
    assert str(refusal(tmp_path).found).endswith("and 12 more")


def test_a_model_file_comes_before_a_distributed_checkpoint(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x02.")
    (tmp_path / "__0_0.distcp").write_bytes(b"x")
    save(tmp_path / "part.safetensors", tensors("w"))
    assert refusal(tmp_path).file == str(tmp_path / ".metadata")
    save(tmp_path / "model.safetensors", tensors("w"))
    assert chosen(tmp_path) == ["model.safetensors"]


def test_json_that_is_not_an_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    assert isinstance(refusal(tmp_path / "config.json"), sluice.UnsupportedError)


def test_a_directory_whose_name_ends_like_an_index(tmp_path: Path) -> None:
    save(tmp_path / "x.json" / "model.safetensors", tensors("w"))
    assert chosen(tmp_path / "x.json") == ["model.safetensors"]


def test_training_states_next_to_a_model_are_named(tmp_path: Path) -> None:
    for name in ("optimizer.pt", "scheduler.pt", "optimizer_1.bin", "training_args.bin", "other.bin"):
        (tmp_path / name).write_bytes(b"")
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    with sluice.open(tmp_path) as checkpoint:
        assert checkpoint.index.notes == (
            "Next to the model, each a separate checkpoint (3): optimizer.pt, optimizer_1.bin, scheduler.pt.",
        )
