"""Inside a room, modules import each other in one direction; imports inside functions count too.

The contract of layers in ``pyproject.toml`` compares rooms, and its tool does not report circles inside one of them.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import sluice

_ROOT = Path(sluice.__file__).parent

#: Most imports of modules of sluice inside functions. Each has its reason in a comment: torch, rich, or a large part
#: that few calls need. The number is only ever lowered.
_IN_FUNCTIONS = 40


def _imports_in_functions(path: Path) -> Iterator[str]:
    """Yield the modules of sluice that a module imports inside of functions."""
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "sluice":
                    yield f"{path.relative_to(_ROOT)}:{node.lineno} {node.module}"


def _imports(path: Path, modules: AbstractSet[str]) -> Iterator[str]:
    """Yield which of the modules of a room a module imports when it runs, also inside functions."""
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            pending += node.orelse
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{name.name}" for name in node.names} & modules
            yield from inside or {node.module} & modules
        pending += ast.iter_child_nodes(node)


def circle(room: Path) -> set[str]:
    """Return modules of a room that import each other in a circle; names are relative to the room."""
    prefix = ".".join(["sluice", *room.relative_to(_ROOT).parts])
    files = {
        ".".join([prefix, *path.relative_to(room).with_suffix("").parts]).removesuffix(".__init__"): path
        for path in room.rglob("*.py")
    }
    graph = {name: set(_imports(path, files.keys())) - {name} for name, path in files.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return {name.removeprefix(f"{prefix}.") for name in error.args[1]}
    return set()


def test_modules_of_a_room_import_each_other_in_one_direction() -> None:
    rooms = sorted(path.parent for path in _ROOT.glob("*/__init__.py"))
    assert len(rooms) > 20
    found = {room.name: circle(room) for room in rooms}
    assert not any(found.values()), found


def test_few_imports_are_inside_of_functions() -> None:
    found = sorted({place for path in _ROOT.rglob("*.py") for place in _imports_in_functions(path)})
    assert len(found) <= _IN_FUNCTIONS, "\n".join(found)


def test_no_two_public_classes_have_the_same_name() -> None:
    places: dict[str, list[str]] = {}
    for path in _ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(_ROOT)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_circles_through_functions_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = tmp_path / "room"
    room.mkdir()
    (room / "__init__.py").write_text("from sluice.room import a\n")
    (room / "a.py").write_text("def f():\n    from sluice.room.b import g\n")
    (room / "b.py").write_text("from sluice.room import a\n")
    (room / "c.py").write_text("if TYPE_CHECKING:\n    from sluice.room import d\n")
    (room / "d.py").write_text("from sluice.room import c\n")
    monkeypatch.setattr(sys.modules[__name__], "_ROOT", tmp_path)
    assert circle(room) == {"a", "b"}
