"""Direct writes: every byte at its offset, with and without support of the file system."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import safetensors.torch
import torch

import sluice
from sluice import _defaults as defaults
from sluice.engine.staging import StagingPool
from sluice.writing.durable.replacement import Replacement
from sluice.writing.write_queue import Staging
from support.oracles import same
from support.system_calls import force_direct_writes
from support.watching import watch

#: Direct writes of the running test, by offset; the flags of the descriptor tell whether a write is direct.
Calls = list[tuple[int, int]]


@pytest.fixture(autouse=True)
def _direct(monkeypatch: pytest.MonkeyPatch) -> None:
    force_direct_writes(monkeypatch)


def is_direct(descriptor: int) -> bool:
    import fcntl

    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.fixture
def direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Return a list that collects every direct write; skip if the file system does not support them."""
    if not hasattr(os, "O_DIRECT"):
        pytest.skip("this system has no direct writes")
    try:
        os.close(os.open(tmp_path / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no direct writes")
    (tmp_path / "probe").unlink()
    calls: Calls = []

    def note(descriptor: int, data: memoryview, offset: int) -> None:
        if is_direct(descriptor):
            calls.append((offset, len(data)))

    watch(monkeypatch, os, "pwrite", note)
    return calls


def write(path: Path, content: bytes, cuts: list[int], threads: int = 4) -> None:
    """Write a file in pieces, in any order, from several threads."""
    staging = Staging.make(64 << 10)
    pieces = list(zip([0, *cuts], [*cuts, len(content)], strict=True))
    random.Random(len(content)).shuffle(pieces)
    with Replacement(path, overwrite=True) as file:
        file.reserve(len(content), staging.pool)
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(lambda piece: file.write_at(piece[0], content[piece[0] : piece[1]]), pieces):
                pass
        file.commit(nbytes=len(content))


CONTENT = random.Random(0).randbytes(300_001)


@pytest.mark.parametrize("seed", range(6))
def test_pieces_at_any_place_from_any_thread(tmp_path: Path, direct: Calls, seed: int) -> None:
    cuts = sorted(random.Random(seed).sample(range(1, len(CONTENT)), 3 + 10 * seed))
    write(tmp_path / "f", CONTENT, cuts)
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert direct
    assert all(offset % 4096 == 0 and nbytes % 4096 == 0 for offset, nbytes in direct)


def test_a_piece_in_a_buffer_needs_no_second_buffer(tmp_path: Path, direct: Calls) -> None:
    pool = StagingPool(buffer_bytes=64 << 10, count=1, huge_pages=False)
    with Replacement(tmp_path / "f", overwrite=True) as file, pool.lent() as buffer:
        file.reserve(len(CONTENT), pool)
        for start in (0, 1):
            buffer.view[start : start + 40_000] = CONTENT[start * 40_000 :][:40_000]
            writing = Thread(
                target=file.write_at, args=(start * 40_000, buffer.view[start : start + 40_000]), daemon=True
            )
            writing.start()
            writing.join(5)
            assert not writing.is_alive()
        file.commit(nbytes=80_000)
    assert (tmp_path / "f").read_bytes() == CONTENT[:80_000]
    assert direct


@pytest.mark.parametrize("most", [4096, 5000, 3])
def test_direct_writes_that_come_short_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: Calls, most: int
) -> None:
    real = os.pwrite

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        if not is_direct(descriptor):
            return real(descriptor, data, offset)
        direct.append((offset, len(data)))
        other = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY)  # a test cannot make a direct one end in a block
        try:
            return real(other, data[:most], offset)
        finally:
            os.close(other)

    monkeypatch.setattr(os, "pwrite", pwrite)
    write(tmp_path / "f", CONTENT, [100_003, 200_000])
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert direct


@pytest.mark.parametrize("where", ["open", "fstat", "pwrite"])
def test_a_file_system_that_changes_its_mind_is_written_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: Calls, where: str
) -> None:
    refused: list[str] = []

    def refuse(first: Any, flags: Any = 0, *_: object) -> None:
        if flags & os.O_DIRECT if where == "open" else is_direct(first):
            refused.append(where)
            raise OSError(errno.EINVAL, "no direct writes")

    watch(monkeypatch, os, where, refuse)
    write(tmp_path / "f", CONTENT, [150_000], threads=1)
    assert refused == [where]
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f"]


STATE = {
    "bias": torch.arange(7.0),
    "large": torch.arange(100_000.0).view(200, 500),
    "transposed": torch.arange(60_000, dtype=torch.int64).view(200, 300).t(),
    "columns": torch.arange(90_000.0).view(300, 300)[:, ::2],
    "bytes": torch.arange(40_000).to(torch.uint8),
    "last": torch.ones(3),
}


@pytest.mark.parametrize(("staging", "manifest"), [(1 << 20, True), (40_000, False)], ids=["manifest", "plain"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["same", "cast"])
@pytest.mark.parametrize("name", ["f.pth", "f.safetensors"])
def test_saves_hold_what_they_should(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    direct: Calls,
    name: str,
    dtype: torch.dtype | None,
    manifest: bool,
    staging: int,
) -> None:
    monkeypatch.setattr(defaults, "SAVE_STAGING_BYTES", staging)
    monkeypatch.setattr(defaults, "WRITE_BYTES", 50_000)
    hashes = tmp_path / "m.json" if manifest else None
    sluice.save(STATE, tmp_path / name, dtype=dtype, manifest=hashes)
    read = torch.load(tmp_path / name) if name == "f.pth" else safetensors.torch.load_file(tmp_path / name)
    for key, tensor in STATE.items():
        expected = tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
        assert same(read[key].contiguous(), expected.contiguous()), key
    assert sluice.verify(tmp_path / name, manifest=hashes).ok
    assert direct


def test_everything_is_written_before_the_file_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: Calls
) -> None:
    events: list[str] = []
    lock = threading.Lock()

    def noted(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any) -> Any:
            found = real(*args)
            with lock:
                events.append(name)
            return found

        return call

    for name in ("pwrite", "fsync"):
        monkeypatch.setattr(os, name, noted(name))
    sluice.save(STATE, tmp_path / "f.pth")
    assert direct
    assert events.count("fsync") == 2  # the file and its directory
    assert "pwrite" not in events[events.index("fsync") :]
