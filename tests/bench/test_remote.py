"""The benchmark of remote loads: its server's answers, its line, the order of its loads and its tables."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench._raw_http import Span, spans
from bench._remote_methods import CONTENDERS, METHODS, RAW
from bench._remote_server import Answer, Link, answer_to, parse_request
from bench.remote import Cell, Run, default_cells, missing, section

_CELL = Cell(kind="pth", dtype="float32", latency=5.0, gbit=10.0)


def _answer(root: Path, target: str, **headers: str) -> Answer:
    lines = [f"GET {target} HTTP/1.1", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    return answer_to(parse_request("\r\n".join(lines).encode()), root)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket/a&b").write_bytes(bytes(100))
    return tmp_path


@pytest.mark.parametrize(
    ("asked", "begin", "nbytes"),
    [("bytes=10-19", 10, 10), ("bytes=90-", 90, 10), ("bytes=90-200", 90, 10), ("bytes=-5", 95, 5)],
)
def test_ranges(root: Path, asked: str, begin: int, nbytes: int) -> None:
    found = _answer(root, "/bucket/a%26b", Range=asked)
    assert (found.status, found.begin, found.nbytes) == ("206 Partial Content", begin, nbytes)
    assert found.headers["Content-Range"] == f"bytes {begin}-{begin + nbytes - 1}/100"


def test_refused_requests(root: Path) -> None:
    assert _answer(root, "/bucket/a%26b", Range="bytes=100-").status.startswith("416")
    assert _answer(root, "/bucket/a%26b", If_Match='"other"').status.startswith("412")
    assert _answer(root, "/bucket/../secret").status.startswith("404")


def test_a_bucket_is_listed(root: Path) -> None:
    assert b"<Key>a&amp;b</Key>" in _answer(root, "/bucket?list-type=2&prefix=a").content
    assert b"<Key>" not in _answer(root, "http://host/bucket/?list-type=2&prefix=x").content


def test_all_connections_share_the_rate() -> None:
    pauses: list[float] = []
    link = Link(1000.0, clock=lambda: 100.0, sleep=pauses.append)
    for _ in range(3):
        link.wait(500)
    assert pauses == pytest.approx([0.498, 0.998, 1.498])


def test_requests_follow_each_other_in_memory() -> None:
    assert spans([("a", 5), ("b", 2)], 4) == [Span("a", 0, 4, 0), Span("a", 4, 1, 4), Span("b", 0, 2, 5)]


def test_peers_run_on_one_network_and_it_comes_first() -> None:
    cells = default_cells(("pth",), ("float32", "bfloat16"), (0.0, 5.0, 50.0), (1.0, 10.0))
    assert cells[0] == (_CELL, tuple(METHODS))
    assert {cell.dtype for cell, names in cells if RAW in names} == {"float32"}
    assert all(set(names) <= set(CONTENDERS) for cell, names in cells if (cell.gbit, cell.latency) != (10.0, 5.0))
    assert len(cells) == 12


def test_a_later_call_goes_on_and_does_not_repeat_failures() -> None:
    cells = [(_CELL, (RAW, "sluice http", "fsspec file"))]
    done = [
        Run(cell=_CELL, method=RAW, seconds=1.0),
        Run(cell=_CELL, method="fsspec file", problem="killed"),
    ]
    left = [name for _, name in missing(cells, (), done, 2)]
    assert left == ["sluice http", "sluice http", RAW]


def test_the_table_compares_with_the_raw_client_of_the_network() -> None:
    other = Cell(kind="pth", dtype="bfloat16", latency=5.0, gbit=10.0)
    figures = {"seconds": 3.0, "cpu": 1.5, "growth": (10 << 20) + 50, "needed": 100, "finished": 50, "requests": 4}
    raw = Run(cell=_CELL, method=RAW, seconds=2.0)
    ours = msgspec.convert(
        {"cell": msgspec.to_builtins(other), "method": "sluice http", **figures, "received": 101}, Run
    )
    absent = Run(cell=other, method="s3torchconnector", problem="not installed: s3torchconnector")
    assert section([ours, raw]).rows[0][-7:] == ("3.00", "1.50", "10", "1.5", "4", "1.010", "")
    assert section([raw, ours, absent]).rows[-1][-7:] == (*("-",) * 6, "not installed: s3torchconnector")
