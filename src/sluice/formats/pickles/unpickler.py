"""An inert unpickler: it reads pickles of protocols 1 to 5 and never imports or calls the globals that they name.

A pickle is a program for a small stack machine. This module has the loop of that machine, ``machine`` its state, and
``opcodes`` one function for each opcode that ``torch.save`` emits. Python's own unpickler cannot be made inert:
``copyreg`` extensions import modules without calling ``find_class``, one PUT can allocate gigabytes, and nested tuples
as a dict key crash the interpreter.

- A global is looked up in a table of exact ``(module, name)`` pairs. A global outside the table becomes an ``Opaque``
  leaf that keeps its name: calling it, filling it or setting its state has no effect.
- Only a ``Constructor`` in the table of the caller builds a value. If it refuses its arguments, the machine continues
  with a ``Refusal`` in place of the value, and ``check_object`` raises its error with the name of the tensor. A value
  of an unsupported kind, and any value built from it, becomes an ``UnsupportedValue``, which is also an inert leaf.
- An opcode without a handler is refused, with its name and offset.
- Text that Python 2 wrote (BINSTRING) does not declare its encoding; it is decoded as ``torch.load(encoding=)`` does.

Limits: opcodes (``Limits.nodes``), nesting (``Limits.depth``), memo indices, lengths of text and bytes, and integers
and tuples as keys are checked before use. No allocation is sized by a declared value, and no step recurses,
regardless of the depth of the data.
"""

from __future__ import annotations

import struct

from sluice._errors import CheckpointError, FormatError, LimitError, TruncatedError, UnsupportedError
from sluice._options import TEXT_ENCODING, Limits
from sluice.formats.pickles.machine import Constructor, Machine, PendingObject, Refusal
from sluice.formats.pickles.opcodes import HANDLERS, STOPPED
from sluice.records import TorchText
from sluice.sources.protocol import Source

__all__ = ["Allowlist", "Constructor", "KeyGuard", "PendingObject", "Refusal", "Unpickler", "unpickle_at"]

#: Bytes of a file that are read for a pickle at first.
_FIRST_BYTES = 4 << 10

#: Integers that are their own hash. Larger integers can be chosen so that all of them collide.
_PLAIN_HASHES = range(-(2**61) + 2, 2**61 - 1)

#: Maximum number of tuples, besides those of only text or only bytes: 4,096 that collide take a few milliseconds.
_MAX_TUPLES = 4_096

_MAX_TUPLE_ELEMENTS = 16

_KINDS = frozenset({str, TorchText, bytes, int, float, bool, type(None)})


class KeyGuard:
    """Checks of the dict keys and set elements in one pickle, which the file chooses.

    Filling a dict takes quadratic time if its keys collide, and hashing a nested tuple recurses in C until the
    stack overflows. Python seeds the hashes of text and bytes per process, so a file cannot make those collide.

    Limits: ``Limits.name_bytes`` for text, 61 bits for integers, tuples of at most 16 elements, and 4,096 of those that
    are not only text or only bytes. Refused: other types, nested tuples included.
    """

    def __init__(self, limits: Limits) -> None:
        self._max_name = limits.name_bytes
        self._tuples = 0

    def check(self, key: object) -> None:
        """Check that hashing ``key`` takes bounded time and that it cannot collide with many other keys.

        Raises:
            LimitError: The key is too long or too large, or there are too many tuples.
            UnsupportedError: The key is neither a plain value nor a flat tuple of plain values.
        """
        parts: tuple[object, ...] = (key,)
        if isinstance(key, tuple) and len(key) <= _MAX_TUPLE_ELEMENTS:
            self._tuples += {*map(type, key)} not in ({str}, {bytes})  # "a" and b"a" have the same hash
            if self._tuples > _MAX_TUPLES:
                raise LimitError(f"the pickle uses more than {_MAX_TUPLES} tuples as keys")
            parts = key
        for part in parts:
            if type(part) not in _KINDS:
                raise UnsupportedError(f"a key has the unsupported type {type(part).__name__}")
            if isinstance(part, str) and len(part) > self._max_name:
                raise LimitError(f"a key is longer than {self._max_name} characters")
            if type(part) is int and part not in _PLAIN_HASHES:
                raise LimitError("a key is an integer of more than 61 bits")


class Allowlist:
    """The globals and persistent ids that a pickle may use: none, unless a subclass permits some."""

    def __init__(self, limits: Limits) -> None:
        #: Checks of dict keys and set elements.
        self.keys = KeyGuard(limits)

    def find(self, module: str, name: str) -> object | None:
        """Return the replacement of a permitted global, or the function that builds its values; None for any other."""
        del module, name
        return None

    def load_persistent(self, identity: object) -> object:
        """Return the object of a persistent id, or refuse it as ``Constructor.build`` refuses arguments."""
        del identity
        raise FormatError("the pickle refers to a storage outside the object of a file")


class Unpickler(Machine):
    """The interpreter of one pickle."""

    def load(self) -> object:
        """Run the pickle and return its object; ``end`` is then the position after STOP.

        If ``refusal`` is not None, the object may contain ``Refusal`` placeholders. Its depth is unchecked. Pass it to
        ``check_object`` before use.

        Raises:
            FormatError: The pickle is malformed.
            TruncatedError: The pickle ends inside an opcode or before STOP.
            LimitError: The pickle exceeds a limit.
            UnsafeContentError: The pickle uses an opcode that names code and that torch.save never writes.
            UnsupportedError: The protocol is 0 or newer than 5, or a key is of a kind that is not permitted.
        """
        position = 0
        while position != STOPPED:
            position = self._run(position)
        self.memo.clear()
        value: object = self.stack.pop()
        return value

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
        more = self.more(len(self.data)) if self.more else b""
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


def unpickle_at(
    source: Source, start: int, allowlist: Allowlist, limits: Limits, *, encoding: str = TEXT_ENCODING
) -> tuple[object, Unpickler, int]:
    """Run the pickle that starts at byte ``start`` of the file; see ``Unpickler`` for the encoding.

    The start is read, and read on if the pickle has not ended: each time as many bytes again. The bytes read after its
    end are therefore at most its length, one pickle frame (64 KiB), or 4 KiB.

    Returns:
        The object, unchecked (see ``Unpickler.load``), the unpickler that built it, and the offset in the file of the
        first byte after the pickle.

    Raises:
        TruncatedError: The file ends before the pickle does.
        LimitError: The pickle is longer than ``limits.header_bytes`` or exceeds another limit.
        CheckpointError: See ``Unpickler.load``.
    """
    file, available = source.path, source.identity.nbytes - start
    if available <= 0:
        raise TruncatedError("the file ends where a pickle should start", file=file, offset=start)
    allowed = min(available, limits.header_bytes)

    def more(known: int) -> bytes:
        if known == allowed < available:
            problem, expected = "a pickle exceeds the limit 'header_bytes'", f"at most {limits.header_bytes}"
            raise LimitError(problem, file=file, offset=start, expected=expected)
        return source.read_at(start + known, min(known, allowed - known))

    first = source.read_at(start, min(_FIRST_BYTES, allowed))
    unpickler = Unpickler(first, allowlist, limits=limits, file=file, offset=start, more=more, encoding=encoding)
    value = unpickler.load()
    return value, unpickler, start + unpickler.end
