"""Responses of HTTP servers, checked against the request and the opened object. Pure functions."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from http import HTTPStatus

from msgspec import Struct

from sluice._errors import MissingFileError, SluiceError, SourceChangedError, UnsupportedError
from sluice._units import format_bytes
from sluice.sources.remote.protocol import ObjectFacts, RequestFailedError, WrongResponseError
from sluice.sources.remote_names import download_advice

__all__ = ["TEMPORARY", "ResponseHead", "check_range", "check_status", "conditions", "first_facts"]

#: Units of ranges are the same in upper and lower case; a size of ``*`` is not known.
_RANGE = re.compile(r"bytes +(\d{1,19})-(\d{1,19})/(?:(\d{1,19})|\*)", re.IGNORECASE)
_EMPTY_RANGE = re.compile(r"bytes +\*/(\d{1,19})", re.IGNORECASE)

#: Most characters of a header that are shown.
_SHOWN = 200

#: Statuses of objects that do not exist.
_MISSING = {HTTPStatus.NOT_FOUND, HTTPStatus.GONE}

#: Names under which servers send the number by which their operators find a request.
_REQUEST_IDS = ("x-amz-request-id", "x-ms-request-id", "x-guploader-uploadid", "x-request-id", "cf-ray")
_REQUEST_ID = re.compile(r"[\w.:=+/-]{1,128}")

#: Statuses after which the same request may succeed.
TEMPORARY = frozenset({408, 425, 429, 500, 502, 503, 504, 509, 520, 521, 522, 523, 524, 530})

_SIGNED = (
    "Signatures expire, and each is that of one file: make a new one, or pass a list of signed addresses of all files."
)
_REFUSED = "Check the credentials: the user and password, the token or the headers that were passed."


class ResponseHead(Struct, frozen=True, kw_only=True):
    """Status and headers of one response."""

    #: Status.
    status: int
    #: Headers; names are found in any case.
    headers: Mapping[str, str]
    #: Address as the user typed it, without credentials, for errors.
    path: str
    #: Whether the address carries a signature.
    signed: bool = False

    @property
    def content_range(self) -> str:
        """The header ``Content-Range``, not all of it if it is longer than any."""
        return self.headers.get("Content-Range", "")[:_SHOWN]


def conditions(facts: ObjectFacts) -> dict[str, str]:
    """Return the headers that make a server refuse a request for a different version of the object."""
    if facts.version is not None:
        return {"If-Match": facts.version}
    return {} if facts.modified is None else {"If-Unmodified-Since": facts.modified}


def first_facts(head: ResponseHead, nbytes: int) -> ObjectFacts:
    """Return what the response to a request for the first ``nbytes`` bytes says about the object.

    Raises:
        SluiceError: There is no such object, or its server does not answer ranges.
        RequestFailedError: The request failed.
    """
    if _size_outside(head) == 0:
        return _object_facts(head, 0)
    if head.status in _MISSING:
        raise MissingFileError(_described(head), file=head.path, advice="Check the address.")
    check_status(head)
    if head.status == HTTPStatus.OK:
        total = _length(head)
        if total is None or total > nbytes:
            size = f" of {format_bytes(total)}" if total else ""
            problem = f"the server does not answer ranges: it sends the whole object{size}"
            raise _unsupported(head, problem, expected="status 206", found=f"status {head.status}")
        return _object_facts(head, total)
    first, last, total = _content_range(head)
    if total is None:
        problem, expected = "the server does not tell the size of the file", "Content-Range: bytes FIRST-LAST/SIZE"
        raise _unsupported(head, problem, expected=expected, found=head.content_range)
    _check_parts(head, first, last, 0, min(nbytes, total))
    return _object_facts(head, total)


def check_range(head: ResponseHead, offset: int, nbytes: int, facts: ObjectFacts) -> None:
    """Check that a response has exactly the bytes that were asked for, of the object that was opened.

    Raises:
        SluiceError: The object changed, or its server does not answer ranges.
        RequestFailedError: The request failed.
    """
    if head.status in _MISSING:
        raise _changed(head, offset, facts, "nothing: it was removed")
    if head.status == HTTPStatus.PRECONDITION_FAILED:
        raise _changed(head, offset, facts, "a different version")
    if (size := _size_outside(head)) not in {None, facts.nbytes}:
        raise _changed(head, offset, facts, f"{size} bytes")
    check_status(head)
    if head.status == HTTPStatus.OK:
        _check_same(head, offset, facts, _length(head))
        if offset or nbytes != facts.nbytes:
            raise WrongResponseError("the server sent the whole object in place of a range", status=head.status)
        _check_length(head, nbytes)
        return
    first, last, total = _content_range(head)
    if total is None:  # without it, a different object of a server without versions might not be noticed
        raise _unclear_range(head)
    _check_same(head, offset, facts, total)
    _check_parts(head, first, last, offset, nbytes)


def _size_outside(head: ResponseHead) -> int | None:
    """Return the size of the object if the answer says that the range is outside of it; None otherwise."""
    outside = head.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
    found = _EMPTY_RANGE.fullmatch(head.content_range) if outside else None
    return int(found[1]) if found else None


def _object_facts(head: ResponseHead, nbytes: int) -> ObjectFacts:
    """Return the version that a response names for an object of ``nbytes`` bytes."""
    tag = head.headers.get("ETag")
    strong = tag is not None and len(tag) > 2 and tag.startswith('"') and tag.endswith('"')
    return ObjectFacts(
        nbytes=nbytes,
        version=tag if strong else None,
        weak_version=None if strong else tag,
        modified=head.headers.get("Last-Modified"),
    )


def _check_same(head: ResponseHead, offset: int, facts: ObjectFacts, total: int | None) -> None:
    """Compare what is known of both: a server may leave out headers, and may ignore conditions."""
    if total is not None and total != facts.nbytes:
        raise _changed(head, offset, facts, f"{total} bytes")
    now = _object_facts(head, facts.nbytes)
    for was, found in (
        (facts.version, now.version),
        (facts.weak_version, now.weak_version),
        (None if facts.version else facts.modified, now.modified),
    ):
        if was is not None and found != was:
            raise _changed(head, offset, facts, f"version {found!r}" if found else "no version")


def check_status(head: ResponseHead) -> None:
    """Raise what the status means; return if there is a body of the object."""
    status = head.status
    if status in {HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT}:
        encoding = head.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in {"", "identity"}:
            problem = "the server compresses what it sends, so that ranges of the file cannot be read"
            refusal = _unsupported(head, problem, expected="no Content-Encoding", found=encoding[:_SHOWN])
            refusal.advice = f"Switch compression off on the server. {refusal.advice}"
            raise refusal
        return
    advice = None
    if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.PROXY_AUTHENTICATION_REQUIRED}:
        advice = _SIGNED if head.signed else _REFUSED
    raise RequestFailedError(
        _described(head),
        temporary=status in TEMPORARY,
        status=status,
        retry_after=_retry_after(head.headers.get("Retry-After"), time.time()),
        advice=advice,
    )


def _retry_after(text: str | None, now: float) -> float | None:
    """Return the seconds that ``Retry-After`` asks to wait, written as a number or as a date."""
    if not text:
        return None
    if re.fullmatch(r"\s*\d{1,9}\s*", text):
        return float(text)
    try:
        until = parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, OverflowError, OSError):
        return None
    return max(0.0, until - now)


def _content_range(head: ResponseHead) -> tuple[int, int, int | None]:
    """Return first and last byte, and the size of the object or None.

    Raises:
        RequestFailedError: The response does not say them, or they contradict each other.
    """
    parts = _RANGE.fullmatch(head.content_range.strip())
    if parts is None:
        raise _unclear_range(head)
    first, last, total = parts.groups()
    return int(first), int(last), None if total is None else int(total)


def _unclear_range(head: ResponseHead) -> RequestFailedError:
    problem = f"the answer does not say which bytes it has: Content-Range is {head.content_range!r}"
    return WrongResponseError(problem, status=head.status)


def _length(head: ResponseHead) -> int | None:
    """Return the declared size of the body; None if there is none.

    Raises:
        RequestFailedError: It is not a number. The end of such a body cannot be found.
    """
    text = head.headers.get("Content-Length", "").strip()
    if text and not re.fullmatch(r"\d{1,19}", text):
        problem = f"the answer has an invalid size: Content-Length is {text[:_SHOWN]!r}"
        raise RequestFailedError(problem, temporary=False, status=head.status)
    return int(text) if text else None


def _check_length(head: ResponseHead, nbytes: int) -> None:
    length = _length(head)
    if length is not None and length != nbytes:
        raise WrongResponseError(f"the answer has {length} bytes in place of {nbytes}", status=head.status)


def _check_parts(head: ResponseHead, first: int, last: int, offset: int, nbytes: int) -> None:
    if (first, last) != (offset, offset + nbytes - 1):
        problem = f"the server sent {head.content_range!r} in place of bytes {offset}-{offset + nbytes - 1}"
        raise WrongResponseError(problem, status=head.status)
    _check_length(head, nbytes)


def _unsupported(head: ResponseHead, problem: str, *, expected: str, found: str) -> UnsupportedError:
    advice = download_advice(head.path)
    return UnsupportedError(problem, file=head.path, expected=expected, found=found, advice=advice)


def _changed(head: ResponseHead, offset: int, facts: ObjectFacts, found: str) -> SluiceError:
    return SourceChangedError(
        "the object changed while it was being read",
        file=head.path,
        offset=offset,
        expected=facts.describe(),
        found=found[:_SHOWN],
        advice="Wait until its writer has finished, then load again.",
    )


def _described(head: ResponseHead) -> str:
    """Return the status as a clause, with the number of the request if the server sends one."""
    try:
        phrase = f" {HTTPStatus(head.status).phrase}"
    except ValueError:
        phrase = ""
    for name in _REQUEST_IDS:
        number = head.headers.get(name, "")
        if _REQUEST_ID.fullmatch(number):
            return f"the server answered {head.status}{phrase} (request {number})"
    return f"the server answered {head.status}{phrase}"
