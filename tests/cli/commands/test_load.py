"""``sluice load`` and ``sluice plan``: results, output, and errors of their options."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import sluice
from support.command_line import printed, refused, run_command, state_dict
from support.watching import watch


def test_load_fills_a_model_and_reports(directory: Path) -> None:
    result = printed("load", "net.pth", "--model", "cli_model:Net")
    assert result.startswith("loaded 3 of 3 tensors of the model from net.pth (torch-zip), 96 B on cpu\n")
    for part in ("GB/s", "growth of memory", "predicted", "measured", "total"):
        assert part in result
    assert run_command("load", "net.pth", "--model", "cli_model:Net", "--quiet").output == ""


def test_load_passes_its_options_on(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"model": state_dict()}, "run.pt")
    models: list[nn.Module] = []
    watch(monkeypatch, sluice, "load_into", lambda model, *_, **__: models.append(model))
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
    assert "extra" in refused("load", "net.pth", "--model", "cli_model:Net", code=1)
    assert "unexpected (1): extra" in printed("load", "net.pth", "--model", "cli_model:Net", "--no-strict")


def test_load_and_plan_may_ignore_other_shapes(directory: Path) -> None:
    torch.save(state_dict() | {"fc.weight": torch.ones(3, 5)}, "wide.pth")
    for command in ("load", "plan"):
        assert "(--ignore-mismatched)" in run_command(command, "wide.pth", "--model", "cli_model:Net").stderr
        allowed = printed(command, "wide.pth", "--model", "cli_model:Net", "--ignore-mismatched")
        assert "not loaded (1): fc.weight" in allowed


def test_load_and_plan_refuse_to_load_nothing(directory: Path) -> None:
    torch.save({"x": torch.ones(3)}, "else.pth")
    for command in ("load", "plan"):
        options = (command, "else.pth", "--model", "cli_model:Net", "--no-strict")
        error = refused(*options, code=1)
        assert "it has 0 of 3 tensors" in error
        for option in ("--key", "--rename", "--allow-empty"):
            assert f"({option})" in error
        assert "0 of 3 tensors of the model from else.pth" in printed(*options, "--allow-empty")
        strict = refused(command, "else.pth", "--model", "cli_model:Net", "--allow-empty")
        assert "--allow-empty needs --no-strict" in strict


def test_load_can_map_the_file(directory: Path) -> None:
    result = printed("load", "net.pth", "--model", "cli_model:Net", "--place", "map")
    assert re.search(r"read 0 B in .* GB/s; 96 B mapped", result)


#: A file of 16 MiB for a linear layer, and the layer.
LINEAR = ("linear.pth", "--model", "torch.nn:Linear", "--model-args", "[1024, 4096]")


@pytest.fixture
def linear(directory: Path) -> None:
    torch.save(nn.Linear(1024, 4096).state_dict(), "linear.pth")


def test_a_plan_compares_and_recommends(linear: None) -> None:
    done = printed("plan", *LINEAR, "--dtype", "bfloat16")
    for text in ("naive", "mmap", "per-parameter", "recommended: sluice, because", "float32"):
        assert text in done
    assert json.loads(printed("plan", "linear.pth", "--json"))["recommended"] == "sluice"  # without a model too


def test_a_load_that_does_not_fit_ends_with_3_and_advice(linear: None) -> None:
    report = json.loads(printed("plan", *LINEAR, "--host-limit", "25MiB", "--json", code=3))
    assert report["fits"] is False
    assert report["limits"][0] == {"where": "host", "nbytes": 25 << 20, "origin": "MemoryLimits(host=...)"}
    assert report["alternatives"]
    assert run_command("plan", *LINEAR, "--memory", "25MiB", "--place", "map").exit_code == 0


def test_a_mesh_shows_ranks_and_hosts(linear: None) -> None:
    done = printed("plan", *LINEAR, "--mesh", "ddp=2, dp=4", "--ranks-per-host", "4")
    assert "8 ranks (ddp=2, dp=4) on 2 hosts: each holds" in done
    ranks = json.loads(printed("plan", *LINEAR, "--mesh", "dp=4", "--json"))["ranks"]
    assert ranks["mesh"] == {"dp": 4}
    assert len(ranks["ranks"]) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *((options, "need --model") for options in ("--no-strict", "--place map", "--device auto", "--model-args {}")),
        ("--ranks-per-host 2", "mesh"),
        ("--mesh dp", "expected NAME=RANKS"),
        ("--mesh dp=2,dp=3", "each name once"),
        (f"--mesh dp={'9' * 5000}", "expected NAME=RANKS"),
        ("--model torch.nn:Flatten --mesh foo=2", "foo"),
    ],
)
def test_a_wrong_command_line_for_a_plan(linear: None, options: str, message: str) -> None:
    assert message in refused("plan", "linear.pth", *options.split())
