"""Options, output and exit codes of ``sluice convert``, ``doctor``, ``share`` and ``merge``."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch

import sluice
from support.command_line import printed, refused, run_command

convert = partial(run_command, "convert")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    state = {f"h.{i}.weight": torch.randn(40, 10) for i in range(4)} | {"mask": torch.ones(3)}
    state["tied"] = state["h.0.weight"]
    torch.save({"model": state, "step": 7}, tmp_path / "in.pt")
    return tmp_path / "in.pt"


def test_names_dtype_and_report(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    done = convert(
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
    done = convert(source, tmp_path / "model", "--max-shard-size", "3KB", "--json", "--manifest", tmp_path / "m.json")
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


def test_existing_files_are_replaced_only_on_request(source: Path, tmp_path: Path) -> None:
    out, manifest = tmp_path / "out.pt", tmp_path / "m.json"
    for path in (out, manifest):
        path.write_bytes(b"old")
    with_manifest = ("convert", source, tmp_path / "new.pt", "--manifest", manifest)
    for command in (("convert", source, out), with_manifest, ("merge", source, out)):
        for more in ((), ("--dry-run",)):
            assert "already exists; use --force" in refused(*command, *more, code=1)
        printed(*command, "--dry-run", "--force")
    assert "m.json: the file already exists; use --force" in refused(*with_manifest, code=1)
    assert f"replaced (1): {out}" in convert(source, out, "--force").stdout
    assert not (tmp_path / "new.pt").exists()


def test_a_directory_with_other_files_needs_no_force(source: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    assert convert(source, tmp_path / "model").exit_code == 0
    assert convert(source, tmp_path / "model").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (("out.xyz",), 2, "no format for the suffix '.xyz': name one with --format\n"),
        (("out.pt", "--format", "safetensors"), 2, "--format 'safetensors' contradicts the suffix '.pt'"),
        (("out.pt", "--format", "torch", "--max-shard-size", "1GB"), 2, "--max-shard-size applies to a directory"),
        (("out.pt", "--rename", "mosk=x"), 1, "matches no tensor"),
        (("out.pt", "--key", "nowhere"), 1, "nothing at key 'nowhere'"),
        (("out.pt", "--memory", "10MiB"), 3, "choose smaller staging (MemoryLimits(staging=), --staging)"),
        (("out.pt", "--memory", "10MiB", "--dry-run"), 3, "the conversion needs"),
        (("out.pt", "--manifest", "out.pt"), 2, "would replace a file"),
        (("out.pt", "--manifest", "in.pt", "--force", "--dry-run"), 2, "would replace a file"),
    ],
)
def test_mistakes_are_one_paragraph(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int, problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert problem in refused("convert", source, *arguments, code=code)
    assert [path.name for path in tmp_path.iterdir()] == ["in.pt"]


def test_a_missing_library_is_named(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Mock(side_effect=ImportError("xxh3_128 needs the library xxhash"))
    monkeypatch.setattr("sluice.writing.manifest.new_hash", missing)
    options = ("--manifest", tmp_path / "m.json", "--manifest-hash", "xxh3_128")
    for more in ((), ("--dry-run",)):
        assert "needs the library xxhash" in refused("convert", source, tmp_path / "out.pt", *options, *more, code=1)


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
    assert run_command("doctor", str(tmp_path / "missing")).exit_code == 2


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SLUICE_SHARED_DIR", "~/store")
    sluice.save({"w": torch.arange(1000.0)}, tmp_path / "m.safetensors")
    return str(tmp_path / "m.safetensors")


def test_a_copy_is_built_found_listed_and_dropped(path: str) -> None:
    key, *_ = run_command("share", path, "--dtype", "bf16").output.split()
    assert f"{key} found, 2.0" in run_command("share", path, "--dtype", "bf16").output
    with sluice.shared(path, dtype="bf16") as copy:
        assert (copy.key, copy.built) == (key, False)
        assert "in use" in run_command("share", "--list").output
        assert "is in use" in refused("share", "--drop", key, code=1)
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
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"merge_method": "passthrough", "models": [{"model": str(inputs[1])}]}))
    arithmetic = ("--method", "task_arithmetic", "--base", inputs[0], "-p", "lambda=0.25", f"{inputs[1]}=1")
    for arguments, expected in ((inputs, 0.5), (arithmetic, 0.25), ((config,), 1)):
        printed("merge", "--force", *arguments, out)
        assert torch.load(out)["w"][0, 0] == expected


def test_refused(inputs: list[Path], tmp_path: Path) -> None:
    assert merge(f"{inputs[0]}=1", inputs[1], tmp_path / "out.pth").exit_code == 2
    assert merge(f"{inputs[0]}=much", tmp_path / "out.pth").exit_code == 2
    assert merge(*inputs, tmp_path / "out.xyz").exit_code == 2
    assert merge(tmp_path / "c.yml", tmp_path / "out.pth", "--method", "ties").exit_code == 2
    assert "needs a base_model" in refused("merge", *inputs, tmp_path / "out.pth", "--method", "ties", code=1)


def test_paths_with_signs_of_equality(inputs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, path in enumerate(inputs):
        Path(f"lr={number}").mkdir()
        path.rename(f"lr={number}/m.pth")
    for found in (["lr=0/m.pth", "lr=1/m.pth"], ["lr=0/m.pth=1", "lr=1/m.pth=1"]):
        printed("merge", *found, "out.pth", "--force")
        assert torch.load("out.pth")["w"][0, 0] == 0.5
    Path("a=1").symlink_to("lr=1/m.pth")
    printed("merge", "a=1", "lr=0/m.pth", "out.pth", "--force")
    assert "none.pth: the file does not exist" in refused("merge", "lr=0/m.pth", "lr=1/none.pth", "new.pth", code=1)


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Mock(side_effect=sluice.FormatError("seen"))
    monkeypatch.setattr(sluice, "merge", spy)
    with_names = ["https://h/epoch=3-step=100.ckpt", "s3://b/lr=0.1.safetensors"]
    assert merge(*with_names, "out.pth").exit_code == 1
    signed = ["https://h/a.pth?X-Amz-Expires=3600&X-Amz-Signature=SECRET", "https://h/b.pth?Expires=3600"]
    assert merge(*signed, "out.pth").exit_code == 1
    assert merge(*(f"{url}=0.5" for url in signed), "out.pth").exit_code == 1
    assert merge(*(f"{url}=1" for url in signed), "out.pth", "--header", "A:b").exit_code == 1
    *seen, last = (call.args[0] for call in spy.call_args_list)
    assert seen == [with_names, signed, dict.fromkeys(signed, 0.5)]
    assert [(source.url, source.headers) for source in last] == [(url, {"A": "b"}) for url in signed]
    assert "SECRET" not in refused("merge", "https://h/a.pth?sig=SECRET", "https://h/b.pth?sig=x=0.5", "out.pth")


def test_directories_of_adapters_with_signs_of_equality(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lr=0.1").mkdir()
    for given in ("lr=0.1", "lr=0.1=0.5"):
        assert refused("convert", source, "out.pt", "--adapter", given, code=1).startswith("Error: lr=0.1:")
    assert "'much' is not a number" in refused("convert", source, "out.pt", "--adapter", "lr=much")


def test_adapters_have_the_settings_of_requests(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Mock(side_effect=sluice.FormatError("seen"))
    monkeypatch.setattr(sluice, "convert", spy)
    run_command("convert", source, "out.pt", "--adapter", "https://h/a.safetensors=0.5", "--header", "A:b")
    (adapter,) = spy.call_args.kwargs["adapters"]
    assert (adapter.weight, adapter.path.url, adapter.path.headers) == (0.5, "https://h/a.safetensors", {"A": "b"})
