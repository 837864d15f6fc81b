"""Answers of HTTP servers that need no server to test."""

from __future__ import annotations

import time
from email.utils import formatdate

import pytest

from sluice.sources.remote.http_responses import ResponseHead, check_range, conditions
from sluice.sources.remote.protocol import ObjectFacts, RequestFailedError

FACTS = ObjectFacts(nbytes=100)


def failure(status: int, **headers: str) -> RequestFailedError:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    with pytest.raises(RequestFailedError) as caught:
        check_range(ResponseHead(status=status, headers=named, path="http://h/x"), 0, 10, FACTS)
    return caught.value


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("120", 120),
        # Far ahead: the list of tests is made up to half an hour before this one runs.
        pytest.param(formatdate(time.time() + 1e5, usegmt=True), 1e5, id="a date"),
        (formatdate(0, usegmt=True), 0),
        *((text, None) for text in ("soon", "-5", "1e9", "99999999999", "")),
    ],
)
def test_retry_after(text: str, seconds: float | None) -> None:
    found = failure(503, Retry_After=text).retry_after
    assert found == (None if seconds is None else pytest.approx(seconds, abs=3600))


def test_statuses_that_pass_and_that_stay() -> None:
    passing, staying = [408, 425, 429, 500, 502, 503, 504], [400, 401, 403, 405, 407, 416, 451, 501, 505, 204, 304, 299]
    assert [status for status in (*passing, *staying, 999) if failure(status).temporary] == passing


def test_a_request_is_named_by_its_number_if_that_is_one() -> None:
    assert "(request Ab/1=)" in failure(500, x_request_id="Ab/1=").problem
    assert "request" not in failure(500, x_request_id="\x1b[2J").problem


@pytest.mark.parametrize(
    "text", ["bytes 0-9", "bytes 0-9/*", "bytes=0-9/100", "items 0-9/100", "bytes 0-9/100, bytes 5-9/100"]
)
def test_ranges_that_say_too_little(text: str) -> None:
    assert "does not say which bytes" in failure(206, Content_Range=text).problem


@pytest.mark.parametrize("text", ["Bytes 0-9/100", "BYTES 0-9/100", "bytes  0-9/100", " bytes 0-9/100 "])
def test_spellings_of_a_range(text: str) -> None:
    check_range(ResponseHead(status=206, headers={"Content-Range": text}, path="http://h/x"), 0, 10, FACTS)


@pytest.mark.parametrize("length", ["10, 10", "-10", "1e1", "ten"])
def test_a_size_that_is_no_number_is_not_waited_for(length: str) -> None:
    found = failure(206, Content_Range="bytes 0-9/100", Content_Length=length)
    assert f"invalid size: Content-Length is {length!r}" in found.problem
    assert not found.temporary


@pytest.mark.parametrize("text", ["bytes 0-8/100", "bytes 0-10/100", "bytes 1-10/100"])
def test_ranges_that_are_not_the_requested_one(text: str) -> None:
    assert "in place of bytes 0-9" in failure(206, Content_Range=text).problem
    assert "has 9 bytes in place of 10" in failure(206, Content_Range="bytes 0-9/100", Content_Length="9").problem


def test_requests_are_conditional_on_the_version() -> None:
    assert conditions(ObjectFacts(nbytes=1, version='"a"', modified="then")) == {"If-Match": '"a"'}
    assert conditions(ObjectFacts(nbytes=1, weak_version='W/"a"', modified="then")) == {"If-Unmodified-Since": "then"}
    assert conditions(ObjectFacts(nbytes=1)) == {}
