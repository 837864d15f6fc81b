"""Fast path for the sequence of 26 opcodes with which ``torch.save`` writes a tensor.

Run one by one, these opcodes take most of the time of a large index, and their memo entries take most of its memory.
One regular expression therefore matches the exact sequence, and ``take_tensor`` applies its effect in one step, except
that the memo holds placeholders for objects that only this tensor uses, and that tensors share equal sizes and strides.
Any other sequence, for example with a key that is not a number, is run opcode by opcode.

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

from sluice.formats.pickles.machine import ARGUMENTS, HOOKS, Constructor, Machine

__all__ = ["take_tensor"]

_INTEGER = rb"(?:K.|M..|J....)"
_GET = rb"(h.|j....)"
_PUT = rb"(r....|\x94|)"
_TUPLE = rb"(\)|I\x85|II\x86|III\x87|\(IIII+t)".replace(b"I", _INTEGER)

_STORAGE = _GET + _GET + rb"(X.\0\0\0|\x8c.)([0-9]+)" + _PUT + _GET + rb"(" + _INTEGER + rb")(N?)t" + _PUT + rb"Q"
_VIEW = rb"(" + _INTEGER + rb")" + _TUPLE + _PUT + _TUPLE + _PUT + rb"([\x88\x89])"
_HOOKS = _GET + rb"\)R" + _PUT
_TENSOR = re.compile(rb"\(\(" + _STORAGE + _VIEW + _HOOKS + rb"t" + _PUT + rb"R", re.DOTALL)

_INTEGERS = re.compile(_INTEGER, re.DOTALL)

_BININT = ord("J")

#: Layouts of the memo indices in the PUT opcodes of up to six objects.
_PUT_INDICES = [struct.Struct("<" + count * "xI") for count in range(7)]

#: Opcodes of the sequence. More integers in the size or the stride make it longer, but no more objects in the memo.
_OPCODES = 26

#: Maximum number of shared sizes and strides. Models have many tensors of few shapes.
_MAX_SHARED = 4_096

_NO_HOOKS: OrderedDict[Any, Any] = OrderedDict()


def take_tensor(machine: Machine, position: int) -> int | None:
    """Build the tensor whose opcodes start at ``position``; its rebuild function is on top of the stack.

    Returns:
        The position after the last opcode; None, with the machine unchanged, if the sequence is a different one.
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
    hooks_class = memo[_integer(hooks)]
    if type(hooks_class) is not Constructor or hooks_class.qualified_name != "collections.OrderedDict":
        return None
    key = digits.decode()
    declared = (memo[_integer(word)], memo[_integer(kind)], key, memo[_integer(location)], _integer(numel))
    identity = (*declared, None) if no_view else declared
    storage = machine.resolve(identity, position)
    shape, steps = _shared(machine, size), _shared(machine, stride)
    memo.extend(compress((key, ARGUMENTS, shape, steps, HOOKS, ARGUMENTS), puts))
    arguments = (storage, _integer(offset), shape, steps, flag == b"\x88", _NO_HOOKS)
    machine.stack[-1] = machine.call(machine.stack[-1], arguments, position)
    machine.untaken += _OPCODES - 1
    return match.end()


def _are_next(puts: tuple[bytes, ...], first: int) -> bool:
    """Return whether the PUT opcodes use the next memo indices. Picklers never put empty tuples in the memo."""
    stored = len(puts) - puts.count(b"")
    plain = puts.count(b"\x94")
    if plain:
        return plain == stored
    return _PUT_INDICES[stored].unpack(b"".join(puts)) == tuple(range(first, first + stored))


def _integer(opcode: bytes) -> int:
    """Return the integer argument of an opcode. Most have one byte; only the argument of BININT is signed."""
    return opcode[1] if len(opcode) == 2 else int.from_bytes(opcode[1:], "little", signed=opcode[0] == _BININT)


def _shared(machine: Machine, opcodes: bytes) -> tuple[int, ...]:
    """Return the tuple that these opcodes build; equal opcodes share one tuple."""
    known = machine.shared.get(opcodes)
    if known is None:
        known = tuple(map(_integer, _INTEGERS.findall(opcodes)))
        if len(machine.shared) < _MAX_SHARED:
            machine.shared[opcodes] = known
    return known
