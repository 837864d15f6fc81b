"""Objects of HTTP servers: conformance, faults of answers, versions, redirects, and what happens to credentials."""

from __future__ import annotations

import logging
import random
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("urllib3", reason="the extra 'remote' is not installed")

from sluice import _defaults as defaults
from sluice._errors import (
    MissingFileError,
    RemoteError,
    SluiceError,
    SourceChangedError,
    TruncatedError,
    UnsupportedError,
)
from sluice._threads import in_threads
from sluice.records import RequestRecord
from sluice.sources.remote.file import RemoteFile
from sluice.sources.remote.http import HttpObject
from sluice.sources.remote.location import Remote
from sluice.sources.remote.retries import server_of
from support.range_server import (
    Answer,
    Fault,
    RangeServer,
    chunked,
    compressed,
    cut,
    headers,
    make_certificate,
    moved,
    shifted,
    status,
    whole,
)
from support.source_conformance import check_source
from support.waiting import SkippedTime

CONTENT = random.Random(17).randbytes(300_000)
OTHER = random.Random(18).randbytes(300_000)

#: Beyond the bytes that the opening request brings.
FAR = 100_000


def opened(url: str, **settings: Any) -> closing[RemoteFile]:
    """Return a file to close whose pauses take no time."""
    return closing(file_at(url, **settings))


def file_at(url: str, **settings: Any) -> RemoteFile:
    """Return a file whose pauses take no time."""
    time = SkippedTime()
    return RemoteFile(HttpObject(Remote(url, **settings)), sleep=time.sleep, clock=time)


@pytest.fixture
def server() -> Iterator[RangeServer]:
    with RangeServer({"/m.pth": CONTENT}) as running:
        yield running


