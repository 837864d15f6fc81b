"""All hostile files in one process that may use 64 MiB in addition to the interpreter and the library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.hostile_files import BOMBS, CASES

#: Processor time for one file, in seconds: a hundred times that of the slowest. The process is killed after it.
SECONDS = 5

CHILD = """
import json, resource, sys, time
import sluice

verb, room, seconds = sys.argv[1], *map(int, sys.argv[2:])
if verb == "load":
    import torch
with open("/proc/self/statm") as file:
    taken = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + room, taken + room))
for path in sys.stdin.read().splitlines():
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + seconds, resource.RLIM_INFINITY))
    try:
        if verb == "open":
            with sluice.open(path) as checkpoint:
                found = f"opened {len(checkpoint)}"
        else:
            found = f"loaded {len(sluice.load_state_dict(path, memory=sluice.MemoryLimits(staging='1MiB')))}"
    except sluice.SluiceError as error:
        found = type(error).__name__ if str(error).startswith(path) else f"{error} does not name the file"
    except BaseException as error:
        found = repr(error)
    print(json.dumps([path, found]), flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and a limit on virtual memory")
@pytest.mark.parametrize("verb", ["open", pytest.param("load", marks=pytest.mark.long)])
def test_small_files_take_little_memory_and_time(tmp_path: Path, verb: str) -> None:
    files = {name: (case.content, case.kind.__name__) for name, case in CASES.items()}
    files |= {name: (content, "LimitError") for name, content in BOMBS.items()}
    expected = {}
    for number, (content, error) in enumerate(files.values()):
        path = tmp_path / f"{number}.bin"
        path.write_bytes(content)
        expected[str(path)] = error
    room = (64 if verb == "open" else 64 + 72 + 1) << 20  # a reader takes 72 MiB of virtual memory
    child = subprocess.run(
        [sys.executable, "-c", CHILD, verb, str(room), str(SECONDS)],
        input="\n".join(expected),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert dict(json.loads(line) for line in child.stdout.splitlines()) == expected, child.stderr
