"""``sluice inspect``: its options, and modules that it does not import."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from support.command_line import run_command, state_dict


def test_inspect_shows_a_torch_file(directory: Path) -> None:
    weight = torch.arange(12.0).reshape(3, 4)
    torch.save({"model": {"w": weight, "tied": weight.t()}, "epoch": 3}, "run.pt")
    result = run_command("inspect", "run.pt")
    assert result.exit_code == 0
    for part in ("torch-zip, 1 file", "2 tensors, 96 B, 48 B stored", "model.w", "[3, 4]", "model.w, model.tied"):
        assert part in result.stdout
    assert "epoch: 3" in run_command("inspect", "run.pt", "--tree").stdout


def test_inspect_shows_a_safetensors_file(directory: Path) -> None:
    save_file(state_dict(), "net.safetensors", metadata={"made": "here"})
    value = json.loads(run_command("inspect", "net.safetensors", "--json").stdout)
    assert value["format"] == "safetensors"
    assert value["metadata"] == {"made": "here"}
    assert {tensor["name"]: tuple(tensor["shape"]) for tensor in value["tensors"]} == {
        name: tuple(tensor.shape) for name, tensor in state_dict().items()
    }


def test_inspect_cuts_long_lists_unless_all_is_asked_for(directory: Path) -> None:
    torch.save({f"layer.{number}": torch.ones(number + 1) for number in range(30)}, "many.pth")
    cut = run_command("inspect", "many.pth").stdout
    assert "Largest tensors (10 of 30; --all shows all)" in cut
    assert "layer.29" in cut
    assert "layer.3 " not in cut
    everything = run_command("inspect", "many.pth", "--all").stdout
    assert all(f"layer.{number} " in everything for number in range(30))


def test_inspect_shows_one_part(directory: Path) -> None:
    torch.save({"model": state_dict(), "other": torch.ones(2)}, "run.pt")
    value = json.loads(run_command("inspect", "run.pt", "--key", "model.fc", "--json").stdout)
    assert [tensor["name"] for tensor in value["tensors"]] == ["weight", "bias"]
    assert value["tensor_bytes"] == value["stored_bytes"] == 60


def test_inspect_names_what_it_does_not_load(directory: Path) -> None:
    torch.save({"args": argparse.Namespace(lr=1), "w": torch.ones(2)}, "run.pt")
    assert "args: argparse.Namespace (not loaded)" in run_command("inspect", "run.pt", "--tree").stdout


def test_the_tree_shows_names_that_dots_cannot_tell_apart(directory: Path) -> None:
    torch.save({"a.b": torch.ones(1), "a": {"b": torch.ones(2)}}, "run.pt")
    assert run_command("inspect", "run.pt").exit_code == 1
    assert run_command("inspect", "run.pt", "--tree").stdout.splitlines()[1:] == [
        "├── a.b: float32 [1], 4 B",
        "└── a: dict of 1",
        "    └── b: float32 [2], 8 B",
    ]


def test_inspect_refuses_options_that_json_would_ignore(directory: Path) -> None:
    assert run_command("inspect", "x", "--json", "--all").exit_code == 2
    assert run_command("inspect", "x", "--json", "--tree").exit_code == 2


def test_inspect_and_help_import_no_torch(directory: Path) -> None:
    torch.save(state_dict(), "net.pth")
    save_file(state_dict(), "net.safetensors")
    code = (
        "import sys\n"
        "from sluice.cli import main\n"
        "main(sys.argv[1:], standalone_mode=False)\n"
        "print([name for name in ('torch', 'numpy', 'safetensors') if name in sys.modules])\n"
    )
    for arguments in (
        ["inspect", "net.pth"],
        ["inspect", "net.safetensors"],
        ["inspect", "net.pth", "--tree"],
        ["inspect", "net.pth", "--json"],
        ["load", "--help"],
    ):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "[]", arguments
