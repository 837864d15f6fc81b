r"""Names of tied tensors, which a safetensors file stores once.

Tensors of the format may not share bytes, so a tensor with several names is stored under one of them. ``save_model`` of
the safetensors library maps each other name to the stored one in ``__metadata__``: ``{"head": "embedding"}``. Nothing
distinguishes such an item from other metadata (``{"task": "embedding"}``), so it never becomes a name of the file; it
is only looked up for a caller that knows the name (``OpenCheckpoint.stored_names``).

Files of sluice have those items, and declare them in one more item, whose text is a JSON object::

    {"__metadata__": {"sluice.tied_names": "{\"head\":\"embedding\"}", "head": "embedding", ...}, ...}

Names that are declared in this way are names of the file. ``__metadata__`` may have been copied to a file with other
tensors. A declared name that is stored itself is the stored tensor. One whose tensor is not stored is left out, with a
note.

Limits: ``Limits.entries`` for all names together, and ``Limits.name_bytes`` for each.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from typing import NamedTuple

from sluice._errors import FormatError, LimitError
from sluice._messages import listed
from sluice._options import Limits
from sluice.formats.safetensors.header import parse_texts

__all__ = ["TiedNames", "declare_ties", "read_ties"]

#: Key of the declaration in ``__metadata__``.
_KEY = "sluice.tied_names"


class TiedNames(NamedTuple):
    """The tied names that a file declares."""

    #: Stored name of each further name.
    stored: Mapping[str, str]
    #: The metadata without the declaration and the items that it covers.
    metadata: Mapping[str, str]
    #: Sentences on what the declaration contradicts.
    notes: tuple[str, ...]


def declare_ties(ties: Mapping[str, str], metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of a file with tied names: ``ties`` maps each name that is not stored to the stored one."""
    own = {key: text for key, text in metadata.items() if key != _KEY}
    if not ties:
        return own
    return {**ties, **own, _KEY: json.dumps(dict(ties), ensure_ascii=False, separators=(",", ":"))}


def read_ties(metadata: Mapping[str, str], tensors: Container[str], count: int, path: str, limits: Limits) -> TiedNames:
    """Return the tied names that the metadata of a file declares.

    Args:
        metadata: ``__metadata__``.
        tensors: The names of the stored tensors.
        count: Their number.
        path: Path of the file, for error messages.
        limits: Bounds on names.

    Raises:
        LimitError: The file has more names, or a longer name, than the limits allow.
    """
    if _KEY not in metadata:
        return TiedNames({}, metadata, ())
    try:
        declared = parse_texts(metadata[_KEY].encode(), path, limits)
    except FormatError:
        rest = {key: text for key, text in metadata.items() if key != _KEY}
        return TiedNames({}, rest, (f"The metadata {_KEY!r} is not a JSON object of names and was ignored.",))
    rest = {key: text for key, text in metadata.items() if key != _KEY and declared.get(key) != text}
    ties = {name: stored for name, stored in declared.items() if stored in tensors and name not in tensors}
    if count + len(ties) > limits.entries:
        raise LimitError(
            "the stored and tied names exceed the limit 'entries'",
            file=path,
            expected=f"at most {limits.entries}",
            found=count + len(ties),
        )
    for name in ties:
        if len(name.encode()) > limits.name_bytes:
            raise LimitError(
                "a tied name exceeds the limit 'name_bytes'",
                file=path,
                tensor=name[:80],
                expected=f"at most {limits.name_bytes}",
                found=len(name.encode()),
            )
    lost = [repr(name) for name, stored in declared.items() if stored not in tensors and name not in tensors]
    why = "Left out, because the tensors that they are tied to are not in the file"
    return TiedNames(ties, rest, (f"{listed(why, lost)}.",) if lost else ())
