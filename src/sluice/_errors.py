"""The exceptions of sluice.

::

    SluiceError
    ├── CheckpointError            the file is at fault
    │   ├── MissingFileError       the file does not exist (also a FileNotFoundError)
    │   ├── FormatError            its bytes contradict each other or its specification
    │   ├── TruncatedError         it ends before what it declares
    │   ├── IntegrityError         bytes do not match a checksum
    │   ├── UnsupportedError       valid, but sluice does not read this kind
    │   ├── UnsafeContentError     it names code that loading would have to import or call
    │   ├── LimitError             it declares more than the limits allow
    │   ├── PathEscapeError        it points outside its own directory
    │   └── IncompleteCheckpointError  parts of it were never written
    ├── MismatchError              checkpoint and model disagree (also a RuntimeError)
    ├── EmptyInitError             a constructor needs values that empty_init lacks (also a RuntimeError)
    ├── BudgetError                the load cannot keep the memory limits
    ├── ReadError                  the operating system failed a read (also an OSError)
    │   ├── ReadPermissionError    it refused access to the file (also a PermissionError)
    │   └── RemoteError            a server failed a request, or cannot be reached
    ├── SourceChangedError         the file changed while it was being read
    ├── PartialLoadError           a live model was filled in part
    ├── RankError                  a rank of a process group failed, so all ranks gave up (also a RuntimeError)
    ├── StreamError                a streamed model cannot do this (also a RuntimeError)
    └── SaveError                  nothing was saved; what existed is intact (also a RuntimeError)

Some are also the built-in exception that the replaced function raises (``torch.load``, ``load_state_dict``,
``torch.save``), so that existing ``except`` clauses keep working.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from sluice._public import public
from sluice._units import format_bytes

#: Advice for what sluice does not know, where ``torch.load(weights_only=True)`` may.
TORCH_MAY_READ = (
    "sluice does not know it, but torch may: load the file with torch.load(weights_only=True), and save the result "
    "with torch.save."
)

#: Advice for what only the unrestricted ``torch.load`` may read.
TRUST_TORCH = (
    "torch may read it: if you trust the file, load it with torch.load(weights_only=False), and save its tensors with "
    "torch.save."
)

__all__ = [
    "Alternative",
    "BudgetError",
    "CheckpointError",
    "EmptyInitError",
    "FormatError",
    "IncompleteCheckpointError",
    "IntegrityError",
    "LimitError",
    "MismatchError",
    "MissingFileError",
    "PartialLoadError",
    "PathEscapeError",
    "RankError",
    "ReadError",
    "ReadPermissionError",
    "RemoteError",
    "SaveError",
    "SluiceError",
    "SourceChangedError",
    "StreamError",
    "TruncatedError",
    "UnsafeContentError",
    "UnsupportedError",
]


class SluiceError(Exception):
    """Base class of the exceptions of sluice.

    Attributes:
        problem: Description of the problem, as one clause without a full stop.
        file: Path of the file, or None.
        tensor: Name of the tensor or record, or None.
        offset: Byte offset in ``file``, or None.
        expected: Expected value: what the file or the caller declares, or None.
        found: Actual value, or None.
        advice: Next step for the user: the advice of the class, or a more specific one.
    """

    advice: str = ""

    def __init__(
        self,
        problem: str,
        *,
        file: str | None = None,
        tensor: str | None = None,
        offset: int | None = None,
        expected: object = None,
        found: object = None,
        advice: str | None = None,
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.file = file
        self.tensor = tensor
        self.offset = offset
        self.expected = expected
        self.found = found
        if advice is not None:
            self.advice = advice

    def __str__(self) -> str:
        where = []
        if self.file is not None:
            where.append(str(self.file))
        if self.tensor is not None:
            where.append(f"tensor {self.tensor!r:.2000}")
        if self.offset is not None:
            where.append(f"byte {self.offset}")
        text = f"{', '.join(where)}: {self.problem}" if where else self.problem
        if self.expected is not None:
            text += f"; expected {self.expected}"
        if self.found is not None:
            text += f"; found {self.found}"
        return f"{text}. {self.advice}" if self.advice else text

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive BaseException's own reduction.
        return (_rebuild, (type(self), self.problem, self.__dict__))


def _rebuild(cls: type[SluiceError], problem: str, state: dict[str, object]) -> SluiceError:
    error = cls(problem)
    error.__dict__.update(state)
    return error


class CheckpointError(SluiceError):
    """The file is at fault.

    Attributes:
        foreign: Whether the file is something else than a checkpoint, such as text or a git-lfs pointer.
    """

    foreign: bool = False
    advice = "Check that the path is the intended checkpoint and that the checkpoint was saved completely."


class _SystemError:
    """Attributes of ``OSError`` for errors that are also one."""

    file: str | None
    #: Number of the error, as in the module ``errno``; None if the operating system did not report one.
    errno: int | None = None
    #: Text of ``errno``.
    strerror: str | None = None

    @property
    def filename(self) -> str | None:
        """Path of the file, as in ``OSError``."""
        return self.file


class MissingFileError(CheckpointError, _SystemError, FileNotFoundError):
    """The file does not exist."""

    advice = "Check the path."
    errno = errno.ENOENT
    strerror = os.strerror(errno)


class FormatError(CheckpointError):
    """The bytes of the file contradict each other or the specification of its format.

    What sluice merely does not know, such as a new dtype or format version, is an ``UnsupportedError``.
    """

    advice = "The file is damaged or is not in the format it declares: save or download it again."


class TruncatedError(CheckpointError):
    """The file ends before what it declares."""

    advice = "The file is incomplete: save or download it again."


class IntegrityError(CheckpointError):
    """Bytes do not match a checksum."""

    advice = "The data is corrupt: save or download it again."


class UnsupportedError(CheckpointError):
    """The file is valid, but sluice does not read this kind."""

    advice = "The library that wrote it, or torch, may read it: convert it to safetensors or a plain torch.save."


class UnsafeContentError(CheckpointError):
    """The file names code that loading would have to import or call; nothing was called."""

    advice = "sluice never runs code from a checkpoint: ask its author for a plain state dict."


class LimitError(CheckpointError):
    """The file declares more than the limits allow."""

    advice = "If you trust the file, raise the bound in Python with limits=sluice.Limits(...)."


class PathEscapeError(CheckpointError):
    """The file points outside its own directory."""

    advice = "Do not trust this checkpoint; if it is yours, write plain names of files below its directory."


class IncompleteCheckpointError(CheckpointError):
    """Parts of the checkpoint were never written or are missing."""

    advice = "Find the missing parts or save the checkpoint again."


class MismatchError(SluiceError, RuntimeError):
    """Checkpoint and model disagree; nothing was touched.

    Attributes:
        missing: Names of the model that the checkpoint does not have.
        unexpected: Names of the checkpoint that the model does not have.
    """

    advice = "Nothing was changed."

    def __init__(
        self, problem: str, *, missing: tuple[str, ...] = (), unexpected: tuple[str, ...] = (), **where: Any
    ) -> None:
        super().__init__(problem, **where)
        self.missing = missing
        self.unexpected = unexpected


class EmptyInitError(SluiceError, RuntimeError):
    """A constructor needs values of a tensor that does not have any under ``empty_init``."""

    advice = (
        "Build this part of the model outside of sluice.empty_init() (load_into fills it in place), or compute what "
        "depends on the values after the load."
    )


class Alternative(Struct, frozen=True, kw_only=True):
    """A change of a load's arguments with which the load fits. A complete plan was computed for it."""

    #: The change as text: ``"dtype=torch.bfloat16"``.
    change: str
    #: The same change as keyword arguments, which extend or replace those of the refused call.
    arguments: Mapping[str, object]
    #: Predicted growth of memory in bytes, of ``"host"`` and of each accelerator by name.
    needs: Mapping[str, int]

    def __str__(self) -> str:
        needs = ", ".join(f"{format_bytes(nbytes)} of {where} memory" for where, nbytes in self.needs.items())
        return f"{self.change} (needs {needs})"


