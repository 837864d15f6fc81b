"""``sluice load``: its result, its output, and errors of its options."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from support.command_line import run_command, state_dict


def test_load_fills_a_model_and_reports(directory: Path) -> None:
    torch.save(state_dict(), "net.pth")
    result = run_command("load", "net.pth", "--model", "cli_model:Net")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("loaded 3 of 3 tensors of the model from net.pth (torch-zip), 96 B on cpu\n")
    for part in ("GB/s", "growth of memory", "predicted", "measured", "total"):
        assert part in result.stdout


def test_load_passes_its_options_on(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"model": state_dict()}, "run.pt")
    models: list[nn.Module] = []
    load_into = sluice.load_into

    def spy(model: nn.Module, *arguments: Any, **named: Any) -> sluice.LoadReport:
        models.append(model)
        return load_into(model, *arguments, **named)

    monkeypatch.setattr(sluice, "load_into", spy)
    options = ("--dtype", "bfloat16", "--key", "model", "--device", "cpu", "--memory", "1GiB", "--staging", "8MiB")
    result = run_command("load", "run.pt", "--model", "cli_model:Net", "--page-cache", "keep", "--json", *options)
    report = json.loads(result.stdout)
    assert report["key"] == "model"
    assert report["cast"] == {"float32->bfloat16": 3}
    assert report["reads"].get("direct", 0) == 0
    assert torch.equal(models[0].get_parameter("fc.weight"), state_dict()["fc.weight"].bfloat16())


@pytest.mark.parametrize("arguments", ['{"width": 5}', "[5]"])
def test_load_passes_arguments_to_the_factory(directory: Path, arguments: str) -> None:
    torch.save(state_dict() | {"fc.weight": torch.ones(3, 5)}, "wide.pth")
    assert run_command("load", "wide.pth", "--model", "cli_model:Net").exit_code == 1
    assert run_command("load", "wide.pth", "--model", "cli_model:Net", "--model-args", arguments).exit_code == 0


def test_load_may_leave_names_out(directory: Path) -> None:
    torch.save(state_dict() | {"extra": torch.ones(1)}, "net.pth")
    refused = run_command("load", "net.pth", "--model", "cli_model:Net")
    assert refused.exit_code == 1
    assert "extra" in refused.stderr
    allowed = run_command("load", "net.pth", "--model", "cli_model:Net", "--no-strict")
    assert allowed.exit_code == 0
    assert "unexpected (1): extra" in allowed.stdout


def test_load_and_plan_may_ignore_other_shapes(directory: Path) -> None:
    torch.save(state_dict() | {"fc.weight": torch.ones(3, 5)}, "wide.pth")
    for command in ("load", "plan"):
        assert "(--ignore-mismatched)" in run_command(command, "wide.pth", "--model", "cli_model:Net").stderr
        allowed = run_command(command, "wide.pth", "--model", "cli_model:Net", "--ignore-mismatched")
        assert allowed.exit_code == 0, allowed.stderr
        assert "not loaded (1): fc.weight" in allowed.stdout


def test_load_and_plan_refuse_to_load_nothing(directory: Path) -> None:
    torch.save({"x": torch.ones(3)}, "else.pth")
    for command in ("load", "plan"):
        options = (command, "else.pth", "--model", "cli_model:Net", "--no-strict")
        refused = run_command(*options)
        assert refused.exit_code == 1
        assert "it has 0 of 3 tensors" in refused.stderr
        for option in ("--key", "--rename", "--allow-empty"):
            assert f"({option})" in refused.stderr
        allowed = run_command(*options, "--allow-empty")
        assert allowed.exit_code == 0, allowed.stderr
        assert "0 of 3 tensors of the model from else.pth" in allowed.stdout
        strict = run_command(command, "else.pth", "--model", "cli_model:Net", "--allow-empty")
        assert strict.exit_code == 2
        assert "--allow-empty needs --no-strict" in strict.stderr


def test_load_can_map_the_file(directory: Path) -> None:
    torch.save(state_dict(), "net.pth")
    result = run_command("load", "net.pth", "--model", "cli_model:Net", "--place", "map")
    assert result.exit_code == 0, result.stderr
    assert re.search(r"read 0 B in .* GB/s; 96 B mapped", result.stdout)


def test_load_can_be_quiet(directory: Path) -> None:
    torch.save(state_dict(), "net.pth")
    assert run_command("load", "net.pth", "--model", "cli_model:Net", "--quiet").output == ""
