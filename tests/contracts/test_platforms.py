"""macOS and Windows, simulated: what these systems lack is removed from a new interpreter before sluice is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

#: Removes what the platform lacks, once the libraries that were built for this one are imported.
_SIMULATE = """
import builtins, mmap, os, sys
import psutil, torch, torch.testing, numpy, tempfile, subprocess, multiprocessing.util, http.server, ssl, shutil, uuid
import click, rich.console, safetensors.torch, msgspec, ctypes, socket, platform, asyncio, concurrent.futures.process
try:
    import urllib3
except ImportError:
    pass
system = sys.argv[1]
gone = {os: "O_DIRECT preadv pwritev posix_fadvise memfd_create sched_getaffinity RWF_NOWAIT splice "
            "pidfd_open copy_file_range".split(),
        mmap: [name for name in dir(mmap) if name.startswith("MADV_")]}
if system == "win32":
    gone[os] += ("O_NOFOLLOW O_DIRECTORY O_CLOEXEC O_NONBLOCK pread pwrite readv writev statvfs geteuid getuid fork "
                 "fchmod fchown mkfifo sync O_SYNC O_DSYNC register_at_fork").split()
    gone[mmap] += [name for name in dir(mmap) if name.startswith(("MAP_", "PROT_"))]
    sys.modules["fcntl"] = sys.modules["resource"] = None
    library = ctypes.CDLL.__init__
    ctypes.CDLL.__init__ = lambda self, name, *rest, **more: library(self, name + "", *rest, **more)  # not None
for module, names in gone.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)

def hidden(function):
    def opened(path, *arguments, **settings):
        ours = sys._getframe(1).f_globals.get("__name__", "").startswith("sluice")
        if ours and isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(("/proc", "/sys/")):
            raise FileNotFoundError(path)
        return function(path, *arguments, **settings)
    return opened

builtins.open, os.open = hidden(open), hidden(os.open)
replace = os.replace
def held(source, target, **settings):
    import gc
    gc.collect()
    for each in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{each}")
        except FileNotFoundError:
            continue
        assert name not in map(os.path.abspath, (source, target)), f"Windows moves no open file: {name}"
    return replace(source, target, **settings)
unlink = os.unlink
def removed(path, **settings):
    held(path, path) if isinstance(path, str) and os.path.exists(path) else None
    return unlink(path, **settings)
if system == "win32":
    os.replace = os.rename = held
    os.unlink = os.remove = removed
sys.platform = system
"""

_USE = """
import sluice
from sluice import _defaults
from sluice.cli import main

def net():
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))

def same(state):
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())

model = net()
for name in ("a.pth", "a.safetensors", "a"):
    for _ in range(2):
        sluice.save(model, name, overwrite=True)
    same(sluice.load_state_dict(name))
    for place in ("copy", "map"):
        other = net()
        sluice.load_into(other, name, place=place)
        same(other.state_dict())
    del other
    sluice.plan(model, name)
    assert sluice.verify(name).ok
sluice.convert("a.pth", "b.safetensors")
assert sluice.diff("a.pth", "b.safetensors").same
large = {"w": torch.arange(20_000_000.0)}
sluice.save(large, "large.pth")
assert torch.equal(sluice.load_state_dict("large.pth")["w"], large["w"])
for command in (["inspect", "a.pth"], ["plan", "a.pth"], ["doctor"]):
    main(command, standalone_mode=False)
_defaults.STREAMED_BYTES, _defaults.RECYCLED_STEP_BYTES = 1, 4096
with sluice.empty_init():
    torch.nn.Linear(1000, 1000)  # large enough that freed memory is returned to the system
    running = net()
with torch.inference_mode(), sluice.stream(running, "a.pth", memory="40KiB"):
    assert torch.equal(running(torch.ones(1, 64)), model(torch.ones(1, 64)))
with open("a.pth", "rb") as file:
    same(sluice.load_state_dict(file))
if "urllib3" in sys.modules:
    from support.range_server import RangeServer
    with open("a.pth", "rb") as file, RangeServer({"/a.pth": file.read()}) as server:
        for _ in range(2):
            same(sluice.load_state_dict(sluice.Remote(server.url("/a.pth"), cache="cache")))
print("done")
"""


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_every_verb_works_without_what_the_platform_lacks(tmp_path: Path, system: str) -> None:
    tests = Path(__file__).parents[1]
    code = f"{_SIMULATE}\nsys.path.insert(0, {str(tests)!r})\n{_USE}"
    done = subprocess.run(
        [sys.executable, "-c", code, system], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr
