"""``sluice.refresh``: fill the live weights of a model with what changed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from sluice._arguments import check_load, check_model, path_argument
from sluice._dtypes import DType
from sluice._errors import BudgetError
from sluice._messages import type_of
from sluice._options import DEFAULT_LIMITS, Limits, Memory
from sluice._progress import Progress
from sluice._public import explain_keywords, public
from sluice.checkpoint.open_checkpoint import CheckpointSource, borrow
from sluice.entries.rules import Rule
from sluice.formats.manifest import Manifest, parse_manifest, read_manifest
from sluice.loading.load import load
from sluice.loading.refresh import Lock, RefreshRequest, Torn
from sluice.matching.renaming import Rename
from sluice.modules.unloaded import refusing
from sluice.reports.load import RefreshState

__all__ = ["refresh"]


@public()
@explain_keywords
def refresh(
    model: torch.nn.Module,
    source: CheckpointSource,
    *,
    since: RefreshState | str | os.PathLike[str] | Mapping[str, Any] | None = None,
    torn: Torn = "never",
    lock: Lock = None,
    manifest: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    dtype: DType | None = None,
    key: str | None = None,
    rename: Rename | None = None,
    rules: Sequence[Rule] = (),
    strict: bool = True,
    memory: Memory = None,
    limits: Limits | None = None,
    progress: Progress = False,
) -> RefreshState:
    """Fill the live weights of a model in place with what changed in a checkpoint: all of it, or none.

    Tensors keep their memory, so that ties, hooks, optimizers and other holders see the new values. What changed is
    known by the hashes of a manifest, the CRC-32s of a zip file, or the identity of each file (inode and times, strong
    ETag, version); without ``since``, and where none of them is known, all is read.

    Args:
        model: A loaded model. On several ranks, every rank makes the call, and all of them change or none.
        source: The new weights, as in ``load_into``. Adapters that a load has merged are not among them.
        since: The state that an earlier refresh returned, or ``report.state`` of a load; or the manifest of the weights
            that the model has, to be compared with ``manifest``; None if they are unknown.
        torn: ``"never"`` and ``"undo"`` read into memory of their own, as large as what changed, and exchange values
            when all of it is there, so that any failure puts the old ones back; a ``BudgetError`` if that does not
            fit. ``"allow"`` reads straight into the weights: a failure may leave them in part, as in ``load_into``.
        lock: A context manager that is held while weights change; or a function that returns one for the path of a
            module, whose own tensors change while it is held (tied tensors, while those of all their modules are).
            Modules for which it returns the same object, such as those of a block, change together. With
            ``torn="allow"`` it is called once, with ``""``.
        manifest: Manifest of the new weights, as ``save(manifest=)`` writes it: its path, or its content.
        dtype: As in the load that filled the model; it is needed only if that changed dtypes.
        key: As in ``load_into``.
        rename: As in ``load_into``.
        rules: As in ``load_into``.
        strict: As in ``load_into``.
        memory: How much memory may grow, as in ``load_into``.
        limits: Bounds for hostile files.
        progress: True draws a bar; a function is called with each ``ProgressEvent``.

    Returns:
        The new state. If the call raises anything but ``PartialLoadError`` (an interrupt has its text as a note), the
        model and the old state are valid.

    Raises:
        MismatchError: Checkpoint and model disagree, or a tensor cannot be filled in place; nothing was touched.
        BudgetError: What changed does not fit into memory together with the model; nothing was read.
        PartialLoadError: Weights began to change, and ``torn="allow"`` met a failure, or a hook of the model raised, or
            the lock raised twice. Until it is loaded or refreshed again, the model refuses calls; then all is read.
        StreamError: The model is streamed.
        CheckpointError: The file is damaged, unsafe or of an unknown kind.
        ReadError: The operating system failed a read.
        SourceChangedError: The file changed during the refresh.
        RankError: Other ranks failed or called something else.

    Example:
        >>> state = sluice.load_into(model, "model.pth").state
        >>> state = sluice.refresh(model, "model.pth", since=state)
        >>> print(len(state.changed), "of", len(state.contents), "tensors changed")
        0 of ... tensors changed
    """
    arguments = locals()
    check_model(model, source, "refresh(model, source)")
    check_load(**arguments)
    if torn not in {"never", "undo", "allow"}:
        raise ValueError(f'torn={torn!r}: one of "never", "undo", "allow"')
    if not (lock is None or callable(lock) or hasattr(lock, "__enter__")):
        raise TypeError(f"lock= is {type_of(lock)}, not a lock")
    hashes = _manifest(manifest, "manifest", limits)
    known = since.contents if isinstance(since, RefreshState) else _manifest(since, "since", limits)
    if isinstance(known, Manifest) and hashes is None:
        raise TypeError("since= a manifest needs manifest=, that of the new weights")
    request = RefreshRequest.of(arguments, since=known or None, manifest=hashes)
    try:
        with refusing(model):
            report = load(request, borrow(source, limits=limits), progress=progress)
    except BudgetError as error:
        error.advice = "Nothing was read: raise the limits, or use torn='allow': it needs no memory for what changed."
        raise
    assert report.state is not None
    return replace(report.state, report=report)


def _manifest(given: Any, name: str, limits: Limits | None) -> Manifest | None:
    if given is None:
        return None
    if isinstance(given, Mapping):
        try:
            content = json.dumps(given)
        except TypeError as error:
            raise TypeError(f"{name} is {type_of(given)}, but not the content of a manifest: {error}") from error
        return parse_manifest(content.encode(), f"{name}=", limits or DEFAULT_LIMITS)
    return read_manifest(path_argument(given, name), limits or DEFAULT_LIMITS)
