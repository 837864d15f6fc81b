"""Problems of a checkpoint: bytes that differ from its checksums or its manifest. Pure; no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from sluice._messages import nearest_names
from sluice.formats.manifest import Manifest, TensorHash
from sluice.formats.protocol import Checksum
from sluice.records import Entry
from sluice.reports.verify import ProblemKind, VerifyProblem

__all__ = ["compare", "wrong_checksum"]


def wrong_checksum(checksum: Checksum, found: int, file: str) -> VerifyProblem:
    """Return the problem of a record whose CRC-32 differs from the recorded one."""
    return VerifyProblem(
        kind="checksum",
        problem=f"the CRC-32 of record {checksum.name!r} differs",
        file=file,
        offset=checksum.offset,
        expected=f"{checksum.crc:#010x}",
        found=f"{found:#010x}",
    )


def compare(
    manifest: Manifest,
    hashes: Mapping[str, TensorHash],
    entries: Mapping[str, Entry | TensorHash],
    *,
    ties: Mapping[str, str],
    unread: Collection[str],
) -> Iterator[VerifyProblem]:
    """Yield the differences between a checkpoint and a manifest.

    Args:
        manifest: The expected tensors.
        hashes: The hashes of the tensors that could be read.
        entries: Every tensor, by name; or the hash of each, if they are not in a file.
        ties: Stored name of each alias.
        unread: Names of tensors of kinds that sluice does not read.
    """
    extra = [name for name in entries if name not in manifest.tensors]
    missing = {name: each.shape for name, each in manifest.tensors.items() if ties.get(name, name) not in entries}
    nearest = nearest_names(missing, ((name, entries[name].shape) for name in extra))
    for name, expected in manifest.tensors.items():
        stored = name if name in entries else ties.get(name, name)
        entry = entries.get(stored)
        if entry is None and name in unread:
            yield VerifyProblem(kind="unsupported", problem="sluice does not read this tensor", tensor=name)
            continue
        if entry is None:
            close = nearest.get(name)
            found = None if close is None else f"{close!r}, which is not in the manifest"
            yield VerifyProblem(kind="missing", problem="not in the checkpoint", tensor=name, found=found)
            continue
        mismatch = _mismatch(name, expected, entry)
        actual = hashes.get(stored)
        if mismatch is not None:
            yield mismatch
        elif actual is not None and actual.hash != expected.hash:
            yield VerifyProblem(
                kind="hash",
                problem=f"the {manifest.algorithm} of its elements differs",
                tensor=name,
                expected=expected.hash,
                found=actual.hash,
            )
    for name in extra:
        yield VerifyProblem(kind="extra", problem="not in the manifest", tensor=name)


def _mismatch(name: str, expected: TensorHash, entry: Entry | TensorHash) -> VerifyProblem | None:
    """Return the difference in dtype, shape or layout, which implies a different hash."""
    pairs: tuple[tuple[ProblemKind, str, str], ...] = (
        ("dtype", expected.dtype, entry.dtype),
        ("shape", str(list(expected.shape)), str(list(entry.shape))),
        ("layout", expected.layout, entry.layout),
    )
    for kind, declared, found in pairs:
        if declared != found:
            return VerifyProblem(kind=kind, problem=f"the {kind} differs", tensor=name, expected=declared, found=found)
    return None
