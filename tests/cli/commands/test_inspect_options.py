"""``sluice inspect``: its options, and modules that it does not import."""

from __future__ import annotations

import json
from pathlib import Path

import torch

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
