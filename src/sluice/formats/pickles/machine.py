"""The stack machine of the inert unpickler: its state, and the operations that opcode handlers apply to it.

``unpickler.Unpickler`` runs it; ``opcodes`` has the handlers.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import repeat
from operator import length_hint
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct

from sluice._errors import CheckpointError, FormatError, LimitError, TruncatedError, UnsupportedError
from sluice._options import BYTES_ENCODING, TEXT_ENCODING, Limits
from sluice.records import Entry, Opaque, UnsupportedValue

if TYPE_CHECKING:
    from sluice.formats.pickles.unpickler import Allowlist

__all__ = ["ARGUMENTS", "HOOKS", "Constructor", "Consumed", "Machine", "PendingObject", "Refusal", "WrapperError"]

AnyCheckpointError = TypeVar("AnyCheckpointError", bound=CheckpointError)

#: Open marks per level of nesting: a container, a call inside it, its arguments and the id of a storage.
_MARKS_PER_LEVEL = 4

#: Number of arguments that are searched for unsupported values. No call in torch's pickles has more.
_SEARCHED_ARGUMENTS = 8

#: Bytes read of a value longer than the limit, to distinguish a truncated file from a value that is too long.
_PROBE_BYTES = 64 << 10

#: Longest excerpt of undecodable text in a message, in bytes.
_SHOWN_BYTES = 40

_DICT_KINDS = frozenset({dict, OrderedDict, Counter})


class Consumed(Struct, frozen=True, kw_only=True):
    """Placeholder in the memo for an object that only one tensor used; see ``tensor_opcodes``."""

    #: Function that creates an equal object; None if no opcode may refer to it.
    remake: Callable[[], object] | None


#: Placeholders for the id of a storage and the arguments of a tensor, to which no pickler refers again, and for its
#: hooks, which some share.
ARGUMENTS, HOOKS = Consumed(remake=None), Consumed(remake=OrderedDict)

#: Placeholder for a memo index that the pickle skipped.
_SKIPPED = Consumed(remake=None)


class PendingObject(Struct, kw_only=True):
    """Placeholder for an object that ``BUILD`` creates from its state.

    In a finished tree, it stands for an object that never received a state.
    """

    #: Function that creates the object from its state; refuses a state as ``Constructor.build`` refuses arguments.
    finish: Callable[[object], object]
    #: The object; None until ``BUILD``.
    value: object = None


class WrapperError(UnsupportedError):
    """A tensor of a class outside the allowlist that wraps other tensors."""

    def __init__(self, problem: str, *, found: str, inner: Mapping[str, object], advice: str | None = None) -> None:
        super().__init__(problem, found=found, advice=advice)
        #: Attributes of the tensor, by name.
        self.inner = inner


@dataclass(frozen=True, slots=True, kw_only=True)
class Constructor(Opaque):
    """A global that the machine may call. It runs a function of sluice, never the one named in the file."""

    #: Function from the arguments of the call to its value; raises ``FormatError`` or ``UnsupportedError`` to refuse.
    build: Callable[[tuple[Any, ...]], object]
    #: Whether ``NEWOBJ`` may create an object of this class.
    creates: bool = False


class Refusal(Struct, frozen=True, kw_only=True):
    """Placeholder for a value that could not be built, until its name in the finished tree is known."""

    #: The error to raise.
    error: CheckpointError


class Machine:
    """Stack, marks and memo of one pickle. The attributes are for the opcode handlers.

    ``stack`` holds the values pushed since the latest mark; ``frames`` holds the stack below each mark.
    """

    def __init__(
        self,
        data: bytes,
        allowlist: Allowlist,
        *,
        limits: Limits,
        file: str,
        offset: int = 0,
        more: Callable[[int], bytes] | None = None,
        encoding: str = TEXT_ENCODING,
    ) -> None:
        """Prepare to run one pickle.

        Args:
            data: The pickle; with ``more``, its first bytes.
            allowlist: Permitted globals and persistent ids.
            limits: Bounds on the declarations in the pickle.
            file: Path of the file, for error messages.
            offset: Offset of the pickle in the file, in bytes, for error messages.
            more: Function that reads on, for pickles of unknown length: called with the number of bytes read so far,
                it returns the bytes that follow them, none at the end of the file.
            encoding: Encoding of the text that Python 2 wrote, or ``BYTES_ENCODING`` to keep its bytes.
        """
        self.data = data
        self.more = more
        self.allowlist = allowlist
        self.limits = limits
        self.stack: list[Any] = []
        self.frames: list[list[Any]] = []
        self.memo: list[Any] = []
        #: One step for each opcode that may still run.
        self.steps = iter(range(limits.nodes))
        #: Opcodes that took no step, because they were run together with another one.
        self.untaken = 0
        #: End of the latest frame (protocol 4) in ``data``; 0 before the first frame.
        self.frame_end = 0
        #: Position beyond which values need ``check_end``: the end of the latest frame, or of ``data`` without frames.
        self.bound = len(data)
        #: Position after STOP; 0 until the pickle has run.
        self.end = 0
        #: Replacements of the globals so far, by module and name.
        self._found: dict[tuple[str, str], object] = {}
        #: Those of them that are outside the allowlist.
        self.opaque: dict[tuple[str, str], Opaque] = {}
        #: The ``id`` of each of them.
        self._outside: set[int] = set()
        #: Sizes and strides shared by tensors, by their opcodes.
        self.shared: dict[bytes, tuple[int, ...]] = {}
        #: First value refused because of damage; None if there is none.
        self.refusal: Refusal | None = None
        self._file = file
        self._offset = offset
        self._encoding = encoding
        self._unsupported = 0
        self._max_frames = _MARKS_PER_LEVEL * limits.depth

    def error(
        self,
        kind: type[AnyCheckpointError],
        problem: str,
        position: int,
        *,
        expected: object = None,
        found: object = None,
        advice: str | None = None,
    ) -> AnyCheckpointError:
        """Return an error at ``position`` in the pickle."""
        offset = self._offset + position
        return kind(problem, file=self._file, offset=offset, expected=expected, found=found, advice=advice)

    def check_end(self, position: int, end: int) -> None:
        """Check a value of ``data[position:end]`` that extends past ``bound``."""
        # A value longer than the limit is not read in full. If the file ends soon, it is truncated instead.
        continues = self.more is not None and len(self.data) - position > _PROBE_BYTES
        if continues and end - position > self.limits.header_bytes:
            problem = f"an opcode declares more than {self.limits.header_bytes} bytes (header_bytes)"
            raise self.error(LimitError, problem, position, found=f"{end - position} bytes")
        if end > len(self.data):
            raise self.error(
                TruncatedError,
                "an opcode declares more bytes than the pickle holds",
                position,
                expected=f"{end - position} bytes",
                found=f"{len(self.data) - position} bytes",
            )
        if position < self.frame_end < end:
            raise self.error(FormatError, "an opcode crosses the end of its pickle frame", position)

    def mark(self, position: int) -> None:
        """Start a new stack above a mark."""
        if len(self.frames) >= self._max_frames:
            problem, expected = "the nesting of the pickle exceeds the limit 'depth'", f"at most {self.limits.depth}"
            raise self.error(LimitError, problem, position, expected=expected)
        self.frames.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Any]:
        """Return the values pushed since the latest mark, and remove the mark."""
        items, self.stack = self.stack, self.frames.pop()
        return items

    def store(self, index: int, position: int) -> None:
        """Store the top of the stack in the memo at ``index``.

        Picklers number the objects that they write from 0, Python 2's ``cPickle`` from 1, and its
        ``pickletools.optimize`` leaves gaps. An object takes at least one opcode, so a larger index would only
        determine the size of the memo. Bytes would not bound it: one opcode may have all of the pickle as its text.
        """
        memo, largest = self.memo, self.limits.nodes - length_hint(self.steps) + self.untaken
        if index > largest:
            problem = "a memo index is larger than the number of objects before it"
            raise self.error(FormatError, problem, position, expected=f"at most {largest}", found=index)
        if index > len(memo):
            memo.extend(repeat(_SKIPPED, index - len(memo)))
        memo[index : index + 1] = [self.stack[-1]]

    def text_of_python2(self, raw: bytes, position: int) -> str | bytes:
        """Return text that Python 2 wrote, which does not declare its encoding, as ``torch.load`` does."""
        if self._encoding == BYTES_ENCODING:
            return raw
        try:
            return raw.decode(self._encoding)
        except UnicodeError as error:
            advice = (
                "Pass the encoding of its writer, as to torch.load: encoding='latin1' (--encoding latin1), or 'bytes'."
            )
            problem = f"text that Python 2 wrote is not {self._encoding}"
            start = error.start if isinstance(error, UnicodeDecodeError) else 0
            found = raw[max(0, start - _SHOWN_BYTES // 2) :][:_SHOWN_BYTES]
            raise self.error(UnsupportedError, problem, position, found=found, advice=advice) from None

    def fetch(self, index: int, position: int) -> object:
        """Return the object in the memo at ``index``; replace a placeholder by its object."""
        value: object = self.memo[index]
        if type(value) is Consumed:
            if value.remake is None:
                what = "which it did not store" if value is _SKIPPED else "the arguments of a completed call"
                problem = f"the pickle refers to memo entry {index}, {what}"
                raise self.error(FormatError, problem, position)
            value = self.memo[index] = value.remake()
        if type(value) is PendingObject and value.value is not None:
            value = self.memo[index] = value.value
        return value

    def find(self, module: str, name: str) -> object:
        """Return the replacement of a global: the one in the allowlist, otherwise an inert leaf with its name."""
        known = self._found.get((module, name))
        if known is None:
            qualified_name = f"{module}.{name}"
            known = self.allowlist.find(module, name)
            if known is None:
                known = self.opaque[module, name] = Opaque(qualified_name=qualified_name)
                self._outside.add(id(known))
            elif callable(known):
                known = Constructor(qualified_name=qualified_name, build=known)
            self._found[module, name] = known
        return known

    def call(self, function: object, arguments: object, position: int) -> object:
        """Call ``function`` if it is a constructor; return any other function unchanged, because it stays inert."""
        if type(arguments) is not tuple:
            raise self.error(FormatError, "the arguments of a call are not a tuple", position)
        if type(function) is not Constructor:
            self.check_inert(function, "arguments", position)
            return function
        try:
            value = function.build(arguments)
        except CheckpointError as error:
            return self._refuse(error, position, function.qualified_name, arguments)
        if type(value) is Entry:
            self._forget(arguments)
        return value

    def _forget(self, arguments: tuple[Any, ...]) -> None:
        # In the memo, the arguments of a tensor would take more memory than the records of the tensor.
        if len(self.memo) > 1 and self.memo[-1] is arguments:
            self.memo[-1] = ARGUMENTS
            hooks = arguments[-1]
            if type(hooks) is OrderedDict and not hooks and self.memo[-2] is hooks:
                self.memo[-2] = HOOKS

    def finish(self, target: PendingObject, state: object, position: int) -> object:
        """Create the object of ``target`` from ``state``."""
        if target.value is not None:
            raise self.error(FormatError, "the pickle sets the state of an object twice", position)
        try:
            target.value = target.finish(state)
        except CheckpointError as error:
            target.value = self._refuse(error, position, "a tensor from torch before 0.4", state)
        return target.value

    def resolve(self, identity: object, position: int) -> object:
        """Return the object of a persistent id."""
        try:
            return self.allowlist.load_persistent(identity)
        except CheckpointError as error:
            return self._refuse(error, position, "a storage", identity)

    def _refuse(self, error: CheckpointError, position: int, name: str, arguments: object) -> Refusal | Opaque:
        """Return the placeholder of a value that could not be built.

        Args:
            error: The reason.
            position: Position of the opcode that would have built it.
            name: Name of the value, for errors without ``found``.
            arguments: Arguments or state from which it would have been built.
        """
        if isinstance(error, LimitError):
            raise self._located(error, position)
        unsupported, unknown = self._unbuilt_parts(arguments)
        if unsupported is not None:
            return unsupported
        if isinstance(error, UnsupportedError):
            self._unsupported += 1
            if self._unsupported > self.limits.entries:
                problem = f"the pickle has more than {self.limits.entries} unsupported values"
                raise self.error(LimitError, problem, position)
            found = name if error.found is None else str(error.found)
            inner = error.inner if isinstance(error, WrapperError) else None
            advice = vars(error).get("advice")  # if it is not that of the class
            return UnsupportedValue(
                qualified_name=found, reason=error.problem, file=self._file, inner=inner, advice=advice
            )
        if unknown is not None:
            return unknown
        # The first refusal causes the later ones, whose arguments contain its placeholder.
        if self.refusal is None:
            self.refusal = Refusal(error=self._located(error, position))
        return self.refusal

    def _located(self, error: AnyCheckpointError, position: int) -> AnyCheckpointError:
        error.file, error.offset = self._file, self._offset + position
        return error

    def _unbuilt_parts(self, arguments: object) -> tuple[UnsupportedValue | None, Opaque | None]:
        """Return the first unsupported value, and the first global outside the allowlist, in the arguments of a call.

        The call itself is not at fault then. torch nests the parts of tensors once.
        """
        parts = arguments[:_SEARCHED_ARGUMENTS] if type(arguments) is tuple else (arguments,)
        nested = [inner for part in parts if type(part) is tuple for inner in part[:_SEARCHED_ARGUMENTS]]
        every = (*parts, *nested)
        unsupported = next((part for part in every if type(part) is UnsupportedValue), None)
        return unsupported, next((part for part in every if id(part) in self._outside), None)

    def fill(self, target: object, items: list[Any], position: int) -> None:
        """Add ``items``, alternating keys and values, to a dict."""
        kind = type(target)
        if kind not in _DICT_KINDS:
            self.check_inert(target, "keys and values", position)
            return
        if len(items) % 2:
            raise self.error(FormatError, "a dictionary key has no value", position)
        max_bytes = self.limits.name_bytes
        values: dict[Any, Any] = target  # type: ignore[assignment]  # one of _DICT_KINDS
        pairs = iter(items)
        for key in pairs:
            # A class may be a key. The members of an Enum may not: they would become one key.
            if (type(key) is not str or len(key) > max_bytes) and (type(key) is not Opaque or key in values):
                self.check_key(key, position)
            values[key] = next(pairs)

    def check_inert(self, target: object, argument: str, position: int) -> None:
        """Check that ``target`` is inert: it ignores what a pickle passes to it (``argument``, for the message)."""
        if not isinstance(target, (Opaque, Refusal)) or isinstance(target, Constructor):
            problem = f"the pickle passes {argument} to an object that does not accept them"
            raise self.error(FormatError, problem, position, found=type(target).__name__)

    def check_key(self, key: object, position: int) -> None:
        """Check a key of a dict or an element of a set."""
        try:
            self.allowlist.keys.check(key)
        except CheckpointError as error:
            raise self._located(error, position) from None
