"""Files in fsspec's file system in memory, which needs no server and no thread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest


@pytest.fixture
def filesystem() -> Iterator[Any]:
    """Return the file system in memory, empty before and after."""
    memory = fsspec.filesystem("memory")
    _clear(memory)
    yield memory
    _clear(memory)


def put(memory: Any, path: Path, where: str) -> str:
    """Copy a file or a directory into the file system in memory; return its URL."""
    for file in [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]:
        inner = file.relative_to(path).as_posix()
        memory.pipe_file(where if path.is_file() else f"{where}/{inner}", file.read_bytes())
    return f"memory://{where.lstrip('/')}"


def _clear(memory: Any) -> None:
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
