"""The result of a verification."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from sluice._errors import (
    CheckpointError,
    IncompleteCheckpointError,
    IntegrityError,
    ReadError,
    SaveError,
    SluiceError,
    TruncatedError,
    UnsupportedError,
)
from sluice._messages import listed
from sluice._public import public
from sluice._units import counted, format_bytes, format_rate
from sluice.formats.manifest import HashAlgorithm, Manifest, TensorHash
from sluice.reports.document import Grid, Report, Section, Strong, checkpoint_title, shorten
from sluice.sources.opening import source_path

__all__ = ["NonFinite", "ProblemKind", "VerifyProblem", "VerifyReport"]

#: Characters of an expected or found value that are printed.
_VALUE_CHARACTERS = 80

#: ``structure``, ``truncated``, ``incomplete``: refused when opening, or a damaged record header. ``checksum``: the
#: CRC-32 of a record differs. ``unreadable``: the operating system failed a read. ``foreign``: it is not a checkpoint,
#: but for example text or a git-lfs pointer. ``unsupported``: sluice does not read a record, or a tensor that a
#: manifest lists. The others compare with a manifest.
ProblemKind = Literal[
    "structure",
    "truncated",
    "incomplete",
    "checksum",
    "unreadable",
    "missing",
    "extra",
    "dtype",
    "shape",
    "layout",
    "hash",
    "unsupported",
    "foreign",
]

#: Kinds of problems that leave tensors unchecked.
_HIDING: frozenset[ProblemKind] = frozenset({"structure", "truncated", "incomplete", "unreadable"})

#: Verdicts with the kinds of problems that lead to them; the first with a problem is given.
_VERDICTS: tuple[tuple[str, frozenset[ProblemKind]], ...] = (
    ("damaged", frozenset({"structure", "truncated", "checksum", "hash", "unreadable"})),
    ("not a checkpoint that sluice reads", frozenset({"foreign"})),
    ("incomplete", frozenset({"incomplete"})),
    ("differs from the manifest", frozenset({"missing", "extra", "dtype", "shape", "layout"})),
    ("not checked completely", frozenset({"unsupported"})),
)

_KINDS: tuple[tuple[type[SluiceError], ProblemKind], ...] = (
    (TruncatedError, "truncated"),
    (IncompleteCheckpointError, "incomplete"),
    (IntegrityError, "checksum"),
    (ReadError, "unreadable"),
    (UnsupportedError, "unsupported"),
    (CheckpointError, "structure"),
)


@public()
@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyProblem:
    """One problem of a checkpoint."""

    #: Kind of problem.
    kind: ProblemKind
    #: Description of the problem, one clause.
    problem: str
    #: Path of the file concerned, or None.
    file: str | None = None
    #: Name of the tensor or record concerned, or None.
    tensor: str | None = None
    #: First byte concerned in ``file``, or None.
    offset: int | None = None
    #: Declared value, or None.
    expected: str | None = None
    #: Value found instead, or None.
    found: str | None = None

    @classmethod
    def of(cls, error: SluiceError) -> VerifyProblem:
        """Return an error as a problem."""
        expected, found = (None if value is None else str(value) for value in (error.expected, error.found))
        return cls(
            kind=_kind(error),
            problem=error.problem,
            file=error.file,
            tensor=error.tensor,
            offset=error.offset,
            expected=expected,
            found=found,
        )

    def __str__(self) -> str:
        at = {name: getattr(self, name) for name in ("file", "tensor", "offset", "expected", "found")}
        return str(SluiceError(self.problem, **at))


def _kind(error: SluiceError) -> ProblemKind:
    if isinstance(error, CheckpointError) and error.foreign:
        return "foreign"
    return next(kind for type_, kind in _KINDS if isinstance(error, type_))


@public()
@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """Counts of the non-finite elements of a tensor. A complex element can count in both."""

    #: Number of elements that are NaN.
    nan: int
    #: Number of elements that are infinite.
    inf: int


@public()
@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport(Report):
    """The result of ``sluice.verify``.

    Example:
        >>> report = sluice.verify("model.pth", hashes="sha256")
        >>> if report.ok:
        ...     report.write_manifest("model.manifest.json")
        ... else:
        ...     print(report)
    """

    _properties = ("ok",)

    #: Path of the checkpoint.
    source: str
    #: Paths of its files, which no manifest replaces.
    files: tuple[str, ...] = field(default=(), repr=False)
    #: Name of its format; empty if it could not be indexed.
    format: str = ""
    #: Dotted path of the part whose tensors were named for hashes and the manifest; None for the whole checkpoint.
    key: str | None = None
    #: Keys of the state dicts in it, the largest first; ``""`` is the whole checkpoint.
    state_dicts: tuple[str, ...] = ()
    #: Every problem found.
    problems: tuple[VerifyProblem, ...] = ()
    #: Number of tensor names, without those of ``unsupported``.
    tensors: int = 0
    #: Number of tensor names in the checkpoint.
    total: int = 0
    #: Number of tensor names in the part at ``key``.
    named: int = 0
    #: Bytes read from the files.
    nbytes: int = 0
    #: Seconds from the call to the report.
    seconds: float = 0.0
    #: Number of records whose CRC-32 was compared.
    checksums: int = 0
    #: Names of records that were written without a CRC-32, an option of torch.
    without_checksum: tuple[str, ...] = ()
    #: Hash algorithm of ``hashes``; None if no hashes were requested.
    algorithm: HashAlgorithm | None = None
    #: Dtype, shape and hash of each tensor that could be read, by dotted name.
    hashes: Mapping[str, TensorHash] = field(default_factory=dict)
    #: Tensors with elements that are NaN or infinite; empty unless they were counted.
    non_finite: Mapping[str, NonFinite] = field(default_factory=dict)
    #: Names of tensors of kinds that sluice does not read: their bytes were read, but not hashed or counted.
    unsupported: tuple[str, ...] = ()
    #: Contradictions between files that no reader depends on, one sentence each: a shard index with a different
    #: ``total_size``, which writers count in several ways, or without some of the tensors of its shards.
    warnings: tuple[str, ...] = ()
    #: Other remarks on the checkpoint, one sentence each.
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    def write_manifest(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the hashes as a manifest for later verifications.

        Args:
            path: The manifest to write.
            overwrite: Whether an existing file may be replaced.

        Raises:
            ValueError: Tensors were not hashed.
            SaveError: The checkpoint has problems, a file of it has the path, or the operating system failed.
        """
        from sluice.writing.durable.replacement import Replacement
        from sluice.writing.manifest import replaces_checkpoint, write_manifest

        path = source_path(path)
        if self.algorithm is None:
            raise ValueError("the report has no hashes: verify with hashes='sha256'")
        if not self.ok:
            problem = "a manifest cannot be written for a checkpoint with problems"
            raise SaveError(problem, file=path, found=counted(len(self.problems), "problem"))
        if replaces_checkpoint(path, (self.source, *self.files)):
            raise SaveError("the manifest would replace a file of a checkpoint", file=path)
        file = Replacement(path, overwrite=overwrite)
        write_manifest(Manifest(algorithm=self.algorithm, tensors=self.hashes), file)

    def sections(self) -> Iterator[Section]:
        """Yield what was read, tables of problems and of non-finite elements, remarks, and the verdict."""
        if not self.format:
            yield Strong(f"checked no tensor of {self.source}: it cannot be opened")
        else:
            title = checkpoint_title(self.source, self.format)
            # Bytes that were not read, or are hidden by a damaged header, belong to an unknown number of tensors.
            at_most = "at most " if any(each.kind in _HIDING for each in self.problems) else ""
            yield Strong(f"checked {at_most}{self.tensors:,} of {counted(self.total, 'tensor')} of {title}")
            hashes = f", {counted(len(self.hashes), 'hash', 'hashes')}" if self.algorithm else ""
            yield (
                f"{counted(self.checksums, 'checksum')}{hashes}; read "
                f"{format_bytes(self.nbytes)} in {format_rate(self.nbytes, self.seconds)}"
            )
            yield from self._names()
        if self.problems:
            yield self._problems()
        if self.non_finite:
            rows = ((name or "''", f"{each.nan:,}", f"{each.inf:,}") for name, each in self.non_finite.items())
            yield Grid.first(("elements that are not finite", ">NaN", ">infinite"), rows, len(self.non_finite))
        if self.without_checksum:
            yield listed("records without a CRC-32", self.without_checksum)
        if self.unsupported:
            yield listed("not hashed or counted", self.unsupported)
        yield from (f"warning: {warning}" for warning in self.warnings)
        yield from (f"note: {note}" for note in self.notes)
        yield Strong("ok" if self.ok else self._verdict())

    def _verdict(self) -> str:
        """Return the gravest verdict on the problems, and their number."""
        found = {each.kind for each in self.problems}
        verdict = next(verdict for verdict, kinds in _VERDICTS if not kinds.isdisjoint(found))
        return f"{verdict}: {counted(len(self.problems), 'problem')}"

    def _names(self) -> Iterator[str]:
        """Yield the part that hashes and the manifest name, or else the state dict that a load takes."""
        if self.key is not None:
            yield f"tensors of {self.key!r} by name: {self.named:,} of {counted(self.total, 'tensor')}"
        elif len(self.state_dicts) > 1:
            yield listed("state dicts to choose from with key= (--key)", [key or repr("") for key in self.state_dicts])
        elif self.state_dicts and self.state_dicts[0]:
            yield f"state dict: {self.state_dicts[0]}"

    def _problems(self) -> Grid:
        """Return the problems as a table, with a column of files if one is not the source itself."""
        several = any(problem.file not in {None, self.source} for problem in self.problems)
        headers = ("problem", *(("file",) if several else ()), "tensor", ">byte", "what", "expected", "found")
        rows = (
            (
                problem.kind,
                *((problem.file or "",) if several else ()),
                "" if problem.tensor is None else problem.tensor or "''",
                "" if problem.offset is None else f"{problem.offset:,}",
                "; ".join(map(str.strip, problem.problem.splitlines())).replace(":; ", ": "),  # cells have one line
                shorten(problem.expected or "", _VALUE_CHARACTERS),
                shorten(problem.found or "", _VALUE_CHARACTERS),
            )
            for problem in self.problems
        )
        return Grid.first(headers, rows, len(self.problems))
