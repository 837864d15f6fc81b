"""An inert unpickler: it reads pickles of protocols 2 to 5 and never imports or calls what they name.

A pickle is a program for a small stack machine. This is our own machine: one loop, its state (``_pickle_machine``) and
a function for each opcode that ``torch.save`` emits (``_pickle_opcodes``). Python's own unpickler cannot be made inert:
it imports through ``copyreg`` behind ``find_class``, one PUT can make it allocate gigabytes, and nested tuples as a key
crash it.

- A global is looked up in a table of exact ``(module, name)`` pairs. What the table does not hold becomes an ``Opaque``
  leaf that keeps its name: calling it, filling it or giving it state changes nothing.
- Only a ``Constructor`` of the caller's table builds anything. When one refuses its arguments, the machine goes on
  with a ``Refusal`` in their place; ``check_tree`` raises its error with the name of the tensor. What is of a kind that
  sluice does not read, and what is made of that, becomes an ``UnsupportedValue``: an inert leaf as well.
- Every opcode without a handler is refused, by name and offset.
- Bounds come before use: opcodes, marks, memo numbers, lengths of text and bytes, integers and tuples as keys. Nothing
  is sized by a declared value and no step recurses, however deep the data.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import TypeAlias

from sluice._errors import CheckpointError, FormatError, LimitError, TruncatedError
from sluice._options import Limits
from sluice.formats.pickles.keys import KeyGuard
from sluice.formats.pickles.machine import Allowlist, Constructor, Machine, PendingObject, Refusal
from sluice.formats.pickles.opcodes import HANDLERS, STOPPED

__all__ = ["Allowlist", "Constructor", "KeyGuard", "PendingObject", "Refill", "Refusal", "Unpickler"]

#: Bytes that are read of a value which is longer than the limit, to see whether the file holds it at all.
_LOOKED_AT_BYTES = 64 << 10

#: Called with the first byte of the file that is not used yet and the number of bytes known from there on; returns the
#: file from that byte on, as few bytes as before where there are no more.
Refill: TypeAlias = Callable[[int, int], bytes]


class Unpickler(Machine):
    """Runs one pickle."""

    def __init__(
        self,
        data: bytes,
        allowlist: Allowlist,
        *,
        limits: Limits,
        file: str,
        offset: int = 0,
        refill: Refill | None = None,
    ) -> None:
        """Prepare to run one pickle; see ``Machine`` for the other arguments.

        Args:
            data: The pickle; with ``refill``, its first bytes.
            allowlist: What it may name.
            limits: Bounds on what the pickle may declare.
            file: The file that holds it.
            offset: Where it starts in that file.
            refill: Gives more of the file where ``data`` ends, for pickles whose length is not known.
        """
        super().__init__(data, allowlist, limits=limits, file=file, offset=offset)
        self._refill = refill

    def load(self) -> object:
        """Run the pickle and return what it holds; ``end`` is then the first byte after it.

        The value still holds ``Refusal`` objects where ``refusal`` is not None, and its depth is unchecked: that is
        ``check_tree``'s work.

        Raises:
            FormatError: It is not a well-formed pickle.
            TruncatedError: It ends inside an opcode or before STOP.
            LimitError: It does more than the limits allow.
            UnsafeContentError: It uses an opcode that torch.save never writes.
            UnsupportedError: Its protocol is newer than 5, or a key is neither text nor a plain value.
        """
        if self.data[:1] != b"\x80":
            raise self.error(FormatError, "this is not a pickle of protocol 2 to 5", 0)
        position, steps = 0, iter(range(self.limits.nodes))
        while position != STOPPED:
            position = self._run(position, steps)
        self.memo.clear()
        value: object = self.stack.pop()
        return value

    def check_end(self, position: int, end: int) -> None:
        # A file that goes on is not read up to what one opcode declares; one that ends soon is truncated.
        goes_on = self._refill is not None and len(self.data) - position > _LOOKED_AT_BYTES
        if goes_on and end - position > self.limits.header_bytes:
            problem = f"the pickle declares more than {self.limits.header_bytes} bytes (header_bytes)"
            raise self.error(LimitError, problem, position, found=f"{end - position} bytes")
        super().check_end(position, end)

    def _run(self, position: int, steps: Iterator[int]) -> int:
        """Run opcodes from ``position`` on; return ``STOPPED``, or where to go on in the refilled data."""
        data, handlers = self.data, HANDLERS
        try:
            for _ in steps:
                position = handlers[data[position]](self, position + 1)
                if position == STOPPED:
                    return position
        except (IndexError, struct.error, UnicodeDecodeError, TruncatedError) as error:
            mapped = self._mapped(error, position)
            # No handler changes anything before it has all of its bytes, so that it can run again.
            if isinstance(mapped, TruncatedError) and self._advance(position):
                return 0
            raise mapped from (None if mapped is error else error)
        raise self.error(LimitError, f"the pickle has more than {self.limits.nodes} opcodes", position)

    def _advance(self, position: int) -> bool:
        """Replace the data by what the file holds from ``position`` on; return whether that is more than before."""
        known = len(self.data) - position
        data = self._refill(self._offset + position, known) if self._refill else b""
        if len(data) <= known:
            return False
        self.data = data
        self._offset += position
        self.frame_end -= position
        self.bound = self.frame_end if self.frame_end > 0 else len(data)
        return True

    def _mapped(self, error: Exception, position: int) -> CheckpointError:
        if isinstance(error, CheckpointError):
            return error
        if isinstance(error, UnicodeDecodeError):
            return self.error(FormatError, "text in the pickle is not UTF-8", position)
        if isinstance(error, struct.error) or position + 1 >= len(self.data):
            return self.error(TruncatedError, "the pickle ends before its STOP", position)
        return self.error(FormatError, "an opcode takes more than the stack or the memo holds", position)
