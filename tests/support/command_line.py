"""Helpers for tests of the command line."""

from __future__ import annotations

from typing import Any

import torch
from click.testing import CliRunner, Result

from sluice.cli import main
from sluice.records import Entry, FileIdentity, FileRecord, Index, Opaque, Storage, elements_of

#: Source of a module that builds models.
MODEL_MODULE = """
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
    return {
        "fc.weight": torch.arange(12.0).reshape(3, 4),
        "fc.bias": torch.ones(3),
        "head.weight": torch.eye(3),
    }


def index_of_three(**changes: Any) -> Index:
    """Return three tensors in two storages; two names share the smaller one."""
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
