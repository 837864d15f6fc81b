"""Direct writes for small files, if the file system supports them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sluice import _defaults as defaults
from sluice.writing.durable import direct as _direct


@contextmanager
def forced_direct_writes() -> Iterator[None]:
    """Let every save of the block use direct I/O."""
    with pytest.MonkeyPatch.context() as patch:
        force_direct_writes(patch)
        yield


def force_direct_writes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(defaults, "DIRECT_FILE_BYTES", 1)
    patch.setattr(defaults, "DIRECT_WRITE_BYTES", 4096)
    patch.setattr(_direct, "takes_direct_io", lambda _: True)
