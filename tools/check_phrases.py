"""Find phrases that this project does not write, in comments, docstrings, strings and pages.

``python tools/check_phrases.py [PATH ...]`` scans the paths, or those that ``phrases.toml`` lists under ``paths``. It
prints ``file:line: phrase: reason; write ...`` for each finding and exits with 1 if there are any.

Scanned are

- Python files: comments, docstrings and other string literals, but not identifiers, bytes literals, replacement fields
  of f-strings, or examples that start with ``>>>``;
- Markdown files and the Markdown cells of notebooks: prose and tables, but not code blocks, inline code or comments.

Text is matched paragraph by paragraph with line breaks as spaces, so a phrase is also found across two lines.

A line keeps a phrase with ``# phrase-ok: REASON`` at its end, or ``<!-- phrase-ok: REASON -->`` in Markdown. In a
multi-line string the comment follows the closing quotes. An opt-out without a reason, or one that nothing uses, is a
finding.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFIGURATION = Path(__file__).with_name("phrases.toml")

_SUFFIXES = (".py", ".md", ".ipynb")
_OPT_OUT = re.compile(r"\bphrase-ok:?[ \t]*(?P<reason>.*?)[ \t]*(?:-->|$)", re.MULTILINE)
_FENCE = re.compile(r"^\s*(?P<mark>`{3,}|~{3,})")
_HTML_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_INLINE_CODE = re.compile(r"(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)", re.DOTALL)
_STRING = re.compile(r"(?P<prefix>[a-zA-Z]*)(?P<quotes>\"\"\"|'''|\"|')(?P<body>.*)(?P=quotes)", re.DOTALL)
_ESCAPE = re.compile(r"\\[nrtabfv]")
_REPLACEMENT_FIELD = re.compile(r"\{[^{}]*\}")
_EXAMPLE_LINE = re.compile(r"^[ \t]*(?:>>>|\.\.\.)(?: .*)?$", re.MULTILINE)
_FSTRING_START = getattr(tokenize, "FSTRING_START", -1)  # Python 3.12 and later split f-strings into tokens
_FSTRING_END = getattr(tokenize, "FSTRING_END", -1)
_LAYOUT_TOKENS = frozenset({tokenize.NL, tokenize.COMMENT})
_STATEMENT_STARTS = frozenset({tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING})


@dataclass(frozen=True, slots=True, kw_only=True)
class Phrase:
    """One phrase to avoid."""

    #: Matches the phrase in text whose white space is single spaces; case does not matter.
    pattern: re.Pattern[str]
    #: Why the phrase is avoided.
    reason: str
    #: Advice on what to write instead.
    better: str
    #: True if only documentation (docstrings and ``#:`` comments) is searched.
    documentation_only: bool


@dataclass(slots=True)
class Paragraph:
    """Connected text of a file with single spaces, and the line of each character."""

    #: True for docstrings and ``#:`` comments.
    is_documentation: bool = False
    text: str = ""
    lines: list[int] = field(default_factory=list)
    #: Where the text ends, closing quotes included.
    last_line: int = 0

    def add(self, text: str, line: int) -> None:
        """Append ``text``, whose first character is on ``line``, with runs of white space as one space."""
        parts = [self.text]
        after_space = not self.text or self.text.endswith(" ")
        for character in text:
            space = character.isspace()
            if not (space and after_space):
                parts.append(" " if space else character)
                self.lines.append(line)
            after_space = space
            line += character == "\n"
        self.text = "".join(parts)
        self.last_line = line


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Finding:
    """A phrase that was found, or an opt-out that is not right."""

    #: The path as it was given, with the cell for a notebook.
    file: str
    line: int
    phrase: str
    advice: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.phrase}: {self.advice}"


@dataclass(slots=True)
class _Scan:
    """Paragraphs and opt-outs of a file."""

    paragraphs: list[Paragraph] = field(default_factory=list)
    #: Reason of the opt-out on each line that has one.
    opt_outs: dict[int, str] = field(default_factory=dict)


def main(arguments: Sequence[str] | None = None) -> int:
    """Scan the paths of the command line or of the configuration; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, help="files or directories; default: `paths` of phrases.toml")
    parser.add_argument("--count", action="store_true", help="print the number of findings of each phrase only")
    options = parser.parse_args(arguments)
    phrases, default_paths, excluded = read_configuration(CONFIGURATION)
    paths = options.paths or default_paths
    if missing := [path for path in paths if not path.exists()]:
        parser.error(f"not found: {', '.join(map(str, missing))}")
    files = [path for path in files_under(paths) if path.resolve() not in excluded]
    findings = [finding for path in files for finding in check_file(path, phrases)]
    if options.count:
        for phrase, count in Counter(finding.phrase.lower() for finding in findings).most_common():
            print(f"{count:5} {phrase}")
    else:
        for finding in findings:
            print(finding)
    if findings:
        print(f"{len(findings)} phrases to rewrite; tools/phrases.toml has the list", file=sys.stderr)
    return 1 if findings else 0


