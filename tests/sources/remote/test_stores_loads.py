"""Checkpoints of each format in a bucket, read by the public functions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import sluice
from support.object_stores import SERVERS, Bucket, connections_closed
from support.whole_checkpoints import MAKERS

obstore = pytest.importorskip("obstore", reason="obstore is not installed: pip install 'sluice[remote]'")


pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch: sparse CSR, quantized tensors


@pytest.fixture(scope="module", params=["moto", "s3rver"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with SERVERS[request.param](tmp_path_factory.mktemp(request.param)) as bucket:
        yield bucket


@pytest.fixture
def bucket(server: Bucket) -> Iterator[Bucket]:
    with connections_closed():
        yield server


@pytest.mark.parametrize("kind", MAKERS)
def test_each_format_is_read_bit_for_bit(kind: str, bucket: Bucket, tmp_path: Path) -> None:
    path = tmp_path / kind
    MAKERS[kind](path)
    if path.is_dir():
        bucket.put_files(kind, path)
    else:
        bucket.put(kind, path.read_bytes())
    remote = bucket.remote(kind)
    with sluice.open(path) as local, sluice.open(remote) as found:
        assert found.format == local.format
        assert found.keys() == local.keys()
        assert all(file.startswith(f"{bucket.url}{kind}") for file in found.files)
    assert sluice.diff(remote, path).same


def test_a_store_of_the_user_is_a_source(tmp_path: Path) -> None:
    store = obstore.store.MemoryStore()
    expected = {"a": torch.arange(50_000.0), "b": torch.ones(3)}
    torch.save(expected, tmp_path / "model.pth")
    obstore.put(store, "dir/model.pth", (tmp_path / "model.pth").read_bytes())
    found = sluice.load_state_dict(sluice.Remote("dir/model.pth", store=store))
    assert all(found[name].equal(expected[name]) for name in expected)
