"""``sluice doctor``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import sluice
from support.command_line import run_command


def test_what_a_bug_report_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HTTPS_PROXY", "http://user:password@proxy")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = run_command("doctor", str(tmp_path), "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
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