def read_configuration(path: Path) -> tuple[list[Phrase], list[Path], set[Path]]:
    """Return the phrases of a configuration file, the paths to scan by default, and files that are never scanned."""
    settings = tomllib.loads(path.read_text(encoding="utf-8"))
    phrases = [
        Phrase(
            pattern=re.compile(entry["pattern"], re.IGNORECASE),
            reason=entry["reason"],
            better=entry["better"],
            documentation_only=entry.get("documentation_only", False),
        )
        for entry in settings["phrases"]
    ]
    return phrases, [ROOT / path for path in settings["paths"]], {ROOT / path for path in settings["exclude"]}


def files_under(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the files to scan: each path that is a file, and the files with a known suffix below each directory."""
    for path in paths:
        if path.is_dir():
            yield from sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
        else:
            yield path


def check_file(path: Path, phrases: Sequence[Phrase]) -> list[Finding]:
    """Return the findings in a file, in the order of their lines."""
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return _check(name, _scan_python(text), phrases)
    if path.suffix == ".md":
        return _check(name, _scan_markdown(text), phrases)
    return [
        finding
        for number, cell in enumerate(json.loads(text)["cells"], start=1)
        if cell["cell_type"] == "markdown"
        for finding in _check(f"{name}[cell {number}]", _scan_markdown("".join(cell["source"])), phrases)
    ]


def _check(file: str, scan: _Scan, phrases: Sequence[Phrase]) -> list[Finding]:
    used = set()
    findings = []
    for paragraph in scan.paragraphs:
        for phrase in phrases:
            if phrase.documentation_only and not paragraph.is_documentation:
                continue
            for match in phrase.pattern.finditer(paragraph.text):
                line = paragraph.lines[match.start()]
                allowed = {line, paragraph.lines[match.end() - 1], paragraph.last_line} & scan.opt_outs.keys()
                used |= allowed
                if not allowed:
                    advice = f"{phrase.reason}; {phrase.better}"
                    findings.append(Finding(file=file, line=line, phrase=match.group().strip(), advice=advice))
    for line, reason in scan.opt_outs.items():
        if not reason:
            findings.append(Finding(file=file, line=line, phrase="phrase-ok", advice="an opt-out needs a reason"))
        elif line not in used:
            findings.append(Finding(file=file, line=line, phrase="phrase-ok", advice="unused; remove the opt-out"))
    return sorted(findings)


def _scan_python(source: str) -> _Scan:
    """Collect comments and strings. Neighboring comments form a paragraph, and so do implicitly joined strings."""
    scan = _Scan()
    strings: Paragraph | None = None
    comments: Paragraph | None = None
    comment_end = 0
    before = tokenize.ENCODING  # type of the last token that is not layout
    for kind, literal, line in _texts(source):
        if kind == tokenize.COMMENT:
            if opt_out := _OPT_OUT.search(literal):
                scan.opt_outs[line] = opt_out["reason"]
                continue
            is_documentation = literal.startswith("#:")
            if comments is None or line != comment_end + 1 or comments.is_documentation != is_documentation:
                comments = Paragraph(is_documentation=is_documentation)
                scan.paragraphs.append(comments)
            comments.add(_without_code(literal.lstrip("#:! ")) + " ", line)
            comment_end = line
        elif kind == tokenize.STRING:
            if strings is None or before != tokenize.STRING:
                strings = Paragraph(is_documentation=before in _STATEMENT_STARTS)
                scan.paragraphs.append(strings)
            strings.add(_string_text(literal), line)
        if kind not in _LAYOUT_TOKENS:
            before = kind
    scan.paragraphs = [paragraph for paragraph in scan.paragraphs if paragraph.text]
    return scan


def _texts(source: str) -> Iterator[tuple[int, str, int]]:
    """Yield type, text and first line of each token, with an f-string as one token in every version of Python."""
    lines = source.splitlines(keepends=True)
    depth = 0
    start = (0, 0)
    for token in tokenize.generate_tokens(StringIO(source).readline):
        if token.type == _FSTRING_START:
            start = start if depth else token.start
            depth += 1
        elif token.type == _FSTRING_END:
            depth -= 1
            if not depth:
                yield tokenize.STRING, _between(lines, start, token.end), start[0]
        elif not depth:
            yield token.type, token.string, token.start[0]


def _between(lines: Sequence[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    if start[0] == end[0]:
        return lines[start[0] - 1][start[1] : end[1]]
    middle = lines[start[0] : end[0] - 1]
    return "".join([lines[start[0] - 1][start[1] :], *middle, lines[end[0] - 1][: end[1]]])


def _string_text(literal: str) -> str:
    """Return the prose of a string literal in its source form, line by line: no quotes, code or replacement fields."""
    match = _STRING.fullmatch(literal)
    if match is None or "b" in match["prefix"].lower():
        return ""
    body = match["body"]
    if "f" in match["prefix"].lower():
        body = _blank(_REPLACEMENT_FIELD, body.replace("{{", "__").replace("}}", "__"), "_")
    if "r" not in match["prefix"].lower():
        body = _blank(_ESCAPE, body, " ")
    return _without_code(_blank(_EXAMPLE_LINE, body, "_"))


def _scan_markdown(text: str) -> _Scan:
    """Collect paragraphs; a row of a table, an item of a list and a heading are paragraphs of their own."""
    scan = _Scan()
    for match in _OPT_OUT.finditer(text):
        scan.opt_outs[text.count("\n", 0, match.start()) + 1] = match["reason"]
    prose = _without_code(_without_fences(_blank(_HTML_COMMENT, text, " ")))
    paragraph = Paragraph()
    for number, line in enumerate(prose.split("\n"), start=1):
        if not line.strip() or re.match(r"\s*(?:[|#>]|[-*+] |\d+\. )", line):
            paragraph = Paragraph()
            scan.paragraphs.append(paragraph)
        paragraph.add(line + " ", number)
        if paragraph not in scan.paragraphs:
            scan.paragraphs.append(paragraph)
    scan.paragraphs = [paragraph for paragraph in scan.paragraphs if paragraph.text.strip()]
    return scan


def _without_fences(text: str) -> str:
    lines = []
    fence = ""
    for line in text.split("\n"):
        match = _FENCE.match(line)
        if fence:
            inside = True
            if match and match["mark"].startswith(fence):
                fence = ""
        else:
            inside = match is not None
            fence = match["mark"] if match else ""
        lines.append("" if inside else line)
    return "\n".join(lines)


def _without_code(text: str) -> str:
    return _blank(_INLINE_CODE, text, "_")


def _blank(pattern: re.Pattern[str], text: str, filler: str) -> str:
    """Replace each match by ``filler``, character by character, except its line breaks."""
    return pattern.sub(lambda match: re.sub(r"[^\n]", filler, match.group()), text)


if __name__ == "__main__":
    sys.exit(main())
