"""The requests of loads from a server, planned and made, and those that the server has counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import sluice
from support.range_server import RangeServer, status

pytest.importorskip("urllib3", reason="urllib3 is not installed: pip install 'sluice[remote]'")


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("remote") / "model.safetensors"
    sluice.save(model(), path)
    return path.read_bytes()


@pytest.fixture
def server(content: bytes) -> Iterator[RangeServer]:
    with RangeServer({"/model.safetensors": content}) as server:
        yield server


def test_the_plan_and_the_report_have_the_requests_of_the_server(server: RangeServer, content: bytes) -> None:
    where = server.url("/model.safetensors")
    plan = sluice.plan(model(), where)
    assert plan.remote is not None
    assert (plan.remote.header_requests, plan.remote.header_bytes) == (len(server.requests), 65536)
    assert plan.remote.planned_bytes == plan.read_bytes
    assert plan.remote.requests is None
    assert plan.remote.describe() in str(plan).splitlines()
    assert json.loads(json.dumps(plan.to_json()))["remote"]["planned_requests"] == plan.remote.planned_requests

    server.requests.clear()
    remote = sluice.load_into(model(), where).remote
    assert remote is not None
    assert (remote.header_requests, remote.planned_requests) == (1, plan.remote.planned_requests)
    assert remote.requests == len(server.requests) - 1 == plan.remote.planned_requests
    # The first request has brought the start of the first tensor too.
    assert remote.received_bytes == len(content) - 65536


def test_repeated_requests_count(server: RangeServer) -> None:
    expected = sluice.load_into(model(), server.url("/model.safetensors")).remote
    server.faults = {len(server.requests) + 1: status(503)}
    report = sluice.load_into(model(), server.url("/model.safetensors"))
    assert report.remote is not None
    assert expected is not None
    assert report.remote.requests == (expected.requests or 0) + 1
    assert report.remote.received_bytes == expected.received_bytes
    assert f"{expected.planned_requests:,} and " in str(report)


def test_local_files_have_no_requests(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert sluice.plan(model(), path).remote is None
    report = sluice.load_into(model(), path)
    assert report.remote is None
    assert "remote:" not in str(report)


def test_an_open_checkpoint_counts_what_it_has_read(server: RangeServer) -> None:
    with sluice.open(server.url("/model.safetensors")) as checkpoint:
        checkpoint["3.weight"][:2].read()
        found = sluice.plan(model(), checkpoint).remote
        assert found is not None
        assert found.header_requests == 2
        assert torch.equal(sluice.load_state_dict(checkpoint)["3.weight"][:2], checkpoint["3.weight"][:2].read())
