"""Texts of errors: every mismatch in one error, the most similar name, and what the operating system reports.

No torch. Comparing every missing name with every existing one takes minutes for a few thousand names. Here only
``_SHORTLIST`` existing names are compared with each missing one: its neighbors in alphabetical order, and those that
share its rarest pairs of adjacent words, such as ``layers.3``.
"""

from __future__ import annotations

import errno
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise
from typing import TYPE_CHECKING

from msgspec import Struct, field

from sluice._errors import LimitError, MismatchError, ReadError, ReadPermissionError, SaveError

if TYPE_CHECKING:
    from sluice._options import Limits

__all__ = [
    "MOST_NAMES",
    "SHOWN",
    "Findings",
    "Shape",
    "check_limit",
    "first_names",
    "listed",
    "nearest_names",
    "read_error",
    "save_error",
    "section",
    "type_of",
]

#: Maximum number of lines shown for each kind of problem.
SHOWN = 20

#: Maximum number of names in a line that lists them.
_NAMES_SHOWN = 8

#: Most letters of a line of a list: a hostile file may have names of megabytes.
_MOST_LETTERS = 2000

_ALLOW_EMPTY = (
    "some names may be missing, not all of them: pass key= (--key) or rename= (--rename), or allow_empty=True "
    "(--allow-empty) if the model may stay without them"
)

_IGNORE_MISMATCHED = (
    "load_into(..., ignore_mismatched=True) (--ignore-mismatched) keeps the module's own values of a different shape"
)

#: Size of each dimension, in elements.
Shape = tuple[int, ...]


def check_limit(
    limits: Limits,
    name: str,
    found: int,
    what: str,
    *,
    file: str | None = None,
    tensor: str | None = None,
    offset: int | None = None,
) -> None:
    """Refuse content with more than a field of the limits allows; ``what`` is a noun in the singular.

    Raises:
        LimitError: It has.
    """
    most = getattr(limits, name)
    if found > most:
        problem, expected = f"{what} exceeds the limit {name!r}", f"at most {most}"
        raise LimitError(problem, file=file, tensor=tensor, offset=offset, expected=expected, found=found)


class Findings(Struct, kw_only=True):
    """The problems of a checkpoint that does not fit a module."""

    #: Shape of each missing tensor by its names; None if it has no shape (extra state, lazy tensors).
    missing: dict[tuple[str, ...], Shape | None] = field(default_factory=dict)
    #: Shape of each name of the checkpoint that the module does not have; None for extra state.
    unexpected: dict[str, Shape | None] = field(default_factory=dict)
    #: Whether missing and unexpected names are problems.
    report_names: bool = True
    #: Number of tensors of the module if the checkpoint has none of them, which is a problem in any case; otherwise 0.
    none_of: int = 0
    #: Parts of the checkpoint to choose from if it has none of them, one line each.
    candidates: Sequence[str] = ()
    #: Name, shape in the module, shape in the checkpoint.
    shapes: list[tuple[str, Shape, Shape]] = field(default_factory=list)
    #: Name, reason.
    dtypes: list[tuple[str, str]] = field(default_factory=list)
    #: Other problems, one sentence each.
    others: list[str] = field(default_factory=list)
    #: Describes the origin of a tensor that rules changed, by its name; empty for other names.
    origin_of: Callable[[str], str] = field(default=lambda _: "")

    def raise_if_any(self) -> None:
        """Raise an error if there is a problem.

        Raises:
            MismatchError: It lists all of them.
        """
        names = self.report_names or self.none_of > 0
        by_name = names and (self.missing or self.unexpected)
        if not (by_name or self.none_of or self.shapes or self.dtypes or self.others):
            return
        sections = [text for text in self._sections(names=names) if text]
        title, advice = "the checkpoint does not fit the module", []
        if self.none_of:
            title = f"{title}: it has 0 of {self.none_of:,} tensors"
            advice = [] if self.report_names else [_ALLOW_EMPTY]
        if self.shapes:
            advice.append(_IGNORE_MISMATCHED)
        raise MismatchError(
            "\n".join([title, *sections, *advice, "Nothing was read"]),
            missing=tuple(chain.from_iterable(self.missing)) if names else (),
            unexpected=tuple(self.unexpected) if names else (),
        )

    def _sections(self, *, names: bool) -> list[str]:
        missing = list(self.missing.items()) if names else []
        unexpected = list(self.unexpected.items()) if names else []
        return [
            section("not in the checkpoint", self._describe_missing(missing[:SHOWN]), missing),
            section(
                "not in the module",
                [f"{_with_shape(repr(name), shape)}{self._origin(name)}" for name, shape in unexpected[:SHOWN]],
                unexpected,
            ),
            section("choose one with key= (--key)", self.candidates, self.candidates) if self.none_of else "",
            section(
                "of a different shape",
                [f"{_describe_shapes(*each)}{self._origin(each[0])}" for each in self.shapes[:SHOWN]],
                self.shapes,
            ),
            section(
                "of an incompatible dtype",
                [f"{name!r}: {why}{self._origin(name)}" for name, why in self.dtypes[:SHOWN]],
                self.dtypes,
            ),
            section("cannot be loaded", self.others[:SHOWN], self.others),
        ]

    def _origin(self, name: str) -> str:
        origin = self.origin_of(name)
        return f"; produced by rules from {origin!r}" if origin else ""

    def _describe_missing(self, missing: Sequence[tuple[tuple[str, ...], Shape | None]]) -> list[str]:
        shapes = {names[0]: shape for names, shape in missing if shape is not None}
        nearest = nearest_names(shapes, self.unexpected.items())
        lines = []
        for names, shape in missing:
            text = _with_shape(" = ".join(map(repr, names)), shape)
            close = nearest.get(names[0])
            lines.append(text if close is None else f"{text}; the checkpoint has {close!r} of the same shape")
        return lines