class BudgetError(SluiceError):
    """The load cannot keep the memory limits; no data was read.

    Attributes:
        alternatives: Changes of the arguments with which the load would fit, the smallest change first. Empty if none
            was found, or if the system refused memory that the plan had counted on.

    Example:
        >>> try:
        ...     report = sluice.load_into(model, "model.pth")
        ... except sluice.BudgetError as error:
        ...     report = sluice.load_into(model, "model.pth", **error.alternatives[0].arguments)
    """

    advice = "Nothing was read: choose a smaller dtype, another device, or larger limits."

    def __init__(self, problem: str, *, alternatives: Sequence[Alternative] = (), **where: Any) -> None:
        super().__init__(problem, **where)
        self.alternatives = tuple(alternatives)

    def __str__(self) -> str:
        fits = "; ".join(map(str, self.alternatives))
        return f"{super().__str__()} What would fit: {fits}." if fits else super().__str__()


class ReadError(SluiceError, _SystemError, OSError):
    """The operating system failed a read; ``errno`` is its error number, or None."""

    advice = "Check the disk or the network mount, then try again."


class ReadPermissionError(ReadError, PermissionError):
    """The operating system refused access to the file."""

    advice = "Check the permissions of the file and of the directories above it."


class SourceChangedError(SluiceError):
    """The file changed while it was being read."""

    advice = "Wait until its writer has finished, then load again."


