"""Remote objects as sources: retries, resumed bodies, and the first bytes kept from the opening request."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from sluice import _options as options
from sluice._errors import RemoteError, TruncatedError
from sluice.records import AccessFacts, FileIdentity
from sluice.sources.protocol import DirectIOUnavailable
from sluice.sources.remote.protocol import RemoteObject, RequestFailedError

__all__ = ["RemoteFile"]


class RemoteFile:
    """An object of a server; see ``Source``."""

    def __init__(
        self,
        remote: RemoteObject,
        *,
        access: AccessFacts | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make the opening request, which also brings the first bytes.

        Args:
            remote: The object.
            access: The requests that suit the server; None for the defaults of remote sources.
            sleep: Waits for some seconds.
            clock: Seconds.

        Raises:
            MissingFileError: There is no such object.
            TruncatedError: It is empty.
            UnsupportedError: The server does not answer ranges.
            RemoteError: The server does not answer.
        """
        self._remote, self._sleep, self._clock = remote, sleep, clock
        self.access = access or AccessFacts(
            request_bytes=options.REMOTE_READ_BYTES,
            gap_bytes=options.REMOTE_GAP_BYTES,
            parallel_requests=options.REMOTE_REQUESTS,
        )
        head = memoryview(bytearray(options.REMOTE_FIRST_BYTES))
        facts = None
        attempts = _Attempts(remote.path, 0, sleep, clock)
        while facts is None:
            try:
                facts, opened = remote.open_first(len(head))
                with opened as body:
                    found = 0
                    while found < min(len(head), facts.nbytes) and (some := body.readinto(head[found:])):
                        found += some
            except RequestFailedError as error:
                facts = None
                attempts.failed(error)
        self._facts = facts
        self._head = bytes(head[:found])
        self.identity = FileIdentity(nbytes=facts.nbytes, version=facts.version or facts.modified)
        if not facts.nbytes:
            raise TruncatedError("the file is empty", file=remote.path)

    @property
    def path(self) -> str:
        return self._remote.path

    def read_at(self, offset: int, nbytes: int) -> bytes:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.identity.nbytes:
            raise self._too_early(offset, nbytes, max(0, self.identity.nbytes - offset))
        data = bytearray(nbytes)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
        if direct:
            raise DirectIOUnavailable(self.path)
        if offset < 0:
            raise self._too_early(offset, len(buffer), 0)
        total = max(0, min(len(buffer), self.identity.nbytes - offset))
        done = 0
        if offset < len(self._head):
            kept = self._head[offset : offset + total]
            buffer[: len(kept)] = kept
            done = len(kept)
        attempts = _Attempts(self.path, offset, self._sleep, self._clock)
        while done < total:
            begun = done
            try:
                with self._remote.open_range(offset + done, total - done, self._facts) as body:
                    while done < total and (found := body.readinto(buffer[done:total])):
                        done += found
                if done < total:
                    raise RequestFailedError("the answer ended too early", temporary=True)
            except RequestFailedError as error:
                if done > begun:
                    attempts.progress()
                attempts.failed(error)
        return total

    def forget(self, offset: int, nbytes: int) -> None:
        """Do nothing: no bytes are cached."""

    def check_unchanged(self) -> None:
        """Return: every answer was held against the object that was opened."""

    def close(self) -> None:
        self._remote.close()

    def _too_early(self, offset: int, nbytes: int, found: int) -> TruncatedError:
        return TruncatedError(
            "the file ends too early",
            file=self.path,
            offset=offset,
            expected=f"{nbytes} bytes",
            found=f"{found} bytes",
        )


class _Attempts:
    """The attempts at one range: how long to wait after a failure, and when to give up."""

    def __init__(self, path: str, offset: int, sleep: Callable[[float], None], clock: Callable[[], float]) -> None:
        self._path, self._offset, self._sleep, self._clock = path, offset, sleep, clock
        self._until = clock() + options.REMOTE_PATIENCE_SECONDS
        self._failures = self._in_a_row = 0

    def progress(self) -> None:
        """Count the failures from here: some bytes have arrived."""
        self._in_a_row = 0
        self._until = self._clock() + options.REMOTE_PATIENCE_SECONDS

    def failed(self, error: RequestFailedError) -> None:
        """Wait before the next attempt.

        Raises:
            RemoteError: There is none.
        """
        self._failures += 1
        longest = min(options.REMOTE_LONGEST_PAUSE, options.REMOTE_FIRST_PAUSE * 2**self._in_a_row)
        pause = random.uniform(0, longest)  # noqa: S311  no secret
        pause = max(pause, error.retry_after or 0.0)
        self._in_a_row += 1
        if error.temporary and self._in_a_row <= options.REMOTE_RETRIES and self._clock() + pause < self._until:
            self._sleep(pause)
            return
        tries = f" after {self._failures} tries" if self._failures > 1 else ""
        raised = RemoteError(f"{error.problem}{tries}", file=self._path, offset=self._offset)
        if error.advice:
            raised.advice = error.advice
        raise raised from error
