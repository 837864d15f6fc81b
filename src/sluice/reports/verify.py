"""What a verification found."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from sluice._errors import (
    CheckpointError,
    IncompleteCheckpointError,
    IntegrityError,
    ReadError,
    SaveError,
    SluiceError,
    TruncatedError,
)
from sluice._messages import SHOWN, section
from sluice._units import format_bytes
from sluice.formats.manifest import HashAlgorithm, Manifest, TensorHash

__all__ = ["NonFinite", "ProblemKind", "VerifyProblem", "VerifyReport"]

#: ``structure``, ``truncated``, ``incomplete``: what opening refuses, and damaged headers of records. ``checksum``: a
#: record has another CRC-32. ``unreadable``: the operating system failed a read. The others are against a manifest;
#: ``unsupported``: it names a tensor of a kind that sluice does not read.
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
]

_KINDS: tuple[tuple[type[SluiceError], ProblemKind], ...] = (
    (TruncatedError, "truncated"),
    (IncompleteCheckpointError, "incomplete"),
    (IntegrityError, "checksum"),
    (ReadError, "unreadable"),
    (CheckpointError, "structure"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyProblem:
    """One thing that is wrong."""

    #: What kind of thing.
    kind: ProblemKind
    #: What is wrong, as one clause.
    problem: str
    #: Path of the file concerned, or None.
    file: str | None = None
    #: Name of the tensor or record concerned, or None.
    tensor: str | None = None
    #: First byte concerned in ``file``, or None.
    offset: int | None = None
    #: What was declared, or None.
    expected: str | None = None
    #: What was found instead, or None.
    found: str | None = None

    @classmethod
    def of(cls, error: SluiceError) -> VerifyProblem:
        """Return what an error says."""
        return cls(
            kind=next(kind for type_, kind in _KINDS if isinstance(error, type_)),
            problem=error.problem,
            file=error.file,
            tensor=error.tensor,
            offset=error.offset,
            expected=None if error.expected is None else str(error.expected),
            found=None if error.found is None else str(error.found),
        )

    def __str__(self) -> str:
        error = SluiceError(
            self.problem,
            file=self.file,
            tensor=self.tensor,
            offset=self.offset,
            expected=self.expected,
            found=self.found,
        )
        return str(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """How many elements of a tensor are no finite numbers. A complex one can count in both."""

    #: Elements that are NaN.
    nan: int
    #: Elements that are infinite.
    inf: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What ``sluice.verify`` found.

    Example:
        >>> report = sluice.verify("model.pth", hashes="sha256")
        >>> if report.ok:
        ...     report.write_manifest("model.manifest.json")
        ... else:
        ...     print(report)
    """

    #: What was verified.
    source: str
    #: Name of its format; empty where it could not even be indexed.
    format: str = ""
    #: Everything that is wrong.
    problems: tuple[VerifyProblem, ...] = ()
    #: Number of tensors, each name counted.
    tensors: int = 0
    #: Bytes that were read of the files' contents.
    nbytes: int = 0
    #: Seconds from the call to the report.
    seconds: float = 0.0
    #: Number of records whose CRC-32 was compared.
    checksums: int = 0
    #: Names of records for which their writer recorded no CRC-32, as torch can be told to.
    without_checksum: tuple[str, ...] = ()
    #: Name of the hash of ``hashes``; None where none were asked for.
    algorithm: HashAlgorithm | None = None
    #: Dtype, shape and hash of each tensor that could be read, by its dotted name.
    hashes: Mapping[str, TensorHash] = field(default_factory=dict)
    #: The tensors with elements that are NaN or infinite; empty unless they were counted.
    non_finite: Mapping[str, NonFinite] = field(default_factory=dict)
    #: Names of tensors of kinds that sluice does not read: their bytes were read, but not hashed or counted.
    unsupported: tuple[str, ...] = ()
    #: Where the files contradict each other though every tensor is there, a sentence each: no reader minds. A shard
    #: index with another ``total_size``, which its writers count in several ways, or without some of the tensors.
    warnings: tuple[str, ...] = ()
    #: What a reader should know of the checkpoint otherwise, a sentence each.
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def write_manifest(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the hashes as a manifest, for later verifications.

        Args:
            path: The file to make.
            overwrite: Whether a file that exists may be replaced.

        Raises:
            ValueError: Tensors were not hashed.
            SaveError: The checkpoint is not ok, or the operating system failed.
        """
        from sluice.writing.durable.replacement import Replacement
        from sluice.writing.manifest import write_manifest

        if self.algorithm is None:
            raise ValueError("there are no hashes: verify with hashes='sha256'")
        if not self.ok:
            problem = "the checkpoint has problems, which a manifest would make the truth"
            raise SaveError(problem, file=os.fsdecode(path), found=f"{len(self.problems)} problems")
        file = Replacement(path, overwrite=overwrite)
        write_manifest(Manifest(algorithm=self.algorithm, tensors=self.hashes), file)

    def to_json(self) -> dict[str, object]:
        """Return every field and ``ok`` as plain values that ``json.dumps`` takes."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        speed = self.nbytes / self.seconds / 1e9 if self.seconds else 0.0
        what = f"{self.tensors} tensors, " if self.format else ""
        kind = f" ({self.format})" if self.format else ""
        read = f"{what}{format_bytes(self.nbytes)} in {self.seconds:.2f} s, {speed:.2f} GB/s"
        lines = [f"{self.source}{kind}: {'ok' if self.ok else 'damaged'}, {read}"]
        lines.append(section("problems", [f"{one.kind}: {one}" for one in self.problems[:SHOWN]], self.problems))
        names = self.without_checksum
        lines.append(section("warnings", list(self.warnings[:SHOWN]), self.warnings))
        lines.append(section("records without a CRC-32", [repr(name) for name in names[:SHOWN]], names))
        lines.append(section("not hashed or counted", list(map(repr, self.unsupported[:SHOWN])), self.unsupported))
        counts = [f"{name!r}: {one.nan} NaN, {one.inf} infinite" for name, one in self.non_finite.items()]
        lines.append(section("elements that are not finite", counts[:SHOWN], counts))
        return "\n".join(line for line in lines if line)
