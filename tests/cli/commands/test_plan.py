from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from sluice.cli import main

MIB = 1 << 20

NET = """
import torch


class Net(torch.nn.Module):
    def __init__(self, width=1024):
        super().__init__()
        self.up = torch.nn.Linear(width, 4 * width)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "plan_net.py").write_text(NET)
    torch.save(torch.nn.ModuleDict({"up": torch.nn.Linear(1024, 4096)}).state_dict(), tmp_path / "net.pth")
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", "net.pth", *arguments])


def test_a_plan_compares_and_recommends() -> None:
    done = run("--model", "plan_net:Net", "--dtype", "bfloat16")
    assert done.exit_code == 0, done.output
    for text in ("naive", "mmap", "per-parameter", "recommended: sluice, because", "float32"):
        assert text in done.output


def test_a_load_that_does_not_fit_ends_with_3_and_advice() -> None:
    done = run("--model", "plan_net:Net", "--host-limit", "25MiB", "--json")
    assert done.exit_code == 3
    report = json.loads(done.stdout)
    assert report["fits"] is False
    assert report["limits"][0] == {"where": "host", "nbytes": 25 * MIB, "origin": "MemoryLimits(host=...)"}
    assert report["alternatives"]
    assert run("--model", "plan_net:Net", "--memory", "25MiB", "--place", "map").exit_code == 0


def test_without_a_model_the_checkpoint_is_enough() -> None:
    done = run("--json")
    assert done.exit_code == 0
    report = json.loads(done.stdout)
    assert report["recommended"] == "sluice"


@pytest.mark.parametrize(
    "options", [["--no-strict"], ["--place", "map"], ["--device", "auto"], ["--model-args", "{}"]], ids=str
)
def test_options_of_a_model_need_one(options: list[str]) -> None:
    done = run(*options)
    assert done.exit_code == 2
    assert "need --model" in done.output


def test_a_mesh_shows_ranks_and_hosts() -> None:
    done = run("--model", "plan_net:Net", "--mesh", "ddp=2, dp=4", "--ranks-per-host", "4")
    assert done.exit_code == 0, done.output
    assert "8 ranks (ddp=2, dp=4) on 2 hosts: each holds" in done.output
    done = run("--model", "plan_net:Net", "--mesh", "dp=4", "--json")
    ranks = json.loads(done.stdout)["ranks"]
    assert ranks["mesh"] == {"dp": 4}
    assert len(ranks["ranks"]) == 4


@pytest.mark.parametrize(("mesh", "message"), [("dp", "expected NAME=RANKS"), ("dp=2,dp=3", "each name once")])
def test_a_mesh_in_a_wrong_form(mesh: str, message: str) -> None:
    done = run("--model", "plan_net:Net", "--mesh", mesh)
    assert done.exit_code == 2
    assert message in done.output


def test_arguments_that_the_plan_refuses_are_a_wrong_command_line() -> None:
    done = run("--ranks-per-host", "2")
    assert done.exit_code == 2
    assert "mesh" in done.output
    assert run("--model", "plan_net:Net", "--mesh", "foo=2").exit_code == 2
