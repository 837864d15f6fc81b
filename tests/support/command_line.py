"""Helpers for tests of the command line."""

from __future__ import annotations

import torch
from click.testing import CliRunner, Result

from sluice.cli import main

#: Source of a module that builds models.
MODEL_MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.fc = nn.Linear(width, 3)
        self.head = nn.Linear(3, 3, bias=False)

def number():
    return 7

constant = 7
"""


def run_command(*arguments: object) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)))


def printed(*arguments: object, code: int = 0) -> str:
    """Return what a command prints that ends with an exit code."""
    result = run_command(*arguments)
    assert result.exit_code == code, result.output
    return result.stdout


def refused(*arguments: object, code: int = 2) -> str:
    """Return the error of a command that ends with an exit code; a traceback is only shown with --debug."""
    result = run_command(*arguments)
    assert result.exit_code == code, result.output
    assert ("Traceback" in result.output) == ("--debug" in arguments)
    return result.stderr


def state_dict() -> dict[str, torch.Tensor]:
    return {"fc.weight": torch.arange(12.0).reshape(3, 4), "fc.bias": torch.ones(3), "head.weight": torch.eye(3)}
