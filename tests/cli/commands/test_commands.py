"""``sluice doctor``, ``sluice share`` and ``sluice merge``."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import sluice
from support.command_line import printed, refused, run_command


def test_what_a_bug_report_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HTTPS_PROXY", "http://user:password@proxy")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = printed("doctor", str(tmp_path), "--json")
    found = json.loads(done)
    assert found["versions"]["sluice"] == sluice.__version__
    assert found["versions"]["torch"] == torch.__version__
    assert {"numpy", "safetensors", "transformers", "obstore"} <= found["versions"].keys()
    assert found["memory"]["total"] > 0
    assert found["system"]["page bytes"] >= 4096
    assert found["path"]["path"] == str(tmp_path)
    assert found["path"]["direct I/O"] is True or found["path"]["direct I/O"].startswith("no: ")
    assert found["environment"]["HF_TOKEN"] == found["environment"]["HTTPS_PROXY"] == "set, not shown"
    assert found["environment"]["HF_HUB_OFFLINE"] == "1"
    assert not list(tmp_path.iterdir())
    text = run_command("doctor", str(tmp_path)).output
    assert "file system" in text
    assert "secret" not in text
    assert "password" not in text


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    assert run_command("doctor", str(tmp_path / "missing")).exit_code == 2


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SLUICE_SHARED_DIR", str(tmp_path / "store"))
    sluice.save({"w": torch.arange(1000.0)}, tmp_path / "m.safetensors")
    return str(tmp_path / "m.safetensors")


def test_a_copy_is_built_found_listed_and_dropped(path: str) -> None:
    key, *_ = run_command("share", path, "--dtype", "bf16").output.split()
    assert f"{key} found, 2.0" in run_command("share", path, "--dtype", "bf16").output
    with sluice.shared(path, dtype="bf16") as copy:
        assert (copy.key, copy.built) == (key, False)
        assert "in use" in run_command("share", "--list").output
        refused = run_command("share", "--drop", key)
        assert (refused.exit_code, "is in use" in refused.output) == (1, True)
    assert "unused for 0 s" in run_command("share", "--list").output
    assert run_command("share", "--drop", key).exit_code == 0
    assert run_command("share", "--list").output == ""
    assert run_command("share", "--drop", key).exit_code == 1


def test_keep_holds_and_then_drops(path: str, tmp_path: Path) -> None:
    done = run_command("share", path, "--keep", "0s")
    assert (done.exit_code, list((tmp_path / "store").iterdir())) == (0, [])


@pytest.mark.parametrize("arguments", [(), ("--list", "--drop", "x"), ("m.pth", "--keep", "soon")])
def test_wrong_command_lines(arguments: tuple[str, ...]) -> None:
    assert run_command("share", *arguments).exit_code == 2


merge = partial(run_command, "merge")


@pytest.fixture
def inputs(tmp_path: Path) -> list[Path]:
    found = [tmp_path / "a.pth", tmp_path / "b.pth"]
    for value, path in enumerate(found):
        torch.save({"w": torch.full((4, 4), float(value))}, path)
    return found


def test_inputs(inputs: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out.pth"
    done = printed("merge", f"{inputs[0]}=1", f"{inputs[1]}=3", out, "--json")
    assert json.loads(done)["tensors"] == 1
    assert torch.load(out)["w"][0, 0] == 0.75
    assert merge(*inputs, out).exit_code == 1  # it exists
    assert merge(*inputs, out, "--force").exit_code == 0
    assert torch.load(out)["w"][0, 0] == 0.5
    options = ("--method", "task_arithmetic", "--base", inputs[0], "-p", "lambda=0.25")
    assert merge(f"{inputs[1]}=1", out, "--force", *options).exit_code == 0
    assert torch.load(out)["w"][0, 0] == 0.25
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"merge_method": "passthrough", "models": [{"model": str(inputs[1])}]}))
    assert merge(config, out, "--force").exit_code == 0
    assert torch.load(out)["w"][0, 0] == 1


def test_refused(inputs: list[Path], tmp_path: Path) -> None:
    assert merge(f"{inputs[0]}=1", inputs[1], tmp_path / "out.pth").exit_code == 2
    assert merge(f"{inputs[0]}=much", tmp_path / "out.pth").exit_code == 2
    assert merge(*inputs, tmp_path / "out.xyz").exit_code == 2
    assert merge(tmp_path / "c.yml", tmp_path / "out.pth", "--method", "ties").exit_code == 2
    assert "needs a base_model" in refused("merge", *inputs, tmp_path / "out.pth", "--method", "ties", code=1)


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def spy(config: Any, *_: object, **__: object) -> None:
        seen.append(config)
        raise sluice.FormatError("seen")

    monkeypatch.setattr(sluice, "merge", spy)
    signed = ["https://h/a.pth?X-Amz-Expires=3600&X-Amz-Signature=SECRET", "https://h/b.pth?Expires=3600"]
    assert merge(*signed, "out.pth").exit_code == 1
    assert merge(*(f"{url}=0.5" for url in signed), "out.pth").exit_code == 1
    assert merge(*(f"{url}=1" for url in signed), "out.pth", "--header", "A:b").exit_code == 1
    assert seen[0] == signed
    assert seen[1] == dict.fromkeys(signed, 0.5)
    assert [(source.url, source.headers) for source in seen[2]] == [(url, {"A": "b"}) for url in signed]
    assert "SECRET" not in refused("merge", "https://h/a.pth?sig=SECRET", "https://h/b.pth?sig=x=0.5", "out.pth")
