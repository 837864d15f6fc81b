"""``save`` and ``convert`` to object stores, over a server that the tests start."""

from __future__ import annotations

import json
import signal
import urllib.request
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import sluice
from sluice import _defaults as defaults
from sluice.writing import uploads
from sluice.writing.uploads import Upload
from support import fresh_process
from support.directories import assert_same
from support.object_stores import SERVERS, Bucket, connections_closed, moto_bucket
from support.watching import watch

obstore = pytest.importorskip("obstore", reason="obstore is not installed: pip install 'sluice[remote]'")

STATE = {"a": torch.arange(1000.0), "b": torch.arange(6).view(2, 3), "c": torch.ones(500, dtype=torch.bfloat16)}


pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")


@pytest.fixture(scope="module", autouse=True)
def _runtime() -> None:
    """Start obstore's runtime, whose descriptors last, before the first test."""
    obstore.put(obstore.store.MemoryStore(), "x", b"x")


@pytest.fixture(scope="module")
def server() -> Iterator[Bucket]:
    with moto_bucket() as bucket:
        yield bucket


@pytest.fixture
def bucket(server: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """Return the bucket, which variables describe."""
    for name, value in server.options.items():
        monkeypatch.setenv("AWS_ENDPOINT_URL" if name == "endpoint" else f"AWS_{name.upper()}", str(value))
    with connections_closed():
        yield server


def names(bucket: Bucket, prefix: str) -> set[str]:
    listed = obstore.list_with_delimiter(bucket.store, prefix)["objects"]
    return {meta["path"].removeprefix(prefix) for meta in listed}


def download(bucket: Bucket, key: str, directory: Path) -> Path:
    file = directory / key.rpartition("/")[2]
    file.write_bytes(obstore.get(bucket.store, key).bytes())
    return file


def unfinished(bucket: Bucket) -> int:
    """Return the number of uploads of several parts that the server still keeps."""
    url = f"{bucket.options['endpoint']}/models?uploads"
    with urllib.request.urlopen(url, timeout=30) as answer:
        return int(answer.read().count(b"<Upload>"))


def test_a_directory_of_shards_has_its_index_last(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    watch(monkeypatch, obstore, "put", lambda _, key, *__, **___: order.append(key))
    report = sluice.save(STATE, "s3://models/sharded/", max_shard_size=3000)
    assert len(order) == len(report.files) > 2
    assert order[-1] == "sharded/model.safetensors.index.json"
    assert set(report.files) == {f"s3://models/{key}" for key in order}
    found: dict[str, torch.Tensor] = {}
    for key in order[:-1]:
        found |= load_file(download(bucket, key, tmp_path))
    assert_same(found, STATE)


def test_a_model_replaces_another_without_sharing_names(bucket: Bucket, tmp_path: Path) -> None:
    first = sluice.save(STATE, "s3://models/replaced", max_shard_size=3000)
    bucket.put("replaced/config.json", b"{}")
    with pytest.raises(sluice.SaveError, match="overwrite=True") as caught:
        sluice.save(STATE, "s3://models/replaced", max_shard_size=3000)
    assert caught.value.file == "s3://models/replaced"
    second = sluice.save(STATE, "s3://models/replaced", max_shard_size=3000, overwrite=True)
    index = "s3://models/replaced/model.safetensors.index.json"
    assert set(first.files) & set(second.files) == {index}
    assert names(bucket, "replaced/") == {file.rpartition("/")[2] for file in second.files} | {"config.json"}
    weights = json.loads(download(bucket, "replaced/model.safetensors.index.json", tmp_path).read_text())["weight_map"]
    assert {f"s3://models/replaced/{name}" for name in weights.values()} == set(second.files) - {index}


def test_an_existing_object_is_kept(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.put("kept.safetensors", b"kept")
    with pytest.raises(sluice.SaveError, match="already exists"):
        sluice.save(STATE, "s3://models/kept.safetensors")
    # Created by another process after the first look.
    exists = Upload.exists
    for part in (defaults.UPLOAD_PART_BYTES, 1):
        looks = iter("12")
        late = partial(lambda looks, self, name: not next(looks, "") and exists(self, name), looks)
        monkeypatch.setattr(Upload, "exists", lambda *arguments, late=late: late(*arguments))
        monkeypatch.setattr(defaults, "UPLOAD_PART_BYTES", part)
        with pytest.raises(sluice.SaveError, match="in the meantime"):
            sluice.save({"w": torch.zeros(1_000_000)}, "s3://models/kept.safetensors")
    assert obstore.get(bucket.store, "kept.safetensors").bytes().to_bytes() == b"kept"
    assert unfinished(bucket) == 0


LARGE = {"first": torch.zeros(1000), "second": torch.zeros(14_000_000)}


def stop(event: sluice.ProgressEvent, *, failure: BaseException | type[BaseException] = KeyboardInterrupt) -> None:
    """Fail when some parts are on their way."""
    if event.done_bytes > 4 * defaults.UPLOAD_PART_BYTES:
        raise failure


def test_an_upload_stays_if_its_manifest_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = obstore.store.MemoryStore()
    monkeypatch.setattr(uploads, "make_store", lambda *_: store)
    gone, target = tmp_path / "gone", "s3://models/stays.pth"
    gone.mkdir()
    with pytest.raises(sluice.SaveError, match="the checkpoint is complete"):
        sluice.save(STATE, target, manifest=gone / "m.json", progress=lambda _: rmtree(gone, ignore_errors=True))
    assert obstore.head(store, "stays.pth")


@pytest.mark.parametrize("name", ["failed", "failed.safetensors", "failed.pth"])
@pytest.mark.parametrize("failure", [KeyboardInterrupt, sluice.SaveError("a reason")])
def test_a_failed_upload_leaves_nothing(bucket: Bucket, name: str, failure: BaseException) -> None:
    how: dict[str, Any] = {"max_shard_size": "5kB"} if name == "failed" else {}
    with pytest.raises(failure if isinstance(failure, type) else type(failure)):
        sluice.save(LARGE, f"s3://models/{name}", progress=partial(stop, failure=failure), **how)
    assert names(bucket, f"{name}/") == set()
    assert name not in names(bucket, "")
    assert unfinished(bucket) == 0


def test_an_upload_that_the_store_ends_is_an_error(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(_store: object, _key: str, pieces: Iterator[bytes], **_: object) -> None:
        next(pieces)
        raise obstore.exceptions.GenericError("the connection was closed")

    monkeypatch.setattr(obstore, "put", put)
    with pytest.raises(sluice.SaveError):
        sluice.save(LARGE, "s3://models/ended.safetensors")
    assert names(bucket, "ended") == set()


def test_an_interrupt_stays_one_if_the_upload_cannot_be_aborted(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(_store: object, _key: str, pieces: Iterator[bytes], **_: object) -> None:
        try:
            list(pieces)
        except Exception:  # noqa: BLE001 - of any class
            raise obstore.exceptions.GenericError("the abort failed") from None

    monkeypatch.setattr(obstore, "put", put)
    with pytest.raises(KeyboardInterrupt):
        sluice.save(LARGE, "s3://models/interrupted.safetensors", progress=stop)


KILLED = """
import os, signal, sys, torch, sluice
def kill(event):
    if event.done_bytes > 20_000_000:
        os.kill(os.getpid(), signal.SIGKILL)
sluice.save({"w": torch.zeros(14_000_000)}, sys.argv[1], progress=kill)
"""


@pytest.mark.usefixtures("fresh_processes")
@pytest.mark.parametrize("name", ["killed.pth", "killed.safetensors"])
def test_a_killed_upload_leaves_no_files_and_no_object(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = fresh_process.run(KILLED, f"s3://models/{name}")
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not list(tmp_path.iterdir())
    assert name not in names(bucket, "")


BOUNDED = """
import sys, torch, sluice
from sluice.testing import assert_peak
state = {f"w{i}": torch.ones(1024, 4096) for i in range(16)}  # 256 MiB
torch.save(state, sys.argv[2])
sluice.save({"w": torch.ones(3_000_000, 3).t()}, sys.argv[1] + "warm.pth", dtype="float16")
with assert_peak((16 + 48) << 20):
    sluice.save(state, sys.argv[1] + "bounded.pth", dtype=torch.bfloat16)
with assert_peak((64 + 32 + 48) << 20):
    sluice.convert(sys.argv[2], sys.argv[1] + "bounded.safetensors")
"""


@pytest.mark.usefixtures("fresh_processes", "bucket")
def test_an_upload_takes_a_few_parts_of_memory(tmp_path: Path) -> None:
    done = fresh_process.run(BOUNDED, "s3://models/", tmp_path / "in.pt")
    assert done.returncode == 0, done.stderr


def test_files_have_the_content_of_local_ones(bucket: Bucket, tmp_path: Path) -> None:
    state = {
        **STATE,
        "empty": torch.empty(0),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "large": torch.randn(5_000_000),
    }
    torch.save({"model": state, "step": 3}, tmp_path / "in.pt")
    for name in ("same.pth", "same.safetensors"):
        sluice.convert(tmp_path / "in.pt", tmp_path / name, key="model")
        target = f"s3://models/{name}"
        planned = sluice.convert(tmp_path / "in.pt", target, key="model", dry_run=True)
        assert name not in names(bucket, "")
        report = sluice.convert(tmp_path / "in.pt", target, key="model", manifest=tmp_path / f"{name}.json")
        assert report.files == planned.files == (target,)
        content = obstore.get(bucket.store, name).bytes().to_bytes()
        assert report.file_bytes == (len(content),)
        (tmp_path / f"uploaded-{name}").write_bytes(content)
        assert sluice.verify(tmp_path / f"uploaded-{name}", manifest=tmp_path / f"{name}.json").ok
    assert content == (tmp_path / "same.safetensors").read_bytes()
    with zipfile.ZipFile(tmp_path / "uploaded-same.pth") as archive:
        assert archive.testzip() is None
    found = torch.load(tmp_path / "uploaded-same.pth", weights_only=True, mmap=True)
    assert_same(found, state)


def test_settings_of_a_remote_reach_the_store(server: Bucket, tmp_path: Path) -> None:
    target = sluice.Remote("s3://models/settings.safetensors", options=server.options)
    with connections_closed():
        assert sluice.save(STATE, target).files == ("s3://models/settings.safetensors",)
        sluice.convert(target, sluice.Remote("s3://models/settings.pth", options=server.options))
        assert_same(torch.load(download(server, "settings.pth", tmp_path), weights_only=True), STATE)
    with pytest.raises(sluice.UnsupportedError, match="only object stores"):
        sluice.save(STATE, sluice.Remote("https://host/a.safetensors"))


@pytest.mark.parametrize(
    ("address", "problem"),
    [("models/a/../b", "no objects with such names"), ("nowhere/a", "bucket does not exist")],
)
def test_addresses_that_stores_refuse(bucket: Bucket, address: str, problem: str) -> None:
    with pytest.raises(sluice.SaveError, match=problem):
        sluice.save(STATE, f"s3://{address}.safetensors")


def test_ranks_are_refused() -> None:
    remote = sluice.Remote("s3://models/a", options={"access_key_id": "a", "secret_access_key": "b"})
    with pytest.raises(sluice.SaveError, match="ranks"):
        sluice.save(STATE, remote, format="dcp")


@pytest.fixture(scope="module", params=["s3rver", "azurite"])
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with SERVERS[request.param](tmp_path_factory.mktemp(request.param)) as bucket:
        yield bucket


def test_other_servers_take_uploads(other: Bucket, tmp_path: Path) -> None:
    state = {"small": torch.arange(5.0), "large": torch.randn(6_000_000)}
    with connections_closed():
        for file in ("m.pth", "m.safetensors"):
            target = sluice.Remote(f"{other.url}{file}", options=other.options)
            sluice.save(state, target)
            with pytest.raises(sluice.SaveError, match="already exists"):
                sluice.save(state, target)
            sluice.save(state, target, overwrite=True)
            (tmp_path / file).write_bytes(obstore.get(other.store, file).bytes().to_bytes())
            assert_same(dict(sluice.load_state_dict(tmp_path / file)), state)
            assert_same(dict(sluice.load_state_dict(target)), state)
        with pytest.raises(KeyboardInterrupt):
            sluice.save(LARGE, sluice.Remote(f"{other.url}failed.pth", options=other.options), progress=stop)
        assert "failed.pth" not in names(other, "")
