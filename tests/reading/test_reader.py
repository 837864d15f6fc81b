"""Reads of one checkpoint that share a session, of which failures spoil no other; and downloads before data is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch

import sluice
from sluice import _defaults as defaults
from sluice._errors import ReadError
from sluice._progress import ProgressEvent
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.engine.running_plan import RunningPlan, SessionEndedError
from sluice.reading.reader import CheckpointReader, fill_caches
from sluice.reading.transfer import plan_transfer
from sluice.records import Request
from sluice.sources.local import LocalFile
from support.cached_objects import entries
from support.range_server import RangeServer

STATE = {"large": torch.arange(200_000.0), "small": torch.arange(50_000.0)}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    pytest.importorskip("urllib3", reason="the extra 'remote' is not installed")
    monkeypatch.setattr(defaults, "CACHE_PIECE_BYTES", 1 << 16)
    with RangeServer({"/m.safetensors": safetensors.torch.save(STATE)}) as running:
        yield running


def kept(cache: Path) -> int:
    return len(entries(cache)) if cache.exists() else 0


@pytest.mark.parametrize(("name", "files"), [("small", 0), ("large", 1)])
def test_a_file_is_downloaded_if_half_of_it_is_needed(
    server: RangeServer, tmp_path: Path, name: str, files: int
) -> None:
    with sluice.open(sluice.Remote(server.url("/m.safetensors"), cache=tmp_path / "cache")) as checkpoint:
        assert torch.equal(checkpoint[name].read(), STATE[name])
    assert kept(tmp_path / "cache") == files


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(lambda source, _: sluice.load_state_dict(source), id="load_state_dict"),
        pytest.param(lambda source, _: sluice.verify(source), id="verify"),
        pytest.param(lambda source, _: sluice.diff(source, source), id="diff"),
        pytest.param(lambda source, path: sluice.convert(source, path / "copy.pth", overwrite=True), id="convert"),
    ],
)
def test_whole_files_are_downloaded_once_by(
    server: RangeServer, tmp_path: Path, work: Callable[[sluice.Remote, Path], object]
) -> None:
    source = sluice.Remote(server.url("/m.safetensors"), cache=tmp_path / "cache")
    work(source, tmp_path)
    assert kept(tmp_path / "cache") == 1
    server.requests.clear()
    work(source, tmp_path)
    assert all(request.headers["Range"] == "bytes=0-65535" for request in server.requests)


def test_of_a_file_that_several_ranks_read_any_part_is_enough(server: RangeServer, tmp_path: Path) -> None:
    looks: list[None] = []
    source = sluice.Remote(server.url("/m.safetensors"), cache=tmp_path / "cache")
    with OpenCheckpoint.open(source) as checkpoint:
        entry = checkpoint.entries["small"]
        request = Request(name="small", entry=entry, dtype=entry.dtype, device="cpu", stride=entry.stride)
        plan = plan_transfer(checkpoint, [request]).plan
        fill_caches(checkpoint.sources, plan)
        assert not kept(tmp_path / "cache")
        fill_caches(checkpoint.sources, plan, look=lambda: looks.append(None))
    assert kept(tmp_path / "cache") == 1
    assert looks


def test_a_download_has_progress_of_its_own(server: RangeServer, tmp_path: Path) -> None:
    events: list[ProgressEvent] = []
    source = sluice.Remote(server.url("/m.safetensors"), cache=tmp_path / "cache")
    sluice.load_state_dict(source, progress=events.append)
    total = len(server.files["/m.safetensors"])
    assert [event.done_bytes for event in events if event.total_bytes == total][-1] == total
    assert events[-1].done_bytes == events[-1].total_bytes < total


@pytest.mark.parametrize("bound", [None, 1])
def test_progress_of_a_download_ends_if_a_file_is_there_or_refused(
    server: RangeServer, tmp_path: Path, bound: int | None
) -> None:
    server.files["/n.safetensors"] = safetensors.torch.save({"other": STATE["large"]})
    events: list[ProgressEvent] = []
    urls = [server.url(f"/{name}.safetensors") for name in "mn"]
    with sluice.open([sluice.Remote(url, cache=tmp_path / "cache", cache_bytes=bound) for url in urls]) as checkpoint:
        checkpoint["large"].read()
        fill_caches(checkpoint.sources, progress=events.append)
    assert events[-1].done_bytes == events[-1].total_bytes == sum(map(len, server.files.values()))


def test_a_read_is_repeated_if_its_session_ended_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"a": torch.randn(500_000), "b": torch.randn(500_000)}
    torch.save(tensors, tmp_path / "f.pt")
    with OpenCheckpoint.open(tmp_path / "f.pt") as checkpoint, CheckpointReader(checkpoint) as reader:
        pending = reader.start([checkpoint.entries["b"]])

        def ended(_: RunningPlan) -> None:
            monkeypatch.undo()
            raise SessionEndedError("another plan failed")

        monkeypatch.setattr(RunningPlan, "wait", ended)
        assert torch.equal(pending()[0], tensors["b"])


def test_a_reader_goes_on_after_a_failed_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(500_000)
    torch.save({"a": tensor}, tmp_path / "f.pt")
    with OpenCheckpoint.open(tmp_path / "f.pt") as checkpoint, CheckpointReader(checkpoint) as reader:
        entry = checkpoint.entries["a"]
        checkpoint.locate(entry.storages)
        with monkeypatch.context() as patch:
            patch.setattr(LocalFile, "read_into", mock.Mock(side_effect=ReadError("broken", file="f", offset=0)))
            with pytest.raises(ReadError, match="broken"):
                reader.read([entry])
        assert torch.equal(reader.read([entry])[0], tensor)
