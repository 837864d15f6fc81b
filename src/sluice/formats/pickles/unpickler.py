"""An inert unpickler: it reads pickles of protocols 1 to 5 and never imports or calls the globals that they name.

A pickle is a program for a small stack machine. This module has the loop of that machine, ``machine`` its state, and
``opcodes`` one function for each opcode that ``torch.save`` emits. Python's own unpickler cannot be made inert:
``copyreg`` extensions import modules without calling ``find_class``, one PUT can allocate gigabytes, and nested tuples
as a dict key crash the interpreter.

- A global is looked up in a table of exact ``(module, name)`` pairs. A global outside the table becomes an ``Opaque``
  leaf that keeps its name: calling it, filling it or setting its state has no effect.
- Only a ``Constructor`` in the table of the caller builds a value. If it refuses its arguments, the machine continues
  with a ``Refusal`` in place of the value, and ``check_tree`` raises its error with the name of the tensor. A value of
  an unsupported kind, and any value built from it, becomes an ``UnsupportedValue``, which is also an inert leaf.
- An opcode without a handler is refused, with its name and offset.
- Text that Python 2 wrote (BINSTRING) does not declare its encoding; it is decoded as ``torch.load(encoding=)`` does.

Limits: opcodes (``Limits.nodes``), nesting (``Limits.depth``), memo indices, lengths of text and bytes, and integers
and tuples as keys are checked before use. No allocation is sized by a declared value, and no step recurses,
regardless of the depth of the data.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TypeAlias

from sluice._errors import CheckpointError, FormatError, LimitError, TruncatedError
from sluice._options import TEXT_ENCODING, Limits
from sluice.formats.pickles.keys import KeyGuard
from sluice.formats.pickles.machine import Allowlist, Constructor, Machine, PendingObject, Refusal
from sluice.formats.pickles.opcodes import HANDLERS, STOPPED

__all__ = [
    "Allowlist",
    "Constructor",
    "KeyGuard",
    "More",
    "PendingObject",
    "Refusal",
    "Unpickler",
]

#: Bytes read of a value longer than the limit, to distinguish a truncated file from a value that is too long.
_PROBE_BYTES = 64 << 10

#: Called with the number of bytes read so far. Returns the bytes that follow them; none at the end of the file.
More: TypeAlias = Callable[[int], bytes]


class Unpickler(Machine):
    """The interpreter of one pickle."""

    def __init__(
        self,
        data: bytes,
        allowlist: Allowlist,
        *,
        limits: Limits,
        file: str,
        offset: int = 0,
        more: More | None = None,
        encoding: str = TEXT_ENCODING,
    ) -> None:
        """Prepare to run one pickle.

        Args:
            data: The pickle; with ``more``, its first bytes.
            allowlist: Permitted globals and persistent ids.
            limits: Bounds on the declarations in the pickle.
            file: Path of the file, for error messages.
            offset: Offset of the pickle in the file, in bytes.
            more: Function that reads on, for pickles of unknown length.
            encoding: Encoding of the text that Python 2 wrote, or ``BYTES_ENCODING`` to keep its bytes.
        """
        super().__init__(data, allowlist, limits=limits, file=file, offset=offset, encoding=encoding)
        self._more = more

    def load(self) -> object:
        """Run the pickle and return its object; ``end`` is then the position after STOP.

        If ``refusal`` is not None, the object may contain ``Refusal`` placeholders. Its depth is unchecked. Pass it to
        ``check_tree`` before use.

        Raises:
            FormatError: The pickle is malformed.
            TruncatedError: The pickle ends inside an opcode or before STOP.
            LimitError: The pickle exceeds a limit.
            UnsafeContentError: The pickle uses an opcode that names code and that torch.save never writes.
            UnsupportedError: The protocol is 0 or newer than 5, or a key is neither a plain value nor a tuple of them.
        """
        position = 0
        while position != STOPPED:
            position = self._run(position)
        self.memo.clear()
        value: object = self.stack.pop()
        return value

    def check_end(self, position: int, end: int) -> None:
        # A value longer than the limit is not read in full. If the file ends soon, it is truncated instead.
        continues = self._more is not None and len(self.data) - position > _PROBE_BYTES
        if continues and end - position > self.limits.header_bytes:
            problem = f"an opcode declares more than {self.limits.header_bytes} bytes (header_bytes)"
            raise self.error(LimitError, problem, position, found=f"{end - position} bytes")
        super().check_end(position, end)

    def _run(self, position: int) -> int:
        """Run opcodes from ``position``; return ``STOPPED``, or the position of one that needed more data."""
        data, handlers = self.data, HANDLERS
        try:
            for _ in self.steps:
                position = handlers[data[position]](self, position + 1)
                if position == STOPPED:
                    return position
        except (IndexError, struct.error, UnicodeDecodeError, TruncatedError) as error:
            mapped = self._mapped(error, position)
            # A handler changes nothing before it has all its bytes, so the opcode can run again.
            if isinstance(mapped, TruncatedError) and self._read_on():
                return position
            raise mapped from (None if mapped is error else error)
        raise self.error(LimitError, f"the pickle has more than {self.limits.nodes} opcodes", position)

    def _read_on(self) -> bool:
        """Add the bytes of the file after ``data``; return whether there are any."""
        more = self._more(len(self.data)) if self._more else b""
        self.data += more
        self.bound = self.frame_end or len(self.data)
        return bool(more)

    def _mapped(self, error: Exception, position: int) -> CheckpointError:
        if isinstance(error, CheckpointError):
            return error
        if isinstance(error, UnicodeDecodeError):
            return self.error(FormatError, "text in the pickle is not UTF-8", position)
        if isinstance(error, struct.error) or position + 1 >= len(self.data):
            return self.error(TruncatedError, "the pickle ends before its STOP opcode", position)
        return self.error(FormatError, "an opcode needs more than the stack or the memo holds", position)
