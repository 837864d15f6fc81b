"""Objects of S3 and Azure as sources and directories, over servers that the tests start."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import sluice
from sluice._errors import (
    MissingFileError,
    PathEscapeError,
    RemoteError,
    SourceChangedError,
    TruncatedError,
    UnsupportedError,
)
from sluice.sources.protocol import Source
from sluice.sources.remote import store_clients
from sluice.sources.remote.file import RemoteFile
from sluice.sources.remote.http import HttpObject
from sluice.sources.remote.location import Remote
from sluice.sources.remote.protocol import RequestFailedError
from sluice.sources.remote.stores import StoredObject, open_directory, open_source
from support.object_stores import SERVERS, Bucket, connections_closed
from support.source_conformance import check_source
from support.watching import watch
from support.whole_checkpoints import MAKERS

obstore = pytest.importorskip("obstore", reason="obstore is not installed: pip install 'sluice[remote]'")

store_module = pytest.importorskip("obstore.store")

#: More than the first request brings.
CONTENT = random.Random(0).randbytes(300_000)


@pytest.fixture(scope="module", autouse=True)
def runtime() -> None:
    """Start the event loop of obstore, which a process keeps."""
    obstore.put(store_module.MemoryStore(), "x", b"x")


@pytest.fixture(scope="module", params=list(SERVERS))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with SERVERS[request.param](tmp_path_factory.mktemp(request.param)) as bucket:
        yield bucket


@pytest.fixture
def bucket(server: Bucket) -> Iterator[Bucket]:
    with connections_closed():
        yield server


def opened(bucket: Bucket, key: str) -> Source:
    return open_source(bucket.remote(key))


def test_an_object_keeps_the_protocol_of_sources(bucket: Bucket) -> None:
    bucket.put("protocol.bin", CONTENT)
    check_source(lambda: opened(bucket, "protocol.bin"), CONTENT)


@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_an_object_that_was_replaced_or_removed_has_changed(bucket: Bucket, change: str) -> None:
    bucket.put(f"{change}.bin", CONTENT)
    source = opened(bucket, f"{change}.bin")
    if change == "replaced":
        bucket.put("replaced.bin", CONTENT[::-1])
    else:
        obstore.delete(bucket.store, "removed.bin")
    with pytest.raises(SourceChangedError, match=change):
        source.read_at(100_000, 10)


def test_data_of_s3_is_read_by_signed_requests(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore makes the first request only, and every request that reads a byte has a signature of its own."""
    bucket.put("signed.bin", CONTENT)
    by_obstore: list[tuple[int, int]] = []
    watch(monkeypatch, obstore, "get", lambda *_, options: by_obstore.append(options["range"]))
    signed: list[str] = []
    watch(monkeypatch, HttpObject, "move_to", lambda _, url: signed.append(url))
    source = opened(bucket, "signed.bin")
    for offset in (100_000, 200_000, 299_990):
        assert source.read_at(offset, 10) == CONTENT[offset : offset + 10]
    s3 = bucket.url.startswith("s3")
    assert len(by_obstore) == (1 if s3 else 4)
    assert len(signed) == (3 if s3 else 0)


@pytest.mark.parametrize("status", [403, 503, None])
def test_signed_requests_that_fail(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, status: int | None) -> None:
    """If one is refused or finds no server, obstore makes it and all that follow; after a moment it is repeated."""
    bucket.put("failing.bin", CONTENT)
    source = opened(bucket, "failing.bin")
    asked: list[int] = []

    def fail_once(_: HttpObject, offset: int, *__: object) -> None:
        asked.append(offset)
        if len(asked) == 1:
            raise RequestFailedError("no", temporary=status != 403, status=status, unreached=status is None)

    watch(monkeypatch, HttpObject, "open_range", fail_once)
    for offset in (100_000, 200_000):
        assert source.read_at(offset, 10) == CONTENT[offset : offset + 10]
    expected = [100_000, 100_000, 200_000] if status == 503 else [100_000]
    assert asked == (expected if bucket.url.startswith("s3") else [])


