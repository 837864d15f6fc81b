"""Parse the code blocks of the documents with Sybil and run them in order.

The fenced blocks of a page run in one namespace and one directory. Annotations of blocks:

- ``python`` and ``bash`` are run; ``bash`` blocks of only plain ``sluice`` commands run in this process.
- ``python title="net.py"``, or any other language with a title: the block is written to a file for later blocks.
- ``<!-- skip: next "why" -->`` before a block: it is compiled, or parsed by ``bash -n``, and not run.
- ``<!-- invisible-code-block: python ... -->`` runs like the others and is not shown: files that a page assumes.
- ``text`` is not code. A block in any other language or without a language is an error.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import SkipTest

import pytest
from click.testing import CliRunner
from sybil import Document, Example, Region, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import SkipParser
from sybil.parsers.markdown.lexers import DirectiveInHTMLCommentLexer, RawFencedCodeBlockLexer

from sluice.cli import main

ROOT = Path(__file__).parents[2]

#: Every page that people read. CHANGELOG.md has no code.
DOCUMENTS = tuple(
    sorted(
        path
        for folder in (ROOT, ROOT / "bench", ROOT / "notebooks", ROOT / "docs")
        for path in (folder.rglob("*.md") if folder.name == "docs" else folder.glob("*.md"))
    )
)

_INFO = re.compile(r'(?P<language>[\w+-]*)[ \t]*(?:title="(?P<title>[^"]+)")?[ \t]*\n')
_FENCED = RawFencedCodeBlockLexer(_INFO)
_HIDDEN = DirectiveInHTMLCommentLexer("invisible-code-block", r"\w+", mapping=None)
_BASH_SECONDS = 100


@dataclass(slots=True)
class Outcome:
    """The outcome of a page."""

    #: Names that its Python blocks defined.
    namespace: Mapping[str, Any]
    #: Visible blocks that were run or written.
    executed: int = 0
    #: Line and reason of each block that was only compiled.
    skipped: list[tuple[int, str]] = field(default_factory=list)


def run_document(path: Path, directory: Path) -> Outcome:
    """Run the blocks of a page; the first failure raises, with the page's line in the traceback.

    Args:
        path: The page.
        directory: Empty working directory. Modules imported from it are removed from ``sys.modules`` afterwards.
    """
    document = Sybil(parsers=[SkipParser(), _blocks]).parse(path)
    document.namespace["__name__"] = "__main__"
    outcome = Outcome(namespace=document.namespace)
    with session(directory):
        for example in document.examples():
            _evaluate(example, outcome)
    return outcome


def _blocks(document: Document) -> Iterable[Region]:
    """Find fenced blocks of all kinds, and invisible blocks."""
    for region in _FENCED(document):
        region.lexemes["visible"] = True
        yield _with_evaluator(document, region, region.lexemes["language"])
    for region in _HIDDEN(document):
        yield _with_evaluator(document, region, region.lexemes["arguments"])


def _with_evaluator(document: Document, region: Region, language: str) -> Region:
    region.lexemes["language"] = language
    region.parsed = region.lexemes["source"]
    if region.lexemes.get("title"):
        region.evaluator = _write
    elif language in _EVALUATORS:
        region.evaluator = _EVALUATORS[language]
    else:
        raise ValueError(f"{document.region_details(region)}: no way to run {language or 'a block of no language'}")
    return region


def _evaluate(example: Example, outcome: Outcome) -> None:
    lexemes = example.region.lexemes
    try:
        example.evaluate()
    except SkipTest as skipped:
        _compile(example)
        outcome.skipped.append((example.line, str(skipped)))
        return
    if lexemes.get("visible") and (lexemes["language"] != "text" or lexemes.get("title")):
        outcome.executed += 1


def _compile(example: Example) -> None:
    """Check the syntax of a block that is not run."""
    if example.region.lexemes["language"] == "python":
        compile(example.parsed, f"{example.path}:{example.line}", "exec")
    else:
        subprocess.run(["bash", "-n"], input=str(example.parsed), text=True, check=True)


def _write(example: Example) -> None:
    path = Path(example.region.lexemes["title"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(example.parsed, encoding="utf-8")


def _parse_json(example: Example) -> None:
    json.loads(example.parsed)


def _run_commands(example: Example) -> None:
    """Run a block of shell commands."""
    # Plain sluice commands run in this process: a second one would import torch again.
    commands = [_plain_command(line) for line in _lines(example.parsed)]
    if all(commands):
        for command in commands:
            result = CliRunner().invoke(main, command)
            assert result.exit_code == 0, f"line {example.line}: sluice {shlex.join(command or [])}: {result.stderr}"
        return
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", str(example.parsed)],
        capture_output=True, text=True, env=environment, timeout=_BASH_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"line {example.line}: exit code {done.returncode}: {done.stderr}"


_EVALUATORS: dict[str, Callable[[Example], None]] = {
    "python": PythonEvaluator(),
    "bash": _run_commands,
    "json": _parse_json,
    "text": lambda _: None,
}


def _lines(source: str) -> list[str]:
    joined = source.replace("\\\n", " ").splitlines()
    return [line for line in joined if line.strip() and not line.lstrip().startswith("#")]


def _plain_command(line: str) -> list[str] | None:
    """Return the arguments of a ``sluice`` command without pipes, variables and the like; None for anything else."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>()")
    lexer.whitespace_split = True
    words = list(lexer)
    if words[0] != "sluice" or any(set(word) <= set("|&;<>()") for word in words) or "$" in line:
        return None
    return words[1:]


@contextlib.contextmanager
def session(directory: Path) -> Iterator[None]:
    """Change to ``directory`` and import modules from it; undo both after the block."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()):
        patch.chdir(directory)
        patch.setattr(sys, "path", [str(directory), *sys.path])
        patch.setattr(sys, "dont_write_bytecode", True)  # pages count the files of the directory
        try:
            yield
        finally:
            for name in set(sys.modules) - before:
                file = getattr(sys.modules[name], "__file__", None)
                if file and Path(file).is_relative_to(directory):
                    del sys.modules[name]
