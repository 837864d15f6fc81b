"""The state of the inert unpickler's stack machine, and what its opcodes do to it. ``_pickle`` runs it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from sluice._errors import CheckpointError, FormatError, LimitError, TruncatedError, UnsupportedError
from sluice._options import Limits
from sluice.formats.pickles.keys import KeyGuard
from sluice.records import Entry, Opaque, UnsupportedValue

__all__ = ["ARGUMENTS", "HOOKS", "Allowlist", "Constructor", "Consumed", "Machine", "PendingObject", "Refusal"]

AnyCheckpointError = TypeVar("AnyCheckpointError", bound=CheckpointError)

#: Marks open at once for each level of nesting: a container, a call inside it, its arguments and a storage's id.
_MARKS_PER_LEVEL = 4

#: Arguments that are searched for what cannot be read. No call of torch's has more.
_PARTS_LOOKED_AT = 8

_DICT_KINDS = frozenset({dict, OrderedDict, Counter})


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumed:
    """Stands in the memo for an object that was consumed; see ``_pickle_tensors``."""

    #: Makes the object again; None where nothing may refer to it.
    remake: Callable[[], object] | None


#: Stand-ins for the arguments of a tensor, which nothing refers to again, and its hooks, which some picklers share.
ARGUMENTS, HOOKS = Consumed(remake=None), Consumed(remake=OrderedDict)


@dataclass(slots=True, kw_only=True)
class PendingObject:
    """Stands for an object that is made of its state (``BUILD``); in a finished tree, for one that never got any."""

    #: Makes the object; refuses a state as ``Constructor.build`` refuses arguments.
    finish: Callable[[object], object]
    #: The object, once it is made.
    value: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Constructor(Opaque):
    """A global that the machine may call. What runs is our own function, not the one that the file names."""

    #: Builds the value from the arguments of the call; raises ``FormatError`` or ``UnsupportedError`` to refuse them.
    build: Callable[[tuple[Any, ...]], object]
    #: Whether it is a class whose objects may be created without a call (``NEWOBJ``).
    creates: bool = False


class Allowlist(Protocol):
    """What the pickle of one file may name."""

    @property
    def names(self) -> Mapping[tuple[str, str], object]:
        """What each permitted global stands for, by module and name."""
        ...

    @property
    def keys(self) -> KeyGuard:
        """Checks the keys of dicts and the elements of sets."""
        ...

    def load_persistent(self, identity: object) -> object:
        """Return the object of a persistent id; may refuse it as a constructor does."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Stands for a value that could not be built, until its place in the finished tree is known."""

    #: What was wrong with it.
    error: CheckpointError


def _unsupported_part(given: object) -> UnsupportedValue | None:
    """Return the first unsupported value among what a call is given; torch nests the parts of tensors once."""
    parts = given[:_PARTS_LOOKED_AT] if type(given) is tuple else (given,)
    nested = [inner for part in parts if type(part) is tuple for inner in part[:_PARTS_LOOKED_AT]]
    return next((part for part in (*parts, *nested) if type(part) is UnsupportedValue), None)


