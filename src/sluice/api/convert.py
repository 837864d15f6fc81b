"""``sluice.convert``: write a checkpoint in another format, dtype or naming."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from sluice._arguments import check_load, dtype_argument, memory_limits, path_argument, size_or_none
from sluice._dtypes import DType
from sluice._options import TEXT_ENCODING, Limits, Memory, PageCache
from sluice._progress import Progress
from sluice._public import explain_keywords, public
from sluice.adapters.config import Adapters, adapter_list
from sluice.api.save import save_destination
from sluice.checkpoint.open_checkpoint import CheckpointSource, borrow
from sluice.converting.convert import convert_checkpoint
from sluice.entries.rules import Rule
from sluice.formats.manifest import HashAlgorithm
from sluice.matching.renaming import Rename
from sluice.reports.save import SaveReport
from sluice.sources.opening import UPLOAD_ADVICE, refuse_url
from sluice.sources.remote.location import Remote
from sluice.writing.contents import SaveJob
from sluice.writing.manifest import manifest_writer
from sluice.writing.save_formats import CONVERT_FORMATS, ConvertFormat, choose_format
from sluice.writing.uploads import Upload

__all__ = ["convert"]


@public()
@explain_keywords
def convert(
    source: CheckpointSource,
    destination: str | os.PathLike[str] | Remote,
    *,
    key: str | None = None,
    format: ConvertFormat | None = None,  # noqa: A002  (the name that every library has for it)
    dtype: DType | None = None,
    rename: Rename | None = None,
    rules: Sequence[Rule] = (),
    adapters: Adapters | None = None,
    max_shard_size: int | str | None = None,
    manifest: str | os.PathLike[str] | None = None,
    manifest_hash: HashAlgorithm = "sha256",
    overwrite: bool = False,
    progress: Progress = False,
    memory: Memory = None,
    limits: Limits | None = None,
    encoding: str = TEXT_ENCODING,
    page_cache: PageCache = "auto",
    dry_run: bool = False,
) -> SaveReport:
    """Write a checkpoint in another format, dtype or naming, with a fixed amount of memory.

    Bytes go from the source through the staging buffers to the new file; data that is not changed never becomes a
    tensor. Host memory grows by at most the staging buffers, 1 KiB per tensor and 32 MiB. The new file is written next
    to its final name, synced and renamed, as by ``save``.

    Args:
        source: A checkpoint file or directory, a shard index, a file object, or an open checkpoint; see ``open``.
        destination: A file or a directory. It may be the source, if that is a single file or a Hugging Face model.
        key: Part of the checkpoint, as in ``load_into``. None takes the whole object if the format can hold it
            (``"torch"``), and otherwise the only state dict in it; the report lists what was left out.
        format: As in ``save``, without ``"dcp"``. ``"torch"`` keeps nested objects, plain values, Parameters and
            shared storages; the others hold tensors by name.
        dtype: Dtype that real floating-point tensors are cast to, as a ``torch.dtype`` or a name such as ``"bf16"``;
            None keeps each dtype.
        rename: New names, as in ``load_into``.
        rules: Rules that transform tensors, by their new names; see ``sluice.rules``. With ``rename`` or ``rules``, a
            torch file holds a flat state dict.
        adapters: Adapters to merge, as in ``load_into``, by the new names and in the dtype of the result. Memory also
            holds the adapters, and one weight and its sums at a time; a torch file holds a flat state dict.
        max_shard_size: Bytes of tensors in one shard, such as ``"5GB"``; only for ``"huggingface"``.
        manifest: File for the hash, dtype and shape of each tensor, as in ``save``.
        manifest_hash: ``"sha256"``, or ``"xxh3_128"``, which is faster and only finds damage.
        overwrite: Whether existing files may be replaced, including the manifest.
        progress: True draws a bar; a function is called with each ``ProgressEvent``.
        memory: Limit on the growth of host memory, such as ``"200MiB"``, or ``MemoryLimits``, which also have the size
            of the staging buffers (at least 2 MiB).
        limits: Bounds for hostile files.
        encoding: Encoding of text that Python 2 wrote, as in ``torch.load``; see ``open``.
        page_cache: How the source is read, as in ``load_into``.
        dry_run: Write nothing; the report lists what would be written.

    Returns:
        The files that were written and their sizes, casts, ties, and what was left out.

    Raises:
        CheckpointError: The source is damaged, unsafe or not supported, or has data that cannot be written.
        MismatchError: There is not exactly one state dict, or ``key``, ``rename`` or ``rules`` do not match it.
        BudgetError: The memory limits cannot be kept; nothing was read.
        SaveError: The format cannot hold the data, or the operating system failed; existing files are intact.
        ReadError: The operating system failed a read.
        SourceChangedError: The source changed during the conversion.
        ValueError: The format is unknown or contradicts the other arguments, or an argument has none of its accepted
            values.
        TypeError: An argument has a wrong type.
        ImportError: The hash needs a library that is not installed.

    Example:
        >>> report = sluice.convert("model.pth", "half.safetensors", dtype=torch.bfloat16)
        >>> report = sluice.convert("run.pt", "hf-model", key="model", max_shard_size="5GB")
    """
    started = time.perf_counter()
    place = save_destination(destination, "destination")
    check_load(key=key, limits=limits, rename=rename, rules=rules, page_cache=page_cache, progress=progress)
    check_load(overwrite=overwrite, dry_run=dry_run)
    manifest_path = None if manifest is None else refuse_url(path_argument(manifest, "manifest"), advice=UPLOAD_ADVICE)
    merged = adapter_list(adapters)
    chosen = choose_format(Path(place.name), format, max_shard_size, CONVERT_FORMATS)
    with ExitStack() as stack:
        checkpoint = stack.enter_context(borrow(source, limits=limits, encoding=encoding))
        if isinstance(place, Upload):
            stack.enter_context(place)
        hashes = manifest_writer(manifest_path, manifest_hash, str(place), overwrite=overwrite or dry_run)
        job = SaveJob(
            destination=place,
            dtype=dtype_argument(dtype, auto_is_none=True),
            limit_bytes=size_or_none("max_shard_size", max_shard_size),
            metadata={"format": "pt"},
            overwrite=overwrite,
            progress=progress,
            manifest=hashes,
            dry_run=dry_run,
        )
        return convert_checkpoint(
            checkpoint,
            chosen,
            job,
            key=key,
            rename=rename,
            rules=rules,
            memory=memory_limits(memory),
            page_cache=page_cache,
            adapters=merged,
            started=started,
        )
