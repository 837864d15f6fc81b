"""Prefetches: which bytes are requested, what continues an interrupted one, and what is reported as missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("urllib3", reason="the extra 'remote' is not installed")

import sluice
from sluice import _defaults as defaults
from sluice._progress import ProgressEvent
from sluice.loading.prefetch import prefetch
from support.range_server import RangeServer, status

SHARDS = 3


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    """Return a server of a directory with shards."""
    monkeypatch.setattr(defaults, "REMOTE_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(defaults, "REMOTE_PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(defaults, "CACHE_PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(defaults, "REMOTE_LINE_BYTES", 0)  # the same size for any latency
    state = {f"w{number}": torch.full((1000, 500), number) for number in range(SHARDS)}
    sluice.save(state, tmp_path / "m", format="huggingface", max_shard_size=4_000_000)
    with RangeServer({f"/m/{path.name}": path.read_bytes() for path in (tmp_path / "m").iterdir()}) as running:
        yield running


def location(server: RangeServer, cache: Path, bound: str | None = None) -> sluice.Remote:
    return sluice.Remote(server.url("/m/"), cache=cache, cache_bytes=bound)


def test_all_files_are_cached_and_the_next_load_makes_one_request_for_each(server: RangeServer, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    events: list[ProgressEvent] = []
    report = prefetch(location(server, cache), str(cache), progress=events.append)
    assert report.complete
    assert [file.requested_bytes for file in report.files] == [file.nbytes for file in report.files]
    assert events[-1].done_bytes == events[-1].total_bytes > 0
    server.requests.clear()
    loaded = sluice.load_state_dict(location(server, cache))
    assert all(bool((loaded[f"w{number}"] == number).all()) for number in range(SHARDS))
    assert len(server.requests) == SHARDS + 1  # the index and each shard
    again = prefetch(location(server, cache), str(cache))
    assert [file.requests for file in again.files] == [1] * SHARDS
    assert all(file.path.startswith(server.url("/m/")) for file in again.files)


def test_an_interrupted_prefetch_continues(server: RangeServer, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    server.faults = dict.fromkeys(range(9, 1000), status(403))
    with pytest.raises(sluice.RemoteError):
        prefetch(location(server, cache), str(cache))
    server.faults = {}
    server.requests.clear()
    report = prefetch(location(server, cache), str(cache))
    assert report.complete
    assert sum(file.requested_bytes for file in report.files) < sum(file.nbytes for file in report.files)


def test_what_is_not_cached_is_reported(server: RangeServer, tmp_path: Path) -> None:
    server.validators = "none"
    report = prefetch(location(server, tmp_path / "cache"), str(tmp_path / "cache"))
    assert not report.complete
    assert "does not name its version" in str(report)
    assert f"0 of {SHARDS} files" in str(report)
