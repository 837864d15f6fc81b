"""Construction of many records, for indexes of 100,000 tensors."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector while an index is built, a load is planned or a module gets its tensors.

    Its passes over a growing heap of records without cycles free nothing and take a third of the time. The pause
    affects the whole process, so keep it short. A collector that is disabled stays disabled.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
