"""Importing sluice is cheap, and each public name is in the module that it reports."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import click
import pytest
import torch
from safetensors.torch import save_file

import sluice
from sluice import _errors
from sluice.cli import main

#: Modules that take longer to import than all others together, and that `import sluice` must not import.
_SLOW = ("torch", "numpy", "rich", "click", "psutil", "safetensors")


def _run(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_public_names_are_those_for_type_checkers_and_hold_every_error() -> None:
    tree = ast.parse(Path(inspect.getfile(sluice)).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {
        (alias.name, statement.module)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert sorted(name for name, _ in imported) == sorted(sluice.__all__)
    for name, module in imported:
        assert getattr(importlib.import_module(str(module)), name) is getattr(sluice, name)
    assert {*sluice.__all__} <= {*dir(sluice)}
    assert {*_errors.__all__} <= {*sluice.__all__}


@pytest.mark.parametrize("module", ["sluice", "sluice.rules", "sluice.measuring", "sluice.testing", "sluice.hf"])
def test_public_names_report_the_module_that_exports_them(module: str) -> None:
    exporter = importlib.import_module(module)
    for name in exporter.__all__:
        thing = getattr(exporter, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert thing.__module__ in {module, "sluice", "sluice.measuring"}, name  # the first module that exports it


@pytest.mark.parametrize("collecting", [True, False])
def test_the_first_use_of_a_name_leaves_the_garbage_collector_as_it_was(collecting: bool) -> None:
    code = f"import gc, sluice; gc.enable() if {collecting} else gc.disable(); sluice.plan; print(gc.isenabled())"
    assert _run(code).strip() == str(collecting)


def test_import_is_light() -> None:
    code = "import sys, sluice; print([name for name in sys.argv[1:] if name in sys.modules])"
    assert _run(code, *_SLOW).strip() == "[]"


#: Modules of sluice that neither a load of one plain file nor ``sluice inspect`` needs.
_RARE = (
    "sluice.checkpoint.merging",
    "sluice.checkpoint.several_files",
    "sluice.checkpoint.survey",
    "sluice.formats.divided",
    "sluice.formats.torch_save.legacy_format",
    "sluice.loading.optimizer_job",
    "sluice.measuring",
    "sluice.reports.plan",
    "sluice.writing",
    "click",
    "rich",
)

#: The format that a file does not have.
_OTHER_FORMAT = {".pth": "sluice.formats.safetensors", ".safetensors": "sluice.formats.pickles"}


def _plain_file(path: Path) -> Path:
    weights = {"weight": torch.ones(3, 2), "bias": torch.ones(3)}
    save_file(weights, path) if path.suffix == ".safetensors" else torch.save(weights, path)
    return path


@pytest.mark.parametrize("suffix", _OTHER_FORMAT)
def test_a_load_of_a_plain_file_imports_only_what_it_needs(suffix: str, tmp_path: Path) -> None:
    code = """if True:
        import sys, torch
        before = set(sys.modules)
        import sluice
        print(sluice.load_into(torch.nn.Linear(2, 3), sys.argv[1]).loaded)
        print([name for name in sys.argv[2:] if name in sys.modules and name not in before])
    """
    shown = _run(code, str(_plain_file(tmp_path / f"w{suffix}")), *_RARE, _OTHER_FORMAT[suffix])
    assert shown.split("\n") == ["2", "[]", ""]


def test_a_local_save_imports_nothing_that_reads_remote_files(tmp_path: Path) -> None:
    code = """if True:
        import sys, torch, sluice
        sluice.save({"w": torch.ones(3)}, sys.argv[1])
        print([name for name in sys.modules if name in sys.argv[2:]])
    """
    remote = [f"sluice.sources.remote.{name}" for name in ("stores", "file", "requests", "retries", "directory")]
    assert _run(code, str(tmp_path / "a.pth"), *remote) == "[]\n"


@pytest.mark.parametrize("suffix", _OTHER_FORMAT)
def test_inspect_imports_only_what_it_needs(suffix: str, tmp_path: Path) -> None:
    code = """if True:
        import sys
        from sluice.cli import main
        for options in ["--json"], ["--tree"], []:
            main(["inspect", sys.argv[1], *options], standalone_mode=False)
        print([name for name in sys.argv[2:] if name in sys.modules])
    """
    unneeded = {"torch", "numpy", "psutil", *_RARE, *_commands(), _OTHER_FORMAT[suffix]} - {"click"}
    shown = _run(code, str(_plain_file(tmp_path / f"w{suffix}")), *(unneeded - {"sluice.cli.commands.inspect"}))
    assert "2 tensors, 36 B" in shown
    assert shown.split("\n")[-2] == "[]"


def _commands() -> list[str]:
    return [f"sluice.cli.commands.{name}" for name in main.list_commands(click.Context(main))]


def test_help_and_completion_have_every_command_without_importing_it() -> None:
    code = """if True:
        import sys
        from sluice.cli import main
        main(["--help"], standalone_mode=False)
        import click
        print([item.value for item in main.shell_complete(click.Context(main), "")])
        print([name for name in sys.modules if name.startswith("sluice.cli.commands.")])
    """
    *shown, completed, imported, _ = _run(code).split("\n")
    names = [name.rpartition(".")[2] for name in _commands()]
    listed = [line.split()[0] for line in shown[shown.index("Commands:") + 1 :] if line[2:3].strip()]
    assert (listed, imported) == (names, "[]")
    assert completed == str(names)


def test_the_summaries_of_commands_are_the_first_sentences_of_their_help() -> None:
    folder = Path(inspect.getfile(importlib.import_module("sluice.cli.commands"))).parent
    context = click.Context(main)
    summaries = {item.value: item.help for item in main.shell_complete(context, "") if item.help}
    defined = [re.findall(r'@click\.command\("(\w+)"\)', path.read_text()) for path in folder.glob("*.py")]
    assert sorted(summaries) == sorted(chain(*defined))
    for name, summary in summaries.items():
        command = main.get_command(context, name)
        assert command is not None
        assert command.help is not None
        assert " ".join(command.help.split()).startswith(str(summary)), name
        assert str(summary).endswith(".")
