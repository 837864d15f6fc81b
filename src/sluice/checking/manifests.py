"""Comparison of hashes with a manifest: those of the tensors of a checkpoint, and of the live weights of a model."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping

import torch
from msgspec.structs import replace
from torch import nn
from torch.nn.parameter import is_lazy

from sluice._defaults import SAVE_STAGING_BYTES
from sluice._dtypes import dtype_name
from sluice._errors import MismatchError, UnsupportedError
from sluice._messages import nearest_names
from sluice._options import DEFAULT_LIMITS, Limits
from sluice._progress import Progress, byte_progress
from sluice.entries.slicing import boxes
from sluice.formats.manifest import HashAlgorithm, Manifest, TensorHash, new_hash, read_manifest
from sluice.records import Entry
from sluice.reports.verify import ProblemKind, VerifyProblem, VerifyReport
from sluice.sharding.dtensors import is_dtensor

__all__ = ["compare", "verify_model"]


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


def verify_model(
    model: nn.Module, manifest: str, *, key: str | None, limits: Limits | None, progress: Progress
) -> VerifyReport:
    """Hash the state dict of a model piece by piece, and compare it with a manifest, or with a part of it.

    Raises:
        CheckpointError: The manifest does not exist or is not valid.
        MismatchError: The manifest has no such part.
        UnsupportedError: A tensor has no values here: it is on meta, or a rank holds only a part of it.
    """
    started = time.perf_counter()
    whole = read_manifest(manifest, limits or DEFAULT_LIMITS)
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    key = _key(whole, state.keys()) if key is None else key
    expected = _part(whole, key, manifest) if key else whole
    nbytes = sum(value.numel() * value.element_size() for value in state.values() if not is_lazy(value))
    found: dict[str, TensorHash] = {}
    done = 0
    with byte_progress(progress, type(model).__name__, nbytes) as report:
        for name, value in state.items():
            found[name] = _hash(name, value, expected.algorithm)
            done += value.nbytes
            if report:
                report(done)
    problems = tuple(compare(expected, found, found, ties={}, unread=()))
    return VerifyReport(
        source=type(model).__name__,
        format="live weights",
        key=key or None,
        problems=problems,
        tensors=len(found),
        total=len(found),
        named=len(found),
        nbytes=nbytes,
        seconds=time.perf_counter() - started,
        algorithm=expected.algorithm,
        hashes=found,
    )


def _key(manifest: Manifest, names: Collection[str]) -> str:
    """Return the part of a manifest that has the names of a model, if only one has and the whole does not."""
    end = f".{next(iter(names), '')}"
    found = [name.removesuffix(end) for name in manifest.tensors if name.endswith(end)]
    return found[0] if len(found) == 1 and manifest.tensors.keys().isdisjoint(names) else ""


def _part(manifest: Manifest, key: str, path: str) -> Manifest:
    start = f"{key}."
    own = {name.removeprefix(start): each for name, each in manifest.tensors.items() if name.startswith(start)}
    if not own:
        raise MismatchError(f"the manifest has no tensor in {key!r}", file=path)
    return replace(manifest, tensors=own)


def _hash(name: str, tensor: torch.Tensor, algorithm: HashAlgorithm) -> TensorHash:
    if is_lazy(tensor) or tensor.is_meta or is_dtensor(tensor) or tensor.layout != torch.strided or tensor.is_quantized:
        raise UnsupportedError(
            "only dense tensors that are in memory as a whole are hashed",
            tensor=name,
            found=f"{type(tensor).__name__} on {tensor.device}",
            advice="Load the model first; of a divided one, verify the files.",
        )
    hasher, shape = new_hash(algorithm), tuple(tensor.shape)
    for box in boxes(shape, SAVE_STAGING_BYTES // max(1, tensor.element_size())):
        piece = tensor.detach()[box].resolve_conj().resolve_neg().contiguous().cpu()
        hasher.update(piece.view(-1).view(torch.uint8).numpy().data)
    return TensorHash(dtype=dtype_name(tensor.dtype), shape=shape, hash=hasher.hexdigest())
