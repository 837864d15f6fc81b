r"""Names of tied tensors, which a safetensors file stores once.

Tensors of the format may not share bytes, so a tensor with several names is stored under one of them. ``save_model`` of
the safetensors library maps each other name to the stored one in ``__metadata__``: ``{"head": "embedding"}``. Nothing
distinguishes such an item from other metadata (``{"task": "embedding"}``), so it never becomes a name of the file; it
is only looked up for a caller that knows the name (``OpenCheckpoint.stored_names``).

Files of sluice have those items, and declare them in one more item, whose text is a JSON object::

    {"__metadata__": {"sluice.tied_names": "{\"head\":\"embedding\"}", "head": "embedding", ...}, ...}

Names that are declared in this way are names of the checkpoint. Tools that split or join files copy ``__metadata__`` to
files with other tensors, so a declaration holds for all files of a checkpoint together: ``checkpoint.tied_names``
decides which of the names count.

Limits: ``Limits.entries`` for the declared names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from sluice._errors import FormatError
from sluice._options import Limits
from sluice.formats.safetensors.header import parse_texts

__all__ = ["TiedNames", "declare_ties", "read_ties"]

#: Key of the declaration in ``__metadata__``.
_KEY = "sluice.tied_names"


class TiedNames(NamedTuple):
    """The tied names that the metadata of a file declares."""

    #: Name of the stored tensor, by further name; the file may have neither.
    stored: Mapping[str, str]
    #: The metadata without the declaration and the items that it covers.
    metadata: Mapping[str, str]
    #: A sentence on a declaration that cannot be read.
    notes: tuple[str, ...]


def declare_ties(ties: Mapping[str, str], metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of a file with tied names: ``ties`` maps each name that is not stored to the stored one."""
    own = {key: text for key, text in metadata.items() if key != _KEY}
    if not ties:
        return own
    return {**ties, **own, _KEY: json.dumps(dict(ties), ensure_ascii=False, separators=(",", ":"))}


def read_ties(metadata: Mapping[str, str], path: str, limits: Limits) -> TiedNames:
    """Return the tied names that the metadata of a file declares.

    Args:
        metadata: ``__metadata__``.
        path: Path of the file, for error messages.
        limits: Bounds on names.

    Raises:
        LimitError: The declaration has more names than the limits allow.
    """
    if _KEY not in metadata:
        return TiedNames({}, metadata, ())
    try:
        declared = parse_texts(metadata[_KEY].encode(), path, limits)
    except FormatError:
        rest = {key: text for key, text in metadata.items() if key != _KEY}
        return TiedNames({}, rest, (f"The metadata {_KEY!r} is not a JSON object of names and was ignored.",))
    rest = {key: text for key, text in metadata.items() if key != _KEY and declared.get(key) != text}
    return TiedNames(declared, rest, ())
