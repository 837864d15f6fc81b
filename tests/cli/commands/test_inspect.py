"""Output and options of ``sluice inspect``, for each format and several widths of the terminal."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import sluice
from support import directories, distributed
from support.command_line import printed, run_command
from support.gguf_files import packed, plain, text, write
from support.work import at_most

pytestmark = pytest.mark.usefixtures("directory")


def state_dict() -> dict[str, torch.Tensor]:
    return {"fc.weight": torch.ones(30, 40), "fc.bias": torch.ones(30), "steps": torch.tensor(3)}


def inspect(*arguments: str) -> list[str]:
    """Return the printed text without the rules of tables and the padding of lines."""
    lines = (" ".join(line.split()) for line in printed("inspect", *arguments).splitlines())
    return [line for line in lines if line.strip("─ ")]


DTYPES = ["dtype tensors bytes", "float32 2 4.80 KiB", "int64 1 8 B"]

LARGEST = [
    "Largest tensors",
    "name dtype shape bytes",
    "fc.weight float32 [30, 40] 4.69 KiB",
    "fc.bias float32 [30] 120 B",
    "steps int64 [] 8 B",
]


def save_safetensors(folder: Path, state: directories.Tensors) -> Path:
    directories.save(folder / "f.safetensors", state)
    return folder / "f.safetensors"


ZIP = ["version: 3", "byteorder: little"]

#: Formats: how they are written, their files if there are several, and their metadata.
FORMATS: dict[str, tuple[Callable[[Path, directories.Tensors], Path], list[str], list[str]]] = {
    "torch-zip": (directories.write_zip, [], [*ZIP, "archive: f"]),
    "torch-legacy": (directories.write_legacy, [], ["protocol_version: 1001", "byteorder: little"]),
    "safetensors": (save_safetensors, [], ["format: pt"]),
    "huggingface-safetensors": (directories.write_model, [], []),
    "huggingface-bin": (directories.write_pickled_shards, [f"pytorch_model-{i}.bin" for i in range(3)], ZIP),
    "safetensors-parts": (directories.write_parts, [f"part-{i}.safetensors" for i in range(3)], []),
    "torch-distributed": (distributed.save, [], ["version: 1.0.0"]),
    "per-parameter": (directories.write_parameters, ["fc.bias.pt", "fc.weight.pt", "steps.pt"], ZIP),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_a_state_dict_in_each_format(kind: str) -> None:
    write_format, files, metadata = FORMATS[kind]
    Path("net").mkdir()
    path = str(write_format(Path("net"), state_dict()))
    first, second, third, *lines = inspect(path)
    assert first == path
    assert second.startswith(f"{kind}, {len(files) or 1} file")
    assert third == "3 tensors, 4.81 KiB"
    if files:
        assert lines.pop(0) == "file bytes"
        assert [lines.pop(0).split()[0] for _ in files] == [f"net/{name}" for name in files]
    assert lines == [*DTYPES, *LARGEST, *(["Metadata", *metadata] if metadata else [])]
    value = json.loads(printed("inspect", path, "--json"))
    shapes = {tensor["name"]: tensor["shape"] for tensor in value["tensors"]}
    assert shapes == {"fc.weight": [30, 40], "fc.bias": [30], "steps": []}
    assert (value["path"], value["state_dicts"], value["tensor_bytes"]) == (path, [""], 4928)
    heading, *lines = inspect(path, "--tree")
    assert heading.startswith(f"{path}: ")
    assert heading.endswith(("dict of 3", "Dict of 3"))
    wanted = {"fc.weight: float32 [30, 40], 4.69 KiB", "fc.bias: float32 [30], 120 B", "steps: int64 [], 8 B"}
    assert {line[4:] for line in lines} == wanted


def test_a_training_checkpoint() -> None:
    model = {"w": torch.ones(64)}
    content = {
        "epoch": 3,
        "args": argparse.Namespace(lr=1),
        "model": model,
        "ema": {"w": torch.zeros(64), "b": torch.zeros(8)},
        "best": {"loss": torch.tensor(0.5)},
        "betas": (0.9, 0.99),
    }
    torch.save(content, "run.pt")
    lines = inspect("run.pt")
    assert lines[3:12] == [
        "contents tensors bytes",
        "ema dict of 2 2 288 B",
        "model dict of 1 1 256 B",
        "best dict of 1 1 4 B",
        "epoch 3",
        "args argparse.Namespace (not loaded)",
        "betas tuple of 2: (0.9, 0.99)",
        "state dicts to choose from with --key (2): ema, model",
        "dtype tensors bytes",
    ]
    assert inspect("run.pt", "--key", "model")[3] == "dtype tensors bytes"
    torch.save({"net": model, "optimizer": {"state": {0: {"m": torch.ones(64)}}, "param_groups": []}}, "run.pt")
    assert "state dict: net" in inspect("run.pt")


def test_shared_storages_and_a_single_tensor() -> None:
    weight = torch.ones(10, 4)
    torch.save({"emb": weight, "head": weight, "rows": weight[:2], "other": torch.ones(1)}, "tied.pt")
    lines = inspect("tied.pt")
    assert lines[2] == "4 tensors, 356 B, 164 B stored"
    assert lines[lines.index("Shared storages") + 2] == "0 160 B emb, head, rows"
    torch.save(torch.ones(3), "one.pt")
    assert "'' float32 [3] 12 B" in inspect("one.pt")


def test_packed_tensors_and_their_stored_bytes() -> None:
    tensors = {"w": packed((64, 128))[0], "b": plain(torch.ones(64)), "q8": ((1, 256), 15, bytes(292))}
    write(Path("m.gguf"), tensors, {"general.architecture": b"\b\0\0\0" + text("llama")})
    lines = inspect("m.gguf")
    assert "2 tensors, 32.2 KiB, 8.75 KiB stored" in lines
    for line in ("Q8_0 as float32 1 32.0 KiB", "w Q8_0 as float32 [64, 128] 32.0 KiB", "general.architecture: llama"):
        assert line in lines
    assert any(line.startswith("q8 a tensor of GGUF Q8_K, which sluice does not decode") for line in lines)
    found = json.loads(printed("inspect", "m.gguf", "--json"))
    assert [each["packing"] for each in found["tensors"]] == ["Q8_0", None]
    with sluice.open("m.gguf") as checkpoint, pytest.raises(sluice.UnsupportedError, match="llama-quantize"):
        checkpoint["q8"]


def test_a_checkpoint_without_tensors() -> None:
    torch.save({"epoch": 3, "lr": 0.1}, "none.pt")
    assert inspect("none.pt")[2:6] == ["0 tensors, 0 B", "contents tensors bytes", "epoch 3", "lr 0.1"]


@pytest.mark.parametrize("options", [[], ["--tree"], ["--all"]])
def test_hostile_names(options: list[str]) -> None:
    names = ["a\0b", "\x1b[31mred", "new\nline", "", "[bold]m[/bold]", ":smile:", "x" * 3000, "漢字", "\u202eevil"]
    torch.save({name: torch.ones(number + 1) for number, name in enumerate(names)}, "f.pth")
    text = "\n".join(inspect("f.pth", *options))
    shown = [r"a\x00b", r"\x1b[31mred", r"new\nline", "''", "[bold]m[/bold]", ":smile:", "漢字", r"\u202eevil"]
    assert all(name in text for name in shown)
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    assert ("x" * 3000 in text) == (options == ["--all"])
    assert ("x" * 120 + "... (3,000 characters)" in text or "x" * 200 + "... (3,000" in text) == (options != ["--all"])
    assert json.loads(printed("inspect", "f.pth", "--json"))["tensors"][0]["name"] == "a\0b"


def test_ten_thousand_tensors() -> None:
    names = [f"model.layers.{number // 100}.experts.{number % 100}.weight" for number in range(10_000)]
    header = {name: {"dtype": "F16", "shape": [2], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(names)}
    text = json.dumps(header).encode()
    Path("many.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(40_000))
    with at_most(5_000_000):
        lines = inspect("many.safetensors")
    assert lines[2] == "10,000 tensors, 39.1 KiB"
    assert "Largest tensors (10 of 10,000; --all shows all)" in lines
    assert len(lines) < 20
    assert inspect("many.safetensors", "--tree")[-1] == "└── ... 9,960 more; --all shows them"
    everything = inspect("many.safetensors", "--all")
    assert sum(line.startswith("model.layers.") for line in everything) == 10_000


def test_inspect_shows_one_part() -> None:
    torch.save({"model": state_dict(), "other": torch.ones(2)}, "run.pt")
    value = json.loads(printed("inspect", "run.pt", "--key", "model.fc", "--json"))
    assert [tensor["name"] for tensor in value["tensors"]] == ["weight", "bias"]
    assert value["tensor_bytes"] == value["stored_bytes"] == 4920
    torch.save({"run": {"model": state_dict(), "ema": state_dict()}}, "deep.pt")
    assert "state dicts to choose from with --key (2): run.model, run.ema" in inspect("deep.pt", "--key", "run")


def test_the_tree_shows_names_that_dots_cannot_tell_apart() -> None:
    torch.save({"a.b": torch.ones(1), "a": {"b": torch.ones(2)}}, "run.pt")
    assert run_command("inspect", "run.pt").exit_code == 1
    assert run_command("inspect", "run.pt", "--tree").stdout.splitlines()[1:] == [
        "├── a.b: float32 [1], 4 B",
        "└── a: dict of 1",
        "    └── b: float32 [2], 8 B",
    ]


def test_inspect_refuses_options_that_json_would_ignore() -> None:
    assert run_command("inspect", "x", "--json", "--all").exit_code == 2
    assert run_command("inspect", "x", "--json", "--tree").exit_code == 2
