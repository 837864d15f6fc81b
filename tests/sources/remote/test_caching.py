"""Which remote files are cached, and the names of their entries."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sluice._errors import MissingFileError, ReadError, RemoteError
from sluice.sources.opening import find_place
from sluice.sources.remote import caching
from sluice.sources.remote.caching import CachedFile, CompleteFile, object_key
from sluice.sources.remote.location import Remote
from support.cached_objects import content, loaded, read
from support.range_server import RangeServer, status

CONTENT = content(300_000)


def key(url: str, **settings: object) -> str:
    return object_key(Remote(url, **settings), "v", 1)  # type: ignore[arg-type]  # each case has its own


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("https://host/m", "https://user:password@host/m", True),
        ("https://host/m?id=3", "https://host/m?id=3&X-Amz-Signature=1&X-Amz-Date=2", True),
        ("https://a.blob.core.windows.net/c/m?", "https://a.blob.core.windows.net/c/m?sv=1&se=2&sig=3", True),
        ("S3://bucket/m", "s3://bucket/m", True),
        ("https://host/m?id=3", "https://host/m?id=4", False),
        ("https://host/m?design=2&se=3", "https://host/m?design=2&se=4", False),
        ("https://host/signature=1?se=3", "https://host/signature=1?se=4", False),
        ("https://host/m", "https://host:444/m", False),
        ("az://container@one/m", "az://container@other/m", False),
        ("s3://bucket/m#1", "s3://bucket/m#2", False),
    ],
)
def test_entries_are_those_of_objects_whatever_credentials_and_signatures(one: str, other: str, same: bool) -> None:
    assert (key(one) == key(other)) == same


def test_version_size_and_endpoint_change_the_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote("s3://bucket/m")
    found = {object_key(remote, "v", 1), object_key(remote, "w", 1), object_key(remote, "v", 2)}
    found.add(key("s3://bucket/m", options={"endpoint": "http://127.0.0.1:1"}))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:2")
    found.add(object_key(remote, "v", 1))
    assert len(found) == 5


def test_variables_of_other_services_do_not_change_the_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key("s3://bucket/m")
    for name in ("AZURE_OPENAI_ENDPOINT", "AWS_ENDPOINT_URL_SQS", "HF_INFERENCE_ENDPOINT"):
        monkeypatch.setenv(name, "https://host")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "")
    assert key("s3://bucket/m") == before


def test_stores_of_different_hosts_and_buckets_have_different_entries() -> None:
    stores = pytest.importorskip("obstore.store")
    made = [stores.HTTPStore.from_url(f"https://{host}/a/") for host in ("one", "other")]
    made += [stores.S3Store(bucket, region="x", skip_signature=True) for bucket in ("one", "other")]
    made.append(stores.S3Store("one", region="x", skip_signature=True, endpoint="https://host"))
    made.append(stores.S3Store("one", region="x", skip_signature=True, prefix="p"))
    assert len({key("m.bin", store=store) for store in made}) == len(made)


def test_the_second_opening_makes_one_request_for_all_bytes(tmp_path: Path) -> None:
    with RangeServer({"/d/m.bin": CONTENT}) as server:
        directory = find_place(Remote(server.url("/d/"), cache=tmp_path)).directory()
        assert directory is not None
        source = directory.open("m.bin")
        assert loaded(source) == CONTENT
        server.requests.clear()
        again = find_place(Remote(server.url("/d/m.bin"), cache=tmp_path)).open_file()
        assert isinstance(again, CompleteFile)
        assert read(again, 0, len(CONTENT)) == CONTENT
        assert len(server.requests) == 1
        again.close()


def test_who_has_no_right_to_an_object_does_not_get_it_from_the_cache(tmp_path: Path) -> None:
    with RangeServer({"/m.bin": CONTENT}) as server:
        location = Remote(server.url("/m.bin"), cache=tmp_path)
        source = find_place(location).open_file()
        loaded(source)
        server.always = status(403)
        with pytest.raises(RemoteError, match="403"):
            find_place(location).open_file()
        del server.files["/m.bin"]
        server.always = None
        with pytest.raises(MissingFileError):
            find_place(location).open_file()


def refused(location: Remote, cache: Path, why: str) -> None:
    source = find_place(replace(location, cache=cache)).open_file()
    assert read(source, 0, len(CONTENT)) == CONTENT
    assert why in str(getattr(source, "note", None))
    source.close()
    assert not cache.exists()


@pytest.mark.parametrize("validators", ["weak", "modified", "none"])
def test_objects_without_a_version_are_not_cached(tmp_path: Path, validators: str) -> None:
    with RangeServer({"/m.bin": CONTENT}, validators=validators) as server:  # type: ignore[arg-type]
        refused(Remote(server.url("/m.bin")), tmp_path / "cache", "does not name its version")


def test_files_of_fsspec_are_not_cached(tmp_path: Path, filesystem: Any) -> None:
    filesystem.pipe("/m.bin", CONTENT)
    refused(Remote("memory://m.bin"), tmp_path / "cache", "fsspec")


@pytest.fixture(scope="module")
def store() -> Any:
    """Return a store with an object; the process keeps the event loop of obstore."""
    obstore = pytest.importorskip("obstore", reason="the extra 'remote' is not installed")
    store = pytest.importorskip("obstore.store").MemoryStore()
    obstore.put(store, "m.bin", CONTENT)
    return store


def test_objects_of_stores_in_memory_are_not_cached(tmp_path: Path, store: Any) -> None:
    refused(Remote("m.bin", store=store), tmp_path / "cache", "versions of this store")


def test_bodies_of_obstore_are_cached(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "_LASTING_STORES", {"MemoryStore"})  # an S3 store needs a server
    for kind in (CachedFile, CompleteFile):
        source = find_place(Remote("m.bin", store=store, cache=tmp_path)).open_file()
        assert isinstance(source, kind)
        assert loaded(source) == CONTENT


def test_a_complete_file_that_cannot_be_read_is_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RangeServer({"/m.bin": CONTENT}) as server:
        location = Remote(server.url("/m.bin"), cache=tmp_path)
        for _ in range(2):
            source = find_place(location).open_file()
            assert loaded(source) == CONTENT
            monkeypatch.setattr(caching, "CompleteFile", _refuse)
        assert "not cached: denied" in str(getattr(source, "note", None))


def _refuse(*_: object) -> None:
    raise ReadError("denied")


def test_credentials_are_not_in_the_cache(tmp_path: Path) -> None:
    with RangeServer({"/m.bin": CONTENT}) as server:
        url = server.url("/m.bin?token=SECRET", credentials="me:SECRET@")
        source = find_place(Remote(url, cache=tmp_path, headers={"X-Token": "SECRET"})).open_file()
        loaded(source)
    assert all("SECRET" not in str(path) for path in tmp_path.rglob("*"))
