"""``sluice.verify``: what a checkpoint's files, and a manifest, say of its bytes, against the bytes."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack

from sluice._errors import FormatError, IncompleteCheckpointError, IntegrityError, TruncatedError
from sluice._options import Limits
from sluice._progress import Progress
from sluice.checking.problems import compare
from sluice.checking.verification import Verification
from sluice.checkpoint.open_checkpoint import CheckpointSource, borrow
from sluice.entries.tree import unsupported, walk
from sluice.formats.manifest import HashAlgorithm, new_hash, read_manifest
from sluice.reports.verify import VerifyProblem, VerifyReport

__all__ = ["verify"]

#: What damage looks like. Everything else means that the file is something else, or cannot be read at all.
_DAMAGE = (FormatError, TruncatedError, IntegrityError, IncompleteCheckpointError)


def verify(
    source: CheckpointSource,
    *,
    manifest: str | os.PathLike[str] | None = None,
    hashes: HashAlgorithm | None = None,
    nan: bool = False,
    limits: Limits | None = None,
    progress: Progress = False,
) -> VerifyReport:
    """Read all of a checkpoint once and say what is damaged, with a fixed amount of memory.

    Checked are the structure that opening checks, the CRC-32 of every record of zip files (also inside
    torch.distributed.checkpoint files), the shard index against the shards, the indices of sparse tensors as torch's
    ``check_invariants`` does, that every byte can be read, and with a manifest the dtype, shape and hash of each
    tensor, in whatever format the checkpoint is now.

    Args:
        source: A checkpoint file or directory, a shard index, a file object, or an open checkpoint; see ``open``.
        manifest: A manifest that ``save``, ``convert`` or ``VerifyReport.write_manifest`` wrote.
        hashes: Hash every tensor, with ``"sha256"`` or ``"xxh3_128"``; with a manifest its own algorithm is taken.
        nan: Whether to count the elements of each tensor that are NaN or infinite. They are no damage by themselves.
        limits: Bounds for hostile files.
        progress: True draws a bar; a function is called with each ``ProgressEvent``.

    Returns:
        What was found; ``.ok`` is False when anything is damaged, missing, too much or not as the manifest has it.

    Raises:
        CheckpointError: The file does not exist, is unsafe, of a kind that sluice does not read, or passes a limit; or
            the manifest is no manifest.
        ReadError: The file cannot be opened.
        SourceChangedError: The file changed meanwhile.
        ImportError: The hash needs a library that is not installed.

    Example:
        >>> sluice.verify("model.pth", hashes="sha256").write_manifest("pth.manifest.json")
        >>> sluice.verify("model.pth", manifest="pth.manifest.json").ok
        True
    """
    started = time.perf_counter()
    expected = None if manifest is None else read_manifest(os.fsdecode(manifest), limits or Limits())
    algorithm = expected.algorithm if expected else hashes
    if algorithm:
        new_hash(algorithm)  # says now that a library is missing
    with ExitStack() as stack:
        try:
            checkpoint = stack.enter_context(borrow(source, limits=limits))
        except _DAMAGE as error:
            return VerifyReport(
                source=_name(source), problems=(VerifyProblem.of(error),), seconds=time.perf_counter() - started
            )
        run = Verification(checkpoint, algorithm, nan=nan)
        run.run(progress)
        tree, made, problems = checkpoint.index.tree, run.hashes, run.problems
        unread = unsupported(tree)
        if expected:
            found = compare(expected, made, checkpoint.entries, ties=checkpoint.stored_names, unread=unread)
            problems += found
        return VerifyReport(
            source=checkpoint.path,
            format=checkpoint.format,
            problems=tuple(problems),
            tensors=sum(1 for _ in walk(tree)),
            nbytes=run.read_bytes,
            seconds=time.perf_counter() - started,
            checksums=len(run.plan.crcs),
            without_checksum=tuple(run.plan.unrecorded),
            algorithm=algorithm,
            hashes=made,
            non_finite=run.non_finite,
            unsupported=tuple(unread),
            warnings=checkpoint.index.contradictions,
            notes=tuple(note for note in checkpoint.index.notes if note not in checkpoint.index.contradictions),
        )


def _name(source: CheckpointSource) -> str:
    path = source if isinstance(source, (str, bytes, os.PathLike)) else getattr(source, "name", "")
    return os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
