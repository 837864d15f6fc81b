"""Remote checkpoints cost few requests: at most three to open a file, and none for the headers in front of tensors."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

import sluice
from sluice import _defaults as defaults
from sluice._errors import FormatError
from support import distributed
from support.range_server import RangeServer
from support.torch_files import saved

pytest.importorskip("urllib3", reason="urllib3 is not installed: pip install 'sluice[remote]'")

#: Each tensor is larger than what is read together with its neighbors.
LARGE = {f"w{number}": torch.full((40, 8_000), float(number)) for number in range(8)}

#: With their names they make a pickle, a directory and a header that are larger than the first request.
SMALL = {f"model.layers.{number}.weight": torch.full((3, 5), float(number)) for number in range(2_000)}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    monkeypatch.setattr(defaults, "REMOTE_LINE_BYTES", 0)  # the same size for any latency
    with RangeServer({}) as server:
        yield server


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranges with a gap between them be separate requests."""
    monkeypatch.setattr(defaults, "REMOTE_GAP_BYTES", 0)


def served(server: RangeServer, content: bytes) -> sluice.Remote:
    server.files["/model"] = content
    return sluice.Remote(server.url("/model"))


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize(("legacy", "opening"), [(False, 2), (True, 1)], ids=["zip", "legacy"])
def test_headers_come_with_the_tensors(server: RangeServer, legacy: bool, opening: int) -> None:
    where = served(server, saved(LARGE, legacy=legacy))
    with sluice.open(where) as checkpoint:
        assert len(server.requests) == opening
        found = sluice.load_state_dict(checkpoint)
    assert all(torch.equal(found[name], LARGE[name]) for name in LARGE)
    assert len(server.requests) == opening + len(LARGE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["in place", "staged"])
def test_tensors_that_follow_each_other_share_requests(server: RangeServer, dtype: torch.dtype) -> None:
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(40, 8_000)) for name in LARGE}).to(dtype)
    report = sluice.load_into(model, served(server, saved(LARGE)))
    assert all(torch.equal(model[name].data, LARGE[name].to(dtype)) for name in LARGE)
    reads = report.remote
    assert reads is not None
    # 8 MiB for each request, and 9.8 MiB of tensors.
    assert (reads.header_requests, reads.planned_requests, reads.requests) == (2, 2, 2)
    assert len(server.requests) == 4


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_slice_far_from_its_header_checks_the_header(server: RangeServer, legacy: bool) -> None:
    content = bytearray(saved(LARGE, legacy=legacy))
    with sluice.open(served(server, bytes(content))) as checkpoint:
        server.requests.clear()
        assert torch.equal(checkpoint["w5"][30:31].read(), LARGE["w5"][30:31])
        assert len(server.requests) <= 2  # one if it is the first tensor of the file
    data = content.index(struct.pack("<f", 5.0) * 1000)
    at = data - 8 if legacy else content.rindex(b"PK\3\4", 0, data)
    content[at : at + 4] = b"else"
    with sluice.open(served(server, bytes(content))) as checkpoint, pytest.raises(FormatError):
        checkpoint["w5"][30:31].read()


@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
def test_many_small_tensors_take_four_requests(server: RangeServer, kind: str) -> None:
    content = safetensors.torch.save(SMALL) if kind == "safetensors" else saved(SMALL, legacy=kind == "legacy")
    with sluice.open(served(server, content)) as checkpoint:
        assert len(server.requests) <= 3
        found = sluice.load_state_dict(checkpoint)
    assert all(torch.equal(found[name], SMALL[name]) for name in SMALL)
    assert len(server.requests) <= 4


def test_a_directory_takes_one_request_for_the_index_and_one_for_each_shard(
    server: RangeServer, tmp_path: Path
) -> None:
    sluice.save(LARGE, tmp_path / "model", format="huggingface", max_shard_size="3MB")
    server.files = {f"/model/{path.name}": path.read_bytes() for path in (tmp_path / "model").iterdir()}
    shards = sum(name.endswith(".safetensors") for name in server.files)
    assert shards > 2
    index = "/model/model.safetensors.index.json"
    for url in (index, "/model/"):
        server.requests.clear()
        with sluice.open(server.url(url)) as checkpoint:
            assert checkpoint.keys() == LARGE.keys()
        assert sum(request.path == index for request in server.requests) == 1
        assert url != index or len(server.requests) <= shards + 2


@pytest.mark.usefixtures("apart")
def test_the_headers_of_items_take_one_request_each(server: RangeServer, tmp_path: Path) -> None:
    # Chunks that are larger than what is read together.
    whole = {f"layers.{number}": torch.randn(80, 800) for number in range(6)}
    stored = {name: distributed.rows(tensor, 2, files=2) for name, tensor in whole.items()}
    # A chunk of the same size and kind as the others, whose elements are stored column by column.
    columns = whole["layers.3"][:40].t().contiguous().t()
    first = replace(stored["layers.3"].chunks[0], item=distributed.item(columns))
    stored["layers.3"] = replace(stored["layers.3"], chunks=[first, *stored["layers.3"].chunks[1:]])
    distributed.write(tmp_path / "model", stored, {f"value {number}": number for number in range(100)})
    server.files = {f"/model/{path.name}": path.read_bytes() for path in (tmp_path / "model").iterdir()}
    with sluice.open(server.url("/model/.metadata")) as checkpoint:
        opened = len(server.requests)
        assert torch.equal(checkpoint["layers.3"][1:6, 7].read(), whole["layers.3"][1:6, 7])
        assert len(server.requests) == opened + 1
        server.requests.clear()
    found = sluice.load_state_dict(server.url("/model/.metadata"))
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    items = 2 * len(whole)
    assert len(server.requests) <= len(server.files) + 1 + (items + 2) + items
