"""Files, tests and modules that the pages name exist."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

from support.documents import DOCUMENTS, ROOT

_PATH = re.compile(r"(?<![\w./-])(?:src|tests|bench|docs|fuzz|tools|notebooks)/[\w./*-]*[\w*]")
_MODULE_FILE = re.compile(r"`([a-z_]+(?:/[a-z_]+)*\.py)`")
_TEST = re.compile(r"`(test_\w+)`")
_DOTTED = re.compile(r"`(sluice(?:\.\w+)+)[`(]")


def resolves(dotted: str) -> bool:
    """Return whether a dotted name is a module, or an attribute of one."""
    try:
        pkgutil.resolve_name(dotted)
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_and_every_name_of_the_package_that_a_page_mentions_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    paths = {path for path in _PATH.findall(text) if not re.search("[A-Z]{4}", path)}  # ROOM/test_MODULE.py is a scheme
    rooms = {path.name for path in (ROOT / "src" / "sluice").iterdir()}
    modules = {f"src/sluice/{name}" for name in _MODULE_FILE.findall(text) if name.partition("/")[0] in rooms}
    tests = {f"tests/**/{name}.py" for name in _TEST.findall(text)}
    assert [path for path in sorted(paths | modules | tests) if not any(ROOT.glob(path))] == []
    assert [name for name in sorted(set(_DOTTED.findall(text))) if not resolves(name)] == []


def test_the_first_screen_of_the_readme_has_the_two_commands_that_set_everything_up() -> None:
    screen = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:45]
    commands = [line.split()[:2] for line in screen if line.startswith("make ")]
    assert commands == [["make", "demo"], ["make", "test"]]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(f"\n{target}: install\n" in makefile for _, target in commands)
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").count("make --no-print-directory test\n") == 1


def test_the_pages_are_few_and_short_and_their_code_fits_80_columns() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 130
    log = ROOT / "docs" / "performance-log.md"
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "reference"]
    assert len(pages) <= 26
    assert sum(len(path.read_text(encoding="utf-8").split()) for path in pages if path != log) <= 30_000
    blocks = [
        (path.name, line)
        for path in {*pages, ROOT / "README.md"} - {log}
        for block in re.findall(
            r"^```(?:python|bash)[^\n]*\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        )
        for line in block.splitlines()
    ]
    assert [(page, line) for page, line in blocks if len(line) > 80] == []
