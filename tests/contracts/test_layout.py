"""Tests mirror the source: a module's name leads to its tests and back."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS, SOURCE = ROOT / "tests", ROOT / "src" / "sluice"

#: Folders that mirror no package, and why.
NO_MIRROR = {
    "bench": "tests of the scripts in bench/, which are not part of the package",
    "contracts": "promises of the whole: memory, hostile files, faults, imports, documents",
    "gpu": "the same verbs on an accelerator, skipped together on machines without one",
    "support": "helpers of tests, and the tests of these helpers",
}

FILES = sorted(path.relative_to(TESTS) for path in TESTS.rglob("test_*.py"))
MIRRORS = [path for path in FILES if path.parts[0] not in NO_MIRROR]


def has_mirror(path: Path, source: Path) -> bool:
    """Return whether ``test_<name>.py`` or ``test_<name>_<aspect>.py`` names a module of the same folder in the source.

    The name may also be that of a package there, or of the folder's own package for tests of it as a whole.
    """
    folder = source / path.parent
    if not folder.is_dir():
        return False
    names = {each.stem.lstrip("_") for each in folder.iterdir() if each.suffix == ".py" or each.is_dir()}
    names = names - {"pycache__", "init__"} | ({folder.name} if path.parent.parts else set())
    stem = path.stem.removeprefix("test_")
    return any(stem == name or stem.startswith(f"{name}_") for name in names)


@pytest.mark.parametrize("path", MIRRORS, ids=str)
def test_a_test_file_is_named_after_a_module_of_the_same_folder(path: Path) -> None:
    assert has_mirror(path, SOURCE), f"no module of src/sluice/{path.parent} has a name that {path.stem} begins with"


def test_folders_without_a_mirror_exist() -> None:
    assert {path.parts[0] for path in FILES} >= NO_MIRROR.keys()
    assert not [name for name in NO_MIRROR if (SOURCE / name).exists()]
