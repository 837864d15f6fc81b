"""``sluice inspect``: its options, and modules that it does not import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from support.command_line import run_command, state_dict


def test_inspect_shows_one_part(directory: Path) -> None:
    torch.save({"model": state_dict(), "other": torch.ones(2)}, "run.pt")
    value = json.loads(run_command("inspect", "run.pt", "--key", "model.fc", "--json").stdout)
    assert [tensor["name"] for tensor in value["tensors"]] == ["weight", "bias"]
    assert value["tensor_bytes"] == value["stored_bytes"] == 60


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
