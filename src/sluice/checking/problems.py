"""Where a checkpoint is not as its checksums and its manifest say. Pure; no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from sluice._messages import closest
from sluice.formats.manifest import Manifest, TensorHash
from sluice.formats.protocol import Checksum
from sluice.records import Entry
from sluice.reports.verify import ProblemKind, VerifyProblem

__all__ = ["compare", "wrong_checksum"]


def wrong_checksum(checksum: Checksum, found: int, file: str) -> VerifyProblem:
    """Return what is wrong with a record whose bytes have another checksum than its file says."""
    return VerifyProblem(
        kind="checksum",
        problem=f"record {checksum.name!r} has another CRC-32",
        file=file,
        offset=checksum.offset,
        expected=f"{checksum.crc:#010x}",
        found=f"{found:#010x}",
    )


def compare(
    manifest: Manifest,
    hashes: Mapping[str, TensorHash],
    entries: Mapping[str, Entry],
    *,
    ties: Mapping[str, str],
    unread: Collection[str],
) -> Iterator[VerifyProblem]:
    """Yield where a checkpoint is not as its manifest says.

    Args:
        manifest: What it should be.
        hashes: What it is, where that could be read.
        entries: Every tensor by its name.
        ties: Names that stand for tensors stored under others; these names.
        unread: Names of tensors of kinds that sluice does not read.
    """
    extra = [name for name in entries if name not in manifest.tensors]
    for name, expected in manifest.tensors.items():
        stored = name if name in entries else ties.get(name, name)
        entry = entries.get(stored)
        if entry is None and name in unread:
            yield VerifyProblem(kind="unsupported", problem="sluice does not read this tensor", tensor=name)
            continue
        if entry is None:
            close = closest(name, [other for other in extra if entries[other].shape == expected.shape])
            found = f"{close!r}, which the manifest does not have" if close else None
            yield VerifyProblem(kind="missing", problem="not in the checkpoint", tensor=name, found=found)
            continue
        mismatch = _mismatch(name, expected, entry)
        made = hashes.get(stored)
        if mismatch is not None:
            yield mismatch
        elif made is not None and made.hash != expected.hash:
            yield VerifyProblem(
                kind="hash",
                problem=f"its elements have another {manifest.algorithm}",
                tensor=name,
                expected=expected.hash,
                found=made.hash,
            )
    for name in extra:
        yield VerifyProblem(kind="extra", problem="not in the manifest", tensor=name)


def _mismatch(name: str, expected: TensorHash, entry: Entry) -> VerifyProblem | None:
    """Return why a tensor cannot have the expected hash, before anything is read."""
    pairs: tuple[tuple[ProblemKind, str, str], ...] = (
        ("dtype", expected.dtype, entry.dtype),
        ("shape", str(list(expected.shape)), str(list(entry.shape))),
        ("layout", expected.layout, entry.layout),
    )
    for kind, wanted, found in pairs:
        if wanted != found:
            return VerifyProblem(kind=kind, problem=f"another {kind}", tensor=name, expected=wanted, found=found)
    return None
