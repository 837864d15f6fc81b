"""The request of a copy: its contents, and the key that follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import cast

from msgspec import Struct
from msgspec.structs import replace

from sluice import __version__
from sluice._dtypes import is_castable
from sluice._errors import UnsupportedError
from sluice.adapters.config import Adapter
from sluice.adapters.steps import AdapterFile
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.converting.contents import flat_contents
from sluice.entries.rules import Rule
from sluice.matching.renaming import Rename
from sluice.records import Entry

__all__ = ["CopyRequest"]

#: Size of a key, in bytes: two of 100 million contents are equal by accident once in 10**22 cases.
_KEY_BYTES = 16


class CopyRequest(Struct, frozen=True, kw_only=True):
    """Contents of a copy: a part of a checkpoint and its changes."""

    checkpoint: OpenCheckpoint
    #: Name of the dtype of real floating-point tensors; None keeps each dtype.
    dtype: str | None = None
    key: str | None = None
    rename: Rename | None = None
    rules: Sequence[Rule] = ()
    adapters: Sequence[Adapter] = ()

    def entries(self) -> Mapping[str, Entry]:
        """Return the records of its tensors by name, before ``dtype``."""
        contents = flat_contents(self.checkpoint, key=self.key, rename=self.rename, rules=self.rules)
        return cast("Mapping[str, Entry]", contents.tree)

    def digest(self) -> str:
        """Return the key of the copy: equal only if its bytes are; reads no data.

        Raises:
            UnsupportedError: A file has nothing that tells it from others of its size.
        """
        checkpoint = self.checkpoint
        index = checkpoint.index
        merged = [AdapterFile(each, checkpoint.limits) for each in self.adapters]
        records = zip(index.files, checkpoint.open_files, strict=True)
        files = [file for record, each in records for file in getattr(each.source, "origins", ()) or [record]]
        for file in (*files, *(file for each in merged for file in each.files)):
            if not file.identity.exact:
                problem = "a source without inode, strong ETag or version cannot be shared: its content could be any"
                raise UnsupportedError(problem, file=file.path, advice="Write it to a file first.")
        digest = blake2b(digest_size=_KEY_BYTES)
        steps = [
            (each.config, [file.describe() for file in each.files], each.adapter.weight, each.adapter.prefix)
            for each in merged
        ]
        described = [file.describe() for file in files]
        for part in (__version__, steps, described, index.storages, index.crcs, sorted(checkpoint.metadata.items())):
            digest.update(repr(part).encode("utf-8", "surrogatepass"))
        for name, entry in self.entries().items():
            dtype = self.dtype if self.dtype is not None and is_castable(entry.dtype) else entry.dtype
            plain = replace(entry, attributes=None, origin="")
            digest.update(repr((name, entry.cast or dtype, plain)).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()