def type_of(value: object) -> str:
    """Return the type of a wrong argument with its article: ``"an int"``; classes say that they are classes."""
    if value is None or isinstance(value, bytes):
        return "None" if value is None else "bytes"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def section(title: str, lines: Sequence[str], of: Sequence[object]) -> str:
    """Return a titled list: ``lines`` for the first of ``of``, and the number of the others; empty if ``of`` is."""
    if not of:
        return ""
    more = [f"    and {len(of) - len(lines)} more"] if len(of) > len(lines) else []
    return "\n".join([f"  {title} ({len(of)}):", *(f"    {_cut(line)}" for line in lines), *more])


def listed(label: str, names: Sequence[str]) -> str:
    """Return a line that counts names and lists the first of them: ``"missing (9): a, b, c and 6 more"``."""
    return f"{label} ({len(names):,}): {first_names(names)}"


def first_names(names: Sequence[str]) -> str:
    """Return the first names as text: ``"a, b, c and 6 more"``."""
    first = ", ".join(_cut(name) or "''" for name in names[:_NAMES_SHOWN])
    more = f" and {len(names) - _NAMES_SHOWN:,} more" if len(names) > _NAMES_SHOWN else ""
    return f"{first}{more}"


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}..."


def _with_shape(text: str, shape: Shape | None) -> str:
    return text if shape is None else f"{text} {list(shape)}"


def _describe_shapes(name: str, own: Shape, saved: Shape) -> str:
    return f"{name!r} is {list(own)} in the module, {list(saved)} in the checkpoint"


#: Most missing names for which a similar one is searched. Errors and tables show fewer.
MOST_NAMES = 100

#: Most existing names that are compared with one missing name.
_SHORTLIST = 8

#: A pair of words that more names have proposes none of them.
_COMMON = 256

#: Characters at the start and at the end of a name that are compared: the comparison is quadratic in their number.
_EDGE_CHARACTERS = 48

#: Least similarity. Names below it share letters by chance.
_LEAST_SIMILARITY = 0.45

#: A word ends at any of these.
_SEPARATORS = str.maketrans("_/-", "...")


def nearest_names(missing: Mapping[str, Hashable], existing: Iterable[tuple[str, Hashable]]) -> dict[str, str]:
    """Return the most similar existing name of the same kind for each of the first missing names that has one.

    Args:
        missing: The kind of each missing name, such as the shape of its tensor.
        existing: Names with their kinds.
    """
    # Here, not above: most loads fit.
    from difflib import get_close_matches

    wanted: defaultdict[Hashable, list[str]] = defaultdict(list)
    for name, kind in islice(missing.items(), MOST_NAMES):
        wanted[kind].append(name)
    names: defaultdict[Hashable, list[str]] = defaultdict(list)
    for name, kind in existing:
        if kind in wanted:
            names[kind].append(name)
    nearest = {}
    for kind, candidates in names.items():
        for name, shortlist in _shortlists(wanted[kind], candidates):
            edges = {_edges(other): other for other in shortlist}
            for close in get_close_matches(_edges(name), edges, n=1, cutoff=_LEAST_SIMILARITY):
                nearest[name] = edges[close]
    return nearest


