"""``sluice.shared``, and ``load_into`` and ``plan`` with ``place="shared"``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from sluice._arguments import check_load, dtype_argument, memory_limits, path_argument, size_or_none
from sluice._dtypes import DType
from sluice._options import TEXT_ENCODING, Limits, Memory
from sluice._progress import Progress
from sluice._public import explain_keywords, public
from sluice._units import format_bytes
from sluice.adapters.config import Adapters, adapter_list
from sluice.checkpoint.open_checkpoint import CheckpointSource, borrow
from sluice.entries.rules import EachRule, Rule
from sluice.matching.renaming import Rename
from sluice.reports.load import LoadReport
from sluice.sharing.copies import CopyRequest, SharedCopy, builder, completed, find_or_build
from sluice.sharing.store import FILE, is_finished, open_store

if TYPE_CHECKING:
    from sluice.reports.plan import PlanReport

__all__ = ["load_shared", "plan_shared", "shared"]


@public()
@explain_keywords
def shared(
    source: CheckpointSource,
    *,
    dtype: DType | None = None,
    key: str | None = None,
    rename: Rename | None = None,
    rules: Sequence[Rule] = (),
    adapters: Adapters | None = None,
    memory: Memory = None,
    max_bytes: int | str | None = None,
    directory: str | os.PathLike[str] | None = None,
    limits: Limits | None = None,
    encoding: str = TEXT_ENCODING,
    progress: Progress = False,
) -> SharedCopy:
    """Find or build one finished copy of a checkpoint in shared memory, for all processes of this user on this host.

    The first process converts the checkpoint, as ``convert`` does; the others wait for it, and later ones find it.
    ``load_into(model, copy)`` makes tensors pages of the copy: ready at once, held once by all processes, and private
    as soon as one is written to. Two checkpoints share a copy only if they are the same files with the same changes.

    A copy stays after its processes have ended. Unused copies are dropped when another one needs their room;
    ``sluice share --list`` and ``--drop`` show and remove them.

    Args:
        source: A checkpoint file or directory, a shard index, or an open checkpoint; see ``open``.
        dtype: Dtype of real floating-point tensors in the copy; None keeps those of the file.
        key: Part of the checkpoint; None takes the only state dict in it.
        rename: New names, as in ``load_into``.
        rules: Rules that transform tensors, by their new names; see ``sluice.rules``.
        adapters: Adapters to merge, as in ``convert``.
        memory: Limit on the growth of host memory without the copy, as in ``convert``.
        max_bytes: Most bytes of all copies together, such as ``"20GiB"``; half of the file system by default.
        directory: Where copies are, for this user alone (mode 0700). By default that of the variable
            ``SLUICE_SHARED_DIR``, then ``/dev/shm/sluice-UID``, then ``$XDG_RUNTIME_DIR/sluice``.
        limits: Bounds for hostile files.
        encoding: Encoding of text that Python 2 wrote, as in ``torch.load``; see ``open``.
        progress: True draws a bar while the copy is built; a function is called with each ``ProgressEvent``.

    Returns:
        The copy, which is a source and a context manager. It is not dropped before the block has ended and the models
        that were loaded from it are gone.

    Raises:
        CheckpointError: The source is damaged, unsafe or not supported, or its content has no identity.
        MismatchError: There is not exactly one state dict, or ``key``, ``rename`` or ``rules`` do not match it.
        BudgetError: There is no room for the copy; nothing was written.
        SaveError: The directory is not private, or the copy could not be written, or its builder does not finish.
        ReadError: The operating system failed a read.
        SourceChangedError: The source changed while it was converted.

    Example:
        >>> with sluice.shared("model.pth", dtype="bf16") as copy:
        ...     report = sluice.load_into(model, copy, dtype="auto")
    """
    check_load(key=key, limits=limits, rename=rename, rules=rules, progress=progress)
    parsed, most = dtype_argument(dtype, auto_is_none=True), size_or_none("max_bytes", max_bytes)
    merged = adapter_list(adapters)
    store = open_store(None if directory is None else path_argument(directory, "directory"))
    with borrow(source, limits=limits, encoding=encoding) as checkpoint:
        request = CopyRequest(checkpoint=checkpoint, dtype=parsed, key=key, rename=rename, rules=rules, adapters=merged)
        return find_or_build(request, store, max_bytes=most, memory=memory_limits(memory), progress=progress)


def load_shared(
    load: Callable[..., LoadReport], model: torch.nn.Module, source: CheckpointSource | SharedCopy, **others: Any
) -> LoadReport:
    """Map a shared copy, which is found or built first unless it is the source; ``load`` is ``sluice.load_into``."""
    if isinstance(source, SharedCopy):
        source.hold_for(model)
        with borrow(source, limits=others["limits"]) as opened:
            return load(model, opened, **{**others, "place": "map"})
    dtype = _stored_dtype(model, others)
    same = ("key", "rename", "rules", "adapters", "memory", "limits", "encoding", "progress")
    with shared(source, dtype=dtype, **{name: others[name] for name in same}) as copy:
        return load_shared(load, model, copy, **_of_copy(others))


def plan_shared(
    plan: Callable[..., PlanReport], model: torch.nn.Module | None, source: CheckpointSource | SharedCopy, **others: Any
) -> PlanReport:
    """Plan the mapping of a shared copy, of one that is not built yet from its header; ``plan`` is ``sluice.plan``."""
    if isinstance(source, SharedCopy):
        with borrow(source, limits=others["limits"]) as opened:
            return plan(model, opened, **{**others, "place": "copy" if model is None else "map"})
    dtype = _stored_dtype(model, others)
    changes = {name: others[name] for name in ("key", "rename", "rules")}
    mapped = {**_of_copy(others), "place": "map"}
    store = open_store()
    with borrow(source, limits=others["limits"], encoding=others["encoding"]) as checkpoint:
        request = CopyRequest(checkpoint=checkpoint, dtype=dtype, adapters=adapter_list(others["adapters"]), **changes)
        path = store / request.digest() / FILE
        with TemporaryDirectory() as folder:
            built = is_finished(path.parent)
            nbytes = 0 if built else builder().outline(request, Path(folder, FILE))
            with borrow(path if built else Path(folder, FILE), limits=others["limits"]) as copy:
                report = plan(model, completed(copy, checkpoint.path, request.state()), **mapped)
    note = f"the shared copy is not built yet: the load would first write {format_bytes(nbytes)} to {store}"
    return report if built else dataclasses.replace(report, files=(str(path),), notes=(*report.notes, note))


def _of_copy(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for the load of a copy, in which all changes are made: a cast of a rule stays."""
    own = "auto" if _has_casts(arguments) else arguments["dtype"]
    return {**arguments, "dtype": own, "key": None, "rename": None, "rules": (), "adapters": None}


def _has_casts(arguments: dict[str, Any]) -> bool:
    return any(isinstance(rule, EachRule) and rule.kind == "cast" for rule in arguments["rules"])


def _stored_dtype(model: torch.nn.Module | None, arguments: dict[str, Any]) -> str | None:
    """Return the dtype of the copy; that of the model, as in a load, where the order of casts makes a difference."""
    if arguments["quantize"] is not None:
        raise ValueError(
            "place='shared' does not quantize: load once with quantize=, write the model with sluice.save, and share "
            "that file"
        )
    dtype = dtype_argument(arguments["dtype"], auto_is_none=True)
    if model is None or arguments["dtype"] is not None or not (_has_casts(arguments) or arguments["adapters"]):
        return dtype
    tensors = (*model.parameters(), *model.buffers())
    found = {str(each.dtype).removeprefix("torch.") for each in tensors if each.is_floating_point()}
    if len(found) > 1:
        raise ValueError(
            f"place='shared' needs dtype= here: casts and adapters follow the dtype of the model, which has several "
            f"({', '.join(sorted(found))})"
        )
    return dtype_argument(*found) if found else None
