"""Whether a command draws progress bars."""

from __future__ import annotations

import sys

__all__ = ["progress_wanted"]


def progress_wanted(*, quiet: bool) -> bool:
    """Return whether to draw a bar: stderr is a terminal, and not closed."""
    return not quiet and sys.stderr is not None and sys.stderr.isatty()