def test_it_is_a_source(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    content = CONTENT[:30_000]
    server.files["/m.pth"] = content
    monkeypatch.setattr(defaults, "REMOTE_FIRST_BYTES", 8)  # everything else takes requests

    @contextmanager
    def failing() -> Iterator[None]:
        server.always = status(500)
        yield
        server.always = None

    check_source(
        lambda: file_at(server.url("/m.pth", credentials="u:p@") + "?sig=x"),
        content,
        change=lambda: server.files.update({"/m.pth": OTHER[:30_000]}),
        failing=failing,
        pinned=True,
    )


def test_the_opening_request_brings_the_first_bytes(server: RangeServer) -> None:
    with opened(server.url("/m.pth")) as file:
        assert file.identity.nbytes == len(CONTENT)
        assert file.read_at(0, defaults.REMOTE_FIRST_BYTES) == CONTENT[: defaults.REMOTE_FIRST_BYTES]
        assert len(server.requests) == 1
        assert file.read_at(1000, 200_000) == CONTENT[1000:201_000]
    asked = [request.headers["Range"] for request in server.requests]
    assert asked == ["bytes=0-65535", "bytes=65536-200999"]
    assert {request.headers["Accept-Encoding"] for request in server.requests} == {"identity"}
    assert server.connections == 1


#: Faults after which a request is repeated; tests/contracts/faults has more, at any request of a load.
PASSING: dict[str, Fault] = {
    "500": status(500),
    "503 with Retry-After": status(503, Retry_After="7"),
    "reset in the body": cut(70_000, "reset"),
    "shifted": shifted,
    "no range": headers(Content_Range=""),
    "two ranges": headers(Content_Type="multipart/byteranges", Content_Range=""),
    "long": headers(Content_Length="200001"),
    "whole": whole,
}

#: Faults that end a load.
FINAL: dict[str, tuple[Fault, type[SluiceError], str]] = {
    "404": (status(404), SourceChangedError, "it was removed"),
    "412": (status(412), SourceChangedError, "a different version"),
    "416": (status(416, Content_Range="bytes */5"), SourceChangedError, "found 5 bytes"),
    "other ETag": (headers(ETag='"other"'), SourceChangedError, "other"),
    "no ETag": (headers(ETag=""), SourceChangedError, "no version"),
    "other size": (headers(Content_Range=f"bytes {FAR}-{FAR + 99_999}/300001"), SourceChangedError, "300001 bytes"),
    "compressed": (compressed, UnsupportedError, "gzip"),
    "403": (status(403, x_amz_request_id="A1/b="), RemoteError, r"403 Forbidden \(request A1/b=\)"),
    "418": (status(418), RemoteError, "418"),
    "redirect to a file": (moved("file:///etc/passwd"), RemoteError, "not a URL of HTTP"),
}


@pytest.mark.parametrize("name", PASSING)
def test_a_failed_request_is_repeated(server: RangeServer, name: str) -> None:
    server.faults = {1: PASSING[name], 3: PASSING[name]}
    with opened(server.url("/m.pth")) as file:
        assert file.read_at(FAR, 100_000) == CONTENT[FAR : FAR + 100_000]
        assert file.read_at(FAR, 150_000) == CONTENT[FAR : FAR + 150_000]
    assert len(server.requests) == 5


@pytest.mark.parametrize("name", FINAL)
def test_other_answers_are_refused(server: RangeServer, name: str) -> None:
    fault, error, text = FINAL[name]
    with opened(server.url("/m.pth")) as file:
        server.faults = {1: fault}
        with pytest.raises(error, match=text) as caught:
            file.read_at(FAR, 100_000)
    assert caught.value.file == server.url("/m.pth")
    assert len(server.requests) == 2


def test_a_body_without_a_size_is_read_to_its_end(server: RangeServer) -> None:
    server.always = chunked
    with opened(server.url("/m.pth")) as file:
        assert file.read_at(FAR, 100_000) == CONTENT[FAR : FAR + 100_000]

    def longer(answer: Answer) -> Answer:
        more = chunked(answer)
        return Answer(206, more.headers, bytes(answer.body) + b"more", chunked=True)

    with opened(server.url("/m.pth")) as file:
        server.always = longer
        with pytest.raises(RemoteError, match="more bytes than it should"):
            file.read_at(FAR, 100_000)


@pytest.mark.parametrize("name", ["strong", "weak", "modified", "none"])
def test_each_answer_is_compared_whether_or_not_the_server_knows_conditions(server: RangeServer, name: str) -> None:
    server.validators = name  # type: ignore[assignment]  # one of its literals
    server.ignores_conditions = True
    with opened(server.url("/m.pth")) as file:
        assert (file.identity.version is None) == (name == "none")
        assert file.read_at(FAR, 9) == CONTENT[FAR : FAR + 9]
        server.files["/m.pth"] = OTHER[:-1] if name == "none" else OTHER
        with pytest.raises(SourceChangedError, match="299999 bytes" if name == "none" else "version"):
            file.read_at(FAR, 9)


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        (status(404), MissingFileError, "404 Not Found"),
        (whole, UnsupportedError, "does not answer ranges: it sends the whole object of 293 KiB"),
        (compressed, UnsupportedError, "compresses"),
        (status(416, Content_Range="bytes */0"), TruncatedError, "empty"),
        (headers(Content_Range="bytes 0-65535/*"), UnsupportedError, "does not tell the size of the file"),
        (status(416, Content_Range="bytes */5"), RemoteError, "the server answered 416"),
        (status(401), RemoteError, "Check the credentials"),
        (status(204), RemoteError, "204"),
    ],
    ids=["missing", "no ranges", "compressed", "empty", "no size", "no range", "refused", "no content"],
)
def test_an_object_that_cannot_be_opened(
    server: RangeServer, fault: Fault, error: type[SluiceError], text: str
) -> None:
    server.always = fault
    with pytest.raises(error, match=text):
        opened(server.url("/m.pth"))


def test_a_small_object_needs_no_ranges(server: RangeServer) -> None:
    server.always = whole
    server.files = {"/index.json": b"{}"}
    with opened(server.url("/index.json")) as file:
        assert file.read_at(0, 2) == b"{}"


