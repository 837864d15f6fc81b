"""The protocol of remote objects, which every kind of server implements in a module of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol, Self

from msgspec import Struct

from sluice._errors import SourceChangedError

__all__ = ["Body", "ObjectFacts", "PieceBody", "RemoteObject", "RequestFailedError", "WrongResponseError"]


class RequestFailedError(Exception):
    """One request failed; a signal between layers, never seen by users."""

    def __init__(
        self,
        problem: str,
        *,
        temporary: bool,
        status: int | None = None,
        retry_after: float | None = None,
        advice: str | None = None,
        unreached: bool = False,
    ) -> None:
        """Describe the failure.

        Args:
            problem: What happened, as one clause without credentials.
            temporary: Whether the same request may succeed later.
            status: Status of the answer, for HTTP.
            retry_after: Seconds that the server asks to wait.
            advice: What the user can do; None for the advice of ``RemoteError``.
            unreached: Whether there was no connection to the server.
        """
        super().__init__(problem)
        self.problem, self.temporary, self.status = problem, temporary, status
        self.retry_after, self.advice, self.unreached = retry_after, advice, unreached


class WrongResponseError(RequestFailedError):
    """An answer contradicts the request; few repetitions show whether the server always answers like this."""

    def __init__(self, problem: str, *, status: int | None = None) -> None:
        """Describe the contradiction."""
        super().__init__(problem, temporary=True, status=status)


class ObjectFacts(Struct, frozen=True, kw_only=True):
    """Size and version of an object in the first answer; every later answer is held against them."""

    #: Size in bytes.
    nbytes: int
    #: Version id, generation or strong ETag, with which later requests are made conditional; None without one.
    version: str | None = None
    #: Time of the last change as the server writes it, compared if there is no version.
    modified: str | None = None
    #: ETag that does not promise equal bytes; a different one shows a change all the same.
    weak_version: str | None = None

    @property
    def pinnable(self) -> bool:
        """Whether anything shows that an object is no longer the same."""
        return (self.version or self.weak_version or self.modified) is not None

    def describe(self) -> str:
        """Return what is known as text for error messages."""
        version = self.version or self.weak_version
        known = (version and f"version {version!r}", self.modified and f"modified {self.modified}")
        return ", ".join([f"{self.nbytes} bytes", *filter(None, known)])

    def replaced(self, problem: str, path: str, found: ObjectFacts) -> SourceChangedError:
        """Return the error for other facts of the same object."""
        return SourceChangedError(problem, file=path, expected=self.describe(), found=found.describe())


class Body(Protocol):
    """The body of one answer."""

    def readinto(self, buffer: memoryview) -> int:
        """Receive some bytes into a buffer that is not empty; return their number, 0 at the end of the body.

        Raises:
            RequestFailedError: The connection failed, or no byte arrived within the timeout.
        """
        ...


class PieceBody:
    """A body that arrives as bytes objects; see ``Body``. Leaving the block ends the request."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._rest = pieces, memoryview(b"")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pieces, self._rest = iter(()), memoryview(b"")

    def readinto(self, buffer: memoryview) -> int:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


class RemoteObject(Protocol):
    """One object of a server.

    Each call makes one request, from any thread. It does not retry, and raises ``RequestFailedError`` if the request
    fails and ``SourceChangedError`` if the object is not the one of ``facts``. Messages hold no credentials.
    """

    @property
    def path(self) -> str:
        """Address as the user would type it, without credentials."""
        ...

    def open_first(self, nbytes: int) -> tuple[ObjectFacts, AbstractContextManager[Body]]:
        """Request the first ``nbytes`` bytes, or all of a smaller object; return what the answer says, and its body.

        Raises:
            MissingFileError: There is no such object.
            UnsupportedError: The server does not answer ranges.
        """
        ...

    def open_range(self, offset: int, nbytes: int, facts: ObjectFacts) -> AbstractContextManager[Body]:
        """Request exactly the bytes from ``offset`` of the object that ``facts`` describe; return the body.

        A body may end early, when the connection is lost; it never has bytes of a different range or version.

        Raises:
            SourceChangedError: The object is no longer the one of ``facts``.
        """
        ...

    def close(self) -> None:
        """Close idle connections."""
        ...
