"""One step for the 26 opcodes by which ``torch.save`` writes a tensor.

Run one by one, they take most of the time of a large index, and what they leave in the memo takes most of its memory.
So their exact sequence is recognised by one regular expression. ``take_tensor`` then does what they would do, except
that the memo gets stand-ins for what only this tensor uses, and tensors share equal sizes and strides. What differs in
the least, say a key that is no number, is left to the opcodes.

The sequence: two marks; get "storage", get its class, text of the key, put, get the location, number of elements, in
legacy files None, tuple, put, persistent id; offset, size, put, stride, put, requires_grad; get OrderedDict, call it,
put; tuple, put, call.
"""

from __future__ import annotations

import re
import struct
from collections import OrderedDict
from itertools import compress
from typing import Any

from sluice.formats.pickles.machine import ARGUMENTS, HOOKS, Machine

__all__ = ["take_tensor"]

_INTEGER = rb"(?:K.|M..|J....)"
_GET = rb"(h.|j....)"
_PUT = rb"(r....|\x94|)"
_TUPLE = rb"(\)|I\x85|II\x86|III\x87|\(IIII+t)".replace(b"I", _INTEGER)

_TENSOR = re.compile(
    rb"\(\(" + _GET + _GET + rb"(X.\0\0\0|\x8c.)([0-9]+)" + _PUT + _GET + rb"(" + _INTEGER + rb")(N?)t" + _PUT + rb"Q"
    rb"("
    + _INTEGER
    + rb")"
    + _TUPLE
    + _PUT
    + _TUPLE
    + _PUT
    + rb"([\x88\x89])"
    + _GET
    + rb"\)R"
    + _PUT
    + rb"t"
    + _PUT
    + rb"R",
    re.DOTALL,
)

_INTEGERS = re.compile(_INTEGER, re.DOTALL)

_BININT = ord("J")

#: The numbers of up to six objects that are put in the memo.
_NUMBERS = [struct.Struct("<" + count * "xI") for count in range(7)]

#: Sizes and strides that are remembered. Models have many tensors of few shapes.
_MAX_SHARED = 4_096

_NO_HOOKS: OrderedDict[Any, Any] = OrderedDict()


def take_tensor(machine: Machine, position: int) -> int | None:
    """Build the tensor whose first mark is at ``position``, above its function on the stack.

    Returns:
        The position after its last opcode; None, with nothing changed, when the opcodes are not exactly a tensor's.
    """
    match = _TENSOR.match(machine.data, position)
    if match is None or match.end() > machine.bound:
        return None
    word, kind, length, digits, put_key, location, numel, no_view, put_identity, *rest = match.groups()
    offset, size, put_size, stride, put_stride, flag, hooks, put_hooks, put_arguments = rest
    memo = machine.memo
    puts = (put_key, put_identity, put_size, put_stride, put_hooks, put_arguments)
    if length[1] != len(digits) or not _are_next(puts, len(memo)):
        return None
    if memo[_integer(hooks)] is not machine.hooks_class:
        return None
    key = digits.decode()
    declared = (memo[_integer(word)], memo[_integer(kind)], key, memo[_integer(location)], _integer(numel))
    identity = (*declared, None) if no_view else declared
    storage = machine.resolve(identity, position)
    shape, steps = _shared(machine, size), _shared(machine, stride)
    memo.extend(compress((key, storage, shape, steps, HOOKS, ARGUMENTS), puts))
    arguments = (storage, _integer(offset), shape, steps, flag == b"\x88", _NO_HOOKS)
    machine.stack[-1] = machine.call(machine.stack[-1], arguments, position)
    return match.end()


def _are_next(puts: tuple[bytes, ...], first: int) -> bool:
    """Return whether the objects that are put in the memo get its next numbers. Empty tuples are never put there."""
    stored = len(puts) - puts.count(b"")
    plain = puts.count(b"\x94")
    if plain:
        return plain == stored
    return _NUMBERS[stored].unpack(b"".join(puts)) == tuple(range(first, first + stored))


def _integer(opcode: bytes) -> int:
    """Return the argument of an opcode. One byte is by far the most frequent; only that of BININT is signed."""
    return opcode[1] if len(opcode) == 2 else int.from_bytes(opcode[1:], "little", signed=opcode[0] == _BININT)


def _shared(machine: Machine, opcodes: bytes) -> tuple[int, ...]:
    """Return the tuple that these opcodes build, the same object for the same opcodes."""
    known = machine.shared.get(opcodes)
    if known is None:
        known = tuple(map(_integer, _INTEGERS.findall(opcodes)))
        if len(machine.shared) < _MAX_SHARED:
            machine.shared[opcodes] = known
    return known
