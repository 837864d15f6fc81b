"""Draw the layers of the package for docs/design.md, from the import contract and the heads of the packages.

``python tools/layers_picture.py`` prints the picture; ``--write`` puts it between the markers of docs/design.md.
tests/contracts/test_package.py fails if the page and the contract differ.
"""

from __future__ import annotations

import argparse
import ast
import sys
import textwrap
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "design.md"
BEGIN = "<!-- layers: written by tools/layers_picture.py -->"
END = "<!-- end of layers -->"

_PACKAGE = ROOT / "src" / "sluice"
_WIDTH = 120


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the picture, or write it into the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="replace the picture in docs/design.md")
    if parser.parse_args(arguments).write:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(page.replace(drawn_block(page), expected_block()), encoding="utf-8")
    else:
        print(picture())
    return 0


def layers() -> list[list[str]]:
    """Return the rows of the layers contract, top first; each row is the names of its modules."""
    [contract] = [contract for contract in _contracts() if contract["type"] == "layers"]
    return [[name.strip() for name in row.split("|")] for row in contract["layers"]]


def torch_free() -> set[str]:
    """Return the packages that must not import torch, without the prefix of the root package."""
    [contract] = [contract for contract in _contracts() if contract.get("forbidden_modules") == ["torch"]]
    return {name.removeprefix("sluice.") for name in contract["source_modules"]}


def head(name: str) -> str:
    """Return the first line of the docstring of a package or module directly below the root package."""
    path = _PACKAGE / name / "__init__.py"
    path = path if path.exists() else _PACKAGE / f"{name}.py"
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def picture() -> str:
    """Return one line for each module: the number of its row, its name, ``*`` if it is torch-free, and its head."""
    rows = layers()
    without_torch = torch_free()
    name_width = max(len(name) for row in rows for name in row) + 2
    lines = []
    for number, row in enumerate(rows, start=1):
        for position, name in enumerate(row):
            mark = "*" if name in without_torch else " "
            start = f"{'' if position else number:>2}  {name + mark:<{name_width}}"
            lines += textwrap.wrap(
                head(name).replace("``", ""), _WIDTH, initial_indent=start, subsequent_indent=" " * len(start)
            )
    return "\n".join(lines)


def expected_block() -> str:
    """Return the picture as it should be in the page, between its markers."""
    return f"{BEGIN}\n\n```text\n{picture()}\n```\n\n{END}"


def drawn_block(page: str) -> str:
    """Return the part of a page from marker to marker.

    Raises:
        ValueError: The page does not have both markers.
    """
    start = page.index(BEGIN)
    return page[start : page.index(END, start) + len(END)]


def _contracts() -> list[dict[str, Any]]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return list(settings["tool"]["importlinter"]["contracts"])


if __name__ == "__main__":
    sys.exit(main())