class PartialLoadError(SluiceError):
    """A failure left a live model filled in part.

    Attributes:
        done: Names of tensors that hold their new values.
        torn: Names of tensors that may hold a mixture of old and new bytes.
        untouched: Names of tensors that hold their old values.
    """

    advice = "Load again into this model, or rebuild it, before you use it."

    def __init__(
        self,
        problem: str,
        *,
        done: tuple[str, ...] = (),
        torn: tuple[str, ...] = (),
        untouched: tuple[str, ...] = (),
        **where: Any,
    ) -> None:
        super().__init__(problem, **where)
        self.done = done
        self.torn = torn
        self.untouched = untouched


class RankError(SluiceError, RuntimeError):
    """Ranks of a process group failed, so that every rank gave up. Each rank raises the same error.

    On a rank that failed, ``__cause__`` is its own error. On the others it is a ``PartialLoadError`` if live tensors
    had changed, and None if nothing was touched.

    Attributes:
        ranks: Description of the failure of each rank that failed, by its global rank.
        changed: Ranks of which all tensors have their new values.
        torn: Ranks of which some tensors have.
    """

    advice = "Repair what the named ranks report, then call again on every rank."

    def __init__(
        self,
        problem: str,
        *,
        ranks: Mapping[int, str] | None = None,
        changed: Sequence[int] = (),
        torn: Sequence[int] = (),
        **where: Any,
    ) -> None:
        super().__init__(problem, **where)
        self.ranks = dict(ranks or {})
        self.changed = tuple(changed)
        self.torn = tuple(torn)


class StreamError(SluiceError, RuntimeError):
    """A model that is streamed was asked for what needs all its weights at once, or gradients; nothing was changed."""

    advice = "Close the stream first, and load the weights with sluice.load_into if they fit into memory."


class SaveError(SluiceError, RuntimeError):
    """Nothing was saved; what existed is intact."""

    advice = "Existing files are intact."


class RemoteError(ReadError):
    """A server failed a request, or could not be reached, after the last attempt."""

    advice = "Check the address, the credentials and the network, then try again."


for _name in __all__:
    public()(globals()[_name])  # a subclass inherits no ``__module__``: each gets its own