@pytest.mark.parametrize("end", ["chunked", "close"])
def test_a_small_object_without_a_size_is_refused(server: RangeServer, end: str) -> None:
    """The object may be longer than what was received."""
    server.files = {"/index.json": b"{}"}
    server.always = lambda answer: (
        chunked(whole(answer)) if end == "chunked" else Answer(200, {"Connection": "close"}, b"{}", end="close")
    )
    with pytest.raises(UnsupportedError, match="does not answer ranges"):
        file_at(server.url("/index.json"))


def test_a_server_that_is_gone(server: RangeServer) -> None:
    url = server.url("/m.pth")
    with opened(url) as file:
        server.__exit__(None, None, None)
        with pytest.raises(RemoteError, match=r"cannot be reached: Connection refused after \d+ tries in 120 s"):
            file.read_at(FAR, 9)
        server.__enter__()


def test_redirects_are_followed_once(server: RangeServer) -> None:
    with RangeServer({"/m.pth": b""}) as first:
        first.faults = {0: moved("/a", 307), 1: moved("b?x=1", 308), 2: moved(server.url("/m.pth?sig=1"))}
        with opened(first.url("/m.pth")) as file:
            assert file.read_at(FAR, 9) == CONTENT[FAR : FAR + 9]
            assert file.path == first.url("/m.pth")
        assert [request.path for request in first.requests] == ["/m.pth", "/a", "/b?x=1"]
    assert [request.path for request in server.requests] == ["/m.pth?sig=1"] * 2
    assert server.requests[1].headers["Range"] == "bytes=100000-100008"


@pytest.mark.parametrize("code", [400, 401, 403, 404, 410])
def test_a_target_that_expires_is_asked_for_again(server: RangeServer, code: int) -> None:
    with RangeServer({}) as first:
        first.faults = {0: moved(server.url("/m.pth?sig=1")), 1: moved(server.url("/m.pth?sig=2"))}
        server.faults = {1: status(code)}
        with opened(first.url("/m.pth")) as file:
            assert file.read_at(FAR, 9) == CONTENT[FAR : FAR + 9]
    assert [request.path for request in server.requests] == ["/m.pth?sig=1", "/m.pth?sig=1", "/m.pth?sig=2"]


def test_a_target_that_cannot_be_reached_is_asked_for_again(server: RangeServer) -> None:
    with RangeServer({"/m.pth": CONTENT}) as first, RangeServer({"/m.pth": CONTENT}) as lost:
        first.faults = {0: moved(lost.url("/m.pth")), 1: moved(server.url("/m.pth"))}
        with opened(first.url("/m.pth")) as file:
            lost.always = cut(0, "reset")
            lost.drop_connections()
            assert file.read_at(FAR, 9) == CONTENT[FAR : FAR + 9]
    assert len(server.requests) == 1


def test_redirects_end(server: RangeServer) -> None:
    server.always = moved("/m.pth")
    with pytest.raises(RemoteError, match="redirects more than 5 times"):
        file_at(server.url("/m.pth"))
    assert len(server.requests) == 6


def test_credentials_stay_with_their_origin(server: RangeServer) -> None:
    sent = {"X-Token": "geheim", "authorization": "Bearer abc", "Range": "bytes=1-2", "user-agent": "me"}
    with RangeServer({}) as first:
        first.faults = {0: moved("/b"), 1: moved(server.url("/m.pth", credentials="other:one@"))}
        with opened(first.url("/m.pth", credentials="user:pass@"), headers=sent) as file:
            assert file.read_at(FAR, 9) == CONTENT[FAR : FAR + 9]
        for request in first.requests:
            assert request.headers["authorization"] == "Bearer abc"
            assert request.headers["X-Token"] == "geheim"
            assert request.headers["Range"] == "bytes=0-65535"
            assert request.headers.get_all("User-Agent") == ["me"]
    for request in server.requests:
        assert not [name for name in ("Authorization", "X-Token", "Cookie") if name in request.headers]


