"""``sluice verify``: output and exit codes in scripts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import sluice
from sluice.cli import main


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["verify", *map(str, arguments)])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    sluice.save({"w": torch.arange(5.0), "n": torch.tensor([float("nan")])}, tmp_path / "f.safetensors")
    return tmp_path / "f.safetensors"


def spoil(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_0_when_all_is_well(checkpoint: Path, tmp_path: Path) -> None:
    done = run(checkpoint, "--write-manifest", tmp_path / "m.json", "--nan")
    assert done.exit_code == 0
    assert "2 tensors" in done.stdout
    assert "manifest written" in done.stdout
    assert "not finite" in done.stdout
    assert done.stdout.splitlines()[-2] == "ok"
    assert run(checkpoint, "--manifest", tmp_path / "m.json", "--quiet").stdout == ""
    found = json.loads(run(checkpoint, "--manifest", tmp_path / "m.json", "--json", "--nan").stdout)
    assert found["ok"] is True
    assert found["non_finite"] == {"n": {"nan": 1, "inf": 0}}
    assert found["hashes"]["w"]["shape"] == [5]


def test_1_when_something_is_damaged(checkpoint: Path, tmp_path: Path) -> None:
    run(checkpoint, "--write-manifest", tmp_path / "m.json", "--hash", "xxh3_128")
    spoil(checkpoint)
    done = run(checkpoint, "--manifest", tmp_path / "m.json")
    assert done.exit_code == 1
    assert "the xxh3_128 of its elements differs" in done.stdout
    assert "1 problem" in done.stdout
    answer = run(checkpoint, "--manifest", tmp_path / "m.json", "--json")
    assert answer.exit_code == 1
    assert [one["kind"] for one in json.loads(answer.stdout)["problems"]] == ["hash"]
    assert run(checkpoint, "--manifest", tmp_path / "m.json", "--quiet").exit_code == 1
    checkpoint.write_bytes(checkpoint.read_bytes()[:-4])
    damaged = run(checkpoint, "--write-manifest", tmp_path / "n.json")
    assert damaged.exit_code == 1
    assert not (tmp_path / "n.json").exists()


@pytest.mark.parametrize(
    ("content", "verdict"),
    [
        (b"a text about weights\n" * 9, "not a checkpoint that sluice reads: 1 problem"),
        (b"\xff" * 100, "not a checkpoint that sluice reads: 1 problem"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "not a checkpoint that sluice reads: 1 problem"),
        (b"<!DOCTYPE html><html></html>", "not a checkpoint that sluice reads: 1 problem"),
        (bytes(5000), "incomplete: 1 problem"),
        (b"", "damaged: 1 problem"),
    ],
)
def test_only_what_was_a_checkpoint_is_damaged(tmp_path: Path, content: bytes, verdict: str) -> None:
    (tmp_path / "x.bin").write_bytes(content)
    done = run(tmp_path / "x.bin")
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (1, verdict)


def test_other_tensors_than_in_the_manifest_are_not_damage(checkpoint: Path, tmp_path: Path) -> None:
    run(checkpoint, "--write-manifest", tmp_path / "m.json")
    sluice.save({"w": torch.arange(6.0), "n": torch.tensor([2.0])}, tmp_path / "g.safetensors")
    done = run(tmp_path / "g.safetensors", "--manifest", tmp_path / "m.json")
    assert done.stdout.splitlines()[-1] == "damaged: 2 problems"  # the hash of n differs
    sluice.save({"w": torch.arange(6.0), "n": torch.tensor([float("nan")])}, tmp_path / "h.safetensors")
    done = run(tmp_path / "h.safetensors", "--manifest", tmp_path / "m.json")
    assert done.stdout.splitlines()[-1] == "differs from the manifest: 1 problem"
    (tmp_path / "empty").mkdir()
    assert run(tmp_path / "empty").stdout.splitlines()[-1] == "not a checkpoint that sluice reads: 1 problem"


def test_strict_counts_warnings(tmp_path: Path) -> None:
    sluice.save({"a": torch.ones(300), "b": torch.ones(300)}, tmp_path / "c", max_shard_size=1500)
    index = tmp_path / "c" / "model.safetensors.index.json"
    content = json.loads(index.read_text(encoding="utf-8"))
    content["metadata"]["total_size"] = 1
    index.write_text(json.dumps(content), encoding="utf-8")
    done = run(tmp_path / "c")
    assert done.exit_code == 0
    assert "warning: The index declares a total size of 1 bytes" in " ".join(done.stdout.split())
    strict = run(tmp_path / "c", "--strict", "--json")
    assert strict.exit_code == 1
    assert json.loads(strict.stdout)["ok"] is True
    assert len(json.loads(strict.stdout)["warnings"]) == 1
    content["weight_map"]["gone"] = content["weight_map"]["a"]
    index.write_text(json.dumps(content), encoding="utf-8")
    assert run(tmp_path / "c").exit_code == 1


def test_2_when_there_is_no_answer(checkpoint: Path, tmp_path: Path) -> None:
    missing = run(tmp_path / "nowhere")
    assert missing.exit_code == 2
    assert "does not exist" in missing.stderr
    assert run(checkpoint, "--manifest", tmp_path / "nowhere").exit_code == 2
    assert run(checkpoint, "--manifest", "a", "--write-manifest", "b").exit_code == 2
    assert run(checkpoint, "--hash", "sha256").exit_code == 2
    (tmp_path / "m.json").write_text("mine", encoding="utf-8")
    kept = run(checkpoint, "--write-manifest", tmp_path / "m.json")
    assert kept.exit_code == 2
    assert "overwrite" in kept.stderr or "--force" in kept.stderr
    assert (tmp_path / "m.json").read_text(encoding="utf-8") == "mine"
    assert run(checkpoint, "--write-manifest", tmp_path / "m.json", "--force").exit_code == 0
