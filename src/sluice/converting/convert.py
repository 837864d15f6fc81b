"""Convert a checkpoint: select its content, refuse what the format cannot hold, write the files, and report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from sluice._dtypes import why_no_cast
from sluice._errors import MismatchError, UnsupportedError
from sluice.converting.contents import flat_contents, whole_contents
from sluice.converting.conversion import Conversion, Written
from sluice.converting.destination import check_destination
from sluice.converting.tensor_files import convert_to_directory, convert_to_safetensors
from sluice.converting.torch_files import convert_to_parameters, convert_to_torch
from sluice.entries.rules import Rule
from sluice.entries.tree import every_entry, walk
from sluice.matching.renaming import Rename
from sluice.reports.save import SaveReport
from sluice.writing.save_formats import ConvertFormat

__all__ = ["convert_checkpoint"]

#: Formats whose files are pickles, which can describe sparse and quantized tensors.
_TORCH_FILES = frozenset({"torch", "per-parameter"})

_WRITERS: Mapping[ConvertFormat, Callable[[Conversion, object], Written]] = {
    "torch": convert_to_torch,
    "safetensors": convert_to_safetensors,
    "huggingface": convert_to_directory,
    "per-parameter": convert_to_parameters,
}


def convert_checkpoint(
    conversion: Conversion, *, key: str | None, rename: Rename | None, rules: Sequence[Rule], started: float
) -> SaveReport:
    """Convert a checkpoint; ``sluice.convert`` documents errors.

    Args:
        conversion: Source, destination and options.
        key: Part of the checkpoint; None for the whole object, or the only state dict in it.
        rename: New names.
        rules: Rules that transform tensors, by their new names.
        started: ``time.perf_counter()`` at the start of the call.
    """
    checkpoint, chosen = conversion.checkpoint, conversion.save_format
    check_destination(checkpoint, conversion.destination, chosen)
    read = whole_contents if chosen == "torch" else flat_contents
    contents = read(checkpoint, key=key, rename=rename, rules=rules)
    _check(conversion, contents.tree)
    written = _WRITERS[chosen](conversion, contents.tree)
    if conversion.manifest:
        conversion.manifest.commit()
    return SaveReport(
        destination=str(conversion.destination),
        format=chosen,
        files=tuple(str(file) for file in written.files),
        file_bytes=tuple(written.files.values()),
        replaced=written.replaced,
        tensors=written.tensors,
        source=checkpoint.path,
        source_format=checkpoint.format,
        key=contents.key or None,
        taken=contents.taken,
        total=contents.total,
        nbytes=written.nbytes,
        seconds=time.perf_counter() - started,
        tied=written.tied,
        casts=written.casts,
        notes=(*checkpoint.index.notes, *contents.notes, *checkpoint.source_notes),
        dry_run=conversion.dry_run,
    )


def _check(conversion: Conversion, tree: object) -> None:
    """Refuse data that the format cannot hold, before anything is written."""
    chosen = conversion.save_format
    names = {id(entry): name for name, entry in walk(tree)}
    for entry in every_entry(tree):
        name = names.get(id(entry), "_metadata")
        if entry.composite is not None and (conversion.manifest or chosen not in _TORCH_FILES):
            where = "a manifest has no hash for it" if chosen in _TORCH_FILES else f"{chosen} files hold dense tensors"
            raise UnsupportedError(
                f"a {entry.layout} tensor cannot be written: {where}", file=conversion.checkpoint.path, tensor=name
            )
        why = why_no_cast(entry.dtype, conversion.finished(entry), requires_grad=entry.requires_grad)
        if why:
            raise MismatchError(why, file=conversion.checkpoint.path, tensor=name)