def test_shards_below_a_prefix_are_read_bit_for_bit(bucket: Bucket, tmp_path: Path) -> None:
    MAKERS["shards"](tmp_path / "model")
    bucket.put_files("model", tmp_path / "model")
    assert sluice.diff(bucket.remote("model"), tmp_path / "model").same


def test_a_change_is_found_if_the_server_ignores_conditions(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.put("changing.bin", CONTENT)
    source = opened(bucket, "changing.bin")
    bucket.put("changing.bin", CONTENT[::-1])
    watch(monkeypatch, obstore, "get", lambda *_, options: options.pop("if_match"))
    with pytest.raises(SourceChangedError, match="replaced") as caught:
        source.read_at(100_000, 10)
    assert caught.value.expected != caught.value.found


def test_a_small_object_with_a_literal_key_and_an_empty_one(bucket: Bucket) -> None:
    """Percent signs and spaces do not escape anything."""
    bucket.put("a %41.bin", b"abc")
    bucket.put("empty.bin", b"")
    assert opened(bucket, "a %41.bin").read_at(0, 3) == b"abc"
    with pytest.raises(TruncatedError, match="empty"):
        opened(bucket, "empty.bin")


def test_what_may_be_a_signature_is_not_shown() -> None:
    store = obstore.store.MemoryStore()
    with pytest.raises(MissingFileError) as caught:
        open_source(Remote("a?signature=secret", store=store))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_prefix_is_a_directory(bucket: Bucket, slash: str) -> None:
    for key in ("listed/a.bin", "listed/b/c.bin", "listed-too.bin"):
        bucket.put(key, key.encode())
    directory = open_directory(bucket.remote(f"listed{slash}"))
    assert directory is not None
    assert {entry.name: entry.kind for entry in directory.entries()} == {"a.bin": "file", "b": "directory"}
    assert directory.path == f"{bucket.url}listed/"
    source = directory.open("b/c.bin")
    assert source.path == f"{bucket.url}listed/b/c.bin"
    assert source.read_at(0, source.identity.nbytes) == b"listed/b/c.bin"
    with pytest.raises(MissingFileError):
        directory.open("missing.bin")
    with pytest.raises(PathEscapeError):
        directory.open("../listed-too.bin")


def test_an_object_or_nothing_is_no_directory(bucket: Bucket) -> None:
    bucket.put("one", b"1")
    assert open_directory(bucket.remote("one")) is None
    assert open_directory(bucket.remote("nothing/")) is None
    with pytest.raises(MissingFileError, match="prefix"):
        open_source(bucket.remote("nothing/"))


@pytest.mark.parametrize("name", ["v1.txt", "v1.h5", "v1.msgpack"])
def test_suffixes_of_files_that_hold_no_checkpoint_may_be_those_of_directories(name: str) -> None:
    store = obstore.store.MemoryStore()
    obstore.put(store, f"{name}/model.safetensors", b"x")
    directory = open_directory(Remote(name, store=store))
    assert directory is not None
    assert [entry.name for entry in directory.entries()] == ["model.safetensors"]


def test_the_name_of_a_file_is_no_directory_without_a_request() -> None:
    options = {"endpoint": "http://127.0.0.1:9"}
    assert open_directory(Remote("s3://bucket/model.safetensors", options=options)) is None


def test_an_object_needs_no_permission_to_list(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise obstore.exceptions.PermissionDeniedError("status code: 403")

    monkeypatch.setattr(obstore, "list_with_delimiter", refused)
    assert open_directory(bucket.remote("model")) is None
    with pytest.raises(RemoteError, match="refused access"):
        open_directory(bucket.remote("model/"))


def test_a_missing_bucket_is_named(bucket: Bucket) -> None:
    url, options = bucket.url.replace("models", "nowhere"), dict(bucket.options)
    with pytest.raises(MissingFileError, match="bucket does not exist"):
        open_source(Remote(f"{url}a.bin", options=options))
    with pytest.raises(MissingFileError, match="bucket does not exist"):
        open_directory(Remote(f"{url}a/", options=options))


def test_refused_credentials_are_an_error_without_them(bucket: Bucket) -> None:
    bucket.put("private.bin", CONTENT)
    wrong = {**bucket.options}
    if wrong.get("access_key_id") == "testing":
        wrong["skip_signature"] = "true"  # moto accepts every secret
    elif bucket.url.startswith("s3"):
        wrong |= {"access_key_id": "unknown", "secret_access_key": "hidden-secret"}
    else:
        wrong["account_key"] = "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0"
    with pytest.raises(RemoteError, match=r"refused access \(403") as caught:
        open_source(Remote(f"{bucket.url}private.bin", options=wrong))
    assert "ACCESS_KEY" in str(caught.value) or "ACCOUNT_KEY" in str(caught.value)
    for value in ("hidden-secret", "c2VjcmV0"):
        assert value not in f"{caught.value!s} {caught.value!r} {caught.value.__cause__!r}"


@pytest.mark.parametrize("named", [{"skip_signature": "true"}, {}])
def test_public_buckets_are_read_without_credentials(named: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    if not named:
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    where = Remote("s3://bucket/a", options=named)
    store = store_clients.make_store(store_clients.parse_address(where.url), where)
    assert StoredObject(store, "a", "s3://bucket/", where)._signed is None


def test_absent_credentials_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    closed = "http://127.0.0.1:9"
    options = {"endpoint": closed, "metadata_endpoint": closed}
    with pytest.raises(RemoteError, match="no credentials were found"):
        open_source(Remote("s3://bucket/a.bin", options=options))


def test_stores_of_the_user() -> None:
    store = obstore.store.MemoryStore()
    obstore.put(store, "dir/a.bin", CONTENT)
    replace = partial(obstore.put, store, "dir/a.bin", CONTENT[::-1])
    check_source(lambda: open_source(Remote("dir/a.bin", store=store)), CONTENT, change=replace, pinned=True)


@pytest.mark.parametrize("key", ["../dir", "dir/../a.bin", "dir//a.bin"])
def test_keys_that_stores_refuse_name_nothing(key: str) -> None:
    where = sluice.Remote(key, store=obstore.store.MemoryStore())
    with pytest.raises(MissingFileError):
        sluice.open(where)


def test_a_body_arrives_in_pieces_of_a_fixed_size(monkeypatch: pytest.MonkeyPatch) -> None:
    content = random.Random(1).randbytes(2_000_000)
    store = obstore.store.MemoryStore()
    obstore.put(store, "a", content)
    asked: list[tuple[int, int]] = []
    watch(monkeypatch, obstore, "get", lambda *_, options: asked.append(options["range"]))
    source = open_source(Remote("a", store=store))
    target = bytearray(1_000_000)
    assert source.read_into(500_000, memoryview(target)) == len(target)
    assert target == content[500_000:1_500_000]
    assert asked == [(0, 65536), (500_000, 1_500_000)]


def test_without_obstore_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(UnsupportedError, match=r"sluice\[remote\]"):
        open_source(Remote("s3://bucket/a.bin"))


def test_a_forked_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Remote("s3://bucket/a.bin", options={"skip_signature": "true"})
    store = store_clients.make_store(store_clients.parse_address(source.url), source)
    monkeypatch.setattr(store_clients, "_USERS", {os.getpid() + 1})
    with pytest.raises(UnsupportedError, match="forked"):
        RemoteFile(StoredObject(store, "a.bin", "s3://bucket/", source))
    monkeypatch.setattr(store_clients, "_USERS", set[int]())  # the other process has not used a store
    assert store_clients.obstore_library("s3://bucket/a.bin")
