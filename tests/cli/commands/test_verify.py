"""``sluice verify`` and ``sluice diff``: output and exit codes in scripts."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

import sluice
from support.command_line import printed, refused, run_command

run = partial(run_command, "verify")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    sluice.save({"w": torch.arange(5.0), "n": torch.tensor([float("nan")])}, tmp_path / "f.safetensors")
    return tmp_path / "f.safetensors"


def test_0_when_all_is_well(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    done = printed("verify", checkpoint, "--write-manifest", "~/m.json", "--nan")
    assert "2 tensors" in done
    assert "manifest written" in done
    assert "not finite" in done
    assert done.splitlines()[-2] == "ok"
    assert run(checkpoint, "--manifest", tmp_path / "m.json", "--quiet").stdout == ""
    found = json.loads(run(checkpoint, "--manifest", tmp_path / "m.json", "--json", "--nan").stdout)
    assert found["ok"] is True
    assert found["non_finite"] == {"n": {"nan": 1, "inf": 0}}
    assert found["hashes"]["w"]["shape"] == [5]


def test_1_when_something_is_damaged(checkpoint: Path, tmp_path: Path) -> None:
    run(checkpoint, "--write-manifest", tmp_path / "m.json", "--hash", "xxh3_128")
    content = checkpoint.read_bytes()
    checkpoint.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    done = printed("verify", checkpoint, "--manifest", tmp_path / "m.json", code=1)
    assert "the xxh3_128 of its elements differs" in done
    assert "1 problem" in done
    answer = printed("verify", checkpoint, "--manifest", tmp_path / "m.json", "--json", code=1)
    assert [one["kind"] for one in json.loads(answer)["problems"]] == ["hash"]
    assert run(checkpoint, "--manifest", tmp_path / "m.json", "--quiet").exit_code == 1
    checkpoint.write_bytes(content[:-4])
    printed("verify", checkpoint, "--write-manifest", tmp_path / "n.json", code=1)
    assert not (tmp_path / "n.json").exists()


@pytest.mark.parametrize(
    ("content", "verdict"),
    [
        (b"a text about weights\n" * 9, "not a checkpoint that sluice reads"),
        (b"\xff" * 100, "not a checkpoint that sluice reads"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "not a checkpoint that sluice reads"),
        (b"<!DOCTYPE html><html></html>", "not a checkpoint that sluice reads"),
        (bytes(5000), "incomplete"),
        (b"", "damaged"),
        (None, "not a checkpoint that sluice reads"),  # a folder
    ],
)
def test_only_what_was_a_checkpoint_is_damaged(tmp_path: Path, content: bytes | None, verdict: str) -> None:
    path = tmp_path / "x.bin"
    path.mkdir() if content is None else path.write_bytes(content)
    assert printed("verify", path, code=1).splitlines()[-1] == f"{verdict}: 1 problem"


def test_other_tensors_than_in_the_manifest_are_not_damage(checkpoint: Path, tmp_path: Path) -> None:
    run(checkpoint, "--write-manifest", tmp_path / "m.json")
    sluice.save({"w": torch.arange(6.0), "n": torch.tensor([2.0])}, tmp_path / "g.safetensors")
    done = run(tmp_path / "g.safetensors", "--manifest", tmp_path / "m.json")
    assert done.stdout.splitlines()[-1] == "damaged: 2 problems"  # the hash of n differs
    sluice.save({"w": torch.arange(6.0), "n": torch.tensor([float("nan")])}, tmp_path / "h.safetensors")
    done = run(tmp_path / "h.safetensors", "--manifest", tmp_path / "m.json")
    assert done.stdout.splitlines()[-1] == "differs from the manifest: 1 problem"


def test_strict_counts_warnings(tmp_path: Path) -> None:
    sluice.save({"a": torch.ones(300), "b": torch.ones(300)}, tmp_path / "c", max_shard_size=1500)
    index = tmp_path / "c" / "model.safetensors.index.json"
    content = json.loads(index.read_text(encoding="utf-8"))
    content["metadata"]["total_size"] = 1
    index.write_text(json.dumps(content), encoding="utf-8")
    done = printed("verify", tmp_path / "c")
    assert "warning: The index declares a total size of 1 bytes" in " ".join(done.split())
    strict = printed("verify", tmp_path / "c", "--strict", "--json", code=1)
    assert json.loads(strict)["ok"] is True
    assert len(json.loads(strict)["warnings"]) == 1
    content["weight_map"]["gone"] = content["weight_map"]["a"]
    index.write_text(json.dumps(content), encoding="utf-8")
    assert run(tmp_path / "c").exit_code == 1


def test_2_when_there_is_no_answer(checkpoint: Path, tmp_path: Path) -> None:
    assert "does not exist" in refused("verify", tmp_path / "nowhere")
    assert run(checkpoint, "--manifest", tmp_path / "nowhere").exit_code == 2
    assert run(checkpoint, "--manifest", "a", "--write-manifest", "b").exit_code == 2
    assert run(checkpoint, "--hash", "sha256").exit_code == 2
    (tmp_path / "m.json").write_text("mine", encoding="utf-8")
    kept = refused("verify", checkpoint, "--write-manifest", tmp_path / "m.json")
    assert "overwrite" in kept or "--force" in kept
    assert (tmp_path / "m.json").read_text(encoding="utf-8") == "mine"
    missed = refused("verify", checkpoint, "--write-manifest", tmp_path / "nowhere" / "m.json")
    assert "the directory does not exist" in missed
    assert "a different path" in refused("verify", checkpoint, "--write-manifest", checkpoint, "--force")
    assert run(checkpoint, "--write-manifest", tmp_path / "m.json", "--force").exit_code == 0


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "model.safetensors.index.json"])
def test_a_manifest_replaces_no_file_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    sluice.save({"a": torch.ones(300), "b": torch.ones(300)}, tmp_path / "c", max_shard_size=1500)
    before = (tmp_path / "c" / name).read_bytes()
    done = refused("verify", tmp_path / "c", "--write-manifest", tmp_path / "c" / name, "--force")
    assert "would replace a file of a checkpoint" in done
    assert (tmp_path / "c" / name).read_bytes() == before
    printed("verify", tmp_path / "c", "--write-manifest", tmp_path / "c" / "m.json")


diff = partial(run_command, "diff")


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    state = {"w": torch.arange(5.0), "n\x1b[31m": torch.tensor([1.0])}
    sluice.save(state, tmp_path / "a.pt")
    sluice.save(state, tmp_path / "b.safetensors")
    return tmp_path / "a.pt", tmp_path / "b.safetensors"


def test_diff_0_when_they_are_the_same(paths: tuple[Path, Path]) -> None:
    done = printed("diff", *paths)
    assert done.startswith("compared 2 of 2 tensors of a with 2 of 2 tensors of b\n")
    assert "2 common names" in done
    assert done.rstrip().endswith("the same")
    assert diff(*paths, "--quiet").stdout == ""
    assert json.loads(diff(*paths, "--json").stdout)["same"] is True


def test_diff_1_when_they_differ(paths: tuple[Path, Path], tmp_path: Path) -> None:
    sluice.save({"w": torch.arange(5.0) + 0.25, "x": torch.tensor([float("inf")])}, tmp_path / "c.pt")
    done = printed("diff", paths[0], tmp_path / "c.pt", code=1)
    assert "5 of 5" in done
    assert "only in a" in done
    assert "similar" not in done  # 'n\x1b[31m' and 'x'
    assert "n\\x1b[31m" in done
    assert "\x1b" not in done
    assert "3 tensors differ" in done
    found = json.loads(diff(paths[0], tmp_path / "c.pt", "--json").stdout)["differences"]
    assert {one["name"]: one["kinds"] for one in found} == {
        "w": ["values"],
        "n\x1b[31m": ["only_a"],
        "x": ["only_b"],
    }
    sluice.save({"w": torch.arange(5.0) + 0.25, "n\x1b[31m": torch.tensor([1.0])}, tmp_path / "d.pt")
    assert diff(paths[0], tmp_path / "d.pt", "--atol", "0.25", "--quiet").exit_code == 0
    assert diff(paths[0], tmp_path / "d.pt", "--atol", "0.2", "--quiet").exit_code == 1


def test_infinite_distances_are_json_too(tmp_path: Path) -> None:
    sluice.save({"x": torch.tensor([1.0])}, tmp_path / "a.pt")
    sluice.save({"x": torch.tensor([float("inf")])}, tmp_path / "b.pt")
    text = diff(tmp_path / "a.pt", tmp_path / "b.pt", "--json").stdout
    assert json.loads(text, parse_constant=pytest.fail)["differences"][0]["max_abs"] == "inf"


def test_diff_2_when_there_is_no_answer(
    paths: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "does not exist" in refused("diff", paths[0], tmp_path / "nowhere")
    (tmp_path / "damaged.pt").write_bytes(paths[0].read_bytes()[:-30])
    assert diff(paths[0], tmp_path / "damaged.pt").exit_code == 2
    assert diff(paths[0], paths[1], "--rtol", "-1").exit_code == 2
    assert "must not be negative: rtol=nan" in refused("diff", *paths, "--rtol", "nan")
    assert diff(paths[0]).exit_code == 2
    assert diff(*paths, "--key-a", "nothing").exit_code == 2
    monkeypatch.setattr(sluice, "diff", {}.__getitem__)
    assert "This is a defect of sluice" in refused("diff", *paths)


def test_parts(paths: tuple[Path, Path], tmp_path: Path) -> None:
    torch.save({"model": torch.load(paths[0], weights_only=True), "epoch": 1}, tmp_path / "diff.pt")
    assert diff(tmp_path / "diff.pt", paths[1], "--key-a", "model").exit_code == 0
    assert diff(paths[1], tmp_path / "diff.pt", "--key-b", "model").exit_code == 0
    assert diff(tmp_path / "diff.pt", paths[1], "--key", "model").exit_code == 0
    assert diff(paths[1], tmp_path / "diff.pt", "--key-b", "").exit_code == 1


def test_the_option_that_chooses_a_part_is_named(paths: tuple[Path, Path], tmp_path: Path) -> None:
    state = torch.load(paths[0], weights_only=True)
    torch.save({"model": state, "my ema": dict(state)}, tmp_path / "two.pt")
    done = refused("diff", paths[1], tmp_path / "two.pt")
    assert "other_key='model' (--key-b model): 2 tensors" in done
    assert "other_key='my ema' (--key-b 'my ema'): 2 tensors" in done
    assert "key='model' (--key-a model): 2 tensors" in diff(tmp_path / "two.pt", paths[1]).stderr


def test_a_patch_is_written_once(paths: tuple[Path, Path], tmp_path: Path) -> None:
    printed("diff", *paths, "--patch", tmp_path / "step_2.safetensors", "--sparse")
    assert sluice.diff(sluice.Patched(paths[0], tmp_path / "step_2.safetensors"), paths[1]).same
    assert "already exists" in refused("diff", *paths, "--patch", tmp_path / "step_2.safetensors", "--sparse")
    assert diff(*paths, "--sparse").exit_code == 2
