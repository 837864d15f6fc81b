"""Memory of watched processes, and the traces for charts."""

from __future__ import annotations

import subprocess
import sys

from sluice.benchmark.records import Trace
from sluice.benchmark.watching import Watcher, thin

MIB = 1 << 20

_GROW = """
import sys
print("ready", flush=True)
sys.stdin.readline()
kept = b"x" * (64 << 20)
print("grown", flush=True)
sys.stdin.readline()
"""


def test_growth_of_a_process_and_of_a_device_is_seen() -> None:
    used = [100]
    with subprocess.Popen([sys.executable, "-c", _GROW], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        watcher = Watcher(process.pid, device_used=lambda: used[0])
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        used[0] = 350
        peaks, trace = watcher.stop(exact_peak=False)
        process.kill()
    assert 64 * MIB <= peaks["anon_bytes"] <= peaks["total_bytes"] < 80 * MIB
    assert trace.anon[0] == trace.device[0] == 0
    assert trace.device[-1] == 250
    assert trace.seconds[-1] > 0


def test_a_thin_trace_keeps_ends_and_peaks() -> None:
    count = 1000
    host, device = [0] * count, [0] * count
    host[501], device[733] = 9, 8
    nothing = (0,) * count
    trace = Trace(
        seconds=tuple(map(float, range(count))), anon=tuple(host), file=nothing, shmem=nothing, device=tuple(device)
    )
    thinned = thin(trace, moments=50)
    assert len(thinned.seconds) <= 2 * 50 + 2
    assert (thinned.seconds[0], thinned.seconds[-1]) == (0.0, 999.0)
    assert (max(thinned.total()), max(thinned.device)) == (9, 8)
    assert thin(thinned, moments=1000) is thinned
