"""An inert unpickler: it reads pickles of protocols 2 to 5 and never imports or calls what they name.

A pickle is a program for a small stack machine. This is our own machine: one loop, its state (``_pickle_machine``) and
a function for each opcode that ``torch.save`` emits (``_pickle_opcodes``). Python's own unpickler cannot be made inert:
it imports through ``copyreg`` behind ``find_class``, one PUT can make it allocate gigabytes, and nested tuples as a key
crash it.

- A global is looked up in a table of exact ``(module, name)`` pairs. What the table does not hold becomes an ``Opaque``
  leaf that keeps its name: calling it, filling it or giving it state changes nothing.
- Only a ``Constructor`` of the caller's table builds anything. When one refuses its arguments, the machine goes on
  with a ``Refusal`` in their place; ``check_tree`` raises its error with the name of the tensor.
- Every opcode without a handler is refused, by name and offset.
- Bounds come before use: opcodes, marks, memo numbers, lengths of text and bytes, integers and tuples as keys. Nothing
  is sized by a declared value and no step recurses, however deep the data.
"""

from __future__ import annotations

import struct

from sluice._errors import FormatError, LimitError, TruncatedError
from sluice.formats._pickle_keys import KeyGuard
from sluice.formats._pickle_machine import Allowlist, Constructor, Consumed, Machine, Refusal
from sluice.formats._pickle_opcodes import HANDLERS, STOPPED

__all__ = ["Allowlist", "Constructor", "KeyGuard", "Refusal", "Unpickler"]

_LONG_BINPUT, _BININT1, _TUPLE, _BINGET = ord("r"), ord("K"), ord("t"), ord("h")

_U32 = struct.Struct("<I")


class Unpickler(Machine):
    """Runs one pickle; see ``Machine`` for its arguments."""

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
        self._run()
        self.memo.clear()
        value: object = self.stack.pop()
        return value

    def _run(self) -> None:
        # The opcodes of which a tensor has most are spelt out here, where they take half the time.
        data, memo, frames, stack = self.data, self.memo, self.frames, self.stack
        unpack = _U32.unpack_from
        position = 0
        try:
            for _ in range(self.limits.nodes):
                opcode = data[position]
                if opcode == _LONG_BINPUT and unpack(data, position + 1)[0] == len(memo):
                    memo.append(stack[-1])
                    position += 5
                elif opcode == _BININT1:
                    stack.append(data[position + 1])
                    position += 2
                elif opcode == _TUPLE:
                    items = tuple(stack)
                    self.stack = stack = frames.pop()
                    stack.append(items)
                    position += 1
                elif opcode == _BINGET and type(value := memo[data[position + 1]]) is not Consumed:
                    stack.append(value)
                    position += 2
                else:
                    position = HANDLERS[opcode](self, position + 1)
                    stack = self.stack
                    if position == STOPPED:
                        return
        except (IndexError, struct.error, UnicodeDecodeError) as error:
            raise self._mapped(error, position) from error
        raise self.error(LimitError, f"the pickle has more than {self.limits.nodes} opcodes", position)

    def _mapped(self, error: Exception, position: int) -> FormatError | TruncatedError:
        if isinstance(error, UnicodeDecodeError):
            return self.error(FormatError, "text in the pickle is not UTF-8", position)
        if isinstance(error, struct.error) or position + 1 >= len(self.data):
            return self.error(TruncatedError, "the pickle ends before its STOP", position)
        return self.error(FormatError, "an opcode takes more than the stack or the memo holds", position)
