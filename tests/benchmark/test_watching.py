"""Memory of watched processes and devices, and its picture."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import pytest

from bench import timeline
from bench.timeline import Sample, Trace, Watcher, draw
from support.waiting import wait_until

MIB = 1 << 20
GIB = 1 << 30


def no_matplotlib(_name: str) -> None:
    raise ImportError("no matplotlib here")


def trace(*device_gib: float) -> Trace:
    samples = [
        Sample(seconds=float(i), host_bytes=i * GIB, device_bytes=int(device * GIB))
        for i, device in enumerate(device_gib)
    ]
    return Trace(title="a load", final_bytes=GIB, samples=tuple(samples))


def test_a_trace_begins_at_the_first_use_of_the_device() -> None:
    assert trace(5.0, 5.0, 5.5, 8.0, 7.0).lines() == ([0.0, 1.0, 2.0], [0.5, 3.0, 2.0], [2.0, 3.0, 4.0])
    assert trace(5.0, 5.0, 8.0, 7.0).device_growth_bytes == 3 * GIB
    assert trace().lines() == ([], [], [])
    assert trace().device_growth_bytes == 0


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that only sleeps."""
    code = "import time; print('ready', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_the_watcher_sees_children_and_the_device(child: subprocess.Popen[bytes]) -> None:
    used = count(10)
    looks: list[int] = []

    def look() -> int:
        looks.append(next(used))
        return looks[-1]

    watcher = Watcher(look, interval_seconds=0.001)
    wait_until(lambda: len(looks) >= 3, "the watcher has looked three times")
    seen = watcher.stop("a load", GIB)
    assert seen.samples[0].device_bytes == 10
    assert seen.device_growth_bytes == len(seen.samples) - 1 >= 2
    assert seen.samples[-1].host_bytes > MIB
    assert [sample.seconds for sample in seen.samples] == sorted(sample.seconds for sample in seen.samples)


def test_without_matplotlib_there_is_a_reason_and_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "import_module", no_matplotlib)
    assert draw(tmp_path / "p.png", [trace(1.0, 2.0)]) == "no picture: no matplotlib here"
    assert not (tmp_path / "p.png").exists()


DRAW = """
import sys
from pathlib import Path
from bench.timeline import Sample, Trace, draw
samples = tuple(Sample(seconds=i, host_bytes=i << 30, device_bytes=i << 29) for i in range(5))
print(repr(draw(Path(sys.argv[1]), [Trace(title="a load", final_bytes=1 << 30, samples=samples)] * 5)))
"""


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    if find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed")
    # In a separate process: matplotlib keeps its fonts open.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "MPLCONFIGDIR": str(tmp_path)}
    picture = tmp_path / "p.png"
    done = subprocess.run([sys.executable, "-c", DRAW, picture], env=environment, capture_output=True, check=True)
    assert done.stdout == b"''\n"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_nothing_watched_draws_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "import_module", lambda _: None)
    assert draw(tmp_path / "p.png", []) == "no picture: nothing was watched"