@pytest.mark.parametrize("fault", [status(403), status(503), cut(0, "reset"), cut(0, "stall"), headers(ETag='"x"')])
def test_no_error_and_no_log_has_credentials(
    server: RangeServer, caplog: pytest.LogCaptureFixture, fault: Fault
) -> None:
    url = server.url("/m.pth", credentials="user:geheim@") + "?X-Amz-Signature=geheim"
    with caplog.at_level(logging.DEBUG), opened(url, headers={"X-Token": "geheim"}, timeout=0.1) as file:
        server.always = fault
        with pytest.raises(SluiceError) as caught:
            file.read_at(FAR, 100)
        told = "".join(traceback.format_exception(caught.value)) + repr(file) + repr(vars(caught.value))
    assert "GET /m.pth" in caplog.text or "GET" in caplog.text
    assert "geheim" not in told + caplog.text


def test_a_header_that_is_not_valid_is_not_shown() -> None:
    with pytest.raises(RemoteError, match="header 'X-Token'") as caught:
        HttpObject(Remote("http://127.0.0.1/x", headers={"X-Token": "geheim\r\nX: y"}))
    assert "geheim" not in str(caught.value)


def test_a_signature_that_expired(server: RangeServer) -> None:
    server.always = status(403)
    with pytest.raises(RemoteError, match="each is that of one file: make a new one, or pass a list of signed"):
        file_at(server.url("/m.pth?X-Amz-Signature=abc"))


def test_addresses_are_sent_as_they_are_and_user_and_password_in_a_header(server: RangeServer) -> None:
    target = "/x//a%2Fb/%c3%a4 ü?v=1&x=%20"
    server.files = {"/x//a%2Fb/%C3%A4%20%C3%BC": CONTENT}
    with opened(server.url(target, credentials="user:p%40ss@")) as file:
        assert file.identity.nbytes == len(CONTENT)
        assert "user" not in file.path
    assert server.requests[0].path == "/x//a%2Fb/%C3%A4%20%C3%BC?v=1&x=%20"
    assert server.requests[0].headers["Authorization"] == "Basic dXNlcjpwQHNz"


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    return make_certificate(tmp_path)


def test_tls(certificate: Path) -> None:
    with RangeServer({"/m.pth": CONTENT}, certificate=certificate) as server:
        with pytest.raises(RemoteError, match="certificate of the server is not trusted"):
            file_at(server.url("/m.pth"))
        with opened(server.url("/m.pth"), verify=str(certificate)) as file:
            assert file.read_at(FAR, 100_000) == CONTENT[FAR : FAR + 100_000]
        with pytest.raises(RemoteError, match=r"certificate of the server is not trusted: .*mismatch"):
            file_at(server.url("/m.pth", host="localhost"), verify=str(certificate))
        unverified = pytest.warns(Warning, match="Unverified")
        with unverified, opened(server.url("/m.pth"), verify=False) as file:
            assert file.read_at(FAR, 9) == CONTENT[FAR : FAR + 9]
        server.always = moved("http://127.0.0.1:1/m.pth")
        with pytest.raises(RemoteError, match="redirects from https to http"):
            file_at(server.url("/m.pth"), verify=str(certificate))


def test_an_address_of_ipv6() -> None:
    running = RangeServer({"/m.pth": CONTENT}, host="::1")
    with ExitStack() as stack:
        try:
            stack.enter_context(running)
        except OSError:
            pytest.skip("this machine has no IPv6")
        with opened(running.url("/m.pth", host="[::1]")) as file:
            assert file.read_at(FAR, 9) == CONTENT[FAR : FAR + 9]


