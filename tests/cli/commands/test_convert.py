"""``sluice convert``: options, output and exit codes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch

from support.command_line import printed, refused, run_command

run = partial(run_command, "convert")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    state = {f"h.{i}.weight": torch.randn(40, 10) for i in range(4)} | {"mask": torch.ones(3)}
    state["tied"] = state["h.0.weight"]
    torch.save({"model": state, "step": 7}, tmp_path / "in.pt")
    return tmp_path / "in.pt"


def test_names_dtype_and_report(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    done = run(
        source,
        out,
        *("--dtype", "bfloat16", "--rename", "mask=", "--rename", "tied=a.head"),
        *("--rename-regex", r"h\.(\d+)\.(.*)=blocks.\1.\2"),
    )
    assert done.exit_code == 0, done.output
    assert set(safetensors.torch.load_file(out)) == {"a.head", *(f"blocks.{i}.weight" for i in range(1, 4))}
    assert "wrote 5 of 6 tensors" in done.stdout
    assert f"{out.stat().st_size:,}" in done.stdout
    assert "cast float32 -> bfloat16: 4 tensors" in done.stdout
    assert "stored once (1): blocks.0.weight = a.head" in done.stdout
    assert "note: only 'model' was taken: 0 tensors and 1 other values outside it were left out" in done.stdout


def test_json(source: Path, tmp_path: Path) -> None:
    done = run(source, tmp_path / "model", "--max-shard-size", "3KB", "--json", "--manifest", tmp_path / "m.json")
    report = json.loads(done.stdout)
    assert [Path(file).name for file in report["files"]][-1] == "model.safetensors.index.json"
    assert report["file_bytes"] == [Path(file).stat().st_size for file in report["files"]]
    assert report["tied"] == {"tied": "h.0.weight"}
    assert report["dry_run"] is False
    assert set(json.loads((tmp_path / "m.json").read_text(encoding="utf-8"))["tensors"]) == {
        "mask",
        "tied",
        *(f"h.{i}.weight" for i in range(4)),
    }


def test_a_dry_run_prints_what_would_be_written(source: Path, tmp_path: Path) -> None:
    done = printed("convert", source, tmp_path / "model", "--max-shard-size", "3KB", "--dry-run", "--dtype", "float16")
    assert "a dry run: nothing was written" in done
    assert done.count("model-0000") == 2
    assert "cast float32 -> float16: 5 tensors" in done, done
    assert [path.name for path in tmp_path.iterdir()] == ["in.pt"]


def test_existing_files_are_replaced_only_on_request(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.pt"
    out.write_bytes(b"old")
    assert "already exists; use --force" in refused("convert", source, out, code=1)
    assert f"replaced (1): {out}" in run(source, out, "--force").stdout
    (tmp_path / "m.json").write_bytes(b"old")
    done = refused("convert", source, tmp_path / "new.pt", "--manifest", tmp_path / "m.json", code=1)
    assert "m.json: the file already exists; use --force" in done
    assert not (tmp_path / "new.pt").exists()


def test_a_directory_with_other_files_needs_no_force(source: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    assert run(source, tmp_path / "model").exit_code == 0
    assert run(source, tmp_path / "model").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (("out.xyz",), 2, "no format for the suffix '.xyz': name one with --format\n"),
        (("out.pt", "--format", "safetensors"), 2, "--format 'safetensors' contradicts the suffix '.pt'"),
        (("out.pt", "--format", "torch", "--max-shard-size", "1GB"), 2, "--max-shard-size applies to a directory"),
        (("out.pt", "--rename", "mosk=x"), 1, "matches no tensor"),
        (("out.pt", "--key", "nowhere"), 1, "nothing at key 'nowhere'"),
        (("out.pt", "--memory", "10MiB"), 3, "the conversion needs"),
        (("out.pt", "--manifest", "out.pt"), 2, "a different path"),
    ],
)
def test_mistakes_are_one_paragraph(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int, problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert problem in refused("convert", source, *arguments, code=code)
    assert [path.name for path in tmp_path.iterdir()] == ["in.pt"]


def test_a_missing_library_is_named(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: object) -> None:
        raise ImportError("xxh3_128 needs the library xxhash")

    monkeypatch.setattr("sluice.writing.manifest.new_hash", missing)
    options = ("--manifest", tmp_path / "m.json", "--manifest-hash", "xxh3_128")
    assert "needs the library xxhash" in refused("convert", source, tmp_path / "out.pt", *options, code=1)
