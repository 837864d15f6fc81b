"""Build the extension with the system's compiler, once for each version of its source, of torch and of the compiler."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

_FOLDER = Path(__file__).parent
_SOURCES = ("kernels.cpp", "registration.cpp", "allocator.cpp", "streams.cpp", "memory.cpp")  # the slowest first
_TORCH = Path(torch.__file__).parent

#: The interfaces of torch's devices change from version to version: the source is checked with this one.
_TORCH_VERSION = "2.13."

#: Without optimization the build takes as long.
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-isystem{_TORCH}/include")
_LINK = (f"-L{_TORCH}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{_TORCH}/lib")

#: Names another folder for the built extension than the user's cache.
_CACHE = "SLUICE_SIMULATED_DEVICE"


def reason_against() -> str | None:
    """Return why the extension cannot be built here; None if it can."""
    if not sys.platform.startswith("linux"):
        return "the simulated device needs Linux"
    if not torch.__version__.startswith(_TORCH_VERSION):
        return f"the simulated device is written for torch {_TORCH_VERSION}x, not {torch.__version__}"
    if shutil.which("g++") is None:
        return "the simulated device needs g++"
    if not (_TORCH / "include").is_dir():
        return "this torch comes without C++ headers"
    return None


def library() -> Path:
    """Return the path of the built extension, which is built if the cache does not have it."""
    cache = Path(os.environ.get(_CACHE) or Path.home() / ".cache" / "sluice-simulated-device")
    cache.mkdir(parents=True, exist_ok=True)
    built = cache / f"simulated_device-{_digest()}.so"
    if built.exists():
        return built
    with (cache / "lock").open("w") as held:  # one process builds, others wait for it
        fcntl.flock(held, fcntl.LOCK_EX)
        if not built.exists():
            _build(built)
    return built


def _digest() -> str:
    compiler = subprocess.run(["g++", "--version"], capture_output=True, check=True).stdout
    digest = hashlib.sha256(compiler + torch.__version__.encode() + " ".join(_FLAGS + _LINK).encode())
    for path in sorted((*_FOLDER.glob("*.cpp"), *_FOLDER.glob("*.h"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _build(built: Path) -> None:
    folder = built.with_suffix(f".{os.getpid()}")
    folder.mkdir()
    try:
        objects = [str(folder / f"{source}.o") for source in _SOURCES]
        # Two at a time: the first takes as long as all others.
        rest = " && ".join(_compile(*each) for each in zip(_SOURCES[1:], objects[1:], strict=True))
        compilers = [_start(_compile(_SOURCES[0], objects[0])), _start(rest)]
        _finish(compilers)
        linked = str(folder / "linked.so")
        _finish([_start(" ".join(("g++ -shared -o", linked, *objects, *_LINK)))])
        os.replace(linked, built)
    finally:
        shutil.rmtree(folder)


def _compile(source: str, target: str) -> str:
    return " ".join(("g++", *_FLAGS, "-c", str(_FOLDER / source), "-o", target))


def _start(command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(command, shell=True, stderr=subprocess.PIPE, text=True)


def _finish(commands: list[subprocess.Popen[str]]) -> None:
    errors = [command.communicate()[1] for command in commands]
    if any(command.returncode for command in commands):
        raise RuntimeError("the simulated device does not compile:\n" + "\n".join(errors))
