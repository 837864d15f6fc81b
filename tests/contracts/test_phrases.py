"""The check of phrases scans prose only, and reports every phrase in it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tools import check_phrases
from tools.check_phrases import CONFIGURATION, ROOT, Phrase, check_file, files_under, main, read_configuration

PHRASES = [
    Phrase(pattern=re.compile(r"\bnobody\b", re.IGNORECASE), reason="a", better="b", documentation_only=False),
    Phrase(pattern=re.compile(r"\bof another\b", re.IGNORECASE), reason="a", better="b", documentation_only=False),
    Phrase(pattern=re.compile(r"^what ", re.IGNORECASE), reason="a", better="b", documentation_only=True),
]


def found(tmp_path: Path, text: str, name: str = "module.py") -> list[tuple[int, str]]:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return [(finding.line, finding.phrase) for finding in check_file(path, PHRASES)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = 1  # Nobody reads this\n", [(1, "Nobody")]),
        ("raise ValueError('seen by nobody')\n", [(1, "nobody")]),
        ("x = f'{1} is seen by nobody'\n", [(1, "nobody")]),
        ("x = (\n    'a file of '\n    'another kind'\n)\n", [(2, "of another")]),
        ("# a file of\n# another kind\n", [(1, "of another")]),
        ("x = '''\n{\nnobody\n'''\n", [(3, "nobody")]),
        # code is not prose
        ("x = nobody.of.another\n", []),
        ("x = b'nobody'\n", []),
        ("x = f'{nobody} of them'\n", []),
        ("# the name ``nobody`` is code\n", []),
        ('"""Head.\n\n>>> nobody\n... nobody\n"""\n', []),
        ("x = ['a file of ', 'another kind']\n", []),
        ("# a file of\nx = 1\n# another kind\n", []),
        # a line opts out with a reason
        ("x = 'nobody'  # phrase-ok: the name of a user account\n", []),
        ('"""Head.\n\nSeen by nobody.\n"""  # phrase-ok: the name of a user account\n', []),
        ("x = 'nobody'  # phrase-ok:\n", [(1, "phrase-ok")]),
        ("x = 1  # phrase-ok: nothing to excuse here\n", [(1, "phrase-ok")]),
    ],
)
def test_a_phrase_is_found_in_comments_and_strings(
    tmp_path: Path, source: str, expected: list[tuple[int, str]]
) -> None:
    assert sorted(found(tmp_path, source)) == sorted(expected)


def test_a_pattern_can_be_for_documentation_only(tmp_path: Path) -> None:
    source = (
        '"""What a module holds."""\n'
        "X = 1\n#: What a constant is for.\nY = 2\n"
        "# What follows is a comment\n"
        "Z = 'What a message says'\n"
        'def f() -> None:\n    """What a function does."""\n'
    )
    assert found(tmp_path, source) == [(1, "What"), (3, "What"), (8, "What")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# Title\n\nNobody reads\nthis.\n", [(3, "Nobody")]),
        ("A file of\nanother kind.\n", [(1, "of another")]),
        ("- a file of\n- another kind\n", []),
        ("| a | nobody |\n", [(1, "nobody")]),
        ("```text\nnobody\n```\nnobody\n", [(4, "nobody")]),
        ("````text\n```\nnobody\n````\n", []),
        ("The name `nobody` is code.\n", []),
        ('<!-- skip: next "nobody" -->\n<!--\nnobody\n-->\n', []),
        ("Runs as nobody. <!-- phrase-ok: the name of a user account -->\n", []),
    ],
)
def test_a_phrase_is_found_in_the_prose_of_a_page(tmp_path: Path, text: str, expected: list[tuple[int, str]]) -> None:
    assert found(tmp_path, text, "page.md") == expected


def test_the_prose_of_a_notebook_is_checked_and_its_code_is_not(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "code", "source": ["# nobody\n"]},
        {"cell_type": "markdown", "source": ["# Title\n", "Seen by nobody.\n"]},
    ]
    path = tmp_path / "notebook.ipynb"
    path.write_text(json.dumps({"cells": cells}), encoding="utf-8")
    [finding] = check_file(path, PHRASES)
    assert finding.file.endswith("notebook.ipynb[cell 2]")
    assert finding.line == 2


def test_the_program_prints_findings_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "page.md").write_text("Nobody reads this.\n", encoding="utf-8")
    (tmp_path / "data.txt").write_text("Nobody reads this.\n", encoding="utf-8")
    assert main([str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{tmp_path / 'below' / 'page.md'}:1: Nobody: ")
    assert len(captured.out.splitlines()) == 1
    (tmp_path / "below" / "page.md").write_text("Every user reads this.\n", encoding="utf-8")
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == ""


def test_every_phrase_has_a_reason_and_a_replacement_and_every_path_exists() -> None:
    phrases, paths, excluded = read_configuration(CONFIGURATION)
    assert all(len(phrase.reason) > 8 and len(phrase.better) > 8 for phrase in phrases)
    assert all(path.exists() for path in (*paths, *excluded))
    assert len({phrase.pattern.pattern for phrase in phrases}) == len(phrases)


def test_the_check_is_part_of_make_check() -> None:
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ncheck:")[2].partition("\n\n")[0]
    assert Path(check_phrases.__file__).name in recipe
    assert Path(check_phrases.__file__) in files_under([ROOT / "tools"])