def test_a_proxy_of_the_environment(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", server.url("", credentials="me:geheim@"))
    monkeypatch.setenv("no_proxy", "inside.example")
    server.files = {"http://outside.example/m.pth": CONTENT}
    with opened("http://outside.example/m.pth") as file:
        assert file.read_at(FAR, 9) == CONTENT[FAR : FAR + 9]
    assert server.requests[0].headers["Proxy-Authorization"] == "Basic bWU6Z2VoZWlt"
    assert server.requests[0].headers["Host"] == "outside.example"
    monkeypatch.setenv("http_proxy", "socks5://me:geheim@127.0.0.1:1")
    with pytest.raises(UnsupportedError, match="proxy") as caught:
        RemoteFile(HttpObject("http://outside.example/m.pth"))
    assert "geheim" not in "".join(traceback.format_exception(caught.value))


def test_redirects_to_private_addresses(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first host counts as public here."""
    monkeypatch.setattr("sluice.sources.remote.http.resolved_network", lambda _: "public")
    with RangeServer({}) as first:
        for target in (server.url("/m.pth"), server.url("/m.pth", host="localhost")):
            first.always = moved(target)
            with pytest.raises(RemoteError, match="redirects to a private address"):
                file_at(first.url("/m.pth"))
        monkeypatch.setenv("http_proxy", first.url(""))
        monkeypatch.setenv("no_proxy", "")
        first.always = moved("http://169.254.169.254/latest")
        with pytest.raises(RemoteError, match="redirects to a private address"):
            file_at("http://outside.example/m.pth")
    assert not server.requests


def test_options_that_have_no_effect_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="options= has no effect"):
        HttpObject(Remote("http://host/m.pth", options={"token": "x"}))


def test_a_client_certificate(certificate: Path, tmp_path: Path) -> None:
    with RangeServer({"/m.pth": CONTENT}, certificate=certificate, asks_for_certificates=True) as server:
        with pytest.raises(RemoteError):
            file_at(server.url("/m.pth"), verify=str(certificate))
        with opened(server.url("/m.pth"), verify=str(certificate), cert=str(certificate)) as file:
            assert file.read_at(FAR, 9) == CONTENT[FAR : FAR + 9]
        (tmp_path / "empty.pem").write_text("")
        with pytest.raises(RemoteError, match="client certificate"):
            file_at(server.url("/m.pth"), cert=str(tmp_path / "empty.pem"))


def test_plain_text_in_place_of_tls_is_not_repeated(server: RangeServer) -> None:
    with pytest.raises(RemoteError, match="does not answer with TLS") as caught:
        file_at(server.url("/m.pth").replace("http:", "https:"))
    assert "tries" not in str(caught.value)


def test_a_replaced_file_without_a_version_is_found_out_after_the_load(server: RangeServer) -> None:
    server.validators = "none"
    with opened(server.url("/m.pth")) as file:
        assert "names no version" in str(file.note)
        file.read_at(FAR, 9)
        file.check_unchanged()
        server.files["/m.pth"] = CONTENT[:-1] + b"x"
        with pytest.raises(SourceChangedError, match="same size"):
            file.check_unchanged()


def test_requests_are_reported_to_an_observer(server: RangeServer) -> None:
    found: list[RequestRecord] = []
    server.faults = {0: status(503), 2: status(500)}
    url = server.url("/m.pth")
    with opened(url + "?sig=geheim") as file:
        file.observe(found.append)
        file.read_at(FAR, 9)
    assert [(each.method, each.url, each.nbytes, each.status) for each in found] == [
        ("GET", url, 0, 503),
        ("GET", url, 65536, 206),
        ("GET", url, 0, 500),
        ("GET", url, 9, 206),
    ]
    assert all(each.seconds >= 0 for each in found)


def test_a_server_that_limits_requests_is_read(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen at once, of which it answers two."""
    monkeypatch.setattr(defaults, "REMOTE_FIRST_PAUSE", 0.01)
    server.most_at_once, server.latency = 2, 0.005
    pieces: list[bytes] = [b""] * 64
    with closing(RemoteFile(HttpObject(server.url("/m.pth")))) as file:

        def read(number: int) -> None:
            pieces[number] = file.read_at(FAR + number, 1000)

        in_threads(read, 64, threads=16, name="reader")
        limit = server_of(file.path).limit
    assert pieces == [CONTENT[FAR + n : FAR + n + 1000] for n in range(64)]
    assert limit is not None
    assert limit <= 8