class Machine:
    """Stack, marks and memo of one pickle. Its attributes are for the opcode handlers.

    After a mark, ``stack`` holds only what was pushed since; ``frames`` keeps what lies below each mark.
    """

    def __init__(self, data: bytes, allowlist: Allowlist, *, limits: Limits, file: str, offset: int = 0) -> None:
        """Prepare to run one pickle.

        Args:
            data: The pickle.
            allowlist: What it may name.
            limits: Bounds on what the pickle may declare.
            file: The file that holds it, for messages.
            offset: Where it starts in that file, for messages.
        """
        self.data = data
        self.allowlist = allowlist
        self.limits = limits
        self.stack: list[Any] = []
        self.frames: list[list[Any]] = []
        self.memo: list[Any] = []
        #: End of the latest frame (protocol 4).
        self.frame_end = 0
        #: Where text and bytes need ``check_end``: the end of that frame, or of the data where there is none.
        self.bound = len(data)
        #: First byte after STOP.
        self.end = 0
        #: Every global outside the table, once.
        self.opaque: dict[tuple[str, str], Opaque] = {}
        #: What the hooks of tensors are made by.
        self.hooks_class = allowlist.names.get(("collections", "OrderedDict"))
        #: Sizes and strides that tensors share, by their opcodes.
        self.shared: dict[bytes, tuple[int, ...]] = {}
        #: The first value that was refused because the file is at fault.
        self.refusal: Refusal | None = None
        self._file = file
        self._offset = offset
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
    ) -> AnyCheckpointError:
        """Return an error about the byte at ``position`` of the pickle."""
        return kind(problem, file=self._file, offset=self._offset + position, expected=expected, found=found)

    def check_end(self, position: int, end: int) -> None:
        """Check an opcode whose bytes run from ``position`` past the bound."""
        if end > len(self.data):
            raise self.error(
                TruncatedError,
                "the pickle declares more than it holds",
                position,
                expected=f"{end - position} bytes",
                found=f"{len(self.data) - position} bytes",
            )
        if position < self.frame_end < end:
            raise self.error(FormatError, "an opcode crosses the end of its pickle frame", position)

    def mark(self, position: int) -> None:
        """Start a new stack above a mark."""
        if len(self.frames) >= self._max_frames:
            raise self.error(LimitError, f"the pickle nests deeper than {self.limits.depth} levels", position)
        self.frames.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Any]:
        """Return what was pushed since the last mark, and drop the mark."""
        items, self.stack = self.stack, self.frames.pop()
        return items

    def store(self, index: int, position: int) -> None:
        """Store the top of the stack in the memo at ``index``.

        Picklers number the memo from 0 without gaps; a gap would let one opcode size it.
        """
        if index > len(self.memo):
            raise self.error(
                FormatError, "the pickle skips memo numbers", position, expected=len(self.memo), found=index
            )
        self.memo[index : index + 1] = [self.stack[-1]]

    def fetch(self, index: int, position: int) -> object:
        """Return what the memo holds at ``index``."""
        value: object = self.memo[index]
        if type(value) is Consumed:
            if value.remake is None:
                problem = f"the pickle refers to memo {index}, the arguments of a finished call"
                raise self.error(FormatError, problem, position)
            value = self.memo[index] = value.remake()
        if type(value) is PendingObject and value.value is not None:
            value = self.memo[index] = value.value
        return value

    def find(self, module: str, name: str) -> object:
        """Return what a global stands for: ours where it is permitted, else an inert leaf with its name."""
        known = self.allowlist.names.get((module, name))
        if known is None:
            known = self.opaque.get((module, name))
        if known is None:
            known = self.opaque[module, name] = Opaque(qualified_name=f"{module}.{name}")
        return known

    def call(self, function: object, arguments: object, position: int) -> object:
        """Return what calling ``function`` gives; for what is no constructor, the thing itself: it stays inert."""
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
        # What only one tensor uses would take more memory in the memo than the tensor's own records.
        if len(self.memo) > 1 and self.memo[-1] is arguments:
            self.memo[-1] = ARGUMENTS
            hooks = arguments[-1]
            if type(hooks) is OrderedDict and not hooks and self.memo[-2] is hooks:
                self.memo[-2] = HOOKS

    def finish(self, target: PendingObject, state: object, position: int) -> object:
        """Return the object that is made of ``state``."""
        if target.value is not None:
            raise self.error(FormatError, "the pickle gives an object its state twice", position)
        try:
            target.value = target.finish(state)
        except CheckpointError as error:
            target.value = self._refuse(error, position, "a tensor of torch before 0.4", state)
        return target.value

    def resolve(self, identity: object, position: int) -> object:
        """Return the object of a persistent id."""
        try:
            return self.allowlist.load_persistent(identity)
        except CheckpointError as error:
            return self._refuse(error, position, "a storage", identity)

    def _refuse(self, error: CheckpointError, position: int, name: str, given: object) -> Refusal | UnsupportedValue:
        """Return what stands in the place of a value that could not be built.

        Args:
            error: Why.
            position: The opcode that would have built it.
            name: What the file calls it, where the error does not say that.
            given: What it would have been built from.
        """
        if isinstance(error, LimitError):
            raise self._located(error, position)
        made_of = _unsupported_part(given)
        if made_of is not None:
            return made_of
        if isinstance(error, UnsupportedError):
            self._unsupported += 1
            if self._unsupported > self.limits.entries:
                problem = f"the pickle has more than {self.limits.entries} values that sluice does not read"
                raise self.error(LimitError, problem, position)
            found = name if error.found is None else str(error.found)
            return UnsupportedValue(qualified_name=found, reason=error.problem, file=self._file)
        # The first refusal also causes those that follow: they were given its stand-in.
        if self.refusal is None:
            self.refusal = Refusal(error=self._located(error, position))
        return self.refusal

    def _located(self, error: AnyCheckpointError, position: int) -> AnyCheckpointError:
        error.file, error.offset = self._file, self._offset + position
        return error

    def fill(self, target: object, items: list[Any], position: int) -> None:
        """Set keys and values, which alternate in ``items``, in a dict."""
        kind = type(target)
        if kind not in _DICT_KINDS:
            self.check_inert(target, "keys and values", position)
            return
        if len(items) % 2:
            raise self.error(FormatError, "a dictionary is given a key without a value", position)
        max_bytes = self.limits.name_bytes
        values: dict[Any, Any] = target  # type: ignore[assignment]  # one of _DICT_KINDS
        pairs = iter(items)
        for key in pairs:
            if type(key) is not str or len(key) > max_bytes:
                self.check_key(key, position)
            values[key] = next(pairs)

    def check_inert(self, target: object, given: str, position: int) -> None:
        """Check that ``target`` is a stand-in, which drops what it is given."""
        if not isinstance(target, (Opaque, Refusal)) or isinstance(target, Constructor):
            raise self.error(FormatError, f"the pickle gives {given} to a value", position, found=type(target).__name__)

    def check_key(self, key: object, position: int) -> None:
        """Check a key of a dict or an element of a set."""
        try:
            self.allowlist.keys.check(key)
        except CheckpointError as error:
            raise self._located(error, position) from None
