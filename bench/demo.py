"""``python -m bench.demo``, run by ``make demo``: ``sluice bench`` with results in ``demo-out/``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sluice.cli import main as sluice

__all__ = ["main"]


def main(arguments: Sequence[str]) -> None:
    """Compare the tutorial's loading methods and sluice; the arguments are those of ``sluice bench``."""
    sluice(["bench", "--out", "demo-out", *arguments], prog_name="sluice")


if __name__ == "__main__":
    main(sys.argv[1:])
