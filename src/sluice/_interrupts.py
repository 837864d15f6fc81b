"""Interrupts (SIGINT, Ctrl-C) of the command line before, during and after a command.

While modules are imported and options are parsed, nothing is open or half written, and an exception could be caught or
replaced by the module that is being imported: the process ends at once, without a traceback. During a command an
interrupt is a ``KeyboardInterrupt``, so that files are closed and removed.

This module imports only what Python has loaded at its start: an interrupt before the handler is in place shows a
traceback.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from types import FrameType
    from typing import Self
else:
    import _signal as signal  # the part of ``signal`` without enum, which takes longer to import than everything here

__all__ = ["INTERRUPTED", "InterruptsRaised", "end_on_interrupt"]

#: Exit code after an interrupt: 128 + SIGINT, by convention of shells.
INTERRUPTED = 130

_STDERR = 2


def end_on_interrupt() -> None:
    """Let an interrupt end this process, unless its parent chose that interrupts are ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


class InterruptsRaised:
    """A block in which an interrupt raises ``KeyboardInterrupt``, if it would end the process outside of it.

    Attributes:
        happened: Whether there was an interrupt. Code that runs during an import can replace the exception.
    """

    def __init__(self) -> None:
        self.happened = False
        self._changed = False

    def __enter__(self) -> Self:
        if signal.getsignal(signal.SIGINT) is _end:
            self._changed = True
            signal.signal(signal.SIGINT, self._raise)
        return self

    def __exit__(self, *_: object) -> None:
        if self._changed:
            signal.signal(signal.SIGINT, _end)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self.happened = True
        signal.default_int_handler(number, frame)


def _end(_number: int, _frame: FrameType | None) -> None:
    try:
        os.write(_STDERR, b"Error: interrupted\n")
    finally:
        os._exit(INTERRUPTED)
