"""Reports on terminals, narrow ones too."""

from __future__ import annotations

import io
import sys

import click
import pytest
import torch

from sluice.cli import main
from sluice.cli.views.report import print_sections
from sluice.reports.document import Grid, Strong
from support.command_line import state_dict

_NAME = "transformer.encoder.layers.11.self_attention.w"

_COMMANDS = [
    ("diff", "a.pth", "b.pth"),
    ("plan", "a.pth"),
    ("plan", "net.pth", "--model", "cli_model:Net"),
    ("inspect", "a.pth"),
    ("inspect", "a.pth", "--all"),
    ("verify", "broken.pth"),
    ("load", "net.pth", "--model", "cli_model:Net", "--table"),
]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def files(directory: object) -> None:
    torch.save(state_dict(), "net.pth")
    a = {_NAME: torch.ones(300, 400), "head.weight": torch.ones(3), "long": torch.ones(1)}
    torch.save({"state_dict": a, "hyper_parameters_of_the_run": {}}, "a.pth")
    torch.save(
        {f"{_NAME}s": torch.ones(300, 400), "head.weight": torch.zeros(3).half(), "long": torch.ones(2)}, "b.pth"
    )
    with open("a.pth", "rb") as intact, open("broken.pth", "wb") as broken:
        broken.write(intact.read().replace(torch.ones(64).numpy().tobytes(), bytes(256), 1))


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("command", _COMMANDS, ids=" ".join)
def test_reports_fit_the_terminal(
    files: None, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], columns: int
) -> None:
    screen = _Terminal()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", screen)
    try:
        main(list(command), standalone_mode=False)
    except click.exceptions.Exit:
        assert command[0] in {"diff", "verify"}
    shown = click.unstyle(screen.getvalue())
    assert max(map(len, shown.splitlines())) <= columns


def test_titles_headers_and_the_chosen_row_stand_out_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for screen in (_Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stdout", screen)
        print_sections([Strong("title"), Grid(("method", ">bytes"), [["a", "1"], ["b", "漢字"]], strong=1), "note"])
        lines = screen.getvalue().splitlines()
        words = [click.unstyle(line).split() for line in lines if any(map(str.isalnum, line))]
        assert words == [["title"], ["method", "bytes"], ["a", "1"], ["b", "漢字"], ["note"]]
        bold = [click.unstyle(line).split()[0] for line in lines if "\x1b[1m" in line]
        assert bold == (["title", "method", "b"] if screen.isatty() else [])
