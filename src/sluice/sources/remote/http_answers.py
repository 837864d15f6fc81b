"""Answers of HTTP servers, compared with the request and with the object that was opened. Pure functions."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from http import HTTPStatus

from msgspec import Struct

from sluice._errors import MissingFileError, SluiceError, SourceChangedError, UnsupportedError
from sluice._units import format_bytes
from sluice.sources.remote.protocol import ObjectFacts, RequestFailedError, WrongAnswerError
from sluice.sources.remote_names import download_advice

__all__ = [
    "TEMPORARY",
    "Answer",
    "check_range",
    "check_status",
    "conditions",
    "first_facts",
    "no_ranges",
    "object_facts",
]

#: Units of ranges are the same in upper and lower case; a size of ``*`` is not known.
_RANGE = re.compile(r"bytes +(\d{1,19})-(\d{1,19})/(?:(\d{1,19})|\*)", re.IGNORECASE)
_EMPTY_RANGE = re.compile(r"bytes +\*/(\d{1,19})", re.IGNORECASE)

#: Names under which servers send the number by which their operators find a request.
_REQUEST_IDS = ("x-amz-request-id", "x-ms-request-id", "x-guploader-uploadid", "x-request-id", "cf-ray")
_REQUEST_ID = re.compile(r"[\w.:=+/-]{1,128}")

#: Statuses after which the same request may succeed.
TEMPORARY = frozenset({408, 425, 429, 500, 502, 503, 504, 509, 520, 521, 522, 523, 524, 530})

_SIGNED = "The address is signed, and signatures expire: make a new one."
_REFUSED = "Check the credentials: the user and password, the token or the headers that were passed."


class Answer(Struct, frozen=True, kw_only=True):
    """The head of one answer."""

    #: Status.
    status: int
    #: Headers; names are found in any case.
    headers: Mapping[str, str]
    #: Address as the user typed it, without credentials, for errors.
    path: str
    #: Whether the address carries a signature.
    signed: bool = False


def conditions(facts: ObjectFacts) -> dict[str, str]:
    """Return the headers that make a server refuse a request for a different version of the object."""
    if facts.version is not None:
        return {"If-Match": facts.version}
    return {} if facts.modified is None else {"If-Unmodified-Since": facts.modified}


def first_facts(answer: Answer, nbytes: int) -> ObjectFacts | None:
    """Return what the answer to a request for the first ``nbytes`` bytes says about the object.

    None if the answer is the object itself, of a size that only its end shows.

    Raises:
        SluiceError: There is no such object, or its server does not answer ranges.
        RequestFailedError: The request failed.
    """
    if answer.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        empty = _EMPTY_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
        if empty and not int(empty[1]):
            return object_facts(answer, 0)
        raise RequestFailedError(_described(answer), temporary=False, status=answer.status)
    if answer.status in {HTTPStatus.NOT_FOUND, HTTPStatus.GONE}:
        raise MissingFileError(f"{_described(answer)}", file=answer.path, advice="Check the address.")
    check_status(answer)
    if answer.status == HTTPStatus.OK:
        total = _length(answer)
        if total is not None and total > nbytes:
            raise no_ranges(answer)
        if total is not None:
            return object_facts(answer, total)
        if answer.headers.get("Transfer-Encoding", "").lower() == "chunked":
            return None
        # Without a size and without chunks, a lost connection looks like the end.
        raise no_ranges(answer)
    first, last, total = _content_range(answer)
    if total is None:
        problem = "the server does not tell the size of the file"
        found = _printable(answer.headers.get("Content-Range", ""))
        raise UnsupportedError(
            problem,
            file=answer.path,
            expected="Content-Range: bytes FIRST-LAST/SIZE",
            found=found,
            advice=download_advice(answer.path),
        )
    if first != 0 or last != min(nbytes, total) - 1:
        raise _wrong_range(answer, 0, min(nbytes, total))
    _check_length(answer, last + 1)
    return object_facts(answer, total)


def check_range(answer: Answer, offset: int, nbytes: int, facts: ObjectFacts) -> None:
    """Check that an answer has exactly the bytes that were asked for, of the object that was opened.

    Raises:
        SluiceError: The object changed, or its server does not answer ranges.
        RequestFailedError: The request failed.
    """
    if answer.status in {HTTPStatus.NOT_FOUND, HTTPStatus.GONE}:
        raise _changed(answer, offset, facts, "nothing: it was removed")
    if answer.status == HTTPStatus.PRECONDITION_FAILED:
        raise _changed(answer, offset, facts, "a different version")
    if answer.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        empty = _EMPTY_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
        if empty and int(empty[1]) != facts.nbytes:
            raise _changed(answer, offset, facts, f"{empty[1]} bytes")
        raise RequestFailedError(_described(answer), temporary=False, status=answer.status)
    check_status(answer)
    if answer.status == HTTPStatus.OK:
        _check_same(answer, offset, facts, _length(answer))
        if offset or nbytes != facts.nbytes:
            raise WrongAnswerError("the server sent the whole object in place of a range", status=answer.status)
        _check_length(answer, nbytes)
        return
    first, last, total = _content_range(answer)
    if total is None:  # without it, a different object of a server without versions might not be noticed
        raise _unclear_range(answer)
    _check_same(answer, offset, facts, total)
    if first != offset or last != offset + nbytes - 1:
        raise _wrong_range(answer, offset, nbytes)
    _check_length(answer, nbytes)


def object_facts(answer: Answer, nbytes: int) -> ObjectFacts:
    """Return the version that an answer names for an object of ``nbytes`` bytes."""
    tag = answer.headers.get("ETag")
    strong = tag is not None and len(tag) > 2 and tag.startswith('"') and tag.endswith('"')
    return ObjectFacts(
        nbytes=nbytes,
        version=tag if strong else None,
        weak_version=None if strong else tag,
        modified=answer.headers.get("Last-Modified"),
    )


def _check_same(answer: Answer, offset: int, facts: ObjectFacts, total: int | None) -> None:
    """Compare what is known of both: a server may leave out headers, and may ignore conditions."""
    if total is not None and total != facts.nbytes:
        raise _changed(answer, offset, facts, f"{total} bytes")
    now = object_facts(answer, facts.nbytes)
    for was, found in (
        (facts.version, now.version),
        (facts.weak_version, now.weak_version),
        (None if facts.version else facts.modified, now.modified),
    ):
        if was is not None and found != was:
            raise _changed(answer, offset, facts, f"version {found!r}" if found else "no version")


def check_status(answer: Answer) -> None:
    """Raise what the status means; return if there is a body of the object."""
    status = answer.status
    if status in {HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT}:
        encoding = answer.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in {"", "identity"}:
            raise UnsupportedError(
                "the server compresses what it sends, so that ranges of the file cannot be read",
                file=answer.path,
                expected="no Content-Encoding",
                found=_printable(encoding),
                advice=f"Switch compression off on the server. {download_advice(answer.path)}",
            )
        return
    advice = None
    if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.PROXY_AUTHENTICATION_REQUIRED}:
        advice = _SIGNED if answer.signed else _REFUSED
    raise RequestFailedError(
        _described(answer),
        temporary=status in TEMPORARY,
        status=status,
        retry_after=_retry_after(answer.headers.get("Retry-After"), time.time()),
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


def _content_range(answer: Answer) -> tuple[int, int, int | None]:
    """Return first and last byte, and the size of the object or None.

    Raises:
        RequestFailedError: The answer does not say them, or they contradict each other.
    """
    text = answer.headers.get("Content-Range", "")
    parts = _RANGE.fullmatch(text.strip())
    if parts is None:
        raise _unclear_range(answer)
    first, last, total = parts.groups()
    return int(first), int(last), None if total is None else int(total)


def _unclear_range(answer: Answer) -> RequestFailedError:
    found = _printable(answer.headers.get("Content-Range", ""))
    problem = f"the answer does not say which bytes it has: Content-Range is {found!r}"
    return WrongAnswerError(problem, status=answer.status)


def _length(answer: Answer) -> int | None:
    """Return the declared size of the body; None if there is none.

    Raises:
        RequestFailedError: It is not a number. The end of such a body cannot be found.
    """
    text = answer.headers.get("Content-Length", "").strip()
    if text and not re.fullmatch(r"\d{1,19}", text):
        problem = f"the answer has an invalid size: Content-Length is {_printable(text)!r}"
        raise RequestFailedError(problem, temporary=False, status=answer.status)
    return int(text) if text else None


def _check_length(answer: Answer, nbytes: int) -> None:
    length = _length(answer)
    if length is not None and length != nbytes:
        raise WrongAnswerError(f"the answer has {length} bytes in place of {nbytes}", status=answer.status)


def _wrong_range(answer: Answer, offset: int, nbytes: int) -> RequestFailedError:
    found = _printable(answer.headers.get("Content-Range", ""))
    problem = f"the server sent {found!r} in place of bytes {offset}-{offset + nbytes - 1}"
    return WrongAnswerError(problem, status=answer.status)


def no_ranges(answer: Answer) -> SluiceError:
    """Return the error for a server that does not answer ranges."""
    total = _length(answer)
    size = f" of {format_bytes(total)}" if total else ""
    return UnsupportedError(
        f"the server does not answer ranges: it sends the whole object{size}",
        file=answer.path,
        expected="status 206",
        found=f"status {answer.status}",
        advice=download_advice(answer.path),
    )


def _changed(answer: Answer, offset: int, facts: ObjectFacts, found: str) -> SluiceError:
    return SourceChangedError(
        "the object changed while it was being read",
        file=answer.path,
        offset=offset,
        expected=facts.describe(),
        found=_printable(found),
        advice="Wait until its writer has finished, then load again.",
    )


def _described(answer: Answer) -> str:
    """Return the status as a clause, with the number of the request if the server sends one."""
    try:
        phrase = f" {HTTPStatus(answer.status).phrase}"
    except ValueError:
        phrase = ""
    for name in _REQUEST_IDS:
        number = answer.headers.get(name, "")
        if _REQUEST_ID.fullmatch(number):
            return f"the server answered {answer.status}{phrase} (request {number})"
    return f"the server answered {answer.status}{phrase}"


def _printable(text: str) -> str:
    return text[:200]