def _shortlists(missing: list[str], names: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each missing name with at most ``_SHORTLIST`` of the names."""
    having: dict[tuple[str, str], list[str]] = {pair: [] for name in missing for pair in _pairs(name)}
    for name in names:
        for pair in _pairs(name) & having.keys():
            having[pair].append(name)
    ordered = sorted(names)
    for name in missing:
        position = bisect_left(ordered, name)
        shared: Counter[str] = Counter(ordered[max(0, position - 1) : position + 1])
        for pair in _pairs(name):
            if len(having[pair]) <= _COMMON:
                for other in having[pair]:
                    shared[other] += 1
        yield name, [other for other, _ in shared.most_common(_SHORTLIST)]


def _pairs(name: str) -> set[tuple[str, str]]:
    """Return the pairs of adjacent words at the end of a name."""
    words = name[-4 * _EDGE_CHARACTERS :].translate(_SEPARATORS).lower().split(".")
    return set(pairwise(words))


def _edges(name: str) -> str:
    long = len(name) > 2 * _EDGE_CHARACTERS
    return name[:_EDGE_CHARACTERS] + name[-_EDGE_CHARACTERS:] if long else name


_DESCRIPTORS = "Close files, or raise the limit on open files (ulimit -n), then try again."
_MANY_FILES = "Too many files are open on this machine: close some, then try again."
_LINKS = "The symbolic links of the path form a circle: check them with ls -l."
_NAME = "The path, or a name in it, is too long for the file system: check what was passed."
_PARENT = "A part of the path is a file, not a directory: check the path."
_MEMORY = "The system is out of memory: free some, then try again."
_GONE = "The file or its directory was replaced on the file server: check the network mount, then try again."
_MOUNT = "The network mount does not answer: check it, then try again."
_DEVICE = "The disk failed: check the log of the system (dmesg), and the disk, before you try again."

_ANY_USE = {
    errno.EMFILE: _DESCRIPTORS,
    errno.ENFILE: _MANY_FILES,
    errno.ELOOP: _LINKS,
    errno.ENAMETOOLONG: _NAME,
    errno.ENOTDIR: _PARENT,
    errno.ENOMEM: _MEMORY,
    errno.ESTALE: _GONE,
    errno.ENOTCONN: _MOUNT,
    errno.ETIMEDOUT: _MOUNT,
    errno.EHOSTDOWN: _MOUNT,
    errno.EHOSTUNREACH: _MOUNT,
    errno.EIO: _DEVICE,
    errno.ENXIO: _DEVICE,
    errno.ENODEV: _DEVICE,
}

_READING = _ANY_USE | {errno.EISDIR: "Pass the path of a file."}

_PERMISSIONS = "Check the permissions of the directory, or choose another path."
_SPACE = "Free space or choose another path, then save again."

_SAVING = _ANY_USE | {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: f"The quota is used up. {_SPACE}",
    errno.EFBIG: "The file system or a limit (ulimit -f) does not allow a file of this size: choose another path, or "
    "save shards with max_shard_size.",
    errno.EROFS: "The file system is read-only: choose another path.",
    errno.EACCES: _PERMISSIONS,
    errno.EPERM: _PERMISSIONS,
    errno.EBUSY: "Another process or a mount uses the path: choose another one.",
    errno.ENOENT: "The directory does not exist or was removed: check the path, then save again.",
    errno.EISDIR: "The path is a directory: choose another one.",
}


def read_error(problem: str, error: OSError, *, file: str, offset: int | None = None) -> ReadError:
    """Return the error for a failed read; raise it from ``error``.

    Args:
        problem: What failed: ``"the file cannot be opened"``. The text of the system is added.
        error: The error of the system.
        file: Path of the file.
        offset: Byte offset of the read.
    """
    kind = ReadPermissionError if isinstance(error, PermissionError) else ReadError
    advice = None if kind is ReadPermissionError else _READING.get(error.errno or 0)
    read = kind(f"{problem}: {error.strerror or error}", file=file, offset=offset, advice=advice)
    read.errno, read.strerror = error.errno, error.strerror
    return read


def save_error(problem: str, error: OSError, *, file: str) -> SaveError:
    """Return the error for a failed save; raise it from ``error``.

    Args:
        problem: What failed. The text of the system is added.
        error: The error of the system.
        file: Path that is being saved.
    """
    return SaveError(f"{problem}: {error.strerror or error}", file=file, advice=_SAVING.get(error.errno or 0))
