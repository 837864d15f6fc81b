"""``sluice.diff``: compare two checkpoints, in any two formats."""

from __future__ import annotations

import os
import time

from sluice._arguments import check_load, check_tolerances, path_argument
from sluice._options import TEXT_ENCODING, Limits
from sluice._progress import Progress
from sluice._public import explain_keywords, public
from sluice.checking.diff import compare_parts
from sluice.checking.parts import parts_to_compare
from sluice.checkpoint.open_checkpoint import CheckpointSource, borrow
from sluice.merging.patched import Patched
from sluice.merging.patches import write_patch
from sluice.reports.diff import DiffReport
from sluice.sources.opening import UPLOAD_ADVICE, find_place, refuse_url

__all__ = ["diff"]


@public()
@explain_keywords
def diff(
    a: CheckpointSource,
    b: CheckpointSource,
    *,
    key: str | None = None,
    other_key: str | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
    patch: str | os.PathLike[str] | None = None,
    sparse: bool = False,
    limits: Limits | None = None,
    encoding: str = TEXT_ENCODING,
    progress: Progress = False,
) -> DiffReport:
    """Compare presence, dtype, shape and values of the tensors of two checkpoints, with a fixed amount of memory.

    Tensors are compared by dotted name, in any formats, storage layouts, shards or chunks. Without keys, two
    checkpoints with their state dicts under the same keys are compared as a whole, optimizers included, and so
    are two with full names of state dicts in common. Otherwise the state dict of each is compared, as
    ``load_state_dict`` chooses it: a training checkpoint equals the safetensors file that was converted from it. The
    report says what was compared and what was left out.

    Ties are not compared: a name that only one side has is not a difference if that side also has the tensor under a
    common name. Tensors that sluice does not read count as different, because they cannot be compared.

    Values are compared as numbers, even if the dtypes differ: 0.0 and -0.0 are the same, and so are two NaNs. For
    sparse and quantized tensors, the component tensors are compared.

    Args:
        a: A checkpoint file or directory, a shard index, a file object, or an open checkpoint; see ``open``.
        b: The other checkpoint.
        key: Part of ``a``: a path into the nested object or a dotted prefix of names; ``""`` is the whole checkpoint.
        other_key: Part of ``b``.
        rtol: Relative tolerance: elements differ if ``|a - b| > atol + rtol * |b|``.
        atol: Absolute tolerance.
        patch: Also write what makes ``b`` of ``a``, bit for bit, for ``sluice.Patched``: a new directory of zstd-packed
            differences with checksums, as slime, miles and sglang read. Both are read once more, and two tensors are
            held at a time. The number at the end of its name is its version, and that of ``a`` the version of its base.
        sparse: Write a new ``.safetensors`` file of indices and values instead, as TRL does, without checksums.
        limits: Bounds for hostile files.
        encoding: Encoding of text that Python 2 wrote, as in ``torch.load``; see ``open``.
        progress: True draws a bar; a function is called with each ``ProgressEvent``.

    Returns:
        The differences of each tensor; ``.same`` is True if there are none.

    Raises:
        CheckpointError: One of the checkpoints is damaged, unsafe or not supported.
        MismatchError: A key does not exist, or a checkpoint holds several state dicts and the other one does not hold
            the same ones; the message lists them. Or a patch would have to add, remove or reshape tensors.
        ReadError: The operating system failed a read.
        SourceChangedError: A file changed during the comparison.
        SaveError: The patch cannot be written.
        ImportError: A patch without ``sparse`` needs ``pip install 'sluice[delta]'``.
        ValueError: A tolerance is negative, or ``sparse`` is without ``patch``.

    Example:
        >>> report = sluice.diff("model.pth", "model.pth")
        >>> report.same
        True
        >>> [(tensor.name, tensor.kinds, tensor.max_abs) for tensor in report.differences]
        []
    """
    started = time.perf_counter()
    check_tolerances(rtol=rtol, atol=atol)
    check_load(key=key, limits=limits, progress=progress)
    check_load(key=other_key)
    if sparse and patch is None:
        raise ValueError("sparse is for patch=")
    path = None if patch is None else refuse_url(path_argument(patch, "patch"), advice=UPLOAD_ADVICE)
    with (
        borrow(a, limits=limits, encoding=encoding, alone=False) as ours,
        borrow(b, limits=limits, encoding=encoding, alone=False) as theirs,
    ):
        parts = parts_to_compare(ours, theirs, key, other_key)
        if path is not None:
            left, right = parts
            base = find_place(a.deltas[-1]).title if isinstance(a, Patched) and a.deltas else ours.path
            write_patch(left.checkpoint, right.checkpoint, path, sparse=sparse, versions=(base, theirs.path))
        return compare_parts(ours, theirs, parts, rtol=rtol, atol=atol, progress=progress, started=started)
