"""Options that several commands share: dtypes, sizes, renames, rules, encodings, several files, and those for URLs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors.torch import save, save_file

from support import old_files
from support.command_line import printed, refused, run_command, state_dict
from support.range_server import RangeServer

_MODEL = ("--model", "cli_model:Net")

_RULES = """
from sluice import rules
old = [rules.rename("old.**", "**")]
def made(): return old
def fails(): raise OSError("no such list")
number = 3
"""


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", "torch.bfloat16", "BF16"])
def test_a_dtype_on_every_command(directory: Path, dtype: str) -> None:
    for command in (["load", "net.pth", *_MODEL], ["convert", "net.pth", "new.pth", "--force"]):
        report = json.loads(run_command(*command, "--dtype", dtype, "--json").stdout)
        assert 3 in {**report.get("cast", {}), **report.get("casts", {})}.values()
    plan = json.loads(run_command("plan", "net.pth", "--dtype", dtype, "--json").stdout)
    assert plan["final_bytes"] == 48


@pytest.mark.parametrize("command", [["load", "x", *_MODEL], ["plan", "x"], ["convert", "x", "y.pth"], ["bench"]])
def test_a_wrong_dtype_lists_the_names_on_every_command(directory: Path, command: list[str]) -> None:
    result = refused(*command, "--dtype", "bf61")
    assert "'bf61' is not one of" in result
    assert "bfloat16 (bf16, BF16)" in result


@pytest.mark.parametrize(
    "options",
    [
        ("--rename", "old.**=**"),
        ("--rename-regex", r"old\.(.*)=\1"),
        ("--rules", "cli_rules:old"),
        ("--rules", "cli_rules:made"),
        ("--rename", "old.fc.*=fc.*", "--rules", "cli_rules:old"),
    ],
)
def test_names_are_changed_on_load_plan_and_convert(directory: Path, options: tuple[str, ...]) -> None:
    (directory / "cli_rules.py").write_text(_RULES)
    torch.save({f"old.{name}": tensor for name, tensor in state_dict().items()}, "net.pth")
    assert run_command("load", "net.pth", *_MODEL, *options).exit_code == 0
    assert run_command("plan", "net.pth", *_MODEL, *options).exit_code == 0
    assert run_command("plan", "net.pth", *options).exit_code == 0
    assert run_command("convert", "net.pth", "new.pth", "--force", *options).exit_code == 0
    assert torch.load("new.pth").keys() == state_dict().keys()


@pytest.mark.parametrize(
    ("option", "value", "exit_code", "message"),
    [
        ("--model", "cli_model", 2, "not of the form"),
        ("--model", ":Net", 2, "not of the form"),
        ("--model", "no_such_module:Net", 2, "no module 'no_such_module'"),
        ("--model", "cli_model.deeper:Net", 2, "no module 'cli_model.deeper'"),
        ("--model", "cli_model:Missing", 2, "cli_model has no 'Missing'"),
        ("--model", "cli_model:Nett", 2, "did you mean cli_model:Net?"),
        ("--model", "torch.nn:Linera", 2, "did you mean torch.nn:Linear?"),
        ("--model", "cli_model:constant", 2, "cli_model:constant is a int, not a class or function"),
        ("--model", "cli_model:number", 2, "returned a int"),
        ("--model-args", "{", 2, "not JSON"),
        ("--model-args", "7", 2, "object or array"),
        ("--model-args", "[" * 100_000, 2, "not JSON"),
        ("--device", "nonsense", 2, "cannot be used"),
        ("--device", "meta", 2, "cannot hold weights"),
        ("--dtype", "int8", 2, "is not one of"),
        ("--memory", "lots", 2, "2GiB or 2G (2 * 1024**3 bytes), 2GB (2 * 1000**3 bytes)"),
        ("--memory", "9" * 400 + ".5G", 2, "not a size"),
        ("--memory", "1KiB", 3, "1.00 KiB"),
        ("--page-cache", "never", 2, "is not one of"),
        ("--rename", "fc", 2, "'fc' is not of the form OLD=NEW"),
        ("--rename", "**=fc.*", 2, "repeat the wildcards"),
        ("--rename-regex", "(=x", 2, "unterminated subpattern"),
        ("--rename", "none.*=x.*", 1, "matches no tensor"),
        ("--rules", "cli_rules:number", 2, "is not a list of rules"),
        ("--rules", "cli_rules:mode", 2, "cli_rules has no 'mode'; did you mean cli_rules:made?"),
        ("--rules", "cli_rules:fails", 1, "raised OSError: no such list"),
        ("--rules", "no_such_rules:x", 2, "no module 'no_such_rules'"),
        ("--model", "cli_model.py:Net", 2, "is a path; write the module: cli_model:Net"),
        ("--model", "cli_model.Net", 2, "write cli_model:Net"),
        ("--device", "gpu", 2, "torch has no such kind of device; this machine has cpu"),
    ],
)
def test_mistakes(directory: Path, option: str, value: str, exit_code: int, message: str) -> None:
    (directory / "cli_rules.py").write_text(_RULES)
    options = {"--model": "cli_model:Net", option: value}
    assert message in refused("load", "net.pth", *(word for pair in options.items() for word in pair), code=exit_code)


def test_several_files_are_one_checkpoint(directory: Path) -> None:
    for name, tensor in state_dict().items():
        save_file({name: tensor}, f"{name}.safetensors")
    files = [f"{name}.safetensors" for name in state_dict()]
    for command in (["load", *files, *_MODEL], ["plan", *files], ["inspect", *files], ["verify", *files]):
        assert "fc.weight.safetensors and 2 more files" in printed(*command)
    assert "twice" in refused("inspect", files[0], files[0])


#: A file of Python 2 whose names and text are in latin1.
FILE = str(Path(old_files.__path__[0]) / "torch-1.0.0-latin-1.pth")


@pytest.mark.parametrize(
    "command",
    [
        ["inspect", FILE],
        ["verify", FILE],
        ["diff", FILE, FILE],
        ["convert", FILE, "new.safetensors", "--key", "café"],
        ["plan", FILE],
        ["load", FILE, "--model", "accented:Net"],
    ],
    ids=lambda command: command[0],
)
def test_every_command_reads_text_in_an_encoding(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    source = "import torch\n\n\ndef Net():\n    leaf = torch.nn.LayerNorm(2, bias=False)\n"
    source += "    return torch.nn.ModuleDict({'café': leaf})\n"
    Path("accented.py").write_text(source, encoding="utf-8")
    refused = run_command(*command)
    assert refused.exit_code != 0
    assert "--encoding" in refused.output or "encoding='latin1'" in refused.output
    printed(*command, "--encoding", "latin1")
    if command[0] == "convert":
        assert torch.equal(safetensors.torch.load_file("new.safetensors")["weight"], torch.ones(2))


def test_an_unknown_encoding_is_a_usage_error() -> None:
    assert "'utf-99' is not an encoding of text" in refused("inspect", FILE, "--encoding", "utf-99")


pytest.importorskip("urllib3", reason="the extra 'remote' is not installed")


@pytest.mark.parametrize("command", ["inspect", "plan", "verify", "diff", "convert"])
def test_settings_reach_the_server(tmp_path: Path, command: str) -> None:
    content = save({"w": torch.ones(4)})
    with RangeServer({"/m.safetensors": content}) as server:
        local = tmp_path / "m.safetensors"
        local.write_bytes(content)
        more = {"diff": [str(local)], "convert": [str(tmp_path / "copy.safetensors")]}.get(command, [])
        headers = ("--header", "X-Team: a", "--header", "Authorization:Bearer b")
        others = ("--connections", "2", "--timeout", "9", "--verify", "no")
        printed(command, server.url("/m.safetensors"), *more, *headers, *others)
        assert {request.headers["X-Team"] for request in server.requests} == {"a"}
        assert {request.headers["Authorization"] for request in server.requests} == {"Bearer b"}


@pytest.mark.parametrize("option", [["--header", "secret"], ["--timeout", "0"], ["--connections", "0"]])
def test_wrong_values_are_refused(option: list[str]) -> None:
    assert "secret" not in refused("inspect", "http://127.0.0.1:1/m", *option)


@pytest.mark.parametrize(("size", "problem"), [("1GiB", "\nError: --cache-bytes needs"), ("much", "not a size")])
def test_the_size_of_a_cache_is_one_and_needs_a_directory(size: str, problem: str) -> None:
    assert problem in refused("verify", "https://host/m", "--cache-bytes", size)


@pytest.mark.parametrize("command", ["inspect", "verify", "plan", "diff", "convert"])
def test_commands_read_what_was_cached(tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content, local = save({"w": torch.arange(100_000.0)}), str(tmp_path / "m.safetensors")
    Path(local).write_bytes(content)
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path / "cache"))
    more = {"diff": [local], "convert": [str(tmp_path / "f.pth")]}
    with RangeServer({"/m.safetensors": content}) as server:
        url = server.url("/m.safetensors")
        assert run_command("verify", url).exit_code == 0
        server.requests.clear()
        printed(command, url, *more.get(command, []))
        assert len(server.requests) == 1
        if command == "diff":
            assert run_command(command, local, url).exit_code == 0
            assert len(server.requests) == 2
