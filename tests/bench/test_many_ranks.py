"""The simulation of many ranks: headers without data, and the limit that a load meets first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sluice
from bench.many_ranks import STYLES, Store, limits, write_headers
from sluice.benchmark.llama import LLAMA_TINY, llama
from sluice.reports.ranks import RanksPlan

STORE = Store(total=1e12, host=1e12, requests=1e9, latency=1e-9, parallel=1)


@pytest.fixture
def ranks(tmp_path: Path) -> RanksPlan:
    with torch.device("meta"):
        model = llama(**LLAMA_TINY).to(torch.bfloat16)
    write_headers(tmp_path, model, 3)
    mesh = {"dp_replicate": 2, "tp": 2}
    found = sluice.plan(model, tmp_path, mesh=mesh, ranks_per_host=2, tp_plan=STYLES).ranks
    assert found is not None
    assert len(found.files) == 3
    assert found.needed_bytes >= sum(tensor.nbytes for tensor in model.state_dict().values())
    return found


@pytest.mark.parametrize(
    ("slow", "first"),
    [
        ({"total": 1.0}, "bandwidth of the store"),
        ({"host": 1.0}, "bandwidth of a host"),
        ({"requests": 1.0}, "requests per second"),
        ({"latency": 1e6}, "latency"),
    ],
)
def test_the_slowest_part_is_the_first_limit(ranks: RanksPlan, slow: dict[str, float], first: str) -> None:
    parts = {"total": STORE.total, "host": STORE.host, "requests": STORE.requests, "latency": STORE.latency, **slow}
    found = limits(ranks, Store(**parts, parallel=1), once_per_host=False)
    assert max(found, key=lambda limit: found[limit]) == first


def test_hosts_that_fetch_for_their_ranks_need_fewer_bytes(ranks: RanksPlan) -> None:
    each, once = (limits(ranks, STORE, once_per_host=once)["bandwidth of the store"] for once in (False, True))
    assert once < each
    assert once * STORE.total == 2 * ranks.needed_bytes
