"""Errors of obstore as errors of sluice."""

from __future__ import annotations

import pytest

from sluice._errors import MissingFileError, SourceChangedError, UnsupportedError
from sluice.sources.remote.protocol import RequestFailedError
from sluice.sources.remote.store_errors import translated


class GenericError(Exception):
    """As obstore names it."""


def answer(status: int, code: str = "Code") -> str:
    return (
        f"Generic S3 error: Error performing GET http://host/b/k?X-Amz-Signature=secret in 1ms - Server returned "
        f"non-2xx status code: {status}: <Error><Code>{code}</Code><AWSAccessKeyId>secret</AWSAccessKeyId></Error>"
    )


@pytest.mark.parametrize(
    ("text", "temporary", "problem"),
    [
        (answer(503, "SlowDown"), True, "503 SlowDown"),
        (answer(429), True, "429"),
        (answer(500), True, "500"),
        (answer(408), True, "408"),
        (answer(409), False, "409"),
        (answer(301, "PermanentRedirect"), False, "PermanentRedirect"),
        (answer(403, "ExpiredToken"), False, "refused access"),
        ("HTTP error\n inner: Http(HttpError {\n   kind: Connect, http://secret", True, "cannot be reached"),
        ("HTTP error\n inner: Http(HttpError {\n   kind: Timeout, http://secret", True, "in time"),
        ("no form that is known: secret", True, "the request failed"),
    ],
)
def test_a_failed_request_says_whether_it_may_succeed_later(text: str, temporary: bool, problem: str) -> None:
    error = translated(GenericError(text), "s3://b/k", pinned=True)
    assert isinstance(error, RequestFailedError)
    assert error.temporary is temporary
    assert problem in error.problem
    assert "secret" not in f"{error} {error.advice}"
    assert ("AWS_REGION to the region" in (error.advice or "")) == (problem == "PermanentRedirect")


@pytest.mark.parametrize(
    ("error", "pinned", "kind"),
    [
        (FileNotFoundError(answer(404, "NoSuchKey")), False, MissingFileError),
        (FileNotFoundError(answer(404, "NoSuchKey")), True, SourceChangedError),
        (FileNotFoundError(answer(404, "NoSuchBucket")), True, MissingFileError),
        (GenericError(answer(416)), True, SourceChangedError),
        (GenericError("Received non-partial response when range requested"), False, UnsupportedError),
    ],
)
def test_what_repeating_cannot_change(error: Exception, pinned: bool, kind: type[Exception]) -> None:
    assert isinstance(translated(error, "s3://b/k", pinned=pinned), kind)
