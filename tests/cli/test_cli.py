"""The command line, as a user meets it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import sluice
from sluice.cli import main
from sluice.cli.text import printable, printable_paragraph, printable_value
from sluice.cli.views.outline import outline
from sluice.cli.views.render import print_summary
from sluice.cli.views.summary import Summary, summarise, to_json
from sluice.records import Entry, FileIdentity, FileRecord, Index, Opaque, Storage, elements_of

_HOSTILE = "w\x1b[31m[red]:smile:\u202e\nEND"

_MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.fc = nn.Linear(width, 3)
        self.head = nn.Linear(3, 3, bias=False)

def broken():
    raise RuntimeError("no such weights")

def number():
    return 7

constant = 7
"""


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to work in, with a module that builds models. Both are forgotten afterwards."""
    (tmp_path / "cli_model.py").write_text(_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "cli_model", raising=False)
    return tmp_path


def _state_dict() -> dict[str, torch.Tensor]:
    return {
        "fc.weight": torch.arange(12.0).reshape(3, 4),
        "fc.bias": torch.ones(3),
        "head.weight": torch.eye(3),
    }


def _index(**changes: Any) -> Index:
    """Three tensors in two storages, the smaller of which two names share."""
    shared = Entry(elements=elements_of("float32"), shape=(4,), stride=(1,), storage=1)
    fields: dict[str, Any] = {
        "format": "torch-zip",
        "files": (
            FileRecord(path="x.pth", identity=FileIdentity(device=1, inode=2, nbytes=2048, mtime_ns=0, ctime_ns=0)),
        ),
        "storages": (
            Storage(file=0, offset=64, nbytes=1024, key="0"),
            Storage(file=0, offset=1088, nbytes=16, key="1"),
        ),
        "tree": {
            "big": Entry(elements=elements_of("bfloat16"), shape=(2, 256), stride=(256, 1), storage=0, parameter=True),
            "tied": [shared, shared],
            "epoch": 3,
            "loss": float("nan"),
            "args": Opaque(qualified_name="argparse.Namespace"),
        },
        "notes": ("A note.",),
    }
    return Index(**(fields | changes))


def _summary(index: Index | None = None) -> Summary:
    from sluice.entries.tree import flatten

    index = index or _index()
    return summarise("x.pth", None, index, flatten(index.tree, sluice.Limits()))


# --- what inspect says ---------------------------------------------------------------------------------------------


def test_summary_counts_names_and_storages() -> None:
    summary = _summary()
    assert summary.dtypes == {"bfloat16": (1, 1024), "float32": (2, 32)}
    assert summary.tensor_bytes == 1056
    assert summary.stored_bytes == 1040
    assert [(shared.storage, shared.names) for shared in summary.shared] == [(1, ("tied.0", "tied.1"))]
    assert [name for name, _ in summary.largest(1)] == ["big"]


def test_empty_storages_are_not_shared() -> None:
    nothing = Entry(elements=elements_of("float32"), shape=(0,), stride=(1,), storage=0)
    index = _index(storages=(Storage(file=0, offset=0, nbytes=0, key="0"),), tree={"a": nothing, "b": nothing})
    assert _summary(index).shared == ()


def test_json_is_complete() -> None:
    value = json.loads(json.dumps(to_json(_summary(), sluice.Limits())))
    assert value == {
        "path": "x.pth",
        "key": None,
        "format": "torch-zip",
        "files": [{"path": "x.pth", "nbytes": 2048}],
        "metadata": {},
        "tensor_bytes": 1056,
        "stored_bytes": 1040,
        "dtypes": {"bfloat16": {"count": 1, "nbytes": 1024}, "float32": {"count": 2, "nbytes": 32}},
        "tensors": [
            {
                "name": "big",
                "dtype": "bfloat16",
                "layout": "strided",
                "math_bits": [],
                "shape": [2, 256],
                "stride": [256, 1],
                "nbytes": 1024,
                "storages": [0],
                "storage_offset": 0,
                "parameter": True,
                "requires_grad": False,
            },
            *(
                {
                    "name": name,
                    "dtype": "float32",
                    "layout": "strided",
                    "math_bits": [],
                    "shape": [4],
                    "stride": [1],
                    "nbytes": 16,
                    "storages": [1],
                    "storage_offset": 0,
                    "parameter": False,
                    "requires_grad": False,
                }
                for name in ("tied.0", "tied.1")
            ),
        ],
        "storages": [{"key": "0", "file": 0, "nbytes": 1024}, {"key": "1", "file": 0, "nbytes": 16}],
        "state_dicts": [""],
        "shared": [{"storage": 1, "names": ["tied.0", "tied.1"]}],
        "unsupported": [],
        "values": [
            {"name": "epoch", "value": 3},
            {"name": "loss", "text": "nan"},
            {"name": "args", "not_loaded": "argparse.Namespace"},
        ],
        "notes": ["A note."],
    }


def test_json_is_bounded() -> None:
    with pytest.raises(sluice.LimitError, match="too many values"):
        to_json(_summary(_index(tree={"many": list(range(11))})), sluice.Limits(entries=10))


def test_outline_shows_every_kind_of_value() -> None:
    assert list(outline(_index().tree, None)) == [
        "├── big: Parameter bfloat16 [2, 256], 1.00 KiB",
        "├── tied: list of 2",
        "│   ├── [0]: float32 [4], 16 B",
        "│   └── [1]: float32 [4], 16 B",
        "├── epoch: 3",
        "├── loss: nan",
        "└── args: argparse.Namespace (not loaded)",
    ]


def test_outline_is_cut_and_says_so() -> None:
    tree: dict[object, object] = {number: {} for number in range(5)}
    assert list(outline(tree, 2)) == ["├── 0: dict of 0", "├── 1: dict of 0", "└── ... 3 more; --all shows them"]
    assert len(list(outline(tree, 5))) == len(list(outline(tree, None))) == 5
    assert list(outline({"params": [0, 1]}, 2)) == ["└── params: list of 2: [0, 1]"]


def test_outline_of_a_tree_with_countless_places_is_lazy() -> None:
    tree: list[object] = [1]
    for _ in range(60):
        tree = [tree, tree]
    assert next(outline(tree, None)).startswith("├── [0]: list of 2")


# --- what terminals are spared ----------------------------------------------------------------------------------------


@given(st.text())
def test_printable_text_is_printable_and_short_of_nothing(text: str) -> None:
    assert printable(text).isprintable()
    if text.isprintable():
        assert printable(text) == text
    assert printable_paragraph(text).count("\n") == text.count("\n")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=1000),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner),
    )
)
def test_values_are_printable_and_short(value: object) -> None:
    text = printable_value(value)
    assert text.isprintable()
    assert len(text) < 10_000


def test_large_values_are_not_written_in_full() -> None:
    assert printable_value(1 << 100_000).endswith("... (100001 bits)")
    assert len(printable_value(1 << 100_000)) < 120
    assert printable_value(b"x" * 10_000_000).endswith("... (10000000 bytes)")


@pytest.mark.parametrize("everything", [False, True])
def test_hostile_names_do_not_paint_the_terminal(capsys: pytest.CaptureFixture[str], everything: bool) -> None:
    entry = Entry(elements=elements_of("float32"), shape=(4,), stride=(1,), storage=1)
    index = _index(tree={_HOSTILE: entry, f"{_HOSTILE}2": entry}, metadata={_HOSTILE: _HOSTILE}, notes=(_HOSTILE,))
    print_summary(_summary(index), everything=everything)
    for line in outline(index.tree, None):
        print(line)
    text = capsys.readouterr().out
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    assert text.count(printable(_HOSTILE)) >= 8  # names, metadata, note and outline, all in full: "[red]:smile:" too


def test_long_metadata_is_cut_unless_all_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    index = _index(metadata={"config": "x" * 5000})
    print_summary(_summary(index), everything=False)
    assert "... (5,000 characters)" in capsys.readouterr().out
    print_summary(_summary(index), everything=True)
    assert "x" * 5000 in capsys.readouterr().out


# --- sluice inspect ------------------------------------------------------------------------------------------------


def test_inspect_shows_a_torch_file(directory: Path) -> None:
    weight = torch.arange(12.0).reshape(3, 4)
    torch.save({"model": {"w": weight, "tied": weight.t()}, "epoch": 3}, "run.pt")
    result = _run("inspect", "run.pt")
    assert result.exit_code == 0
    for part in ("torch-zip, 1 file", "2 tensors, 96 B, 48 B stored", "model.w", "[3, 4]", "model.w, model.tied"):
        assert part in result.stdout
    assert "epoch: 3" in _run("inspect", "run.pt", "--tree").stdout


def test_inspect_shows_a_safetensors_file(directory: Path) -> None:
    save_file(_state_dict(), "net.safetensors", metadata={"made": "here"})
    value = json.loads(_run("inspect", "net.safetensors", "--json").stdout)
    assert value["format"] == "safetensors"
    assert value["metadata"] == {"made": "here"}
    assert {tensor["name"]: tuple(tensor["shape"]) for tensor in value["tensors"]} == {
        name: tuple(tensor.shape) for name, tensor in _state_dict().items()
    }


def test_inspect_cuts_long_lists_unless_all_is_asked_for(directory: Path) -> None:
    torch.save({f"layer.{number}": torch.ones(number + 1) for number in range(30)}, "many.pth")
    cut = _run("inspect", "many.pth").stdout
    assert "Largest tensors (10 of 30; --all shows all)" in cut
    assert "layer.29" in cut
    assert "layer.3 " not in cut
    everything = _run("inspect", "many.pth", "--all").stdout
    assert all(f"layer.{number} " in everything for number in range(30))


def test_inspect_shows_one_part(directory: Path) -> None:
    torch.save({"model": _state_dict(), "other": torch.ones(2)}, "run.pt")
    value = json.loads(_run("inspect", "run.pt", "--key", "model.fc", "--json").stdout)
    assert [tensor["name"] for tensor in value["tensors"]] == ["weight", "bias"]
    assert value["tensor_bytes"] == value["stored_bytes"] == 60


def test_inspect_names_what_it_does_not_load(directory: Path) -> None:
    torch.save({"args": argparse.Namespace(lr=1), "w": torch.ones(2)}, "run.pt")
    assert "args: argparse.Namespace (not loaded)" in _run("inspect", "run.pt", "--tree").stdout


def test_the_tree_shows_names_that_dots_cannot_tell_apart(directory: Path) -> None:
    torch.save({"a.b": torch.ones(1), "a": {"b": torch.ones(2)}}, "run.pt")
    assert _run("inspect", "run.pt").exit_code == 1
    assert _run("inspect", "run.pt", "--tree").stdout.splitlines()[1:] == [
        "├── a.b: float32 [1], 4 B",
        "└── a: dict of 1",
        "    └── b: float32 [2], 8 B",
    ]


def test_inspect_refuses_options_that_json_would_ignore(directory: Path) -> None:
    assert _run("inspect", "x", "--json", "--all").exit_code == 2
    assert _run("inspect", "x", "--json", "--tree").exit_code == 2


def test_inspect_and_help_import_no_torch(directory: Path) -> None:
    torch.save(_state_dict(), "net.pth")
    save_file(_state_dict(), "net.safetensors")
    code = (
        "import sys\n"
        "from sluice.cli import main\n"
        "main(sys.argv[1:], standalone_mode=False)\n"
        "print([name for name in ('torch', 'numpy', 'safetensors') if name in sys.modules])\n"
    )
    for arguments in (
        ["inspect", "net.pth"],
        ["inspect", "net.safetensors"],
        ["inspect", "net.pth", "--tree"],
        ["inspect", "net.pth", "--json"],
        ["load", "--help"],
    ):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "[]", arguments


# --- sluice load ---------------------------------------------------------------------------------------------------


def test_load_fills_a_model_and_reports(directory: Path) -> None:
    torch.save(_state_dict(), "net.pth")
    result = _run("load", "net.pth", "--model", "cli_model:Net")
    assert result.exit_code == 0, result.stderr
    for part in ("3 tensors, 96 B on cpu", "GB/s", "growth of memory", "predicted", "measured", "total"):
        assert part in result.stdout


def test_load_passes_its_options_on(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"model": _state_dict()}, "run.pt")
    models: list[nn.Module] = []
    load_into = sluice.load_into

    def spy(model: nn.Module, *arguments: Any, **named: Any) -> sluice.LoadReport:
        models.append(model)
        return load_into(model, *arguments, **named)

    monkeypatch.setattr(sluice, "load_into", spy)
    options = ("--dtype", "bfloat16", "--key", "model", "--device", "cpu", "--memory", "1GiB", "--staging", "8MiB")
    result = _run("load", "run.pt", "--model", "cli_model:Net", "--page-cache", "keep", "--json", *options)
    report = json.loads(result.stdout)
    assert report["key"] == "model"
    assert report["cast"] == {"float32->bfloat16": 3}
    assert report["reads"].get("direct", 0) == 0
    assert torch.equal(models[0].get_parameter("fc.weight"), _state_dict()["fc.weight"].bfloat16())


@pytest.mark.parametrize("arguments", ['{"width": 5}', "[5]"])
def test_load_gives_the_factory_its_arguments(directory: Path, arguments: str) -> None:
    torch.save(_state_dict() | {"fc.weight": torch.ones(3, 5)}, "wide.pth")
    assert _run("load", "wide.pth", "--model", "cli_model:Net").exit_code == 1
    assert _run("load", "wide.pth", "--model", "cli_model:Net", "--model-args", arguments).exit_code == 0


def test_load_may_leave_names_out(directory: Path) -> None:
    torch.save(_state_dict() | {"extra": torch.ones(1)}, "net.pth")
    refused = _run("load", "net.pth", "--model", "cli_model:Net")
    assert refused.exit_code == 1
    assert "extra" in refused.stderr
    allowed = _run("load", "net.pth", "--model", "cli_model:Net", "--no-strict")
    assert allowed.exit_code == 0
    assert "unexpected (1): extra" in allowed.stdout


def test_load_can_map_the_file(directory: Path) -> None:
    torch.save(_state_dict(), "net.pth")
    result = _run("load", "net.pth", "--model", "cli_model:Net", "--place", "map")
    assert result.exit_code == 0, result.stderr
    assert "read 0 B; 96 B mapped" in result.stdout


def test_load_can_be_quiet(directory: Path) -> None:
    torch.save(_state_dict(), "net.pth")
    assert _run("load", "net.pth", "--model", "cli_model:Net", "--quiet").output == ""


# --- failures ------------------------------------------------------------------------------------------------------


def _not_a_checkpoint() -> None:
    Path("file").write_text("hello, I am a text file")


def _empty() -> None:
    Path("file").touch()


def _folder() -> None:
    Path("file").mkdir()


def _fifo() -> None:
    os.mkfifo("file")


def _truncated() -> None:
    torch.save(_state_dict(), "file")
    os.truncate("file", Path("file").stat().st_size // 2)


def _missing() -> None:
    pass


@pytest.mark.parametrize("make", [_not_a_checkpoint, _empty, _folder, _fifo, _truncated, _missing])
def test_a_bad_file_is_one_paragraph(directory: Path, make: Callable[[], None]) -> None:
    make()
    for arguments in (["inspect", "file"], ["load", "file", "--model", "cli_model:Net"]):
        result = _run(*arguments)
        assert result.exit_code == 1
        assert result.stdout == ""
        assert result.stderr.startswith("Error: file")
        assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--model", "cli_model", "not of the form"),
        ("--model", ":Net", "not of the form"),
        ("--model", "no_such_module:Net", "no module 'no_such_module'"),
        ("--model", "cli_model.deeper:Net", "no module 'cli_model.deeper'"),
        ("--model", "cli_model:Missing", "no class or function 'Missing'"),
        ("--model", "cli_model:constant", "no class or function 'constant'"),
        ("--model", "cli_model:number", "returned a int"),
        ("--model-args", "{", "not JSON"),
        ("--model-args", "7", "object or array"),
        ("--device", "nonsense", "cannot be used"),
        ("--device", "meta", "holds no weights"),
        ("--dtype", "int8", "is not one of"),
        ("--memory", "lots", "not a size"),
        ("--page-cache", "never", "is not one of"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(directory: Path, option: str, value: str, message: str) -> None:
    torch.save(_state_dict(), "net.pth")
    options = {"--model": "cli_model:Net", option: value}
    result = _run("load", "net.pth", *(word for pair in options.items() for word in pair))
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_dependency", "needs the module 'no_such_dependency', which is not installed"),
        ("1 / 0", "raised ZeroDivisionError"),
    ],
)
def test_a_module_that_fails_is_the_models_fault(directory: Path, source: str, message: str) -> None:
    Path("cli_broken.py").write_text(source)
    result = _run("load", "net.pth", "--model", "cli_broken:Net")
    assert result.exit_code == 1
    assert message in result.stderr


def test_a_factory_that_fails_is_the_models_fault(directory: Path) -> None:
    result = _run("load", "net.pth", "--model", "cli_model:broken")
    assert result.exit_code == 1
    assert "cli_model:broken raised RuntimeError: no such weights" in result.stderr
    assert "Traceback" not in result.stderr
    assert "Traceback" in _run("--debug", "load", "net.pth", "--model", "cli_model:broken").stderr


def test_a_load_over_the_limits_is_exit_code_3(directory: Path) -> None:
    torch.save(_state_dict(), "net.pth")
    result = _run("load", "net.pth", "--model", "cli_model:Net", "--memory", "1KiB")
    assert result.exit_code == 3
    assert "1.00 KiB" in result.stderr


@pytest.mark.parametrize(
    ("error", "exit_code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (sluice.BudgetError("too big"), 3, "too big"),
        (sluice.FormatError("odd\x1b[2Jbytes"), 1, "odd\\x1b[2Jbytes"),
        (ValueError("surprise"), 1, "unexpected ValueError: surprise. This is a defect of sluice"),
        (MemoryError(), 1, "unexpected MemoryError. This"),
    ],
)
def test_every_exception_has_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, exit_code: int, message: str
) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise error

    monkeypatch.setattr(sluice, "open", fail)
    result = _run("inspect", "x")
    assert result.exit_code == exit_code
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    debug = _run("--debug", "inspect", "x")
    assert debug.exit_code == exit_code
    assert "Traceback" in debug.stderr


def test_a_reader_that_goes_away_is_no_error_message(directory: Path) -> None:
    torch.save({f"layer.{number}": torch.ones(1) for number in range(5000)}, "many.pth")
    command = f"{sys.executable} -c 'from sluice.cli import main; main()' inspect many.pth --all | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout == "many.pth\n"
    assert done.stderr == ""


def test_a_terminal_without_unicode_gets_escapes(directory: Path) -> None:
    torch.save({"größe": torch.ones(1)}, "net.pth")
    code = "import sys; from sluice.cli import main; main(sys.argv[1:])"
    for option in ([], ["--all"], ["--tree"]):
        done = subprocess.run(
            [sys.executable, "-c", code, "inspect", "net.pth", *option],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
        )
        assert "gr\\xf6\\xdfe" in done.stdout


def test_version_and_help() -> None:
    assert _run("--version").stdout == f"sluice {sluice.__version__}\n"
    text = _run("--help").stdout
    for code in ("0 ", "1 ", "2 ", "3 ", "130"):
        assert f"  {code}" in text
    assert "Examples:" in _run("inspect", "--help").stdout
    assert "Examples:" in _run("load", "--help").stdout
